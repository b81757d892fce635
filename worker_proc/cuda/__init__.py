"""Triton kernels and what runs them on a CUDA device; imported only where one is used."""
