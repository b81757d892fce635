"""Checks the arguments with which a model calls the functions that are replaced."""

from collections.abc import Mapping
from typing import Any

from worker_proc.errors import UnsupportedModel

_NOT_COMPUTED = ("cu_seqlens", "initial_state", "initial_states", "seq_idx", "z")
"""Arguments that change the result of transformers' functions. Those functions ignore arguments
that they do not know, which a model passes on to all of its parts."""


def check_arguments(function: str, others: Mapping[str, Any]) -> None:
    """Raise UnsupportedModel for arguments that change results but would be ignored."""
    if given := [name for name in _NOT_COMPUTED if others.get(name) is not None]:
        raise UnsupportedModel(f"{function} is called with {', '.join(given)}")
