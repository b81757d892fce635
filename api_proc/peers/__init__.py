"""What the API processes of one engine do for each other: forwarding, sums, shared counters."""
