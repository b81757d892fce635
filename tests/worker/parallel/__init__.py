"""Models that are divided among ranks and stages."""
