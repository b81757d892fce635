"""Tests, one folder per package; system/ runs real processes, gpu/ needs CUDA."""
