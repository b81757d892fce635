"""Loads the draft model, and checks that it fits the model for which it drafts."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from protocol.config import EngineConfig, ModelConfig, Quantization
from protocol.model_facts import KVGroup
from worker_proc.errors import CheckpointError, UnsupportedModel
from worker_proc.loading.loader import CheckedModel, check_model
from worker_proc.loading.model_kind import ModelKind
from worker_proc.runner import ReportProgress

MAX_PADDING = 1024
"""The greatest difference in size between padded vocabularies of the same tokenizer."""


def check_draft(
    model: ModelConfig, checked: CheckedModel, progress: ReportProgress
) -> CheckedModel | None:
    """Check the configured draft model against the checked model; return None if there is none."""
    if model.speculative_model is None:
        return None
    check_same_tokens(model.speculative_model, model.tokenizer or model.model)
    draft = check_model(
        model.speculative_model,
        model.dtype,
        checked.device,
        progress,
        max_model_len=model.max_model_len,
        other_bytes=_min_bytes(checked, model.quantization),
    )
    if draft.inspected.kind is not ModelKind.GENERATES:
        raise UnsupportedModel(f"speculative_model {model.speculative_model} generates no text")
    own, other = (one.inspected.text_config.vocab_size for one in (draft, checked))
    if abs(own - other) > MAX_PADDING:
        raise CheckpointError(
            f"speculative_model {model.speculative_model} has {own} tokens, and"
            f" {model.shown_model} has {other}: both must have the same tokenizer"
        )
    return draft


def _min_bytes(checked: CheckedModel, quantization: Quantization | None) -> int:
    """Return the least memory that a model's weights may take, since they may be rounded."""
    if quantization is None or checked.files is not None:
        return checked.num_bytes
    bits = 4 if quantization is Quantization.W4A16 else 8
    return checked.inspected.probed.num_weights * bits // 8


def check_same_tokens(draft: str, model: str) -> None:
    """Raise CheckpointError if the tokenizers of two directories map texts to different ids.

    A directory without a tokenizer.json is not checked.
    """
    files = [Path(directory) / "tokenizer.json" for directory in (draft, model)]
    if not all(file.is_file() for file in files):
        return
    one, other = map(_token_ids, files)
    for token in [*other, *one]:
        if one.get(token) != other.get(token):
            raise CheckpointError(
                f"speculative_model {draft} has another tokenizer than {model}: token {token!r}"
                f" has id {one.get(token, 'none')} instead of {other.get(token, 'none')}"
            )


def _token_ids(file: Path) -> dict[str, int]:
    """Return the ids of all tokens in a tokenizer.json."""
    try:
        content = json.loads(file.read_bytes())
        vocabulary: Any = content["model"]["vocab"]
        if isinstance(vocabulary, list):  # Unigram: pairs of token and score
            vocabulary = {pair[0]: number for number, pair in enumerate(vocabulary)}
        added = {token["content"]: token["id"] for token in content.get("added_tokens") or ()}
        return dict(vocabulary) | added
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise CheckpointError(f"{file}: no tokenizer that can be compared: {error}") from error


def group_without_window(groups: Sequence[KVGroup]) -> int:
    """Return the KV group whose tables keep all blocks, as the draft model's layers require."""
    for number, group in enumerate(groups):
        if group.window is None and not group.is_state:
            return number
    if all(group.is_state for group in groups):
        raise UnsupportedModel(
            "speculative_model needs the KV blocks of a request, and a model without attention has"
            " none: leave the setting out, so that repetitions in the text are drafted"
        )
    raise UnsupportedModel(
        "speculative_model needs the KV blocks of the whole text, and every layer of the model"
        " frees those that its window has passed: add --no-enable-hybrid-kv-cache"
    )


def describe_speculation(config: EngineConfig) -> str:
    """Describe the source of drafts in words; empty: no speculation."""
    num_tokens = config.scheduler.num_speculative_tokens
    if num_tokens == 0:
        return ""
    draft = config.model.speculative_model
    source = f"draft model {Path(draft).name}" if draft is not None else "repetitions in the text"
    how = "adaptive" if config.scheduler.adaptive_speculation else "fixed"
    return f"{source}, {how}, at most {num_tokens} tokens"
