"""The runner with a model: packs a step, runs the model over the paged cache, samples."""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from protocol.config import EngineConfig, NativeDecoder
from protocol.core_worker import (
    ModelFacts,
    ModelRunnerOutput,
    PromptLogprobs,
    SchedulerOutput,
    TokenLogprobs,
)
from protocol.process.failpoints import failpoint
from worker_proc.attention.interface import AttentionBackend
from worker_proc.attention.native import NativeBackend, can_attend
from worker_proc.attention.sdpa import Rule, SdpaBackend
from worker_proc.calibration.exactness import Exactness, check_exactness
from worker_proc.calibration.memory import available_cache_bytes
from worker_proc.calibration.self_check import (
    check_forward,
    compute_stepwise,
    num_blocks_needed,
)
from worker_proc.calibration.swap_cost import measure_swap_cost
from worker_proc.cuda.device import prepare_device, resolve_device, uses_triton
from worker_proc.decoder.install import decoding, find_settings, install, uninstall
from worker_proc.decoder.layers import LayerSettings
from worker_proc.decoder.stack import NativeExecutor
from worker_proc.drafting.draft_model import DraftModel, num_spare_blocks
from worker_proc.drafting.repetitions import propose_repetitions
from worker_proc.errors import CheckpointError, InsufficientMemory
from worker_proc.forward import attach_cache, compute_logits
from worker_proc.grammar.compiler import GrammarCompiler, GrammarError, Vocabulary
from worker_proc.grammar.following import follow, grammar_state_of
from worker_proc.grammar.masks import MaskComputer, MaskedRows, RowMasks
from worker_proc.inputs import StepInputs, pack_step
from worker_proc.kv import kv_tensors
from worker_proc.kv.kv_groups import KVLayout, lay_out
from worker_proc.kv.kv_pool import KVPool
from worker_proc.loading.draft import describe_speculation, group_without_window, load_draft
from worker_proc.loading.fused import fuse_modules
from worker_proc.loading.heap import return_freed_memory
from worker_proc.loading.host_limits import available_cpus, available_memory
from worker_proc.loading.layer_executor import LayerExecutor
from worker_proc.loading.loader import LoadedModel, load_model
from worker_proc.loading.packed_linear import PLAIN, can_pack, pack_linears
from worker_proc.loading.prepared import PreparedModel
from worker_proc.loading.proofs import find_proofs, proven
from worker_proc.loading.quantization import FORMATS, check_weights, load_rounding_library
from worker_proc.loading.start_cache import StartCache
from worker_proc.mirror import Mirror, ScheduledRequest
from worker_proc.native.build import start_building
from worker_proc.native.kernels import Format, NativeLibrary, load_library
from worker_proc.runner import ComputedStep, LaunchedStep, ReportProgress
from worker_proc.sampling.pooling import captured_hidden_states, pool
from worker_proc.sampling.sampler import MakeChoice, Sampler
from worker_proc.sampling.verification import count_valid, rows_to_sample

if TYPE_CHECKING:
    from worker_proc.cuda.device_sampler import DeviceSampler, TokenCopy
    from worker_proc.cuda.graphs import DecodeGraphs

_MAX_MASK_THREADS = 8
NOT_FINITE = "the model's logits for this request are not finite"

_log = logging.getLogger(__name__)


class _Sampled(NamedTuple):
    """Tokens that a step sampled; logprobs and errors by request id."""

    token_ids: list[int]
    num_tokens: list[int]  # of each request that sampled; empty: one each
    logprobs: dict[int, list[TokenLogprobs]]
    errors: dict[int, str]


class _Arrival(NamedTuple):
    """When a step arrived; nanoseconds."""

    at_ns: int
    finds_requests: bool
    """A worker without requests has waited for none of them."""


class _StepTimes:
    """Measures steps, each from the end of the one before it if it arrived earlier."""

    def __init__(self) -> None:
        self._ended_ns = time.perf_counter_ns()

    def end(self, arrival: _Arrival) -> tuple[int, int]:
        """End a step now; returns how long it took, and how long the worker waited for it."""
        before, self._ended_ns = self._ended_ns, time.perf_counter_ns()
        wait_ns = max(arrival.at_ns - before, 0) if arrival.finds_requests else 0
        return self._ended_ns - max(arrival.at_ns, before), wait_ns


