"""Finds out what attention a model computes, by running its code on the meta device.

The model's own forward is called once without weights or memory. Every attention call and every
mask it asks for is recorded, so that what paged attention must do is observed instead of guessed
from field names in `config.json`; and whatever it cannot do is refused before weights are read.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from worker_proc.attention.layer_spec import LayerSpec
from worker_proc.errors import UnsupportedModel

PROBE = "troika_probe"
NUM_PROBE_TOKENS = 8
FAR_POSITION = 2**24
"""A query this far into a text sees the whole of any window."""

_HARMLESS_ARGUMENTS = frozenset(
    {
        "cache_position",
        "cos",
        "deterministic",
        "dropout",
        "is_causal",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "scaling",
        "sin",
        "sliding_window",
        "softcap",
        "target_dtype",
        "use_cache",
        "use_top_left_mask",
    }
)

MaskFunction = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class ProbedMask:
    """Stands in for a mask: what it would have shown to each token."""

    window: int | None
    problem: str = ""
    """Why no layer can be served under it; models also make masks that no layer uses."""


@dataclass(frozen=True, slots=True)
class ProbedLayer:
    """One attention call of the forward."""

    module_name: str
    spec: LayerSpec


def probe_layers(model: PreTrainedModel, num_layers: int) -> list[ProbedLayer]:
    """Run `model`, which is on the meta device, and return its attention calls in order.

    Raises:
        UnsupportedModel: the forward fails, or holds something other than `num_layers` causal
            self-attention layers that go through transformers' attention interface.
    """
    probe = _Probe({module: name for name, module in model.named_modules()})
    config = model.config
    tokens = torch.zeros(1, NUM_PROBE_TOKENS, dtype=torch.long, device="meta")
    with _registered(probe), _implementation(model), torch.inference_mode():
        try:
            model(
                input_ids=tokens,
                position_ids=tokens,
                attention_mask=tokens + 1,
                use_cache=False,
            )
        except UnsupportedModel:
            raise
        except Exception as error:
            raise UnsupportedModel(
                f"{config.model_type}: its forward over one row of tokens with positions fails"
                f" ({type(error).__name__}: {error})"
            ) from error
    _check_calls(probe.layers, num_layers, config.model_type)
    return probe.layers


def _check_calls(layers: list[ProbedLayer], num_layers: int, model_type: str) -> None:
    names = {layer.module_name for layer in layers}
    if len(names) != len(layers):
        raise UnsupportedModel(f"{model_type}: one attention module is used by several layers")
    if len(layers) != num_layers:
        raise UnsupportedModel(
            f"{model_type}: {len(layers)} of {num_layers} layers call the attention interface;"
            " the others mix tokens in another way (recurrent, convolutional, linear or their own"
            " attention)"
        )


class _Probe:
    """Records attention calls and answers masks."""

    def __init__(self, module_names: dict[nn.Module, str]) -> None:
        self.layers: list[ProbedLayer] = []
        self._module_names = module_names

    def attention(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: object,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, None]:
        """Take the place of attention: note the call, return an output of the right shape."""
        name = self._module_names.get(module, type(module).__name__)
        self._check_arguments(name, module, attention_mask, args, kwargs)
        if not query.shape[2] == key.shape[2] == value.shape[2] == NUM_PROBE_TOKENS:
            raise UnsupportedModel(f"{name} attends to other tokens than its own row's")
        if query.shape[1] % key.shape[1] or key.shape[1] != value.shape[1]:
            raise UnsupportedModel(
                f"{name} has {query.shape[1]} query, {key.shape[1]} key"
                f" and {value.shape[1]} value heads"
            )
        assert isinstance(attention_mask, ProbedMask)
        spec = LayerSpec(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=key.shape[3],
            value_head_dim=value.shape[3],
            window=attention_mask.window,
        )
        self.layers.append(ProbedLayer(name, spec))
        batch, heads, length, _ = query.shape
        return query.new_empty(batch, length, heads, value.shape[3]), None

    def _check_arguments(
        self,
        name: str,
        module: nn.Module,
        mask: object,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> None:
        if getattr(module, "is_causal", True) is False or kwargs.get("is_causal") is False:
            raise UnsupportedModel(f"{name} is not causal")
        if not isinstance(mask, ProbedMask):
            raise UnsupportedModel(f"{name} does not attend under a causal mask of its own row")
        if mask.problem:
            raise UnsupportedModel(f"{name}: {mask.problem}")
        strange = [key for key, v in kwargs.items() if v is not None]
        strange = [key for key in strange if key not in _HARMLESS_ARGUMENTS]
        if args or strange:
            described = ", ".join(sorted(strange)) or "positional arguments"
            if "s_aux" in strange:
                described += " (attention sinks)"
            raise UnsupportedModel(f"{name} asks for more than attention: {described}")
        window = kwargs.get("sliding_window")
        if window is not None and mask.window is None:
            raise UnsupportedModel(f"{name} has a sliding window of {window} and a mask without")

    @staticmethod
    def mask(*args: object, mask_function: MaskFunction, **kwargs: object) -> ProbedMask:
        """Take the place of a mask: find out its window."""
        try:
            return ProbedMask(observed_window(mask_function))
        except UnsupportedModel as error:
            return ProbedMask(None, str(error))
        except Exception as error:
            return ProbedMask(None, f"its mask depends on more than positions ({error})")

    @staticmethod
    def experts(module: nn.Module, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Take the place of experts, whose code looks at values."""
        return torch.empty_like(hidden)


