"""Parses the events of one recorded stream, choice by choice."""

import json
import re
from itertools import zip_longest
from typing import Any

from tests.chaos.recording import Event, Recording

DONE = "[DONE]"
_PLACE = re.compile(r"\d*(?:-\d*)*u?")
_LOGPROB_COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class Choice:
    """One output sequence, assembled from its pieces."""

    def __init__(self) -> None:
        self.text = ""
        self.reasoning = ""
        self.calls = ""
        """All tool calls: for each its place, its name and its arguments."""
        self.call_ids: list[str] = []
        """In order; another id in every run."""
        self.token_ids: list[int] = []
        self.logprobs: list[Any] = []
        """One item per token, in the format of its API."""
        self.roles: list[str] = []
        """The roles in the deltas; a chat has one."""
        self.finishes: list[tuple[str, Any]] = []
        """Each finish reason, with the stop string or id; there should be one."""
        self.num_late_pieces = 0
        """Pieces after the finish."""
        self.marks: list[tuple[int, int]] = [(0, 0)]
        """Number of tokens and characters of any kind after each piece."""

    def add(self, piece: dict[str, Any]) -> None:
        """Append the next piece."""
        if self.finishes:
            self.num_late_pieces += 1
        delta = piece.get("delta") or {}
        self.roles += [delta["role"]] if delta.get("role") else []
        self.text += piece.get("text") or delta.get("content") or ""
        self.reasoning += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls") or []:
            self._add_call(call)
        self.token_ids += piece.get("token_ids") or []
        self.logprobs += _logprob_items(piece.get("logprobs"))
        self.marks.append((len(self.token_ids), self.num_characters))
        if piece.get("finish_reason") is not None:
            self.finishes.append((piece["finish_reason"], piece.get("stop_reason")))

    def _add_call(self, call: dict[str, Any]) -> None:
        function = call.get("function") or {}
        if "id" in call:
            self.call_ids.append(call["id"])
            self.calls += f"\n{call['index']} {function['name']} "
        elif call["index"] != len(self.call_ids) - 1:
            self.calls += f"\narguments of call {call['index']}: "
        self.calls += function.get("arguments") or ""

    @property
    def num_characters(self) -> int:
        return len(self.text) + len(self.reasoning) + len(self.calls)

    def text_bounds(self, num_tokens: int) -> tuple[int, int]:
        """Return the fewest and the most characters that belong to `num_tokens` tokens."""
        fewest = max(chars for tokens, chars in self.marks if tokens <= num_tokens)
        most = min((c for t, c in self.marks if t >= num_tokens), default=len(self.text))
        return min(fewest, most), max(fewest, most)


class History:
    """One stream."""

    def __init__(self, recording: Recording) -> None:
        self.choices: dict[int, Choice] = {}
        self.usages: list[dict[str, int]] = []
        """Token counts, without cached tokens, which may differ between runs."""
        self.vectors: list[Any] = []
        """The vectors of a request for embeddings."""
        self.errors: list[str] = []
        self.answer_ids: list[str] = []
        """The distinct ids of the response in the events."""
        self.places: list[int] = []
        """The token counts per choice in the id of the last event that has one."""
        self.misplaced: str | None = None
        """The first event whose id does not match the tokens so far, in words."""
        self.is_done = False
        self.num_after_done = 0
        """Events after the end."""
        event_ids = [event.id for event in recording.events if event.id]
        self.has_repeated_ids = len(set(event_ids)) < len(event_ids)
        for event in recording.events:
            self._add(event)

    def _add(self, event: Event) -> None:
        self.num_after_done += self.is_done
        if event.data == DONE:
            self.is_done = True
            return
        try:
            self._take(json.loads(event.data))
        except (ValueError, TypeError, KeyError, AttributeError):
            self.errors.append(f"unreadable event {event.data[:100]!r}")
        self._place(event.id)

    def _take(self, message: dict[str, Any]) -> None:
        if "error" in message:
            self.errors.append(json.dumps(message["error"])[:300])
            return
        self.vectors += [item["embedding"] for item in message.get("data") or []]
        for piece in message.get("choices") or []:
            self.choices.setdefault(piece["index"], Choice()).add(piece)
        if message.get("usage") is not None:
            counts = {k: v for k, v in message["usage"].items() if isinstance(v, int)}
            self.usages.append(counts)
        name = message.get("id")
        if name is not None and name not in self.answer_ids:
            self.answer_ids.append(name)

    def _place(self, event_id: str) -> None:
        """Parse the token counts at the end of a Troika event id: `NAME.7-3-`."""
        _, dot, place = event_id.rpartition(".")
        if not dot or not _PLACE.fullmatch(place):
            return
        self.places = [int(count or 0) for count in place.rstrip("u").split("-")]
        come = {index: len(choice.token_ids) for index, choice in self.choices.items()}
        if not any(come.values()):  # token ids were not requested
            return
        counts = [come.get(index, 0) for index in range(max(len(self.places), max(come) + 1))]
        if self.misplaced is None and self.places != counts:
            self.misplaced = f"event {event_id} after {come} tokens"


def _logprob_items(logprobs: dict[str, Any] | None) -> list[Any]:
    """Normalize logprobs: chat has a list of items, completions have parallel lists."""
    if logprobs is None:
        return []
    if "content" in logprobs:
        return list(logprobs["content"] or [])
    columns = [logprobs.get(name) or [] for name in _LOGPROB_COLUMNS]
    return [list(row) for row in zip_longest(*columns)]
