"""How the core finds and refuses requests that crash workers."""
