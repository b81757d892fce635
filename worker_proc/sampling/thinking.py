"""Ends reasoning that has used up its budget: a pure function of the output ids.

No state is kept, so that the forced tokens are the same with drafts, after a preemption and in
another worker.
"""

from protocol.sampling import ThinkingBudget


def forced_token(
    token_ids: list[int], num_prompt_tokens: int, budget: ThinkingBudget
) -> int | None:
    """Return the only token that may follow `token_ids`; None: no token is forced.

    Only tokens right after the budget can be forced, until the end marker is complete. Reasoning
    must therefore have begun at one of a few places, which is rarely the case.
    """
    end = budget.end_token_ids
    last = len(token_ids) - budget.max_tokens
    places = range(max(last - len(end) + 1, num_prompt_tokens), last + 1)
    first = next((n for n in places if _begins(token_ids, num_prompt_tokens, n, budget)), None)
    if first is None:
        return None
    reasoning = token_ids[first:]
    starts = (place for place, token_id in enumerate(reasoning) if token_id == end[0])
    if any(reasoning[place : place + len(end)] == end for place in starts):
        return None
    if not set(budget.call_token_ids).isdisjoint(reasoning):
        return None
    # The model may have begun the marker itself.
    lengths = range(min(len(end) - 1, len(reasoning)), 0, -1)
    num_known = next((n for n in lengths if reasoning[-n:] == end[:n]), 0)
    return end[num_known]


def _begins(
    token_ids: list[int], num_prompt_tokens: int, first: int, budget: ThinkingBudget
) -> bool:
    """Return whether reasoning begins at `first`, right after its begin marker."""
    begin = budget.begin_token_ids
    marker = first - len(begin)
    if marker < num_prompt_tokens or token_ids[marker:first] != begin:
        return False
    return set(budget.space_token_ids).issuperset(token_ids[num_prompt_tokens:marker])
