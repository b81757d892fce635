"""GGUF architectures of decoders with LayerNorm, most of them from before Llama.

Files of some have queries, keys and values as one tensor, in another order than checkpoints.
"""

from collections.abc import Mapping

import torch

from worker_proc.gguf.architecture import (
    KV_HEADS,
    LAYER_NORM_EPSILON,
    Architecture,
    Config,
    check_head_size,
    has_bias,
    has_tensor,
    partly_rotated,
    rotated_heads,
)
from worker_proc.gguf.changes import Change
from worker_proc.gguf.mapped import MappedFiles
from worker_proc.gguf.metadata import Metadata

_HEADS, _WIDTH, _LENGTH = "attention.head_count", "feed_forward_length", "context_length"
_CLAMP, _ALIBI = "attention.clamp_kqv", "attention.max_alibi_bias"
_PARALLEL = "use_parallel_residual"
_MAX_NORMED_HEADS = 4096
"""The maximum number of heads in StableLM, where each head has a separate norm."""
_TRANSPOSED = Change(transposes=True)
"""The change of GPT-2's matrices, whose rows are the inputs in checkpoints."""


def _check_as_many_keys(metadata: Metadata) -> None:
    """Raise UnsupportedModel unless each head has separate keys."""
    heads = metadata.integer(_HEADS)
    if metadata.integer(KV_HEADS, heads) != heads:
        raise metadata.unsupported(KV_HEADS, f"{heads}, the number of all heads")


def _check_width(metadata: Metadata) -> None:
    """Raise UnsupportedModel unless an MLP is four times as wide as the model."""
    width = 4 * metadata.integer("embedding_length")
    if metadata.integer(_WIDTH, width) != width:
        raise metadata.unsupported(_WIDTH, f"{width}, four times embedding_length")


def _gpt2(metadata: Metadata, file: MappedFiles) -> Config:
    check_head_size(metadata)
    _check_as_many_keys(metadata)
    return {
        "n_inner": metadata.integer(_WIDTH),
        "layer_norm_epsilon": metadata.number(LAYER_NORM_EPSILON),
    }


def _starcoder(metadata: Metadata, file: MappedFiles) -> Config:
    check_head_size(metadata)
    if metadata.integer(KV_HEADS, 0, min_value=0) != 1:
        raise metadata.unsupported(KV_HEADS, "1")
    return {
        "n_inner": metadata.integer(_WIDTH),
        "layer_norm_epsilon": metadata.number(LAYER_NORM_EPSILON),
        "multi_query": True,
    }


def _rotation_and_epsilon(metadata: Metadata, file: MappedFiles) -> Config:
    """Return the rotation of a part of each head, and the epsilon of the norms."""
    check_head_size(metadata)
    return {
        "rope_parameters": partly_rotated(metadata, file)["rope_parameters"],
        "layer_norm_eps": metadata.number(LAYER_NORM_EPSILON),
    }


def _gptneox(metadata: Metadata, file: MappedFiles) -> Config:
    _check_as_many_keys(metadata)
    return _rotation_and_epsilon(metadata, file) | {
        "use_parallel_residual": metadata.flag(_PARALLEL, default=True),
        "attention_bias": has_bias(file, "attn_qkv"),
    }


def _bloom(metadata: Metadata, file: MappedFiles) -> Config:
    for check in (check_head_size, _check_as_many_keys, _check_width):
        check(metadata)
    return {
        "n_layer": metadata.integer("block_count"),
        "n_head": metadata.integer(_HEADS),
        "layer_norm_epsilon": metadata.number(LAYER_NORM_EPSILON),
    }


def _mpt(metadata: Metadata, file: MappedFiles) -> Config:
    """Return what MPT has; transformers' model has no learned positions, and no biases."""
    for check in (check_head_size, _check_as_many_keys, _check_width):
        check(metadata)
    bias = metadata.number_or_none(_ALIBI)
    if bias is None or not bias.is_integer():
        raise metadata.unsupported(_ALIBI, "a whole number from 1 on")
    return {
        "d_model": metadata.integer("embedding_length"),
        "n_heads": metadata.integer(_HEADS),
        "n_layers": metadata.integer("block_count"),
        "max_seq_len": metadata.integer(_LENGTH),
        "layer_norm_epsilon": metadata.number(LAYER_NORM_EPSILON),
        "attn_config": {
            "alibi": True,
            "alibi_bias_max": int(bias),
            "clip_qkv": metadata.number_or_none(_CLAMP),
        },
    }


