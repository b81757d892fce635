"""Tools that only developers run."""
