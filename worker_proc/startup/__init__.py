"""How a worker starts: alone, or forked by the zygote from what it has loaded."""
