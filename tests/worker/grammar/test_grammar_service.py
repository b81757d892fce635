"""Grammars are compiled beside the worker: errors, limits, lanes, adoptions."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest

from api_proc.chat.families import find_dialect
from api_proc.chat.grammar import output_grammar
from protocol.core_worker import CompileGrammar, GrammarCompiled, GrammarFault
from protocol.process.failpoints import LOG_FILE, VARIABLE
from protocol.sampling import Grammar, GrammarKind
from scripts.testing import eventually
from tests.proc import process_stats
from worker_proc.grammar import prover_link
from worker_proc.grammar.compiler import Definition, GrammarCompiler
from worker_proc.grammar.prover import LENGTH_BYTES, Task
from worker_proc.grammar.prover_link import ProverLink
from worker_proc.grammar.service import GrammarService, _Jobs
from worker_proc.grammar.vocabulary import Vocabulary

NULL = Vocabulary([2])
TIMEOUT_S = 60.0


@pytest.fixture
def nice_service() -> Iterator[GrammarService]:
    service = GrammarService(GrammarCompiler(NULL))
    yield service
    for lane in (service._quick, service._middle, service._slow):
        if lane._prover is not None:
            lane._prover.close()


@pytest.fixture
def service(nice_service: GrammarService, monkeypatch: pytest.MonkeyPatch) -> GrammarService:
    """A service whose threads and provers get as much processor time as this process."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    monkeypatch.setattr("worker_proc.grammar.service._NICENESS", own)
    return nice_service


def regex(source: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, source)


def wait(service: GrammarService, number: int) -> list[GrammarCompiled]:
    """Return the next answers, in their order."""
    found: list[GrammarCompiled] = []
    deadline = time.monotonic() + TIMEOUT_S
    while len(found) < number:
        ready, _, _ = select.select([service.wake_fd], [], [], max(0, deadline - time.monotonic()))
        assert ready, f"only {found} came"
        found += service.take_results()
    return found


def test_good_and_bad_grammars_are_answered_in_order(service: GrammarService) -> None:
    grammars = [
        regex("[a-z]+"),
        regex("[a-z"),
        Grammar(GrammarKind.JSON_SCHEMA, '{"type": "string", "minLength": 3, "maxLength": 2}'),
        Grammar(GrammarKind.JSON_SCHEMA, '{"type": "array", "uniqueItems": true}'),
        Grammar(GrammarKind.LARK, "start: nowhere"),
        Grammar(GrammarKind.EBNF, 'root ::= "x" [0-9]+'),
        Grammar(GrammarKind.EBNF, 'start: "x" /[0-9]+/'),
        Grammar(GrammarKind.EBNF, "root ::= (((("),
        Grammar(GrammarKind.JSON_SCHEMA, '{"$ref": "#"}'),
    ]
    for i, grammar in enumerate(grammars):
        assert service.compile(CompileGrammar(i, grammar)) is None
    answers = wait(service, len(grammars))
    assert [answer.grammar_id for answer in answers] == list(range(len(grammars)))
    assert [bool(answer.error) for answer in answers] == [0, 1, 1, 1, 1, 0, 0, 1, 1]
    assert "unclosed" in answers[1].error
    assert "uniqueItems" in answers[3].error
    assert "refers to itself" in answers[8].error
    assert service.compile(CompileGrammar(9, grammars[0])) == GrammarCompiled(9), "at once"


def test_a_prover_has_the_niceness_of_its_thread(nice_service: GrammarService) -> None:
    """Nicer ones get so little time beside a busy worker that their grammars are refused."""
    nice_service.compile(CompileGrammar(1, regex("[a-z]+")))
    assert wait(nice_service, 1) == [GrammarCompiled(1)]
    prover = nice_service._quick._prover
    assert prover is not None
    assert os.getpriority(os.PRIO_PROCESS, prover._process.pid) == 10


def test_content_after_reasoning_has_the_errors_of_content_alone(service: GrammarService) -> None:
    """Without a proof of its own, it would fail in the middle of the answer."""
    contents = [
        regex(r"[^\s\S]"),
        Grammar(GrammarKind.LARK, "start: A\nA: /[^\\s\\S]/\n"),
        Grammar(GrammarKind.JSON_SCHEMA, '{"$ref": "#"}'),
        regex("[a-z]+"),
    ]
    for i, content in enumerate(contents):
        whole = output_grammar(
            find_dialect(None, "hermes", "qwen3"),
            None,
            content,
            is_reasoning_open=False,
            added_token_id=lambda _: None,
        )
        assert whole is not None
        assert whole != content
        service.compile(CompileGrammar(2 * i, content))
        service.compile(CompileGrammar(2 * i + 1, whole))
    errors = [answer.error for answer in wait(service, 2 * len(contents))]
    assert errors[::2] == errors[1::2]
    assert [bool(error) for error in errors[::2]] == [1, 1, 1, 0]


