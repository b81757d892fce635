"""The plan of one seed: a configuration, a workload, and faults."""

import random
import signal
from dataclasses import dataclass, field

import msgspec

from protocol.adapters import Adapter
from protocol.config import (
    ApiConfig,
    CacheConfig,
    EngineConfig,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    RecoveryConfig,
    RunConfig,
    SchedulerConfig,
)
from protocol.sampling import Pooling, PoolingType, SamplingParams, pooling_params
from tests.simulation.adapters import AdapterPlan, make_adapters
from tests.simulation.disk import DISK_FAULTS
from tests.simulation.grammars import FIRST_TOKEN_ID, WRONG, make_grammar
from tests.simulation.wire import FRAME_FAULTS

PROCESS_FAULTS = ("kill", "stop", "restart", "reset", "partition")
FAULTS = (*PROCESS_FAULTS, "failpoint", "pause", "disconnect", "disk", *FRAME_FAULTS)
MODES = ("safety", "progress")
PAUSES = ("pause new", "pause all", "pause all", "sleep", "reset")
VOCAB_SIZE = 97
_MAX_MODEL_LEN = 64
_STANDBY_RATE = 0.3
"""Share of seeds with standbys; in the others a process always starts alone."""
_PAUSE_RATE = 0.25
_EARLY_END_RATE = 0.5
_LAST_VICTIMS = ((), ("core",), ("worker",), ("core", "worker"), ("core", "core"))
_JOURNAL_RATE = 0.2
JOURNAL_DIR = "journal"
"""The journal's directory in the configuration; the disk of the run replaces it."""
_RESUME_WINDOW_S = 4.0
_FRAME_RATES = (0.01, 0.01, 0.03, 0.1)
_FEATURES_RATE = 0.4
"""Share of seeds in which some requests have a grammar, or return a vector."""
_STATES_RATE = 0.25
"""Share of seeds in which the model has recurrent layers."""
_DRAFTS_RATE = 0.25
"""Share of seeds with speculation."""
_ADAPTERS_RATE = 0.25
"""Share of seeds with adapters, of those with one rank."""
_STAGES_RATE = 0.2
"""Share of seeds with several stages, of those without the features that exclude them."""
_DEADLY_RATE = 0.3
"""Share of these in which loads of one adapter kill workers."""


@dataclass
class RequestPlan:
    """One request: when it is submitted, and when its reader cancels it."""

    number: int
    time_s: float
    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    salt: str = ""
    cancel_after_s: float | None = None
    adapter: Adapter | None = None


@dataclass
class Pause:
    """One request to pause or reset the engine."""

    kind: str
    """One of `PAUSES`."""
    seconds: float


@dataclass
class FaultEvent:
    """One fault at one time."""

    time_s: float
    kind: str
    target: str
    """A role, "client", or an address."""
    seconds: float = 0.0
    """Duration of a stop or a partition."""


@dataclass
class JournalPlan:
    """The API keeps a journal, and HTTP clients reconnect to it."""

    disk_rates: dict[str, float] = field(default_factory=dict)
    """Probability of each of `DISK_FAULTS` per write."""
    stall_rate: float = 0.0
    """Probability that a write is slow."""
    disconnects: list[float] = field(default_factory=list)
    """Times in seconds at which a connection breaks."""
    kill_after_answers: int | None = None
    """The API is killed shortly after this many answers have begun."""


@dataclass
class EndPlan:
    """A shutdown while requests are open."""

    after_s: float
    """Delay in seconds after the last fault."""
    victims: tuple[str, ...]
    """The roles that are killed during the shutdown."""
    load_s: float
    """Start-up time of workers from then on."""


