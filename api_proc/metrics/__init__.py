"""Prometheus metrics: what this process counts, what the core reports, and what is exposed."""
