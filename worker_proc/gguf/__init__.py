"""GGUF files: their header, and their tensors as the weights of a model of transformers."""
