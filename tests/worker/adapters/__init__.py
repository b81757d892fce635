"""Adapters: their service, their rows in a step, and PEFT's own files."""
