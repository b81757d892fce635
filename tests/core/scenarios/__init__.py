"""Worked examples: a setting, and the tokens that each request is granted step by step.

Docstrings begin with the number that an example has in the table of scenarios for schedulers of
this kind (S1 to S42), and state differences from vLLM. S38 is in `test_depth.py`.
"""
