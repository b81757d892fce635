"""Writes small GGUF files with the `gguf` package, and plain checkpoints with the same weights.

Names of tensors are those of the package's own table. Its quantizers make the blocks of 32 values;
for the K types, which it only dequantizes, blocks are random, and their values are the weights.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PretrainedConfig

from tests.worker.checkpoints import SHAPE, build_checkpoint
from tests.worker.gguf.gguf_layouts import AFTER_PARTS, LAYOUTS
from tests.worker.gguf.layout import Layout, then

WIDE: dict[str, Any] = SHAPE | {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
"""Every matrix has whole blocks of 256 inputs."""
_WRITER_ARCHITECTURES = {
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "gemma3_text": "gemma3",
    "glm4_moe": "glm4moe",
    "glm4_moe_lite": "deepseek2",
    "gpt_oss": "gpt-oss",
    "ministral3": "mistral3",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_5_text": "qwen35",
    "qwen3_next": "qwen3next",
    "qwen3_moe": "qwen3moe",
}
"""`general.architecture` by `model_type`, where they differ."""
_NAMES_OF = {"cohere2moe": "dots1", "mellum": "qwen3moe"}
"""The architecture whose names of tensors are used for one that the package lacks."""
PERMUTED = frozenset(
    {"llama", "ministral3", "mistral", "mixtral", "granite", "smollm3", "arcee", "olmo"}
    | {"granitemoe", "granitemoeshared", "granitemoehybrid"}
)
"""Types whose queries and keys llama.cpp stores in pairs of rows."""
_NOT_PERMUTED = frozenset({"exaone", "pangu-embedded"})
"""Architectures whose files have them as checkpoints do."""
_OFFSET_NORMS = frozenset({"gemma", "gemma2", "gemma3_text", "nemotron"})
_LAYER_NORM_EPSILONS = ("layer_norm_eps", "norm_epsilon")
"""The names of LayerNorm's epsilon in configurations; Nemotron's is `norm_eps`."""
_LAYER_NORM_TYPES = frozenset({"gpt2", "gpt_bigcode", "bloom", "mpt", "falcon"})
"""Types whose `layer_norm_epsilon` is one of LayerNorm."""
_WHOLE_LATENTS = frozenset({"deepseek_v2", "minicpm3"})
"""Types whose files have keys and values of latent vectors in one matrix."""
_PLAIN_ENDS = ("conv.weight", "conv1d.weight", ".bias", "ssm_a", "ssm_d", "ssm_norm.weight")
_EXPERT_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


class Vocabulary(NamedTuple):
    """The tokens of a file, and the keys that describe them."""

    tokens: list[str]
    types: list[int]
    keys: Mapping[str, Any]
    """`tokenizer.ggml.KEY`: merges, scores, ids and flags."""


def byte_vocabulary(size: int) -> Vocabulary:
    """Return the 256 bytes behind three control tokens, and unused tokens up to a size."""
    alphabet = [chr(code) for code in range(256, 512)]
    for code in (*range(33, 127), *range(161, 173), *range(174, 256)):
        alphabet[code] = chr(code)
    places = [code for code in range(256) if ord(alphabet[code]) >= 256]
    for place, code in enumerate(places):
        alphabet[code] = chr(256 + place)
    tokens = ["<pad>", "<s>", "</s>", *alphabet, "th"]
    types = [3, 3, 3, *[1] * 257]
    unused = range(len(tokens), size)
    keys = {
        **{"model": "gpt2", "pre": "llama-bpe", "merges": ["t h"]},
        **{"bos_token_id": 1, "eos_token_id": 2, "padding_token_id": 0, "add_bos_token": True},
    }
    names = [*tokens, *(f"[PAD{number}]" for number in unused)]
    return Vocabulary(names[:size], [*types, *[5] * len(unused)][:size], keys)


def write_gguf(
    directory: Path,
    config: PretrainedConfig,
    type: Type,
    *,
    types: Callable[[str], Type | None] = lambda name: None,
    vocabulary: Vocabulary | None = None,
    fuses_experts: bool = False,
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    tensors_per_part: int = 0,
    architecture: str = "",
    layout: Layout | None = None,
) -> tuple[Path, Path]:
    """Return a file, and a plain checkpoint in float32 with the values of its blocks.

    `architecture` and `layout` are those of the file, where they are not those of the
    configuration's type.
    `types` returns that of a tensor, by its name in the file, where it is not `type`; norms are
    plain. With `fuses_experts` gates and factors of experts are one tensor. `keys` and `tensors`
    are further ones, which the checkpoint has in config.json. With `tensors_per_part` it is the
    first part, which has keys and no tensors.
    """
    reference = directory / "reference"
    layout = layout or layout_of(config)
    architecture = architecture or _WRITER_ARCHITECTURES.get(config.model_type, config.model_type)
    weights = layout.apart(_random_weights(reference, config), config)
    if fuses_experts:
        weights = _fused(weights)
    path = directory / "tiny.gguf"
    writer = gguf.GGUFWriter(
        path,
        architecture,
        split_max_tensors=tensors_per_part,
        small_first_shard=tensors_per_part > 0,
    )
    _add_keys(writer, config, keys or {})
    _add_vocabulary(writer, vocabulary or byte_vocabulary(config.vocab_size))
    for name, sources in _stored_names(weights, architecture, config).items():
        stored = np.stack(
            [_to_file(source, weights[source], config, architecture) for source in sources]
        )
        is_stack = ".experts.0." in sources[0]
        stored = stored if is_stack else stored[0]
        stored = stored.squeeze(1) if "conv.weight" in name else stored
        is_plain = stored.ndim == 1 or name.endswith(_PLAIN_ENDS)
        own = Type.F32 if is_plain else types(name)
        own = type if own is None else own
        blocks, values = _encode(stored, own)
        fused = name.replace("gate_exps", "gate_up_exps") if fuses_experts else name
        writer.add_tensor(fused, blocks, raw_dtype=own)
        for source, value in zip(sources, values if is_stack else [values], strict=True):
            weights[source] = _from_file(source, torch.from_numpy(value), config, architecture)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    _finish(writer)
    _save(reference, layout.together(_unfused(weights) if fuses_experts else weights, config))
    if tensors_per_part:
        [path] = directory.glob("tiny-00001-of-*.gguf")
    return path, reference


def _random_weights(reference: Path, config: PretrainedConfig) -> dict[str, torch.Tensor]:
    """Make a checkpoint, and return its weights in float32."""
    build_checkpoint(reference, config)
    weights = {
        name: tensor.float() for name, tensor in load_file(reference / "model.safetensors").items()
    }
    for name, tensor in weights.items():
        if name.endswith(("e_score_correction_bias", "expert_bias")):  # zeros
            tensor.normal_(0.0, 0.1)
    return weights


def _save(reference: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Give a checkpoint other weights, in float32."""
    save_file(
        {name: tensor.contiguous() for name, tensor in weights.items()},
        reference / "model.safetensors",
        metadata={"format": "pt"},
    )
    settings = json.loads((reference / "config.json").read_text()) | {"dtype": "float32"}
    (reference / "config.json").write_text(json.dumps(settings))


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def layout_of(config: PretrainedConfig) -> Layout:
    """Return what is done with the weights of a type of model."""
    usual = Layout(_taken_apart, _put_together)
    if config.model_type in AFTER_PARTS:
        return then(usual, AFTER_PARTS[config.model_type])
    return LAYOUTS.get(config.model_type, usual)


