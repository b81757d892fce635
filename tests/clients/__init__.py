"""Clients that others wrote, run against a real engine, each in an environment of its own."""
