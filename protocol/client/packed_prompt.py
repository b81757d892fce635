"""Packs long prompts into their encoded form, in slices.

Packing and checking a million ids takes tens of milliseconds. A client whose event loop also serves
other requests does this beforehand, slice by slice, which leaves only a few copies for `submit`.
"""

from collections.abc import Iterator
from typing import NamedTuple

from protocol.api_core import PACKED_FROM_TOKENS
from protocol.client.errors import failure_of
from protocol.message import MAX_TOKEN_IDS, has_ids_from, pack_token_ids
from protocol.model_facts import ModelFacts
from protocol.request_validation import outside_vocabulary

_SLICE_IDS = 2**15
"""Ids per slice; a slice takes about a millisecond."""


class PackedPrompt(NamedTuple):
    """A prompt as packed ids, all of which are less than `id_bound`."""

    packed: bytes
    id_bound: int


PromptIds = list[int] | PackedPrompt
"""The two forms in which a prompt is submitted."""


def prompt_length(prompt: PromptIds) -> int:
    """Return the number of tokens in a prompt."""
    return len(prompt) if isinstance(prompt, list) else len(prompt.packed) // 4


def extended(prompt: PromptIds, token_ids: list[int]) -> PromptIds:
    """Return a prompt with further ids appended."""
    if isinstance(prompt, list):
        return prompt + token_ids
    id_bound = max(prompt.id_bound, max(token_ids, default=0) + 1)
    return PackedPrompt(prompt.packed + pack_token_ids(token_ids), id_bound)


class PromptPacking:
    """The packing of one prompt, whose ids are 32-bit numbers."""

    prompt: PackedPrompt
    """Set once all `steps` are done."""

    def __init__(self, token_ids: list[int], facts: ModelFacts) -> None:
        self._token_ids = token_ids
        self._facts = facts

    @staticmethod
    def is_due(token_ids: list[int]) -> bool:
        """Return whether a prompt is sent packed: if it is long but within the limit on prompts."""
        return PACKED_FROM_TOKENS <= len(token_ids) <= MAX_TOKEN_IDS

    def steps(self) -> Iterator[None]:
        """Pack and check, yielding after each slice; InvalidRequest if an id is too large."""
        id_bound = self._facts.vocab_size
        pieces: list[bytes] = []
        highest = 0
        for start in range(0, len(self._token_ids), _SLICE_IDS):
            token_ids = self._token_ids[start : start + _SLICE_IDS]
            pieces.append(pack_token_ids(token_ids))
            if has_ids_from(pieces[-1], id_bound):
                highest = max(highest, *token_ids)
            yield
        if highest >= id_bound:
            raise failure_of(outside_vocabulary(highest, self._facts, "prompt"))
        self.prompt = PackedPrompt(b"".join(pieces), id_bound)
