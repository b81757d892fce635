"""Chaos: kills processes of a real engine and compares every stream with a run without faults."""