def observed_window(mask_function: MaskFunction) -> int | None:
    """Return the sliding window of a mask, None for a plain causal one.

    Raises:
        UnsupportedModel: it is neither (bidirectional, chunked, with gaps).
    """
    windows = {_window_at(mask_function, FAR_POSITION + offset) for offset in (0, 1, 77_777)}
    if len(windows) != 1:
        raise UnsupportedModel("its mask moves with the position (chunked attention)")
    return windows.pop()


def _window_at(mask_function: MaskFunction, position: int) -> int | None:
    def sees(distance: int) -> bool:
        query = torch.tensor(position, device="cpu")
        zero = torch.zeros_like(query)
        return bool(mask_function(zero, zero, query, query - distance))

    if sees(-1) or not sees(0):
        raise UnsupportedModel("its mask is not causal")
    if sees(position):
        window = None
    else:
        low, high = 0, position
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if sees(middle) else (low, middle)
        window = high
    limit = position if window is None else window - 1
    samples = [2**k for k in range(24) if 2**k <= position]
    if any(sees(distance) != (distance <= limit) for distance in samples):
        raise UnsupportedModel("its mask has gaps")
    return window


@contextmanager
def _registered(probe: _Probe) -> Iterator[None]:
    ALL_ATTENTION_FUNCTIONS.register(PROBE, probe.attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(PROBE, probe.mask)
    ALL_EXPERTS_FUNCTIONS.register(PROBE, probe.experts)
    try:
        yield
    finally:
        for registry in (
            ALL_ATTENTION_FUNCTIONS,
            ALL_MASK_ATTENTION_FUNCTIONS,
            ALL_EXPERTS_FUNCTIONS,
        ):
            registry._global_mapping.pop(PROBE, None)


@contextmanager
def _implementation(model: PreTrainedModel) -> Iterator[None]:
    try:
        model.set_attn_implementation(PROBE)
    except ValueError as error:
        raise UnsupportedModel(
            f"{model.config.model_type}: its attention does not go through transformers' interface"
        ) from error
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    before = [(c, getattr(c, "_experts_implementation", None)) for c in configs.values()]
    for config, _ in before:
        config._experts_implementation_internal = PROBE
    try:
        yield
    finally:
        for config, experts in before:
            config._experts_implementation_internal = experts
