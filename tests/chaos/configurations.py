"""Kill worker, core and API of engines with settings drawn at random, and compare every stream.

    python -m tests.chaos.configurations --count 20
    python -m tests.chaos.configurations --only 7 --keep /tmp/seven

The exit status is 1 if a stream differs from the run of the same engine without faults, or that run
from the one of an engine with default settings, although none of its settings changes a result.
"""

import argparse
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from protocol.config import ConfigError
from protocol.config.setting_fields import all_settings
from protocol.config.settings import configure
from tests.chaos.checker import check_stream
from tests.chaos.recording import Recording
from tests.paths import ROOT

Values = Mapping[str, bool | int | float | str]
"""Values of settings by their names."""

_OFFLOAD_BYTES = 2**24
_NUM_DRAWN = (2, 6)
"""Entries of `SETTINGS` for one configuration."""
_MAX_WORKERS = 2
_SIZES: Values = {"max_num_batched_tokens": 256, "max_model_len": 1024}
"""Those of `tests.chaos.session.ENGINE_FLAGS`."""
_CHAOS = (
    *("--matrix", "--faults", "worker,core,api", "--phases", "decode"),
    *("--journal", "--streams", "16"),
)
SETTINGS: tuple[Values, ...] = (
    {"block_size": 8, "num_gpu_blocks_override": 140},
    {"block_size": 64, "num_gpu_blocks_override": 24},
    {"enable_prefix_caching": False},
    {"swap_space_bytes": _OFFLOAD_BYTES},
    {"kv_offload_bytes": _OFFLOAD_BYTES},
    {"enable_kv_events": True},
    {"max_num_seqs": 3},
    {"max_num_scheduled_tokens": 64},
    {"long_prefill_token_threshold": 48, "max_long_partial_prefills": 1},
    {"long_prefill_token_threshold_adaptive": True},
    {"max_num_partial_prefills": 2},
    {"elastic_token_budget": True},
    {"target_itl_ms": 20.0},
    {"scheduling_policy": "shortest"},
    {"scheduling_policy": "fair"},
    {"scheduling_policy": "priority", "preempt_for_priority": True},
    {"victim_choice": "cheapest"},
    {"scheduler_reserve_full_isl": False},
    {"watermark": 0.05},
    {"max_steps_in_flight": 1},
    {"max_steps_in_flight": 4},
    {"num_speculative_tokens": 3},
    {"num_speculative_tokens": 5, "adaptive_speculation": False},
    {"data_parallel_size": 2},
    {"data_parallel_size": 2, "routing_policy": "round_robin"},
    {"data_parallel_size": 2, "prefill_replicas": 1, "kv_offload_bytes": _OFFLOAD_BYTES},
    {"pipeline_parallel_size": 2},
    {"api_server_count": 2},
    {"journal_sync": True},
    {"tokenizer_pool_size": 2},
    {"num_threads": 1},
    {"native_decoder": "off"},
    {"standby_workers": 0},
    {"standby_workers": 1},
    {"standby_cores": 0},
    {"dtype": "float32"},
    {"kv_cache_dtype": "int8"},
    {"kv_cache_dtype": "fp8"},
    {"quantization": "w8a16"},
    {"quantization": "w8a8"},
    {"tensor_parallel_size": 2},
)
"""What a configuration may have; each entry is drawn as a whole."""
_INEXACT = frozenset({"dtype", "kv_cache_dtype", "quantization", "tensor_parallel_size"})
"""Settings with which an engine rounds otherwise."""
_EXACT_MULTIPLE = 16
"""KV blocks of a multiple of this number of tokens are read by one loop, others by another."""


def draw(number: int, model: str) -> Values:
    """Return the settings of a configuration; number 0 has the defaults.

    What contradicts the settings that were drawn before it is left out.
    """
    rng = random.Random(number)
    drawn: Values = {}
    if number == 0:
        return drawn
    for values in rng.sample(SETTINGS, rng.randint(*_NUM_DRAWN)):
        if drawn.keys().isdisjoint(values) and _is_valid({**drawn, **values}, model):
            drawn = {**drawn, **values}
    return drawn


def _is_valid(values: Values, model: str) -> bool:
    try:
        parallel = configure(model=model, **_SIZES, **values).parallel
    except ConfigError:
        return False
    return parallel.num_ranks * parallel.data_parallel_size <= _MAX_WORKERS


def is_exact(values: Values) -> bool:
    """Return whether an engine with these settings generates what one without them does."""
    block_size = int(values.get("block_size", _EXACT_MULTIPLE))
    return _INEXACT.isdisjoint(values) and block_size % _EXACT_MULTIPLE == 0


def flags(values: Values) -> list[str]:
    """Return the settings as arguments of a command."""
    known = {setting.name: setting for setting in all_settings()}
    found: list[str] = []
    for name, value in values.items():
        flag = known[name].flag
        if known[name].is_bool:
            found.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            found += [flag, str(value)]
    return found


def run(number: int, values: Values, arguments: argparse.Namespace) -> list[Recording] | None:
    """Run chaos against one configuration; returns the run without faults, or None if it failed."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as base:
        directory = Path(arguments.keep or base) / str(number)
        options = ("--model", arguments.model, "--seed", str(arguments.seed))
        arguments_of_chaos = (*_CHAOS, *options, "--keep", str(directory), "--", *flags(values))
        command = [sys.executable, "-m", "tests.chaos", *arguments_of_chaos]
        if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
            return None
        golden = (directory / "golden.json").read_bytes()
    return msgspec.json.decode(golden, type=list[Recording])


def differences(golden: Sequence[Recording], plain: Sequence[Recording]) -> list[str]:
    """Return how the streams of an engine differ from those of another one."""
    pairs = zip(golden, plain, strict=True)
    return [
        f"{found.harm} {found.stream}: {found.detail}"
        for one, other in pairs
        for found in check_stream(one, other)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the configurations one after the other; returns the exit status."""
    arguments = _parser().parse_args(argv)
    last = arguments.first + arguments.count
    numbers = range(arguments.first, last) if arguments.only is None else [arguments.only]
    plain: list[Recording] | None = None
    bad: list[int] = []
    for number in [0, *numbers]:
        values = draw(number, arguments.model)
        print(f"configuration {number}: {' '.join(flags(values)) or 'defaults'}", flush=True)
        golden = run(number, values, arguments)
        plain = golden if number == 0 else plain
        is_compared = golden is not None and plain is not None and is_exact(values)
        found = differences(golden or [], plain or []) if is_compared else []
        for text in found:
            print(f"configuration {number} differs from the defaults: {text}")
        if found or golden is None:
            bad.append(number)
    print(f"{len(numbers)} configurations; with violations: {bad or 'none'}")
    return 1 if bad else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m tests.chaos.configurations",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--model", default="demo", help="null, demo or a checkpoint directory")
    parser.add_argument("--count", type=int, default=20, metavar="N", help="of configurations")
    parser.add_argument("--first", type=int, default=1, metavar="N", help="number of the first")
    parser.add_argument("--only", type=int, metavar="N", help="run only this one")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of requests and kills")
    parser.add_argument("--keep", help="directory for what `tests.chaos --keep` keeps of each")
    return parser


if __name__ == "__main__":
    sys.exit(main())
