"""LoRA adapters in the API: their names, which all API processes share, and the admin routes."""
