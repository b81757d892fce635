"""Long prompts are packed in the turn of their request, before they are submitted."""

from api_proc.http.json_body import Turn
from protocol.client.packed_prompt import PromptIds, PromptPacking
from protocol.core_worker import ModelFacts


async def packed_in_turn(token_ids: list[int], facts: ModelFacts, turn: Turn) -> PromptIds:
    """Return a prompt in the form in which it is submitted; RequestFailed: an id is too large."""
    if not PromptPacking.is_due(token_ids):
        return token_ids
    packing = PromptPacking(token_ids, facts)
    for _ in packing.steps():
        await turn.pause()
    return packing.prompt
