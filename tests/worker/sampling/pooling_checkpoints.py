"""Builds small checkpoints with random weights that return vectors or scores, and references."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    AlbertConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    DistilBertConfig,
    Gemma3TextConfig,
    LlamaConfig,
    ModernBertConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    XLMRobertaConfig,
)

from tests.worker.checkpoints import SHAPE, WINDOW

ENCODER: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
LABELS = {"num_labels": 3}
DENSE_SIZE = 24


@dataclass(frozen=True, slots=True)
class PoolingArchitecture:
    """One kind of model without output layer."""

    name: str
    build: Any
    """The class of transformers."""
    config: Callable[[], PretrainedConfig]
    files: Mapping[str, Any] = field(default_factory=dict)
    """Of sentence-transformers."""
    is_encoder: bool = True
    max_len: int = 256

    @property
    def is_classifier(self) -> bool:
        return self.build is AutoModelForSequenceClassification


def modules_of(pooling: str, *more: tuple[str, str]) -> dict[str, Any]:
    """Return files that list a pooling and further modules, as types and directories."""
    listed = [("Transformer", ""), ("Pooling", "1_Pooling"), *more]
    return {
        "modules.json": [
            {"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in listed
        ],
        "1_Pooling/config.json": {"pooling_mode": pooling},
    }


DENSE = {
    "2_Dense/config.json": {
        **{"in_features": 64, "out_features": DENSE_SIZE, "bias": True},
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
}
MODERN: dict[str, Any] = {
    "local_attention": 2 * WINDOW,
    "layer_types": ["full_attention", "sliding_attention"],
}
CLASSIFIER = AutoModelForSequenceClassification
BERT_LABELS = ENCODER | LABELS
ARCHITECTURES = (
    PoolingArchitecture(
        "llama_dense",
        AutoModel,
        lambda: LlamaConfig(**SHAPE),
        modules_of("mean", ("Dense", "2_Dense"), ("Normalize", "3_Normalize")) | DENSE,
        is_encoder=False,
    ),
    PoolingArchitecture(
        "qwen3_score",
        CLASSIFIER,
        lambda: Qwen3Config(**SHAPE, num_labels=1),
        is_encoder=False,
    ),
    PoolingArchitecture("bert", AutoModel, lambda: BertConfig(**ENCODER)),
    PoolingArchitecture("bert_score", CLASSIFIER, lambda: BertConfig(**BERT_LABELS)),
    PoolingArchitecture(
        "xlm_roberta",
        AutoModelForMaskedLM,
        lambda: XLMRobertaConfig(**ENCODER | {"pad_token_id": 1}, type_vocab_size=1),
        modules_of("cls", ("Normalize", "2_Normalize")),
        max_len=254,
    ),
    PoolingArchitecture(
        "xlm_roberta_score",
        CLASSIFIER,
        lambda: XLMRobertaConfig(**ENCODER | {"pad_token_id": 1, "num_labels": 1}),
        max_len=254,
    ),
    PoolingArchitecture(
        "modernbert",
        AutoModel,
        lambda: ModernBertConfig(**ENCODER, **MODERN),
        modules_of("mean") | {"sentence_bert_config.json": {"max_seq_length": 200}},
        max_len=200,
    ),
    PoolingArchitecture(
        "modernbert_score",
        CLASSIFIER,
        lambda: ModernBertConfig(**BERT_LABELS, **MODERN, classifier_pooling="mean"),
    ),
    PoolingArchitecture(
        "distilbert",
        AutoModel,
        lambda: DistilBertConfig(
            **{"vocab_size": 512, "dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4},
            max_position_embeddings=256,
        ),
    ),
    PoolingArchitecture(
        "albert", AutoModel, lambda: AlbertConfig(**ENCODER, embedding_size=32), max_len=256
    ),
    PoolingArchitecture(
        "gemma3_bidirectional",
        AutoModel,
        lambda: Gemma3TextConfig(
            **SHAPE,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"],
            use_bidirectional_attention=True,
        ),
        modules_of("mean", ("Dense", "2_Dense"), ("Normalize", "3_Normalize")) | DENSE,
    ),
)


def build(directory: Path, architecture: PoolingArchitecture, seed: int = 7) -> None:
    """Write a checkpoint with random weights, and the files of sentence-transformers."""
    torch.manual_seed(seed)
    model: PreTrainedModel = architecture.build.from_config(architecture.config())
    for parameter in model.parameters():  # heads and norms, too, which are otherwise trivial
        parameter.data.normal_(0.0, 0.2 if parameter.dim() > 1 else 0.5)
    model.save_pretrained(directory)
    for name, content in architecture.files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(json.dumps(content))
        if name.startswith("2_Dense"):
            weights = {"linear.weight": torch.randn(DENSE_SIZE, 64) * 0.2}
            weights["linear.bias"] = torch.randn(DENSE_SIZE)
            save_file(weights, directory / "2_Dense" / "model.safetensors")
