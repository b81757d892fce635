"""Finds out what attention a model computes, by running its code on the meta device.

The model's own forward is called once, as it is served, without weights or memory. All attention
calls, masks and parameters that it uses are recorded, so that the attention of each layer is
observed, not guessed from names in `config.json`. A model that paged attention cannot compute is
rejected before weights are read. Code cannot branch on values of the meta device, so the parameters
that one forward uses are those of every forward over text.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import masking_utils
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from worker_proc.attention.interface import has_own_attention, set_implementation
from worker_proc.attention.observed_masks import MaskFunction, Visibility, observe
from worker_proc.attention.own_attention import OWN_ATTENTION, OwnCache, OwnCall, OwnMask
from worker_proc.errors import UnsupportedModel, describe
from worker_proc.kv.kv_groups import LayerSpec
from worker_proc.recurrent.recording import recorded_states
from worker_proc.recurrent.state_spec import RecurrentSpec

PROBE = "troika_probe"
NUM_PROBE_TOKENS = 8

_HARMLESS_ARGUMENTS = frozenset(
    {
        *("cache_position", "cos", "deterministic", "dropout", "is_causal", "output_attentions"),
        *("logits_to_keep", "output_hidden_states", "output_router_logits"),
        *("position_embeddings", "position_ids"),
        *("return_dict", "s_aux", "scaling", "sin", "sliding_window", "softcap", "target_dtype"),
        *("use_cache", "use_top_left_mask"),
    }
)


@dataclass(frozen=True, slots=True)
class ProbedMask:
    """Takes the place of a mask, with what it shows."""

    visible: Visibility
    problem: str = ""  # raised only if a layer uses the mask

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedModel(f"its own code computes with a mask ({name})")


@dataclass(frozen=True, slots=True)
class ProbedLayer:
    """One attention call of the forward."""

    module_name: str
    spec: LayerSpec
    sinks: str | None = None
    """The parameter that has its sinks, one for each head."""
    biases: str | None = None
    """The buffer that has what is added to scores, by head and position of the key."""
    bias_origin: int | None = None
    """The column of a row's own key there; see `PagedLayer`."""


@dataclass(frozen=True, slots=True)
class ProbedModel:
    """What the forward over one packed row of tokens uses."""

    layers: list[ProbedLayer]  # in the order in which the forward calls them
    parameters: frozenset[str]
    unused_modules: tuple[str, ...]  # topmost ones, of whose parameters it uses none
    num_weights: int  # in the parameters of all other modules
    recurrent: list[RecurrentSpec] = field(default_factory=list)
    """Modules with a state, in the order in which the forward calls them."""
    position_offset: int = 0  # number of a text's first position
    has_own_attention: bool = False
    """Whether attention is in the model's own code. Windows, biases and repeated heads, which
    depend on values there, are observed when its weights are loaded."""


