"""Proves at load which sites of a model take adapters, and that their products are added there.

Two random adapters are added to two short texts: once to the outputs of the model's modules, by
PyTorch in float32, and once by the code that will serve the model. Both must give the same logits,
and both texts must have the same bits however they are computed, together or alone.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from worker_proc.adapters.matrices import LoadedAdapter, Product, matrix_of
from worker_proc.adapters.rows import Part
from worker_proc.adapters.sites import Site, Sites
from worker_proc.adapters.store import AdapterStore
from worker_proc.attention.interface import AttentionBackend
from worker_proc.calibration.same_bits import have_same_bits
from worker_proc.calibration.self_check import (
    NUM_DECODED,
    check_texts,
    compute_stepwise,
    compute_whole,
    max_error,
    median_error,
)
from worker_proc.decoder.adapter_sites import sites_of_layers
from worker_proc.decoder.install import decoding, layer_names, uninstall
from worker_proc.decoder.layers import LayerSettings
from worker_proc.errors import UnsupportedModel
from worker_proc.inputs import StepInputs
from worker_proc.kv.kv_groups import KVLayout
from worker_proc.loading.deferred_module import make_generator
from worker_proc.loading.prepared import PreparedModel

_RANKS = (3, 6)
_SCALE = 0.5
_MIN_EFFECT = 10.0
"""The least ratio of the adapters' effect to the error."""

Add = Callable[[int, Site, torch.Tensor, torch.Tensor], None]


class AdapterProof(NamedTuple):
    """The sites that take adapters, and whether their bits are independent of the schedule."""

    allowed: bytes = b""
    """A bit for each site."""
    problem: str = ""
    """The reason why bits may differ; empty: they do not."""

    def apply(self, sites: Sites) -> None:
        """Allow adapters at the proven sites, and at no others."""
        bits = int.from_bytes(self.allowed, "little")
        sites.allowed = {number for number in range(len(sites)) if bits >> number & 1}


