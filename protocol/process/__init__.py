"""What processes share: starting, watching and stopping children, and their own runtime."""
