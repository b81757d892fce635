"""Whole engines, started as a user would."""

from pathlib import Path

from scripts.testing import engine, start_engine

__all__ = ["engine", "start_engine"]

ROOT = Path(__file__).resolve().parents[2]
