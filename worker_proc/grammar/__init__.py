"""Structured output: grammars are proven beside the worker, compiled in it, and become masks."""
