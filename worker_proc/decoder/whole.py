"""A model's whole forward as one native call: from the tokens of a step to its logits.

The layers are those of a `DecoderStack`. The embedding precedes them, and the last norm and the
output layer follow, for the rows that get logits; the angles come from tables. transformers' code
still computes the steps whose hidden states are pooled, so the logits must have the same bits both
ways.
"""

import ctypes
from typing import Any, NamedTuple

import torch

from worker_proc.decoder.ends import Ends
from worker_proc.decoder.program import Program, ProgramWriter
from worker_proc.decoder.stack import DecoderStack, pointers
from worker_proc.loading.loaded_model import LoadedModel
from worker_proc.native.structures import RunArgs

_BY_MODULES = "forward_by_modules"


class Logits(NamedTuple):
    """The output of the forward, like transformers' own."""

    logits: torch.Tensor


class WholeModel:
    """Computes the logits of a packed step."""

    def __init__(self, stack: DecoderStack, ends: Ends) -> None:
        """Take layers whose attention modules are attached to a pool, and the parts around them."""
        self._stack = stack
        self._ends = ends
        self._programs: dict[bool, Program] = {}
        """The program with adapters and the program without."""
        self._num_positions = 0
        self._point_to_angles()

    def compute(
        self, token_ids: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor
    ) -> torch.Tensor:
        """Return the logits of the rows `kept`, given tokens and positions, int64 `[T]` each."""
        stack, ends = self._stack, self._ends
        num_positions = int(positions.max()) + 1
        if num_positions > self._num_positions:
            for table in ends.angles:
                table.reach(num_positions)
            self._point_to_angles()
        packed = ends.head.packed
        logits = torch.empty(len(kept), packed.num_outputs, dtype=stack.dtype)
        stack.buffers.reserve(len(token_ids))
        stack.buffers.write_to(logits)
        steps = stack.step_addresses()
        run = RunArgs(
            stack.buffers.address,
            ctypes.addressof(steps),
            self._cosines_at,
            self._sines_at,
            token_ids.data_ptr(),
            positions.data_ptr(),
            kept.data_ptr(),
            stack.adaptation,
            num_rows=len(token_ids),
            num_kept=len(kept),
        )
        program = self._program_for_pool(is_adapted=stack.adaptation is not None)
        stack.execute(program.args, run)
        logits = logits[:, : ends.head.out_features]
        if ends.is_divided and stack.ranks is not None:
            logits = stack.ranks.gather(logits)
        ends.edit.apply(logits)
        return logits

    def _point_to_angles(self) -> None:
        angles = self._ends.angles
        self._num_positions = min(table.num_positions for table in angles)
        self._arrays = (
            pointers([table.cosines.data_ptr() for table in angles]),
            pointers([table.sines.data_ptr() for table in angles]),
        )
        self._cosines_at, self._sines_at = map(ctypes.addressof, self._arrays)

    def _program_for_pool(self, *, is_adapted: bool) -> Program:
        """Return the program for the pool that the layers are attached to."""
        stack, ends = self._stack, self._ends
        paged = [layer.paged for layer in stack.layers]
        key = tuple(map(id, paged))
        program = self._programs.get(is_adapted)
        if program is None or program.key != key:
            has_ranks = stack.ranks is not None
            writer = ProgramWriter(stack.sites if is_adapted else None, adds_ranks=has_ranks)
            writer.add_embedding(ends.table, ends.num_tokens, ends.factor)
            for layer, settings, kind in zip(stack.layers, stack.settings, ends.kinds, strict=True):
                # Adapters refer to rows by number, so no row is dropped before them. Ranks sum the
                # same rows as with modules, because one of the ranks may use modules.
                keeps = layer is stack.layers[-1] and not is_adapted and not has_ranks
                writer.add_layer(layer, settings, kind, ends.angles[kind].cosines, keeps=keeps)
            writer.add_logits(ends.norm, ends.head.packed)
            is_bf16 = stack.dtype == torch.bfloat16
            program = self._programs[is_adapted] = Program(key, paged, [], writer, is_bf16)
        return program


def install_whole(loaded: LoadedModel, whole: WholeModel) -> None:
    """Replace a model's forward over a packed step by one native call."""
    model: Any = loaded.model
    by_modules = model.forward  # the class's method, or the function of kept_rows.py
    observed = [part for part in (model.base_model, model.get_decoder()) if part is not model]

    def forward(
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        logits_to_keep: torch.Tensor | int = 0,
        **options: object,
    ) -> Any:
        is_observed = any(part._forward_hooks for part in observed)
        if is_observed or position_ids is None or isinstance(logits_to_keep, int):
            given = {"position_ids": position_ids, "logits_to_keep": logits_to_keep}
            return by_modules(input_ids=input_ids, **given, **options)
        logits = whole.compute(input_ids[0], position_ids[0], logits_to_keep)
        return Logits(logits.unsqueeze(0))

    names = model.__dict__
    names[_BY_MODULES] = names.get("forward")
    names["forward"] = forward


def uninstall_whole(loaded: LoadedModel) -> None:
    """Make a model's own forward compute its steps again."""
    names = loaded.model.__dict__
    if _BY_MODULES not in names:
        return  # its own forward computes them already
    by_modules = names.pop(_BY_MODULES)
    if by_modules is None:
        del names["forward"]
    else:
        names["forward"] = by_modules