@dataclass
class Plan:
    """Everything that a seed determines before the run starts."""

    config: EngineConfig
    num_host_blocks: int
    step_s: float
    start_s: dict[str, float]
    requests: list[list[RequestPlan]]
    """By client; the first one is the API, which the supervisor restarts."""
    faults: list[FaultEvent] = field(default_factory=list)
    frame_rates: dict[str, float] = field(default_factory=dict)
    journal: JournalPlan | None = None
    pauses: list[tuple[float, Pause]] = field(default_factory=list)
    """By time in seconds."""
    num_draft_states: int | None = None
    """Blocks for the states before drafts; None: as many as are needed."""
    adapters: AdapterPlan | None = None
    failpoint_rate: float = 0.0
    """Probability that a process is killed when it reaches a failpoint."""
    heal_at_s: float = 0.0
    """In progress mode, faults end at this time: no fault comes later."""
    end: EndPlan | None = None
    """A shutdown with open requests; None: the engine ends when nothing is open."""


def make_plan(seed: int, mode: str, kinds: frozenset[str]) -> Plan:
    """Draw a plan with faults of `kinds` only."""
    rng = random.Random(seed * 2 + MODES.index(mode))
    has_journal = rng.random() < _JOURNAL_RATE
    config = _config(rng, has_journal=has_journal)
    has_standby = config.recovery.standby_workers or config.recovery.standby_cores
    # A standby is ready only after the engine has served for a while.
    duration_s = rng.choice((0.3, 1.0, 2.0, 2.0) if has_standby else (0.05, 0.3, 1.0, 2.0))
    plan = Plan(
        config=config,
        num_host_blocks=rng.choice((0, 0, 0, 8)),
        step_s=rng.choice((0.001, 0.005, 0.02)),
        start_s={
            "core": rng.uniform(0.1, 0.3),
            "worker": rng.choice((0.1, 0.5, 1.5)),
            "api": rng.uniform(0.1, 0.5),
            "zygote": rng.choice((0.1, 0.5, 1.5)),
            "fork": rng.choice((0.005, 0.05)),
        },
        requests=_requests(rng, config, duration_s),
        heal_at_s=duration_s + rng.choice((0.2, 1.0, 2.0)),
        journal=JournalPlan() if has_journal else None,
    )
    _draw_features(random.Random(f"{seed} {mode}"), plan)
    _draw_states(random.Random(f"{seed} {mode} states"), plan)
    _draw_drafts(random.Random(f"{seed} {mode} drafts"), plan)
    _draw_adapters(random.Random(f"{seed} {mode} adapters"), plan, duration_s, kinds)
    _draw_stages(random.Random(f"{seed} {mode} stages"), plan)
    _draw_faults(rng, plan, mode, kinds)
    plan.heal_at_s = max([plan.heal_at_s, *(fault.time_s for fault in plan.faults)])
    if rng.random() < _EARLY_END_RATE and not has_journal and not _breaks_connections(plan):
        victims = rng.choice(_LAST_VICTIMS) if "kill" in kinds else ()
        plan.end = EndPlan(rng.uniform(0.0, 0.3), victims, rng.choice((0.1, 1.0, 4.0)))
    return plan


def _breaks_connections(plan: Plan) -> bool:
    """Return whether a living client may have to reconnect, which can take five seconds."""
    return bool(plan.frame_rates) or any(f.kind in ("reset", "partition") for f in plan.faults)


