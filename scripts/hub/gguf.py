"""Finds or creates the checkpoint directory of a GGUF file."""

from pathlib import Path

from scripts.gguf.cache import find_directory
from scripts.gguf.tokenizer import TokenizerFiles
from scripts.hub.messages import Refusal
from worker_proc.gguf.known import check_known
from worker_proc.gguf.model_header import Header, read_header
from worker_proc.gguf.parts import part_paths


def directory_of(path: Path, *, needs_tokenizer: bool) -> Path:
    """Return the directory; raise Refusal if the file is damaged or its model cannot be served.

    Problems that the header shows are refused before torch is imported.
    """
    try:
        header = read_header(*part_paths(path))
        header.check_types()
        found = find_directory(header, needs_tokenizer=needs_tokenizer)
        if found is not None:
            return found
        check_names(header, needs_tokenizer=needs_tokenizer)
        from scripts.gguf.directory import make_directory

        return make_directory(path, needs_tokenizer=needs_tokenizer)
    except ValueError as error:
        raise Refusal(f"model {error}") from error
    except OSError as error:
        raise Refusal(f"model {path}: {error.strerror or error}") from error


def check_names(header: Header, *, needs_tokenizer: bool) -> None:
    """Raise UnsupportedModel, or CheckpointError, for an unknown architecture or tokenizer."""
    check_known(header)
    if needs_tokenizer:
        TokenizerFiles(header).check_known()
