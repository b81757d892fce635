"""Inserts the sums over all ranks into the layers of a divided model."""

from functools import partial
from typing import Any

import torch
from torch import nn

from worker_proc.loading.layer_executor import Stack
from worker_proc.loading.loaded_model import LoadedModel
from worker_proc.loading.output_layer import output_layer
from worker_proc.parallel.division.rank_norm import RankNorm
from worker_proc.parallel.division.sharding import is_divided
from worker_proc.parallel.exchange import RankExchange


def connect(loaded: LoadedModel, stack: Stack | None, exchange: RankExchange) -> None:
    """Add up the outputs of all ranks after each attention and MLP.

    The native decoder `stack` does this, if there is one, and otherwise the modules do. The output
    layer gathers the logits of all ranks.
    """
    head = output_layer(loaded.model)
    if head is not None and is_divided(head, loaded.vocab_size):
        head.register_forward_hook(partial(_gather, exchange))
    if stack is not None:
        stack.take_ranks(exchange)
        return

    def add(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):  # some MLPs also return the choices of their router
            return add(module, args, output[0]), *output[1:]
        rows = output.flatten(0, -2).contiguous()
        exchange.add(rows)
        return rows.view(output.shape)

    for module in loaded.model.modules():
        if isinstance(module, RankNorm) and module.is_shared:
            module.add_up = exchange.add
    summed = {loaded.model.get_submodule(name) for name in loaded.summed}
    for module in summed:  # each module once, although several layers may share it
        module.register_forward_hook(add)


def _gather(
    exchange: RankExchange, module: nn.Module, args: Any, output: torch.Tensor
) -> torch.Tensor:
    num_tokens = exchange.num_ranks * output.shape[-1]
    return exchange.gather(output.flatten(0, -2)).view(*output.shape[:-1], num_tokens)