def _taken_apart(
    weights: Mapping[str, torch.Tensor], config: PretrainedConfig
) -> dict[str, torch.Tensor]:
    """Return weights with the names and parts that llama.cpp gives to those of gpt-oss and MLA."""
    parts = {}
    for name, weight in weights.items():
        base, _, own = name.rpartition(".")
        kind = "bias" if own.endswith("_bias") else "weight"
        tensor = weight.transpose(1, 2) if weight.ndim == 3 and kind == "weight" else weight
        match own.removesuffix("_bias"):
            case "gate_up_proj":
                parts[f"{base}.gate_proj.{kind}"] = tensor[:, ::2].contiguous()
                parts[f"{base}.up_proj.{kind}"] = tensor[:, 1::2].contiguous()
            case "down_proj":
                parts[f"{base}.down_proj.{kind}"] = tensor.contiguous()
            case "sinks":
                parts[f"{name}.weight"] = tensor
            case "e_score_correction":
                parts[f"{base}.e_score_correction.bias"] = tensor
            case _ if base.endswith("kv_b_proj") and config.model_type not in _WHOLE_LATENTS:
                heads = tensor.view(config.num_attention_heads, -1, config.kv_lora_rank)
                sizes = (config.qk_nope_head_dim, config.v_head_dim)
                keys, values = heads.split(sizes, 1)
                parts[f"{base[:-9]}k_b_proj.weight"] = keys.transpose(1, 2).contiguous()
                parts[f"{base[:-9]}v_b_proj.weight"] = values.contiguous()
            case _:
                parts[name] = weight
    return parts


