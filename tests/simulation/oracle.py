"""The properties that hold for every stream, whatever happens to the processes and the wire."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from protocol.api_core import ErrorCode, RequestError, RequestOutput
from protocol.model_facts import ModelFacts
from protocol.sampling import FinishReason
from tests.simulation.adapters import WRONG_TEXT, LoadWatch
from tests.simulation.grammars import WRONG
from tests.simulation.model import expected_stream, expected_vector
from tests.simulation.plan import RequestPlan
from tests.simulation.world import SECOND, START_TIME, Violation, World

VERDICTS = ("lost", "duplicated", "mismatched", "stuck")


@dataclass
class Hold:
    """A granted pause: no step is computed until it ends."""

    client: str
    """The client that requested it; its streams are checked."""
    num_late: int
    """Tokens per stream that may still arrive, because they were in flight."""
    num_since: dict[str, int] = field(default_factory=dict)
    """Tokens that have arrived since, by stream."""


@dataclass
class Stream:
    """One accepted request: what has arrived, and what is expected."""

    name: str
    plan: RequestPlan
    token_ids: list[int]
    """Expected tokens."""
    finish_reason: FinishReason
    """Expected reason of the end."""
    oracle: "Oracle"
    vector: bytes | None = None
    """Expected instead of tokens."""
    others: list[tuple[list[int], FinishReason]] = field(default_factory=list)
    """What engines with other checkpoints compute; a request gets all its tokens from one."""
    received: list[int] = field(default_factory=list)
    next_prompt_position: int = 1
    is_open: bool = True
    is_abandoned: bool = False
    """Its client died or cancelled it."""

    def take(self, output: RequestOutput) -> None:
        """Check an output that a reader received.

        Raises:
            Violation: another output was expected.
        """
        self.oracle.world.trace(f"{self.name} {output.first_index} {output.token_ids}")
        if not self.is_open:
            self._wrong("duplicated", "an output came after the end")
        if self.must_fail:
            self._wrong("mismatched", "an output came, though its grammar or adapter is wrong")
        if output.embedding != self.vector:
            self._wrong("mismatched", f"got the vector {output.embedding!r}")
        self.oracle.world.counts["vector"] += self.vector is not None
        if output.first_index != len(self.received):
            kind = "duplicated" if output.first_index < len(self.received) else "lost"
            self._wrong(kind, f"output {output.first_index} came after {len(self.received)}")
        self.oracle.check_pause(self.name, len(output.token_ids))
        self.received += output.token_ids
        for token_ids, reason in self.others:
            if self._fits(token_ids) and not self._fits(self.token_ids):
                self.token_ids, self.finish_reason = token_ids, reason
        if self.received != self.token_ids[: len(self.received)]:
            self._wrong(self._kind(), f"got {self.received} instead of {self.token_ids}")
        self._check_logprobs(output)
        if output.finish_reason is None:
            return
        self._close()
        if self.received != self.token_ids:
            self._wrong("lost", f"got only {self.received} of {self.token_ids}")
        if output.finish_reason is not self.finish_reason:
            self._wrong("mismatched", f"it ended with {output.finish_reason}")
        wants = self.plan.params.prompt_logprobs is not None
        if wants and self.next_prompt_position != max(1, len(self.plan.prompt)):
            self._wrong("lost", f"prompt logprobs ended at {self.next_prompt_position}")

    def _fits(self, token_ids: list[int]) -> bool:
        return self.received == token_ids[: len(self.received)]

    def _kind(self) -> str:
        """Classify the first wrong token: it comes too early, is repeated, or neither."""
        pairs = zip(self.received, [*self.token_ids, -1], strict=False)
        wrong = next(i for i, (came, due) in enumerate(pairs) if came != due)
        if self.received[wrong] in self.token_ids[max(0, wrong - 2) : wrong]:
            return "duplicated"
        is_early = self.received[wrong] in self.token_ids[wrong + 1 : wrong + 3]
        return "lost" if is_early else "mismatched"

    def _check_logprobs(self, output: RequestOutput) -> None:
        wants = self.plan.params.logprobs is not None
        if wants and [entry.token_id for entry in output.logprobs or []] != output.token_ids:
            self._wrong("mismatched", "logprobs are not of the tokens that they come with")
        for part in output.prompt_logprobs or []:
            if part.first_position != self.next_prompt_position:
                self._wrong("mismatched", f"prompt logprobs from {part.first_position} on")
            end = part.first_position + len(part.entries)
            ids = [entry.token_id for entry in part.entries]
            if ids != self.plan.prompt[part.first_position : end]:
                self._wrong("mismatched", "prompt logprobs of other tokens")
            self.next_prompt_position = end

    @property
    def must_fail(self) -> bool:
        """Whether no worker can compile its grammar or load its adapter."""
        loads = self.oracle.loads
        is_unusable = loads is not None and loads.plan.is_unusable(self.plan.adapter)
        return self.plan.params.grammar == WRONG or is_unusable

    def failed(self, error: RequestError) -> None:
        """Fail the run: an accepted request must not fail, except for its grammar or adapter."""
        reason = self._known_reason(error)
        if reason is not None:
            self.oracle.world.counts[reason] += 1
            self._close()
            return
        kind = "mismatched" if "came again" in error.message else "lost"
        text = f"{kind}: {self.name}: failed: {error.code} {error.message}"
        self.oracle.world.fail(Violation(text))

    def _known_reason(self, error: RequestError) -> str | None:
        """Return why a request may fail with an error; None: it may not."""
        what, loads, adapter = (error.code, error.param), self.oracle.loads, self.plan.adapter
        if what == (ErrorCode.INVALID, "grammar") and self.plan.params.grammar == WRONG:
            return "grammar wrong"
        if loads is None or adapter is None:
            return None
        if what == (ErrorCode.QUARANTINED, "model") and loads.may_refuse(adapter):
            return "adapter refused"
        is_wrong = adapter.adapter_id in loads.plan.wrong and WRONG_TEXT in error.message
        return "adapter wrong" if is_wrong and what == (ErrorCode.INVALID, "model") else None

    def cancelled(self) -> None:
        """Stop expecting outputs: the reader has left."""
        self.is_abandoned = True
        self._close()

    def _close(self) -> None:
        self.is_open = False
        self.oracle.num_open -= 1
        self.oracle.on_change()

    def _wrong(self, kind: str, text: str) -> None:
        raise Violation(f"{kind}: {self.name}: {text}")


class Oracle:
    """All streams of a run."""

    def __init__(
        self,
        world: World,
        facts: ModelFacts,
        on_change: Callable[[], None],
        loads: LoadWatch | None = None,
        *,
        others: Sequence[ModelFacts] = (),
    ) -> None:
        """`on_change` is called when a stream has ended.

        `others` are facts of engines with other checkpoints.
        """
        self.world = world
        self.loads = loads
        self.on_change = on_change
        self.num_open = 0
        self._facts = facts
        self._others = others
        self._hold: Hold | None = None
        self._num_asked = 0
        self._pending: set[int] = set()
        """Controls without an answer; the core may still execute those of a dead client."""
        self._is_alone = True
        """Whether no other control was pending when the last one was sent."""
        self.streams: list[Stream] = []

    @property
    def elapsed_s(self) -> float:
        """Virtual time since the start."""
        return (self.world.now - START_TIME) / SECOND

    def accepted(self, client: str, plan: RequestPlan) -> Stream:
        """Record a request that a client has accepted."""
        params, vector = plan.params, None
        token_ids, reason = [], FinishReason.ERROR
        others: list[tuple[list[int], FinishReason]] = []
        if params.grammar != WRONG:
            adapter_id = 0 if plan.adapter is None else plan.adapter.adapter_id
            token_ids, reason = expected_stream(plan.prompt, params, self._facts, adapter_id)
            others = [
                expected_stream(plan.prompt, params, facts, adapter_id) for facts in self._others
            ]
        if params.pooling is not None:
            vector = expected_vector(plan.prompt, params, self._facts)
        name = f"{client}/{plan.number}"
        self.world.trace(f"accept {name}")
        stream = Stream(name, plan, token_ids, reason, self, vector, others)
        self.streams.append(stream)
        self.num_open += 1
        return stream

    def abandon(self, client: str) -> None:
        """Close all streams of a client that has died."""
        for stream in self.streams:
            if stream.is_open and stream.name.startswith(f"{client}/"):
                stream.cancelled()
        self.on_change()

    # Pauses -------------------------------------------------------------------------------------

    def ask_for_pause(self) -> int:
        """Record a control, which may end the granted pause; returns its number."""
        self._is_alone = not self._pending
        self._num_asked += 1
        self._pending.add(self._num_asked)
        self._hold = None
        return self._num_asked

    def answered(self, number: int, hold: Hold | None = None) -> None:
        """Record an answer; `hold` is granted if no other control was pending meanwhile.

        The order in which the core receives the controls of two clients is not known.
        """
        self._pending.discard(number)
        is_alone = self._is_alone and number == self._num_asked and not self._pending
        if hold is not None and is_alone:
            self._hold = hold
            self.world.counts["pause held"] += 1

    def check_pause(self, stream: str, num_tokens: int) -> None:
        """Check the tokens of a stream against the granted pause.

        Raises:
            Violation: they were computed during the pause.
        """
        hold = self._hold
        if self.world.is_ending:  # the engine finishes its requests, paused or not
            return
        if hold is None or not stream.startswith(f"{hold.client}/"):
            return
        num = hold.num_since[stream] = hold.num_since.get(stream, 0) + num_tokens
        if num > hold.num_late:
            raise Violation(f"unpaused: {stream} got {num} tokens in a pause")

    @property
    def open_streams(self) -> list[Stream]:
        """Streams whose reader still waits."""
        return [stream for stream in self.streams if stream.is_open]
