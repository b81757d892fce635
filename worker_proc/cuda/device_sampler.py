"""Samples on the device, so that a step can be launched before the last tokens are read.

The parameters of each request stay in the line of its row in the block tables. The tokens of the
latest step stay in `chosen`: if the host does not know the last token of a request yet, its ids
hold ~index in `chosen`, and the device replaces it by the token before the next forward.
"""

from collections.abc import Sequence

import torch
import triton

from protocol.sampling import SamplingParams
from worker_proc.cuda.backend import CudaBackend
from worker_proc.cuda.choice import choose, lines_to_device, pack_parameters
from worker_proc.cuda.choice_kernels import NUM_COLUMNS, feed_kernel
from worker_proc.inputs import StepInputs, to_device
from worker_proc.request import ScheduledRequest

FEED_TILE = 256


class ParameterLines:
    """The parameters of running requests on the device; only those of new requests are sent."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._held: list[SamplingParams | None] = []
        self.tensor = torch.zeros(0, NUM_COLUMNS.value, dtype=torch.int64, device=device)

    def reserve(self, num_lines: int) -> None:
        """Create this many lines, which take the most likely token; the tensor moves only then."""
        if num_lines != len(self._held):
            self._held = [None] * num_lines
            self.tensor = self.tensor.new_zeros(num_lines, NUM_COLUMNS.value)

    def update(self, rows: Sequence[int], parts: Sequence[ScheduledRequest]) -> int:
        """Send the parameters that are not in their lines, and return their number."""
        changed, lines = [], []
        for row, part in zip(rows, parts, strict=True):
            params = part.request.sampling_params
            if self._held[row] is not params:
                self._held[row] = params
                changed.append(row)
                lines.append(pack_parameters(params, self._vocab_size))
        if changed:
            changed_rows = to_device(changed, self._device)
            self.tensor.index_copy_(0, changed_rows, lines_to_device(lines, self._device))
        return len(changed)


class TokenCopy:
    """The tokens of a step, in transit to the host alongside the steps that follow."""

    def __init__(self, chosen: torch.Tensor, stream: "torch.cuda.Stream | None") -> None:
        """Begin to copy `chosen`, which the next step may overwrite; copy it at once on the CPU."""
        self._event: torch.cuda.Event | None = None
        source = chosen.clone()
        self._tokens = source
        if stream is not None:
            self._tokens = torch.empty(len(source), dtype=source.dtype, pin_memory=True)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._tokens.copy_(source, non_blocking=True)
                self._event = stream.record_event()
            source.record_stream(stream)

    @property
    def is_done(self) -> bool:
        """True if `read` would return without waiting."""
        return self._event is None or self._event.query()

    def read(self) -> list[int]:
        """Wait for the tokens; RuntimeError if the device has failed."""
        if self._event is not None:
            self._event.synchronize()
        tokens: list[int] = self._tokens.tolist()
        return tokens


class DeviceSampler:
    """Samples the steps whose rows need nothing but their parameters."""

    def __init__(self, backend: CudaBackend, vocab_size: int, max_num_rows: int) -> None:
        device = backend.tables.tensor.device
        self._backend = backend
        self._device = device
        self.parameters = ParameterLines(vocab_size, device)
        self.chosen = torch.zeros(max_num_rows, dtype=torch.int64, device=device)
        """The tokens of the latest step, one for each part that samples."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def update(self, rows: Sequence[int], parts: Sequence[ScheduledRequest]) -> None:
        """Update the parameters of parts, which have these rows of the tables."""
        self.parameters.reserve(self._backend.tables.tensor.shape[1])
        self.parameters.update(rows, parts)

    def feed(self, input_ids: torch.Tensor) -> None:
        """Replace each ~index in `input_ids`, int64 `[1, T]`, by a token of the latest step."""
        num_tokens = input_ids.shape[1]
        grid = (triton.cdiv(num_tokens, FEED_TILE),)
        feed_kernel[grid](input_ids, self.chosen, num_tokens, TILE=FEED_TILE)

    def sample(self, logits: torch.Tensor, inputs: StepInputs) -> None:
        """Choose the tokens of a step that the backend has begun."""
        parts = inputs.sampling
        if not parts:
            return
        pairs = zip(self._backend.rows, inputs.parts, strict=True)
        rows = [row for row, part in pairs if part.samples]
        self.update(rows, parts)
        columns = to_device([*rows, *(part.end for part in parts)], self._device).int()
        self.choose(logits[: len(parts)], *columns.split(len(parts)))

    def choose(self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> None:
        """Choose a token for each row of logits, given its row of the tables and its position."""
        chosen = choose(logits, self.parameters.tensor, rows, positions)
        self.chosen[: len(chosen)].copy_(chosen)

    def copy(self, num_rows: int) -> TokenCopy:
        """Begin to copy the tokens of the latest step to the host."""
        return TokenCopy(self.chosen[:num_rows], self._stream)
