"""An MLP with gates over two packed matrices: that of gates and factors, and the last one."""

from contextlib import ExitStack

import torch
from torch import nn

from worker_proc.modules.coded_linear import computing_codes, round_linears
from worker_proc.modules.coded_weights import dequantized, pack_weight, takes_row_codes
from worker_proc.modules.packed_linear import make_linear
from worker_proc.modules.pointwise import activation_of
from worker_proc.modules.trial_candidates import closest_candidate
from worker_proc.native.instructions import projection
from worker_proc.native.kernels import NativeLibrary
from worker_proc.native.packed_weights import Format
from worker_proc.native.structures import Activation, Epilogue


class FusedMLP(nn.Module):
    """down(f(gate(x)) · up(x)), with one packed matrix for gate and up."""

    def __init__(
        self,
        library: NativeLibrary,
        activation: Activation,
        gates: tuple[torch.Tensor, torch.Tensor | None],
        down: tuple[torch.Tensor, torch.Tensor | None],
        format: Format = Format.UNITS,
    ) -> None:
        """Pack weights and biases; `gates` is `[2 * size, in_features]`, gates before factors."""
        super().__init__()
        weight, bias = gates
        self.gate_up = pack_weight(library, weight, bias, format, gates=True)
        self.down_proj = make_linear(*down, library, format)
        self.activation = activation
        self.size = len(weight) // 2
        self._library = library
        self._instruction = projection(
            self.gate_up, epilogue=Epilogue.ACTIVATE, activation=activation
        )
        self._width = self.gate_up.num_outputs // 2
        self._splitting = projection(self.gate_up, epilogue=Epilogue.SPLIT, column=self._width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        order = self.gate_up.order
        product = self._library.project(self._instruction, hidden, self._width, order)
        product = product[:, : self.size]
        out: torch.Tensor = self.down_proj(product.view(*hidden.shape[:-1], self.size))
        return out

    def split(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return gates and factors, `[rows, size]` each, without multiplying them."""
        order = self.gate_up.order
        both = self._library.project(self._splitting, rows, 2 * self._width, order)
        return both[:, : self.size], both[:, self._width : self._width + self.size]

    def join(self, gates: torch.Tensor, factors: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Return the output of `forward` for these gates and factors, `[*shape, hidden_size]`.

        Both methods round at the same points, and so have the same bits.
        """
        product = self._library.activate(gates, self.activation) * factors
        out: torch.Tensor = self.down_proj(product.view(*shape, self.size))
        return out


def fused_mlp(
    module: nn.Module, library: NativeLibrary, number: int | None, format: Format
) -> tuple[int, FusedMLP] | None:
    """Return the number of an MLP's activation, and the MLP's replacement, if it agrees.

    `number` is set if an earlier start has proven the replacement. `module` has the children of an
    MLP.
    """
    parts = dict(module.named_children())
    function = parts.get("act_fn", parts.get("activation_fn"))
    activation = activation_of(function, library, number=number)
    if activation is None:
        return None
    before = [(part, part.weight) for part in parts.values() if isinstance(part, nn.Linear)]
    if format is not Format.UNITS and number is None:
        round_linears(parts.values(), library, format)  # to values that codes represent
    gates, down = _gates_of(parts), parts["down_proj"]
    fused = None
    if gates is not None and isinstance(down, nn.Linear):
        back = down.weight, down.bias  # weights as they are now; the trial dequantizes the module
        candidates = {int(activation): lambda: FusedMLP(library, activation, gates, back, format)}
        coded = [part for part in parts.values() if _takes_row_codes(part, format)]
        with ExitStack() as stack:
            if number is None:
                if format is Format.INT8:  # its codes represent no values of bfloat16
                    stack.enter_context(computing_codes(parts.values(), of_rows=False))
                stack.enter_context(computing_codes(coded))
                stack.enter_context(dequantized(module))
            fused = closest_candidate(module, gates[0].shape[1], candidates, number)
    if fused is None:  # rounded copies would stay until all modules have been tried
        for linear, weight in before:
            linear.weight = weight
    return fused


def _takes_row_codes(part: nn.Module, format: Format) -> bool:
    return isinstance(part, nn.Linear) and (
        format is Format.INT8_FOR_CODES or takes_row_codes(part.weight)
    )


def _gates_of(parts: dict[str, nn.Module]) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Return the weight and bias of the gates, followed by those of the factors."""
    whole = parts.get("gate_up_proj")
    if isinstance(whole, nn.Linear):
        return whole.weight, whole.bias
    gate, up = parts.get("gate_proj"), parts.get("up_proj")
    if not (isinstance(gate, nn.Linear) and isinstance(up, nn.Linear)):
        return None
    if gate.weight.shape != up.weight.shape or (gate.bias is None) != (up.bias is None):
        return None
    bias = None if gate.bias is None else torch.cat([gate.bias, up.bias])
    return torch.cat([gate.weight, up.weight]), bias
