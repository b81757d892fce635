"""Python programs that embed an engine."""
