"""Small configurations of models whose scores have terms that follow from rows."""

from typing import Any

from transformers import DogeConfig
from transformers.models.inkling.configuration_inkling import InklingTextConfig
from transformers.models.inkling2.configuration_inkling2 import Inkling2TextConfig

from tests.worker.checkpoints import SHAPE, VOCAB_SIZE, WINDOW, Architecture

_INKLING: dict[str, Any] = {
    **{key: value for key, value in SHAPE.items() if key != "intermediate_size"},
    **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16},
    **{"sliding_window_size": WINDOW, "d_rel": 6, "rel_extent": 21, "log_scaling_n_floor": 32},
    **{"moe_intermediate_size": 48, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"num_hidden_layers": 4, "initializer_range": 0.1, "vocab_size": VOCAB_SIZE + 8},
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
}
_DOGE = {key: value for key, value in SHAPE.items() if key != "head_dim"}
SCORE_TERMS = (
    Architecture(
        "inkling_text",
        lambda: InklingTextConfig(
            **_INKLING,
            **{"intermediate_size": 96, "unpadded_vocab_size": VOCAB_SIZE},
            **{"mlp_layer_types": ["dense", "sparse", "sparse", "dense"], "route_scale": 2.0},
            logits_mup_width_multiplier=2.0,
        ),
    ),
    Architecture(
        "inkling2_text",
        lambda: Inkling2TextConfig(
            **_INKLING, unpadded_vocab_size=VOCAB_SIZE, n_layers_per_attn_res_block=2
        ),
    ),
    Architecture("doge", lambda: DogeConfig(**_DOGE)),
)
"""Biases of a query by distance, with sinks of each query in Inkling-2; and biases of keys."""
WIDE = (
    Architecture(
        "inkling2_wide",
        lambda: Inkling2TextConfig(
            **_INKLING | {"head_dim": 32, "swa_head_dim": 64, "rel_extent": 90},
            unpadded_vocab_size=VOCAB_SIZE,
        ),
    ),
    Architecture("doge_window", lambda: DogeConfig(**_DOGE, sliding_window=WINDOW)),
)
"""With heads that the kernels for pairs compute, and with a window."""
