"""Steps of a generation: the deltas of its sequences that arrived together, and merged ones."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from api_proc.text.output_sequence import Delta, OutputSequence, join

Step = list[tuple[OutputSequence, Delta]]
"""Deltas that arrived together, in their order."""

_STARTED_TOGETHER = 64
"""Number of sequence readers that start in one iteration of the event loop."""


async def merged(
    sequences: Sequence[OutputSequence],
    deltas_of: Callable[[OutputSequence], AsyncIterator[Delta]],
) -> AsyncIterator[Step]:
    """Merge the deltas of sequences; one task reads each, and waits until its delta is used."""
    queue: asyncio.Queue[tuple[OutputSequence, Delta] | Exception | None]
    queue = asyncio.Queue(maxsize=len(sequences))

    async def read(sequence: OutputSequence) -> None:
        try:
            async for delta in deltas_of(sequence):
                await queue.put((sequence, delta))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    readers: list[asyncio.Task[None]] = []
    num_reading = len(sequences)
    try:
        for sequence in sequences:
            readers.append(asyncio.create_task(read(sequence)))
            if len(readers) % _STARTED_TOGETHER == 0:
                await asyncio.sleep(0)
        while num_reading:
            step: Step = []
            items = [await queue.get()]
            while not queue.empty():
                items.append(queue.get_nowait())
            for item in items:
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    num_reading -= 1
                else:
                    step.append(item)
            if step:
                yield step
    finally:
        for reader in readers:
            reader.cancel()


async def in_intervals(steps: AsyncIterator[Step], num_tokens: int) -> AsyncIterator[Step]:
    """Merge deltas until each has `num_tokens`, except the first and the last of a sequence."""
    held: dict[int, list[Delta]] = {}
    async for step in steps:
        ready: Step = []
        for sequence, delta in step:
            index = sequence.index
            if delta.num_computed_tokens is not None:  # it stands alone
                ready.append((sequence, delta))
                continue
            known = held.get(index)
            deltas = [*(known or ()), delta]
            is_full = sum(len(item.token_ids) for item in deltas) >= num_tokens
            is_ready = known is None or is_full or delta.finish_reason is not None
            if is_ready:
                ready.append((sequence, join(deltas)))
            held[index] = [] if is_ready else deltas
        if ready:
            yield ready
