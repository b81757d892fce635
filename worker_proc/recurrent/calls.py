"""Checks of how a model calls the functions whose place is taken."""

from collections.abc import Mapping
from typing import Any

from worker_proc.errors import UnsupportedModel

_NOT_COMPUTED = ("cu_seqlens", "initial_state", "initial_states", "seq_idx", "z")
"""Arguments that change what transformers' functions compute. These ignore those that they do not
know, which a model passes on to all of its parts."""


def check_arguments(function: str, others: Mapping[str, Any]) -> None:
    """Raise UnsupportedModel for arguments that would be ignored and count."""
    if given := [name for name in _NOT_COMPUTED if others.get(name) is not None]:
        raise UnsupportedModel(f"{function} is called with {', '.join(given)}")
