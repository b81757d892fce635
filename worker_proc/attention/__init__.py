"""Attention over a paged KV cache, behind the interface that transformers models call."""
