"""KV blocks outside the workers: a successor reads them, and a damaged store costs no token."""

import asyncio
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.client import AsyncEngineClient, ReplicatedClient, ReplicatedOptions
from protocol.config import RoutingPolicy
from protocol.config.settings import configure
from protocol.lifecycle import Role
from protocol.process.launch import EngineProcesses
from protocol.sampling import SamplingParams
from protocol.stores.tiers import memory_directory
from scripts.bench.make_draft_model import make_draft
from scripts.supervisor.model_names import BUNDLED_MODELS
from scripts.testing import LOAD_TIMEOUT_S, TIMEOUT_S, EngineFactory, eventually
from tests.system.kills import NUM_TRIES, connected
from tests.system.machines.replica_processes import kill_all
from tests.system.machines.replicated_streams import until_serving
from tests.system.null_load import null_tokens
from tests.system.offload.stored_blocks import (
    MEMORY,
    NUM_PROMPTS,
    PARAMS,
    PROMPT_LEN,
    PROMPTS,
    STAGES,
    Tokens,
    begin_and_hold,
    damage,
    files_in,
    num_loaded,
    start,
    stop,
    tokens_left,
    tokens_of,
    tokens_over_kill,
    wait_for_files,
)

CODED_STAGES = (*STAGES, "--quantization", "w8a16", "--dtype", "bfloat16")


