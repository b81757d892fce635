"""The KV cache: blocks, prefix cache, swap, and the events that describe it."""
