"""Checkpoints whose weights are stored as codes: one file for each format, and what they share."""
