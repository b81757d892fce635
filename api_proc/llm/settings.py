"""The arguments of `LLM`: vLLM's names, and all settings of `troika serve`."""

from typing import Any

from protocol.config import ConfigError, EngineConfig
from protocol.config.settings import configure

_WITHOUT_EFFECT = frozenset(
    {
        "disable_custom_all_reduce",
        "disable_log_stats",
        "swap_space",
        "trust_remote_code",
    }
)
"""Arguments that change no output: they are accepted, whatever their value."""
_INERT = {
    "convert": "auto",
    "cpu_offload_gb": 0,
    "hf_overrides": None,
    "hf_token": None,
    "load_format": "auto",
    "logits_processors": None,
    "skip_tokenizer_init": False,
    "speculative_config": None,
    "task": "auto",
    "tokenizer_mode": "auto",
    "tokenizer_revision": None,
}
"""Arguments of features that this engine lacks, with the value that does not ask for them."""


def engine_config(model: str, arguments: dict[str, Any]) -> EngineConfig:
    """Return the configuration of an engine; ConfigError names an argument that cannot be used."""
    values = {"model": model, "log_level": "warning"}
    for name, value in arguments.items():
        if name in _WITHOUT_EFFECT:
            continue
        if name in _INERT:
            if value not in (None, _INERT[name]):
                raise ConfigError(f"{name}: {value!r} is not supported, only {_INERT[name]!r} is")
            continue
        values[name] = value
    if values.get("seed") is None:
        values.pop("seed", None)
    values["dtype"] = str(values.get("dtype", "auto")).removeprefix("torch.")
    for name in ("tokenizer", "chat_template", "model"):
        if values.get(name) is not None:
            values[name] = str(values[name])
    return configure(**values)
