"""Every family of models that is served: small checkpoints, and what is verified with them."""
