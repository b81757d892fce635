"""Requests that survive their connection and the API process."""
