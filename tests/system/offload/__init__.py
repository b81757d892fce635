"""KV blocks and states outside the workers."""