def test_rules_of_a_client_may_have_any_name(service: GrammarService) -> None:
    sources = [
        '?start: content\ncontent: "a"\n',
        'start : content\ncontent: "a"\n',
        'start: content whole\ncontent: "a"\nwhole: "b"\n',
    ]
    for i, source in enumerate(sources):
        service.compile(CompileGrammar(i, Grammar(GrammarKind.LARK, source)))
    assert [answer.error for answer in wait(service, len(sources))] == [""] * len(sources)


def delay_provers(service: GrammarService, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send a grammar for which all lanes' provers take too long, one after the other.

    The forks that are made next are not delayed.
    """
    for lane in (service._quick, service._middle):
        lane._wall_s = 0.05
    monkeypatch.setenv(VARIABLE, str(folder))
    (folder / "grammar.compile").write_text("delay:60000@*")
    service.compile(CompileGrammar(1, regex("slow")))

    def is_in_the_slow_lane() -> bool:
        prover, log = service._slow._prover, folder / LOG_FILE
        if prover is None or not log.exists():
            return False
        delayed = {int(line.split()[2]) for line in log.read_text().splitlines()}
        forks = {one.pid for one in process_stats() if one.parent == prover._process.pid}
        return bool(delayed & forks)

    eventually(
        lambda: service._results or is_in_the_slow_lane(),
        "the prover of the last lane waits, or has given up",
        TIMEOUT_S,
    )
    (folder / "grammar.compile").unlink()
    service._quick._wall_s = TIMEOUT_S


def test_a_grammar_that_takes_long_delays_no_other(
    service: GrammarService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service._slow._wall_s = TIMEOUT_S
    delay_provers(service, tmp_path, monkeypatch)
    service.compile(CompileGrammar(2, regex("quick")))
    assert wait(service, 1) == [GrammarCompiled(2)]


def test_a_grammar_that_takes_too_long_fails_alone(
    service: GrammarService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service._slow._wall_s = 0.5
    delay_provers(service, tmp_path, monkeypatch)
    (failed,) = wait(service, 1)
    assert failed.grammar_id == 1
    assert failed.error == "compiling it takes longer than 5 s"
    service.compile(CompileGrammar(3, regex("slow")))
    assert wait(service, 1) == [GrammarCompiled(3)], "the lanes serve on"


def test_grammars_that_all_take_long_delay_a_good_one_by_a_moment_each(
    service: GrammarService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The provers go on with the tokens loaded, and what is too much for all lanes is refused."""
    service._quick._wall_s, service._middle._wall_s = 0.1, TIMEOUT_S
    service._middle._max_jobs, service._middle._jobs = 4, _Jobs(4, 1)
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    (tmp_path / "grammar.compile").write_text("delay:60000@*")
    for i in range(4):
        service.compile(CompileGrammar(i, regex(f"slow{i}")))
    busy = wait(service, 2)
    assert [answer.grammar_id for answer in busy] == [2, 3]
    assert {answer.fault for answer in busy} == {GrammarFault.BUSY}
    text = "its client's share of the 4 grammars at a time that take longer than 0.1 s is used up"
    assert busy[0].error == text
    prover = service._quick._prover
    (tmp_path / "grammar.compile").unlink()
    service._quick._limit_s = service._quick._wall_s = TIMEOUT_S
    service.compile(CompileGrammar(4, regex("quick")))
    assert wait(service, 1) == [GrammarCompiled(4)]
    assert service._quick._prover is prover, "no grammar was worth another start"


def test_a_grammar_that_fails_with_the_first_token_is_refused_before(
    service: GrammarService,
) -> None:
    """It is compiled within the limits, and has a million states."""
    service._quick._limit_s = service._quick._wall_s = TIMEOUT_S
    service.compile(CompileGrammar(1, regex("(a{1000}){1000}")))
    [answer] = wait(service, 1)
    assert answer.error.startswith("it needs too much work for one token: lexer error")


def test_the_memory_of_a_grammar_is_what_compiling_it_has_written() -> None:
    """Pages of libraries, which each fork reads again, would leave room for few small grammars."""
    prover = ProverLink(NULL)
    strings = {f"name{i}": {"type": "string", "pattern": f"x{i}[a-z]+"} for i in range(300)}
    large = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "object", "properties": strings}))
    with contextlib.closing(prover):
        sizes = [
            prover.prove(Task(grammar, TIMEOUT_S, TIMEOUT_S)).num_bytes
            for grammar in (regex("[a-z]+"), large)
        ]
    assert sizes[0] < 2**20 < sizes[1]


