"""Commands that start, watch and measure engines, and the processes that they need besides."""