@pytest.mark.parametrize(
    ("victims", "flags"),
    [
        ([(Role.WORKER, 0), (Role.CORE, 0)], ()),
        *(
            pytest.param(victims, flags, marks=pytest.mark.slow)
            for victims, flags in [
                ([(Role.WORKER, 1), (Role.CORE, 0)], STAGES),
                ([(Role.WORKER, 0), (Role.CORE, 0)], CODED_STAGES),
                ([(Role.WORKER, 0)], ("--tensor-parallel-size", "2")),
            ]
        ),
    ],
)
def test_after_kill_9_blocks_are_read_and_streams_continue(
    victims: list[tuple[Role, int]], flags: tuple[str, ...], start_engine: EngineFactory
) -> None:
    """The tokens after it are those before it; with stages, each reads its layers' part."""
    engine = start(start_engine, *MEMORY, *flags)
    with connected(engine) as client:
        directory = memory_directory(engine.run_dir)
        alone = tokens_of(client)
        num_parts = 2 if STAGES[0] in flags else 1
        wait_for_files(directory, num_parts * NUM_PROMPTS * (PROMPT_LEN // 16))
        for role, rank in victims:
            for _ in range(NUM_TRIES):
                tokens, was_amid = tokens_over_kill(engine, client, role, rank)
                assert tokens == alone
                if was_amid:
                    break
            # The cache is empty; a new core counts from 0.
            least = NUM_PROMPTS * PROMPT_LEN if role is Role.WORKER else 1
            eventually(lambda n=least: num_loaded(client) >= n, "blocks are read")
    stop(engine)
    assert not directory.exists()


@pytest.mark.slow
@pytest.mark.parametrize("role", [Role.WORKER, Role.CORE])
def test_the_draft_models_blocks_are_kept_too(
    role: Role, start_engine: EngineFactory, tmp_path: Path
) -> None:
    """They cost no token, whether they are read, or damaged and left out."""
    make_draft(BUNDLED_MODELS["demo"], tmp_path / "draft", 5, 0.0)
    drafting = ("--speculative-model", str(tmp_path / "draft"), "--num-speculative-tokens", "3")
    engine = start(start_engine, *MEMORY, *drafting, "--no-adaptive-speculation")
    with connected(engine) as client:
        directory = memory_directory(engine.run_dir)
        alone = tokens_of(client)
        wait_for_files(directory, 2 * NUM_PROMPTS * (PROMPT_LEN // 16))
        for is_damaged in (False, True):
            streams = [client.submit(*request) for request in zip(PROMPTS, PARAMS, strict=True)]
            for stream in streams:
                assert next(stream).finish_reason is None
            if is_damaged:
                for file in draft_files_in(directory):
                    damage(file)
            engine.kill(role)
            assert [stream.result(LOAD_TIMEOUT_S).token_ids for stream in streams] == alone
            eventually(lambda: num_loaded(client) > 0, "blocks are read")
    stop(engine)


def draft_files_in(directory: Path) -> list[Path]:
    """Return the blocks of the smaller of two sizes, which are those of the draft model."""
    sizes = {path: path.stat().st_size for path in files_in(directory)}
    least, most = min(sizes.values()), max(sizes.values())
    assert least < most
    return [path for path, size in sizes.items() if size == least]


def test_a_request_that_is_moved_brings_its_blocks() -> None:
    """The blocks that a lost replica has written are read by the other one."""
    config = configure(
        model="demo",
        data_parallel_size=2,
        kv_offload_bytes=2**28,
        num_gpu_blocks_override=400,
        num_threads=1,
        log_level="error",
    )

    options = ReplicatedOptions(policy=RoutingPolicy.ROUND_ROBIN)

    async def play(engine: EngineProcesses) -> None:
        async with ReplicatedClient(engine.addresses, options) as client:
            await until_serving(client, LOAD_TIMEOUT_S)
            requests = list(zip(PROMPTS, PARAMS, strict=True))
            streams = [client.submit(*one) for one in requests]
            before = [await tokens_left(stream) for stream in streams]
            streams, first = await begin_and_hold(client, 1)
            num_there = client.clients[1].num_open_requests
            # The other replica has not computed these prompts: it has another half.
            kill_all(engine, 1)
            pairs = zip(first, streams, strict=True)
            assert [begun + await tokens_left(stream) for begun, stream in pairs] == before
            assert client.num_moved == num_there
            async with asyncio.timeout(TIMEOUT_S):
                while num_loaded_at(client.clients[0]) < num_there * PROMPT_LEN:
                    await asyncio.sleep(0.01)

    with EngineProcesses.start(config) as engine:
        asyncio.run(play(engine))


def test_prompts_are_computed_at_one_replica_and_continue_at_the_other() -> None:
    config = configure(
        model="null",
        data_parallel_size=2,
        prefill_replicas=1,
        kv_offload_bytes=2**20,
        null_step_ms=5.0,
        null_token_ms=0.3,  # reading pays, however busy the machine is
        log_level="error",
    )
    params = SamplingParams(max_tokens=200, seed=1, ignore_eos=True)
    short = [prompt[:100] for prompt in PROMPTS]
    """Fewer tokens than those that are computed elsewhere."""

    async def all_of(client: ReplicatedClient, prompts: Tokens) -> None:
        streams = [client.submit(prompt, params) for prompt in prompts]
        for prompt, stream in zip(prompts, streams, strict=True):
            assert await tokens_left(stream) == null_tokens(prompt, params.max_tokens)

    options = ReplicatedOptions(prefill_replicas=1)

    async def play(engine: EngineProcesses) -> None:
        async with ReplicatedClient(engine.addresses, options) as client:
            prefill, decode = client.clients
            await until_serving(client)
            await all_of(client, short)
            assert client.num_handed_over == 0
            await all_of(client, PROMPTS)
            assert client.num_handed_over == NUM_PROMPTS
            async with asyncio.timeout(TIMEOUT_S):
                while num_loaded_at(decode) < NUM_PROMPTS * PROMPT_LEN // 2:
                    await asyncio.sleep(0.01)
            # Without the prefill replica the other one does everything.
            kill_all(engine, 0)
            async with asyncio.timeout(TIMEOUT_S):
                while prefill.serves:
                    await asyncio.sleep(0.01)
            await all_of(client, PROMPTS)
            await all_of(client, short)

    with EngineProcesses.start(config) as engine:
        asyncio.run(play(engine))


def num_loaded_at(client: AsyncEngineClient) -> int:
    return 0 if client.status is None else client.status.stats.kv_tokens_loaded


@pytest.mark.parametrize(
    ("model", "parts", "damaged"),
    [
        ("null", ("--null-token-ms", "0.3"), "rank-0"),  # reading pays
        *(
            pytest.param("demo", parts, damaged, marks=pytest.mark.slow)
            for parts, damaged in [((), "rank-0"), (STAGES, "rank-1")]
        ),
    ],
)
def test_the_next_start_reads_from_the_disk_and_damaged_blocks_are_computed(
    model: str, parts: tuple[str, ...], damaged: str, start_engine: EngineFactory, tmp_path: Path
) -> None:
    """One of several ranks that cannot read its part is enough.

    Blocks of the null model have no content; tests/worker/offload compares that of others.
    """
    flags = ("--kv-offload-dir", str(tmp_path / "kv"), *parts)
    num_parts = 2 if parts == STAGES else 1
    engine = start(start_engine, *flags, model=model)
    with connected(engine) as client:
        alone = tokens_of(client)
        wait_for_files(tmp_path, num_parts * NUM_PROMPTS * (PROMPT_LEN // 16))
    stop(engine)
    engine = start(start_engine, *flags, model=model)
    with connected(engine) as client:
        assert tokens_of(client) == alone
        least = NUM_PROMPTS * PROMPT_LEN
        eventually(lambda: num_loaded(client) >= least, "blocks are read")
        loaded = num_loaded(client)
        for file in files_in(tmp_path):
            if damaged in file.parts:
                damage(file)
        engine.kill(Role.WORKER)
        assert tokens_of(client) == alone
        assert num_loaded(client) == loaded


@pytest.mark.slow
def test_a_disk_that_hangs_delays_its_requests_and_no_stream(
    start_engine: EngineFactory, tmp_path: Path
) -> None:
    """A read of a pipe that no process writes to waits as a read of such a disk does."""
    engine = start(start_engine, "--kv-offload-dir", str(tmp_path / "kv"))
    with connected(engine) as client:
        alone = tokens_of(client)
        wait_for_files(tmp_path, NUM_PROMPTS * (PROMPT_LEN // 16))
        for file in files_in(tmp_path):
            file.unlink()
            os.mkfifo(file)
        engine.kill(Role.WORKER)
        beside = [5, 6, 7], SamplingParams(max_tokens=50, ignore_eos=True)
        client.submit(*beside).result(LOAD_TIMEOUT_S)
        delayed = [client.submit(*request) for request in zip(PROMPTS, PARAMS, strict=True)]
        began = last = time.monotonic()
        num_beside, longest_s = 0, 0.0
        while client._client.num_open_requests == NUM_PROMPTS:
            for _ in client.submit(*beside):
                longest_s = max(longest_s, time.monotonic() - last)
                last = time.monotonic()
            num_beside += 1
        waited_s = time.monotonic() - began
        assert [stream.result(LOAD_TIMEOUT_S).token_ids for stream in delayed] == alone
        assert waited_s > 5.0
        assert num_beside > 5
        assert longest_s < 2.0
        assert num_loaded(client) == 0
    stop(engine)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of two megabytes."""
    directory = tmp_path / "disk"
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(directory)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("file systems cannot be mounted here")
    yield directory
    subprocess.run(["umount", str(directory)], check=True)


@pytest.mark.slow
def test_a_disk_that_is_full_costs_no_token(start_engine: EngineFactory, small_disk: Path) -> None:
    flags = ("--kv-offload-dir", str(small_disk / "kv"), "--kv-offload-dir-bytes", str(2**26))
    engine = start(start_engine, *flags)
    with connected(engine) as client:
        alone = tokens_of(client)
        eventually(lambda: os.statvfs(small_disk).f_bfree < 16, "the disk is full")
        for _ in range(2):
            engine.kill(Role.WORKER)
            assert tokens_of(client) == alone
    stop(engine)
