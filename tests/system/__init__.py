"""Whole engines of real processes."""
