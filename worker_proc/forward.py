"""One forward of the model over a packed step, and the cache that it runs on."""

import torch
from torch import nn

from worker_proc import kv_tensors
from worker_proc.attention.interface import AttentionBackend, attach
from worker_proc.inputs import StepInputs
from worker_proc.loader import LoadedModel


def attach_cache(
    loaded: LoadedModel, backend: AttentionBackend, num_blocks: int, block_size: int
) -> None:
    """Allocate a pool of `num_blocks` and give every attention module its part of it.

    Takes the place of the pool that was attached before.
    """
    specs = [layer.spec for layer in loaded.layers]
    pools = kv_tensors.allocate(specs, num_blocks, block_size, loaded.dtype, loaded.device)
    modules = [loaded.model.get_submodule(layer.module_name) for layer in loaded.layers]
    attach(modules, specs, pools, backend)


@torch.inference_mode()
def compute_logits(
    model: nn.Module, backend: AttentionBackend, inputs: StepInputs, vocab_size: int
) -> torch.Tensor:
    """Run the model over a packed step; `[N, vocab_size]`, for the rows that want logits."""
    backend.begin_step(inputs)
    output = model(
        input_ids=inputs.input_ids,
        position_ids=inputs.position_ids,
        use_cache=False,
        logits_to_keep=inputs.logits_indices,
    )
    logits: torch.Tensor = output.logits[0]
    return logits[:, :vocab_size]
