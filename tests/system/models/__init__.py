"""Models of every kind in real processes."""
