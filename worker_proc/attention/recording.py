"""Connects a recorder to a model for one forward, replacing transformers' registered functions."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel, masking_utils
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from worker_proc.attention.interface import set_implementation
from worker_proc.attention.recorder import Recorder
from worker_proc.attention.stand_ins import OWN_ATTENTION

PROBE = "troika_probe"
_BLOCKS = "blockwise_overlay"
"""The function of transformers that builds the part of a mask that shows blocks."""
_EXPERTS_ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")
_SIZED_ARGUMENTS = ("inputs", "expert_size")


@contextmanager
def recording(model: PreTrainedModel, recorder: Recorder, *, is_own: bool) -> Iterator[None]:
    """Record the model's forwards within the context; `is_own`: its own code computes attention."""
    with ExitStack() as contexts:
        for context in (
            _registered(recorder),
            _texts_without_blocks(model),
            _implementation(model, OWN_ATTENTION if is_own else PROBE),
            _running_modules(model, recorder),
            _experts_by_signature(model, recorder),
        ):
            contexts.enter_context(context)
        yield


@contextmanager
def _registered(recorder: Recorder) -> Iterator[None]:
    functions = (
        (ALL_ATTENTION_FUNCTIONS, PROBE, recorder.attention),
        (ALL_MASK_ATTENTION_FUNCTIONS, PROBE, recorder.mask),
        (ALL_MASK_ATTENTION_FUNCTIONS, OWN_ATTENTION, recorder.own_mask),
        (ALL_EXPERTS_FUNCTIONS, PROBE, recorder.experts),
    )
    before = [
        (registry, name, registry._global_mapping.get(name)) for registry, name, _ in functions
    ]
    for registry, name, function in functions:
        registry.register(name, function)
    # When transformers builds a mask, it looks for packed texts in the values of the positions. It
    # does not while models are served, since no mask function is registered there.
    find_packed = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    # Chunks begin after a row's padding. There is no padding, but the meta device has no values.
    chunked = masking_utils.chunked_causal_mask_function
    masking_utils.chunked_causal_mask_function = lambda size, padding: chunked(
        size, torch.zeros(padding.shape, dtype=torch.long, device="cpu")
    )
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find_packed
        masking_utils.chunked_causal_mask_function = chunked
        for registry, name, earlier in before:  # those of a model that is already served
            registry._global_mapping.pop(name, None)
            if earlier is not None:
                registry.register(name, earlier)


@contextmanager
def _texts_without_blocks(model: nn.Module) -> Iterator[None]:
    """Hide the blocks (of images) within which tokens see each other: texts have none.

    The comparison with transformers' own forward would reveal them.
    """
    names = {masking_utils.__name__, *(type(module).__module__ for module in model.modules())}
    modules = [vars(sys.modules[name]) for name in names if hasattr(sys.modules[name], _BLOCKS)]
    before = [module[_BLOCKS] for module in modules]
    for module in modules:
        module[_BLOCKS] = lambda ids: lambda batch, head, query, key: torch.zeros_like(query) > 0
    try:
        yield
    finally:
        for module, overlay in zip(modules, before, strict=True):
            module[_BLOCKS] = overlay


@contextmanager
def _experts_by_signature(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Replace experts whose own code takes rows, chosen experts and weights.

    This includes experts that take sorted rows, and the number of rows for each expert.
    """
    found, sized = _experts(model, _EXPERTS_ARGUMENTS), _experts(model, _SIZED_ARGUMENTS)
    for module in found:
        module.__dict__["forward"] = partial(recorder.experts, module)
    for module in sized:
        module.__dict__["forward"] = partial(recorder.sized_experts, module)
    try:
        with _EmptyLists() if sized else nullcontext():
            yield
    finally:
        for module in (*found, *sized):
            del module.__dict__["forward"]


def _experts(model: nn.Module, arguments: tuple[str, ...]) -> list[nn.Module]:
    """Return the modules whose forward begins with these arguments."""
    end = 1 + len(arguments)
    return [
        module
        for module in model.modules()
        if tuple(signature(type(module).forward).parameters)[1:end] == arguments
    ]


class _EmptyLists(TorchFunctionMode):
    """Makes `tolist` return zeros within the context: the meta device has no values."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.tolist and args[0].is_meta and args[0].dim() == 1:
            return [0] * len(args[0])
        return func(*args, **(kwargs or {}))


@contextmanager
def _running_modules(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Record the modules whose forward is running or has run."""

    def begin(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        recorder.take_rows(module, args, kwargs)
        recorder.running.append(module)
        recorder.called.add(module)

    def end(module: nn.Module, args: object, result: object) -> None:
        recorder.running.pop()
        if isinstance(result, tuple):
            recorder.num_outputs[module] = len(result)

    handles = [
        handle
        for module in model.modules()
        for handle in (
            module.register_forward_pre_hook(begin, with_kwargs=True),
            module.register_forward_hook(end),
        )
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _implementation(model: PreTrainedModel, attention: str) -> Iterator[None]:
    set_implementation(model, attention)
    found = (getattr(module, "config", None) for module in model.modules())
    configs = {id(config): config for config in found if isinstance(config, PretrainedConfig)}
    before = [(c, getattr(c, "_experts_implementation", None)) for c in configs.values()]
    for config, _ in before:
        config._experts_implementation_internal = PROBE
    try:
        yield
    finally:
        for config, experts in before:
            config._experts_implementation_internal = experts
