"""What computes in place of modules of transformers, each proven against its own module."""
