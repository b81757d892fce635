"""Blocks outside the worker: stores, other machines, and their layout."""
