"""What happens before an engine starts: flags, the model's directory, the HTTP socket, signals."""

import argparse
import errno
import os
import re
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from api_proc.http import listener as http_listener
from api_proc.http.api_keys import read_keys
from api_proc.http.tls import make_context
from protocol.adapters import AdapterError, open_weights, read_config_bytes
from protocol.config import ApiConfig, ConfigError, EngineConfig, ModelConfig, settings
from protocol.config.choices import AttentionName, Device
from protocol.config.foreign_flags import KEY_VARIABLES
from protocol.config.gpu_defaults import GPU_NODES, computes_on_gpu
from protocol.config.lora_modules import parse_lora_module
from protocol.process.launch import failure_file
from protocol.process.version import version
from scripts.supervisor.help_pages import help_text
from scripts.supervisor.model_names import resolve

_FILE_SETTING = re.compile(r"\b(ssl_[a-z_]+|api_key_file)(?= )")


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


def served_name(config: EngineConfig) -> str:
    return next(iter(config.model.served_model_name), Path(config.model.model).name)


def open_listener(api: ApiConfig) -> socket.socket:
    """Listen for HTTP; ConfigError: the address, a certificate or the file of keys is unusable."""
    try:
        make_context(api)
        if api.api_key_file is not None:
            read_keys(Path(api.api_key_file))
    except (OSError, ValueError) as error:
        raise ConfigError(_FILE_SETTING.sub(r"`\1`", str(error))) from error
    try:
        return http_listener.open_listener(api)
    except (OSError, ValueError) as error:
        reason = str(error)
        if isinstance(error, OSError):  # a resolver's numbers are negative
            number = error.errno or 0
            reason = os.strerror(number) if number > 0 else str(error.strerror)
        if api.uds is not None:
            text = f"cannot listen on uds {api.uds}: {reason}; choose another path with --uds"
        else:
            text = (
                f"cannot listen on host {api.host}, port {api.port}: {reason}; "
                "choose others with --host and --port (port 0: any free one)"
            )
        raise ConfigError(text) from error


def check_has_processes(config: EngineConfig) -> None:
    """Raise ConfigError if an engine without an API would have no process at all."""
    if config.parallel.data_parallel_size == 0 and config.placement.ray is None:
        text = "`data_parallel_size` 0 with --no-api starts nothing: leave out one of them"
        raise ConfigError(text)


def warnings(argv: Sequence[str], config: EngineConfig) -> Iterator[str]:
    """Yield a sentence for each setting with a risk."""
    api = config.api
    if any(word.split("=")[0] == "--api-key" for word in argv):
        yield (
            "every user of this machine can read the API key in the list of processes; "
            "pass it with --api-key-file or the variable TROIKA_API_KEY"
        )
    if not api.api_key and api.api_key_file is None:
        for variable in KEY_VARIABLES:
            if variable in os.environ:
                yield f"{variable} has no effect: clients need no key; set TROIKA_API_KEY"
    is_open = api.uds is None and api.host not in ("127.0.0.1", "::1", "localhost")
    if is_open and not api.api_key and api.api_key_file is None:
        yield f"every client that can reach {api.host} may use this server; set --api-key-file"
    if api.journal_dir is not None:
        journals = Path(api.journal_dir).glob("api-*/*.journal")
        names = {path.parent.name for path in journals}
        if left := sorted(name for name in names if _index_of(name) >= api.api_server_count):
            yield (
                f"requests in {', '.join(left)} of {api.journal_dir} are not resumed: "
                f"api_server_count is only {api.api_server_count}"
            )
    file = Path(api.api_key_file or "")
    if api.api_key_file is not None and file.is_file() and file.stat().st_mode & 0o004:
        yield f"every user of this machine can read {api.api_key_file}: chmod 600"


def _index_of(journal: str) -> int:
    """Return the index of the API process that wrote a journal; -1: it has no such name."""
    _, _, text = journal.partition("-")
    return int(text) if text.isdecimal() else -1


def watch_signals() -> int:
    """Make SIGINT, SIGTERM and SIGHUP only write a byte to the descriptor returned.

    SIGHUP stays ignored if it already is, as under nohup.
    """
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    os.set_blocking(write_fd, False)
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    for number in numbers:
        signal.signal(number, lambda *_: None)
    return read_fd


def write_failure(run_dir: str | None, failure: str) -> bool:
    """Write the failure for the embedding program; False: the directory is gone."""
    if run_dir is None or not os.path.isdir(run_dir):
        return False
    failure_file(run_dir, os.getpid()).write_text(failure)
    return True


def parse(program: str, argv: Sequence[str]) -> tuple[argparse.Namespace, EngineConfig]:
    """Parse the command line. Wrong arguments end the program with status 2, help with 0."""
    # argparse would read llama.cpp's flag as -h.
    argv = ["--hf-repo" if word == "-hf" else word for word in argv]
    parser = settings.OneLineParser(program, add_help=False, allow_abbrev=False)
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        default=argparse.SUPPRESS,
        help="as --model",
    )
    parser.add_argument("-h", "--help", nargs="?", const="", metavar="TOPIC", help="this text")
    parser.add_argument("--version", action="store_true", help="print the version")
    parser.add_argument("--no-api", action="store_true", help="start no HTTP server")
    for flag in ("--config-fd", "--parent-fd", "--progress-fd", "--epoch", "--rank"):
        parser.add_argument(flag, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--temporary-run-dir", action="store_true", help=argparse.SUPPRESS)
    settings.add_flags(parser)
    asked, _ = parser.parse_known_args(argv)
    if asked.help is not None or asked.version:
        try:
            print(f"troika {version()}" if asked.version else help_text(program, asked.help))
        except ConfigError as error:
            parser.error(str(error))
        sys.exit(0)
    config = settings.parse_args(parser, argv)
    arguments = parser.parse_args(argv)
    if arguments.config_fd is not None:
        with os.fdopen(arguments.config_fd, "rb") as pipe:
            config = msgspec.msgpack.decode(pipe.read(), type=EngineConfig)
    return arguments, config
