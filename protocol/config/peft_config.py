"""Reads adapter_config.json of a PEFT adapter: the scale of its products, and unsupported keys."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from protocol.adapters import CONFIG_FILE, AdapterError

_TASKS = (None, "CAUSAL_LM", "FEATURE_EXTRACTION")
_REFUSED: dict[str, str] = {
    "use_dora": "DoRA is not supported",
    "use_qalora": "QALoRA is not supported",
    "lora_bias": "biases of adapters are not supported",
    "modules_to_save": "an adapter that replaces whole modules is not supported",
    "trainable_token_indices": "an adapter that replaces rows of the embedding is not supported",
    "target_parameters": "an adapter of parameters outside of linear layers is not supported",
    "layer_replication": "an adapter that repeats layers is not supported",
    "alora_invocation_tokens": "an adapter that begins within a text is not supported",
    "arrow_config": "routing between adapters is not supported",
}
"""Keys that must be absent, null, false or empty, and why."""
_CHANGING_STARTS = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of `init_lora_weights` under which PEFT changes the model's own weights."""


MAX_ALPHA = 1e30
_PLAIN_PATTERN = re.compile(r"[\w.\\|\[\]^$-]*")
"""Expressions that are matched in linear time, because a file may come from anywhere."""


class PeftConfig(NamedTuple):
    """The ranks of an adapter's products, and the factors on them."""

    rank: int
    alpha: float
    uses_root: bool
    """The scale is alpha / sqrt(rank) instead of alpha / rank."""
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    targets: tuple[str, ...]
    """Names of modules, or endings of names; empty if the file has a pattern instead."""

    def rank_of(self, module: str) -> int:
        key = _key_of(self.rank_pattern, module)
        return self.rank if key is None else self.rank_pattern[key]

    def scale_of(self, module: str) -> float:
        rank = self.rank_of(module)
        key = _key_of(self.alpha_pattern, module)
        alpha = self.alpha if key is None else self.alpha_pattern[key]
        return alpha / (math.sqrt(rank) if self.uses_root else rank)


def _key_of(patterns: Mapping[str, object], module: str) -> str | None:
    """Return the key of a pattern that matches the end of a module's name, as PEFT looks for it."""
    return next((key for key in patterns if re.match(rf"(.*\.)?({key})$", module)), None)


def read_config(content: bytes, max_rank: int) -> PeftConfig:
    """Check the contents of adapter_config.json; AdapterError names key and value."""
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{CONFIG_FILE} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise AdapterError(f"{CONFIG_FILE} does not hold a JSON object")
    _check_kind(config)
    if "r" not in config:
        raise AdapterError(f"{CONFIG_FILE} has no r")
    rank = config["r"]
    ranks = _pattern(config, "rank_pattern")
    for key, value in {"r": rank, **{f"rank_pattern.{k}": v for k, v in ranks.items()}}.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise AdapterError(f"{_shown(key, value)}, and must be an integer of at least 1")
        if value > max_rank:
            raise AdapterError(f"{_shown(key, value)}, more than max_lora_rank {max_rank}")
    alphas = _pattern(config, "alpha_pattern")
    alpha = config.get("lora_alpha", 8)
    named = {"lora_alpha": alpha, **{f"alpha_pattern.{k}": v for k, v in alphas.items()}}
    for key, value in named.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not abs(value) <= MAX_ALPHA:
            raise AdapterError(f"{_shown(key, value)}, and must be a number")
    uses_root = config.get("use_rslora") or False
    if not isinstance(uses_root, bool):
        raise AdapterError(f"{_shown('use_rslora', uses_root)}, and must be true or false")
    targets = config.get("target_modules") or ()
    names = tuple(map(str, targets)) if isinstance(targets, list) else ()
    return PeftConfig(rank, float(alpha), uses_root, ranks, alphas, names)


def _check_kind(config: dict[str, Any]) -> None:
    kind, task = config.get("peft_type"), config.get("task_type")
    if kind != "LORA":
        raise AdapterError(f"{_shown('peft_type', kind)}; only LORA is supported")
    if task not in _TASKS:
        raise AdapterError(f"{_shown('task_type', task)}; CAUSAL_LM is supported")
    bias = config.get("bias", "none")
    if bias != "none":
        raise AdapterError(f"{_shown('bias', bias)}; biases of adapters are not supported")
    for key, why in _REFUSED.items():
        if config.get(key):
            raise AdapterError(f"{_shown(key, config[key])}: {why}")
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start.startswith(_CHANGING_STARTS):
        raise AdapterError(
            f"{_shown('init_lora_weights', start)}: it changes the model's own weights; save the"
            " adapter converted to plain LoRA"
        )


def _pattern(config: dict[str, Any], key: str) -> dict[str, Any]:
    patterns = config.get(key) or {}
    if not isinstance(patterns, dict):
        raise AdapterError(f"{_shown(key, patterns)}, and must be an object")
    for pattern in patterns:
        if not _PLAIN_PATTERN.fullmatch(pattern):
            raise AdapterError(
                f"{CONFIG_FILE}: {key} has {pattern[:100]!r}; names, dots, classes and alternatives"
                " are supported, groups and repetitions are not"
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise AdapterError(f"{CONFIG_FILE}: {key} has {pattern!r}: {error}") from error
    return patterns


def _shown(key: str, value: object) -> str:
    return f"{CONFIG_FILE}: {key} is {json.dumps(value)[:100]}"
