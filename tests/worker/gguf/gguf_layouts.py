"""How llama.cpp's converter lays out the weights of models with layers of several kinds.

`apart` returns what is written of the weights of a checkpoint, under names that the `gguf` package
knows; `together` returns the weights of what was written, after its values were rounded.
"""

from collections.abc import Mapping

import torch
from transformers import PretrainedConfig

from tests.worker.gguf.layout import Layout, Weights, inverse, named, renamed_starts, then
from tests.worker.gguf.state_layouts import DELTA, KIMI, MAMBA, STATES


def split_experts(weights: Weights) -> dict[str, torch.Tensor]:
    """Return weights with gates and factors of all experts, and what follows, as matrices."""
    parts: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        base = name.rpartition(".")[0]
        if name.endswith("experts.gate_up_proj"):
            gates, factors = tensor.chunk(2, 1)
            parts[f"{base}.gate_proj.weight"] = gates.contiguous()
            parts[f"{base}.up_proj.weight"] = factors.contiguous()
        elif name.endswith("experts.down_proj"):
            parts[f"{name}.weight"] = tensor
        else:
            parts[name] = tensor
    return parts


def join_experts(parts: Weights) -> dict[str, torch.Tensor]:
    weights = {}
    for name, tensor in parts.items():
        if name.endswith(".experts.gate_proj.weight"):
            both = torch.cat((tensor, parts[name.replace("gate_proj", "up_proj")]), 1)
            weights[name.replace("gate_proj.weight", "gate_up_proj")] = both
        elif name.endswith(".experts.down_proj.weight"):
            weights[name.removesuffix(".weight")] = tensor
        elif not name.endswith(".experts.up_proj.weight"):
            weights[name] = tensor
    return weights


def _as_halves(names: Mapping[str, tuple[str, str]]) -> Layout:
    """Return a layout in which weights are two, with the upper and the lower half of their rows."""

    def apart(weights: Weights, config: PretrainedConfig) -> dict[str, torch.Tensor]:
        parts: dict[str, torch.Tensor] = {}
        for name, tensor in weights.items():
            old = next((old for old in names if name.endswith(old)), None)
            ends = (name,) if old is None else names[old]
            before = "" if old is None else name.removesuffix(old)
            halves = [tensor] if old is None else tensor.chunk(2, -2)
            for end, part in zip(ends, halves, strict=True):
                parts[before + end] = part.contiguous()
        return parts

    def together(parts: Weights, config: PretrainedConfig) -> dict[str, torch.Tensor]:
        weights = {}
        for name, tensor in parts.items():
            for whole, (upper, lower) in names.items():
                if name.endswith(upper):
                    other = parts[name.removesuffix(upper) + lower]
                    weights[name.removesuffix(upper) + whole] = torch.cat((tensor, other), -2)
            if not name.endswith(tuple(end for ends in names.values() for end in ends)):
                weights[name] = tensor
        return weights

    return Layout(apart, together)


_STACKS = ("model.altup_projections", "model.altup_unembed_projections")


def _stacks_apart(weights: Weights, config: PretrainedConfig) -> dict[str, torch.Tensor]:
    """Return weights with the projections of Gemma-3n in one tensor of each kind."""
    parts = {name: one for name, one in weights.items() if not name.startswith(_STACKS)}
    for stack in _STACKS:
        numbers = range(config.altup_num_inputs - 1)
        matrices = [weights[f"{stack}.{number}.weight"] for number in numbers]
        parts[f"{stack}.weight"] = torch.stack(matrices)
    return parts


def _stacks_together(parts: Weights, config: PretrainedConfig) -> dict[str, torch.Tensor]:
    weights = {name: one for name, one in parts.items() if not name.startswith(_STACKS)}
    for stack in _STACKS:
        for number, matrix in enumerate(parts[f"{stack}.weight"]):
            weights[f"{stack}.{number}.weight"] = matrix
    return weights


