"""Finds the address at which a replica reads the KV blocks of a request's previous replica."""

from protocol.client.replica import Replica
from protocol.config.addresses import is_remote


def blocks_for(reader: Replica, other: Replica) -> str:
    """Return the address at which `reader` reads the blocks on another replica's machine.

    Empty if it has them in its own stores or cannot use them. The other replica may be gone while
    the block server of its machine is still running.
    """
    if not _has_equal_blocks(reader, other) or _shares_stores(reader, other):
        return ""
    return other.engine.blocks_at


def reaches_blocks(reader: Replica, other: Replica) -> bool:
    """Return whether `reader` can read the blocks that another replica has written."""
    if not _has_equal_blocks(reader, other):
        return False
    return _shares_stores(reader, other) or bool(other.engine.blocks_at)


def _shares_stores(one: Replica, other: Replica) -> bool:
    """Return whether both are on the same machine: this one, or another that serves its blocks."""
    if not (is_remote(one.address) or is_remote(other.address)):
        return True
    here = one.engine.blocks_at
    return bool(here) and here == other.engine.blocks_at


def _has_equal_blocks(one: Replica, other: Replica) -> bool:
    facts, others = one.engine.facts, other.engine.facts
    if facts is None or others is None:
        return False
    return bool(facts.kv_layout) and facts.kv_layout == others.kv_layout
