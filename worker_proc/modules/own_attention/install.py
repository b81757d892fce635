"""Computes the attention of a model's own code over the paged cache, if every layer is proven.

The modules receive stand-ins for keys and values (attention/stand_ins.py). The terms that their
code adds to scores are observed once the weights have values: biases by head and position (ALiBi),
windows in the module's own masks, and key heads that are stored repeatedly. Then each module must
reproduce the results of its own forward in transformers, on random rows of several scales, with an
empty cache and with a nearly full one. Both are computed in float32, so that only the order of sums
differs.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from worker_proc.attention.interface import PagedLayer, Rows, Scoring, set_implementation
from worker_proc.attention.stand_ins import OWN_ATTENTION, OwnCache, OwnCall, OwnMask
from worker_proc.loading.loaded_model import LoadedModel
from worker_proc.modules.own_attention.observation import OwnLayer, observe
from worker_proc.modules.own_attention.proof import prove
from worker_proc.recurrent.cache_argument import CACHE

BIASES = "paged_biases"
"""The buffer for biases that is added to an attention module."""


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
        found, tables = observe(loaded, modules, known)
        if known is None:
            prove(loaded, modules, found, tables)
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