def _without_activation(weights: Weights, config: PretrainedConfig) -> dict[str, torch.Tensor]:
    """Return weights without the parameters of Apertus' activation, which files have as keys."""
    return {name: one for name, one in weights.items() if ".act_fn." not in name}


def _with_activation(parts: Weights, config: PretrainedConfig) -> dict[str, torch.Tensor]:
    layers = range(config.num_hidden_layers)
    return {
        **parts,
        **{
            f"model.layers.{layer}.mlp.act_fn.{name}": torch.full(shape, value)
            for layer in layers
            for name, (value, shape) in APERTUS_ACTIVATION.items()
        },
    }


def _transposed(weights: Weights, config: PretrainedConfig) -> dict[str, torch.Tensor]:
    """Return weights of GPT-2 with the outputs of its matrices as rows, or as columns again."""
    ends = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    return {
        name: one.t().contiguous() if name.endswith(ends) else one for name, one in weights.items()
    }


def _is_joined(name: str) -> bool:
    return ".query_key_value." in name


def _kinds_apart(weights: Weights, config: PretrainedConfig) -> dict[str, torch.Tensor]:
    """Return weights whose queries of all heads lie above all keys, and these above all values."""
    heads, groups = config.num_attention_heads, _groups(config)
    parts = {}
    for name, tensor in weights.items():
        parts[name] = tensor
        if _is_joined(name):
            of_groups = tensor.view(groups, heads // groups + 2, -1, *tensor.shape[1:])
            kinds = (of_groups[:, :-2], of_groups[:, -2:-1], of_groups[:, -1:])
            parts[name] = torch.cat([kind.reshape(-1, *tensor.shape[1:]) for kind in kinds])
    return parts


def _kinds_together(parts: Weights, config: PretrainedConfig) -> dict[str, torch.Tensor]:
    heads, groups = config.num_attention_heads, _groups(config)
    weights = {}
    for name, tensor in parts.items():
        weights[name] = tensor
        if _is_joined(name):
            size = len(tensor) // (heads + 2 * groups)
            kinds = tensor.split((heads * size, groups * size, groups * size))
            of_groups = [kind.view(groups, -1, *tensor.shape[1:]) for kind in kinds]
            weights[name] = torch.cat(of_groups, 1).reshape(tensor.shape)
    return weights


def _groups(config: PretrainedConfig) -> int:
    """Return the heads of keys."""
    if config.model_type != "falcon":
        return int(config.num_attention_heads)
    return 1 if not config.new_decoder_architecture else int(config.num_kv_heads)


_JOINED_PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def _three_as_one(weights: Weights, config: PretrainedConfig) -> dict[str, torch.Tensor]:
    """Return weights with queries, keys and values in one tensor."""
    parts = {}
    for name, tensor in weights.items():
        own = next((part for part in _JOINED_PARTS if part in name), None)
        if own is None:
            parts[name] = tensor
        elif own == _JOINED_PARTS[0]:
            three = [weights[name.replace(own, part)] for part in _JOINED_PARTS]
            parts[name.replace(own, "self_attn.query_key_value")] = torch.cat(three)
    return parts


def _one_as_three(parts: Weights, config: PretrainedConfig) -> dict[str, torch.Tensor]:
    weights = {}
    for name, tensor in parts.items():
        if not _is_joined(name):
            weights[name] = tensor
            continue
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        value_size = getattr(config, "v_head_dim", None) or size
        num_queries = config.num_attention_heads * size
        heads = (len(tensor) - num_queries) // (size + value_size)  # of keys, in this layer
        three = tensor.split((num_queries, heads * size, heads * value_size))
        for part, rows in zip(_JOINED_PARTS, three, strict=True):
            weights[name.replace("self_attn.query_key_value", part)] = rows
    return weights


def _columns_apart(weights: Weights, config: PretrainedConfig) -> dict[str, torch.Tensor]:
    """Return weights with the outputs of Llama-4's experts as rows, and gates without factors."""
    parts = {}
    for name, tensor in weights.items():
        if name.endswith("experts.gate_up_proj"):
            rows = tensor.transpose(1, 2).chunk(2, 1)
            for kind, own in zip(("gate", "up"), rows, strict=True):
                parts[name.replace("gate_up", kind) + ".weight"] = own.contiguous()
        elif name.endswith("experts.down_proj"):
            parts[f"{name}.weight"] = tensor.transpose(1, 2).contiguous()
        else:
            parts[name] = tensor
    return parts


def _columns_together(parts: Weights, config: PretrainedConfig) -> dict[str, torch.Tensor]:
    weights = {}
    for name, tensor in parts.items():
        own = name.removesuffix(".weight")
        if own.endswith("experts.gate_proj"):
            rows = torch.cat((tensor, parts[name.replace("gate", "up")]), 1)
            weights[own.replace("gate", "gate_up")] = rows.transpose(1, 2)
        elif own.endswith("experts.down_proj"):
            weights[own] = tensor.transpose(1, 2)
        elif not own.endswith("experts.up_proj"):
            weights[name] = tensor
    return weights


_DBRX_EXPERTS = {"w1": "gate_proj", "v1": "up_proj", "w2": "down_proj"}


def _dbrx_apart(weights: Weights, config: PretrainedConfig) -> dict[str, torch.Tensor]:
    """Return weights with a matrix of each expert, and outputs as rows."""
    parts = {}
    for name, tensor in weights.items():
        before, is_expert, own = name.partition("ffn.experts.mlp.")
        if not is_expert:
            parts[name] = tensor
            continue
        of_experts = tensor.view(config.ffn_config.moe_num_experts, -1, tensor.shape[1])
        rows = of_experts.transpose(1, 2).contiguous() if own == "w2" else of_experts
        number = before.split(".")[-2]
        parts[f"model.layers.{number}.mlp.experts.{_DBRX_EXPERTS[own]}.weight"] = rows
    return parts


def _dbrx_together(parts: Weights, config: PretrainedConfig) -> dict[str, torch.Tensor]:
    names = inverse(_DBRX_EXPERTS)
    weights = {}
    for name, tensor in parts.items():
        before, is_expert, own = name.removesuffix(".weight").partition(".mlp.experts.")
        if not is_expert:
            weights[name] = tensor
            continue
        rows = tensor.transpose(1, 2) if own == "down_proj" else tensor
        number = before.split(".")[-1]
        full = f"transformer.blocks.{number}.ffn.experts.mlp.{names[own]}"
        weights[full] = rows.flatten(0, 1)
    return weights


def _norms_as_one(weights: Weights, config: PretrainedConfig) -> dict[str, torch.Tensor]:
    """Return weights with the norms of all heads in one tensor."""
    parts = {}
    for name, tensor in weights.items():
        before, is_norm, number = name.removesuffix(".weight").partition(".norms.")
        if not is_norm:
            parts[name] = tensor
        elif number == "0":
            norms = sorted(
                (one for one in weights if one.startswith(f"{before}.norms.")),
                key=lambda one: int(one.split(".")[-2]),
            )
            parts[f"{before}.weight"] = torch.stack([weights[one] for one in norms])
    return parts


def _one_as_norms(parts: Weights, config: PretrainedConfig) -> dict[str, torch.Tensor]:
    weights = {}
    for name, tensor in parts.items():
        if not name.endswith(("q_layernorm.weight", "k_layernorm.weight")):
            weights[name] = tensor
            continue
        for number, norm in enumerate(tensor):
            weights[f"{name.removesuffix('.weight')}.norms.{number}.weight"] = norm
    return weights


APERTUS_ACTIVATION: Mapping[str, tuple[float, tuple[int, ...]]] = {
    **{"alpha_p": (0.75, (1,)), "alpha_n": (0.625, (1,))},
    **{"beta": (0.5, ()), "eps": (-1e-6, ())},
}
_BIAS = "e_score_correction_bias"
_GRANITE_NAMES = {
    "block_sparse_moe.output_linear.weight": "mlp.experts.down_proj.weight",
}
_GRANITE = then(
    _as_halves(
        {
            "block_sparse_moe.input_linear.weight": (
                "mlp.experts.gate_proj.weight",
                "mlp.experts.up_proj.weight",
            ),
            "shared_mlp.input_linear.weight": (
                "mlp.shared_expert.gate_proj.weight",
                "mlp.shared_expert.up_proj.weight",
            ),
        }
    ),
    named(_GRANITE_NAMES),
)
_GRANITE_DENSE = then(
    _as_halves({"shared_mlp.input_linear.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight")}),
    named({"shared_mlp.output_linear.weight": "mlp.down_proj.weight"}),
)


