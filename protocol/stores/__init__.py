"""Stores of KV blocks outside the workers: where they are, and which blocks they probably hold."""
