"""The worker process: `python -m worker_proc --run-dir DIR`, or started by a supervisor."""

import sys
from collections.abc import Callable

from protocol.config import EngineConfig
from protocol.core_worker import ModelFacts
from protocol.lifecycle import Role
from protocol.process import ChildProcess
from worker_proc.loop import WorkerLoop
from worker_proc.runner import Runner

NULL_VOCAB_SIZE = 32_000
NULL_MAX_MODEL_LEN = 8192
NULL_NUM_BLOCKS = 8192
NULL_EOS_TOKEN_ID = 2
NULL_BLOCK_BYTES = 65_536
"""What a block of the null runner counts against `swap_space_bytes`."""


def main() -> None:
    """Load, then compute until told to stop."""
    child = ChildProcess.from_argv("worker_proc", Role.WORKER, sys.argv[1:])
    try:
        runner = make_runner(child.config, child.progress)
    except ValueError as error:
        child.fatal("loading the model", error, retry=False)
    except Exception as error:
        child.fatal("loading the model", error)
    loop = WorkerLoop(child, runner)
    child.ready(", ".join(filter(None, (runner.facts.device, runner.facts.dtype))))
    try:
        loop.run()
    except Exception as error:
        child.fatal("computing", error)


def make_runner(config: EngineConfig, progress: Callable[[str, int, int], None]) -> Runner:
    """Load what `config` names. The null runner never imports torch.

    Raises:
        ValueError: settings or checkpoint cannot be used; another try would fail in the same way.
    """
    if config.model.model == "null":
        from worker_proc.null_runner import NullRunner

        return NullRunner(null_facts(config), config.worker.null_step_ms / 1000)
    progress("import", 0, 0)
    from worker_proc.model_runner import load_model_runner

    return load_model_runner(config, progress)


def null_facts(config: EngineConfig) -> ModelFacts:
    """What the null runner pretends to have loaded."""
    return ModelFacts(
        model="null",
        vocab_size=NULL_VOCAB_SIZE,
        max_model_len=config.model.max_model_len or NULL_MAX_MODEL_LEN,
        block_size=config.cache.block_size,
        num_gpu_blocks=config.cache.num_gpu_blocks_override or NULL_NUM_BLOCKS,
        eos_token_ids=[NULL_EOS_TOKEN_ID],
        dtype="",
        device="",
        num_host_blocks=config.cache.swap_space_bytes // NULL_BLOCK_BYTES,
    )


if __name__ == "__main__":
    main()
