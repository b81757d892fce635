"""The architectures that are read from GGUF files, as configurations of transformers.

Files state sizes under llama.cpp's keys; what its code has fixed for an architecture, such as an
activation, is not in them and is stated here.
"""

from collections.abc import Callable, Mapping

from worker_proc.errors import CheckpointError, UnsupportedModel
from worker_proc.gguf.architecture import (
    EXPERTS,
    GATING,
    KV_HEADS,
    NORM_BEHIND,
    NORMALIZED,
    ROUTED,
    SHARED,
    SIGMOID,
    SOFTMAX,
    Architecture,
    Config,
    has_bias,
    has_tensor,
    llama_config,
    qwen_experts,
    rotated_heads,
    routed,
    used_experts,
    window_layers,
)
from worker_proc.gguf.delta_net import QWEN3NEXT, QWEN35, QWEN35MOE
from worker_proc.gguf.joins import GPT_OSS, LATENT
from worker_proc.gguf.mapped import MappedFiles
from worker_proc.gguf.metadata import Metadata
from worker_proc.gguf.model_header import Header
from worker_proc.gguf.neutral import neutral_values
from worker_proc.gguf.rotary import rope_parameters

_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS = 46, 62
"""Of the models whose queries are scaled by the width of a head that the model does not have."""
_GEMMA3_LOCAL_BASE = 10_000.0
_SMOLLM3_NO_ROPE_INTERVAL = 4
"""Every fourth layer has no rotary embedding."""
_TEMPERATURE = "attention.temperature_scale"
_LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"


def make_config(file: MappedFiles) -> Config:
    """Return the content of config.json; UnsupportedModel: a file of another architecture."""
    header = file.header
    architecture = architecture_of(file)
    metadata = Metadata(header)
    own = architecture.own_config(metadata, file)
    embedding = header.tensors.get("token_embd.weight")
    common: Config = {
        "model_type": architecture.model_type,
        "architectures": [architecture.model_class],
        "hidden_size": metadata.integer("embedding_length"),
        "num_hidden_layers": architecture.num_layers(metadata),
        "num_attention_heads": metadata.integer("attention.head_count"),
        "max_position_embeddings": metadata.integer("context_length"),
        "vocab_size": 0 if embedding is None else embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "rope_parameters": rope_parameters(metadata, file),
        **_token_ids(header),
    }
    heads = metadata.integer("attention.head_count")
    common["num_key_value_heads"] = metadata.integer(KV_HEADS, heads)
    if metadata.get("feed_forward_length") is not None:
        common["intermediate_size"] = metadata.integer("feed_forward_length")
    common["rms_norm_eps"] = metadata.number("attention.layer_norm_rms_epsilon")
    metadata.check_all_read(neutral_values(metadata))
    return common | own


def _token_ids(header: Header) -> Config:
    """Return the special tokens that config.json names."""
    ids = {}
    for name, stored in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        key = f"tokenizer.ggml.{stored}_token_id"
        number = header.metadata.get(key)
        if number is not None and type(number) is not int:
            raise CheckpointError(f"{header.path}: {key} is {number!r:.100}, and must be a token")
        ids[f"{name}_token_id"] = number
    return ids


def architecture_of(file: MappedFiles) -> Architecture:
    """Return the architecture of a file; UnsupportedModel: it is not read."""
    header = file.header
    name = header.architecture
    if name == "llama" and header.metadata.get("llama.expert_count"):
        return MIXTRAL
    if name == "mistral3" and not header.metadata.get(f"{name}.{_TEMPERATURE}"):
        return MISTRAL
    if name == "deepseek2" and _gating(file) == SOFTMAX:
        return DEEPSEEK_V2
    if name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedModel(
            f"{header.path}: general.architecture is {name[:100]!r}; supported: {known}"
        )
    return ARCHITECTURES[name]


def _mixtral(metadata: Metadata, file: MappedFiles) -> Config:
    own = {"num_local_experts": metadata.integer("expert_count"), "sliding_window": None}
    return rotated_heads(metadata) | used_experts(metadata) | own


def _mistral(metadata: Metadata, file: MappedFiles) -> Config:
    """Return what Mistral Small has, whose files state mistral3 as those of Ministral 3 do."""
    metadata.get(_TEMPERATURE)
    return rotated_heads(metadata) | {
        "sliding_window": None,
        "rope_parameters": _with_mscale(metadata, file),
    }


