"""GGUF files: headers, blocks, keys, tokenizers, and models that are made of them."""
