"""A scheduler with a fake worker, and requests by name."""

from collections import deque
from collections.abc import Mapping, Sequence

from core_proc.invariants import check_invariants
from core_proc.kv.offload import Offload
from core_proc.options import SchedulerOptions
from core_proc.request import Request, RequestStatus
from core_proc.scheduler import Scheduler
from protocol.core_worker import SchedulerOutput
from protocol.sampling import SamplingParams
from tests.core.fake_worker import FakeWorker, GuessFn, SampleFn

EOS = 2
PLAIN_TOKEN = 7


def make_worker(
    options: SchedulerOptions, sample: SampleFn, guess: GuessFn | None = None
) -> FakeWorker:
    """Build a worker with the memory of the scheduler's options.

    With drafts enabled and without `guesses`, drafts of varying length are right or wrong in turn.
    """

    def now_and_then(req_id: int, position: int) -> list[int]:
        num_drafts = (5 * req_id + 3 * position) % (options.num_speculative_tokens + 1)
        places = range(position, position + num_drafts)
        return [sample(req_id, place) + ((req_id + place) % 4 == 3) for place in places]

    windows = tuple(group.window for group in options.kv_groups if not group.is_state)
    return FakeWorker(
        options.block_size,
        options.num_blocks,
        sample,
        windows,
        options.num_host_blocks,
        num_state_blocks=options.num_state_blocks,
        num_host_state_blocks=options.num_host_state_blocks,
        guess=guess or now_and_then if options.num_speculative_tokens else None,
        max_drafts=options.num_speculative_tokens,
    )


def preempt_in_flight(bench: "Harness") -> None:
    """Run in 8 blocks, at depth 2, until a has preempted b, whose token is still in flight."""
    bench.add("a", 46, 20)
    bench.add("b", 46, 20)
    bench.fill()
    for _ in range(2):
        bench.update()
        bench.schedule()
    assert bench.preempted == ["b"]