def prove_adapters(
    prepared: PreparedModel,
    store: AdapterStore,
    backend: AttentionBackend,
    layout: KVLayout,
    settings: Sequence[LayerSettings],
    *,
    is_whole: bool,
) -> AdapterProof:
    """Prove which sites take adapters.

    `settings` and `is_whole` are those of the native decoder. The modules are already adapted.
    Raises UnsupportedModel if no site takes adapters, or if the logits differ.
    """
    loaded, sites = prepared.loaded, store.sites
    kind = loaded.model.config.model_type
    uninstall(prepared)
    sites.allowed = _called(prepared, store, backend, layout)
    if settings:
        sites.allowed &= set(sites_of_layers(sites, layer_names(loaded)).values())
    if not sites.allowed:
        raise UnsupportedModel(f"enable_lora: {kind} has no linear layers that take adapters")
    adapters = [_random_adapter(store, rank, seed) for seed, rank in enumerate(_RANKS)]
    plain = compute_stepwise(loaded, backend, layout)
    with _adapting(store, backend, adapters), _adding(store, _adder(store)):
        expected = compute_stepwise(loaded, backend, layout)
    texts = check_texts(loaded.vocab_size)
    with decoding(prepared, settings, is_whole=is_whole):
        base = compute_stepwise(loaded, backend, layout)
        with _adapting(store, backend, adapters):
            found = compute_stepwise(loaded, backend, layout)
            whole = compute_whole(loaded, backend, layout, texts)
        with _adapting(store, backend, [adapters[0]]):
            beside = compute_stepwise(loaded, backend, layout)
    error, effect = median_error(found, expected), median_error(expected, plain)
    if not error <= max_error(loaded.dtype) or not effect >= _MIN_EFFECT * error:
        raise UnsupportedModel(
            f"enable_lora: {kind}: its logits with adapters differ from those with their products"
            f" added to each linear layer (relative error {error:.3g})"
        )
    is_exact = (
        all(map(have_same_bits, whole, found))
        and have_same_bits(beside[0], found[0])
        and have_same_bits(beside[1], base[1])
    )
    bits = sum(1 << number for number in sites.allowed)
    problem = "" if is_exact else "the products of adapters have other bits in other batches"
    return AdapterProof(bits.to_bytes(-(-len(sites) // 8), "little"), problem)


@contextmanager
def _adapting(
    store: AdapterStore, backend: AttentionBackend, adapters: Sequence[LoadedAdapter]
) -> Iterator[None]:
    """Apply an adapter to each of the first texts within the context."""
    begin_step = backend.begin_step

    def begin(inputs: StepInputs) -> None:
        begin_step(inputs)
        parts: list[Part] = []
        for part, first in zip(inputs.parts, inputs.first_rows, strict=True):
            if part.request.req_id < len(adapters):
                rows = range(first, first + part.num_tokens)
                parts.append((adapters[part.request.req_id], rows))
        store.rows.begin(parts, inputs.input_ids.shape[1])

    backend.__dict__["begin_step"] = begin
    try:
        yield
    finally:
        del backend.__dict__["begin_step"]
        store.rows.clear()


@contextmanager
def _adding(store: AdapterStore, add: Add) -> Iterator[None]:
    """Replace the kernel that adds products by `add` within the context."""
    store.rows.__dict__["add_products"] = add
    try:
        yield
    finally:
        del store.rows.__dict__["add_products"]


def _called(
    prepared: PreparedModel, store: AdapterStore, backend: AttentionBackend, layout: KVLayout
) -> set[int]:
    """Return the sites whose modules compute all rows of every step exactly once."""
    calls: Counter[int] = Counter()
    others: set[int] = set()

    def count(number: int, site: Site, rows: torch.Tensor, outputs: torch.Tensor) -> None:
        calls[number] += 1
        if len(rows) != store.rows.num_rows:
            others.add(number)

    store.sites.allowed = set(range(len(store.sites)))
    nothing = LoadedAdapter(store.library, store.dtype, store.sites, {})
    with _adapting(store, backend, [nothing]), _adding(store, count):
        compute_stepwise(prepared.loaded, backend, layout)
    num_steps = 1 + NUM_DECODED
    return {number for number, num_calls in calls.items() if num_calls == num_steps} - others


def _adder(store: AdapterStore) -> Add:
    """Return a function that adds products in PyTorch, in float32."""

    def add(number: int, site: Site, rows: torch.Tensor, outputs: torch.Tensor) -> None:
        for adapter, numbers in store.rows.parts:
            matrices = adapter.matrices(number)
            if matrices is None:
                continue
            down, up, scale = matrices
            index = torch.tensor(list(numbers))
            inner = rows[index].float() @ down[:, : site.num_inputs].float().T
            product = inner @ up[:, : site.num_outputs].float() * scale
            outputs[index] = (outputs[index].float() + product).to(outputs.dtype)

    return add


def _random_adapter(store: AdapterStore, rank: int, seed: int) -> LoadedAdapter:
    """Return an adapter at all sites, with products about as large as the outputs."""
    generator = make_generator(seed)
    products, kept = {}, []
    for name, numbers in store.sites.of_module.items():
        if not store.sites.allowed.issuperset(numbers):
            continue
        sites = [store.sites.all[number] for number in numbers]
        num_inputs = sites[0].num_inputs
        num_outputs = sum(site.num_outputs for site in sites)
        down = torch.randn(rank, num_inputs, generator=generator) / num_inputs**0.5
        up = torch.randn(num_outputs, rank, generator=generator) / rank**0.5
        kept.append((down, up))
        parts = [matrix_of(up).rows(site.first_output, site.num_outputs) for site in sites]
        products[name] = Product(matrix_of(down), parts, _SCALE)
    return LoadedAdapter(store.library, store.dtype, store.sites, products)
