"""Conversion of text to token ids and back."""
