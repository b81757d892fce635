"""LoRA adapters: their files, their matrices in memory, and the rows that they change."""
