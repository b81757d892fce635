"""Experts whose rows are multiplied by the router's scores before they are computed (Llama-4).

transformers computes every row by every expert there; rows are zero for experts that they have not
chosen. Here a row is computed by its own experts only. The module, its router and its shared expert
stay transformers' own; only its forward is replaced, if the results agree.
"""

from collections.abc import Callable

import torch
from torch import nn

from worker_proc.loading.deferred_module import make_generator
from worker_proc.modules.coded_weights import dequantized
from worker_proc.modules.experts.coded import round_experts
from worker_proc.modules.experts.grouped import (
    MAX_ERROR,
    TRIAL_SCALES,
    GroupedExperts,
    gating_of,
    read_experts,
)
from worker_proc.modules.trial_errors import greatest_error
from worker_proc.native.kernels import NativeLibrary
from worker_proc.native.packed_weights import Format
from worker_proc.native.structures import Activation

NUM_TRIAL_ROWS = 64
_PARTS = {"experts", "router", "shared_expert"}
Result = tuple[torch.Tensor, torch.Tensor]


class ScaledExperts:
    """The forward of a mixture whose experts take scaled rows."""

    def __init__(self, module: nn.Module, experts: GroupedExperts, num_chosen: int) -> None:
        self._module = module
        self._experts = experts
        self._num_chosen = num_chosen

    def __call__(self, hidden: torch.Tensor) -> Result:
        """Return the output rows and the router's logits for `[..., hidden_size]`."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        scores, logits = self._module.get_submodule("router")(rows)
        weights, index = scores.topk(self._num_chosen, dim=-1)
        index, order = index.sort(dim=-1)
        weights = weights.gather(-1, order)
        scaled = (rows.unsqueeze(1) * weights.unsqueeze(-1)).flatten(0, 1)
        ones = torch.ones(len(scaled), 1, dtype=scaled.dtype)
        computed = self._experts(scaled, index.reshape(-1, 1), ones)
        parts = computed.view(len(rows), self._num_chosen, -1).unbind(1)
        total = parts[0]
        for part in parts[1:]:  # in ascending order of expert numbers
            total = total + part
        return self._module.get_submodule("shared_expert")(rows) + total, logits


def has_scaled_experts(module: nn.Module) -> bool:
    """Return whether a module, which may be on the meta device, has the parts of such a mixture."""
    names = {name for name, _ in module.named_children()}
    return names == _PARTS and isinstance(getattr(module, "top_k", None), int)


@torch.inference_mode()
def scaled_experts(
    module: nn.Module,
    library: NativeLibrary,
    activation_of: Callable[[object], Activation | None],
    format: Format,
    *,
    is_proven: bool,
) -> GroupedExperts | None:
    """Replace the experts of a module and its forward, if they are proven equivalent.

    Returns the new experts, or None if the module is something else or not proven; the weights of
    experts that were tried have been rounded to `format` even then.
    """
    if not has_scaled_experts(module):
        return None
    num_chosen = module.top_k
    assert isinstance(num_chosen, int)
    if format is Format.INT8_FOR_CODES:  # no reference computes with codes of these rows
        return None
    own = module.get_submodule("experts")
    experts = read_experts(own)
    gating = gating_of(own, activation_of(getattr(own, "act_fn", None)))
    if experts is None or gating is None or num_chosen > len(experts.down):
        return None
    if not is_proven and format is not Format.UNITS:
        del experts  # rounded copies replace them one by one
        round_experts(own, library, format)
        experts = read_experts(own)
        assert experts is not None
    replacement = GroupedExperts(library, gating, experts, format)
    forward = ScaledExperts(module, replacement, num_chosen)
    if not is_proven and not _agrees(module, forward):
        return None
    setattr(module, "experts", replacement)  # noqa: B010 (a module has no such field)
    module.__dict__["forward"] = forward
    return replacement


def _agrees(module: nn.Module, forward: ScaledExperts) -> bool:
    """Return whether `forward` reproduces the module's results, on rows of several scales."""
    experts = read_experts(module.get_submodule("experts"))
    assert experts is not None
    dtype = experts.down.weights.dtype
    generator = make_generator(1)
    rows = torch.randn(1, NUM_TRIAL_ROWS, experts.sizes.hidden_size, generator=generator)
    for scale in TRIAL_SCALES:
        trial = (rows * scale).to(dtype)
        try:
            with dequantized(module):
                expected, logits = module(trial)
                found, own_logits = forward(trial)
        except (TypeError, ValueError, AttributeError, RuntimeError):
            return False  # a module with another interface
        if expected.shape != found.shape or not torch.equal(logits, own_logits):
            return False
        if not greatest_error(found.float(), expected.float()) <= MAX_ERROR[dtype]:
            return False
    return True