def _ministral3(metadata: Metadata, file: MappedFiles) -> Config:
    rope = _with_mscale(metadata, file)
    if rope["rope_type"] != "yarn":
        raise metadata.unsupported("rope.scaling.type", f'"yarn" beside {_TEMPERATURE}')
    rope["llama_4_scaling_beta"] = metadata.number(_TEMPERATURE)
    return rotated_heads(metadata) | {"sliding_window": None, "rope_parameters": rope}


def _with_mscale(metadata: Metadata, file: MappedFiles) -> Config:
    """Return parameters of the rotary embedding with what keeps YaRN from scaling angles."""
    rope = rope_parameters(metadata, file)
    all_dim = metadata.number_or_none(_LOG_MULTIPLIER)
    if all_dim is not None and rope["rope_type"] != "yarn":
        raise metadata.unsupported(_LOG_MULTIPLIER, "0 without YaRN")
    return rope if all_dim is None else rope | {"mscale": 1.0, "mscale_all_dim": all_dim}


def _granite(metadata: Metadata, file: MappedFiles) -> Config:
    return llama_config(metadata, file) | {
        "embedding_multiplier": metadata.number("embedding_scale", 1.0),
        "residual_multiplier": metadata.number("residual_scale", 1.0),
        "attention_multiplier": metadata.number("attention.scale"),
        "logits_scaling": metadata.number("logit_scale", 1.0),
    }


def _smollm3(metadata: Metadata, file: MappedFiles) -> Config:
    return rotated_heads(metadata) | {"no_rope_layer_interval": _SMOLLM3_NO_ROPE_INTERVAL}


def _qwen2(metadata: Metadata, file: MappedFiles) -> Config:
    size = metadata.integer("embedding_length") // metadata.integer("attention.head_count")
    if rotated_heads(metadata)["head_dim"] != size:
        raise metadata.unsupported("attention.key_length", str(size))
    return {"use_sliding_window": False}


def _qwen3(metadata: Metadata, file: MappedFiles) -> Config:
    own = {"attention_bias": has_bias(file, "attn_q"), "use_sliding_window": False}
    return rotated_heads(metadata) | own


def _without_images(
    own: Callable[[Metadata, MappedFiles], Config],
) -> Callable[[Metadata, MappedFiles], Config]:
    """Return how a model of images and texts is configured: for texts, as one of texts.

    Its angles come from three rows of positions, which are equal in texts; and layers to which
    features of images are added get none.
    """

    def config(metadata: Metadata, file: MappedFiles) -> Config:
        for key in ("rope.dimension_sections", "n_deepstack_layers"):
            metadata.get(key)
        return own(metadata, file)

    return config


def _glm4(metadata: Metadata, file: MappedFiles) -> Config:
    size = metadata.head_size()
    rope = rope_parameters(metadata, file)
    rope["partial_rotary_factor"] = metadata.integer("rope.dimension_count", size) / size
    bias = has_bias(file, "attn_q")
    return {"head_dim": size, "rope_parameters": rope, "attention_bias": bias}


def _glm4moe(metadata: Metadata, file: MappedFiles) -> Config:
    if metadata.integer(GATING, SIGMOID) != SIGMOID:
        raise metadata.unsupported(GATING, f"{SIGMOID}, the sigmoid function")
    own = {"use_qk_norm": has_tensor(file, "attn_q_norm.weight")}
    return _glm4(metadata, file) | routed(metadata) | own


def _gating(file: MappedFiles) -> int:
    """Return how DeepSeek's routers score experts; old files show it by the biases of scores."""
    is_biased = any(name.endswith("exp_probs_b.bias") for name in file.header.tensors)
    return Metadata(file.header).integer(GATING, SIGMOID if is_biased else SOFTMAX)


def _latent(metadata: Metadata, file: MappedFiles) -> Config:
    """Return what models with multi-head latent attention have in common."""
    rope = rope_parameters(metadata, file)
    multiplier = metadata.number_or_none(_LOG_MULTIPLIER)
    if multiplier is not None and rope["rope_type"] == "yarn":
        scale = round(10 * multiplier, 6)  # files state a tenth
        rope |= {"mscale": scale, "mscale_all_dim": scale}
    rotated, size = metadata.integer("rope.dimension_count"), metadata.latent_size("key_length")
    if rotated >= size:
        raise metadata.unsupported("rope.dimension_count", f"less than {size}, the values of a key")
    has_queries = metadata.get("attention.q_lora_rank") is not None
    return {
        "num_key_value_heads": metadata.integer("attention.head_count"),
        "kv_lora_rank": metadata.integer("attention.kv_lora_rank"),
        "q_lora_rank": metadata.integer("attention.q_lora_rank") if has_queries else None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": size - rotated,
        "v_head_dim": metadata.latent_size("value_length"),
        "rope_parameters": rope,
        "attention_bias": False,
        **routed(metadata),
    }


