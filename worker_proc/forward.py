"""Runs the model over a packed step, and attaches the KV cache to it."""

import torch
from torch import nn

from worker_proc.attention.compression import compression_of
from worker_proc.attention.interface import AttentionBackend, LayersInTurn, PagedLayer
from worker_proc.cuda.device import uses_triton
from worker_proc.inputs import StepInputs
from worker_proc.kv.kv_groups import KVLayout
from worker_proc.kv.kv_pool import CopyBlocks, KVPool, copy_by_index
from worker_proc.kv.kv_tensors import KVTensors, Shapes
from worker_proc.loading.loaded_model import LoadedModel
from worker_proc.recurrent.layers import recurrent_layers
from worker_proc.recurrent.state_pool import StatePool


def attach_cache(
    loaded: LoadedModel,
    backend: AttentionBackend,
    layout: KVLayout,
    num_blocks: int,
    num_host_blocks: int = 0,
    *,
    num_state_blocks: int | None = None,
    num_swap_states: int = 0,
) -> KVPool:
    """Allocate a pool and attach each attention module to its part of it, instead of the last.

    Recurrent modules get a pool of states, by default of as many blocks, with `num_swap_states`
    more for those of swapped requests.
    """
    copy_blocks: CopyBlocks = copy_by_index
    if uses_triton(loaded.device):
        from worker_proc.cuda.swap import copy_blocks
    dtype = layout.format.pool_dtype(loaded.dtype)
    shapes = _pool_shapes(loaded, backend, layout, num_blocks)
    pool = KVPool(shapes, num_host_blocks, dtype, loaded.device, copy_blocks)
    parts = _parts_of_layers(layout, pool)
    attached: dict[str, list[PagedLayer]] = {}
    for index, layer in enumerate(loaded.layers):
        source = layer.spec.kv_source
        number, tensors = parts[index if source is None else source]
        place = layout.places[index] if layout.places else None
        sinks = None
        if layer.sinks is not None:
            sinks = loaded.model.get_parameter(layer.sinks).detach().float().contiguous()
        biases = None if layer.biases is None else loaded.model.get_buffer(layer.biases)
        compression = compression_of(loaded.model.get_submodule(layer.module_name))
        terms = (sinks, biases, layer.bias_origin, compression, place)
        paged = PagedLayer(layer.spec, tensors, backend, number, *terms)
        attached.setdefault(layer.module_name, []).append(paged)
    in_turn: list[LayersInTurn] = []
    for name, own in attached.items():
        if len(own) > 1:
            in_turn.append(LayersInTurn(own))
        # Not by setattr: the layer is not a submodule and owns no parameter.
        attention = loaded.model.get_submodule(name)
        attention.__dict__["paged_layer"] = own[0] if len(own) == 1 else in_turn[-1]
    loaded.model.__dict__["layers_in_turn"] = in_turn
    if layout.has_states:
        number = num_state_blocks or num_blocks
        states = StatePool(
            loaded.recurrent, number, layout.block_size, loaded.dtype, num_swap_states
        )
        _attach_states(loaded, pool, states)
    return pool


def _pool_shapes(
    loaded: LoadedModel, backend: AttentionBackend, layout: KVLayout, num_blocks: int
) -> list[Shapes]:
    if layout.places:
        return [((num_blocks, layout.block_numbers), None)]
    stored = [loaded.layers[index].spec for index in layout.tensor_layers]
    return [backend.pool_shapes(spec, num_blocks) for spec in stored]


def _parts_of_layers(layout: KVLayout, pool: KVPool) -> dict[int, tuple[int, KVTensors]]:
    """Return the group of each layer with KV, and its tensors."""
    if layout.places:
        return {index: (place.group, pool.tensors[0]) for index, place in enumerate(layout.places)}
    return {
        index: (number, tensors)
        for number, group in enumerate(layout.groups)
        for tensors, index in zip(pool.tensors, group.layers, strict=False)
    }


def _attach_states(loaded: LoadedModel, pool: KVPool, states: StatePool) -> None:
    """Attach each recurrent module to its states, which sleep with the pool."""
    for layer in recurrent_layers(loaded.model):
        layer.attach(states)
    loaded.model.__dict__["state_pool"] = states
    pool.add(states.memory)


def state_pool_of(model: nn.Module) -> StatePool | None:
    """Return the states of a model with recurrent modules that a cache is attached to."""
    pool: StatePool | None = model.__dict__.get("state_pool")
    return pool


@torch.inference_mode()
def compute_logits(
    model: nn.Module, backend: AttentionBackend, inputs: StepInputs, vocab_size: int
) -> torch.Tensor:
    """Run the model over a packed step; returns `[N, vocab_size]`, for `inputs.logits_indices`.

    Of a model without output layer these are hidden states.
    """
    backend.begin_step(inputs)
    for layers in model.__dict__.get("layers_in_turn", ()):
        layers.begin_step()
    states = state_pool_of(model)
    if states is not None:
        states.begin_step(inputs)
    types = inputs.token_type_ids
    output = model(
        input_ids=inputs.input_ids,
        position_ids=inputs.position_ids,
        use_cache=False,
        logits_to_keep=inputs.logits_indices,
        **({} if types is None else {"token_type_ids": types}),
    )
    logits: torch.Tensor = output.logits[0]
    return logits[:, :vocab_size]
