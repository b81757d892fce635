"""What is measured and proven once, when a model has been loaded."""
