"""Divides the matrices, heads and states of a model among ranks (tensor parallelism)."""
