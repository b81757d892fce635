"""KV blocks outside the worker: they are written beside the steps, and read back."""
