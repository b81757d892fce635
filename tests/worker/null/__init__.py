"""The runner without a model."""
