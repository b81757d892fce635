"""Checkpoint directories that stand for GGUF files: configuration and tokenizer."""
