"""Checkpoints: what is loaded, proven, kept for the next start, or refused."""
