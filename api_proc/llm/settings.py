"""The arguments of `LLM`: vLLM's names, and all settings of `troika serve`."""

from typing import Any

from protocol.config import ConfigError, EngineConfig
from protocol.config.settings import configure

_WITHOUT_EFFECT = frozenset(
    {
        "async_scheduling",
        "compilation_config",
        "disable_cascade_attn",
        "disable_custom_all_reduce",
        "disable_log_stats",
        "limit_mm_per_prompt",
        "max_seq_len_to_capture",
        "swap_space",
        "trust_remote_code",
        "use_tqdm_on_load",
    }
)
"""Arguments that change no output: they are accepted, whatever their value."""
_INERT: dict[str, tuple[Any, ...]] = {
    "convert": ("auto", "none", "embed", "classify"),
    "cpu_offload_gb": (0,),
    "distributed_executor_backend": (None, "mp", "uni"),
    "hf_overrides": (None,),
    "hf_token": (None,),
    "load_format": ("auto", "safetensors"),
    "logits_processors": (None,),
    "runner": ("auto", "generate", "pooling"),
    "skip_tokenizer_init": (False,),
    "speculative_config": (None,),
    "task": ("auto", "generate", "embed", "embedding", "score", "classify"),
    "tokenizer_mode": ("auto", "hf"),
    "tokenizer_revision": (None,),
}
"""Arguments of features that this engine lacks, with the values that ask for none of them.

What a model computes follows from its files, so the values of `convert`, `runner` and `task` that
this engine can serve have no effect.
"""


def engine_config(model: str, arguments: dict[str, Any]) -> EngineConfig:
    """Return the configuration of an engine; ConfigError names an argument that cannot be used."""
    values = {"model": model, "log_level": "warning"}
    for name, value in arguments.items():
        if name in _WITHOUT_EFFECT:
            continue
        if name in _INERT:
            allowed = _INERT[name]
            if value is not None and value not in allowed:
                shown = " or ".join(map(repr, allowed))
                verb = "is" if len(allowed) == 1 else "are"
                raise ConfigError(f"{name}: {value!r} is not supported, only {shown} {verb}")
            continue
        values[name] = value
    if values.get("seed") is None:
        values.pop("seed", None)
    values["dtype"] = str(values.get("dtype", "auto")).removeprefix("torch.")
    for name in ("tokenizer", "chat_template", "model"):
        if values.get(name) is not None:
            values[name] = str(values[name])
    return configure(**values)
