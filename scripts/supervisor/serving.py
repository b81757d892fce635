"""One life of an engine: its run directory, its model, its processes, and the files to remove."""

import logging
import os
import re
import socket
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Self

import msgspec

from api_proc.http.listener import close_listener
from api_proc.peers.directory import remove_all
from protocol.config import ConfigError, EngineConfig, ModelConfig
from protocol.lifecycle import Role
from protocol.process.machines import with_kv_listen
from protocol.process.prctl import set_subreaper
from protocol.stores.tiers import hold_memory
from scripts.gguf.locks import hold_directories
from scripts.hub.messages import gguf_files, hub_names
from scripts.supervisor.checks import prepared
from scripts.supervisor.fetching import Interrupted, ModelFetch
from scripts.supervisor.host_agents import HostAgents
from scripts.supervisor.invocation import Invocation
from scripts.supervisor.loop import Supervisor
from scripts.supervisor.roles import num_ranks
from scripts.supervisor.run_dirs import RunDir, RunDirBusyError, wait_for_epoch_by_clock
from scripts.supervisor.startup import open_listener
from scripts.supervisor.system import System


def open_run_dir(path: str | None, *, is_temporary: bool = False) -> RunDir:
    """Take a run directory (see `RunDir`); ConfigError: it cannot be used."""
    try:
        return RunDir(path, is_temporary=is_temporary)
    except FileExistsError as error:
        raise ConfigError(f"`run_dir` {path} is a file, not a directory") from error
    except OSError as error:
        what = f"`run_dir` {path} cannot be used"
        if path is None:
            what = "no temporary run directory can be made; name one with --run-dir"
        raise ConfigError(f"{what}: {error.strerror}") from error
    except (ValueError, RunDirBusyError) as error:
        raise ConfigError(re.sub("^run_dir(?= )", "`run_dir`", str(error))) from error


def serve(
    config: EngineConfig,
    invocation: Invocation,
    *,
    run_dir: RunDir | None = None,
    is_temporary: bool = False,
    epoch: int = 0,
) -> tuple[int, str | None]:
    """Run an engine; returns the exit status, and the reason if the engine gave up.

    Args:
        config: the configuration as given; names of models are resolved here.
        run_dir: the run directory, if the caller has one already; it is closed at the end.
        is_temporary: whether the run directory is removed at the end.
        epoch: greater than those of all processes before, in the same run directory.

    Raises:
        ConfigError, ValueError: the engine cannot be started.
    """
    asked, config = config, prepared(config, has_api=invocation.has_api)
    is_whole = config.run.replica is None  # the engine of a replica has decided on the rest
    if run_dir is None:
        run_dir = open_run_dir(config.run.run_dir, is_temporary=is_temporary)
    is_abandoned = False
    with ExitStack() as left_behind:
        held = left_behind.enter_context(_HeldFiles())
        left_behind.callback(lambda: run_dir.close(is_abandoned=is_abandoned))
        left_behind.callback(_remove_sockets, run_dir)
        config = _in_run_dir(config, run_dir, epoch)
        agents = listener = None
        if is_whole and config.parallel.agents_listen is not None:
            agents = left_behind.enter_context(closing(HostAgents(asked, run_dir.path)))
        try:
            config = _with_files(config, invocation, held)
        except Interrupted as interrupted:
            is_abandoned = interrupted.is_orphaned
            return 0, None
        if is_whole:
            config = _of_whole_engine(config, run_dir, held)
        if invocation.has_api:
            listener = open_listener(config.api)
            left_behind.callback(close_listener, listener)
        supervisor = _supervisor(config, run_dir, invocation, listener, agents)
        if is_whole:
            run_dir.register()
        status = supervisor.run()
        is_abandoned = supervisor.was_orphaned
        return status, supervisor.policy.failure


def _in_run_dir(config: EngineConfig, run_dir: RunDir, epoch: int) -> EngineConfig:
    """Return the configuration with the run directory, which is made ready for a new engine."""
    remove_all(run_dir.path)
    run_dir.raise_epoch(epoch)
    if config.parallel.core_listen is not None:
        run_dir.raise_epoch(wait_for_epoch_by_clock())
    run = msgspec.structs.replace(config.run, run_dir=run_dir.path)
    return msgspec.structs.replace(config, run=run)


def _remove_sockets(run_dir: RunDir) -> None:
    """Remove the files of the API processes, unless another engine has the directory now."""
    if not run_dir.is_lost:
        remove_all(run_dir.path)


def _with_files(config: EngineConfig, invocation: Invocation, held: "_HeldFiles") -> EngineConfig:
    """Fetch models of the hub, and make the directories of GGUF files, if there are any.

    ConfigError: a model or the HTTP address cannot be used. Interrupted: the engine is stopped.
    """
    if not hub_names(config.model) and not gguf_files(config.model):
        return config
    has_api = invocation.has_api
    if has_api:  # a wrong address is reported before hours of waiting
        close_listener(open_listener(config.api))
    fetch = ModelFetch(config, invocation.console, has_api=has_api, has_bars=invocation.has_bars)
    config = fetch.run(invocation.signal_fd, invocation.parent_fd)
    held.add_model(config.model)
    return config


def _of_whole_engine(config: EngineConfig, run_dir: RunDir, held: "_HeldFiles") -> EngineConfig:
    """Make the decisions for an engine and all its replicas; return the configuration with them.

    ValueError: files of the model exclude it, or the ranks cannot divide it.
    """
    if config.model.model != "null":
        _refuse_model(config)
    config = with_kv_listen(config)  # a free port may be taken while the model is fetched
    if config.cache.kv_offload_bytes:
        held.add_memory(run_dir.path)
    return config


def _refuse_model(config: EngineConfig) -> None:
    """Raise ValueError for what the model's files exclude, before any process is started.

    Workers make the same checks, since the files may change, or be those of another machine. They
    also report any other error of a check.
    """
    from worker_proc.startup.early_refusals import refuse_early, refuse_ranks

    if config.parallel.data_parallel_size > 0:
        try:
            refuse_early(config)
        except ValueError:
            raise
        except Exception:
            logging.getLogger("troika.supervisor").debug("the model is not checked", exc_info=True)
    if config.parallel.tensor_parallel_size > 1:
        refuse_ranks(config.model, config.parallel.tensor_parallel_size)


def _supervisor(
    config: EngineConfig,
    run_dir: RunDir,
    invocation: Invocation,
    listener: socket.socket | None,
    agents: HostAgents | None,
) -> Supervisor:
    set_subreaper(Role.ZYGOTE in num_ranks(config, has_api=listener is not None))
    return Supervisor(
        config, run_dir, invocation, listener=listener, system=System(), agents=agents
    )


class _HeldFiles:
    """Locks on files that the engine uses and other processes would remove; held within `with`."""

    def __init__(self) -> None:
        self._fds: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._fds:
            os.close(fd)

    def add_model(self, model: ModelConfig) -> None:
        """Hold the directories that were made from GGUF files of a model and of its draft model."""
        used = (model.model, model.speculative_model)
        self._fds += hold_directories(Path(name) for name in used if name is not None)

    def add_memory(self, run_dir: str) -> None:
        """Hold the KV blocks in memory, which an engine and its replicas share."""
        if (fd := hold_memory(run_dir)) is not None:
            self._fds.append(fd)
