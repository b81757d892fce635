"""Plugins of pytest: the order and the processes in which tests run, and what is done meanwhile."""
