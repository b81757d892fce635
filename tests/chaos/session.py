"""A whole chaos run: the golden run first, then round after round of the plan."""

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import msgspec

from tests.chaos.checker import check_stream
from tests.chaos.engine import Engine, EngineFailed
from tests.chaos.external_server import ExternalServer
from tests.chaos.faults import Cell, Fault, Phase, cells, plan
from tests.chaos.recording import Recording
from tests.chaos.reference import reference_problems
from tests.chaos.rounds import RoundResult, RoundRunner
from tests.chaos.stalls import stall_s
from tests.chaos.workload import FOREIGN_KINDS, PARSER_FLAGS, ChaosRequest, make_requests

DEFAULT_KILLS = 10
FOREIGN_RETURN_TIMEOUT_S = 120.0
ENGINE_FLAGS = (
    *("--max-num-batched-tokens", "256", "--max-model-len", "1024"),
    "--check-invariants",
    *PARSER_FLAGS,
)
"""Small, so that requests queue, prompts are chunked and running requests are preempted."""
NULL_FLAGS = (
    *("--null-step-ms", "4"),
    *("--standby-workers", "1"),  # by default only models that take long to load have one
)
NULL_BLOCKS, MODEL_BLOCKS = 130, 72
"""Blocks of all replicas: the same texts are shorter for a real tokenizer."""
_MIN_BLOCKS = 66
"""The smallest number of a replica's blocks: a sequence of the greatest length fits."""
_MAX_ROUNDS = 100_000
_TRIES = 4
"""The number of tries for a round that has missed its phase."""


class SessionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of a run."""

    model: str
    seed: int
    num_streams: int
    num_kills: int | None
    duration_s: float | None
    is_matrix: bool
    only_round: int | None
    faults: tuple[Fault, ...]
    phases: tuple[Phase, ...]
    stream_timeout_s: float
    """The longest duration of a stream; longer than any recovery."""
    engine_flags: tuple[str, ...]
    has_journal: bool = False
    """The engine keeps a journal, and clients resume broken streams."""
    kinds: tuple[str, ...] | None = None
    """Kinds of requests, in turn; None: all."""
    num_replicas: int = 1


class Session:
    """Chaos against an engine of its own."""

    def __init__(self, options: SessionOptions, base: Path, log: Callable[[str], None]) -> None:
        """Prepare.

        Args:
            options: the arguments of the run.
            base: an empty directory with a short path.
            log: receives lines about the progress.
        """
        self.results: list[RoundResult] = []
        self.skipped: list[tuple[Fault, Phase]] = []
        self.failure = ""
        """Why the run was not completed, if so."""
        self.golden: list[Recording] = []
        self._options = options
        self._base = base
        self._log = log
        self._kinds: Sequence[str] | None = options.kinds
        """Kinds of requests; None: all."""

    async def run(self) -> None:
        """Start an engine, run the plan, stop the engine.

        Raises:
            EngineFailed: it does not start, or does not become ready after a round.
        """
        options = self._options
        flags = (*self._flags(), *self._replica_flags(), *options.engine_flags)
        arguments = [options.model, *flags]
        engine = Engine(self._base, arguments, has_journal=options.has_journal)
        try:
            engine.start()
            await self._run_rounds(engine)
            status = engine.stop()
            if status != 0:
                self.failure = f"the engine has ended with status {status}"
            left = engine.files()
            if left:
                self.failure = f"the engine left files in its run dir: {', '.join(sorted(left))}"
        finally:
            engine.close()

    def _flags(self) -> tuple[str, ...]:
        """Flags of the engine, without those for replicas."""
        options = self._options
        share = 2 * options.num_replicas
        flags = ("--max-num-seqs", str(max(1, options.num_streams // share)), *ENGINE_FLAGS)
        is_null = options.model == "null"
        num_blocks = max(_MIN_BLOCKS, (NULL_BLOCKS if is_null else MODEL_BLOCKS) * 2 // share)
        blocks = ("--num-gpu-blocks-override", str(num_blocks))
        return (*flags, *blocks, *(NULL_FLAGS if is_null else ()))

    def _replica_flags(self) -> tuple[str, ...]:
        """Flags of an engine with replicas.

        The supervisor of a lost replica is stopped until all streams have ended. Meanwhile it must
        not be replaced because it hangs.
        """
        options = self._options
        if options.num_replicas == 1:
            return ()
        flags = ("--data-parallel-size", str(options.num_replicas))
        hang_s = ("--api-hang-timeout-s", f"{options.stream_timeout_s:g}")
        return (*flags, *(hang_s if Fault.LOST in options.faults else ()))

    async def _run_rounds(self, engine: Engine) -> None:
        pairs = self._available(await engine.roles())
        began = time.monotonic()
        self.golden = await self._golden(engine)
        typical_s = time.monotonic() - began
        runner = RoundRunner(engine, self.golden, typical_s, self._options.stream_timeout_s)
        self.results.append(await self._control_round(engine))
        num_ranks = len({member.rank for member in await engine.members("worker")})
        for cell in self._plan(pairs):
            for rank in self._ranks(cell.fault, num_ranks):
                await self._run_cell(runner, cell._replace(rank=rank))
        unhit = self._unhit(pairs, num_ranks) if self._options.is_matrix else []
        if unhit:
            self.failure = f"no process was killed in: {', '.join(unhit)}"

    async def _run_cell(self, runner: RoundRunner, cell: Cell) -> None:
        """Run one round, and repeat it at another moment if it has missed its phase."""
        for number in range(_TRIES):
            requests = self._requests(f"{cell.number}.{number}")
            result = await runner.run(cell._replace(seed=cell.seed + number), requests)
            self.results.append(result)
            self._log_round(result)
            if result.missed is None:
                return

    def _ranks(self, fault: Fault, num_ranks: int) -> Sequence[int | None]:
        """Return the ranks that a cell kills one after the other; None: any.

        A matrix kills each rank in each phase.
        """
        each = self._options.is_matrix and num_ranks > 1 and "worker" in fault.roles
        return range(num_ranks) if each else (None,)

    def _unhit(self, pairs: list[tuple[Fault, Phase]], num_ranks: int) -> list[str]:
        """Return the cells of the matrix whose phase was never hit."""
        hit = {(each.fault, each.phase, each.rank) for each in self.results if not each.missed}
        return [
            f"{fault} {phase}" if rank is None else f"{fault} {phase} of rank {rank}"
            for fault, phase in pairs
            for rank in self._ranks(fault, num_ranks)
            if (fault, phase, rank) not in hit
        ]

    def _available(self, roles: set[str]) -> list[tuple[Fault, Phase]]:
        """Return the cells whose processes exist; logs the skipped ones.

        Raises:
            EngineFailed: none is left.
        """
        faults = [fault for fault in self._options.faults if roles.issuperset(fault.roles)]
        for fault in self._options.faults:
            if fault not in faults:
                self._log(f"skipped: {fault}, the engine has no such process")
                self.skipped += cells([fault], self._options.phases)
        if not faults:
            raise EngineFailed("the engine has none of the processes to kill")
        return cells(faults, self._options.phases)

    async def _golden(self, engine: Engine) -> list[Recording]:
        """Record the requests without faults, all read to their end.

        Raises:
            EngineFailed: a stream does not end well.
        """
        deadline = time.monotonic() + self._options.stream_timeout_s
        requests = self._requests("golden")
        return check_golden(
            requests, await engine.client.record_all(requests, deadline, may_leave=False)
        )

    async def _control_round(self, engine: Engine) -> RoundResult:
        """Run the requests without faults: a difference here is not caused by faults."""
        began = time.monotonic()
        deadline = began + self._options.stream_timeout_s
        recordings = await engine.client.record_all(self._requests("control"), deadline)
        result = RoundResult(0, "none", "", 0, num_streams=len(recordings))
        for recording, expected in zip(recordings, self.golden, strict=True):
            result.violations += check_stream(recording, expected)
        result.seconds = time.monotonic() - began
        return result

    def _requests(self, salt: str) -> list[ChaosRequest]:
        options = self._options
        name = options.model.rstrip("/").rsplit("/", 1)[-1]
        return make_requests(options.seed, options.num_streams, name, salt=salt, kinds=self._kinds)

    def _plan(self, pairs: list[tuple[Fault, Phase]]) -> Iterator[Cell]:
        """Yield rounds until the requested numbers are reached."""
        options = self._options
        rounds = islice(plan(pairs, options.seed, is_shuffled=not options.is_matrix), _MAX_ROUNDS)
        if options.only_round is not None:
            yield from islice(rounds, options.only_round - 1, options.only_round)
            return
        min_rounds = len(pairs) if options.is_matrix else 0
        min_kills = options.num_kills
        if min_kills is None:
            min_kills = 0 if options.is_matrix or options.duration_s else DEFAULT_KILLS
        ends_at = time.monotonic() + (options.duration_s or 0.0)
        for cell in rounds:
            num_kills = sum(len(result.kills) for result in self.results)
            is_done = cell.number > min_rounds and num_kills >= min_kills
            if is_done and time.monotonic() >= ends_at:
                return
            yield cell

    def _log_round(self, result: RoundResult) -> None:
        stall = f", stall {max(result.stalls_s):.2f} s" if result.stalls_s else ""
        missed = f", MISSED: {result.missed}" if result.missed else ""
        bad = f", {len(result.violations)} VIOLATIONS" if result.violations else ""
        how = ", ".join(f"{kill.role} {kill.how}" for kill in result.kills) or "no kill"
        how += "" if result.rank is None else f" (rank {result.rank})"
        self._log(
            f"round {result.number} {result.fault} {result.phase}: {how}{stall}"
            f" in {result.seconds:.1f} s{missed}{bad}"
        )


def check_golden(requests: Sequence[ChaosRequest], golden: list[Recording]) -> list[Recording]:
    """Check that the golden run can serve as the reference.

    Raises:
        EngineFailed: a stream has not ended well, or is not as requested.
    """
    problems = reference_problems(requests, golden)
    if problems:
        raise EngineFailed("\n".join(problems))
    return golden


class ExternalSession(Session):
    """Chaos against a running server: random kill times, the same client and checker."""

    def __init__(
        self,
        options: SessionOptions,
        base: Path,
        log: Callable[[str], None],
        server: ExternalServer,
    ) -> None:
        super().__init__(options, base, log)
        self._server = server
        self._model = ""
        self._kinds = options.kinds or FOREIGN_KINDS

    async def run(self) -> None:
        """Run until the requested number of kills, or until the server does not recover.

        Raises:
            EngineFailed: the run without faults does not end well.
            OSError: the server cannot be reached.
            Declined: it does not list its models.
        """
        self._model = await self._server.model()
        began = time.monotonic()
        deadline = began + self._options.stream_timeout_s
        client, rng = self._server.client, random.Random(self._options.seed)
        requests = self._requests("golden")
        golden = check_golden(
            requests, await client.record_all(requests, deadline, may_leave=False)
        )
        self.golden = golden
        typical_s = time.monotonic() - began
        num_rounds = self._options.num_kills or DEFAULT_KILLS
        for number in range(1, num_rounds + 1):
            result = await self._round(number, rng.uniform(0.1, 0.9) * typical_s, golden, rng)
            self.results.append(result)
            self._log_round(result)
            if not result.kills:
                self.failure = "there was no process to kill"
                return
            if result.recovery_s is None:
                self.failure = f"not back within {FOREIGN_RETURN_TIMEOUT_S:g} s after a kill"
                return

    def _requests(self, salt: str) -> list[ChaosRequest]:
        options = self._options
        return make_requests(
            options.seed, options.num_streams, self._model, salt=salt, kinds=self._kinds
        )

    async def _round(
        self, number: int, wait_s: float, golden: Sequence[Recording], rng: random.Random
    ) -> RoundResult:
        began = time.monotonic()
        result = RoundResult(number, "server", Phase.RANDOM, self._options.seed)
        deadline = began + self._options.stream_timeout_s
        streams = asyncio.ensure_future(
            self._server.client.record_all(self._requests(str(number)), deadline)
        )
        await asyncio.sleep(wait_s)
        kill = await self._server.kill(rng)
        recordings = await streams
        result.num_streams = len(recordings)
        if kill is not None:
            result.kills.append(kill)
        for recording, expected in zip(recordings, golden, strict=True):
            found = check_stream(recording, expected)
            result.violations += found
            result.recordings += [recording] if found else []
            stall = stall_s(recording, [kill.time for kill in result.kills])
            result.stalls_s += [] if stall is None or found else [stall]
        if await self._server.wait_back(self._model, FOREIGN_RETURN_TIMEOUT_S) and kill is not None:
            result.recovery_s = time.monotonic() - kill.time
        result.seconds = time.monotonic() - began
        return result
