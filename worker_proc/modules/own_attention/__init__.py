"""Models whose own code computes attention: observed, proven, and computed over the paged cache."""
