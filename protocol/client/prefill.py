"""Disaggregated prefill: some replicas compute prompts, and the others go on from their blocks.

A long prompt goes to a prefill replica. Once the request has its first token, it is moved to
another replica, which reads the blocks that were written meanwhile (`core_proc/kv/offload.py`). So
no stream waits for the prompts of others. Blocks that are not there are computed.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from protocol.client.replica import Replica

LEAST_TOKENS = 256
"""Of a prompt that its replica does not have cached: fewer are computed beside the streams."""
_WAIT_TICKS = 2
"""From a request's first token to its move, as its last blocks must be written."""


class _Begun(NamedTuple):
    """A request at a prefill replica."""

    replica: Replica
    names: Sequence[bytes]
    """Of the pieces of its prompt."""
    num_ticks: int = 0
    """Since its first token."""


class Prefill:
    """The requests that are to be moved to replicas that decode."""

    def __init__(self, num_replicas: int) -> None:
        """Let the first replicas compute prompts; 0: all do everything."""
        self._num_replicas = num_replicas
        self._requests: dict[int, _Begun] = {}

    @property
    def is_on(self) -> bool:
        return self._num_replicas > 0

    def computes_prompts(self, number: int) -> bool:
        """Whether a replica computes prompts for others."""
        return number < self._num_replicas

    def wants(self, num_tokens: int) -> bool:
        """Whether a prompt with `num_tokens` to compute goes to a prefill replica."""
        return self.is_on and num_tokens >= LEAST_TOKENS

    def enter(self, request_id: int, replica: Replica, names: Sequence[bytes]) -> None:
        """Let a request be moved after its first token, if it is at a prefill replica."""
        if self.computes_prompts(replica.number):
            self._requests[request_id] = _Begun(replica, names)

    def due(self) -> Iterator[tuple[int, Replica, Sequence[bytes]]]:
        """Yield the requests that are to be moved now, with replica and names; called every tick.

        A request is due until it is at another replica, or has ended.
        """
        for request_id, request in list(self._requests.items()):
            entry = request.replica.client.entry(request_id)
            if entry is None:
                del self._requests[request_id]
            elif entry.has_begun:
                if request.num_ticks >= _WAIT_TICKS:
                    yield request_id, request.replica, request.names
                else:
                    self._requests[request_id] = request._replace(num_ticks=request.num_ticks + 1)
