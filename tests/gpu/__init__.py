"""What needs CUDA: skipped without it."""
