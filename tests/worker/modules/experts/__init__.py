"""Mixtures of experts that replace transformers' own."""
