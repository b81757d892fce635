"""Processes that die, hang, pause or restart under load."""
