"""Fixes frequencies of rotary embeddings that transformers chooses by the longest text.

transformers changes the frequencies for all rows of a forward as soon as one position exceeds a
bound: LongRoPE has separate factors for short and for long texts, and dynamic NTK a base that grows
with the length. A step holds rows of several texts, whose results must not depend on each other. So
each module chooses once, for the longest text that is served, and keeps these frequencies for all
texts, as in vLLM.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

CHOSEN_BY_LENGTH = ("longrope", "dynamic")
"""Values of `rope_type` with which transformers reads the positions of a forward."""
_FIXED = "fixed"
_GREATEST = frozenset({"max", "amax"})
Angles = tuple[torch.Tensor, torch.Tensor]


def fix_frequencies(model: nn.Module, model_len: int | None) -> None:
    """Fix the frequencies of all rotary embeddings for a text of `model_len` tokens.

    None: keep the present frequencies, as on the meta device, where values are not used.
    """
    for module in model.modules():
        layer_types = list(_types_chosen_by_length(module))
        if layer_types and _looks_at_positions(module):
            _fix_forward(module, model_len)
        for layer_type in layer_types:
            if model_len is not None:
                _choose(module, layer_type, model_len)
            if layer_type is None:
                module.__dict__["rope_type"] = _FIXED
            else:
                module.__dict__["rope_type"] |= {layer_type: _FIXED}


def _types_chosen_by_length(module: nn.Module) -> Iterator[str | None]:
    """Yield the layer types for which a module reads positions; None: it has no types."""
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


def _looks_at_positions(module: nn.Module) -> bool:
    """Return whether a module's own forward computes the last position, too (Phi-3.5-MoE)."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and bool(_GREATEST.intersection(code.co_names))


def _fix_forward(module: nn.Module, model_len: int | None) -> None:
    """Append the last position of the longest text to the positions of a module's own forward.

    The frequencies that it computes in each forward are then those of the longest text.
    """
    own: Callable[..., Angles] = module.forward
    last = 0 if model_len is None else model_len - 1
    compute: Any = getattr(module, "rope_init_fn", None)
    if model_len is not None and compute is not None:
        module.__dict__["rope_init_fn"] = partial(compute, seq_len=model_len)

    def forward(x: torch.Tensor, position_ids: torch.Tensor) -> Angles:
        device = position_ids.device
        if position_ids.is_meta:  # meta tensors have no values to read
            x, position_ids = (torch.zeros(t.shape, dtype=t.dtype) for t in (x, position_ids))
        end = position_ids.new_full((*position_ids.shape[:-1], 1), last)
        cosines, sines = own(x, torch.cat([position_ids, end], dim=-1))
        return cosines[..., :-1, :].to(device), sines[..., :-1, :].to(device)

    module.__dict__["forward"] = forward