def test_a_prover_that_dies_fails_its_grammar_alone(
    service: GrammarService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    (tmp_path / "grammar.compile").write_text("kill9@1")
    service.compile(CompileGrammar(1, regex("poison")))
    service.compile(CompileGrammar(2, regex("word")))
    first, second = wait(service, 2)
    assert "MiB of memory" in first.error
    assert second == GrammarCompiled(2)


def test_a_prover_whose_worker_has_died_ends_without_an_error() -> None:
    """The worker died before it had sent the vocabulary, in the middle of it, or right after it."""
    body = msgspec.msgpack.encode(NULL)
    frame = len(body).to_bytes(LENGTH_BYTES, "little") + body
    provers = []
    for sent in (b"", frame[:-1], frame):
        read_fd, write_fd = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "worker_proc.grammar.prover"],
            stdin=subprocess.PIPE,
            stdout=write_fd,
            stderr=subprocess.PIPE,
        )
        os.close(write_fd)
        os.close(read_fd)
        provers.append((process, sent))
    with ThreadPoolExecutor(len(provers)) as pool:
        ends = [pool.submit(process.communicate, sent, TIMEOUT_S) for process, sent in provers]
        assert [end.result() for end in ends] == [(None, b"")] * len(provers)
    assert [process.returncode for process, _ in provers] == [0] * len(provers)


