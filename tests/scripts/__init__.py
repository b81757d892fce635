"""Commands around the processes."""
