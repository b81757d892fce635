"""Tests that need CUDA; skipped without it."""
