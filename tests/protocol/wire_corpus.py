"""Messages of every type in every direction, and ways to damage them."""

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec

from protocol import api_core, core_worker, lifecycle, zygote_link
from protocol.api_core import (
    AbortRequests,
    AddRequest,
    Connect,
    Control,
    ControlAction,
    ControlDone,
    EngineState,
    EngineStats,
    ErrorCode,
    KVEventsTaken,
    PauseMode,
    Refused,
    RequestError,
    RequestOutput,
    Status,
    StepOutputs,
)
from protocol.core_worker import (
    Adopt,
    BlockCopies,
    CachedRequestData,
    CompileGrammar,
    GrammarCompiled,
    KVGroup,
    ModelFacts,
    ModelRunnerOutput,
    NewRequestData,
    PromptLogprobs,
    SchedulerOutput,
    Sleep,
    StepFailed,
    TokenLogprobs,
    WorkerHello,
)
from protocol.kv_events import (
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KVEventBatch,
    KVEventsRefused,
    SubscribeKVEvents,
    UnsubscribeKVEvents,
)
from protocol.lifecycle import (
    DeathCause,
    Drain,
    Drained,
    Fatal,
    Health,
    Hello,
    ProcessState,
    ProcessStatus,
    Progress,
    Promote,
    Ready,
    RestartQuery,
    RestartReply,
    Role,
    StatusQuery,
    StatusReply,
    Stop,
    Suspect,
    WorkerDied,
)
from protocol.message import Decoder, Message, encode, pack_token_ids
from protocol.sampling import (
    FinishReason,
    Grammar,
    GrammarKind,
    Pooling,
    PoolingType,
    SamplingParams,
)
from protocol.zygote_link import Forked, ForkFailed, ForkWorker

_PARAMS = SamplingParams(
    max_tokens=64,
    temperature=0.7,
    top_p=0.9,
    top_k=40,
    min_p=0.05,
    seed=-(2**40),
    presence_penalty=0.5,
    frequency_penalty=-0.5,
    repetition_penalty=1.1,
    min_tokens=3,
    ignore_eos=True,
    stop_token_ids=[7, 8],
    logit_bias={5: -1.5, 9: 100.0},
    logprobs=2,
    prompt_logprobs=1,
    pooling=Pooling(PoolingType.MEAN, 7, False),
)
_FACTS = ModelFacts(
    "demo", 1000, 4096, 16, 512, [2, 3], "float32", "cpu", [KVGroup(), KVGroup(64, 5)], 8, True
)
_LOGPROBS = TokenLogprobs(5, -0.25, 1, [5, 6], [-0.25, -1.75])
_NEW = NewRequestData(1, pack_token_ids(range(300)), 200, _PARAMS, [[1, 2], [3, 4]], 0, 0)
_PROMPT = PromptLogprobs(1, 1, [_LOGPROBS, _LOGPROBS])


class Direction(NamedTuple):
    """One direction of one link."""

    name: str
    decode: Decoder[Any]
    union: Any
    messages: list[Message]


