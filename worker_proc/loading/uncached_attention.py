"""Routes attention that recomputes all keys (OpenAI's first GPT) to a registered function.

Such a module has no cache, and attends in its own method, given queries, keys and values. The
method is bypassed unless the model uses transformers' eager attention.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_METHOD = "_attn"
_PLAIN = (None, "eager")


def route_uncached(model: PreTrainedModel) -> None:
    """Make the methods of such modules call the function that the model's configuration names."""
    modules: list[Any] = [module for module in model.modules() if _is_uncached(module)]
    for module in modules:
        module.__dict__[_METHOD] = _routed(module, model.config)
    if modules:
        decoder: Any = model.base_model
        decoder.__dict__["_can_set_attn_implementation"] = lambda: True


def _is_uncached(module: nn.Module) -> bool:
    """Return whether a module makes a causal mask, and has no cache."""
    mask = getattr(module, "bias", None)
    has_mask = isinstance(mask, torch.Tensor) and mask.dim() == 4 and mask.shape[2] == mask.shape[3]
    parts = ("split_heads", "merge_heads", "scale", _METHOD)
    return has_mask and all(hasattr(module, part) for part in parts)


def _routed(module: Any, config: Any) -> Any:
    own = getattr(module, _METHOD)

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> list[torch.Tensor]:
        """Take `[1, heads, T, dim]`, but keys as `[1, heads, dim, T]`; return `[out]`."""
        name = config._attn_implementation
        if name in _PLAIN:
            result: list[torch.Tensor] = own(query, key, value, *args, **kwargs)
            return result
        mask = ALL_MASK_ATTENTION_FUNCTIONS.get(name)
        shown = None if mask is None else mask(mask_function=causal_mask_function)
        scaling = value.shape[-1] ** -0.5 if module.scale else 1.0
        attended, _ = ALL_ATTENTION_FUNCTIONS[name](
            module, query, key.transpose(2, 3), value, shown, scaling=scaling
        )
        return [attended.transpose(1, 2)]

    return attend
