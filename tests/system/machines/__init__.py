"""Replicas and engines of several machines."""
