"""Starts the processes of an engine, watches them, and replaces those that die or hang."""
