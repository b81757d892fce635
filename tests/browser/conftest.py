"""Whole engines, started as a user would."""

from scripts.testing import engine, start_engine

__all__ = ["engine", "start_engine"]
