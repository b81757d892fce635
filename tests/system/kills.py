"""kill -9 of worker and core under seeded streams, which must get the tokens of each one alone."""

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from protocol.client import EngineClient, SyncStream
from protocol.lifecycle import Role
from protocol.model_facts import ModelFacts
from protocol.sampling import Grammar, GrammarKind, SamplingParams
from scripts.testing import LOAD_TIMEOUT_S, TIMEOUT_S, Engine
from tests.system.successors import pid_of, wait_for
from tests.worker.checkpoints import Architecture, build_checkpoint
from worker_proc.native.build import build

MAX_TOKENS = 500
"""Half a second of steps at least, so that a death comes before the end."""
NUM_TRIES = 5
Request = tuple[list[int], SamplingParams]
PROMPTS = [[7 + 13 * i + j for j in range(3 + 5 * i)] for i in range(6)]


def build_model(directory: Path, architecture: Architecture) -> str:
    """Write a checkpoint with random weights and room for long streams; returns its path.

    Its kernels are compiled, too.
    """
    build()
    config = architecture.config()
    config.max_position_embeddings = 2048
    build_checkpoint(directory, config)
    return str(directory)


def params_of(num_prompts: int, max_tokens: int = MAX_TOKENS) -> list[SamplingParams]:
    """Return the parameters of as many prompts, which are sampled."""
    return [
        SamplingParams(max_tokens=max_tokens, temperature=0.9, seed=1 + number, ignore_eos=True)
        for number in range(num_prompts)
    ]


def requests_of(num_tokens: int, grammar: Grammar | None = None) -> list[Request]:
    """Return three requests, of which the last one has the grammar."""
    params = params_of(3, num_tokens)
    params[2] = msgspec.structs.replace(params[2], grammar=grammar)
    return list(zip(PROMPTS, params, strict=False))


def repeating(num_tokens: int) -> Grammar:
    """Return a grammar whose texts repeat themselves: there drafts are right."""
    return Grammar(GrammarKind.REGEX, f"[ab]{{{num_tokens}}}[cd]*")


@contextlib.contextmanager
def connected(engine: Engine) -> Iterator[EngineClient]:
    """Connect a client once the engine is ready; RuntimeError with its log: it has ended.

    An interrupted request must be able to continue exactly.
    """
    engine.ready()
    with EngineClient(engine.address) as client:
        assert client.wait_ready(LOAD_TIMEOUT_S).exact_resume
        yield client


def tokens_over_kill(
    engine: Engine, client: EngineClient, requests: Sequence[Request], role: Role, rank: int
) -> list[list[int]]:
    """Return the tokens of streams during which a process dies, after the first one of each."""
    pid = engine.pid(role, rank)
    streams = begin(client, requests)
    os.kill(pid, signal.SIGKILL)
    return [stream.result(LOAD_TIMEOUT_S).token_ids for stream in streams]


def begin(client: EngineClient, requests: Sequence[Request]) -> list[SyncStream]:
    """Begin requests, and return their streams once each has had tokens, and none has ended.

    On a busy machine a stream may end before another one is read: then all begin anew.
    """
    for _ in range(NUM_TRIES):
        streams = [client.submit(*request) for request in requests]
        if all(next(stream).finish_reason is None for stream in streams):
            return streams
        for stream in streams:
            stream.result(LOAD_TIMEOUT_S)
    raise AssertionError(f"some of the streams have ended at once, {NUM_TRIES} times")


def check_tokens_after_kills(
    engine: Engine, num_prompts: int = len(PROMPTS), max_tokens: int = MAX_TOKENS
) -> ModelFacts:
    """Kill the worker and then the core of an engine with a standby, each under some streams.

    A model with long steps needs fewer tokens. A victim dies after the first token of each stream.
    Returns the facts of the model, whose `exact_resume` must be true.
    """
    prompts = PROMPTS[:num_prompts]
    wait_for(engine, Role.STANDBY, timeout_s=LOAD_TIMEOUT_S)
    params = params_of(num_prompts, max_tokens)
    with connected(engine) as client:
        facts = client.wait_ready(LOAD_TIMEOUT_S)
        alone = [
            client.submit(prompt, one).result(TIMEOUT_S).token_ids
            for prompt, one in zip(prompts, params, strict=True)
        ]
        assert len(set(map(tuple, alone))) == num_prompts
        for role in (Role.WORKER, Role.CORE):
            victim = wait_for(engine, role)
            streams = begin(client, list(zip(prompts, params, strict=True)))
            os.kill(pid_of(victim), signal.SIGKILL)
            wait_for(engine, role, victim.epoch, LOAD_TIMEOUT_S)
            assert [stream.result(LOAD_TIMEOUT_S).token_ids for stream in streams] == alone
    return facts