DIRECTIONS = [
    Direction(
        "client to core",
        api_core.decode_from_client,
        api_core.ClientToCore,
        [
            Connect(1234),
            AddRequest(1, [5, 6, 7], SamplingParams()),
            AddRequest(2**40, list(range(400)), _PARAMS, [9] * 30, -2, 1.5, "salt", True, "tenant"),
            AbortRequests([1, 2, 3]),
            Control(4, ControlAction.PAUSE, PauseMode.PAUSED_NEW, True),
            Control(5, ControlAction.PAUSE, PauseMode.PAUSED_ALL, restores=True),
            SubscribeKVEvents(3, 2**40),
            UnsubscribeKVEvents(),
            KVEventsTaken(),
        ],
    ),
    Direction(
        "core to client",
        api_core.decode_from_core,
        api_core.CoreToClient,
        [
            Status(EngineState.READY, _FACTS, EngineStats(1, 2, 0.5), PauseMode.RUNNING, True),
            StepOutputs([RequestOutput(n, n, [n, n + 1]) for n in range(32)]),
            StepOutputs(
                [RequestOutput(1, 0, [5], FinishReason.STOP, 5, 16, [_LOGPROBS], [_PROMPT])]
            ),
            StepOutputs(
                [RequestOutput(1, 0, [], FinishReason.STOP, embedding=b"\0\0\x80\x3f" * 7)]
            ),
            Refused(None, RequestError(ErrorCode.INVALID, "not this", "prompt"), 3),
            ControlDone(4, True, PauseMode.PAUSED_ALL),
            KVEventBatch(
                3,
                7,
                [
                    BlocksStored([b"a" * 32, b"b" * 32], b"c" * 32, [1] * 32, 16, 0, "salt", 0),
                    BlocksRemoved([b"a" * 32], 0),
                    AllBlocksCleared(),
                ],
            ),
            KVEventsRefused(3, "none here"),
        ],
    ),
    Direction(
        "core to worker",
        core_worker.decode_from_core,
        core_worker.CoreToWorker,
        [
            Adopt(17),
            Sleep(),
            CompileGrammar(3, Grammar(GrammarKind.REGEX, "[a-z]+"), is_proven=True),
            SchedulerOutput(18, [], CachedRequestData(), {}, 32, [], []),
            SchedulerOutput(
                19,
                [
                    NewRequestData(
                        1, pack_token_ids(range(300)), 200, _PARAMS, [[1, 2], [3, 4]], 0, 0
                    )
                ],
                CachedRequestData([2, 3], [[[5], [6]], [[7], [8]]]),
                {1: 300, 2: 0},
                331,
                [4],
                [5, 6],
                BlockCopies([9, 10], [0, 1]),
                BlockCopies([11], [2]),
            ),
        ],
    ),
    Direction(
        "worker to core",
        core_worker.decode_from_worker,
        core_worker.WorkerToCore,
        [
            WorkerHello(0, 4321, _FACTS, 12.5),
            ModelRunnerOutput(18, list(range(32))),
            ModelRunnerOutput(19, [5, 6, 7], [1, 2], [0, 3], {1: [_LOGPROBS]}, [_PROMPT], 12_345),
            ModelRunnerOutput(20, [5, 0], request_errors={2: "the logits are not finite"}),
            ModelRunnerOutput(21, [5, 0], pooled={2: b"\0\0\x80\x3f" * 7}),
            StepFailed(22, "RuntimeError: out of memory"),
            GrammarCompiled(3, "no such rule"),
        ],
    ),
    Direction(
        "child to supervisor",
        lifecycle.decode_to_supervisor,
        lifecycle.ToSupervisor,
        [
            Hello(Role.WORKER, 1, 4321),
            Progress("weights", 3, 10),
            Ready("cpu, float32", 512, ["context 2,048 tokens", "attention: native"]),
            Fatal("loading", "no such file", "look there", False),
            Drained(),
            StatusQuery(),
            RestartQuery(Role.CORE),
        ],
    ),
    Direction(
        "supervisor to child",
        lifecycle.decode_from_supervisor,
        lifecycle.FromSupervisor,
        [
            Drain(True),
            Stop(),
            Promote(7),
            Suspect(Role.WORKER, 0, 6, 2.5),
            WorkerDied(0, 6, DeathCause.OOM, 99),
            Health(True, 1.5),
            StatusReply(
                [ProcessStatus(Role.API, 0, 99, 3, ProcessState.READY, 2**30, 1)],
                True,
                "http://127.0.0.1:8000",
            ),
            RestartReply(False, "it is being replaced"),
        ],
    ),
    Direction(
        "supervisor to zygote",
        zygote_link.decode_to_zygote,
        zygote_link.ToZygote,
        [ForkWorker(7, 0, True, ["parent_fd", "progress_fd"])],
    ),
    Direction(
        "zygote to supervisor",
        zygote_link.decode_from_zygote,
        zygote_link.FromZygote,
        [
            Progress("weights", 3, 10),
            Ready("383 MiB to share"),
            Fatal("loading", "no such file"),
            Forked(7, 4321),
            ForkFailed(7, "no processes left"),
        ],
    ),
]

_ODD_VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    2**31,
    2**53,
    2**63 - 1,
    2**64 - 1,
    -(2**63),
    float("nan"),
    float("inf"),
    -0.0,
    "",
    "x" * 300,
    "Connect",
    "\u0000",
    b"",
    b"\xff" * 40,
    [],
    {},
    {1: 2},
    {"a": []},
    [[[[[]]]]],
    [0] * 200,
    msgspec.msgpack.Ext(5, b"ext"),
]


def harmed(bodies: list[bytes], rng: random.Random) -> Iterator[bytes]:
    """Yield damaged messages without end, most of them nearly valid."""
    trees = [msgspec.msgpack.decode(body) for body in bodies]
    kinds: list[Callable[[], bytes]] = [
        lambda: _edited(rng.choice(bodies), rng),
        lambda: _cut(rng.choice(bodies), rng),
        lambda: _spliced(rng.choice(bodies), rng.choice(bodies), rng),
        lambda: encode(_regrown(rng.choice(trees), trees, rng)),
        lambda: encode(_regrown(rng.choice(trees), trees, rng)),
        lambda: rng.randbytes(rng.randint(0, 60)),
    ]
    while True:
        yield rng.choice(kinds)()


def _edited(body: bytes, rng: random.Random) -> bytes:
    """Change some bytes."""
    edited = bytearray(body)
    for _ in range(rng.randint(1, 4)):
        edited[rng.randrange(len(edited))] = rng.randrange(256)
    return bytes(edited)


def _cut(body: bytes, rng: random.Random) -> bytes:
    """Cut off the end, or append bytes."""
    return body[: rng.randrange(len(body))] if rng.random() < 0.7 else body + rng.randbytes(3)


def _spliced(one: bytes, other: bytes, rng: random.Random) -> bytes:
    """Join the head of one message and the tail of another."""
    return one[: rng.randrange(len(one) + 1)] + other[rng.randrange(len(other) + 1) :]


def _regrown(tree: Any, trees: list[Any], rng: random.Random) -> Any:
    """Change one place of a well-formed message: an odd value, more, less, or another branch."""
    if isinstance(tree, list) and tree and rng.random() < 0.85:
        grown = list(tree)
        place = rng.randrange(len(grown))
        match rng.randrange(8):
            case 0:
                del grown[place]
            case 1:
                grown.insert(place, grown[place])
            case _:
                grown[place] = _regrown(grown[place], trees, rng)
        return grown
    if isinstance(tree, dict) and tree and rng.random() < 0.5:
        key = rng.choice(list(tree))
        return {**tree, key: rng.choice(_ODD_VALUES)}
    if rng.random() < 0.2:
        branch = rng.choice(trees)
        return branch[rng.randrange(len(branch))]
    return rng.choice(_ODD_VALUES)
