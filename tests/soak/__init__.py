"""A long run with kills and disconnects that looks for leaks: `python -m tests.soak --help`."""
