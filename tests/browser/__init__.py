"""The page in a real browser: `scripts/test tests/browser -m slow`."""