def _falcon(metadata: Metadata, file: MappedFiles) -> Config:
    """Return what Falcon has; one with several heads of keys is of the newer kind."""
    check_head_size(metadata)
    rotated_heads(metadata)  # its sizes follow from others
    num_keys = metadata.integer(KV_HEADS, 1)
    return {
        "num_kv_heads": num_keys,
        "new_decoder_architecture": num_keys > 1,
        "num_ln_in_parallel_attn": 1 + has_tensor(file, "attn_norm_2.weight"),
        "multi_query": num_keys == 1,
        "ffn_hidden_size": metadata.integer(_WIDTH),
        "layer_norm_epsilon": metadata.number(LAYER_NORM_EPSILON),
    }


def _stablelm(metadata: Metadata, file: MappedFiles) -> Config:
    """Return what StableLM has; a layer with one norm computes its halves from the same rows."""
    return _rotation_and_epsilon(metadata, file) | {
        "use_qkv_bias": has_bias(file, "attn_q"),
        "qk_layernorm": has_tensor(file, "attn_q_norm.weight"),
        "use_parallel_residual": not has_tensor(file, "ffn_norm.weight"),
    }


def _jais2(metadata: Metadata, file: MappedFiles) -> Config:
    return rotated_heads(metadata) | {
        "layer_norm_eps": metadata.number(LAYER_NORM_EPSILON),
        "attention_bias": has_bias(file, "attn_q"),
        "mlp_bias": has_bias(file, "ffn_up"),
    }


def _transposed(metadata: Metadata) -> Mapping[str, Change]:
    matrices = ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
    return {f"{name}.weight": _TRANSPOSED for name in matrices}


def _by_group(metadata: Metadata) -> Mapping[str, Change]:
    """Return how queries, keys and values come to lie together for each head of keys."""
    heads = metadata.integer(_HEADS)
    num_keys = metadata.integer(KV_HEADS, 1 if metadata.header.architecture == "falcon" else heads)
    if heads % num_keys:
        raise metadata.unsupported(KV_HEADS, f"a number that divides {heads} heads")
    size = metadata.head_size()
    parts = _parts(metadata, heads, num_keys, size)
    queries, keys, values = (rows.view(num_keys, -1) for rows in parts.values())
    change = Change(rows=torch.cat((queries, keys, values), 1).flatten())
    return {"attn_qkv.weight": change, "attn_qkv.bias": change}


def _parts(metadata: Metadata, heads: int, num_keys: int, size: int) -> dict[str, torch.Tensor]:
    """Return the rows of queries, keys and values that lie one below the other."""
    return rows_of_parts(metadata, heads * size, num_keys * size, num_keys * size)


def rows_of_parts(metadata: Metadata, *counts: int) -> dict[str, torch.Tensor]:
    """Return the rows of queries, keys and values, which are as many as `counts` states."""
    metadata.check_num_rows(sum(counts))
    queries, keys, values = torch.arange(sum(counts)).split(counts)
    return {"q": queries, "k": keys, "v": values}


def split_queries(metadata: Metadata) -> Mapping[str, Mapping[str, Change]]:
    """Return how a tensor with queries, keys and values is three weights."""
    heads = metadata.integer(_HEADS)
    parts = _parts(metadata, heads, metadata.integer(KV_HEADS, heads), metadata.head_size())
    return {"attn_qkv": projections(parts)}


def projections(parts: Mapping[str, torch.Tensor]) -> dict[str, Change]:
    """Return the rows of a tensor that are each weight of attention, by its name in a layer."""
    return {f"self_attn.{name}_proj": Change(rows=rows) for name, rows in parts.items()}


