"""Attention within a token, between its states of several layers (Inkling-2).

Such a module has a matrix of queries, the same for all tokens, and its keys are the states. Its
own forward calls torch's attention, or the function that its configuration names, with tokens in
the place of heads (transformers 5.24). That function is torch's here, for any tokens of any texts.
"""

import inspect

from torch import nn

_OWN = "scaled_dot_product_attention"
_NAMED = "ALL_ATTENTION_FUNCTIONS"
_MASK = "attention_mask"


class _TorchAttention:
    """Takes the place of a module's configuration, and names torch's attention."""

    _attn_implementation = "sdpa"


def attends_in_tokens(module: nn.Module) -> bool:
    """Return whether a module's own code attends within a token.

    Of modules that call a named function, these are the ones that `attend_in_tokens` has found.
    """
    return _OWN in _names(module) or isinstance(module.__dict__.get("config"), _TorchAttention)


def attend_in_tokens(model: nn.Module) -> None:
    """Make attention within a token torch's, whichever attention the model is set to."""
    for module in model.modules():
        if _calls_in_tokens(module):
            module.__dict__["config"] = _TorchAttention()


def _calls_in_tokens(module: nn.Module) -> bool:
    """Return whether a module calls the named function with neither a mask nor projections.

    Projections are recognized before they are packed.
    """
    takes_mask = _MASK in inspect.signature(type(module).forward).parameters
    projects = any(isinstance(part, nn.Linear) for part in module.modules())
    return _NAMED in _names(module) and not takes_mask and not projects


def _names(module: nn.Module) -> tuple[str, ...]:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return () if code is None else code.co_names
