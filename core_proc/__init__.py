"""EngineCore: it handles requests, tokens and blocks, and knows nothing of text or tensors."""