def _norms_of_heads(metadata: Metadata) -> Mapping[str, Mapping[str, Change]]:
    """Return how the norms of all heads, which are one tensor, are those of each head."""
    heads = metadata.integer(_HEADS)
    counts = {"q": heads, "k": metadata.integer(KV_HEADS, heads)}
    for key, count in zip((_HEADS, KV_HEADS), counts.values(), strict=True):
        if count > _MAX_NORMED_HEADS:
            raise metadata.unsupported(key, f"at most {_MAX_NORMED_HEADS}")
    return {
        f"attn_{name}_norm": {
            f"self_attn.{name}_layernorm.norms.{number}": Change(
                rows=torch.tensor([number]), values=torch.flatten
            )
            for number in range(count)
        }
        for name, count in counts.items()
    }


_GPT = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_GPT_TOP = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
}
_DENSE = {"ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h"}
_GPTNEOX = _DENSE | {
    "attn_qkv": "attention.query_key_value",
    "attn_output": "attention.dense",
}
_BLOOM = _DENSE | {
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
}
_FALCON_TOP = {"token_embd": "transformer.word_embeddings", "output_norm": "transformer.ln_f"}
_MPT = {
    "attn_norm": "norm_1",
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.out_proj",
    "ffn_norm": "norm_2",
    "ffn_up": "ffn.up_proj",
    "ffn_down": "ffn.down_proj",
}
_PHI2 = {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}

_GPT2 = Architecture(
    "gpt2",
    "GPT2LMHeadModel",
    _gpt2,
    _GPT,
    top=_GPT_TOP,
    changes=_transposed,
    prefix="transformer",
    layers="h",
    has_rms_norms=False,
    rotates=False,
)
_FALCON = Architecture(
    "falcon",
    "FalconForCausalLM",
    _falcon,
    _BLOOM,
    top=_FALCON_TOP,
    changes=_by_group,
    prefix="transformer",
    layers="h",
    has_rms_norms=False,
)
FALCON_TWO_NORMS = _FALCON._replace(
    names=_BLOOM | {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}
)
"""Files state falcon, and have a second norm before attention."""
_STABLELM = Architecture(
    "stablelm", "StableLmForCausalLM", _stablelm, splits=_norms_of_heads, has_rms_norms=False
)
LAYER_NORMS: Mapping[str, Architecture] = {
    "bloom": Architecture(
        "bloom",
        "BloomForCausalLM",
        _bloom,
        _BLOOM,
        top=_FALCON_TOP | {"token_embd_norm": "transformer.word_embeddings_layernorm"},
        changes=_by_group,
        prefix="transformer",
        layers="h",
        has_rms_norms=False,
        rotates=False,
    ),
    "falcon": _FALCON,
    "gpt2": _GPT2,
    "gptneox": Architecture(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        _gptneox,
        _GPTNEOX,
        top={
            "token_embd": "gpt_neox.embed_in",
            "output_norm": "gpt_neox.final_layer_norm",
            "output": "embed_out",
        },
        changes=_by_group,
        prefix="gpt_neox",
        has_rms_norms=False,
    ),
    "jais2": Architecture("jais2", "Jais2ForCausalLM", _jais2, has_rms_norms=False),
    "mpt": Architecture(
        "mpt",
        "MptForCausalLM",
        _mpt,
        _MPT,
        top={"token_embd": "transformer.wte", "output_norm": "transformer.norm_f"},
        prefix="transformer",
        layers="blocks",
        has_rms_norms=False,
        rotates=False,
    ),
    "orion": _STABLELM,
    "phi2": Architecture(
        "phi",
        "PhiForCausalLM",
        _rotation_and_epsilon,
        _PHI2,
        top={"output_norm": "model.final_layernorm"},
        splits=split_queries,
        has_rms_norms=False,
    ),
    "stablelm": _STABLELM,
    "starcoder": _GPT2._replace(
        model_type="gpt_bigcode",
        model_class="GPTBigCodeForCausalLM",
        own_config=_starcoder,
        changes=lambda metadata: {},
    ),
}
"""The architectures, by `general.architecture`. Orion is computed like StableLM."""
