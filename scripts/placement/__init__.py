"""Places engines on the machines of a Ray cluster: `--ray`."""
