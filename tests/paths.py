"""The directories of the repository that tests read."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
DEMO_MODEL = ROOT / "scripts" / "demo_model"
