"""Attention on the CPU: kernels, what a model's own code attends to, and proofs."""
