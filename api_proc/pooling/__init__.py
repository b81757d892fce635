"""Routes for vectors, scores and labels, which the worker pools from hidden states."""
