"""The KV cache: pools, groups, windows, codes, and tables of states."""
