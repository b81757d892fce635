"""Several API processes of one engine."""