class _SampledStep:
    """A step whose tokens are sampled on the device, and known to the host later."""

    def __init__(
        self,
        step_id: int,
        parts: Sequence[ScheduledRequest],
        tokens: "TokenCopy",
        end: Callable[[], tuple[int, int]],
    ) -> None:
        """Take the parts that sample, whose requests end in stand-ins of their tokens."""
        self._step_id = step_id
        self._parts = parts
        self._tokens = tokens
        self._end = end
        self._output: ModelRunnerOutput | None = None

    @property
    def is_done(self) -> bool:
        return self._output is not None or self._tokens.is_done

    def finish(self) -> ModelRunnerOutput:
        """Wait for the tokens, and give them to their requests."""
        if self._output is None:
            tokens = self._tokens.read()
            errors = {}
            for place, (part, token_id) in enumerate(zip(self._parts, tokens, strict=True)):
                if token_id < 0:
                    errors[part.request.req_id] = NOT_FINITE
                    tokens[place] = 0
                part.request.token_ids[part.end] = tokens[place]
            forward_ns, wait_ns = self._end()
            self._output = ModelRunnerOutput(
                self._step_id,
                tokens,
                forward_ns=forward_ns,
                request_errors=errors,
                wait_ns=wait_ns,
            )
        return self._output


class ModelRunner:
    """Executes steps with a loaded model and its KV pool.

    On CUDA a step whose tokens are sampled on the device returns from `launch` before it is
    computed, and the next one may be launched then. Any other step waits for the one before it.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        facts: ModelFacts,
        backend: AttentionBackend,
        pool: KVPool,
        swap_cost_tokens: float,
        *,
        num_speculative_tokens: int = 0,
        draft_model: DraftModel | None = None,
        grammars: GrammarCompiler | None = None,
        library: NativeLibrary | None = None,
        device_sampler: "DeviceSampler | None" = None,
        graphs: "DecodeGraphs | None" = None,
    ) -> None:
        """Take a model whose attention modules are attached to `backend` and `pool`."""
        self._model = loaded.model
        self._device = loaded.device
        self.facts = facts
        self.attention = backend.name
        self._backend = backend
        self._pool = pool
        self._sampler = make_sampler(loaded, library, facts)
        self._mirror = Mirror(facts, num_speculative_tokens)
        self.swap_cost_tokens = swap_cost_tokens
        self._is_drafting = num_speculative_tokens > 0
        self._draft_model = draft_model
        self._times = _StepTimes()
        self.grammars = grammars
        self._mask_computer: MaskComputer | None = None
        self._device_sampler = device_sampler
        self._graphs = graphs
        self._launched: _SampledStep | None = None
        """The step before, if its tokens may not be known yet."""

    def reset(self) -> None:
        self._mirror.reset()
        self._launched = None

    def sleep(self) -> None:
        self._mirror.check_empty()
        if self._graphs is not None:  # first: the pool also releases what the allocator caches
            self._graphs.forget()
        self._pool.sleep()
        if self._draft_model is not None:
            self._draft_model.sleep()

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        return self.launch(step).finish()

    @torch.inference_mode()
    def launch(self, step: SchedulerOutput) -> LaunchedStep:
        arrival = _Arrival(time.perf_counter_ns(), bool(self._mirror.requests))
        scheduled = self._mirror.apply(step)
        before, self._launched = self._launched, None
        if not self._runs_ahead(scheduled):
            if before is not None:
                before.finish()
            return ComputedStep(self._compute(step, scheduled, arrival))
        self._pool.swap(step.swap_out, step.swap_in)
        self._pool.wake()
        inputs = pack_step(scheduled, self._device)
        tokens = self._sample_ahead(inputs)
        failpoint("worker.mid_step")
        sampling = inputs.sampling
        self._mirror.advance(scheduled, [~place for place in range(len(sampling))])
        end = partial(self._times.end, arrival)
        self._launched = _SampledStep(step.step_id, sampling, tokens, end)
        return self._launched

    def _runs_ahead(self, scheduled: Sequence[ScheduledRequest]) -> bool:
        """Whether the device alone can compute a step and choose its tokens."""
        if self._device_sampler is None or self._is_drafting or not scheduled:
            return False
        return not any(part.request.needs_host for part in scheduled)

    def _sample_ahead(self, inputs: StepInputs) -> "TokenCopy":
        sampler = self._device_sampler
        assert sampler is not None
        if self._graphs is None or self._graphs.compute(inputs) is None:
            sampler.feed(inputs.input_ids)
            vocab_size = self.facts.vocab_size
            sampler.sample(compute_logits(self._model, self._backend, inputs, vocab_size), inputs)
        return sampler.copy(len(inputs.sampling))

    def _compute(
        self, step: SchedulerOutput, scheduled: list[ScheduledRequest], arrival: _Arrival
    ) -> ModelRunnerOutput:
        """Compute a step whose tokens are needed on the host."""
        if self._draft_model is not None:
            self._draft_model.follow(step)
        self._pool.swap(step.swap_out, step.swap_in)
        if not scheduled:
            return ModelRunnerOutput(step.step_id, [])
        self._pool.wake()
        inputs = pack_step(scheduled, self._device)
        masks = self._begin_masks(inputs) if self._mirror.num_constrained else None
        pooling = self._mirror.pooling
        with captured_hidden_states(self._model if pooling else None) as hidden:
            logits = self._compute_logits(inputs)
        failpoint("worker.mid_step")
        row_masks = None if masks is None else masks.result()
        token_ids, num_tokens, logprobs, errors = self._sample(inputs, logits, row_masks)
        pooled: dict[int, bytes] = {}
        if pooling:
            pooled, not_finite = pool(scheduled, inputs.first_rows, pooling, hidden.rows)
            errors |= dict.fromkeys(not_finite, NOT_FINITE)
        prompt_logprobs = self._prompt_logprobs(inputs, logits)
        self._mirror.advance(scheduled, token_ids, num_tokens)
        if masks is not None:
            errors |= follow(scheduled)
        sampled_ns = time.perf_counter_ns()
        drafts = self._draft(scheduled) if self._is_drafting else []
        draft_ns = time.perf_counter_ns() - sampled_ns if self._is_drafting else 0
        forward_ns, wait_ns = self._times.end(arrival)
        return ModelRunnerOutput(
            step.step_id,
            token_ids,
            num_tokens,
            drafts,
            logprobs,
            prompt_logprobs,
            forward_ns,
            errors,
            pooled,
            draft_ns,
            wait_ns,
        )

    def _compute_logits(self, inputs: StepInputs) -> torch.Tensor:
        if self._graphs is not None and not self._mirror.pooling:
            logits = self._graphs.compute(inputs)
            if logits is not None:
                return logits
        return compute_logits(self._model, self._backend, inputs, self.facts.vocab_size)

    def _begin_masks(self, inputs: StepInputs) -> Future[RowMasks] | None:
        """Start to compute the masks of the rows that `_sample` makes, beside the model."""
        requests = []
        row = 0
        for part in inputs.sampling:
            request, num_drafts = part.request, part.num_drafts
            if request.sampling_params.grammar is not None:
                state = grammar_state_of(request, self.grammars)
                drafts = request.draft_token_ids[:num_drafts]
                requests.append(MaskedRows(row, state, drafts))
            row += 1 + num_drafts
        if not requests:
            return None
        if self._mask_computer is None:
            assert self.grammars is not None
            num_threads = min(_MAX_MASK_THREADS, available_cpus())
            self._mask_computer = MaskComputer(
                num_threads, self.grammars.num_tokens, self.facts.vocab_size
            )
        return self._mask_computer.begin(requests)

    def _sample(self, inputs: StepInputs, logits: torch.Tensor, masks: RowMasks | None) -> _Sampled:
        if not inputs.sampling:
            return _Sampled([], [], {}, {})
        rows = rows_to_sample(inputs.sampling)
        sampled = self._sampler.sample(logits[: len(rows)], rows, masks)
        token_ids, counts = sampled.token_ids, list[int]()
        valid: Sequence[int] = range(len(rows))
        if len(rows) != len(inputs.sampling):
            counts, valid = count_valid(inputs.sampling, token_ids)
            token_ids = [token_ids[row] for row in valid]
        logprobs: dict[int, list[TokenLogprobs]] = {}
        for row in valid:
            if (entry := sampled.logprobs[row]) is not None:
                logprobs.setdefault(rows[row].req_id, []).append(entry)
        lost = set(sampled.not_finite).intersection(valid)
        return _Sampled(token_ids, counts, logprobs, {rows[row].req_id: NOT_FINITE for row in lost})

    def _draft(self, scheduled: list[ScheduledRequest]) -> list[int]:
        """Make drafts for each request that sampled; returns their numbers, or [] if all are 0."""
        if self._draft_model is not None:
            self._draft_model.propose(scheduled)
        else:
            propose_repetitions(scheduled)
        counts = []
        for part in scheduled:
            if part.samples:
                request = part.request
                if request.grammar_state is not None and request.draft_limit:
                    proposed = request.draft_token_ids
                    drafts = request.grammar_state.drafts(request.draft_limit, proposed)
                    request.draft_token_ids = drafts
                counts.append(len(request.draft_token_ids))
        return counts if any(counts) else []

    def _prompt_logprobs(self, inputs: StepInputs, logits: torch.Tensor) -> list[PromptLogprobs]:
        found = []
        for part, first_row, num_rows in inputs.prompt_rows:
            num_top = part.request.sampling_params.prompt_logprobs
            assert num_top is not None
            first = part.start + 1
            entries = self._sampler.prompt_logprobs(
                logits[first_row : first_row + num_rows],
                part.request.token_ids[first : first + num_rows],
                num_top,
            )
            found.append(PromptLogprobs(part.request.req_id, first, entries))
        return found


class Calibration(NamedTuple):
    """What computing a few texts has shown. It holds for as many threads as it was taken with."""

    exactness: Exactness
    swap_cost_tokens: float
    embedding_size: int = 0
    decoder: tuple[LayerSettings, ...] = ()
    """For each layer, as the native decoder computes it; empty: the modules compute them."""
    draft_decoder: tuple[LayerSettings, ...] = ()
    """The same for the draft model."""


def load_model_runner(
    config: EngineConfig, progress: ReportProgress, *, keeps_proofs: bool = False
) -> ModelRunner:
    """Load the configured checkpoint and size its KV cache; see worker_proc/errors.py.

    With `keeps_proofs`, what is proven here is not proven again at the next start.
    """
    torch.set_num_threads(config.worker.num_threads or available_cpus())
    prepared = prepare_model(config, progress, keeps_proofs=keeps_proofs)
    return build_runner(prepared, config, calibrate(prepared, config, progress), progress)


def prepare_model(
    config: EngineConfig, progress: ReportProgress, *, keeps_proofs: bool = False
) -> PreparedModel:
    """Load the configured checkpoints, and round, fuse and pack their modules as configured."""
    device = resolve_device(config.model.device)
    quantization, library = config.model.quantization, None
    kept = find_proofs(config) if keeps_proofs and device.type == "cpu" else None
    prepare_device(device)
    if quantization is not None:
        progress("compile_kernels", 0, 0)
        library = load_rounding_library(quantization, device)
    elif device.type == "cpu":
        start_building()
    proofs = None if kept is None else kept.without_kernels()
    loaded = load_model(config.model.model, config.model.dtype, device, progress, proofs)
    wanted_len = config.model.max_model_len
    if wanted_len is not None and wanted_len > loaded.model_len:
        raise CheckpointError(
            f"max_model_len {wanted_len} is greater than the {loaded.model_len} tokens"
            f" that {config.model.model} can compute"
        )
    draft = load_draft(config.model, loaded, progress)
    if library is None and device.type == "cpu":
        library = load_library()
    proofs = None if kept is None else kept.with_kernels(library)
    if quantization is not None and library is not None:
        check_weights(loaded, quantization, partial(progress, "check_weights"))
    roles = [("fused", loaded, FORMATS[quantization])]
    if draft is not None:
        roles.append(("fused_draft", draft, PLAIN))  # it is never rounded
    for role, one, formats in roles:
        if can_pack(one.dtype, device):
            progress("pack_weights", 0, 1)
            if library is not None:
                on_tried = partial(progress, "fuse_modules")
                _fuse(one, library, proofs, role, format=formats.layers, on_tried=on_tried)
            pack_linears(one.model, library, partial(progress, "pack_weights"), formats)
    return_freed_memory()
    vocabulary = Vocabulary(loaded.vocab_size, list(loaded.eos_token_ids), config.model.model)
    executor = _make_executor(loaded, draft, library)
    return PreparedModel(loaded, library, load_grammars(vocabulary), executor, proofs, draft)


def _make_executor(
    loaded: LoadedModel, draft: LoadedModel | None, library: NativeLibrary | None
) -> LayerExecutor | None:
    """Return what computes layers in place of their modules; on CUDA the models change for it."""
    if library is not None:
        return NativeExecutor(library)
    if not uses_triton(loaded.device):
        return None
    from worker_proc.cuda.stack import TritonExecutor, install_kernels

    executor = TritonExecutor()
    for one in filter(None, (loaded, draft)):
        install_kernels(one, executor)
    return executor


def _fuse(
    loaded: LoadedModel,
    library: NativeLibrary,
    proofs: StartCache | None,
    name: str,
    *,
    format: Format,
    on_tried: Callable[[int, int], None],
) -> None:
    """Fuse modules, and keep which ones under a name."""
    known = None if proofs is None else proofs.get(name, dict[str, int])
    fused = fuse_modules(
        loaded.model, library, loaded.dtype, known, format=format, on_tried=on_tried
    )
    if proofs is not None and known is None:
        proofs.put(name, fused)


def load_grammars(vocabulary: Vocabulary) -> GrammarCompiler:
    """Return a compiler of grammars with its tokens loaded; what it lacks is logged."""
    grammars = GrammarCompiler(vocabulary)
    try:
        grammars.load()
    except GrammarError as error:
        _log.info("requests with a grammar will be refused: %s", error)
    return grammars


def calibrate(
    prepared: PreparedModel, config: EngineConfig, progress: ReportProgress
) -> Calibration:
    """Check a loaded model with the threads that are set; its pool is undefined afterwards."""
    progress("check_model", 0, 1)
    if config.cache.swap_space_bytes:  # a copy's cost is measured at each start
        return _calibrate(prepared, config)
    name = f"calibration-{torch.get_num_threads()}"
    return proven(prepared.proofs, name, Calibration, lambda: _calibrate(prepared, config))


def _calibrate(prepared: PreparedModel, config: EngineConfig) -> Calibration:
    loaded = prepared.loaded
    layout = make_layout(loaded, config)
    backend = make_backend(loaded, layout, prepared.kernels)
    attach_cache(loaded, backend, layout, num_blocks_needed(layout))
    uninstall(prepared)  # a fork of a process that has made a runner begins with the modules
    with captured_hidden_states(loaded.model) as hidden:
        stepwise = check_forward(loaded, backend, layout)
    settings: list[LayerSettings] = []
    if config.worker.native_decoder is NativeDecoder.AUTO:
        settings = find_settings(prepared, backend, layout, stepwise)
    with decoding(prepared, settings):
        if settings:
            stepwise = compute_stepwise(loaded, backend, layout)
        exactness = check_exactness(loaded, backend, layout, stepwise)
        can_swap = config.cache.swap_space_bytes >= _block_bytes(loaded, layout)
        cost = measure_swap_cost(loaded, backend, layout) if can_swap else 0.0
    draft_settings = calibrate_draft(prepared, config)
    return Calibration(exactness, cost, hidden.size, tuple(settings), tuple(draft_settings))


def calibrate_draft(prepared: PreparedModel, config: EngineConfig) -> list[LayerSettings]:
    """Check the draft model, if there is one; returns how the native decoder computes it."""
    if prepared.draft is None:
        return []
    own = prepared.of_draft(prepared.draft)
    layout = make_draft_layout(own.loaded, config)
    backend = make_backend(own.loaded, layout, own.kernels)
    attach_cache(own.loaded, backend, layout, num_blocks_needed(layout))
    uninstall(own)
    stepwise = check_forward(own.loaded, backend, layout)
    if config.worker.native_decoder is not NativeDecoder.AUTO:
        return []
    return find_settings(own, backend, layout, stepwise)


def build_runner(
    prepared: PreparedModel,
    config: EngineConfig,
    calibration: Calibration,
    progress: ReportProgress,
) -> ModelRunner:
    """Size and allocate the KV cache of a loaded and checked model, and connect the two."""
    loaded, exactness = prepared.loaded, calibration.exactness
    progress("allocate_cache", 0, 1)
    layout = make_layout(loaded, config)
    backend = make_backend(loaded, layout, prepared.kernels)
    block_bytes = _block_bytes(loaded, layout)
    sampler = make_sampler(loaded, prepared.kernels)
    available_bytes = available_cache_bytes(loaded, backend, layout, sampler, config)
    draft_block_bytes = 0
    if prepared.draft is not None:
        draft_layout = make_draft_layout(prepared.draft, config)
        draft_block_bytes = _block_bytes(prepared.draft, draft_layout)
        draft_backend = make_backend(prepared.draft, draft_layout, prepared.kernels)
        draft_bytes = available_cache_bytes(
            prepared.draft,
            draft_backend,
            draft_layout,
            make_sampler(prepared.draft, prepared.kernels),
            config,
        )
        available_bytes = min(available_bytes, draft_bytes)
        available_bytes -= num_all_spare_blocks(config) * draft_block_bytes
    size = kv_tensors.size_cache(
        available_bytes=available_bytes,
        block_bytes=block_bytes + draft_block_bytes,
        layout=layout,
        model_len=loaded.model_len,
        max_model_len=config.model.max_model_len,
        num_blocks_override=config.cache.num_gpu_blocks_override,
    )
    if config.model.max_model_len is None and size.max_model_len < loaded.model_len:
        _log.warning(
            "max_model_len is %d instead of the model's %d: the KV cache holds no more",
            size.max_model_len,
            loaded.model_len,
        )
    num_host_blocks = count_host_blocks(config.cache.swap_space_bytes, block_bytes)
    facts = ModelFacts(
        model=config.model.model,
        vocab_size=loaded.vocab_size,
        max_model_len=size.max_model_len,
        block_size=layout.block_size,
        num_gpu_blocks=size.num_blocks,
        eos_token_ids=loaded.eos_token_ids,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=loaded.device.type,
        kv_groups=layout.kv_groups(),
        num_host_blocks=num_host_blocks,
        exact_resume=exactness.holds,
        exact_resume_reason=exactness.reason,
        embedding_size=calibration.embedding_size,
        decoder=prepared.executor.name if prepared.executor and calibration.decoder else "modules",
        speculation=describe_speculation(config),
        quantization=config.model.quantization or "",
    )
    pool = attach_cache(loaded, backend, layout, facts.num_gpu_blocks, facts.num_host_blocks)
    install(prepared, calibration.decoder)
    device_sampler = make_device_sampler(loaded, backend, config)
    graphs = make_graphs(loaded, backend, device_sampler, facts, config)
    progress("allocate_cache", 1, 1)
    return ModelRunner(
        loaded,
        facts,
        backend,
        pool,
        calibration.swap_cost_tokens,
        num_speculative_tokens=config.scheduler.num_speculative_tokens,
        draft_model=build_draft_model(prepared, config, calibration, facts),
        grammars=prepared.grammars,
        library=prepared.kernels,
        device_sampler=device_sampler,
        graphs=graphs,
    )


def make_sampler(
    loaded: LoadedModel, library: NativeLibrary | None, like: ModelFacts | None = None
) -> Sampler:
    """Return what samples a model's logits on its device; `like` may have other tokens."""
    tokens = loaded if like is None else like
    make_choice: MakeChoice | None = None
    if uses_triton(loaded.device):
        from worker_proc.cuda.choice import TritonChoice

        make_choice = TritonChoice
    return Sampler(tokens.vocab_size, tokens.eos_token_ids, loaded.device, library, make_choice)


