"""The worker's loop: sockets, silence, memory between steps, and prepared answers."""

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.adapters import Adapter
from protocol.core_worker import (
    AdapterLoaded,
    Adopt,
    CompileGrammar,
    GrammarCompiled,
    LoadAdapter,
    ModelRunnerOutput,
    StepFailed,
    UnloadAdapter,
    WorkerHello,
    WorkerToCore,
    decode_from_worker,
)
from protocol.lifecycle import Stop
from protocol.message import ProtocolError
from protocol.sampling import Grammar, GrammarKind
from tests.worker.fake_runner import DeviceRunner, FakeRunner, step
from tests.worker.loop_bench import OWN_EPOCH, TIMEOUT_S, Bench
from worker_proc import loop
from worker_proc.adapters.kept import KeptAdapters
from worker_proc.grammar.compiler import GrammarCompiler
from worker_proc.grammar.vocabulary import Vocabulary
from worker_proc.loop import QUIET_S


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner()


@pytest.fixture
def bench(tmp_path: Path, runner: FakeRunner, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(loop, "HELLO_INTERVAL_S", 0.05)
    running = Bench(str(tmp_path), runner)
    yield running
    running.close()


def test_hello_is_repeated_until_a_core_adopts(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "troika.worker")
    bench.until(lambda: len(bench.hellos) >= 3)
    timeout_ms = bench.loop._poll_ms()
    assert timeout_ms is not None
    assert timeout_ms <= 51
    assert {item.header.epoch for item in bench.hellos} == {OWN_EPOCH}
    bench.send(9, step(0))
    bench.send(9, Adopt(0))
    bench.send(9, step(0))
    bench.until(lambda: bench.replies)
    assert bench.replies == [ModelRunnerOutput(0, [7])]
    assert bench.received[-1][0].header.epoch == 9
    assert "link epoch 9; 1 frames" in caplog.text


def test_no_hello_is_sent_to_a_core_that_has_adopted(bench: Bench) -> None:
    bench.until(lambda: bench.hellos)
    bench.send(9, Adopt(0))
    bench.send(9, step(0))
    bench.until(lambda: bench.replies)
    bench.until(lambda: bench.loop._poll_ms() is None)
    num_hellos = len(bench.hellos)
    deadline = time.monotonic() + 0.12
    bench.until(lambda: time.monotonic() > deadline)
    assert len(bench.hellos) == num_hellos


def test_memory_is_prepared_in_pieces_when_no_step_comes(bench: Bench, runner: FakeRunner) -> None:
    bench.until(lambda: runner.missing_pieces == 0)  # also before the first step
    runner.missing_pieces, runner.prepared_at = 3, 0.0
    bench.until(lambda: bench.hellos)
    bench.send(9, Adopt(0))
    bench.send(9, step(0))
    bench.until(lambda: bench.replies)
    bench.until(lambda: runner.missing_pieces == 0)
    assert runner.prepared_at - runner.executed_at >= QUIET_S
    assert bench.loop._poll_ms() is None  # nothing is missing until another step comes
    bench.send(9, step(1))
    bench.until(lambda: runner.missing_pieces < 0)


def test_memory_is_prepared_after_the_reply_to_each_step(bench: Bench, runner: FakeRunner) -> None:
    bench.until(lambda: bench.hellos)
    bench.send(9, Adopt(0))
    bench.send(9, step(0))
    bench.until(lambda: bench.replies)
    bench.until(lambda: runner.num_between_steps == 1)
    bench.send(9, step(1))
    bench.until(lambda: runner.num_between_steps == 2)
    bench.until(lambda: len(bench.replies) == 2)


def test_owed_memory_is_prepared_until_the_next_step_arrives(
    bench: Bench, runner: FakeRunner
) -> None:
    bench.until(lambda: bench.hellos)
    bench.send(9, Adopt(0))
    runner.owed_pieces = 10**9
    for number in range(3):
        bench.send(9, step(number))
    bench.until(lambda: len(bench.replies) == 3)
    runner.owed_pieces, runner.num_between_steps = 9, 0
    bench.until(lambda: runner.owed_pieces == 0)
    assert not bench.loop._owes_memory
    assert runner.num_between_steps == 9


def test_a_core_that_is_silent_is_asked_again_and_one_that_beats_is_not(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core may have dropped its worker, and the next Hello may have been lost."""
    monkeypatch.setattr(loop, "SILENCE_S", 0.2)
    bench.until(lambda: bench.hellos)
    bench.send(9, Adopt(0))
    bench.send(9, step(0))
    bench.until(lambda: bench.replies)
    num_hellos, began = len(bench.hellos), time.monotonic()
    while time.monotonic() - began < 0.6:
        bench.core.beat()
        assert bench.loop.turn(5)
    assert len(bench.hellos) == num_hellos
    bench.until(lambda: len(bench.hellos) > num_hellos)
    bench.send(10, Adopt(1))
    bench.send(10, step(1))
    bench.until(lambda: len(bench.replies) == 2)


def test_the_next_core_is_greeted_and_adopts_under_any_epoch(bench: Bench) -> None:
    bench.until(lambda: bench.hellos)
    bench.send(20, Adopt(0))
    bench.send(20, step(0))
    bench.until(lambda: bench.replies)
    bench.core.close()
    bench.core = bench.bind()
    before = len(bench.hellos)
    bench.until(lambda: len(bench.hellos) > before)
    bench.send(6, Adopt(4))
    bench.send(6, step(4))
    bench.until(lambda: ModelRunnerOutput(4, [7]) in bench.replies)


def test_a_step_that_raises_is_reported_and_ends_the_loop(bench: Bench, runner: FakeRunner) -> None:
    bench.until(lambda: bench.hellos)
    bench.send(9, Adopt(0))
    runner.error = RuntimeError("no memory")
    bench.send(9, step(0))
    with pytest.raises(RuntimeError, match="no memory"):
        bench.until(lambda: False)
    deadline, received = time.monotonic() + TIMEOUT_S, list[WorkerToCore]()
    while not any(isinstance(message, StepFailed) for message in received):
        assert time.monotonic() < deadline
        bench.core.socket.poll(100)
        received += [decode_from_worker(item.body) for item in bench.core.drain(16)]
    replies = [message for message in received if not isinstance(message, WorkerHello)]
    assert replies == [StepFailed(0, "RuntimeError: no memory")]


def test_a_launched_step_is_answered_when_it_is_done(tmp_path: Path) -> None:
    """It is answered even if no message comes; meanwhile the loop does not sleep."""
    runner = DeviceRunner()
    bench = Bench(str(tmp_path), runner)
    bench.until(lambda: bench.hellos)
    bench.send(9, Adopt(0))
    bench.send(9, step(0))
    bench.until(lambda: runner.launched)
    assert bench.loop._poll_ms() == 0
    assert not bench.replies
    runner.launched[0].is_done = True
    bench.until(lambda: bench.replies)
    assert bench.replies == [ModelRunnerOutput(0, [7])]
    bench.until(lambda: bench.loop._poll_ms() is None)
    bench.close()


def test_an_unreadable_message_of_the_core_ends_the_loop(bench: Bench) -> None:
    bench.until(lambda: bench.hellos)
    bench.core.send(bench.hellos[-1].peer, 9, b"\xc1")
    with pytest.raises(ProtocolError):
        bench.until(lambda: False)


def test_a_worker_stops_on_stop(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gc.freeze", lambda: None)
    bench.child.inbox.append(Stop())
    bench.loop.run()


def test_a_grammar_is_answered_when_it_is_ready_and_steps_continue_meanwhile(
    tmp_path: Path, runner: FakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "SILENCE_S", TIMEOUT_S)  # the core sends nothing while it waits
    runner.grammars = GrammarCompiler(Vocabulary([2]))
    bench = Bench(str(tmp_path), runner)
    bench.until(lambda: bench.hellos)
    bench.send(9, Adopt(0))
    good, bad = (Grammar(GrammarKind.REGEX, source) for source in ("[a-z]+", "[a-z"))
    bench.send(9, CompileGrammar(3, bad))
    bench.send(9, CompileGrammar(4, good))
    bench.send(9, step(0))
    bench.until(lambda: len(bench.replies) == 3)
    first, second, third = bench.replies
    assert first == ModelRunnerOutput(0, [7])
    assert isinstance(second, GrammarCompiled)
    assert (second.grammar_id, third) == (3, GrammarCompiled(4))
    assert "unclosed" in second.error
    assert bench.received[-1][0].header.epoch == 9
    bench.send(9, CompileGrammar(5, good))
    bench.until(lambda: len(bench.replies) == 4)
    assert bench.replies[-1] == GrammarCompiled(5)
    bench.close()


def test_an_adapter_is_answered_when_it_is_loaded_and_steps_continue_meanwhile(
    tmp_path: Path, runner: FakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "SILENCE_S", TIMEOUT_S)  # the core sends nothing while it waits
    may_read = threading.Event()

    def read(adapter: Adapter) -> str:
        assert may_read.wait(TIMEOUT_S)
        return adapter.name

    runner.adapters = KeptAdapters(read, 1)
    bench = Bench(str(tmp_path), runner)
    bench.until(lambda: bench.hellos)
    bench.send(9, Adopt(0))
    adapter = Adapter("a", "/a", b"a" * 32)
    bench.send(9, LoadAdapter(adapter))
    bench.send(9, step(0))
    bench.until(lambda: len(bench.replies) == 1)
    assert bench.replies == [ModelRunnerOutput(0, [7])]
    may_read.set()
    bench.until(lambda: len(bench.replies) == 2)
    assert bench.replies[-1] == AdapterLoaded(adapter.adapter_id)
    assert adapter.adapter_id in runner.adapters
    bench.send(9, UnloadAdapter(adapter.adapter_id))
    bench.until(lambda: adapter.adapter_id not in runner.adapters)
    bench.close()
