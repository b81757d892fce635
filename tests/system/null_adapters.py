"""Adapters of the null model."""

from pathlib import Path

from protocol.adapters import CONFIG_FILE, WEIGHTS_FILE


def write_null_adapter(directory: Path, num_bytes: int) -> Path:
    """Write an adapter that is good enough for the null model."""
    directory.mkdir()
    (directory / CONFIG_FILE).write_text('{"peft_type": "LORA", "r": 4, "target_modules": ["q"]}')
    with (directory / WEIGHTS_FILE).open("wb") as file:
        file.truncate(num_bytes)
    return directory