def make_device_sampler(
    loaded: LoadedModel, backend: AttentionBackend, config: EngineConfig
) -> "DeviceSampler | None":
    """Return what samples without the host, where Triton attends; None: the host takes part."""
    if not uses_triton(loaded.device):
        return None
    from worker_proc.cuda.backend import TritonBackend
    from worker_proc.cuda.device_sampler import DeviceSampler
    from worker_proc.cuda.graphs import MAX_SIZE

    if not isinstance(backend, TritonBackend):
        return None
    max_num_rows = max(config.scheduler.max_num_seqs, MAX_SIZE)
    return DeviceSampler(backend, loaded.vocab_size, max_num_rows)


def make_graphs(
    loaded: LoadedModel,
    backend: AttentionBackend,
    sampler: "DeviceSampler | None",
    facts: ModelFacts,
    config: EngineConfig,
) -> "DecodeGraphs | None":
    """Return the captured decodes, where Triton attends; None: every step is launched anew."""
    if sampler is None or config.worker.enforce_eager:
        return None
    from worker_proc.cuda.backend import TritonBackend
    from worker_proc.cuda.graphs import DecodeGraphs

    assert isinstance(backend, TritonBackend)
    graphs = DecodeGraphs(
        loaded.model,
        backend,
        sampler,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=facts.max_model_len,
        block_size=facts.block_size,
        vocab_size=facts.vocab_size,
    )
    graphs.capture()
    return graphs


