"""What the core does about requests that crash workers."""