def _put_together(
    parts: Mapping[str, torch.Tensor], config: PretrainedConfig
) -> dict[str, torch.Tensor]:
    weights = {}
    for name, tensor in parts.items():
        base, _, kind = name.rpartition(".")
        own = "_bias" if kind == "bias" else ""
        if base.endswith(".experts.gate_proj"):
            factors = parts[name.replace("gate_proj", "up_proj")]
            joined = torch.stack((tensor, factors), 2).flatten(1, 2)
            joined = joined if own else joined.transpose(1, 2)
            weights[f"{base[:-9]}gate_up_proj{own}"] = joined
        elif base.endswith(".experts.down_proj"):
            weights[f"{base}{own}"] = tensor if own else tensor.transpose(1, 2)
        elif base.endswith("sinks"):
            weights[base] = tensor
        elif base.endswith("e_score_correction"):
            weights[f"{base}_bias"] = tensor
        elif base.endswith("k_b_proj"):
            values = parts[name.replace("k_b_proj", "v_b_proj")]
            both = torch.cat((tensor.transpose(1, 2), values), 1).flatten(0, 1)
            weights[name.replace("k_b_proj", "kv_b_proj")] = both
        elif not base.endswith((".experts.up_proj", ".v_b_proj")):
            weights[name] = tensor
    return weights


def _fused(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return weights whose gates of experts have the factors below them."""
    fused = {name: one for name, one in weights.items() if ".up_proj" not in name}
    gates = [name for name in fused if ".experts." in name and ".gate_proj" in name]
    for name in gates:
        fused[name] = torch.cat((weights[name], weights[name.replace("gate", "up")]))
    return fused


def _unfused(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    parts = dict(weights)
    for name in weights:
        if ".experts." in name and ".gate_proj" in name:
            parts[name], parts[name.replace("gate", "up")] = weights[name].chunk(2)
    return parts


def write_random_gguf(path: Path, config: PretrainedConfig, type: Type) -> None:
    """Write a file of some size, with random blocks, the same in all tensors of a shape."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    weights = dict(model.named_parameters())
    architecture = _WRITER_ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture)
    _add_keys(writer, config, {})
    _add_vocabulary(writer, byte_vocabulary(config.vocab_size))
    made: dict[tuple[int, ...], np.ndarray] = {}
    for name, [source] in _stored_names(weights, architecture, config).items():
        shape = tuple(weights[source].shape)
        if shape not in made:
            is_plain = len(shape) == 1
            made[shape] = np.ones(shape, np.float32) if is_plain else random_blocks(shape, type)
        writer.add_tensor(name, made[shape], raw_dtype=Type.F32 if len(shape) == 1 else type)
    _finish(writer)


def _add_keys(
    writer: gguf.GGUFWriter, config: PretrainedConfig, further: Mapping[str, Any]
) -> None:
    writer.add_context_length(getattr(config, "max_position_embeddings", 256))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers + further.get("nextn_predict_layers", 0))
    widths = getattr(config, "intermediate_size", 2 * config.hidden_size)
    writer.add_feed_forward_length(widths[0] if isinstance(widths, list) else widths)
    _add_epsilon(writer, config)
    if hasattr(config, "num_attention_heads"):
        _add_attention(writer, config, further)
    for key, add in {
        "num_experts": writer.add_expert_count,
        "num_local_experts": writer.add_expert_count,
        "n_routed_experts": writer.add_expert_count,
        "n_shared_experts": writer.add_expert_shared_count,
        "n_group": writer.add_expert_group_count,
        "topk_group": writer.add_expert_group_used_count,
        "routed_scaling_factor": writer.add_expert_weights_scale,
        "first_k_dense_replace": writer.add_leading_dense_block_count,
        "num_experts_per_tok": writer.add_expert_used_count,
        "moe_intermediate_size": writer.add_expert_feed_forward_length,
        "shared_expert_intermediate_size": writer.add_expert_shared_feed_forward_length,
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
        "embedding_multiplier": writer.add_embedding_scale,
        "residual_multiplier": writer.add_residual_scale,
        "attention_multiplier": writer.add_attention_scale,
        "logits_scaling": writer.add_logit_scale,
    }.items():
        if getattr(config, key, None) is not None and config.model_type != "falcon_h1":
            add(getattr(config, key))
    if getattr(config, "sliding_window", None) and config.model_type != "mistral":
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "gpt_oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)
    for key, value in further.items():
        name = key if key.startswith("xielu.") else f"{writer.arch}.{key}"
        {
            str: writer.add_string,
            bool: writer.add_bool,
            float: writer.add_float32,
            int: writer.add_uint32,
            list: writer.add_array,
        }[type(value)](name, value)