def build_draft_model(
    prepared: PreparedModel, config: EngineConfig, calibration: Calibration, facts: ModelFacts
) -> DraftModel | None:
    """Allocate the draft model's KV cache, for the blocks of the model and some spare ones."""
    if prepared.draft is None:
        return None
    own = prepared.of_draft(prepared.draft)
    loaded = own.loaded
    layout = make_draft_layout(loaded, config)
    backend = make_backend(loaded, layout, own.kernels)
    num_blocks = facts.num_gpu_blocks + num_all_spare_blocks(config)
    pool = attach_cache(loaded, backend, layout, num_blocks)
    install(own, calibration.draft_decoder)
    return DraftModel(
        loaded,
        backend,
        pool,
        make_sampler(loaded, own.kernels, facts),
        facts,
        group=group_without_window(facts.kv_groups),
        num_spare=num_all_spare_blocks(config) // config.scheduler.max_num_seqs,
        max_tokens=config.scheduler.max_num_batched_tokens,
    )


def num_all_spare_blocks(config: EngineConfig) -> int:
    """Return the draft model's blocks beyond those of the model, for all requests."""
    scheduler = config.scheduler
    per_request = num_spare_blocks(config.cache.block_size, scheduler.num_speculative_tokens)
    return scheduler.max_num_seqs * per_request


