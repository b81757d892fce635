"""KV blocks outside the worker: they are written alongside the steps, and read back."""
