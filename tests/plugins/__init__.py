"""Plugins of pytest: which tests run, their order and processes, and what is done meanwhile."""
