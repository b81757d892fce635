"""EngineCore: requests, tokens and blocks; nothing of text or tensors."""
