"""LoRA adapters of requests from Python, with the names of vLLM's class."""

import os
from collections.abc import Sequence
from typing import NamedTuple

from api_proc.llm.prompts import invalid
from protocol.adapters import Adapter, AdapterError, read_adapter


class LoRARequest(NamedTuple):
    """An adapter for a request."""

    lora_name: str
    lora_int_id: int = 0
    """Part of its identity; equal files are one adapter whatever their numbers."""
    lora_path: str = ""
    """A directory in PEFT's format."""


LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None
"""One adapter for all prompts, or one for each prompt."""


class KnownAdapters:
    """Adapters whose files were read once, when a request first named them."""

    def __init__(self) -> None:
        self._known: dict[LoRARequest, Adapter] = {}

    def of(self, request: LoRARequest | None) -> Adapter | None:
        """Return the adapter of a request; RequestFailed: its files cannot be read."""
        if request is None:
            return None
        adapter = self._known.get(request)
        if adapter is None:
            path = os.path.abspath(os.path.expanduser(request.lora_path))
            try:
                adapter, _ = read_adapter(request.lora_name, path)
            except AdapterError as error:
                raise invalid("lora_request", str(error)) from error
            self._known[request] = adapter
        return adapter


def one_each(requests: LoRARequests, num_prompts: int) -> list[LoRARequest | None]:
    """Return an adapter, or none, for each prompt."""
    if requests is None or isinstance(requests, LoRARequest):
        return [requests] * num_prompts
    if len(requests) != num_prompts:
        raise invalid("lora_request", f"there are {len(requests)} for {num_prompts} prompts")
    return list(requests)
