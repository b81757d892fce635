"""Disaggregated prefill: some replicas compute prompts, and the others continue from their blocks.

A long prompt goes to a prefill replica. After its first token, the request moves to another
replica, which reads the blocks that were written in the meantime (`core_proc/kv/offload.py`). So no
stream waits for the prompts of others. Missing blocks are recomputed.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from protocol.client.replica import Replica

MIN_TOKENS = 256
"""Minimum number of uncached prompt tokens for which a prefill replica is used; shorter prompts are
computed alongside the streams."""
_WAIT_TICKS = 2
"""Ticks from a request's first token until it is moved: its last blocks must be written first."""
_REST_TICKS = 10
"""Ticks between two attempts to move a request that no replica accepted."""


class Begun(NamedTuple):
    """A request at a prefill replica."""

    request_id: int
    replica: Replica
    names: Sequence[bytes]
    """Names of the pieces of its prompt."""
    affinity: str
    """Affinity value, see `Router.home`; empty: none."""
    wait_ticks: int = _WAIT_TICKS
    """Ticks until it is moved, once it has a token."""


class Prefill:
    """The requests that are to be moved to replicas that decode."""

    def __init__(self, num_replicas: int) -> None:
        """Have the first `num_replicas` replicas compute prompts; 0: all do everything."""
        self._num_replicas = num_replicas
        self._requests: dict[int, Begun] = {}

    @property
    def is_on(self) -> bool:
        return self._num_replicas > 0

    def computes_prompts(self, number: int) -> bool:
        """Return whether a replica computes prompts for others."""
        return number < self._num_replicas

    def wants(self, num_tokens: int) -> bool:
        """Return whether a prompt with `num_tokens` to compute goes to a prefill replica."""
        return self.is_on and num_tokens >= MIN_TOKENS

    def enter(
        self, request_id: int, replica: Replica, names: Sequence[bytes], affinity: str = ""
    ) -> None:
        """Schedule a request to move after its first token, if it is at a prefill replica."""
        if self.computes_prompts(replica.number):
            self._requests[request_id] = Begun(request_id, replica, names, affinity)

    def tick(self) -> None:
        """Count down the waits of requests that have a token; forget those that have ended."""
        for request in list(self._requests.values()):
            entry = request.replica.requests.entry(request.request_id)
            if entry is None:
                del self._requests[request.request_id]
            elif entry.has_begun and request.wait_ticks:
                waited = request._replace(wait_ticks=request.wait_ticks - 1)
                self._requests[request.request_id] = waited

    def due(self) -> Iterator[Begun]:
        """Yield the requests to move now, until they have moved or ended.

        A request is yielded again only after a pause.
        """
        for request in list(self._requests.values()):
            if not request.wait_ticks:
                again = request._replace(wait_ticks=_REST_TICKS)
                self._requests[request.request_id] = again
                yield request
