"""Messages of every type in every direction; `tests/fuzz/mutation.py` damages them."""

from typing import Any, NamedTuple

from protocol import api_core, core_worker, lifecycle
from protocol.adapters import Adapter
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
    AdapterLoaded,
    Adopt,
    BlockCopies,
    BlocksFound,
    BlocksLoaded,
    CachedRequestData,
    CompileGrammar,
    FindBlocks,
    GrammarCompiled,
    GrammarFault,
    LoadAdapter,
    LoadBlocks,
    ModelRunnerOutput,
    NewRequestData,
    PromptLogprobs,
    SchedulerOutput,
    Sleep,
    StepFailed,
    StoreBlocks,
    TokenLogprobs,
    UnloadAdapter,
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
    Remarks,
    RestartQuery,
    RestartReply,
    Role,
    StatusQuery,
    StatusReply,
    Stop,
    Suspect,
    WorkerDied,
)
from protocol.message import Decoder, Message, pack_token_ids
from protocol.model_facts import KVGroup, ModelFacts
from protocol.process import host_agents, zygote_link
from protocol.process.host_agents import Failed, Join, Joined, Leave, Settings
from protocol.process.zygote_link import Forked, ForkFailed, ForkWorker
from protocol.sampling import (
    FinishReason,
    Grammar,
    GrammarKind,
    Pooling,
    PoolingType,
    RepetitionDetection,
    SamplingParams,
    ThinkingBudget,
)
from protocol.stores import block_link
from protocol.stores.block_link import BlockContent, BlocksHad, HaveBlocks, ReadBlock

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
    repetition_detection=RepetitionDetection(20, 3, 5),
    thinking_budget=ThinkingBudget(100, [7], [8, 9]),
    return_progress=True,
)
_CONFINED = SamplingParams(
    grammar=Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}'),
    allowed_token_ids=[3, 4, 5],
    bad_words=[[5, 6], [7]],
    logprobs=3,
    logprob_token_ids=[5, 6],
)
_FACTS = ModelFacts(
    "demo",
    1000,
    4096,
    16,
    512,
    [2, 3],
    "float32",
    "cpu",
    [KVGroup(), KVGroup(64, 5), KVGroup(is_state=True)],
    8,
    True,
    num_state_blocks=9,
)
_ADAPTER = Adapter("sql", "/adapters/sql", b"digest of 32..." * 2 + b"..")
_LOGPROBS = TokenLogprobs(5, -0.25, 1, [5, 6], [-0.25, -1.75])
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
            AddRequest(3, [], _CONFINED, packed_prompt=pack_token_ids(range(5))),
            AbortRequests([1, 2, 3]),
            Control(4, ControlAction.PAUSE, PauseMode.PAUSED_NEW, True),
            Control(5, ControlAction.PAUSE, PauseMode.PAUSED_ALL, restores=True),
            AddRequest(4, [5, 6, 7], SamplingParams(), adapter=_ADAPTER),
            AddRequest(5, [5, 6, 7], SamplingParams(), blocks_at="tcp://10.0.0.2:7300"),
            AddRequest(6, [5, 6, 7], SamplingParams(), tenant="gold", origin="10.0.0.7"),
            Control(6, ControlAction.LOAD_ADAPTER, adapter=_ADAPTER),
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
                [
                    RequestOutput(1, 0, [], FinishReason.STOP, embedding=b"\0\0\x80\x3f" * 7),
                    RequestOutput(1, 0, [], num_cached_tokens=8, num_computed_tokens=16),
                    RequestOutput(1, 0, [5, 5], FinishReason.REPETITION),
                ]
            ),
            Refused(None, RequestError(ErrorCode.INVALID, "not this", "prompt"), 3),
            ControlDone(4, True, PauseMode.PAUSED_ALL),
            ControlDone(5, False, PauseMode.RUNNING, "r is 64"),
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
            CompileGrammar(
                4, Grammar(GrammarKind.REGEX, "a"), origin="key 93a8f30d9e213cc0", tenant="gold"
            ),
            LoadAdapter(_ADAPTER, keeps=False),
            StoreBlocks([3, 4], [bytes(32), bytes(33)], [2], [bytes(33)]),
            LoadBlocks(7, [5], [bytes(range(32))]),
            LoadBlocks(7, [5], [bytes(range(32))], 2, bytes(33)),
            LoadBlocks(7, [5], [bytes(range(32))], 0, b"", "tcp://10.0.0.2:7300", 400),
            FindBlocks(7, "tcp://10.0.0.2:7300", [bytes(range(32))]),
            UnloadAdapter(_ADAPTER.adapter_id),
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
            GrammarCompiled(4, "16 others", GrammarFault.BUSY),
            AdapterLoaded(_ADAPTER.adapter_id, "r is 64"),
            BlocksLoaded(7, 1, 250_000, has_state=True),
            BlocksLoaded(8, 2, 250_000, True, 2, 200_000, True),
            BlocksFound(7, b"\1\0"),
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
            Remarks(["replica 1 gets no requests"]),
            StatusQuery(),
            RestartQuery(Role.CORE),
            RestartQuery(Role.API, 1),
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
                [
                    ProcessStatus(
                        Role.API, 2, 99, 3, ProcessState.READY, 2**30, 1, "api-0 spare", True
                    )
                ],
                True,
                "http://127.0.0.1:8000",
                "worker failed",
                ["tcp://10.0.0.2:7000"],
                ["replica 1 gets no requests"],
            ),
            RestartReply(False, "it is being replaced"),
        ],
    ),
    Direction(
        "supervisor to zygote",
        zygote_link.decode_to_zygote,
        zygote_link.ToZygote,
        [ForkWorker(7, True, ["parent_fd", "progress_fd"])],
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
    Direction(
        "agent to supervisor",
        host_agents.decode_from_agent,
        host_agents.FromAgent,
        [
            Join("one"),
            Join("two:7000", "tcp://10.0.0.2:7000", "0a1b", True),
            Failed("one", "the model cannot be divided"),
        ],
    ),
    Direction(
        "supervisor to agent",
        host_agents.decode_to_agent,
        host_agents.ToAgent,
        [Joined(), Settings(b"settings"), Leave("another agent has the name")],
    ),
    Direction(
        "worker to block server",
        block_link.decode_to_server,
        block_link.ToBlockServer,
        [
            HaveBlocks(1, "0123456789abcdef", 0, [bytes(32), bytes(33)]),
            ReadBlock(2, "0123456789abcdef", 1, bytes(range(32))),
            ReadBlock(3, "0123456789abcdef", 1, bytes(range(33)), 2**20),
        ],
    ),
    Direction(
        "block server to worker",
        block_link.decode_from_server,
        block_link.FromBlockServer,
        [BlocksHad(1, b"\1\0"), BlockContent(2, memoryview(b"content of a file"), 17)],
    ),
]
