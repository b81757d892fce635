"""One forward of the model over a packed step, and the cache that it runs on."""

import torch
from torch import nn

from worker_proc.attention.interface import AttentionBackend, PagedLayer, attach
from worker_proc.inputs import StepInputs
from worker_proc.kv_tensors import KVTensors, zeros
from worker_proc.loader import LoadedModel


def attach_cache(loaded: LoadedModel, backend: AttentionBackend, num_blocks: int) -> None:
    """Allocate a pool of `num_blocks` and give every attention module its part of it.

    Takes the place of the pool that was attached before.
    """
    for layer in loaded.layers:
        shapes = backend.pool_shapes(layer.spec, num_blocks)
        keys, values = (zeros(shape, loaded.dtype, loaded.device) for shape in shapes)
        module = loaded.model.get_submodule(layer.module_name)
        attach(module, PagedLayer(layer.spec, KVTensors(keys, values), backend))


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
