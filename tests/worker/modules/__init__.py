"""Modules that replace transformers' own."""
