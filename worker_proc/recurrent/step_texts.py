"""The texts of a packed step, and the blocks from which and to which their states are copied."""

from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from protocol.core_worker import NULL_BLOCK
from worker_proc.errors import MirrorError
from worker_proc.inputs import BegunBlock, StepInputs
from worker_proc.kv.state_cuts import state_cuts, state_source
from worker_proc.native.recurrence import RecurrentTexts
from worker_proc.request import ScheduledRequest

NO_STATE = -1
"""Source of a text that begins with a zero state."""


class Text(NamedTuple):
    """The rows of one text in a step, and the blocks of its state."""

    first_row: int
    num_rows: int
    source: int
    """The block with the state before the first row, or NO_STATE."""
    cuts: dict[int, int]
    """For each block that receives a state, the number of preceding rows, in ascending order."""


class StepTexts:
    """The texts of a step, for kernels and for PyTorch."""

    def __init__(self, texts: Sequence[Text]) -> None:
        self._columns = [
            array("i", column)
            for column in (
                (text.first_row for text in texts),
                (text.num_rows for text in texts),
                (text.source for text in texts),
                accumulate((len(text.cuts) for text in texts), initial=0),
                (row for text in texts for row in text.cuts.values()),
                (block for text in texts for block in text.cuts),
            )
        ]
        self._sources, self._cut_blocks = self._columns[2], self._columns[5]
        self.num_rows = sum(text.num_rows for text in texts)
        addresses = (column.buffer_info()[0] for column in self._columns)
        self.arguments = RecurrentTexts(*addresses, len(texts), self.num_rows)
        self._is_decode = all(text.num_rows == len(text.cuts) == 1 for text in texts)

    def __iter__(self) -> Iterator[Text]:
        firsts, counts, sources, cuts, rows, blocks = self._columns
        for number, (first, count, source) in enumerate(zip(firsts, counts, sources, strict=True)):
            own = slice(cuts[number], cuts[number + 1])
            yield Text(first, count, source, dict(zip(blocks[own], rows[own], strict=True)))

    def move_on(self, begun: Sequence[BegunBlock]) -> bool:
        """Advance every text, which has one token, by one; False: the step must be built anew."""
        if not self._is_decode:
            return False
        self._sources[:] = self._cut_blocks
        for row, number, request in begun:
            block_id = request.block_tables[-1][number]
            if block_id == NULL_BLOCK:
                raise MirrorError(f"request {request.req_id} has no state block {number}")
            self._cut_blocks[row] = block_id
        return True


def texts_of(inputs: StepInputs, block_size: int) -> StepTexts:
    """Return the texts of a step; each request's last table holds its state blocks."""
    return StepTexts(
        [
            _text(part, first_row, block_size)
            for first_row, part in zip(inputs.first_rows, inputs.parts, strict=True)
        ]
    )


def _text(part: ScheduledRequest, first_row: int, block_size: int) -> Text:
    source, start = state_source(part, block_size), part.start
    cuts = {block_id: end - start for block_id, end in state_cuts(part, block_size).items()}
    return Text(first_row, part.num_tokens, NO_STATE if source is None else source, cuts)
