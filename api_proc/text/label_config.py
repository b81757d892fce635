"""The meaning of a classification head's scores, read from config.json."""

import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from api_proc.errors import ApiError
from api_proc.text.checkpoint import read_json
from protocol.config import ModelConfig

_FUNCTIONS = frozenset({"Identity", "Sigmoid", "Softmax", "Tanh"})
_BY_PROBLEM = {
    "regression": "Identity",
    "single_label_classification": "Softmax",
    "multi_label_classification": "Sigmoid",
}


class LabelConfig(NamedTuple):
    """The labels of a classification head, and the function that turns its scores into results."""

    names: Mapping[str, str] = MappingProxyType({})
    """Names of labels by their numbers."""
    function: str = ""
    """The name of a torch module in the checkpoint; empty: none is named."""
    problem_type: str = ""
    has_separator: bool = True
    """True if a pair of texts is tokenized as a pair rather than as one text."""

    def name(self, number: int) -> str:
        return self.names.get(str(number), f"LABEL_{number}")

    def activate(self, scores: list[float]) -> list[float]:
        """Return the results for a text, given the scores of its labels."""
        by_size = "Sigmoid" if len(scores) == 1 else "Softmax"
        function = self.function or _BY_PROBLEM.get(self.problem_type, by_size)
        if function not in _FUNCTIONS:
            known = ", ".join(sorted(_FUNCTIONS))
            message = f"the checkpoint's activation function {function} is not one of {known}"
            raise ApiError(400, message, param="use_activation", code="unsupported_model")
        if function == "Sigmoid":
            return [_sigmoid(score) for score in scores]
        if function == "Tanh":
            return [math.tanh(score) for score in scores]
        if function == "Softmax":
            greatest = max(scores)
            weights = [math.exp(score - greatest) for score in scores]
            total = math.fsum(weights)
            return [weight / total for weight in weights]
        return scores


def _sigmoid(x: float) -> float:
    if x >= 0:
        return 1.0 / (1.0 + math.exp(-x))
    weight = math.exp(x)
    return weight / (1.0 + weight)


@lru_cache(maxsize=8)
def _read(directory: str) -> LabelConfig:
    config = read_json(Path(directory) / "config.json")
    of_sentences: Any = config.get("sentence_transformers")
    named = of_sentences.get("activation_fn") if isinstance(of_sentences, dict) else None
    named = named or config.get("sbert_ce_default_activation_function") or ""
    names = config.get("id2label")
    names = {str(key): str(name) for key, name in names.items()} if isinstance(names, dict) else {}
    problem_type = str(config.get("problem_type") or "")
    has_separator = config.get("use_sep_token") is not False
    return LabelConfig(names, str(named).rpartition(".")[2], problem_type, has_separator)


def label_config(model: ModelConfig) -> LabelConfig:
    """Read config.json once."""
    return _read(model.model)
