"""GGUF architectures of decoders with one MLP in each layer."""

from collections.abc import Callable, Mapping

from worker_proc.gguf.architecture import (
    LAYER_NORM_EPSILON,
    LOCAL_BASE,
    LOG_MULTIPLIER,
    NORM_BEHIND,
    NORMS_BEHIND,
    TEMPERATURE,
    WINDOW,
    Architecture,
    Config,
    Constant,
    before_drafts,
    check_rotates,
    has_bias,
    has_tensor,
    llama_config,
    partly_rotated,
    rotated_heads,
    scales,
    window_layers,
)
from worker_proc.gguf.layer_norms import split_queries
from worker_proc.gguf.mapped import MappedFiles
from worker_proc.gguf.metadata import Metadata
from worker_proc.gguf.rotary import rope_parameters

_ALPHA = "rope.scaling.alpha"
"""The key of a number: the base of the rotary embedding is multiplied by a power of it."""
_MINICPM_BASE_WIDTH = 256
"""Logits are divided by the quotient of the model's width and this one."""
_EXAONE4_32B_LAYERS, _EXAONE4_WINDOW = 64, 4096
"""The layers and the window of EXAONE-4 32B, whose older files do not state the window."""
_SMOLLM3_NO_ROPE_INTERVAL = 4
"""Every fourth layer has no rotary embedding."""
_XIELU = ("alpha_p", "alpha_n"), ("beta", "eps")
"""Parameters of Apertus' activation: vectors of one value, and single values."""


def _mistral(metadata: Metadata, file: MappedFiles) -> Config:
    """Return what Mistral Small has, whose files state mistral3 as those of Ministral 3 do."""
    metadata.get(TEMPERATURE)
    return rotated_heads(metadata) | {
        "sliding_window": None,
        "rope_parameters": with_mscale(metadata, file),
    }


def _ministral3(metadata: Metadata, file: MappedFiles) -> Config:
    rope = with_mscale(metadata, file)
    if rope["rope_type"] != "yarn":
        raise metadata.unsupported("rope.scaling.type", f'"yarn" beside {TEMPERATURE}')
    rope["llama_4_scaling_beta"] = metadata.number(TEMPERATURE)
    return rotated_heads(metadata) | {"sliding_window": None, "rope_parameters": rope}


def with_mscale(metadata: Metadata, file: MappedFiles) -> Config:
    """Return parameters of the rotary embedding with what keeps YaRN from scaling angles."""
    rope = rope_parameters(metadata, file)
    all_dim = metadata.number_or_none(LOG_MULTIPLIER)
    if all_dim is not None and rope["rope_type"] != "yarn":
        raise metadata.unsupported(LOG_MULTIPLIER, "0 without YaRN")
    return rope if all_dim is None else rope | {"mscale": 1.0, "mscale_all_dim": all_dim}


def granite_config(metadata: Metadata, file: MappedFiles) -> Config:
    """Return what Granite and its mixtures have: scales, and biases as Llama."""
    check_rotates(metadata)
    return llama_config(metadata, file) | scales(metadata)


def _minicpm(metadata: Metadata, file: MappedFiles) -> Config:
    """Return what MiniCPM has: it is computed as Granite is.

    Old files do not state its scales, which are then those of all its models.
    """
    depth = metadata.integer("block_count") ** 0.5
    width = metadata.integer("embedding_length") / _MINICPM_BASE_WIDTH
    return llama_config(metadata, file) | {
        "attention_multiplier": metadata.head_size() ** -0.5,
        "embedding_multiplier": metadata.number("embedding_scale", 12.0),
        "residual_multiplier": metadata.number("residual_scale", 1.4 / depth),
        "logits_scaling": metadata.number("logit_scale", width),
    }


def _smollm3(metadata: Metadata, file: MappedFiles) -> Config:
    return rotated_heads(metadata) | {"no_rope_layer_interval": _SMOLLM3_NO_ROPE_INTERVAL}


def qwen2_config(metadata: Metadata, file: MappedFiles) -> Config:
    size = metadata.integer("embedding_length") // metadata.integer("attention.head_count")
    if rotated_heads(metadata)["head_dim"] != size:
        raise metadata.unsupported("attention.key_length", str(size))
    return {"use_sliding_window": False}


def qwen3_config(metadata: Metadata, file: MappedFiles) -> Config:
    own = {"attention_bias": has_bias(file, "attn_q"), "use_sliding_window": False}
    return rotated_heads(metadata) | own