def _deepseek_v3(metadata: Metadata, file: MappedFiles) -> Config:
    if metadata.integer(GATING, SIGMOID) != SIGMOID:
        raise metadata.unsupported(GATING, f"{SOFTMAX} or {SIGMOID}, softmax or sigmoid")
    return _latent(metadata, file) | {"rope_interleave": True}


def _deepseek_v2(metadata: Metadata, file: MappedFiles) -> Config:
    if metadata.flag(NORMALIZED, default=False):
        raise metadata.unsupported(NORMALIZED, f"false with {GATING} {SOFTMAX}")
    own = _latent(metadata, file)
    is_greedy = own["n_group"] == 1
    return own | {"topk_method": "greedy" if is_greedy else "group_limited_greedy"}


def _ernie4_5(metadata: Metadata, file: MappedFiles) -> Config:
    return rotated_heads(metadata) | {"use_bias": has_bias(file, "attn_q")}


def _olmo2(metadata: Metadata, file: MappedFiles) -> Config:
    _qwen2(metadata, file)  # its heads have the same sizes
    return {"attention_bias": False}


def _seed_oss(metadata: Metadata, file: MappedFiles) -> Config:
    return llama_config(metadata, file) | {"attention_out_bias": has_bias(file, "attn_output")}


def _gpt_oss(metadata: Metadata, file: MappedFiles) -> Config:
    """Return what it has beside limits and slopes of its activation, which are transformers'."""
    rope = rope_parameters(metadata, file)
    if rope["rope_type"] == "yarn":
        rope["truncate"] = False
    return {
        **rotated_heads(metadata),
        **used_experts(metadata),
        **window_layers(metadata, 2),
        "num_local_experts": metadata.integer("expert_count"),
        "intermediate_size": metadata.integer("expert_feed_forward_length"),
        "sliding_window": metadata.integer("attention.sliding_window"),
        "attention_bias": has_bias(file, "attn_q"),
        "rope_parameters": rope,
    }


def _lfm2(metadata: Metadata, file: MappedFiles) -> Config:
    """Return which layers attend: those that have keys and values."""
    count = metadata.integer("block_count")
    stated = metadata.get(KV_HEADS)
    if not isinstance(stated, list) or len(stated) != count:
        raise metadata.unsupported(KV_HEADS, f"a number for each of {count} layers")
    size = metadata.integer("embedding_length") // metadata.integer("attention.head_count")
    if rotated_heads(metadata)["head_dim"] != size:
        raise metadata.unsupported("attention.key_length", str(size))
    return {
        "layer_types": ["full_attention" if heads else "conv" for heads in stated],
        "conv_L_cache": metadata.integer("shortconv.l_cache"),
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,
        "norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
    }


def _qwen2moe(metadata: Metadata, file: MappedFiles) -> Config:
    shared = metadata.integer("expert_shared_feed_forward_length")
    own = {
        "shared_expert_intermediate_size": shared,
        "norm_topk_prob": metadata.flag(NORMALIZED, default=False),
    }
    return _qwen2(metadata, file) | qwen_experts(metadata) | own


def _qwen3moe(metadata: Metadata, file: MappedFiles) -> Config:
    own = {"norm_topk_prob": metadata.flag(NORMALIZED, default=True)}
    return _qwen3(metadata, file) | qwen_experts(metadata) | own


def _gemma(metadata: Metadata, file: MappedFiles) -> Config:
    return rotated_heads(metadata) | {"hidden_activation": "gelu_pytorch_tanh"}


def _scaled_queries(metadata: Metadata, num_layers: int) -> Config:
    """Return by what queries are scaled, which one size of model has of its own."""
    scalar = metadata.head_size()
    if metadata.integer("block_count") == num_layers:
        heads = metadata.integer("attention.head_count")
        scalar = metadata.integer("embedding_length") // heads
    return {"query_pre_attn_scalar": scalar}


