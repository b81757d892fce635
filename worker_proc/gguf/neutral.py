"""Keys of GGUF files that may be ignored, with the values for which llama.cpp ignores them, too.

They count only where no code reads them. With another key, or another value, llama.cpp would
compute something else, and the file is refused.
"""

import struct
from collections.abc import Collection, Mapping
from typing import Any

from worker_proc.gguf.metadata import Metadata

Values = Collection[Any]
"""Values that change nothing; empty: none of all values changes anything."""
_ANY: Values = ()
_NOT_SCALED: Values = (0.0, 1.0)
_SCALE, _WINDOW = "attention.scale", "attention.sliding_window"
_NEUTRAL: Mapping[str, Values] = {
    # The shapes of tensors have these sizes, too; the others have no influence on logits.
    "embedding_length_out": _ANY,
    "expert_chunk_feed_forward_length": _ANY,
    "expert_feed_forward_length": _ANY,
    "expert_shared_feed_forward_length": _ANY,
    "pooling_type": _ANY,
    "tensor_data_layout": _ANY,
    "use_parallel_residual": _ANY,
    "vocab_size": _ANY,
    # These architectures do not have the norms to which these belong.
    "attention.group_norm_epsilon": _ANY,
    "attention.group_norm_groups": _ANY,
    "attention.layer_norm_epsilon": _ANY,
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.output_scale": _NOT_SCALED,
    "attention.shared_kv_layers": (0,),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "embedding_scale": _NOT_SCALED,
    "expert_count": (0,),
    "expert_gating_func": (0, 1),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": _ANY,
    "expert_used_count": (0,),
    "expert_weights_norm": (True,),
    "expert_weights_scale": _NOT_SCALED,
    "final_logit_softcapping": (0.0,),
    "interleave_moe_layer_step": (0, 1),
    "leading_dense_block_count": (0,),
    "logit_scale": _NOT_SCALED,
    "moe_every_n_layers": (0, 1),
    "nextn_predict_layers": (0,),
    "residual_scale": _NOT_SCALED,
    "router_logit_softcapping": (0.0,),
    "swin_norm": (False,),
    # Files of Granite-4 state these sizes even if no layer has a state.
    "ssm.conv_kernel": _ANY,
    "ssm.group_count": _ANY,
    "ssm.inner_size": _ANY,
    "ssm.state_size": _ANY,
    "ssm.time_step_rank": _ANY,
    # These are read if the file's kind of scaling has them.
    "rope.scale_linear": _ANY,
    "rope.scaling.alpha": _NOT_SCALED,
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.factor": _ANY,
    "rope.scaling.finetuned": _ANY,
    "rope.scaling.original_context_length": _ANY,
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_beta_fast": _ANY,
    "rope.scaling.yarn_beta_slow": _ANY,
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}


def neutral_values(metadata: Metadata) -> Mapping[str, Values]:
    """Return the values that change nothing, by their keys."""
    scales = [0.0]
    if _stated(metadata, _SCALE) is not None:
        scales += struct.unpack("<f", struct.pack("<f", metadata.head_size() ** -0.5))
    window = _stated(metadata, _WINDOW)
    is_wide = isinstance(window, int) and window >= metadata.integer("context_length")
    windows = (0, window) if is_wide else (0,)
    return {**_NEUTRAL, _SCALE: scales, _WINDOW: windows}


def _stated(metadata: Metadata, key: str) -> Any:
    """Return the value of a key, which does not count as read."""
    return metadata.header.metadata.get(f"{metadata.header.architecture}.{key}")
