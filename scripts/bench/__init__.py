"""Benchmarks of a running engine and of the scheduler."""
