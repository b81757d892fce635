"""Compiled kernels: their build, and their products."""
