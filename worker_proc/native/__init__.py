"""Kernels in C++ for the CPU: optional, compiled once per machine, called through ctypes."""