def _config(rng: random.Random, *, has_journal: bool) -> EngineConfig:
    block_size = rng.choice((2, 4, 8))
    policy = rng.choice(("fcfs", "fcfs", "priority"))
    max_num_seqs = rng.choice((2, 4, 8))
    num_ranks = rng.choice((1, 1, 1, 2))
    # Which standbys there are: of the worker, of the core.
    standbys = rng.choice(((0, 1), (1, 0), (1, 1))) if rng.random() < _STANDBY_RATE else (0, 0)
    return EngineConfig(
        model=ModelConfig(model="null", max_model_len=_MAX_MODEL_LEN),
        cache=CacheConfig(
            block_size=block_size,
            num_gpu_blocks_override=rng.choice((32, 32, 48, 96)) // block_size + 1,
            enable_prefix_caching=rng.random() < 0.8,
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(max_num_seqs, rng.choice((8, 16, 64))),
            max_steps_in_flight=rng.choice((1, 2, 2, 3)),
            scheduling_policy=policy,
            preempt_for_priority=policy == "priority" and rng.random() < 0.5,
        ),
        api=ApiConfig(
            journal_dir=JOURNAL_DIR if has_journal else None,
            journal_sync=has_journal and rng.random() < 0.5,
            resume_window_s=_RESUME_WINDOW_S,
        ),
        parallel=ParallelConfig(tensor_parallel_size=num_ranks),
        recovery=RecoveryConfig(
            startup_timeout_s=60.0,
            shutdown_timeout_s=30.0,
            restart_backoff_max_s=1.0,
            hang_timeout_s=rng.choice((0.5, 2.0)),
            first_step_timeout_s=2.0,
            standby_workers=standbys[0],
            standby_cores=standbys[1],
        ),
        run=RunConfig(check_invariants=rng.random() < 0.1),
    )


def _requests(
    rng: random.Random, config: EngineConfig, duration_s: float
) -> list[list[RequestPlan]]:
    head = rng.choices(range(FIRST_TOKEN_ID, VOCAB_SIZE), k=24)
    clients: list[list[RequestPlan]] = [[] for _ in range(rng.choice((1, 1, 2)))]
    for number in range(rng.randrange(3, 9)):
        plan = _request(rng, number, config, duration_s, head)
        rng.choice(clients).append(plan)
    return clients


def _request(
    rng: random.Random, number: int, config: EngineConfig, duration_s: float, head: list[int]
) -> RequestPlan:
    """Draw a request; its prompt may begin like others, with tokens of `head`."""
    token_ids = range(FIRST_TOKEN_ID, VOCAB_SIZE)
    longest = config.cache.num_gpu_blocks_override or 0
    longest = min((longest - 1) * config.cache.block_size, _MAX_MODEL_LEN - 1)
    num_shared, length = rng.randrange(0, 25), rng.randrange(1, 25)
    prompt = head[: min(num_shared, length)]
    prompt += rng.choices(token_ids, k=length - len(prompt))
    max_tokens = min(rng.randrange(1, 16), longest - length)
    return RequestPlan(
        number,
        rng.uniform(0.0, duration_s),
        prompt,
        SamplingParams(
            max_tokens=max_tokens,
            seed=rng.randrange(2**31),
            min_tokens=rng.randrange(0, max_tokens + 1) if rng.random() < 0.2 else 0,
            stop_token_ids=rng.sample(token_ids, rng.choice((0, 0, 2, 8))),
            logprobs=rng.choice((None, None, None, 1)),
            prompt_logprobs=rng.choice((None,) * 7 + (1,)),
        ),
        priority=rng.randrange(3),
        salt=rng.choice(("", "", "", "x")),
        cancel_after_s=rng.uniform(0, 0.3) if rng.random() < 0.15 else None,
    )


def _draw_features(rng: random.Random, plan: Plan) -> None:
    """Give some requests a grammar, and let others return a vector.

    What a journal holds has no vectors, and clients over HTTP send no wrong grammar again.
    """
    if rng.random() >= _FEATURES_RATE:
        return
    grammars = [make_grammar(rng.randrange(2), rng.randrange(1, 16)) for _ in range(3)]
    for number, requests in enumerate(plan.requests):
        is_over_http = plan.journal is not None and number == 0
        for request in requests:
            kind = rng.random()
            if kind < 0.5:
                is_wrong = kind < 0.05 and not is_over_http
                grammar = WRONG if is_wrong else rng.choice(grammars)
                request.params = msgspec.structs.replace(request.params, grammar=grammar)
            elif kind < 0.75 and not is_over_http:
                pooling = Pooling(rng.choice(list(PoolingType)), rng.choice((None, None, 3)))
                request.params = pooling_params(pooling)