def _block_bytes(loaded: LoadedModel, layout: KVLayout) -> int:
    specs = [loaded.layers[index].spec for index in layout.tensor_layers]
    return kv_tensors.bytes_per_block(specs, layout.block_size, loaded.dtype)


def count_host_blocks(swap_space_bytes: int, block_bytes: int) -> int:
    """Return the number of blocks that the swap space holds; it must fit in free memory."""
    free = available_memory()
    if swap_space_bytes > free:
        raise InsufficientMemory(
            f"swap_space_bytes {swap_space_bytes} is more than the {free} bytes of free memory"
        )
    return swap_space_bytes // block_bytes


def make_layout(loaded: LoadedModel, config: EngineConfig) -> KVLayout:
    """Group the layers that share block tables."""
    return _lay_out(loaded, config, hybrid=config.cache.enable_hybrid_kv_cache)


def make_draft_layout(draft: LoadedModel, config: EngineConfig) -> KVLayout:
    """Put all layers in one group, which follows the tables of one group of the model."""
    return _lay_out(draft, config, hybrid=False)


def _lay_out(loaded: LoadedModel, config: EngineConfig, *, hybrid: bool) -> KVLayout:
    return lay_out(
        [layer.spec for layer in loaded.layers],
        config.cache.block_size,
        config.scheduler.max_num_batched_tokens,
        config.model.max_model_len or loaded.model_len,
        hybrid,
    )


def make_backend(
    loaded: LoadedModel, layout: KVLayout, library: NativeLibrary | None
) -> AttentionBackend:
    """Return the backend whose kernels cover the layers, else the portable one."""
    specs = [layer.spec for layer in loaded.layers]
    if library is not None and can_attend(specs, loaded.dtype, loaded.device):
        windows = [group.window for group in layout.groups]
        return NativeBackend(library, layout.block_size, loaded.dtype, specs, windows)
    if uses_triton(loaded.device):
        from worker_proc.cuda.backend import TritonBackend, can_attend_by_triton

        if can_attend_by_triton(specs):
            return TritonBackend(specs, len(layout.groups), layout.block_size, loaded.device)
    rules = {
        Rule(number, specs[index].window)
        for number, group in enumerate(layout.groups)
        for index in group.layers
    }
    return SdpaBackend(rules, layout.block_size, loaded.dtype, loaded.device)
