"""GGUF files in real processes: refusals before any other process starts, and kills."""

import resource
import struct
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type
from transformers import LlamaConfig

from protocol.config.settings import configure
from protocol.process.launch import EngineProcesses, EngineStartError
from protocol.sampling import SamplingParams
from scripts.testing import LOAD_TIMEOUT_S, EngineFactory
from tests.hub import Hub
from tests.system.kills import check_tokens_after_kills, connected
from tests.timing import within
from tests.worker.gguf.gguf_files import WIDE, write_gguf
from tests.worker.gguf.test_gguf import mixed
from worker_proc.native.build import build, compiler

REFUSED_WITHIN_S = 3.0
"""Of processor time, of which other load takes none."""


def processor_s() -> float:
    """Return the processor time of the processes that this one has started and that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.slow
@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.timeout(300)
def test_streams_continue_after_kill_9(tmp_path: Path, start_engine: EngineFactory) -> None:
    """Each request alone gets the tokens that it gets beside others, and after either death."""
    build()
    config = LlamaConfig(**WIDE | {"max_position_embeddings": 2048})
    path, _ = write_gguf(tmp_path, config, Type.Q4_K, types=mixed)
    engine = start_engine("--no-api", "--num-threads", "1", model=str(path))
    facts = check_tokens_after_kills(engine)
    assert facts.decoder == "native"
    assert facts.quantization == "gguf int4 int8"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_file_of_the_hub_is_served_by_its_quantization(
    tmp_path: Path, start_engine: EngineFactory
) -> None:
    path, _ = write_gguf(tmp_path, LlamaConfig(**WIDE), Type.Q8_0)
    repository = tmp_path / "repository"
    repository.mkdir()
    path.rename(repository / "tiny-Q8_0.gguf")
    with Hub() as hub:
        hub.add("tiny/files", repository)
        start_engine.environ |= hub.environ(tmp_path / "home")
        engine = start_engine("--no-api", model="tiny/files:Q8_0")
        with connected(engine) as client:
            params = SamplingParams(max_tokens=4, temperature=0.0)
            assert len(client.submit([5, 6, 7], params).result(LOAD_TIMEOUT_S).token_ids) == 4


def test_a_file_of_the_hub_that_cannot_run_is_refused_without_its_weights(
    tmp_path: Path, start_engine: EngineFactory
) -> None:
    """Its header lacks the tensors of a layer."""
    path, _ = write_gguf(tmp_path, LlamaConfig(**WIDE | {"num_hidden_layers": 1}), Type.Q8_0)
    content = path.read_bytes().replace(b"blk.0.attn_v.weight", b"blk.1.attn_v.weight")
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "tiny-Q8_0.gguf").write_bytes(content + bytes(16 << 20))
    with Hub() as hub:
        hub.add("tiny/files", repository)
        start_engine.environ |= hub.environ(tmp_path / "home")
        engine = start_engine(model="tiny/files:Q8_0")
        assert engine.process.wait(90) == 1
        assert hub.num_sent["tiny-Q8_0.gguf"] <= 1 << 20
    assert engine.log.startswith("troika: model tiny/files cannot run: tiny-Q8_0.gguf misses ")
    assert engine.log.count("\n") == 1


@pytest.mark.parametrize("place", [0, 8, 60])
def test_a_damaged_file_is_refused_before_any_process_starts(place: int, tmp_path: Path) -> None:
    path = tmp_path / "damaged.gguf"
    header = struct.pack("<4sIQQ", b"GGUF", 3, 1, 1)
    key = b"general.architecture"
    header += struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, 1 << 40) + b"llama"
    path.write_bytes(header[:place] + b"\xff" * 8 + header[place + 8 :])

    def refuse() -> dict[str, float]:
        start = processor_s()
        with pytest.raises(EngineStartError, match=rf"^model {path}: .+$"):
            EngineProcesses.start(configure(model=str(path)), timeout_s=60)
        return {"seconds": processor_s() - start}

    within(3, refuse, seconds=REFUSED_WITHIN_S)