def _draw_states(rng: random.Random, plan: Plan) -> None:
    """Give the model recurrent layers, and mostly few state blocks."""
    if rng.random() >= _STATES_RATE:
        return
    config, replace = plan.config, msgspec.structs.replace
    worker = replace(config.worker, null_state_blocks=rng.choice((1, 2, 3, 5, 20)))
    cache = config.cache
    if cache.enable_prefix_caching:
        cache = replace(cache, mamba_block_size=rng.choice((1, 2, 4)) * cache.block_size)
    plan.config = replace(config, worker=worker, cache=cache)


def _draw_drafts(rng: random.Random, plan: Plan) -> None:
    """Let the worker make drafts, in some seeds with few blocks for the states before them."""
    if rng.random() >= _DRAFTS_RATE:
        return
    scheduler = msgspec.structs.replace(
        plan.config.scheduler,
        num_speculative_tokens=rng.choice((1, 3, 4)),
        adaptive_speculation=rng.random() < 0.3,
        target_itl_ms=rng.choice((0.0, 0.0, 30.0)),
    )
    plan.config = msgspec.structs.replace(plan.config, scheduler=scheduler)
    plan.num_draft_states = rng.choice((None, None, 2, 5))


def _draw_adapters(
    rng: random.Random, plan: Plan, duration_s: float, kinds: frozenset[str]
) -> None:
    """Draw more adapters than have a turn at once, further requests, and loads that end badly.

    Most of these requests are for the first adapter.
    """
    config, replace = plan.config, msgspec.structs.replace
    if config.parallel.tensor_parallel_size > 1 or rng.random() >= _ADAPTERS_RATE:
        return
    adapters = make_adapters(rng.choice((2, 3, 5)))
    max_loras = rng.choice((1, 1, 2)) if len(adapters) > 2 else 1
    max_cpu_loras = rng.choice((None, max_loras, max_loras + 1))
    lora = LoraConfig(enable_lora=True, max_loras=max_loras, max_cpu_loras=max_cpu_loras)
    max_num_seqs = min(config.scheduler.max_num_seqs, rng.choice((1, 2, 2, 8)))
    scheduler = replace(config.scheduler, max_num_seqs=max_num_seqs)
    plan.config = replace(config, lora=lora, scheduler=scheduler)
    plan.adapters = AdapterPlan(adapters)
    requests = [request for client in plan.requests for request in client]
    head = requests[0].prompt
    for number in range(len(requests), len(requests) + rng.choice((0, 8, 16))):
        request = _request(rng, number, config, duration_s, head)
        rng.choice(plan.requests).append(request)
        requests.append(request)
    for request in requests:
        if rng.random() < 0.8:
            request.adapter = adapters[0] if rng.random() < 0.5 else rng.choice(adapters)
    wrong_or_deadly = adapters[-1].adapter_id
    if "kill" in kinds and rng.random() < _DEADLY_RATE:
        number = rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV))
        plan.adapters.deadly[wrong_or_deadly] = rng.choice((0.3, 1.0)), number
    elif rng.random() < 0.2:
        plan.adapters.wrong.add(wrong_or_deadly)
    for _ in range(rng.choice((0, 0, 1, 3))):
        plan.adapters.loads.append((rng.uniform(0.5, 1.0 + duration_s), rng.choice(adapters)))


def _draw_stages(rng: random.Random, plan: Plan) -> None:
    """Divide the layers among two or three workers, which share the requests."""
    config, replace = plan.config, msgspec.structs.replace
    is_excluded = config.scheduler.num_speculative_tokens or config.worker.null_state_blocks
    if is_excluded or plan.adapters is not None or rng.random() >= _STAGES_RATE:
        return
    parallel = replace(config.parallel, pipeline_parallel_size=rng.choice((2, 3)))
    plan.config = replace(config, parallel=parallel)


