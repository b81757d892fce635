"""Architectures that attend by code of their own, with small configurations; see checkpoints.py."""

from typing import Any

from transformers import (
    BloomConfig,
    CodeGenConfig,
    FalconConfig,
    GPTJConfig,
    GPTNeoConfig,
    GPTNeoXJapaneseConfig,
    MptConfig,
    PretrainedConfig,
    XGLMConfig,
)

from tests.worker.checkpoints import SHAPE, WINDOW, Architecture

_COMMON: dict[str, Any] = {
    key: SHAPE[key]
    for key in (
        *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
        *("bos_token_id", "eos_token_id", "pad_token_id"),
    )
}
_LENGTH: dict[str, Any] = {"max_position_embeddings": SHAPE["max_position_embeddings"]}
_FALCON: dict[str, Any] = _COMMON | _LENGTH | {"ffn_hidden_size": 96}


def _falcon(**options: Any) -> PretrainedConfig:
    return FalconConfig(**_FALCON, **options)


OWN_ATTENTION = (
    Architecture("bloom", lambda: BloomConfig(**_COMMON, seq_length=256)),
    Architecture(
        "gpt_neo",
        lambda: GPTNeoConfig(
            **_COMMON,
            **_LENGTH,
            intermediate_size=96,
            attention_types=[[["global", "local"], 1]],
            window_size=WINDOW,
            tie_word_embeddings=False,  # tied random weights repeat one token
        ),
    ),
    Architecture(
        "falcon_new",  # 40B
        lambda: _falcon(new_decoder_architecture=True, num_kv_heads=2, bias=False),
    ),
    Architecture(
        "falcon",  # 7B
        lambda: _falcon(multi_query=True, parallel_attn=True, bias=False),
    ),
    Architecture(
        "falcon_alibi",  # RW
        lambda: _falcon(alibi=True, multi_query=False, parallel_attn=False, bias=True),
    ),
    Architecture(
        "mpt",
        lambda: MptConfig(
            **{key: _COMMON[key] for key in ("vocab_size", "bos_token_id", "eos_token_id")},
            **{"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 256},
        ),
    ),
    Architecture(
        "gptj", lambda: GPTJConfig(**_COMMON, **_LENGTH, rotary_dim=8, tie_word_embeddings=False)
    ),
    Architecture("codegen", lambda: CodeGenConfig(**_COMMON, **_LENGTH, rotary_dim=8)),
    Architecture(
        "xglm",
        lambda: XGLMConfig(
            **{key: _COMMON[key] for key in ("vocab_size", "bos_token_id", "eos_token_id")},
            **{"d_model": 64, "ffn_dim": 96, "num_layers": 2, "attention_heads": 4},
            **_LENGTH,
        ),
    ),
    Architecture(
        "gpt_neox_japanese",
        lambda: GPTNeoXJapaneseConfig(**_COMMON, **_LENGTH, intermediate_multiple_size=2),
    ),
)
KINDS = OWN_ATTENTION[:3]
"""One architecture with biases, one with masks of its own, and one that stores copied heads."""
