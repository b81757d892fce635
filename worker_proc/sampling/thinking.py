"""Ends reasoning that has used up its budget: a pure function of the output ids.

No state is kept, so that the forced tokens are the same with drafts, after a preemption and in
another worker.
"""

from protocol.sampling import ThinkingBudget


def forced_token(
    token_ids: list[int], num_prompt_tokens: int, budget: ThinkingBudget
) -> int | None:
    """Return the only token that may follow `token_ids`; None: the budget forces none.

    Only tokens right after the budget can be forced, until the end marker is complete. So at nearly
    all positions the length alone decides.
    """
    begin, end = budget.begin_token_ids, budget.end_token_ids
    first = num_prompt_tokens + len(begin)
    num_over = len(token_ids) - first - budget.max_tokens
    if not 0 <= num_over < len(end) or token_ids[num_prompt_tokens:first] != begin:
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
