"""Makes models compute logits of some rows only, if their own forward has no argument for it."""

from inspect import signature
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

_KEPT = "logits_to_keep"


def keep_rows(model: PreTrainedModel) -> None:
    """Add the argument `logits_to_keep`, the indices of rows, to a forward that lacks it."""
    if _KEPT in signature(type(model).forward).parameters or model.get_output_embeddings() is None:
        return
    own: Any = model.forward

    def forward(*args: Any, logits_to_keep: torch.Tensor | None = None, **options: Any) -> Any:
        if logits_to_keep is None:
            return own(*args, **options)

        def select(module: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
            return (inputs[0].index_select(1, logits_to_keep),)

        # Look up the output layer here: it is replaced when its weights are packed.
        handle = model.get_output_embeddings().register_forward_pre_hook(select)
        try:
            return own(*args, **options)
        finally:
            handle.remove()

    model.__dict__["forward"] = forward
