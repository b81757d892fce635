"""Replicas in virtual time: no seed has a violation, and planted bugs are found."""

from collections import Counter
from typing import Any

import pytest

from protocol.client.open_requests import OpenRequests
from protocol.model_facts import ModelFacts
from tests.simulation.batch import silence
from tests.simulation.replicas import run_replica_seed

DRAINING_RACE = 691
"""A request reaches its core just after that has begun to drain."""


def test_no_request_is_lost_when_replicas_die_drain_and_return() -> None:
    counts: Counter[str] = Counter()
    with silence():
        for seed in (*range(60), DRAINING_RACE):
            outcome = run_replica_seed(seed)
            assert outcome.violation is None, f"seed {seed}: {outcome.violation}"
            counts.update(outcome.counts)
    assert min(counts[kind] for kind in ("kill replica", "drain replica", "return", "moved")) > 5


def test_seed_decides_on_everything() -> None:
    with silence():
        hashes = [run_replica_seed(seed).trace_hash for seed in (2, 2, 3)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_output_that_is_forgotten_in_a_move_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    move = OpenRequests.move

    def forgetful(here: OpenRequests, request_id: int, other: OpenRequests, **options: Any) -> bool:
        entry = here.ledger.get(request_id)
        if entry is not None and entry.output_token_ids:
            entry.output_token_ids.pop()
        return move(here, request_id, other, **options)

    monkeypatch.setattr(OpenRequests, "move", forgetful)
    with silence():
        assert any(run_replica_seed(seed).violation for seed in range(100))


def test_request_that_continues_with_another_checkpoint_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ModelFacts, "fingerprint", property(lambda facts: facts.model))
    with silence():
        violations = (run_replica_seed(seed).violation or "" for seed in range(150))
        assert any(text.startswith("mismatched") for text in violations)
