"""Grammars: their compilation beside the worker, their texts, and constrained outputs."""
