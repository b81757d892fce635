"""Starts and ends of engines: what is refused, and what a person sees."""
