"""Serves models whose own code computes attention (attention/stand_ins.py), if proven.

The terms that their code adds to scores are observed once the weights have values: biases by head
and position (ALiBi), windows in the module's own masks, and key heads that are stored repeatedly.
Then each module must reproduce the results of its own forward in transformers, on random rows of
several scales, with an empty cache and with a nearly full one. Both are computed in float32, so
that only the order of sums differs.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers import DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from worker_proc.attention.interface import (
    PagedLayer,
    Rows,
    Scoring,
    set_implementation,
    transformers_attention,
)
from worker_proc.attention.probed_layer import ProbedLayer
from worker_proc.attention.stand_ins import (
    OWN_ATTENTION,
    OwnCache,
    OwnCall,
    OwnMask,
)
from worker_proc.errors import UnsupportedModel
from worker_proc.kv.kv_groups import LayerSpec
from worker_proc.loading.deferred_module import make_generator
from worker_proc.loading.loaded_model import LoadedModel
from worker_proc.modules.trial_calls import first_calls, in_float32
from worker_proc.modules.trial_errors import TRIAL_SCALES, greatest, greatest_row_error
from worker_proc.recurrent.cache_argument import CACHE

NUM_TOKENS = 7
MAX_PROOF_LEN = 2048
"""Maximum number of key positions in a proof."""
MAX_BIASED_LEN = 2**20
"""The longest context: bias tables, and tensors of modules, have a column for each position."""
MAX_ERROR = 1e-4
"""Greatest error of a row, relative to its norm; larger rows lead to scores of hundreds."""
BIASES = "paged_biases"
"""The buffer for biases that is added to an attention module."""
_ROOM = 128
"""Padding columns, which kernels may read but never use."""
_SAME = 1e-6
"""The greatest relative difference from the product of a slope and a position."""


@dataclass(frozen=True, slots=True)
class OwnLayer:
    """Observed and proven properties of an attention module."""

    spec: LayerSpec
    biases_of: int | None = None
    """The first layer with the same biases; None: no biases."""


class _Biases(NamedTuple):
    """Biases that are added to scores; see `PagedLayer`."""

    values: torch.Tensor  # float32 [num_heads, columns]
    origin: int | None = None

    def is_same(self, other: "_Biases") -> bool:
        return self.origin == other.origin and torch.equal(self.values, other.values)

    def of_rows(self, rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return `[num_heads, rows, keys]`, given positions `[rows, 1]` and `[keys]`.

        Biases by key position have 1 instead of rows. Biases of keys after the row are not used.
        """
        columns = keys[None] if self.origin is None else keys - rows + self.origin
        return self.values[:, columns.clamp(0, self.values.shape[1] - 1)]


class _Inputs(NamedTuple):
    """The arguments of an attention module, and the cache among them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    cache: object

    def call(self, module: nn.Module, rows: torch.Tensor, cache: object) -> torch.Tensor:
        """Return the module's output for `[1, NUM_TOKENS, size]`; a residual is zero."""
        is_given = False

        def filled(value: Any) -> Any:
            nonlocal is_given
            if value is self.cache:
                return cache
            if not isinstance(value, torch.Tensor) or value.shape != rows.shape:
                return value
            is_first, is_given = not is_given, True
            return rows if is_first else torch.zeros_like(rows)

        args = tuple(map(filled, self.args))
        result = module(*args, **{key: filled(value) for key, value in self.kwargs.items()})
        return cast(torch.Tensor, result[0] if isinstance(result, tuple) else result)


def install_own_attention(
    loaded: LoadedModel,
    known: Sequence[OwnLayer] | None = None,
    *,
    max_model_len: int | None = None,
) -> tuple[LoadedModel, list[OwnLayer]]:
    """Compute a model's own attention over the paged cache, if it has any.

    Returns the model with its observed layers, and what was proven of each. `known` is such a
    result of an earlier start; with it, nothing is tried. Biases cover texts of up to
    `max_model_len` tokens, which then limits the model's context. Raises UnsupportedModel if a
    module differs from its own forward.
    """
    if not loaded.has_own_attention:
        return loaded, []
    length = min(loaded.model_len, max_model_len or loaded.model_len)
    loaded = replace(loaded, model_len=length)
    modules = [loaded.model.get_submodule(layer.module_name) for layer in loaded.layers]
    ALL_MASK_ATTENTION_FUNCTIONS.register(OWN_ATTENTION, OwnMask.make)
    set_implementation(loaded.model, OWN_ATTENTION)
    with torch.inference_mode():
        found, tables = _observe(loaded, modules, known)
        if known is None:
            _prove(loaded, modules, found, tables)
    layers = []
    for probed, module, layer in zip(loaded.layers, modules, found, strict=True):
        biases = origin = None
        if layer.biases_of is not None:
            values, origin = tables[layer.biases_of]
            module.register_buffer(BIASES, values, persistent=False)
            biases = f"{probed.module_name}.{BIASES}"
        layers.append(replace(probed, spec=layer.spec, biases=biases, bias_origin=origin))
    _give_cache(loaded, modules)
    return replace(loaded, layers=layers), found