def _granite_apart(weights: Weights, config: PretrainedConfig) -> dict[str, torch.Tensor]:
    own = _GRANITE if config.num_local_experts else _GRANITE_DENSE
    return then(own, STATES).apart(weights, config)


def _granite_together(parts: Weights, config: PretrainedConfig) -> dict[str, torch.Tensor]:
    own = _GRANITE if config.num_local_experts else _GRANITE_DENSE
    return then(own, STATES).together(parts, config)


_GEMMA4_NAMES = {
    "layer_scalar": "layer_scalar.weight",
    "router.scale": "router.proj.scale",
    "router.per_expert_scale": "experts.down_proj.scale",
    "experts.gate_up_proj": "experts.gate_up_proj.weight",
    "experts.down_proj": "experts.down_proj.weight",
}
_BY_KIND = Layout(_kinds_apart, _kinds_together)
JOINED = Layout(_three_as_one, _one_as_three)
"""That of files whose queries, keys and values are one tensor."""
AFTER_PARTS: Mapping[str, Layout] = {
    "kimi_linear": KIMI,
    "mimo_v2_flash": named({"attention_sink_bias": "attention_sink_bias.weight"}),
}
"""What is done with weights beside what is done with those of most types, by `model_type`."""
LAYOUTS: Mapping[str, Layout] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), DELTA),
    **dict.fromkeys(("falcon_h1", "mamba2"), STATES),
    **dict.fromkeys(("mamba", "falcon_mamba", "jamba"), MAMBA),
    "nemotron_h": then(STATES, named({_BIAS: "e_score_correction.bias"})),
    "granitemoehybrid": Layout(_granite_apart, _granite_together),
    **dict.fromkeys(("granitemoe", "granitemoeshared"), _GRANITE),
    "gemma3n_text": then(
        Layout(_stacks_apart, _stacks_together),
        named({"correct_output_scale": "correct_output_scale.weight"}),
    ),
    "gemma4_text": named(_GEMMA4_NAMES),
    "gpt2": Layout(_transposed, _transposed),
    **dict.fromkeys(("gpt_neox", "falcon"), _BY_KIND),
    "bloom": then(
        _BY_KIND,
        Layout(
            lambda weights, config: renamed_starts(weights, "transformer.", ""),
            lambda parts, config: renamed_starts(parts, "", "transformer."),
        ),
    ),
    "llama4_text": Layout(_columns_apart, _columns_together),
    "dbrx": Layout(_dbrx_apart, _dbrx_together),
    "stablelm": Layout(_norms_as_one, _one_as_norms),
    "apertus": Layout(_without_activation, _with_activation),
    **dict.fromkeys(("lfm2_moe", "afmoe"), named({"expert_bias": "expert_bias.bias"})),
    **dict.fromkeys(
        ("dots1", "exaone_moe", "minimax_m2", "ernie4_5_moe"),
        named({_BIAS: "e_score_correction.bias"}),
    ),
}
"""The layouts by `model_type`."""
