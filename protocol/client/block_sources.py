"""Where a replica reads the KV blocks of the replica that had the request before."""

from protocol.client.replica import Replica
from protocol.config.addresses import is_remote


def blocks_for(reader: Replica, other: Replica) -> str:
    """Return the address at which a replica reads the blocks of another one's machine.

    Empty: it has them in its own stores, or cannot use them. The other replica may be gone: the
    block server of its machine may live.
    """
    if not _has_equal_blocks(reader, other) or _shares_stores(reader, other):
        return ""
    return other.client.blocks_at


def reaches_blocks(reader: Replica, other: Replica) -> bool:
    """Whether a replica reads the blocks that another one has written."""
    if not _has_equal_blocks(reader, other):
        return False
    return _shares_stores(reader, other) or bool(other.client.blocks_at)


def _shares_stores(one: Replica, other: Replica) -> bool:
    """Whether both are on one machine: this one, or another that serves its blocks."""
    if not (is_remote(one.address) or is_remote(other.address)):
        return True
    here = one.client.blocks_at
    return bool(here) and here == other.client.blocks_at


def _has_equal_blocks(one: Replica, other: Replica) -> bool:
    facts, others = one.client.facts, other.client.facts
    if facts is None or others is None:
        return False
    return bool(facts.kv_layout) and facts.kv_layout == others.kv_layout