def probe_model(
    model: PreTrainedModel, num_layers: int, *, has_output_layer: bool = True
) -> ProbedModel:
    """Run `model`, which is on the meta device, and return what it used.

    UnsupportedModel: the forward fails, or holds something other than `num_layers`
    self-attention layers that go through transformers' attention interface, or whose own code
    does no more than attention. They must be causal in a model with an output layer, and all alike
    in that in another one.
    """
    probe = _Probe(model)
    config = model.config
    tokens = torch.zeros(1, NUM_PROBE_TOKENS, dtype=torch.long, device="meta")
    is_own = has_own_attention(model)
    with (
        _registered(probe),
        _implementation(model, OWN_ATTENTION if is_own else PROBE),
        _running_modules(model if is_own else None, probe.running),
        recorded_states(model, probe.storages.add) as recurrent,
        torch.inference_mode(),
        probe.storages,
    ):
        try:
            kept = tokens[0]  # all rows; with a number some models skip rows of the last layers
            options: dict[str, Any] = {"logits_to_keep": kept} if has_output_layer else {}
            if is_own:
                options["past_key_values"] = OwnCache(probe.own_attention)
            model(input_ids=tokens, position_ids=tokens, use_cache=False, **options)
        except UnsupportedModel as error:
            raise UnsupportedModel(
                f"the model type {config.model_type} is not supported: {error}"
            ) from error
        except Exception as error:
            raise UnsupportedModel(
                f"the model type {config.model_type} is not supported: its forward over one row of"
                f" tokens with positions fails ({describe(error)})"
            ) from error
    layers = probe.layers
    _check_directions(layers, config.model_type, has_output_layer=has_output_layer)
    is_causal = all(layer.spec.is_causal for layer in layers)
    # Without a cache several layers may have one module.
    if is_causal and len({layer.module_name for layer in layers}) != len(layers):
        raise UnsupportedModel(
            f"{config.model_type}: one attention module is used by several layers"
        )
    if len({spec.module_name for spec in recurrent}) != len(recurrent):
        raise UnsupportedModel(
            f"{config.model_type}: one recurrent module is used by several layers"
        )
    num_mixing = len(layers) + len(recurrent)
    if num_mixing < num_layers or (num_mixing > num_layers and not recurrent):
        raise UnsupportedModel(
            f"{config.model_type}: {num_mixing} of {num_layers} layers call the attention"
            " interface, or the functions of recurrent layers; the others mix tokens in another"
            " way (linear, convolutional or their own attention)"
        )
    parameters = dict(model.named_parameters(remove_duplicate=False))
    used = frozenset(name for name in parameters if probe.storages.holds(parameters[name]))
    unused_modules = _top_modules_without(model, used)
    built = {id(p): p for name, p in parameters.items() if not is_within(name, unused_modules)}
    num_weights = sum(parameter.numel() for parameter in built.values())
    offset = 0 if has_output_layer else position_offset(model)
    return ProbedModel(layers, used, unused_modules, num_weights, recurrent, offset, is_own)


def position_offset(model: PreTrainedModel) -> int:
    """Return the number that a model without output layer gives to a text's first position.

    Models that count from the padding token's number on have a method for it.
    """
    embeddings: Any = getattr(model.base_model, "embeddings", None)
    if not hasattr(embeddings, "create_position_ids_from_input_ids"):
        return 0
    return int(embeddings.padding_idx) + 1


def _check_directions(
    layers: Collection[ProbedLayer], model_type: str, *, has_output_layer: bool
) -> None:
    """Raise UnsupportedModel unless all layers are causal, or none of a model that only pools."""
    others = [layer for layer in layers if not layer.spec.is_causal]
    if others and has_output_layer:
        raise UnsupportedModel(f"{model_type}: {others[0].module_name} is not causal")
    if others and len(others) < len(layers):
        raise UnsupportedModel(f"{model_type}: only some of its attention layers are causal")
    for layer in others:
        if layer.sinks is not None or layer.spec.kv_source is not None:
            raise UnsupportedModel(
                f"{model_type}: {layer.module_name} is not causal, and has attention sinks or the"
                " keys and values of another layer"
            )


def _top_modules_without(model: PreTrainedModel, used: Collection[str]) -> tuple[str, ...]:
    """Return the names of the topmost modules that have parameters, none of which is in `used`."""
    used_modules = {""}
    for parameter in used:
        parts = parameter.split(".")
        used_modules.update(".".join(parts[:length]) for length in range(1, len(parts)))
    return tuple(
        name
        for name, module in model.named_modules(remove_duplicate=False)
        if name not in used_modules
        and name.rpartition(".")[0] in used_modules
        and next(module.parameters(), None) is not None
    )


def is_within(name: str, modules: Collection[str]) -> bool:
    """Return whether a tensor's name is that of a tensor in one of some modules."""
    return any(name.startswith(f"{module}.") for module in modules)


