"""Mixtures of experts and their routers, computed by the native kernels."""
