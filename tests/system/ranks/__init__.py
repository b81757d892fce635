"""Models that are divided among workers."""
