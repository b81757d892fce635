"""Stores of KV blocks outside the workers: where they are, and what they probably hold."""
