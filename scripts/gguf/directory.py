"""Makes a checkpoint directory that stands for a GGUF model.

It has config.json, generation_config.json, the files of the tokenizer, and links to the files.
"""

import contextlib
import json
import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from scripts.gguf.cache import is_complete, make_room, place_of, remove
from scripts.gguf.locks import alone
from scripts.gguf.tokenizer import TOKENS, TokenizerFiles
from worker_proc.errors import CheckpointError
from worker_proc.gguf.architectures import architecture_of, make_config
from worker_proc.gguf.mapped import PLAIN, MappedFiles
from worker_proc.gguf.model_header import Header
from worker_proc.gguf.names import named_tensors
from worker_proc.gguf.parts import part_paths
from worker_proc.gguf.types import TensorType
from worker_proc.quantization.gguf import file_states, link_names
from worker_proc.quantization.methods import KEY

_SAMPLING = {
    "temp": ("temperature", float),
    "top_k": ("top_k", int),
    "top_p": ("top_p", float),
    "min_p": ("min_p", float),
}
"""Keys of generation_config.json and their types, by those below `general.sampling`."""


def make_directory(path: Path, *, needs_tokenizer: bool = True) -> Path:
    """Return the directory of a file, or of all parts of its model; it is made if it is not there.

    Raises CheckpointError and UnsupportedModel.
    """
    files = _open(path)
    directory = place_of(files.header, needs_tokenizer=needs_tokenizer)
    if is_complete(directory):
        return directory
    try:
        _put(directory, files, needs_tokenizer=needs_tokenizer)
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"{path}: {error.filename or directory}: {reason}") from error
    return directory


def write_directory(inner: Path, path: Path, *, needs_tokenizer: bool) -> None:
    """Write the files of a directory that is there, and empty; raises like `make_directory`."""
    _write(inner, _open(path), needs_tokenizer=needs_tokenizer)


def _open(path: Path) -> MappedFiles:
    """Return the files of a model whose tensors all have a meaning."""
    files = MappedFiles(*part_paths(path))
    files.header.check_types()
    for _ in named_tensors(files.header, architecture_of(files)):
        pass
    return files


def _put(directory: Path, files: MappedFiles, *, needs_tokenizer: bool) -> None:
    """Write the files next to their place, and move them there when all are complete."""
    keys = make_room(directory)
    draft = Path(tempfile.mkdtemp(dir=keys, prefix="."))
    try:
        inner = draft / directory.name
        inner.mkdir()
        _write(inner, files, needs_tokenizer=needs_tokenizer)
        with contextlib.suppress(FileNotFoundError), alone(directory.parent) as is_alone:
            if is_alone and not is_complete(directory):
                remove(directory.parent)  # a start that was killed has left it
        with contextlib.suppress(FileExistsError):
            os.rename(draft, directory.parent)
    except OSError:
        if not is_complete(directory):  # another start was not faster
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write(inner: Path, files: MappedFiles, *, needs_tokenizer: bool) -> None:
    config, header = make_config(files), files.header
    _dump(inner / "config.json", config | _stored_as(header))
    _dump(inner / "generation_config.json", _generation_config(header, config["vocab_size"]))
    if needs_tokenizer:
        TokenizerFiles(header).write(inner)
    paths = [file.path for file in header.files]
    for name, path in zip(link_names(len(paths)), paths, strict=True):
        (inner / name).symlink_to(path.absolute())


def _stored_as(header: Header) -> dict[str, Any]:
    """Return what config.json states of how weights are stored."""
    matrices = [entry for entry in header.tensors.values() if len(entry.shape) > 1]
    types = {entry.type for entry in matrices}
    has_codes = not types <= PLAIN.keys()
    widest = max(types, default=int(TensorType.F32))
    paths = [file.path for file in header.files]
    dtype = torch.bfloat16 if has_codes else PLAIN[TensorType(widest)]
    return {"dtype": str(dtype).removeprefix("torch."), KEY: file_states(paths)}


def _generation_config(header: Header, num_embeddings: int) -> dict[str, Any]:
    """Return the tokens that end an answer, and parameters of sampling."""
    metadata = header.metadata
    tokenizer = TokenizerFiles(header) if TOKENS in metadata else None
    num_tokens = 0 if tokenizer is None else tokenizer.num_tokens
    if num_tokens > num_embeddings:
        raise CheckpointError(
            f"{header.path}: {TOKENS} has {num_tokens} tokens, and token_embd.weight has only"
            f" {num_embeddings} rows"
        )
    ends = [] if tokenizer is None else tokenizer.end_ids()
    suppressed = [] if tokenizer is None else tokenizer.suppressed_ids()
    return {
        **_sampling(header),
        **({"eos_token_id": ends} if ends else {}),
        **({"suppress_tokens": suppressed} if suppressed else {}),
    }


def _sampling(header: Header) -> dict[str, Any]:
    """Return the parameters that the model's authors chose."""
    stated = {}
    for key, (name, convert) in _SAMPLING.items():
        full = f"general.sampling.{key}"
        value = header.metadata.get(full)
        if value is None:
            continue
        if type(value) not in (int, float) or not math.isfinite(value):
            raise CheckpointError(
                f"{header.path}: {full} is {value!r:.100}, and must be a finite number"
            )
        stated[name] = convert(value)
    return stated


def _dump(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