def _add_epsilon(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    """Add the epsilon of norms, of which OLMo has none to state."""
    names = _LAYER_NORM_EPSILONS
    names += ("norm_eps",) if config.model_type == "nemotron" else ()
    names += ("layer_norm_epsilon",) if config.model_type in _LAYER_NORM_TYPES else ()
    stated = next((name for name in names if hasattr(config, name)), None)
    if stated is not None:
        writer.add_layer_norm_eps(getattr(config, stated))
        return
    names = ("norm_eps", "rms_norm_eps", "layer_norm_epsilon")
    stated = next((name for name in names if getattr(config, name, None)), None)
    if stated is not None:
        writer.add_layer_norm_rms_eps(getattr(config, stated))


def _add_attention(
    writer: gguf.GGUFWriter, config: PretrainedConfig, further: Mapping[str, Any]
) -> None:
    writer.add_head_count(config.num_attention_heads)
    if "attention.head_count_kv" not in further:
        writer.add_head_count_kv(_kv_heads(config))
    rope = getattr(config, "rope_parameters", None) or {"rope_theta": 10_000.0}
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast", 32.0))
        writer.add_rope_scaling_yarn_beta_slow(rope.get("beta_slow", 1.0))
    full = rope.get("full_attention", rope)
    writer.add_rope_freq_base(float(full.get("rope_theta", 10_000.0)))
    if hasattr(config, "kv_lora_rank"):
        _add_latent_keys(writer, config)
    elif config.model_type != "gemma4_text":  # whose layers have several sizes
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        writer.add_key_length(size)
        writer.add_value_length(size)
        writer.add_rope_dimension_count(int(size * rope.get("partial_rotary_factor", 1.0)))


def _add_latent_keys(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    """Add the sizes of heads; old files, here those of DeepSeek-V2, state no latent ones."""
    size = config.qk_nope_head_dim + config.qk_rope_head_dim
    if config.model_type in _WHOLE_LATENTS:
        writer.add_key_length(size)
        writer.add_value_length(config.v_head_dim)
    else:
        writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(size)
        writer.add_value_length_mla(config.v_head_dim)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)


def _kv_heads(config: PretrainedConfig) -> int | list[int]:
    """Return the heads of keys, for each layer where some have none."""
    if config.model_type == "gemma4_text":
        return [own.num_key_value_heads for own in config.per_layer_config]
    if hasattr(config, "kv_lora_rank") and config.model_type not in _WHOLE_LATENTS:
        return 1
    if not config.model_type.startswith("lfm2"):
        return int(getattr(config, "num_key_value_heads", config.num_attention_heads))
    writes = [kind != "conv" for kind in config.layer_types]
    return [config.num_key_value_heads * has_keys for has_keys in writes]


def _add_vocabulary(writer: gguf.GGUFWriter, vocabulary: Vocabulary) -> None:
    writer.add_array("tokenizer.ggml.tokens", vocabulary.tokens)
    writer.add_array("tokenizer.ggml.token_type", vocabulary.types)
    for key, value in vocabulary.keys.items():
        name = f"tokenizer.{key}" if key == "chat_template" else f"tokenizer.ggml.{key}"
        {
            str: writer.add_string,
            bool: writer.add_bool,
            int: writer.add_uint32,
            list: writer.add_array,
        }[type(value)](name, value)


def _stored_names(
    weights: Mapping[str, torch.Tensor], architecture: str, config: PretrainedConfig
) -> dict[str, list[str]]:
    """Return the names of the file, with those of the checkpoint's tensors that each one holds."""
    known = _NAMES_OF.get(architecture, architecture)
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == known)
    table = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    found: dict[str, list[str]] = {}
    for name in weights:
        if (own := table.get_name(name)) is not None:  # one without an end
            found.setdefault(own, []).append(name)
            continue
        base, _, leaf = name.rpartition(".")
        before, is_expert, rest = base.partition(".experts.")
        if is_expert and "." in rest:
            base = f"{re.sub('block_sparse_moe|mixer|feed_forward', 'mlp', before)}.experts"
            base = base.replace("backbone.", "model.")
            part = rest.partition(".")[2]
            base = f"{base}.{_EXPERT_NAMES.get(part, part)}"
        stored = "output" if base == "lm_head" else table.get_name(base)  # Gemma's files tie it
        if stored is None and base.endswith(".self_attn.query_key_value"):
            stored = f"blk.{base.split('.')[2]}.attn_qkv"  # of MiMo-V2, which the package lacks
        assert stored is not None, name
        found.setdefault(f"{stored}.{leaf}", []).append(name)
    for sources in found.values():
        sources.sort(key=lambda name: [int(x) if x.isdigit() else x for x in name.split(".")])
    return found


