"""Checkpoints whose weights are stored as codes: a file for each format, and shared parts."""