class Harness:
    """Adds requests, runs steps, and records the outputs."""

    def __init__(
        self,
        *,
        blocks: int = 256,
        seqs: int = 16,
        budget: int = 2048,
        caching: bool = False,
        depth: int = 1,
        script: Mapping[str, Sequence[int]] | None = None,
        guesses: Mapping[str, Mapping[int, Sequence[int]]] | None = None,
        offload: Offload | None = None,
        **config: object,
    ) -> None:
        """Take the options of the scheduler and the script of the worker.

        `script` holds sampled tokens by name; past its end, and without it, all are equal.
        `guesses` holds drafts by name and number of outputs; there are no others.
        """
        self._guesses = guesses or {}
        options = SchedulerOptions(
            num_blocks=blocks,
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            enable_prefix_caching=caching,
            max_steps_in_flight=depth,
            **({"eos_token_ids": (EOS,)} | config),  # type: ignore[arg-type]
        )
        self.scheduler = Scheduler(options, offload)
        self.worker = make_worker(options, self._sample, self._guess)
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        self.sent: list[SchedulerOutput] = []
        self._script = script or {}
        self._names: dict[int, str] = {}
        self._pipe: deque[SchedulerOutput] = deque()

    def _sample(self, req_id: int, position: int) -> int:
        tokens = self._script.get(self._names[req_id], ())
        return tokens[position] if position < len(tokens) else PLAIN_TOKEN

    def _guess(self, req_id: int, position: int) -> list[int]:
        return list(self._guesses.get(self._names[req_id], {}).get(position, ()))

    def add(
        self,
        name: str,
        prompt: int | Sequence[int],
        max_tokens: int = 8,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
        params: SamplingParams | None = None,
        outputs: Sequence[int] = (),
        salt: str = "",
        tenant: str = "",
        origin: str = "",
        adapter_id: int = 0,
        adapter_name: str = "",
        blocked: RequestStatus | None = None,
    ) -> Request:
        """Add a request; a prompt given as a length differs from all others."""
        req_id = len(self._names)
        ids = (
            [1000 * (req_id + 1) + i for i in range(prompt)] if isinstance(prompt, int) else prompt
        )
        request = Request(
            req_id,
            ids,
            params or SamplingParams(max_tokens=max_tokens),
            outputs=outputs,
            priority=priority,
            arrival_time=float(req_id) if arrival_time is None else arrival_time,
            cache_salt=salt,
            tenant=tenant,
            origin=origin,
            adapter_id=adapter_id,
            adapter_name=adapter_name,
        )
        self._names[req_id] = name
        self.requests[name] = request
        self.outputs[name] = []
        self.scheduler.add_request(request, blocked)
        return request

    def abort(self, name: str) -> bool:
        return self.scheduler.abort_request(self.requests[name].req_id) is not None

    def schedule(self) -> dict[str, int]:
        """Schedule one step without its output; return the granted tokens by name."""
        message = self.scheduler.schedule()
        check_invariants(self.scheduler)
        if message is None:
            return {}
        self.sent.append(message)
        self._pipe.append(message)
        counts = {
            self._names[request.req_id]: message.num_scheduled_tokens.get(request.req_id, 1)
            for request in self.scheduler.running
        }
        return {name: num_tokens for name, num_tokens in counts.items() if num_tokens}

    def update(self) -> dict[str, int]:
        """Process the output of the oldest step; return the delivered tokens by name."""
        tokens = {}
        output = self.worker.execute(self._pipe.popleft())
        for result in self.scheduler.update_from_output(output):
            name = self._names[result.request.req_id]
            self.outputs[name] += result.new_token_ids
            tokens[name] = result.new_token_ids[0]
            assert name not in self.finished
            if result.finish_reason is not None:
                self.finished[name] = result.finish_reason.value
        check_invariants(self.scheduler)
        return tokens

    def step(self) -> dict[str, int]:
        """Schedule one step and process its output."""
        granted = self.schedule()
        if self._pipe:
            self.update()
        return granted

    def steps(self, count: int) -> list[dict[str, int]]:
        return [self.step() for _ in range(count)]

    def fill(self) -> list[dict[str, int]]:
        """Schedule as many steps as may be in flight; return the tokens granted in each."""
        grants = []
        for _ in range(self.scheduler.options.max_steps_in_flight - len(self._pipe)):
            num_sent = len(self.sent)
            granted = self.schedule()
            if len(self.sent) == num_sent:
                break
            grants.append(granted)
        return grants

    def overlap(self, limit: int = 1000) -> None:
        """Run to the end with as many steps in flight as possible, notices included."""
        for _ in range(limit):
            self.fill()
            if not self._pipe:
                assert not self.scheduler.has_unfinished
                return
            self.update()
        raise AssertionError(f"requests are left after {limit} steps")

    def run(self, limit: int = 1000) -> None:
        """Step until nothing is left, notices included."""
        for _ in range(limit):
            if not self.scheduler.has_unfinished and not self._pipe:
                self.step()
                return
            self.step()
        raise AssertionError(f"requests are left after {limit} steps")

    def names(self, req_ids: Sequence[int]) -> list[str]:
        return [self._names[req_id] for req_id in req_ids]

    @property
    def queue(self) -> list[str]:
        """Names of the waiting requests, front first."""
        return self.names([request.req_id for request in self.scheduler.waiting.in_order()])

    @property
    def num_in_flight(self) -> int:
        return len(self._pipe)

    @property
    def preempted(self) -> list[str]:
        """Names of the requests that the newest step preempted."""
        return self.names(self.sent[-1].preempted_req_ids)

    @property
    def notices(self) -> list[str]:
        """Names of the requests that the newest step reported as finished."""
        return self.names(self.sent[-1].finished_req_ids)

    @property
    def num_free(self) -> int:
        return self.scheduler.kv.num_free_blocks

    def lose_worker(self) -> None:
        """Replace the worker by one without state."""
        self._pipe.clear()
        self.scheduler.recompute_all()
        self.worker = make_worker(self.scheduler.options, self._sample, self._guess)