class _UsedStorages(TorchDispatchMode):
    """Records the storages of all tensors that are computed with."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._used: set[int] = set()

    def add(self, tensors: Iterable[object]) -> None:
        self._used.update(
            leaf.untyped_storage()._cdata for leaf in tensors if isinstance(leaf, torch.Tensor)
        )

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._used

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.add(tree_leaves((args, kwargs or {})))
        return func(*args, **(kwargs or {}))


class _Probe:
    """Takes the place of attention, masks and experts, and records how they are called."""

    def __init__(self, model: nn.Module) -> None:
        self.layers: list[ProbedLayer] = []
        self.storages = _UsedStorages()
        self._module_names = {module: name for name, module in model.named_modules()}
        self._parameters = dict(model.named_parameters())
        self._stored: list[tuple[torch.Tensor, torch.Tensor]] = []  # keys and values by layer
        self.running: list[nn.Module] = []
        """Of a model with attention of its own: the modules whose forward runs, the inner last."""

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
        """Record the call, and return an output of the right shape."""
        name = self._module_names.get(module, type(module).__name__)
        visible = self._visible(name, module, attention_mask, args, kwargs)
        batch, num_heads, length, _ = query.shape
        _, num_kv_heads, key_length, head_dim = key.shape
        _, num_value_heads, value_length, value_head_dim = value.shape
        if not length == key_length == value_length == NUM_PROBE_TOKENS:
            raise UnsupportedModel(f"{name} attends to other tokens than its own row's")
        if num_heads % num_kv_heads or num_kv_heads != num_value_heads:
            raise UnsupportedModel(
                f"{name} has {num_heads} query, {num_kv_heads} key"
                f" and {num_value_heads} value heads"
            )
        shape = (num_heads, num_kv_heads, head_dim, value_head_dim)
        source = self._source(name, key, value, visible)
        spec = LayerSpec(
            *(*shape, visible.window),
            is_chunked=visible.is_chunked,
            kv_source=source,
            is_causal=visible.is_causal,
        )
        sinks = self._sinks(name, kwargs.get("s_aux"), num_heads)
        self.layers.append(ProbedLayer(name, spec, sinks))
        return query.new_empty(batch, length, num_heads, value_head_dim), None

    def own_attention(self, call: OwnCall) -> torch.Tensor:
        """Record a call of a model's own code, and return an output of the right shape."""
        module = self.running[-1]
        name = self._module_names[module]
        if call.layer != len(self.layers):
            raise UnsupportedModel(f"{name} stores keys and values in another order than layers")
        common = [mask.content for mask in call.terms.masks if isinstance(mask, OwnMask)]
        own = [mask for mask in call.terms.masks if not isinstance(mask, OwnMask)]
        # What its own masks show is observed when they have values.
        mask = common[0] if common else ProbedMask(Visibility(None)) if own else None
        rows = (rows.transpose(0, 1).unsqueeze(0) for rows in (call.query, call.key, call.value))
        out, _ = self.attention(module, *rows, mask)
        return out[0]

    def _source(
        self, name: str, key: torch.Tensor, value: torch.Tensor, visible: Visibility
    ) -> int | None:
        """Return the earlier layer whose keys and values a call has, if they are not its own."""
        self._stored.append((key, value))
        for index, layer in enumerate(self.layers):
            earlier_key, earlier_value = self._stored[index]
            if key is not earlier_key and value is not earlier_value:
                continue
            earlier = layer.spec
            same = Visibility(earlier.window, earlier.is_chunked, earlier.is_causal) == visible
            if key is earlier_key and value is earlier_value and same:
                return index
            raise UnsupportedModel(
                f"{name} shares keys or values with {layer.module_name}, and attends otherwise"
            )
        return None

    def _sinks(self, name: str, sinks: object, num_heads: int) -> str | None:
        """Return the name of the parameter that a call has for sinks, if it has any."""
        if sinks is None:
            return None
        for parameter_name, parameter in self._parameters.items():
            if parameter is sinks and parameter.shape == (num_heads,):
                self.storages.add([parameter])
                return parameter_name
        raise UnsupportedModel(f"{name} has attention sinks that are not a parameter of each head")

    @staticmethod
    def _visible(
        name: str,
        module: nn.Module,
        mask: object,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> Visibility:
        """Return what a call of plain attention shows; other calls are rejected."""
        is_causal = getattr(module, "is_causal", True) is not False
        is_causal = is_causal and kwargs.get("is_causal") is not False
        if mask is None and not is_causal:
            mask = ProbedMask(Visibility(None, is_causal=False))
        if not isinstance(mask, ProbedMask):
            raise UnsupportedModel(f"{name} does not attend under a causal mask of its own row")
        if mask.problem:
            raise UnsupportedModel(f"{name}: {mask.problem}")
        given = {key for key, value in kwargs.items() if value is not None}
        unknown = given - _HARMLESS_ARGUMENTS
        if args or unknown:
            described = ", ".join(sorted(unknown)) or "positional arguments"
            raise UnsupportedModel(f"{name} asks for more than attention: {described}")
        window = kwargs.get("sliding_window")
        if window is not None and (mask.visible.window is None or mask.visible.is_chunked):
            raise UnsupportedModel(f"{name} has a sliding window of {window} and a mask without")
        if mask.visible.is_causal and not is_causal:
            raise UnsupportedModel(f"{name} is not causal, and has a causal mask")
        return mask.visible

    @staticmethod
    def mask(*args: object, mask_function: MaskFunction, **kwargs: object) -> ProbedMask:
        """Return what a mask shows instead of the mask."""
        try:
            return ProbedMask(observe(mask_function))
        except UnsupportedModel as error:
            return ProbedMask(Visibility(None), str(error))
        except Exception as error:
            return ProbedMask(
                Visibility(None), f"its mask depends on more than positions ({error})"
            )

    @staticmethod
    def own_mask(*, mask_function: MaskFunction, **kwargs: Any) -> OwnMask:
        """Return a stand-in with what a mask shows."""
        return OwnMask.make(**kwargs, content=_Probe.mask(mask_function=mask_function))

    def experts(
        self, module: nn.Module, hidden: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Record parameters that are computed with; the experts' code branches on values."""
        self.storages.add(module.parameters())
        return torch.empty_like(hidden)


@contextmanager
def _registered(probe: _Probe) -> Iterator[None]:
    functions = (
        (ALL_ATTENTION_FUNCTIONS, PROBE, probe.attention),
        (ALL_MASK_ATTENTION_FUNCTIONS, PROBE, probe.mask),
        (ALL_MASK_ATTENTION_FUNCTIONS, OWN_ATTENTION, probe.own_mask),
        (ALL_EXPERTS_FUNCTIONS, PROBE, probe.experts),
    )
    before = [
        (registry, name, registry._global_mapping.get(name)) for registry, name, _ in functions
    ]
    for registry, name, function in functions:
        registry.register(name, function)
    # Where a mask is built, transformers looks for packed texts in the values of the positions. It
    # does not where models are served, since no mask is registered there.
    find_packed = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    # Chunks begin behind the padding of a row. There is none, but the meta device has no values.
    chunked = masking_utils.chunked_causal_mask_function
    masking_utils.chunked_causal_mask_function = lambda size, padding: chunked(
        size, torch.zeros(padding.shape, dtype=torch.long, device="cpu")
    )
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find_packed
        masking_utils.chunked_causal_mask_function = chunked
        for registry, name, earlier in before:  # of a model that is served already
            registry._global_mapping.pop(name, None)
            if earlier is not None:
                registry.register(name, earlier)


@contextmanager
def _running_modules(model: nn.Module | None, running: list[nn.Module]) -> Iterator[None]:
    """Keep the modules in `running` whose forward runs; None: it is not asked for."""

    def begin(module: nn.Module, args: object) -> None:
        running.append(module)

    def end(module: nn.Module, args: object, result: object) -> None:
        running.pop()

    handles = [
        handle
        for module in (() if model is None else model.modules())
        for handle in (
            module.register_forward_pre_hook(begin),
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
    if attention == OWN_ATTENTION:
        set_implementation(model, attention)
    else:
        model.set_attn_implementation(attention)
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    before = [(c, getattr(c, "_experts_implementation", None)) for c in configs.values()]
    for config, _ in before:
        config._experts_implementation_internal = PROBE
    try:
        yield
    finally:
        for config, experts in before:
            config._experts_implementation_internal = experts