def _draw_faults(rng: random.Random, plan: Plan, mode: str, kinds: frozenset[str]) -> None:
    """Draw faults of processes and links; every third run has damaged frames, too."""
    frame_kinds = [kind for kind in FRAME_FAULTS if kind in kinds]
    if frame_kinds and rng.random() < 0.35:
        rate = rng.choice(_FRAME_RATES)
        for kind in rng.sample(frame_kinds, rng.randrange(1, len(frame_kinds) + 1)):
            plan.frame_rates[kind] = rate
    if "failpoint" in kinds and rng.random() < 0.25:
        plan.failpoint_rate = rng.choice((0.002, 0.01, 0.03))
    end_s = plan.heal_at_s if mode == "progress" else 2.0 * plan.heal_at_s
    if plan.journal is not None:
        _draw_journal_faults(rng, plan.journal, kinds, end_s)
    if "pause" in kinds and rng.random() < _PAUSE_RATE:
        _draw_pauses(rng, plan, kinds)
    process_kinds = [kind for kind in PROCESS_FAULTS if kind in kinds]
    if not process_kinds:
        return
    for _ in range(rng.choice((0, 1, 1, 2, 3, 5))):
        kind = rng.choice(process_kinds + (["kill"] if "kill" in process_kinds else []))
        time_s = rng.uniform(0.05, end_s)
        fault = FaultEvent(time_s, kind, "", rng.choice((0.05, 0.3, 1.0, 6.0)))
        fault.target = _target(rng, kind, plan.config)
        plan.faults.append(fault)
        if rng.random() < 0.3:  # a second one, during the recovery
            again = FaultEvent(time_s + rng.uniform(0, 0.5), kind, fault.target, fault.seconds)
            plan.faults.append(again)


def _draw_pauses(rng: random.Random, plan: Plan, kinds: frozenset[str]) -> None:
    """Draw pauses during the load, often with a death while the engine is paused."""
    requests = [request for client in plan.requests for request in client]
    ready_s = max(plan.start_s[role] for role in ("core", "worker", "api"))
    for request in rng.sample(requests, rng.choice((1, 1, 2))):
        time_s = max(request.time_s, ready_s) + rng.uniform(-0.02, 8 * plan.step_s)
        plan.pauses.append((time_s, Pause(rng.choice(PAUSES), rng.choice((0.02, 0.3, 2.0)))))
        if "kill" in kinds and rng.random() < 0.7:
            target = rng.choice(("worker", "worker", "core"))
            plan.faults.append(FaultEvent(time_s + rng.uniform(0, 0.1), "kill", target))


def _draw_journal_faults(
    rng: random.Random, journal: JournalPlan, kinds: frozenset[str], end_s: float
) -> None:
    if "kill" in kinds and rng.random() < 0.5:
        journal.kill_after_answers = rng.randrange(1, 5)
    if "disconnect" in kinds:
        journal.disconnects = [rng.uniform(0.3, end_s) for _ in range(rng.choice((0, 1, 3)))]
    if "disk" in kinds and rng.random() < 0.5:
        journal.stall_rate = rng.choice((0.0, 0.1))
        for kind in rng.sample(DISK_FAULTS, rng.choice((0, 1, 1, 2))):
            journal.disk_rates[kind] = rng.choice((0.05, 0.3))


def _target(rng: random.Random, kind: str, config: EngineConfig) -> str:
    if kind in ("reset", "partition"):
        return rng.choice(("core.sock", "workers.sock", "core.sock", "workers.sock", "supervisor"))
    if kind == "restart":
        return rng.choice(("worker", "core", "api"))
    recovery = config.recovery
    helpers = ["standby"] if recovery.standby_workers or recovery.standby_cores else []
    has_zygote = recovery.standby_workers or config.parallel.num_ranks > 1
    helpers += ["zygote"] if has_zygote else []
    if kind == "stop":
        return rng.choice(("worker", "core", "client", "supervisor", *helpers))
    return rng.choice(("worker", "worker", "core", "core", "client", *helpers))
