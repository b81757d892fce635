"""Starts a worker: loads the model, reports to the supervisor, waits for promotion, computes.

A worker that is started by command loads everything itself. One that is forked from a zygote
(worker_proc/startup/zygote.py) shares the weights that were loaded there.
"""

import os
import time

import zmq

from protocol.adapters import Adapter, AdapterError, read_adapter
from protocol.config import EngineConfig
from protocol.model_facts import KVGroup, ModelFacts
from protocol.process import gc_tuning
from protocol.process.child_runtime import ChildProcess
from protocol.process.failpoints import failpoint
from worker_proc.adapters.kept import KeptAdapters
from worker_proc.calibration.warm_up import warm_up
from worker_proc.grammar.compiler import GrammarCompiler
from worker_proc.grammar.vocabulary import Vocabulary
from worker_proc.loop import WorkerLoop
from worker_proc.offload.memory import NoMemory
from worker_proc.offload.open import make_service
from worker_proc.runner import ReportProgress, Runner, RunnerFactory
from worker_proc.startup.announcement import announcement
from worker_proc.startup.early_refusals import refuse_early
from worker_proc.startup.lean_import import lean_imports

NULL_VOCAB_SIZE = 32_000
NULL_MAX_MODEL_LEN = 8192
NULL_NUM_BLOCKS = 8192
NULL_EOS_TOKEN_ID = 2
NULL_EMBEDDING_SIZE = 16
NULL_BLOCK_BYTES = 65_536  # the unit of swap_space_bytes in the null runner
_NULL_NUM_SLOTS = 256
_SPIN_COUNT = "2000"  # about 0.1 ms


def make_runner(config: EngineConfig, progress: ReportProgress, rank: int = 0) -> Runner:
    """Load the configured model, or a rank's part of it; the null runner never imports torch.

    Raises ValueError if the settings or the checkpoint cannot be used; trying again does not help.
    """
    if config.model.model == "null":
        return _null_runner(config)
    refuse_early(config)
    _let_threads_sleep()
    progress("import", 0, 0)
    with lean_imports():
        from worker_proc.startup.load_runner import load_model_runner

    return load_model_runner(config, progress, keeps_proofs=True, rank=rank)


def load_to_fork(config: EngineConfig, progress: ReportProgress, rank: int = 0) -> RunnerFactory:
    """Load the data that a rank's workers share, without threads or device.

    Returns the function that makes a fork's runner.
    """
    if config.model.model == "null":
        return lambda _: _null_runner(config)
    refuse_early(config)
    _let_threads_sleep()
    # Set before the libraries are loaded: they would start threads, which a fork does not copy.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    progress("import", 0, 0)
    with lean_imports():
        from worker_proc.startup.shared_model import load_shared_model

    return load_shared_model(config, progress, rank)


def _let_threads_sleep() -> None:
    """Make OpenMP's threads sleep after a short wait, unless the environment sets this.

    By default they spin for milliseconds, on the processor that the awaited thread, or the API,
    needs. Waits between the kernels of a step are shorter, and waking a thread takes longer than
    them. OpenMP reads this variable when it is loaded.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)


def work(child: ChildProcess, make: RunnerFactory, *, is_standby: bool = False) -> None:
    """Make the runner and compute until Stop arrives; a standby first waits for its promotion."""
    failpoint("worker.load")
    try:
        runner = make(child.progress)
        is_alone = child.config.parallel.num_ranks == 1
        if is_standby and is_alone and child.config.model.model != "null":
            warm_up(runner)
    except ValueError as error:
        child.fatal("loading the model", error, retry=False)
    except Exception as error:
        child.fatal("loading the model", error)
    failpoint("worker.after_load")
    facts = runner.facts
    detail = ", ".join(filter(None, (facts.device, facts.dtype)))
    # On the CPU, a successor must keep these numbers, whatever memory is free then. On a device it
    # may have to take less.
    keeps_numbers = facts.device == "cpu"
    num_blocks = facts.num_gpu_blocks if keeps_numbers else 0
    num_state_blocks = facts.num_state_blocks if keeps_numbers else 0
    gc_tuning.freeze()  # at this point it counts as loading
    if is_standby:
        child.ready(detail)
        if not child.wait_for_promotion():
            return
    child.restart_on_sigterm()
    offload = make_service(
        child.config,
        facts.kv_layout,
        child.rank,
        runner.block_memory,
        states=runner.state_memory,
        drafts=runner.draft_blocks,
    )
    loop = WorkerLoop(child, runner, clock=time, poller=zmq.Poller(), offload=offload)
    lines = list(announcement(facts, runner.attention))
    child.ready(detail, num_blocks, lines, num_state_blocks)
    try:
        loop.run()
    except Exception as error:
        child.fatal("computing", error)
    child.leave()


def null_facts(config: EngineConfig) -> ModelFacts:
    """Return the facts that the null runner announces."""
    num_state_blocks = config.worker.null_state_blocks
    num_host_blocks = config.cache.swap_space_bytes // NULL_BLOCK_BYTES
    return ModelFacts(
        model="null",
        vocab_size=NULL_VOCAB_SIZE,
        max_model_len=config.model.max_model_len or NULL_MAX_MODEL_LEN,
        block_size=config.cache.block_size,
        num_gpu_blocks=config.cache.num_gpu_blocks_override or NULL_NUM_BLOCKS,
        eos_token_ids=[NULL_EOS_TOKEN_ID],
        dtype="",
        device="",
        num_host_blocks=num_host_blocks,
        kv_groups=[KVGroup(), KVGroup(is_state=True)] if num_state_blocks else [KVGroup()],
        num_state_blocks=num_state_blocks + 1 if num_state_blocks else 0,
        exact_resume=True,
        embedding_size=NULL_EMBEDDING_SIZE,
        speculation=(
            f"some right and some wrong guesses, at most {max_drafts} tokens"
            if (max_drafts := config.scheduler.num_speculative_tokens)
            else ""
        ),
        num_host_state_blocks=num_host_blocks if num_state_blocks else 0,
        state_swap_blocks=1.0 if num_state_blocks else 0.0,
        kv_layout="null" if config.cache.keeps_blocks else "",
        weights="null",
    )


def _null_runner(config: EngineConfig) -> Runner:
    from worker_proc.null.runner import NullRunner, NullTimes

    facts, lora = null_facts(config), config.lora
    return NullRunner(
        facts,
        NullTimes(config.worker.null_step_ms / 1000, config.worker.null_token_ms / 1000),
        num_speculative_tokens=config.scheduler.num_speculative_tokens,
        grammars=GrammarCompiler(Vocabulary(facts.eos_token_ids)),
        adapters=KeptAdapters(_check_digest, lora.num_kept) if lora.enable_lora else None,
        block_memory=NoMemory(_NULL_NUM_SLOTS) if facts.kv_layout else None,
    )


def _check_digest(adapter: Adapter) -> Adapter:
    """Read an adapter's files; raise AdapterError if they do not match its digest."""
    found, _ = read_adapter(adapter.name, adapter.path)
    if found != adapter:
        raise AdapterError(f"{adapter.path} has changed since it was loaded")
    return adapter
