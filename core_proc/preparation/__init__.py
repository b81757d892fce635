"""What the workers prepare before a request is admitted: its grammar and its adapter."""
