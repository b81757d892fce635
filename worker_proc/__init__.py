"""The computing process: holds the model and its KV cache, and obeys the core."""
