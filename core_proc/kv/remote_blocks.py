"""KV blocks of moved requests on the machines from which they were moved.

A moved request names the block server of the machine from which it comes. Workers ask it, once for
each request, before the request is admitted. The answer is a hint, like an index.
"""

from collections.abc import Sequence

from core_proc.kv.event_recorder import group_key
from core_proc.request import Request
from protocol.core_worker import BlocksFound, FindBlocks
from protocol.stores.block_link import MAX_KEYS


class RemoteBlocks:
    """Questions and answers, by request."""

    def __init__(self, *, is_on: bool, here: str) -> None:
        """`is_on`: workers can reach other machines; `here`: this machine's block server.

        Blocks stored on this machine are read from the stores.
        """
        self._is_on = is_on
        self._here = here
        self._asked: dict[int, Sequence[bytes]] = {}
        """Keys in questions without an answer, by request."""
        self._found: dict[int, frozenset[bytes]] = {}
        """Keys that were found, by request; such requests do not ask again."""
        self._trials: set[int] = set()
        """Requests whose blocks are read although that did not pay before."""
        self._unsent: list[FindBlocks] = []

    def may_ask(self, request: Request) -> bool:
        """Return whether the request's machine has yet to be asked for blocks."""
        is_new = request.req_id not in self._found and request.req_id not in self._asked
        return self._is_on and request.blocks_at not in ("", self._here) and is_new

    def ask(
        self, request: Request, num_here: int, num_groups: int, *, is_trial: bool = False
    ) -> None:
        """Ask for the blocks after the first `num_here`; states count as the last group.

        `is_trial`: the blocks are read although that did not pay before.
        """
        if is_trial:
            self._trials.add(request.req_id)
        hashes = request.block_hashes[num_here : num_here + MAX_KEYS // num_groups]
        keys = [group_key(each, group) for each in hashes for group in range(num_groups)]
        self._asked[request.req_id] = keys
        self._unsent.append(FindBlocks(request.req_id, request.blocks_at, keys))

    def answered(self, answer: BlocksFound) -> None:
        """Record an answer; ignore one to a forgotten question."""
        keys = self._asked.pop(answer.req_id, None)
        if keys is None:
            return
        are_there = answer.are_there if len(answer.are_there) == len(keys) else bytes(len(keys))
        found = (key for key, is_there in zip(keys, are_there, strict=True) if is_there)
        self._found[answer.req_id] = frozenset(found)

    def give_up(self, request: Request) -> None:
        """Read no further blocks from there: it does not pay, or a block did not arrive."""
        self._found[request.req_id] = frozenset()
        self._trials.discard(request.req_id)

    def is_trial(self, request: Request) -> bool:
        return request.req_id in self._trials

    def has_any(self, request: Request) -> bool:
        return bool(self._found.get(request.req_id))

    def has(self, request: Request, key: bytes) -> bool:
        return key in self._found.get(request.req_id, ())

    def forget(self, request: Request) -> None:
        """Forget a request that has ended."""
        self._asked.pop(request.req_id, None)
        self._found.pop(request.req_id, None)
        self._trials.discard(request.req_id)

    def clear(self) -> None:
        """Read no blocks that have been stored so far."""
        self._found = dict.fromkeys([*self._found, *self._asked], frozenset[bytes]())
        self._asked.clear()

    def workers_lost(self) -> None:
        """Ask unanswered questions again."""
        self._asked.clear()
        self._unsent.clear()

    def take_messages(self) -> list[FindBlocks]:
        messages, self._unsent = self._unsent, []
        return messages
