"""Paths in the hub's cache, whose layout huggingface_hub documents."""

from pathlib import Path

from huggingface_hub import constants


def model_folder(name: str) -> Path:
    """Return the folder of a model."""
    cache = Path(constants.HF_HUB_CACHE).expanduser().resolve()
    return cache / f"models--{name.replace('/', '--')}"


def snapshots_folder(name: str) -> Path:
    """Return the folder of a model's snapshots, one for each commit."""
    return model_folder(name) / "snapshots"
