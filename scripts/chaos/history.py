"""From the events of one recorded stream to what they say, choice by choice."""

import json
from typing import Any

from scripts.chaos.recording import Recording

DONE = "[DONE]"


class Choice:
    """One output sequence, put together from its pieces."""

    def __init__(self) -> None:
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[Any] = []
        """One item per token, in the shape of its API."""
        self.finishes: list[tuple[str, Any]] = []
        """Each reason to finish, with the stop string or id; there should be one."""
        self.num_late_pieces = 0
        """Pieces after the finish."""

    def add(self, piece: dict[str, Any]) -> None:
        """Take the next piece."""
        if self.finishes:
            self.num_late_pieces += 1
        delta = piece.get("delta", {})
        self.text += piece.get("text") or delta.get("content") or ""
        self.token_ids += piece.get("token_ids") or []
        self.logprobs += _logprob_items(piece.get("logprobs"))
        if piece.get("finish_reason") is not None:
            self.finishes.append((piece["finish_reason"], piece.get("stop_reason")))


class History:
    """One stream."""

    def __init__(self, recording: Recording) -> None:
        self.choices: dict[int, Choice] = {}
        self.usages: list[dict[str, int]] = []
        """Numbers of tokens; how many of them were cached may differ from run to run."""
        self.errors: list[str] = []
        self.is_done = False
        for event in recording.events:
            self._add(event.data)

    def _add(self, data: str) -> None:
        if data == DONE:
            self.is_done = True
            return
        try:
            message = json.loads(data)
        except ValueError:
            self.errors.append(f"unreadable event {data[:100]!r}")
            return
        if "error" in message:
            self.errors.append(json.dumps(message["error"])[:300])
            return
        for piece in message.get("choices", []):
            self.choices.setdefault(piece["index"], Choice()).add(piece)
        if message.get("usage") is not None:
            counts = {k: v for k, v in message["usage"].items() if isinstance(v, int)}
            self.usages.append(counts)


def _logprob_items(logprobs: dict[str, Any] | None) -> list[Any]:
    """Chat brings a list of items, completions bring parallel lists."""
    if logprobs is None:
        return []
    if "content" in logprobs:
        return list(logprobs["content"] or [])
    columns = [
        logprobs.get(name) or []
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    ]
    return [list(row) for row in zip(*columns, strict=False)]
