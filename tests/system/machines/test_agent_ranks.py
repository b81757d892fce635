"""Ranks of a model at host agents: kill -9 of a rank, a core or an agent changes no token.

An agent's ranks share its machine; the requests and their tokens cross the wire.
"""

import functools
import os
import re
import signal
from pathlib import Path

import pytest

from protocol.lifecycle import Role
from scripts.supervisor.model_names import BUNDLED_MODELS
from scripts.testing import LOAD_TIMEOUT_S, Engine, EngineFactory, eventually, is_alive
from tests.system.kills import PROMPTS
from tests.system.machines.agents import Head, begin, kill_machine
from tests.system.null_load import Stream
from tests.system.ranks.test_standby_ranks import ready_pids
from worker_proc.native.build import build, compiler

TENSOR = ("--tensor-parallel-size", "2")
STAGES = ("--pipeline-parallel-size", "2")
NUM_TOKENS = 100
END_TIMEOUT_S = 2 * LOAD_TIMEOUT_S
"""While an engine beside it loads its ranks, a step takes long on a machine with two cores."""


@functools.cache
def expected_tokens() -> list[list[int]]:
    """Return transformers' greedy continuations of the prompts by the demo model."""
    import torch  # the short test needs neither
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(BUNDLED_MODELS["demo"], dtype=torch.float32)
    model.generation_config.eos_token_id = None
    found = []
    for prompt in PROMPTS:
        ids = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
        )
        found.append(ids[0, len(prompt) :].tolist())
    return found


def begin_greedy(head: Engine) -> list[Stream]:
    """Start streams, half of them at each of two agents, and wait until all have begun."""
    states = ["ready", "ready"]
    eventually(lambda: head.readiness()["replicas"] == states, "both serve", LOAD_TIMEOUT_S)
    streams = [
        Stream(head.url(), prompt=prompt, max_tokens=NUM_TOKENS, temperature=0)
        for prompt in PROMPTS
    ]
    eventually(lambda: all(len(one.token_ids) > 3 for one in streams), "all have begun")
    return streams


def check_greedy(streams: list[Stream]) -> None:
    eventually(lambda: not any(one.is_open for one in streams), "all have ended", END_TIMEOUT_S)
    for stream, expected in zip(streams, expected_tokens(), strict=True):
        stream.join()
        assert stream.error is None
        assert stream.token_ids == expected


@pytest.mark.slow
def test_streams_continue_after_kill_9_of_a_rank_and_of_the_core_of_an_agent(
    start_engine: EngineFactory, keys: Path
) -> None:
    head = Head(start_engine, keys, *TENSOR)
    agent = head.agent("one")
    head.until_states("ready")
    ranks, core = ready_pids(agent, Role.WORKER), agent.pid(Role.CORE)
    load = begin(head.engine)
    os.kill(ranks[1], signal.SIGKILL)
    successors = until_replaced(agent, ranks)
    os.kill(core, signal.SIGKILL)
    load.check()
    assert ready_pids(agent, Role.WORKER) == successors, "the next core has adopted them"


def until_replaced(agent: Engine, ranks: list[int]) -> list[int]:
    """Wait until no rank of a group is left, and all of the next one are ready; their pids."""

    def ask() -> list[int]:
        found = ready_pids(agent, Role.WORKER, len(ranks))
        return [] if set(found) & set(ranks) else found

    return eventually(ask, "the group is replaced as a whole")


@pytest.mark.slow
@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("parallel", "ranks"), [(TENSOR, (0, 1)), (STAGES, (0, 1)), ((*TENSOR, *STAGES), (2,))]
)
def test_greedy_tokens_are_those_of_transformers_whatever_dies_at_an_agent(
    parallel: tuple[str, ...], ranks: tuple[int, ...], start_engine: EngineFactory, keys: Path
) -> None:
    """A rank, the core, the agent alone, and all of its machine die."""
    build()
    flags = ("--dtype", "float32", "--num-threads", "1", *parallel)
    head = Head(start_engine, keys, *flags, model="demo")
    one, other = head.agent("one"), head.agent("other")
    for role, rank in [*((Role.WORKER, rank) for rank in ranks), (Role.CORE, 0)]:
        streams = begin_greedy(head.engine)
        os.kill(one.pid(role, rank), signal.SIGKILL)
        check_greedy(streams)
    for kill in (kill_agent, kill_machine):
        streams = begin_greedy(head.engine)
        kill(one)
        check_greedy(streams)
        one = head.agent("one")
    streams = begin_greedy(head.engine)
    kill_machine(other)
    check_greedy(streams)


def kill_agent(agent: Engine) -> None:
    """Kill an agent alone; its processes see that it is gone, and leave."""
    agent.status()
    agent.process.kill()
    agent.process.wait()
    eventually(lambda: not any(map(is_alive, agent.all_pids)), "its processes have left")


@pytest.mark.slow
def test_ranks_that_were_frozen_answer_nothing_once_others_have_their_name(
    start_engine: EngineFactory, keys: Path
) -> None:
    """They go on with what they computed, for a client that has left, and then have to end."""
    head = Head(start_engine, keys, *TENSOR)
    frozen = head.agent("one")
    head.agent("other")
    head.until_states("ready", "ready")
    load = begin(head.engine)
    frozen.status()
    pids = [*frozen.all_pids]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    newer = head.agent("one")
    newer.ready()
    eventually(lambda: min(len(one.token_ids) for one in load.streams) > 100, "all have moved")
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    load.check()
    assert frozen.process.wait(30) == 0
    assert "another agent has the name one" in frozen.log
    assert not any(map(is_alive, pids))
    begin(head.engine).check()


@pytest.mark.slow
def test_a_standby_group_of_an_agent_takes_the_place_of_its_ranks(
    start_engine: EngineFactory, keys: Path
) -> None:
    head = Head(start_engine, keys, *TENSOR, "--standby-workers", "1")
    agent = head.agent("one")
    head.until_states("ready")
    for rank in range(2):
        standbys, ranks = (ready_pids(agent, role) for role in (Role.STANDBY, Role.WORKER))
        load = begin(head.engine)
        os.kill(ranks[rank], signal.SIGKILL)
        load.check()
        assert ready_pids(agent, Role.WORKER) == standbys


@pytest.mark.slow
def test_the_engine_joined_logs_why_a_rank_cannot_start_and_the_agent_may_have_other_cpus(
    start_engine: EngineFactory, keys: Path
) -> None:
    own = sorted(os.sched_getaffinity(0))
    absent = own[-1] + 1
    head = Head(start_engine, keys, *TENSOR, "--worker-cpus", f"{own[0]}:{absent}")
    agent = head.agent("one")
    assert agent.process.wait(30) == 1
    reason = f"agent one has failed: (zygote|worker) 1 failed (.+): worker_cpus contains {absent}"
    eventually(lambda: re.search(reason, head.engine.log), "the reason is logged there")
    if len(own) > 1:
        cpus = ("--worker-cpus", f"{own[0]}:{own[1]}")
        other = start_engine.agent(head.address, keys, "--name", "other", *cpus)
        ranks = ready_pids(other, Role.WORKER)
        assert [os.sched_getaffinity(pid) for pid in ranks] == [{own[0]}, {own[1]}]
        begin(head.engine).check()
