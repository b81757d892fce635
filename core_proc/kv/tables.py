"""Block tables: which blocks hold the KV of a request."""

from protocol.core_worker import NULL_BLOCK

Tables = list[list[int]]
"""Block ids, one list per KV group, all of equal length; the last has state blocks, if any."""


def live_blocks(table: list[int]) -> list[int]:
    """Return the blocks of a table, without the entries that a window has passed."""
    if NULL_BLOCK not in table:
        return table
    return [block_id for block_id in table if block_id != NULL_BLOCK]


def first_visible_block(window: int | None, position: int, block_size: int) -> int:
    """Return the index of the first block that tokens from `position` on attend to."""
    return 0 if window is None else max(0, position - window + 1) // block_size
