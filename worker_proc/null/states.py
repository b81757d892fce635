"""State blocks of the null runner: each records which tokens its state summarizes.

Wrong tables, snapshots that are used too early, blocks with two owners, and states of other tokens
are therefore errors, even if the core's own records agree.
"""

from binascii import crc32
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from protocol.core_worker import BlockCopies
from protocol.message import pack_token_ids
from worker_proc.errors import MirrorError
from worker_proc.kv.state_cuts import state_cuts, state_source
from worker_proc.request import MirroredRequest, ScheduledRequest


class State(NamedTuple):
    """The tokens that a state summarizes: the first tokens of a text."""

    num_tokens: int = 0
    digest: int = 0

    def after(self, token_ids: Sequence[int]) -> "State":
        """Return the state after these tokens."""
        digest = crc32(pack_token_ids(token_ids), self.digest)
        return State(self.num_tokens + len(token_ids), digest)


class NullStates:
    """Executes the rules of state tables, as in `protocol/core_worker.py`."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.blocks: dict[int, State] = {}
        self._computed: dict[int, State] = {}
        """The state after each request's computed tokens, by request."""
        self._host: dict[int, State] = {}

    def clear(self) -> None:
        """Lose all states, as a sleep does."""
        self.blocks.clear()
        self._host.clear()
        self._computed.clear()

    def swap(self, out: BlockCopies, into: BlockCopies) -> None:
        """Copy states to the host, then others from it; MirrorError: one was never written."""
        for copies, sources, targets in (
            (out, self.blocks, self._host),
            (into, self._host, self.blocks),
        ):
            ids = zip(copies.device_block_ids, copies.host_block_ids, strict=True)
            for device_id, host_id in ids:
                source, target = (device_id, host_id) if copies is out else (host_id, device_id)
                if source not in sources:
                    where = "state block" if copies is out else "host state block"
                    raise MirrorError(f"{where} {source} is copied and was never written")
                targets[target] = sources[source]

    def execute(self, scheduled: Sequence[ScheduledRequest], left: Iterable[int]) -> None:
        """Begin each part from its state, and write the states that its table requires.

        `left` are the requests that have left before. Raises MirrorError if a state is not that of
        the request's own tokens, or if the result depends on the order of the requests.
        """
        for req_id in left:
            self._computed.pop(req_id, None)
        readers: dict[int, list[MirroredRequest]] = {}
        for part in scheduled:
            if part.start:
                readers.setdefault(self._begin(part), []).append(part.request)
        writers: dict[int, MirroredRequest] = {}
        for part in scheduled:
            for block_id, state in self._compute(part).items():
                others = [writers.get(block_id), *readers.get(block_id, ())]
                for other in others:
                    if other is not None and other is not part.request:
                        raise MirrorError(
                            f"state block {block_id} is written by request {part.request.req_id}"
                            f" and used by request {other.req_id} in the same step"
                        )
                writers[block_id] = part.request
                self.blocks[block_id] = state

    def _begin(self, part: ScheduledRequest) -> int:
        """Check the state that a part begins from; return its block."""
        request, start = part.request, part.start
        own = self._computed.get(request.req_id)
        if own is None or own.num_tokens != start:  # a new request, or some drafts were wrong
            own = self._computed[request.req_id] = State().after(request.token_ids[:start])
        block_id = state_source(part, self._block_size)
        assert block_id is not None
        found = self.blocks.get(block_id)
        if found != own:
            what = "was never written" if found is None else f"has {found.num_tokens} other tokens"
            raise MirrorError(
                f"request {request.req_id} begins after {start} tokens from state block {block_id},"
                f" which {what}"
            )
        return block_id

    def _compute(self, part: ScheduledRequest) -> dict[int, State]:
        """Return the states that a part writes, by block."""
        request, position = part.request, part.start
        tokens = request.token_ids[position : part.end] + request.draft_token_ids[: part.num_drafts]
        state = self._computed[request.req_id] if position else State()
        written: dict[int, State] = {}
        for block_id, end in state_cuts(part, self._block_size).items():
            first = position - part.start
            state = state.after(tokens[first : first + end - position])
            written[block_id], position = state, end
        self._computed[request.req_id] = state
        return written
