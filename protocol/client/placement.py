"""Chooses the replica of a request: the one that the policy prefers among the suitable ones.

It combines the knowledge about replicas: which serve and which retire (`replica_set`), their cached
prefixes and their load (`routing`), and which compute prompts for others (`prefill`).
"""

import random
from collections.abc import Callable, Sequence

from protocol.adapters import Adapter
from protocol.client.ledger import Entry
from protocol.client.packed_prompt import PromptIds
from protocol.client.prefill import Prefill
from protocol.client.prefix_index import PrefixIndex, piece_names, piece_tokens
from protocol.client.replica import Replica
from protocol.client.replica_set import ReplicaSet
from protocol.client.routing import Candidate, Router
from protocol.config import RoutingPolicy
from protocol.model_facts import ModelFacts
from protocol.request_validation import validate_request


class Placement:
    """Chooses replicas, and records the prefixes that they will have cached."""

    def __init__(
        self,
        replicas: ReplicaSet,
        prefill: Prefill,
        policy: RoutingPolicy,
        rng: random.Random,
        *,
        follows_events: bool,
    ) -> None:
        """`follows_events`: the index also receives the KV events of the cores."""
        self._set = replicas
        self._replicas = replicas.replicas
        self._prefill = prefill
        self._router = Router(policy, self._replicas, rng)
        self._follows_events = follows_events
        self._piece_tokens = 0
        """Tokens per piece of a prompt; 0: no replica's block size is known yet."""
        for replica in self._replicas:
            self.join(replica)

    @property
    def index(self) -> PrefixIndex:
        """The known cached prefixes of the replicas."""
        return self._router.index

    def join(self, replica: Replica) -> None:
        """Add a replica as a possible home of sessions."""
        self._router.homes.add(replica.number, replica.address)

    def leave(self, replica: Replica) -> None:
        """Forget a closed replica."""
        self.index.forget(replica.number)
        self._router.homes.remove(replica.number)

    def names(self, prompt: PromptIds, cache_salt: str, adapter: Adapter | None) -> list[bytes]:
        """Return the names of a prompt's pieces, by which replicas with its prefix are found."""
        if self._router.policy is not RoutingPolicy.PREFIX_AWARE:
            return []
        if not self._piece_tokens:
            # Block size of a replica that serves, if there is one.
            by_service = sorted(self._replicas, key=lambda each: not each.serves)
            known = (each.engine.facts for each in by_service)
            facts = next((facts for facts in known if facts is not None), None)
            if facts is None:
                return []
            self._piece_tokens = piece_tokens(facts.block_size)
        return piece_names(prompt, self._piece_tokens, cache_salt, adapter)

    def choose(
        self,
        names: Sequence[bytes],
        *,
        fingerprint: str = "",
        num_tokens: int = 0,
        affinity: str = "",
        num_prompt_tokens: int = 0,
    ) -> tuple[Replica, int]:
        """Return the replica for a request, and how many tokens of its prompt it has cached.

        The replica serves, has the fingerprint, and holds a context of `num_tokens` tokens, if any
        does. Otherwise the request waits for the returned replica.

        Args:
            names: names of the prompt's pieces.
            fingerprint: fingerprint of the engine that began the request; empty: none did.
            num_tokens: length of the context so far.
            affinity: see `Router.home`; empty: the request has none.
            num_prompt_tokens: length of a prompt that another replica may compute.
        """

        def continues(number: int) -> bool:
            engine = self._replicas[number].engine
            return engine.fingerprint == fingerprint and holds(engine.facts, num_tokens)

        if fingerprint:
            chosen = self._router.choose(names, self._piece_tokens, continues)
        else:
            chosen = self._for_new(names, affinity, num_prompt_tokens)
        if chosen is not None:
            return self._replicas[chosen.number], chosen.num_cached_tokens
        substitute = self._set.substitute()
        if substitute is not None and (not fingerprint or continues(substitute.number)):
            return substitute, 0
        # The request waits for the replica that was lost last.
        present = [each for each in self._replicas if not each.is_closed]
        return min(present, key=_waiting_place), 0

    def preferred(
        self, names: Sequence[bytes], affinity: str, may: Callable[[int], bool] | None
    ) -> Candidate | None:
        """Return the home of an affinity value, or else the replica that the policy prefers."""
        if affinity:
            return self._router.home(affinity, names, self._piece_tokens, may)
        return self._router.choose(names, self._piece_tokens, may)

    def enter(
        self,
        replica: Replica,
        request_id: int,
        names: Sequence[bytes],
        num_cached: int,
        affinity: str = "",
    ) -> None:
        """Record that a request is at a replica, which caches its prompt."""
        self._prefill.enter(request_id, replica, names, affinity)
        facts = replica.engine.facts
        if names and facts is not None:
            replica.requests.ledger.expect_cached(request_id, num_cached)
            # Events name all blocks, several of which form a piece.
            block_tokens = facts.block_size if self._follows_events else self._piece_tokens
            max_names = facts.num_gpu_blocks * facts.block_size // block_tokens
            self.index.add(replica.number, names, max_names)

    def _for_new(
        self, names: Sequence[bytes], affinity: str, num_prompt_tokens: int
    ) -> Candidate | None:
        """Return a replica that decodes, or one that computes the prompt for it if it is long."""
        if not self._prefill.is_on:
            return self.preferred(names, affinity, None)
        computes_prompts = self._prefill.computes_prompts
        chosen = self.preferred(names, affinity, lambda number: not computes_prompts(number))
        num_cached = 0 if chosen is None else chosen.num_cached_tokens
        if self._prefill.wants(num_prompt_tokens - num_cached):
            computing = self._router.choose(names, self._piece_tokens, computes_prompts, "prefill")
            chosen = computing or chosen
        return chosen or self._router.choose(names, self._piece_tokens)


def _waiting_place(replica: Replica) -> tuple[object, ...]:
    """Return a sort key, smallest for the replica at which a request waits if none can have it."""
    has_other_model = bool(replica.engine.other_model)
    return replica.is_retired, has_other_model, replica.serves, replica.lateness


def holds(facts: ModelFacts | None, num_tokens: int) -> bool:
    """Return whether a context of this length, and one more token, fits."""
    return facts is not None and num_tokens < facts.max_model_len


def continues(replica: Replica, entry: Entry, longest: int) -> bool:
    """Return whether a replica can continue or begin a request exactly.

    `longest` is the longest context at the request's present replica. If the replica is another
    one, the request must not reach the limit of either.
    """
    engine = replica.engine
    if engine.facts is None:
        return False
    if not entry.has_begun and entry.add.fingerprint != engine.fingerprint:
        return validate_request(entry.add, engine.facts) is None
    here = engine.facts.max_model_len
    is_same_end = here == longest or entry.max_num_tokens <= min(here, longest or here)
    return is_same_end and entry.add.fingerprint in ("", engine.fingerprint)