def without_images(
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


def _glm(metadata: Metadata, file: MappedFiles) -> Config:
    """Return what ChatGLM-3 and GLM-4-9B have, whose queries, keys and values may be one tensor."""
    has_biases = has_bias(file, "attn_q") or has_bias(file, "attn_qkv")
    return partly_rotated(metadata, file) | {"attention_bias": has_biases}


def glm4_config(metadata: Metadata, file: MappedFiles) -> Config:
    return partly_rotated(metadata, file) | {"attention_bias": has_bias(file, "attn_q")}


def _ernie4_5(metadata: Metadata, file: MappedFiles) -> Config:
    return rotated_heads(metadata) | {"use_bias": has_bias(file, "attn_q")}


def _olmo(metadata: Metadata, file: MappedFiles) -> Config:
    clip = metadata.number_or_none("attention.clamp_kqv")
    return qwen2_config(metadata, file) | {"clip_qkv": clip, "attention_bias": False}


def _olmo2(metadata: Metadata, file: MappedFiles) -> Config:
    qwen2_config(metadata, file)  # its heads have the same sizes
    return {"attention_bias": False}


def _olmo3(metadata: Metadata, file: MappedFiles) -> Config:
    """Return what OLMo-3 has, whose files state olmo2; only full attention scales angles."""
    rope = rope_parameters(metadata, file)
    base = metadata.number(LOCAL_BASE, rope["rope_theta"])
    local = {"rope_type": "default", "rope_theta": base}
    return {
        **_olmo2(metadata, file),
        **window_layers(metadata, 4),
        "sliding_window": metadata.integer(WINDOW),
        "rope_parameters": {"full_attention": rope, "sliding_attention": local},
    }


def _seed_oss(metadata: Metadata, file: MappedFiles) -> Config:
    return llama_config(metadata, file) | {"attention_out_bias": has_bias(file, "attn_output")}


def _phi3(metadata: Metadata, file: MappedFiles) -> Config:
    size = metadata.head_size()
    rope = rope_parameters(metadata, file)
    rope["partial_rotary_factor"] = metadata.rotated_share(size)
    length = metadata.integer("context_length")
    window = metadata.integer("attention.sliding_window", 0, min_value=0)
    return {
        "rope_parameters": rope,
        "original_max_position_embeddings": rope.get("original_max_position_embeddings", length),
        "sliding_window": window or None,
    }


def _apertus(metadata: Metadata, file: MappedFiles) -> Config:
    return rotated_heads(metadata) | {"attention_bias": has_bias(file, "attn_q")}


def _xielu(metadata: Metadata) -> Mapping[str, Constant]:
    """Return the parameters of Apertus' activation, which files have as keys."""
    count = metadata.integer("block_count")
    found = {}
    for names, shape in zip(_XIELU, ((1,), ()), strict=True):
        for name in names:
            values = metadata.shared_numbers(f"xielu.{name}", count)
            for layer, value in enumerate(values):
                found[f"model.layers.{layer}.mlp.act_fn.{name}"] = Constant(value, shape)
    return found


def _exaone4(metadata: Metadata, file: MappedFiles) -> Config:
    """Return what EXAONE-4 has; its small model has no windows, and rotates in all layers."""
    count = before_drafts(metadata)
    if metadata.get(WINDOW) is None and count != _EXAONE4_32B_LAYERS:
        kinds = ["full_attention"] * count
        return rotated_heads(metadata) | {"sliding_window": None, "layer_types": kinds}
    return {
        **rotated_heads(metadata),
        **window_layers(metadata, 4, count),
        "sliding_window": metadata.integer(WINDOW, _EXAONE4_WINDOW),
    }


def _cohere(metadata: Metadata, file: MappedFiles) -> Config:
    return qwen2_config(metadata, file) | {
        "layer_norm_eps": metadata.number(LAYER_NORM_EPSILON),
        "logit_scale": metadata.number("logit_scale"),
        "use_qk_norm": has_tensor(file, "attn_q_norm.weight"),
        "attention_bias": has_bias(file, "attn_q"),
    }


def _cohere2(metadata: Metadata, file: MappedFiles) -> Config:
    return {
        **rotated_heads(metadata),
        **window_layers(metadata, 4),
        "sliding_window": metadata.integer(WINDOW),
        "layer_norm_eps": metadata.number(LAYER_NORM_EPSILON),
        "logit_scale": metadata.number("logit_scale"),
        "attention_bias": False,
    }


def _starcoder2(metadata: Metadata, file: MappedFiles) -> Config:
    """Return what StarCoder2 has; llama.cpp computes it without the window of its models."""
    return qwen2_config(metadata, file) | {
        "norm_epsilon": metadata.number(LAYER_NORM_EPSILON),
        "sliding_window": None,
        "use_bias": has_bias(file, "attn_q"),
    }


def hunyuan_config(metadata: Metadata, file: MappedFiles) -> Config:
    return rotated_heads(metadata) | {"attention_bias": has_bias(file, "attn_q")}


def _hunyuan_vl(metadata: Metadata, file: MappedFiles) -> Config:
    """Return what Hunyuan-VL has for texts; its files state the base before it is scaled."""
    own, rope = hunyuan_config(metadata, file), rope_parameters(metadata, file)
    size, alpha = own["head_dim"], metadata.number_or_none(_ALPHA) or 1.0
    rope["rope_theta"] *= alpha ** (size / max(size - 2, 1))
    return own | {"rope_parameters": rope}


def _nemotron(metadata: Metadata, file: MappedFiles) -> Config:
    return partly_rotated(metadata, file) | {
        "norm_eps": metadata.number(LAYER_NORM_EPSILON),
        "attention_bias": has_bias(file, "attn_q"),
        "mlp_bias": has_bias(file, "ffn_up"),
    }


_GLM4 = {
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": "mlp.gate_up_proj",
}
_GLM = {"ffn_up": "mlp.gate_up_proj"}
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_APERTUS = {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"}
_STARCODER2 = {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
HUNYUAN = {
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
}

MISTRAL = Architecture("mistral", "MistralForCausalLM", _mistral, permutes=True)
"""Files state mistral3, and no temperature of attention."""
OLMO3 = Architecture("olmo3", "Olmo3ForCausalLM", _olmo3, NORMS_BEHIND)
"""Files state olmo2, and a window."""
DENSE: Mapping[str, Architecture] = {
    "apertus": Architecture("apertus", "ApertusForCausalLM", _apertus, _APERTUS, constants=_xielu),
    "arcee": Architecture("arcee", "ArceeForCausalLM", llama_config, permutes=True),
    "chatglm": Architecture("glm", "GlmForCausalLM", _glm, _GLM, splits=split_queries),
    "cohere2": Architecture("cohere2", "Cohere2ForCausalLM", _cohere2, has_rms_norms=False),
    "command-r": Architecture("cohere", "CohereForCausalLM", _cohere, has_rms_norms=False),
    "ernie4_5": Architecture("ernie4_5", "Ernie4_5ForCausalLM", _ernie4_5),
    "exaone": Architecture("llama", "LlamaForCausalLM", llama_config),
    "exaone4": Architecture(
        "exaone4", "Exaone4ForCausalLM", _exaone4, NORMS_BEHIND, drops_drafts=True
    ),
    "glm4": Architecture("glm4", "Glm4ForCausalLM", glm4_config, _GLM4),
    "granite": Architecture("granite", "GraniteForCausalLM", granite_config, permutes=True),
    "hunyuan-dense": Architecture(
        "hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", hunyuan_config, HUNYUAN
    ),
    "hunyuan_vl": Architecture(
        "hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", without_images(_hunyuan_vl), HUNYUAN
    ),
    "internlm2": Architecture("llama", "LlamaForCausalLM", llama_config, permutes=True),
    "llama": Architecture("llama", "LlamaForCausalLM", llama_config, permutes=True),
    "minicpm": Architecture("granite", "GraniteForCausalLM", _minicpm, permutes=True),
    "mistral3": Architecture("ministral3", "Ministral3ForCausalLM", _ministral3, permutes=True),
    "nemotron": Architecture(
        "nemotron", "NemotronForCausalLM", _nemotron, norm_offset=1.0, has_rms_norms=False
    ),
    "olmo": Architecture("olmo", "OlmoForCausalLM", _olmo, permutes=True, has_rms_norms=False),
    "olmo2": Architecture("olmo2", "Olmo2ForCausalLM", _olmo2, NORMS_BEHIND),
    "pangu-embedded": Architecture("llama", "LlamaForCausalLM", llama_config),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", _phi3, _FUSED),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", qwen2_config),
    "qwen2vl": Architecture("qwen2", "Qwen2ForCausalLM", without_images(qwen2_config)),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", qwen3_config),
    "qwen3vl": Architecture("qwen3", "Qwen3ForCausalLM", without_images(qwen3_config)),
    "seed_oss": Architecture("seed_oss", "SeedOssForCausalLM", _seed_oss, NORM_BEHIND),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", _smollm3, permutes=True),
    "starcoder2": Architecture(
        "starcoder2", "Starcoder2ForCausalLM", _starcoder2, _STARCODER2, has_rms_norms=False
    ),
    "xverse": Architecture("llama", "LlamaForCausalLM", llama_config, permutes=True),
}
"""The architectures, by `general.architecture`.

Mistral's files state llama. EXAONE, Pangu and XVERSE are computed like Llama.
"""
