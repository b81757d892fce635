"""The wire, the settings, the ledger."""
