"""Batch files in OpenAI's format: requests from one file, answers into another."""