def check_length(length: int, source: str) -> None:
    """Raise UnsupportedModel for a context that is too long; `source` names its setting."""
    if length > MAX_BIASED_LEN:
        raise UnsupportedModel(
            f"{source} is {length}, and a model that attends by code of its own has a context of"
            f" at most {MAX_BIASED_LEN} tokens; set a smaller max_model_len"
        )


def table_bytes(layers: Sequence[ProbedLayer], length: int) -> int:
    """Return the most bytes that the biases for a context of `length` tokens take."""
    num_heads = max((layer.spec.num_heads for layer in layers), default=0)
    return num_heads * (length + _ROOM) * torch.float32.itemsize


def _give_cache(loaded: LoadedModel, modules: list[nn.Module]) -> None:
    """Pass the model a cache that returns stand-ins for keys and values."""

    def attend(call: OwnCall) -> torch.Tensor:
        layer: PagedLayer = modules[call.layer].__dict__["paged_layer"]
        repeats = call.key.shape[1] // layer.spec.num_kv_heads
        rows = (call.query, call.key[:, ::repeats], call.value[:, ::repeats])
        scoring = Scoring(call.terms.scale, None)
        return layer.backend.attend(layer, Rows(*(r.to(loaded.dtype) for r in rows)), scoring)

    def give(
        module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if module.config._attn_implementation == OWN_ATTENTION:
            kwargs = kwargs | {CACHE: OwnCache(attend)}
        return args, kwargs

    decoder: nn.Module = loaded.model.get_decoder()
    decoder.register_forward_pre_hook(give, with_kwargs=True)


def _observe(
    loaded: LoadedModel, modules: list[nn.Module], known: Sequence[OwnLayer] | None
) -> tuple[list[OwnLayer], dict[int, _Biases]]:
    """Return the observed layers, and each distinct bias table by its first layer.

    If layers are known, only the modules that own a bias table are called.
    """
    length = loaded.model_len
    num_rows = min(NUM_TOKENS, length)
    calls: list[OwnCall] = []

    def attend(call: OwnCall) -> torch.Tensor:
        calls.append(call)
        return call.query.new_zeros(*call.query.shape[:2], call.value.shape[2])

    cache = OwnCache(attend, length - num_rows)
    inputs = _record(loaded, modules[0], cache, length - num_rows, num_rows)
    layers: list[OwnLayer] = []
    tables: dict[int, _Biases] = {}
    for number, (probed, module) in enumerate(zip(loaded.layers, modules, strict=True)):
        if known is not None and known[number].biases_of != number:
            layers.append(known[number])
            continue
        with in_float32(module) as own:
            inputs.call(own, _random_rows(own, inputs), cache)
            call = calls.pop()
            # Repeat with other weights: heads with equal weights may differ once an adapter is
            # added.
            for parameter in own.parameters():
                parameter.copy_(_like(parameter))
            inputs.call(own, _random_rows(own, inputs), cache)
            num_kv_heads = _num_kv_heads(calls.pop())
        table = _biases(call, length)
        biases_of = None
        if table is not None:
            same = (first for first, other in tables.items() if table.is_same(other))
            biases_of = next(same, number)
            tables.setdefault(biases_of, table)
        spec = replace(
            probed.spec,
            num_kv_heads=num_kv_heads,
            window=_window(probed.module_name, call, length) or probed.spec.window,
        )
        layers.append(OwnLayer(spec, biases_of))
    return layers, {
        first: table._replace(values=nn.functional.pad(table.values, (0, _ROOM)).contiguous())
        for first, table in tables.items()
    }


def _biases(call: OwnCall, length: int) -> _Biases | None:
    """Return the biases that are added to the scores of the last row, or None."""
    num_heads = call.query.shape[1]
    table = torch.zeros(num_heads, length, device=call.query.device)
    for tensor, factor in call.terms.biases:
        if not tensor.is_meta:
            shape = (-1, *tensor.shape[-2:])
            table += tensor.reshape(shape)[:, -1, -length:].float() * factor
    if not table.any():
        return None
    return _by_distance(table) or _Biases(table)


def _by_distance(table: torch.Tensor) -> _Biases | None:
    """Return biases by distance if `table` holds slopes times positions (ALiBi), else None.

    MPT's biases are zero at the last key and Bloom's at the first. Differences between large
    products would lose precision in long texts.
    """
    last = table.shape[1] - 1
    if last > 0 and not table[:, 0].any():
        slopes, zero = table[:, 1], 0
    elif last > 0 and not table[:, last].any():
        slopes, zero = -table[:, last - 1], last
    else:
        return None
    positions = torch.arange(last + 1, device=table.device)
    difference = table - slopes[:, None] * (positions - zero)
    if not bool((difference.abs() <= _SAME * table.abs()).all()):
        return None
    return _Biases(slopes[:, None] * (positions - last), last)


def _num_kv_heads(call: OwnCall) -> int:
    """Return the number of distinct key and value heads; the others are copies."""
    heads = call.key.shape[1]
    for number in range(1, heads):
        if heads % number:
            continue
        groups = [rows.unflatten(1, (number, -1)) for rows in (call.key, call.value)]
        if all(torch.equal(group, group[:, :, :1].expand_as(group)) for group in groups):
            return number
    return heads


def _window(name: str, call: OwnCall, length: int) -> int | None:
    """Return the window of a module's own masks; None: they show all positions."""
    own = [mask for mask in call.terms.masks if not isinstance(mask, OwnMask)]
    if not own:
        return None
    num_rows, device = len(call.query), own[0].device
    seen = torch.ones(num_rows, length, dtype=torch.bool, device=device)
    for mask in own:
        seen &= mask.reshape(-1, *mask.shape[-2:])[0]
    rows = torch.arange(length - num_rows, length, device=device)[:, None]
    keys = torch.arange(length, device=device)
    window = int(seen[-1].sum())
    if not torch.equal(seen, (keys <= rows) & (keys > rows - window)):
        raise UnsupportedModel(f"{name} has a mask of its own that is not a window")
    return None if window == length else window


def _prove(
    loaded: LoadedModel,
    modules: list[nn.Module],
    layers: list[OwnLayer],
    tables: dict[int, _Biases],
) -> None:
    """Raise UnsupportedModel unless all modules reproduce the results of their own forward."""
    length = min(loaded.model_len, MAX_PROOF_LEN)
    num_rows = min(NUM_TOKENS, length)
    for num_past in sorted({0, length - num_rows}):
        ours = _record(loaded, modules[0], OwnCache(_never, num_past), num_past, num_rows)
        spec = loaded.layers[0].spec
        with transformers_attention(loaded.model):
            cache = _filled_cache(0, *(_zeros(spec, num_past, dim) for dim in spec.stored_dims))
            theirs = _record(loaded, modules[0], cache, num_past, num_rows)
        for number, (probed, module) in enumerate(zip(loaded.layers, modules, strict=True)):
            layer = layers[number]
            table = None if layer.biases_of is None else tables[layer.biases_of]
            trial = _Trial(number, probed.spec, layer.spec, table, num_past)
            with in_float32(module) as own:
                error = trial.error(loaded.model, own, ours, theirs)
            if not error <= MAX_ERROR:
                raise UnsupportedModel(
                    f"{probed.module_name} ({type(module).__name__}) differs from its own forward"
                    f" (relative error {error:.3g})"
                )


class _Trial(NamedTuple):
    """A trial of one layer with a number of past tokens."""

    number: int
    stored: LayerSpec  # with the heads that the module stores
    spec: LayerSpec
    biases: _Biases | None
    num_past: int

    def error(self, model: nn.Module, module: nn.Module, ours: _Inputs, theirs: _Inputs) -> float:
        """Return the greatest error of a row at any scale, relative to its norm."""
        generator = make_generator(1)
        device = next(module.parameters()).device
        heads = self.spec.num_kv_heads
        past = [
            torch.randn(self.num_past, heads, dim, generator=generator).to(device)
            for dim in self.spec.stored_dims
        ]
        repeats = self.stored.num_kv_heads // heads
        in_cache = [
            rows.repeat_interleave(repeats, dim=1).transpose(0, 1).unsqueeze(0) for rows in past
        ]
        attend = _Attention(self, past).attend
        errors = []
        for scale in TRIAL_SCALES:
            rows = _random_rows(module, ours) * scale
            with transformers_attention(model):
                cache = _filled_cache(self.number, *in_cache)
                expected = theirs.call(module, rows, cache)
            found = ours.call(module, rows, OwnCache(attend, self.num_past))
            if expected.shape != found.shape:
                return math.inf
            errors.append(greatest_row_error(found, expected))
        return greatest(errors)


class _Attention(NamedTuple):
    """Attention in PyTorch, equivalent to attention over the paged cache."""

    trial: _Trial
    past: list[torch.Tensor]  # keys and values, [num_past, num_kv_heads, dim]

    def attend(self, call: OwnCall) -> torch.Tensor:
        """Return `[T, num_heads, value_head_dim]`."""
        spec = self.trial.spec
        repeats = call.key.shape[1] // spec.num_kv_heads
        key, value = (
            torch.cat([past, rows[:, ::repeats]]).repeat_interleave(
                spec.num_heads // spec.num_kv_heads, dim=1
            )
            for past, rows in zip(self.past, (call.key, call.value), strict=True)
        )
        scores = torch.einsum("qhd,khd->hqk", call.query, key) * call.terms.scale
        keys = torch.arange(len(key), device=key.device)
        rows = keys[self.trial.num_past :, None]
        if self.trial.biases is not None:
            scores += self.trial.biases.of_rows(rows, keys)
        is_hidden = keys > rows
        if spec.window is not None:
            is_hidden |= keys <= rows - spec.window
        weights = scores.masked_fill(is_hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, value)


def _never(call: OwnCall) -> torch.Tensor:
    raise AssertionError("a forward is recorded, and ends before it attends")


def _filled_cache(number: int, key: torch.Tensor, value: torch.Tensor) -> DynamicCache:
    """Return a cache of transformers with `[1, num_kv_heads, T, dim]` in one layer."""
    cache = DynamicCache()
    cache.update(key, value, number)
    return cache


def _zeros(spec: LayerSpec, num_past: int, dim: int) -> torch.Tensor:
    return torch.zeros(1, spec.num_kv_heads, num_past, dim)


def _random_rows(module: nn.Module, inputs: _Inputs) -> torch.Tensor:
    shape = next(
        value.shape
        for value in (*inputs.args, *inputs.kwargs.values())
        if isinstance(value, torch.Tensor) and value.dim() == 3 and value.is_floating_point()
    )
    device = next(module.parameters()).device
    return torch.randn(shape, generator=make_generator(1)).to(device)


def _like(parameter: torch.Tensor) -> torch.Tensor:
    """Return random values for a parameter, scaled so that rows keep about their magnitude."""
    values = torch.randn(parameter.shape, generator=make_generator(2))
    return values.to(parameter.device) / math.sqrt(max(parameter.shape[-1], 1))


def _record(
    loaded: LoadedModel, module: nn.Module, cache: object, num_past: int, num_rows: int
) -> _Inputs:
    """Return the first attention module's arguments, in float32, with `num_past` cached tokens."""
    decoder: nn.Module = loaded.model.get_decoder()
    size = loaded.model.config.get_text_config(decoder=True).hidden_size
    rows = torch.zeros(1, num_rows, size, device=loaded.device)
    positions = torch.arange(num_past, num_past + num_rows, device=loaded.device).unsqueeze(0)

    def forward() -> None:
        decoder(inputs_embeds=rows, position_ids=positions, **{CACHE: cache})

    try:
        with _norms_pass_rows(decoder):
            calls = first_calls([module], forward)
    except UnsupportedModel:
        raise
    except (TypeError, AttributeError, RuntimeError, ValueError) as error:
        kind = loaded.model.config.model_type
        raise UnsupportedModel(f"{kind}: its forward fails with a cache: {error}") from error
    if not calls:
        raise UnsupportedModel(f"{loaded.model.config.model_type}: its forward does not attend")
    return _Inputs(*calls[type(module)], cache)


@contextmanager
def _norms_pass_rows(model: nn.Module) -> Iterator[None]:
    """Make norms return their input, so that float32 rows reach attention in a model of any dtype.

    The values of these rows are not used: random rows replace them.
    """
    norms = [
        module
        for module in model.modules()
        if (parameters := [*module.parameters(recurse=False)])
        and all(parameter.dim() == 1 for parameter in parameters)
        and next(module.children(), None) is None
    ]
    pass_rows: Callable[..., torch.Tensor] = lambda rows: rows  # noqa: E731
    for module in norms:
        module.__dict__["forward"] = pass_rows
    try:
        yield
    finally:
        for module in norms:
            del module.__dict__["forward"]
