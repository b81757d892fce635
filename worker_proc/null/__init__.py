"""A runner without a model, which checks every step that it gets."""