def test_an_error_of_a_fork_that_is_not_the_grammar_s_is_in_the_log(
    service: GrammarService,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    (tmp_path / "grammar.compile").write_text("exc@1")
    service.compile(CompileGrammar(1, regex("word")))
    [answer] = wait(service, 1)
    assert answer.error
    assert "FailpointError" in capfd.readouterr().err


class StoppedPopen(subprocess.Popen[bytes]):
    """A process that does nothing until it is sent SIGCONT."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.send_signal(signal.SIGSTOP)


def test_a_prover_that_starts_late_delays_its_grammar(
    service: GrammarService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look finds that it has advanced, and one look without would give it up."""
    looks = count(1)

    def look(pid: int) -> float:
        number = next(looks)
        if number == 3:
            os.kill(pid, signal.SIGCONT)
        return number * 1e-6

    monkeypatch.setattr(prover_link, "STALL_S", 0.0)
    monkeypatch.setattr(prover_link, "_CHECK_S", 0.001)
    monkeypatch.setattr(prover_link, "cpu_seconds", look)
    monkeypatch.setattr(prover_link.subprocess, "Popen", StoppedPopen)
    service.compile(CompileGrammar(1, regex("late")))
    assert wait(service, 1) == [GrammarCompiled(1)]
    assert next(looks) > 3


@pytest.mark.parametrize(
    ("bound", "advance_s", "error"),
    [
        ("STALL_S", 0.0, "it has not advanced for 0 s"),
        ("START_S", 1e-6, "it has not been ready within 0 s"),
        ("START_CPU_S", 1e-6, "it needs more than 0 s of processor time"),
    ],
)
def test_a_prover_that_hangs_in_its_start_fails_its_grammar(
    service: GrammarService,
    monkeypatch: pytest.MonkeyPatch,
    bound: str,
    advance_s: float,
    error: str,
) -> None:
    looks = count(1)
    with monkeypatch.context() as patched:
        patched.setattr(prover_link, bound, 0.0)
        patched.setattr(prover_link, "_CHECK_S", 0.001)
        patched.setattr(prover_link, "cpu_seconds", lambda pid: next(looks) * advance_s)
        patched.setattr(prover_link.subprocess, "Popen", StoppedPopen)
        service.compile(CompileGrammar(1, regex("lost")))
        [failed] = wait(service, 1)
    assert f"does not start: {error}" in failed.error
    assert failed.fault is GrammarFault.BROKEN, "nothing is wrong with the grammar"
    service.compile(CompileGrammar(2, regex("lost")))
    assert wait(service, 1) == [GrammarCompiled(2)]


def test_a_prover_that_sends_something_else_is_replaced(
    service: GrammarService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it sends next would be taken for the proof of another grammar."""
    service.compile(CompileGrammar(1, regex("one")))
    wait(service, 1)
    before = service._quick._prover
    with monkeypatch.context() as patched:
        patched.setattr(ProverLink, "_receive", lambda self, limit: b"\x93\x01\xc1")
        service.compile(CompileGrammar(2, regex("two")))
        [answer] = wait(service, 1)
    assert answer.fault is GrammarFault.BROKEN
    assert service._quick._prover is not before
    service.compile(CompileGrammar(3, regex("two")))
    assert wait(service, 1) == [GrammarCompiled(3)]


def test_what_another_core_has_sent_is_neither_compiled_nor_answered(
    service: GrammarService,
) -> None:
    service.compile(CompileGrammar(1, regex("one")))
    service.begin_adoption()
    service.compile(CompileGrammar(1, regex("two")))
    assert wait(service, 1) == [GrammarCompiled(1)]
    assert service.compile(CompileGrammar(2, regex("two"))) is not None


def test_a_proven_grammar_needs_no_prover(service: GrammarService) -> None:
    service.compile(CompileGrammar(1, regex("one"), is_proven=True))
    assert wait(service, 1) == [GrammarCompiled(1)]
    assert service._quick._prover is None


def test_many_slow_grammars_of_a_client_do_not_delay_one_of_another(
    service: GrammarService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the one that is being compiled, and not for those behind it."""
    service._quick._wall_s, service._middle._wall_s = 0.5, TIMEOUT_S
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    (tmp_path / "grammar.compile").write_text("delay:60000@*")
    for i in range(200):
        service.compile(CompileGrammar(i, regex(f"slow{i}"), origin="a", tenant=f"{i % 7}"))
    log = tmp_path / LOG_FILE
    eventually(log.exists, "the first one is being compiled", TIMEOUT_S)
    service._quick._wall_s = TIMEOUT_S  # for the one that comes after it
    (tmp_path / "grammar.compile").unlink()
    service.compile(CompileGrammar(1000, regex("quick"), origin="b"))
    assert wait(service, 1)[0] == GrammarCompiled(1000)


def test_a_proven_grammar_that_takes_long_delays_no_other(
    service: GrammarService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new worker may get many of them, each of which needs seconds."""
    compile_one, may_end = service._compiler.compile, threading.Event()

    def compile_slowly(grammar: Grammar, definition: Definition | None = None) -> None:
        if grammar.source.startswith("slow"):
            assert may_end.wait(TIMEOUT_S)
        compile_one(grammar, definition)

    monkeypatch.setattr(service._compiler, "compile", compile_slowly)
    for i in range(10):
        service.compile(CompileGrammar(i, regex(f"slow{i}"), is_proven=True, origin="a"))
    try:
        service.compile(CompileGrammar(10, regex("new"), origin="a"))
        service.compile(CompileGrammar(11, regex("old"), is_proven=True, origin="b"))
        assert {answer.grammar_id for answer in wait(service, 2)} == {10, 11}
    finally:
        may_end.set()
    assert {answer.grammar_id for answer in wait(service, 10)} == set(range(10))


def test_compiled_grammars_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker_proc.grammar.compiler.MAX_CACHE_BYTES", 1_000_000)
    compiler = GrammarCompiler(NULL)
    for i in range(100):
        compiler.compile(regex(f"a{{{i + 1}}}"))
    assert compiler.has(regex("a{100}"))
    assert not compiler.has(regex("a{1}"))
    assert len(compiler._matchers) < 20
    assert not compiler.matcher(regex("a{1}")).is_error(), "it is compiled again"


class CrowdedLock:
    """The lock of a cache from which other threads displace everything after each use."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._compiler._matchers.clear()
        self._lock.release()


def test_a_grammar_that_others_displace_has_a_matcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes compile in their threads while a step takes the matcher of its request."""
    compiler = GrammarCompiler(NULL)
    monkeypatch.setattr(compiler, "_lock", CrowdedLock(compiler))
    for _ in range(2):
        assert not compiler.matcher(regex("[a-z]+")).is_error()


def test_a_checkpoint_without_tokenizer_or_eos_gives_an_error_that_names_it(tmp_path: Path) -> None:
    for vocabulary, word in (
        (Vocabulary([2], str(tmp_path)), "tokenizer.json"),
        (Vocabulary([]), "EOS"),
    ):
        service = GrammarService(GrammarCompiler(vocabulary))
        service.compile(CompileGrammar(1, regex("a")))
        [answer] = wait(service, 1)
        assert word in answer.error
