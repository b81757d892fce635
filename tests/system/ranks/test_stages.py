"""A model whose layers are divided among workers: kill -9 of any process changes no token."""

from pathlib import Path

import pytest

from protocol.lifecycle import Role
from scripts.testing import LOAD_TIMEOUT_S, TIMEOUT_S, EngineFactory
from tests.system.kills import build_model, connected, repeating, requests_of, tokens_over_kill
from tests.system.ranks.test_ranks import BY_MODEL, DRAFTS
from tests.worker.checkpoints import Architecture
from tests.worker.recurrent_models import KEY_DECAYS, KINDS
from worker_proc.native.build import build, compiler

SLOW = pytest.mark.slow
NUM_TOKENS = 200
"""Of each stream: a second of steps at least."""


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("num_stages", "num_shares", "options", "victims"),
    [
        (2, 1, DRAFTS, [(Role.WORKER, 1), (Role.CORE, 0)]),  # the last stage answers
        pytest.param(2, 1, DRAFTS, [(Role.WORKER, 0)], marks=SLOW),
        pytest.param(2, 1, (), [(Role.WORKER, 0), (Role.CORE, 0)], marks=SLOW),
        pytest.param(3, 1, (), [(Role.WORKER, 1), (Role.CORE, 0), (Role.CORE, 0)], marks=SLOW),
        pytest.param(3, 1, DRAFTS, [(Role.WORKER, rank) for rank in range(3)], marks=SLOW),
        pytest.param(
            2, 2, (), [*((Role.WORKER, rank) for rank in range(4)), (Role.CORE, 0)], marks=SLOW
        ),
        pytest.param(
            *(2, 1, BY_MODEL),
            [*((Role.WORKER, rank) for rank in range(2)), (Role.CORE, 0)],
            marks=SLOW,
        ),
        pytest.param(*(2, 2, BY_MODEL), [(Role.WORKER, 3), (Role.CORE, 0)], marks=SLOW),
    ],
)
def test_streams_continue_after_kill_9(
    num_stages: int,
    num_shares: int,
    options: tuple[str, ...],
    victims: list[tuple[Role, int]],
    start_engine: EngineFactory,
) -> None:
    """The other stages cannot go on alone: all of them are started again.

    One of the requests has a grammar, which every rank compiles. `num_shares` ranks divide each
    stage.
    """
    build()
    flags = ("--no-api", "--num-threads", "1", "--dtype", "float32")
    requests = requests_of(NUM_TOKENS, repeating(NUM_TOKENS))
    stages = ("--pipeline-parallel-size", str(num_stages))
    stages += ("--tensor-parallel-size", str(num_shares))
    engine = start_engine(*flags, *stages, *options, model="demo", timeout_s=LOAD_TIMEOUT_S)
    with connected(engine) as client:
        expected = [client.submit(*request).result(TIMEOUT_S).token_ids for request in requests]
        assert all(len(tokens) == NUM_TOKENS for tokens in expected[:2])
        for victim in victims:
            assert tokens_over_kill(engine, client, requests, *victim) == expected


@SLOW
@pytest.mark.timeout(300)
def test_undisturbed_stages_have_the_tokens_of_one_worker(start_engine: EngineFactory) -> None:
    """tests/worker/parallel/test_stages.py compares the tokens of more models in one process."""
    flags = ("--no-api", "--num-threads", "1", "--dtype", "float32")
    found = []
    for stages in ((), ("--pipeline-parallel-size", "2")):
        engine = start_engine(*flags, *stages, model="demo", timeout_s=LOAD_TIMEOUT_S)
        with connected(engine) as client:
            streams = [client.submit(*request) for request in requests_of(NUM_TOKENS)]
            found.append([stream.result(TIMEOUT_S).token_ids for stream in streams])
        engine.close()
    assert found[0] == found[1]


@SLOW
@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("architecture", "options", "ranks"),
    [
        *((kind, (), (0, 1)) for kind in (*KINDS, *KEY_DECAYS)),
        *((kind, DRAFTS, (1, 0)) for kind in (*KINDS, *KEY_DECAYS)),
    ],
    ids=lambda value: getattr(value, "name", None) or "-".join(map(str, value)) or "plain",
)
def test_streams_of_recurrent_layers_continue_after_kill_9(
    architecture: Architecture,
    options: tuple[str, ...],
    ranks: tuple[int, ...],
    start_engine: EngineFactory,
    tmp_path: Path,
) -> None:
    """Each stage dies, and the core: all stages begin anew, or from a snapshot."""
    model = build_model(tmp_path / "model", architecture)
    flags = ("--no-api", "--num-threads", "1", "--dtype", "float32", "--mamba-block-size", "64")
    whole = start_engine(*flags, "--standby-workers", "0", model=model, timeout_s=LOAD_TIMEOUT_S)
    requests = requests_of(NUM_TOKENS)
    with connected(whole) as client:
        expected = [client.submit(*request).result(TIMEOUT_S).token_ids for request in requests]
    assert all(len(tokens) == NUM_TOKENS for tokens in expected)
    whole.close()
    stages = ("--pipeline-parallel-size", "2")
    engine = start_engine(*flags, *stages, *options, model=model, timeout_s=LOAD_TIMEOUT_S)
    with connected(engine) as client:
        facts = client.wait_ready(LOAD_TIMEOUT_S)
        assert facts.kv_groups[-1].is_state
        for victim in [*((Role.WORKER, rank) for rank in ranks), (Role.CORE, 0)]:
            assert tokens_over_kill(engine, client, requests, *victim) == expected
