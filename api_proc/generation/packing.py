"""Packs long prompts in their request's turn, before they are submitted."""

import time

from api_proc.http.json_body import Turn
from protocol.client.packed_prompt import PromptIds, PromptPacking
from protocol.model_facts import ModelFacts

_SLICE_S = 0.002


async def packed_in_slices(
    prompts: list[list[int]], facts: ModelFacts, turn: Turn
) -> list[PromptIds]:
    """Return prompts in the form to submit; RequestFailed if an id is too large."""
    forms: list[PromptIds] = []
    began = time.perf_counter()
    for token_ids in prompts:
        if not PromptPacking.is_due(token_ids):
            forms.append(token_ids)
            continue
        packing = PromptPacking(token_ids, facts)
        for _ in packing.steps():
            if time.perf_counter() - began > _SLICE_S:
                await turn.pause()
                began = time.perf_counter()
        forms.append(packing.prompt)
    return forms
