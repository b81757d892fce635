"""KV tensors: how layers are grouped and where blocks are stored."""
