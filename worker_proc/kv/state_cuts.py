"""The block from which a part of a step takes its state, and the blocks that save states."""

from protocol.core_worker import NULL_BLOCK
from worker_proc.errors import MirrorError
from worker_proc.request import ScheduledRequest


def state_source(part: ScheduledRequest, block_size: int) -> int | None:
    """Return the block with the state that a part begins from; None: a zero state."""
    request, start = part.request, part.start
    if start == 0:
        return None
    block_id = request.state_block or request.block_tables[-1][(start - 1) // block_size]
    if block_id == NULL_BLOCK:
        raise MirrorError(f"request {request.req_id} has no state after {start} tokens")
    return block_id


def state_cuts(part: ScheduledRequest, block_size: int) -> dict[int, int]:
    """Return, for each block that saves a state, the number of preceding tokens, in order.

    These are the blocks of the request's table, and those for the states before its drafts.
    """
    request, start, end = part.request, part.start, part.end
    table, cuts = request.block_tables[-1], dict[int, int]()
    for index in range(start // block_size, (end - 1) // block_size + 1):
        if (block_id := table[index]) != NULL_BLOCK:
            cuts.pop(block_id, None)  # the core has moved it along: only its last state counts
            cuts[block_id] = min((index + 1) * block_size, end)
    if end not in cuts.values():
        raise MirrorError(f"request {request.req_id} has no block for its state after {end} tokens")
    if num_drafts := part.num_drafts:
        own = request.draft_states[:num_drafts]
        if len(own) < num_drafts:
            raise MirrorError(f"request {request.req_id} has {len(own)} states of {num_drafts}")
        cuts |= zip(own, range(end - num_drafts, end), strict=True)
        cuts = dict(sorted(cuts.items(), key=lambda cut: cut[1]))
    return cuts
