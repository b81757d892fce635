"""Weights in codes: of checkpoints, and rounded at the load."""
