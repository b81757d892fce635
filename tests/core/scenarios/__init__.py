"""Worked examples: a setting, and the tokens that each request is granted step by step.

Docstrings state where vLLM decides otherwise.
"""
