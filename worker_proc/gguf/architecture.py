"""The description of an architecture in GGUF files, and parts of configurations that many share."""

from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple

from worker_proc.gguf.changes import Change
from worker_proc.gguf.joins import Join, Rows
from worker_proc.gguf.mapped import MappedFiles
from worker_proc.gguf.metadata import Metadata
from worker_proc.gguf.rotary import rope_parameters

Config = dict[str, Any]
NORMALIZED = "expert_weights_norm"
GATING = "expert_gating_func"
SOFTMAX, SIGMOID = 1, 2
KV_HEADS = "attention.head_count_kv"
WINDOW = "attention.sliding_window"
TEMPERATURE = "attention.temperature_scale"
LOCAL_BASE = "rope.freq_base_swa"
"""The base of the rotary embedding of layers with windows."""
LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
FINETUNED = "rope.scaling.finetuned"
"""The key that is false in models of Granite without a rotary embedding."""
RMS_NORM_EPSILON = "attention.layer_norm_rms_epsilon"
LAYER_NORM_EPSILON = "attention.layer_norm_epsilon"
_GROUPS, _USED_GROUPS = "expert_group_count", "expert_group_used_count"
_DRAFTS = "nextn_predict_layers"
_WINDOW_PATTERN = "attention.sliding_window_pattern"

EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
SHARED = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
ROUTED = EXPERTS | {
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
NORM_BEHIND = {"post_attention_norm": "post_attention_layernorm"}
NORMS_BEHIND = NORM_BEHIND | {"post_ffw_norm": "post_feedforward_layernorm"}


class Constant(NamedTuple):
    """A tensor whose elements are all one number."""

    value: float
    shape: tuple[int, ...]


class Architecture(NamedTuple):
    """The conversion of an architecture's files to a checkpoint of transformers."""

    model_type: str
    model_class: str
    own_config: Callable[[Metadata, MappedFiles], Config]
    """Returns the settings of the configuration that not all architectures share."""
    names: Mapping[str, str] = {}
    """Names of tensors in layers that differ from the usual ones, by their parts of the names.

    A part that ends in `.weight`, `.bias` or `.scale` is the whole name within a layer, as is the
    name of a tensor without such an end.
    """
    permutes: bool = False
    """True if rows of queries and keys that are rotated together are adjacent."""
    norm_offset: float = 0.0
    """The number that files have added to the weights of norms."""
    joins: tuple[Join | Rows, ...] = ()
    """Weights that are several tensors in files."""
    changes: Callable[[Metadata], Mapping[str, Change]] = lambda metadata: {}
    """Returns the changes of tensors of layers, by their names within the layer."""
    top: Mapping[str, str] = {}
    """Names of tensors outside of layers that differ from the usual ones."""
    drops_drafts: bool = False
    """True if the last layers, which draft tokens, are left out."""
    prefix: str = "model"
    """The beginning of the names of layers."""
    layers: str = "layers"
    """The name of the list of layers, after the prefix."""
    splits: Callable[[Metadata], Mapping[str, Mapping[str, Change]]] = lambda metadata: {}
    """Returns the tensors that are several weights: for the part of a tensor's name, the name of
    each weight within its layer, and the change that makes it from the tensor.

    "3.attn_qkv" is the part attn_qkv of layer 3 only.
    """
    unused: Callable[[Metadata], Container[str]] = lambda metadata: ()
    """Returns the names of tensors that files may have but the model does not use."""
    constants: Callable[[Metadata], Mapping[str, Constant]] = lambda metadata: {}
    """Returns tensors whose values are keys of the files, by their names in a checkpoint."""
    has_rms_norms: bool = True
    """True if files state the epsilon of RMS norms."""
    attends: bool = True
    """True if any layer has attention heads."""
    rotates: bool = True
    """True if attention has a rotary embedding."""

    def num_layers(self, metadata: Metadata) -> int:
        """Return the number of the model's layers."""
        return before_drafts(metadata) if self.drops_drafts else metadata.integer("block_count")


def before_drafts(metadata: Metadata) -> int:
    """Return the number of layers before those that draft tokens."""
    count = metadata.integer("block_count")
    num_drafts = metadata.integer(_DRAFTS, 0, min_value=0)
    if num_drafts >= count:
        raise metadata.unsupported(_DRAFTS, f"less than {count}, the number of all layers")
    return count - num_drafts


def rotated_heads(metadata: Metadata) -> Config:
    """Return the size of heads; raise UnsupportedModel unless all of their values are rotated."""
    size = metadata.head_size()
    if metadata.integer("rope.dimension_count", size) != size:
        raise metadata.unsupported("rope.dimension_count", f"{size}, the values of a head")
    return {"head_dim": size}


def check_head_size(metadata: Metadata) -> None:
    """Raise UnsupportedModel unless the sizes of all heads add up to the embedding's."""
    size = metadata.integer("embedding_length") // metadata.integer("attention.head_count")
    if metadata.head_size() != size:
        raise metadata.unsupported("attention.key_length", str(size))


def partly_rotated(metadata: Metadata, file: MappedFiles) -> Config:
    """Return the size of heads, and the share of a head that is rotated."""
    size = metadata.head_size()
    rope = rope_parameters(metadata, file)
    rope["partial_rotary_factor"] = metadata.rotated_share(size)
    return {"head_dim": size, "rope_parameters": rope}


def check_rotates(metadata: Metadata) -> None:
    """Raise UnsupportedModel for a model of Granite's kind without a rotary embedding."""
    if not metadata.flag(FINETUNED, default=True):
        raise metadata.unsupported(FINETUNED, "true")


def check_sigmoid(metadata: Metadata) -> None:
    """Raise UnsupportedModel unless a router scores experts by the sigmoid function."""
    if metadata.integer(GATING, SIGMOID) != SIGMOID:
        raise metadata.unsupported(GATING, f"{SIGMOID}, the sigmoid function")


def scales(metadata: Metadata) -> Config:
    """Return the factors of embeddings, residuals, scores and logits in Granite."""
    return {
        "embedding_multiplier": metadata.number("embedding_scale", 1.0),
        "residual_multiplier": metadata.number("residual_scale", 1.0),
        "attention_multiplier": metadata.number_or_none("attention.scale")
        or metadata.head_size() ** -0.5,
        "logits_scaling": metadata.number("logit_scale", 1.0),
    }


def has_tensor(file: MappedFiles, tensor: str) -> bool:
    """Return whether the first layer has a tensor."""
    return f"blk.0.{tensor}" in file.header.tensors


def has_bias(file: MappedFiles, part: str) -> bool:
    return has_tensor(file, f"{part}.bias")


def llama_config(metadata: Metadata, file: MappedFiles) -> Config:
    biases = {"attention_bias": has_bias(file, "attn_q"), "mlp_bias": has_bias(file, "ffn_up")}
    return rotated_heads(metadata) | biases


def used_experts(metadata: Metadata) -> Config:
    return {"num_experts_per_tok": metadata.integer("expert_used_count")}


def window_layers(metadata: Metadata, interval: int, count: int | None = None) -> Config:
    """Return the kinds of the first `count` layers, by default of all.

    Every layer whose number, counted from 1, is a multiple of `interval` has no window. A file may
    state another interval, or a list.
    """
    count = metadata.integer("block_count") if count is None else count
    stated = metadata.get(_WINDOW_PATTERN)
    if isinstance(stated, list):
        has_window = stated
        if len(stated) != count or not all(isinstance(one, bool) for one in stated):
            raise metadata.unsupported(_WINDOW_PATTERN, f"true or false for each of {count} layers")
    else:
        interval = metadata.integer(_WINDOW_PATTERN, interval)
        has_window = [number % interval < interval - 1 for number in range(count)]
    kinds = ["sliding_attention" if one else "full_attention" for one in has_window]
    return {"layer_types": kinds}


def routed(metadata: Metadata) -> Config:
    """Return the settings of mixtures with shared experts, under DeepSeek's names."""
    num_experts = metadata.integer("expert_count")
    num_groups = metadata.integer(_GROUPS, 0, min_value=0) or 1
    num_used = metadata.integer(_USED_GROUPS, 0, min_value=0) or 1
    if num_experts % num_groups:
        raise metadata.unsupported(_GROUPS, f"a number that divides {num_experts} experts")
    if num_used > num_groups:
        raise metadata.unsupported(_USED_GROUPS, f"at most {num_groups}, the number of all groups")
    return {
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "n_routed_experts": num_experts,
        "n_shared_experts": metadata.integer("expert_shared_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "first_k_dense_replace": metadata.integer("leading_dense_block_count", 0, min_value=0),
        "routed_scaling_factor": metadata.number_or_none("expert_weights_scale") or 1.0,
        "norm_topk_prob": metadata.flag(NORMALIZED, default=False),
        "n_group": num_groups,
        "topk_group": num_used,
    }


def qwen_experts(metadata: Metadata) -> Config:
    return used_experts(metadata) | {
        "num_experts": metadata.integer("expert_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