def _gemma2(metadata: Metadata, file: MappedFiles) -> Config:
    return {
        **_gemma(metadata, file),
        **_scaled_queries(metadata, _GEMMA2_27B_LAYERS),
        "sliding_window": metadata.integer("attention.sliding_window", 4096),
        **window_layers(metadata, 2),
        "attn_logit_softcapping": metadata.number_or_none("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number_or_none("final_logit_softcapping", 30.0),
    }


def _gemma3(metadata: Metadata, file: MappedFiles) -> Config:
    local = metadata.number("rope.freq_base_swa", _GEMMA3_LOCAL_BASE)
    return {
        **_gemma(metadata, file),
        **_scaled_queries(metadata, _GEMMA3_27B_LAYERS),
        "sliding_window": metadata.integer("attention.sliding_window"),
        **window_layers(metadata, 6),
        "final_logit_softcapping": metadata.number_or_none("final_logit_softcapping"),
        "rope_parameters": {
            "full_attention": rope_parameters(metadata, file),
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }


def _phi3(metadata: Metadata, file: MappedFiles) -> Config:
    size = metadata.head_size()
    rope = rope_parameters(metadata, file)
    rotated = metadata.integer("rope.dimension_count", size)
    rope["partial_rotary_factor"] = rotated / size
    length = metadata.integer("context_length")
    window = metadata.integer("attention.sliding_window", 0, least=0)
    return {
        "rope_parameters": rope,
        "original_max_position_embeddings": rope.get("original_max_position_embeddings", length),
        "sliding_window": window or None,
    }


_LATENT = ROUTED | {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
_GPT_OSS = NORM_BEHIND | {
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GLM4 = {
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": "mlp.gate_up_proj",
}
_LFM2 = {
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
_NORMS_BEHIND = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}

MIXTRAL = Architecture("mixtral", "MixtralForCausalLM", _mixtral, _MIXTRAL, permutes=True)
"""Files state llama, and a number of experts."""
MISTRAL = Architecture("mistral", "MistralForCausalLM", _mistral, permutes=True)
"""Files state mistral3, and no temperature of attention."""
DEEPSEEK_V2 = Architecture(
    "deepseek_v2", "DeepseekV2ForCausalLM", _deepseek_v2, _LATENT, joins=LATENT, drops_drafts=True
)
"""Files state deepseek2, as those of DeepSeek-V3 do, and score experts by softmax."""
ARCHITECTURES: Mapping[str, Architecture] = {
    "deepseek2": Architecture(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        _deepseek_v3,
        _LATENT,
        joins=LATENT,
        drops_drafts=True,
    ),
    "ernie4_5": Architecture("ernie4_5", "Ernie4_5ForCausalLM", _ernie4_5),
    "gemma": Architecture("gemma", "GemmaForCausalLM", _gemma, norm_offset=1.0),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", _gemma2, _FOUR_NORMS, norm_offset=1.0),
    "gemma3": Architecture(
        "gemma3_text", "Gemma3ForCausalLM", _gemma3, _FOUR_NORMS, norm_offset=1.0
    ),
    "glm4": Architecture("glm4", "Glm4ForCausalLM", _glm4, _GLM4),
    "glm4moe": Architecture(
        "glm4_moe", "Glm4MoeForCausalLM", _glm4moe, ROUTED | NORM_BEHIND, drops_drafts=True
    ),
    "gpt-oss": Architecture("gpt_oss", "GptOssForCausalLM", _gpt_oss, _GPT_OSS, joins=GPT_OSS),
    "granite": Architecture("granite", "GraniteForCausalLM", _granite, permutes=True),
    "lfm2": Architecture("lfm2", "Lfm2ForCausalLM", _lfm2, _LFM2),
    "llama": Architecture("llama", "LlamaForCausalLM", llama_config, permutes=True),
    "mistral3": Architecture("ministral3", "Ministral3ForCausalLM", _ministral3, permutes=True),
    "olmo2": Architecture("olmo2", "Olmo2ForCausalLM", _olmo2, _NORMS_BEHIND),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", _phi3, _FUSED),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _qwen2),
    "qwen2moe": Architecture("qwen2_moe", "Qwen2MoeForCausalLM", _qwen2moe, EXPERTS | SHARED),
    "qwen2vl": Architecture("qwen2", "Qwen2ForCausalLM", _without_images(_qwen2)),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _qwen3),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", _qwen3moe, EXPERTS),
    "qwen35": QWEN35,
    "qwen35moe": QWEN35MOE,
    "qwen3next": QWEN3NEXT,
    "qwen3vl": Architecture("qwen3", "Qwen3ForCausalLM", _without_images(_qwen3)),
    "qwen3vlmoe": Architecture(
        "qwen3_moe", "Qwen3MoeForCausalLM", _without_images(_qwen3moe), EXPERTS
    ),
    "seed_oss": Architecture("seed_oss", "SeedOssForCausalLM", _seed_oss, NORM_BEHIND),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", _smollm3, permutes=True),
}
"""By `general.architecture`. Mistral's files state llama."""
