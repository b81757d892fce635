"""Fixes the frequencies of rotary embeddings that transformers chooses by the longest text.

transformers computes the angles of all rows of a forward with other frequencies as soon as one
position passes a bound: LongRoPE has one set of factors for short texts and one for long ones, and
dynamic NTK a base that grows with the length. A step holds rows of several texts, whose results
must not depend on each other. So each module chooses once, for the longest text that is served, and
keeps these frequencies for all texts, as in vLLM.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

CHOSEN_BY_LENGTH = ("longrope", "dynamic")
"""Values of `rope_type` with which transformers looks at the positions of a forward."""
_FIXED = "fixed"


def fix_frequencies(model: nn.Module, model_len: int | None) -> None:
    """Let all rotary embeddings keep the frequencies of a text of `model_len` tokens.

    None: those that they have, as the values are not used.
    """
    for module in model.modules():
        for layer_type in list(_types_chosen_by_length(module)):
            if model_len is not None:
                _choose(module, layer_type, model_len)
            if layer_type is None:
                module.__dict__["rope_type"] = _FIXED
            else:
                module.__dict__["rope_type"] |= {layer_type: _FIXED}


def _types_chosen_by_length(module: nn.Module) -> Iterator[str | None]:
    """Yield the types of layers for which a module looks at positions; None: it has no types."""
    kinds: Any = module.__dict__.get("rope_type")
    by_type = kinds if isinstance(kinds, Mapping) else {None: kinds}
    yield from (layer_type for layer_type, kind in by_type.items() if kind in CHOSEN_BY_LENGTH)


@torch.no_grad()
def _choose(module: nn.Module, layer_type: str | None, model_len: int) -> None:
    """Call a module with the last position of a text."""
    device = next(module.buffers()).device
    row = torch.zeros(1, 1, 1, device=device)
    position = torch.tensor([[model_len - 1]], device=device)
    module(row, position, **({} if layer_type is None else {"layer_type": layer_type}))
