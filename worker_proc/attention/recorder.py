"""Replaces attention, masks and experts while a model runs without weights.

It records the calls of a forward; see probe.py.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers.pytorch_utils import Conv1D

from worker_proc.attention.compression import MAX_COMPRESSED_HEADS, compression_of
from worker_proc.attention.indexers import ALL_TOKENS
from worker_proc.attention.interface import attending_twice
from worker_proc.attention.observed_masks import MaskFunction, Visibility, observe
from worker_proc.attention.probed_layer import ProbedLayer, RowTerms
from worker_proc.attention.score_terms import (
    distance_terms_of,
    key_biases_of,
    with_key_biases,
)
from worker_proc.attention.stand_ins import OwnCall, OwnMask
from worker_proc.errors import UnsupportedModel
from worker_proc.kv.kv_groups import CompressedSpec, LayerSpec

NUM_PROBE_TOKENS = 8

_LAYERS = (nn.Linear, nn.Embedding, Conv1D)
"""Modules whose matrices are packed according to their class."""
_HARMLESS_ARGUMENTS = frozenset(
    {
        *("cache_position", "cos", "deterministic", "dropout", "is_causal", "output_attentions"),
        *("logits_to_keep", "output_hidden_states", "output_router_logits", "sinks"),
        *("position_bias", "position_embeddings", "position_ids"),
        *("return_dict", "s_aux", "scaling", "sin", "sliding_window", "softcap", "target_dtype"),
        *("use_cache", "use_top_left_mask"),
    }
)


@dataclass(frozen=True, slots=True)
class ProbedMask:
    """Replaces a mask, and holds what the mask shows."""

    visible: Visibility
    problem: str = ""  # raised only if a layer uses the mask
    ndim: ClassVar[int] = 4
    shape: ClassVar[tuple[int, ...]] = (1, 1, NUM_PROBE_TOKENS, NUM_PROBE_TOKENS)
    dtype: ClassVar[torch.dtype] = torch.bool

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedModel(f"its own code computes with a mask ({name})")

    def __getitem__(self, place: object) -> "ProbedMask":
        """Return the mask itself for the slice that an indexer takes."""
        return self

    def __and__(self, other: object) -> "ProbedMask":
        """Return the mask itself, combined with an indexer's choice of all tokens."""
        if other is not ALL_TOKENS:
            raise UnsupportedModel("its own code computes with a mask (and)")
        return self


