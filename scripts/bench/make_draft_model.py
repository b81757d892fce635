"""Write a draft model for a checkpoint, which agrees with it to a degree.

    python -m scripts.bench.make_draft_model MODEL DIR [--layers N] [--noise SHARE]
        [--faded-model DIR --fade FACTOR]

A model with random weights agrees with no other one. So the draft is made from the model's own
weights: its first layers only, or all of them with noise of a share of each matrix's spread. With
`--faded-model` the model is written, too, with what its other layers add scaled by a factor: it
costs what it did, and agrees with its first layers.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from scripts.supervisor.model_names import BUNDLED_MODELS


def make_draft(model: Path, directory: Path, num_layers: int | None, noise: float) -> None:
    """Write the draft model of a checkpoint with one file of weights."""
    config = json.loads((model / "config.json").read_text())
    tensors = load_file(model / "model.safetensors")
    if num_layers is not None:
        tensors = {name: t for name, t in tensors.items() if _layer(name) < num_layers}
        config["num_hidden_layers"] = num_layers
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][:num_layers]
    generator = torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        if noise and tensor.dim() > 1:
            spread = float(tensor.float().std()) * noise
            added = torch.randn(tensor.shape, generator=generator) * spread
            tensors[name] = (tensor.float() + added).to(tensor.dtype)
    _write(model, directory, config, tensors)


def make_faded(model: Path, directory: Path, num_layers: int, factor: float) -> None:
    """Write a model with the outputs of all but its first layers scaled."""
    tensors = load_file(model / "model.safetensors")
    for name, tensor in tensors.items():
        is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
        if is_output and _layer(name) >= num_layers:
            tensors[name] = tensor * factor
    _write(model, directory, json.loads((model / "config.json").read_text()), tensors)


def _write(
    model: Path, directory: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for file in [*model.glob("*.json"), *model.glob("*.jinja")]:
        shutil.copyfile(file, directory / file.name)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _layer(name: str) -> int:
    """Return the number of the layer that a tensor belongs to; -1: of none."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), -1)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.make_draft_model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    text = "a checkpoint directory, or the name of a bundled model"
    parser.add_argument("model", metavar="MODEL", help=text)
    parser.add_argument("directory", type=Path, metavar="DIR", help="where the draft is written")
    text = "how many of the first layers (default: all)"
    parser.add_argument("--layers", type=int, metavar="N", help=text)
    text = "noise as a share of each matrix's spread (default: 0)"
    parser.add_argument("--noise", type=float, default=0.0, metavar="SHARE", help=text)
    text = "where the model with faded layers is written"
    parser.add_argument("--faded-model", type=Path, metavar="DIR", help=text)
    text = "what its other layers add is scaled by this (default: 0.1)"
    parser.add_argument("--fade", type=float, default=0.1, metavar="FACTOR", help=text)
    arguments = parser.parse_args()
    if arguments.faded_model is not None and arguments.layers is None:
        parser.error("--faded-model needs --layers")
    model = BUNDLED_MODELS.get(arguments.model) or Path(arguments.model)
    make_draft(model, arguments.directory, arguments.layers, arguments.noise)
    if arguments.faded_model is not None:
        make_faded(model, arguments.faded_model, arguments.layers, arguments.fade)


if __name__ == "__main__":
    main()
