"""Structured output: grammars are proven alongside the worker, compiled in it, and become masks."""