def _without_rows(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape with 0 instead of the number of rows, which may equal other sizes."""
    sizes = list(shape)
    if NUM_PROBE_TOKENS in sizes:
        sizes[sizes.index(NUM_PROBE_TOKENS)] = 0
    return tuple(sizes)


class _UsedStorages(TorchDispatchMode):
    """Records the storages of all tensors that take part in computation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._used: set[int] = set()

    def add(self, arguments: Iterable[object]) -> None:
        """Add the tensors among the arguments, including those in lists and tuples."""
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                self._used.add(argument.untyped_storage()._cdata)
            elif isinstance(argument, list | tuple):
                self.add(argument)

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._used

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.add(args)
        if not kwargs:
            return func(*args)
        self.add(kwargs.values())
        return func(*args, **kwargs)


class Recorder:
    """Replaces attention, masks and experts, and records their calls."""

    def __init__(self, model: nn.Module) -> None:
        self.layers: list[ProbedLayer] = []
        self.storages = _UsedStorages()
        self._module_names = {module: name for name, module in model.named_modules()}
        self._parameters = dict(model.named_parameters())
        self._stored: list[tuple[torch.Tensor, torch.Tensor]] = []  # keys and values by layer
        self._has_one_row: list[bool] = []
        """For each layer, whether a token's key is also its value."""
        self.running: list[nn.Module] = []
        """The modules whose forward is running, innermost last."""
        self.called: set[nn.Module] = set()
        """The modules whose forward has run."""
        self.num_outputs: dict[nn.Module, int] = {}
        """The number of outputs of modules that return tuples."""
        self.experts_names: list[str] = []
        """The names of the replaced mixtures of experts."""
        self.row_shapes: dict[str, tuple[int, ...]] = {}
        """The row shapes that modules with 2-D matrices take, without the text dimensions."""
        self.argument_shapes: dict[str, dict[str, tuple[int, ...]]] = {}
        """The argument shapes of modules with 3-D matrices; 0 stands for the number of rows."""

    def take_rows(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        """Record the shapes of the rows that a module with its own matrices takes."""
        dims = {weight.dim() for _, weight in module.named_parameters(recurse=False)}
        if isinstance(module, _LAYERS) or not dims & {2, 3}:
            return
        rows = args[0] if len(args) == 1 else None
        if not isinstance(rows, torch.Tensor) or not rows.is_floating_point():
            return
        if rows.dim() < 3 or rows.shape[:2] != (1, NUM_PROBE_TOKENS):
            return
        name = self._module_names[module]
        if 2 in dims:
            self.row_shapes[name] = tuple(rows.shape[2:])
        elif all(isinstance(one, torch.Tensor) for one in kwargs.values()):
            given = {"": rows} | cast(dict[str, torch.Tensor], kwargs)
            self.argument_shapes[name] = {
                key: _without_rows(one.shape) for key, one in given.items()
            }

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
        noted = key_biases_of(module)
        if noted is not None and noted.mask is not None:
            query, key = with_key_biases(query, key, cast(torch.Tensor, attention_mask), 1.0)
            attention_mask, noted.mask = noted.mask, None
        num_distances, has_row_sinks = self._row_terms(name, module, query, kwargs)
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
        terms = RowTerms(num_distances, has_row_sinks, has_key_biases=noted is not None)
        self.layers.append(ProbedLayer(name, spec, sinks, row_terms=terms))
        self._has_one_row.append(key is value and num_kv_heads == 1)
        return query.new_empty(batch, length, num_heads, value_head_dim), None

    @staticmethod
    def _row_terms(
        name: str, module: nn.Module, query: torch.Tensor, kwargs: dict[str, object]
    ) -> tuple[int, bool]:
        """Return the number of distances with biases, and whether queries have sinks."""
        biases, sinks = kwargs.get("position_bias"), kwargs.get("sinks")
        _, num_heads, length, _ = query.shape
        num_distances = 0
        if biases is not None:
            terms = distance_terms_of(module)
            num_distances = 0 if terms is None else terms.num_distances
            shape = (1, num_heads, length, num_distances)
            if not num_distances or getattr(biases, "shape", None) != shape:
                raise UnsupportedModel(f"{name} adds biases of pairs of a query and a key")
        if sinks is not None and getattr(sinks, "shape", None) != (1, num_heads, length, 1):
            raise UnsupportedModel(f"{name} has sinks that are not one of each query and head")
        return num_distances, sinks is not None

    def compressed_layers(self) -> list[ProbedLayer]:
        """Return the layers of a model with compressors; others have a window only."""
        modules = {name: module for module, name in self._module_names.items()}
        name = attending_twice(layer.module_name for layer in self.layers)
        if name is not None:
            raise UnsupportedModel(f"{name} attends several times beside compressed entries")
        found = []
        for layer, has_one_row in zip(self.layers, self._has_one_row, strict=True):
            spec = layer.spec
            if spec.window is None or spec.is_chunked or spec.kv_source is not None:
                raise UnsupportedModel(f"{layer.module_name} has no window beside entries")
            if not has_one_row or spec.num_heads > MAX_COMPRESSED_HEADS:
                raise UnsupportedModel(
                    f"{layer.module_name} has entries beside keys that differ from values, or more"
                    f" than {MAX_COMPRESSED_HEADS} heads"
                )
            compression = compression_of(modules[layer.module_name])
            compressed = CompressedSpec(spec.window)
            if compression is not None:
                compressed = compression.spec(spec.window, spec.head_dim)
            spec = replace(spec, window=None, is_latent=True, compressed=compressed)
            found.append(replace(layer, spec=spec))
        return found

    def own_attention(self, call: OwnCall) -> torch.Tensor:
        """Record a call of a model's own attention, and return an output of the right shape."""
        module = self.running[-1]
        name = self._module_names[module]
        if call.layer != len(self.layers):
            raise UnsupportedModel(f"{name} stores keys and values in another order than layers")
        common = [mask.content for mask in call.terms.masks if isinstance(mask, OwnMask)]
        own = [mask for mask in call.terms.masks if not isinstance(mask, OwnMask)]
        # The module's own masks are observed later, when they have values.
        mask = common[0] if common else ProbedMask(Visibility(None)) if own else None
        rows = (rows.transpose(0, 1).unsqueeze(0) for rows in (call.query, call.key, call.value))
        out, _ = self.attention(module, *rows, mask)
        return out[0]

    def _source(
        self, name: str, key: torch.Tensor, value: torch.Tensor, visible: Visibility
    ) -> int | None:
        """Return the earlier layer whose keys and values a call reuses; None: they are its own."""
        self._stored.append((key, value))
        for index, layer in enumerate(self.layers):
            earlier_key, earlier_value = self._stored[index]
            if key is not earlier_key and value is not earlier_value:
                continue
            if layer.module_name == name and (key is not earlier_key or value is not earlier_value):
                continue  # it attends again, with the same keys and other values: both are stored
            earlier = layer.spec
            same = Visibility(earlier.window, earlier.is_chunked, earlier.is_causal) == visible
            if key is earlier_key and value is earlier_value and same:
                return index
            raise UnsupportedModel(
                f"{name} shares keys or values with {layer.module_name}, but attends differently"
            )
        return None

    def _sinks(self, name: str, sinks: object, num_heads: int) -> str | None:
        """Return the name of the parameter that a call passes as sinks; None: no sinks."""
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
        """Return what a plain attention call shows; raise UnsupportedModel for other calls."""
        is_causal = getattr(module, "is_causal", True) is not False
        is_causal = is_causal and kwargs.get("is_causal") is not False
        if mask is None and not is_causal:
            mask = ProbedMask(Visibility(None, is_causal=False))
        if mask is ALL_TOKENS:
            mask = ProbedMask(Visibility(None))
        if not isinstance(mask, ProbedMask):
            raise UnsupportedModel(f"{name} does not attend under a causal mask of its own row")
        if mask.problem:
            raise UnsupportedModel(f"{name}: {mask.problem}")
        given = {
            key for key, value in kwargs.items() if value is not None and value is not ALL_TOKENS
        }
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
        """Return what a mask shows instead of the mask; keep a mask that is made already."""
        if isinstance(made := kwargs.get("attention_mask"), ProbedMask):
            return made
        try:
            with _disable_current_modes():  # it evaluates positions, about a thousand times
                return ProbedMask(observe(mask_function))
        except UnsupportedModel as error:
            return ProbedMask(Visibility(None), str(error))
        except Exception as error:
            return ProbedMask(
                Visibility(None), f"its mask depends on more than positions ({error})"
            )

    @staticmethod
    def own_mask(*, mask_function: MaskFunction, **kwargs: Any) -> OwnMask:
        """Return a stand-in that holds what a mask shows."""
        return OwnMask.make(**kwargs, content=Recorder.mask(mask_function=mask_function))

    def experts(
        self, module: nn.Module, hidden: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Record the experts' parameters as used; their own code branches on values."""
        self.storages.add(module.parameters())
        self.experts_names.append(self._module_names[module])
        return torch.empty_like(hidden)

    def sized_experts(self, module: nn.Module, inputs: torch.Tensor, *args: Any) -> torch.Tensor:
        """Record the parameters of experts that take sorted rows."""
        self.storages.add(module.parameters())
        self.experts_names.append(self._module_names[module])
        return inputs.new_empty(len(inputs), module.get_parameter("weight").shape[1])
