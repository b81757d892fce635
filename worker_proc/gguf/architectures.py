"""The architectures that are read from GGUF files, as configurations of transformers.

Files state sizes under llama.cpp's keys; what its code has fixed for an architecture, such as an
activation, is not in them and is stated here, and in the modules with the architectures of a kind.
"""

from collections.abc import Callable, Mapping
from typing import Any

from worker_proc.errors import CheckpointError
from worker_proc.gguf.architecture import (
    KV_HEADS,
    RMS_NORM_EPSILON,
    SOFTMAX,
    TEMPERATURE,
    WINDOW,
    Architecture,
    Config,
    has_tensor,
)
from worker_proc.gguf.delta_net import DELTA_NETS
from worker_proc.gguf.dense import DENSE, MISTRAL, OLMO3
from worker_proc.gguf.gemma import GEMMAS
from worker_proc.gguf.known import check_known
from worker_proc.gguf.latent import DEEPSEEK_V2, LATENTS, gating
from worker_proc.gguf.layer_norms import FALCON_TWO_NORMS, LAYER_NORMS
from worker_proc.gguf.mamba import FALCON_MAMBA, MAMBAS, NORMED_STEPS
from worker_proc.gguf.mapped import MappedFiles
from worker_proc.gguf.metadata import Metadata
from worker_proc.gguf.mixtures import GRANITE_SHARED, MIXTRAL, MIXTURES
from worker_proc.gguf.model_header import Header
from worker_proc.gguf.neutral import neutral_values
from worker_proc.gguf.rotary import rope_parameters
from worker_proc.gguf.short_convolutions import SHORT_CONVOLUTIONS
from worker_proc.gguf.windowed_mixtures import WINDOWED_MIXTURES

ARCHITECTURES: Mapping[str, Architecture] = {
    **DENSE,
    **LAYER_NORMS,
    **GEMMAS,
    **MIXTURES,
    **WINDOWED_MIXTURES,
    **SHORT_CONVOLUTIONS,
    **DELTA_NETS,
    **MAMBAS,
    **LATENTS,
}
"""The architectures, by `general.architecture`."""
_HEADS, _WIDTH = "attention.head_count", "feed_forward_length"
_OF_ATTENTION = (_HEADS, _WIDTH)
"""Keys that models without attention state as 0."""
_OF_ROTATION = ("rope.freq_base", "rope.dimension_count")
"""Keys that models without a rotary embedding have nevertheless."""


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
        "max_position_embeddings": metadata.integer("context_length"),
        "vocab_size": 0 if embedding is None else embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        **_token_ids(header),
    }
    usual = _usual(architecture, metadata, file)
    common |= {name: value() for name, value in usual.items() if name not in own}
    metadata.check_all_read(neutral_values(metadata))
    return common | own


def _usual(
    architecture: Architecture, metadata: Metadata, file: MappedFiles
) -> dict[str, Callable[[], Any]]:
    """Return how most architectures state what some state in ways of their own."""
    usual: dict[str, Callable[[], Any]] = {}
    if architecture.has_rms_norms:
        usual["rms_norm_eps"] = lambda: metadata.number(RMS_NORM_EPSILON)
    if architecture.attends:
        heads = metadata.integer(_HEADS)
        metadata.get(KV_HEADS)
        usual["num_attention_heads"] = lambda: heads
        usual["num_key_value_heads"] = lambda: metadata.integer(KV_HEADS, heads)
    if architecture.attends and metadata.get(_WIDTH) is not None:
        usual["intermediate_size"] = lambda: metadata.integer(_WIDTH)
    if architecture.attends and architecture.rotates:
        usual["rope_parameters"] = lambda: rope_parameters(metadata, file)
    else:
        for key in _OF_ROTATION if architecture.attends else _OF_ATTENTION:
            metadata.get(key)
    return usual


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


def _check_num_layers(header: Header) -> None:
    """Raise CheckpointError for more layers than there are tensors: lists have a value for each."""
    count = Metadata(header).integer("block_count", 0, min_value=0)
    if count > len(header.tensors):
        raise CheckpointError(
            f"{header.path}: {header.architecture}.block_count is {count}, and there are only"
            f" {len(header.tensors)} tensors"
        )


def architecture_of(file: MappedFiles) -> Architecture:
    """Return the architecture of a file; UnsupportedModel: it is not read."""
    header = file.header
    name = header.architecture
    _check_num_layers(header)

    def states(key: str) -> bool:
        return bool(header.metadata.get(f"{name}.{key}"))

    if name == "llama" and states("expert_count"):
        return MIXTRAL
    if name == "mistral3" and not states(TEMPERATURE):
        return MISTRAL
    if name == "deepseek2" and gating(file) == SOFTMAX:
        return DEEPSEEK_V2
    if name == "olmo2" and states(WINDOW):
        return OLMO3
    if name == "granitemoe" and has_tensor(file, "ffn_up_shexp.weight"):
        return GRANITE_SHARED
    if name == "falcon" and has_tensor(file, "attn_norm_2.weight"):
        return FALCON_TWO_NORMS
    if name == "mamba" and states(NORMED_STEPS):
        return FALCON_MAMBA
    check_known(header)
    return ARCHITECTURES[name]
