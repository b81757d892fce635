"""Where a replica reads the KV blocks of another one, at which a request was before."""

from protocol.client.replica import Replica
from protocol.config.addresses import is_remote
from protocol.process.machines import blocks_address_seen_at


def blocks_for(reader: Replica, other: Replica) -> str:
    """Return the address at which a replica reads the blocks of another one's machine.

    Empty: it has them in its own stores, or cannot use them. The other replica may be gone: the
    block server of its machine may live.
    """
    if not _has_equal_blocks(reader, other) or _shares_stores(reader, other):
        return ""
    return _blocks_at(other)


def reaches_blocks(reader: Replica, other: Replica) -> bool:
    """Whether a replica reads the blocks that another one has written."""
    if not _has_equal_blocks(reader, other):
        return False
    return _shares_stores(reader, other) or bool(_blocks_at(other))


def _shares_stores(one: Replica, other: Replica) -> bool:
    """Whether both are on one machine: this one, or another that serves its blocks."""
    if not (is_remote(one.address) or is_remote(other.address)):
        return True
    here = _blocks_at(one)
    return bool(here) and here == _blocks_at(other)


def _blocks_at(replica: Replica) -> str:
    status = replica.client.status
    return "" if status is None else blocks_address_seen_at(status.blocks_at, replica.address)


def _has_equal_blocks(one: Replica, other: Replica) -> bool:
    facts, others = one.client.facts, other.client.facts
    if facts is None or others is None:
        return False
    return bool(facts.kv_layout) and facts.kv_layout == others.kv_layout
