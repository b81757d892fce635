"""The start of a worker: imports, refusals, announcement, zygote."""
