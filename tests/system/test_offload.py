"""KV blocks outside the workers: a successor reads them, and a damaged store costs no token."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from protocol.client import EngineClient
from protocol.kv_tiers import memory_directory
from protocol.lifecycle import Role
from protocol.sampling import SamplingParams
from scripts.testing import LOAD_TIMEOUT_S, TIMEOUT_S, Engine, EngineFactory, eventually

NUM_PROMPTS = 4
PROMPT_LEN = 320
"""Twenty blocks; more than the least that is read."""
PROMPTS = [
    [7 + (13 * place + number * place * place) % 900 for place in range(PROMPT_LEN)]
    for number in range(NUM_PROMPTS)
]
PARAMS = [
    SamplingParams(max_tokens=200, temperature=0.9, seed=1 + number, ignore_eos=True)
    for number in range(NUM_PROMPTS)
]
MEMORY = ("--kv-offload-bytes", str(2**28))
Tokens = list[list[int]]


def start(start_engine: EngineFactory, *flags: str) -> Engine:
    few = ("--num-gpu-blocks-override", "400", "--check-invariants")
    flags = ("--no-api", "--num-threads", "1", *few, *flags)
    return start_engine(*flags, model="demo", timeout_s=LOAD_TIMEOUT_S)


def stop(engine: Engine) -> None:
    engine.process.terminate()
    assert engine.process.wait(TIMEOUT_S) == 0


@contextlib.contextmanager
def connected(engine: Engine) -> Iterator[EngineClient]:
    with EngineClient(engine.address) as client:
        assert client.wait_ready(LOAD_TIMEOUT_S).exact_resume
        yield client


def tokens_of(client: EngineClient) -> Tokens:
    streams = [client.submit(*request) for request in zip(PROMPTS, PARAMS, strict=True)]
    return [stream.result(LOAD_TIMEOUT_S).token_ids for stream in streams]


def num_loaded(client: EngineClient) -> int:
    status = client.status
    return 0 if status is None else status.stats.kv_tokens_loaded


def files_in(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file() and len(path.name) >= 64]


def wait_for_files(directory: Path, least: int) -> None:
    def are_there() -> bool:
        return len(files_in(directory)) >= least

    eventually(are_there, f"{least} blocks in {directory}")


@pytest.mark.parametrize("role", [Role.WORKER, Role.CORE])
def test_after_kill_9_blocks_are_read_and_streams_go_on(
    role: Role, start_engine: EngineFactory
) -> None:
    engine = start(start_engine, *MEMORY)
    with connected(engine) as client:
        directory = memory_directory(engine.run_dir)
        alone = tokens_of(client)
        wait_for_files(directory, NUM_PROMPTS * (PROMPT_LEN // 16))
        streams = [client.submit(*request) for request in zip(PROMPTS, PARAMS, strict=True)]
        for stream in streams:
            assert next(stream).finish_reason is None
        engine.kill(role)
        assert [stream.result(LOAD_TIMEOUT_S).token_ids for stream in streams] == alone
        if role is Role.WORKER:  # the cache is empty; that of a worker without a core is, too
            eventually(lambda: num_loaded(client) >= NUM_PROMPTS * PROMPT_LEN, "blocks are read")
        else:
            eventually(lambda: num_loaded(client) > 0, "blocks are read")
    stop(engine)
    assert not directory.exists()


def damage(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def swap_content(file: Path) -> None:
    """Put the intact content of another block there."""
    other = next(path for path in files_in(file.parents[1]) if path != file)
    shutil.copyfile(other, file)


def remove(file: Path) -> None:
    file.unlink()


@pytest.mark.parametrize("harm", [damage, cut, swap_content, remove])
def test_the_next_start_reads_from_the_disk_what_is_intact(
    harm: Callable[[Path], None], start_engine: EngineFactory, tmp_path: Path
) -> None:
    flags = ("--kv-offload-dir", str(tmp_path / "kv"))
    engine = start(start_engine, *flags)
    with connected(engine) as client:
        alone = tokens_of(client)
        wait_for_files(tmp_path, NUM_PROMPTS * (PROMPT_LEN // 16))
    stop(engine)
    engine = start(start_engine, *flags)
    with connected(engine) as client:
        assert tokens_of(client) == alone
        eventually(lambda: num_loaded(client) >= NUM_PROMPTS * PROMPT_LEN, "blocks are read")
    stop(engine)
    for file in files_in(tmp_path):
        harm(file)
    engine = start(start_engine, *flags)
    with connected(engine) as client:
        assert tokens_of(client) == alone
        assert num_loaded(client) == 0
