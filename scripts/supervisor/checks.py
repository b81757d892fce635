"""Completes the configuration of an engine, and checks that this machine can serve it."""

import errno
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from protocol.adapters import AdapterError, open_weights, read_config_bytes
from protocol.config import ConfigError, EngineConfig, ModelConfig, validate_api_port
from protocol.config.choices import AttentionName, Device
from protocol.config.gpu_defaults import GPU_NODES, computes_on_gpu
from protocol.config.lora_modules import parse_lora_module
from protocol.process.machines import check_links
from scripts.supervisor.gpus import divide_gpus
from scripts.supervisor.model_names import resolve


def prepared(config: EngineConfig, *, has_api: bool) -> EngineConfig:
    """Complete the configuration, check it on this machine, and show a replica only its own GPUs.

    ConfigError or ValueError: it cannot be served here.
    """
    config = complete_config(config)
    check_directories(config, has_api=has_api)
    if has_api:
        validate_api_port(config)
        check_chats(config.model)
        check_tokenizer(config.model)
        check_adapters(config)
    check_device(config)
    divide_gpus(config, os.environ)
    check_links(config)
    return config


def complete_config(config: EngineConfig) -> EngineConfig:
    """Resolve names of local models, and the number of standbys; ConfigError: no such model.

    With `ray`, no replica is on this machine. Models of the hub keep their names, as in
    `scripts.hub.messages.hub_names`.
    """
    model, parallel = config.model, config.parallel
    recovery = msgspec.structs.replace(config.recovery, standby_workers=num_standby_workers(config))
    if config.placement.ray is not None:  # all engines are in the cluster
        parallel = msgspec.structs.replace(parallel, data_parallel_size=0)
    config = msgspec.structs.replace(config, recovery=recovery, parallel=parallel)
    if model.model == "null":
        return config
    if model.tokenizer is not None and not (Path(model.tokenizer) / "tokenizer.json").is_file():
        raise ConfigError(f"`tokenizer` {model.tokenizer} is not a directory with a tokenizer.json")
    if model.chat_template is not None and not Path(model.chat_template).is_file():
        raise ConfigError(f"`chat_template` {model.chat_template} is not a file")
    return msgspec.structs.replace(config, model=resolve(model))


def check_tokenizer(model: ModelConfig) -> None:
    """Raise ConfigError for a checkpoint directory without a tokenizer, which the API needs."""
    directory = Path(model.model)
    is_checkpoint = (directory / "config.json").is_file()
    if is_checkpoint and model.tokenizer is None and not (directory / "tokenizer.json").is_file():
        raise ConfigError(
            f"model {model.model} has no tokenizer.json; name a directory that has one with"
            " --tokenizer"
        )


def check_directories(config: EngineConfig, *, has_api: bool) -> None:
    """Make the directories that processes here write to; ConfigError: one cannot be written."""
    has_engine = config.parallel.data_parallel_size > 0
    directories = {
        "kv_offload_dir": config.cache.kv_offload_dir if has_engine else None,
        "journal_dir": config.api.journal_dir if has_api else None,
    }
    for name, directory in directories.items():
        if directory is None:
            continue
        try:
            Path(directory).mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):
                pass
        except FileExistsError as error:
            raise ConfigError(f"`{name}` {directory} is a file, not a directory") from error
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # there may be room later
                raise ConfigError(f"`{name}` {directory}: {error.strerror}") from error


def check_chats(model: ModelConfig) -> None:
    """Raise ConfigError for parsers and a template of chats that the API would refuse."""
    if {model.tool_call_parser, model.reasoning_parser} != {"auto"}:
        from api_proc.chat.families import find_dialect

        find_dialect(None, model.tool_call_parser, model.reasoning_parser)
    if model.chat_template is not None:
        from api_proc.text.chat_template import ChatTemplate
        from api_proc.text.checkpoint import chat_templates

        [source] = chat_templates(Path(), {}, model.chat_template).values()
        ChatTemplate(source, {})


def check_adapters(config: EngineConfig) -> None:
    """Raise ConfigError for a directory of `lora_modules` that the API would refuse."""
    for text in config.lora.lora_modules:
        module = parse_lora_module(text)
        try:
            read_config_bytes(module.path)
            open_weights(module.path).close()
        except (AdapterError, OSError) as error:
            raise ConfigError(f"`lora_modules`: {module.name}: {error}") from error


def check_device(config: EngineConfig, gpu_nodes: Sequence[str] = GPU_NODES) -> None:
    """Raise ConfigError for settings that need a GPU if engines on this machine have none."""
    worker, has_engine = config.worker, config.parallel.data_parallel_size > 0
    if not has_engine or config.model.model == "null" or computes_on_gpu(Device.AUTO, gpu_nodes):
        return
    wanted = {
        "`device` cuda": config.model.device is Device.CUDA,
        "`batch_invariant`": worker.batch_invariant,
        f"`attention_backend` {worker.attention_backend}": worker.attention_backend
        is not AttentionName.AUTO,
    }
    for setting, needs_gpu in wanted.items():
        if needs_gpu:
            files = ", ".join(gpu_nodes)
            raise ConfigError(f"{setting} needs a GPU, and this machine has none: no file {files}")


def num_standby_workers(config: EngineConfig, gpu_nodes: Sequence[str] = GPU_NODES) -> int:
    """Return the setting; by default 1 if a standby costs little: a real model, one rank, CPU."""
    if config.recovery.standby_workers is not None:
        return config.recovery.standby_workers
    on_gpu = computes_on_gpu(config.model.device, gpu_nodes)
    is_plain = config.parallel.num_ranks == 1 and config.model.model != "null"
    return int(is_plain and not on_gpu)


def check_has_processes(config: EngineConfig) -> None:
    """Raise ConfigError if an engine without an API would have no process at all."""
    if config.parallel.data_parallel_size == 0 and config.placement.ray is None:
        text = "`data_parallel_size` 0 with --no-api starts nothing: leave out one of them"
        raise ConfigError(text)
