"""The computing process: holds the model and its KV cache, and executes the core's steps."""