def _to_file(
    name: str, tensor: torch.Tensor, config: PretrainedConfig, architecture: str
) -> np.ndarray:
    if name.endswith("norm.weight") and config.model_type in _OFFSET_NORMS:
        tensor = tensor + 1
    if (num_heads := _permuted_heads(name, config, architecture)) is not None:
        halves = tensor.view(num_heads, 2, -1, *tensor.shape[1:])
        tensor = halves.transpose(1, 2).reshape(tensor.shape)
    return tensor.numpy()


def _from_file(
    name: str, tensor: torch.Tensor, config: PretrainedConfig, architecture: str
) -> torch.Tensor:
    if name.endswith("conv.conv.weight"):
        return tensor.unsqueeze(1)
    if (num_heads := _permuted_heads(name, config, architecture)) is not None:
        pairs = tensor.view(num_heads, -1, 2, *tensor.shape[1:])
        tensor = pairs.transpose(1, 2).reshape(tensor.shape)
    if name.endswith("norm.weight") and config.model_type in _OFFSET_NORMS:
        tensor = tensor - 1
    return tensor


def _permuted_heads(name: str, config: PretrainedConfig, architecture: str) -> int | None:
    if config.model_type not in PERMUTED or architecture in _NOT_PERMUTED:
        return None
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    return heads.get(name.split(".")[-2])


def _encode(values: np.ndarray, type: Type) -> tuple[np.ndarray, np.ndarray]:
    """Return what is stored of a tensor, and the values that it stands for."""
    if type in (Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.Q3_K, Type.IQ4_XS):
        stored = random_blocks(values.shape, type)
    else:
        stored = gguf.quants.quantize(values, type)
    return stored, gguf.quants.dequantize(stored, type).reshape(values.shape)


def random_blocks(shape: tuple[int, ...], type: Type, scale: float = 3e-4) -> np.ndarray:
    """Return random blocks whose scales in fp16 are finite and of some size."""
    num_values, num_bytes = gguf.GGML_QUANT_SIZES[type]
    generator = np.random.default_rng(sum(shape))
    count = (*shape[:-1], shape[-1] // num_values)
    blocks = generator.integers(0, 256, (*count, num_bytes), dtype=np.uint8)
    for place in halves_of(type):
        numbers = (generator.standard_normal(count) * scale).astype(np.float16)
        blocks[..., place : place + 2] = numbers[..., None].view(np.uint8)
    if type is Type.MXFP4:  # the exponent of a power of two
        blocks[..., 0] = generator.integers(116, 124, count)
    return blocks.reshape(*shape[:-1], -1)


def halves_of(type: Type) -> tuple[int, ...]:
    """Return where a block has numbers in fp16."""
    if type is Type.MXFP4:
        return ()
    if type in (Type.Q4_1, Type.Q5_1, Type.Q4_K, Type.Q5_K):
        return (0, 2)
    return ({Type.Q6_K: 208, Type.Q3_K: 108}.get(type, 0),)
