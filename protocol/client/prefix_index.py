"""Records which replicas have which prefixes cached, as far as this client knows.

A prompt is divided into pieces of 64 tokens, or of one block if that is longer. A piece is named by
the hash of all tokens up to its end, like the core's blocks. A replica gets the names of the
prompts that were sent to it. Once it has more names than its cache can hold pieces, it forgets the
least recently used, as the cache itself does. If its KV events are followed, it gets the names of
stored blocks and loses those of removed ones.

So memory is bounded. A name may be wrong if requests of other clients have displaced the prefix, or
if the request was cancelled. Then a prefix is computed that was expected to be cached.

A replica that has a piece mostly has all previous pieces: the lengths of prefixes are found by
bisection, and a missing piece in between makes a length too short or too long.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from protocol.adapters import Adapter
from protocol.client.packed_prompt import PackedPrompt, PromptIds
from protocol.kv_events import prefix_hash, prefix_root
from protocol.message import pack_token_ids

MAX_PIECES = 1024
"""Maximum number of named pieces in a prompt; later tokens are not compared."""
_MIN_PIECE_TOKENS = 64
_NAME_BYTES = 8
_NOTHING: OrderedDict[bytes, int] = OrderedDict()


def piece_tokens(block_size: int) -> int:
    """Return the number of tokens in a piece: whole blocks, at least 64 tokens."""
    return block_size * -(-_MIN_PIECE_TOKENS // block_size)


def piece_names(
    prompt: PromptIds, num_tokens: int, cache_salt: str = "", adapter: Adapter | None = None
) -> list[bytes]:
    """Return the names of a prompt's complete pieces of `num_tokens` tokens each."""
    packed = memoryview(_packed(prompt, MAX_PIECES * num_tokens))
    adapter_of = (adapter.adapter_id, adapter.digest) if adapter is not None else (0, b"")
    prefix = prefix_hash(prefix_root(cache_salt, *adapter_of))
    names: list[bytes] = []
    size = 4 * num_tokens
    for end in range(size, len(packed) + 1, size):
        prefix.update(packed[end - size : end])
        names.append(name_of(prefix.digest()))
    return names


def name_of(block_hash: bytes) -> bytes:
    """Return the name of the prefix with this hash."""
    return block_hash[:_NAME_BYTES]


def _packed(prompt: PromptIds, max_tokens: int) -> bytes:
    if isinstance(prompt, PackedPrompt):
        return prompt.packed[: 4 * max_tokens]
    return pack_token_ids(array("I", prompt[:max_tokens]))


class PrefixIndex:
    """The names of the prefixes of all replicas."""

    def __init__(self) -> None:
        self._known: dict[int, OrderedDict[bytes, int]] = {}
        """Names of each replica, the most recently used last, with its place among the holders."""
        self._holders: dict[bytes, list[int]] = {}
        """Replicas of each name in any order; a removed one is replaced by the last one."""

    def __len__(self) -> int:
        """Return the number of names of all replicas."""
        return sum(map(len, self._known.values()))

    def longest(self, names: Sequence[bytes], serves: Callable[[int], bool]) -> int:
        """Return the largest number of pieces of a prompt that any serving replica has cached."""
        return _length(names, lambda name: any(map(serves, self.holders(name))))

    def num_cached(self, replica: int, names: Sequence[bytes]) -> int:
        """Return the number of pieces of a prompt that a replica has cached."""
        return _length(names, self._known.get(replica, _NOTHING).__contains__)

    def holders(self, name: bytes) -> Sequence[int]:
        """Return the replicas that have a piece and all previous ones."""
        return self._holders.get(name, ())

    def add(self, replica: int, names: Sequence[bytes], max_names: int) -> None:
        """Add consecutive pieces that a replica has, or will have; it keeps at most `max_names`."""
        known = self._known.setdefault(replica, OrderedDict())
        for name in reversed(names):  # the last pieces are forgotten first
            if name in known:
                known.move_to_end(name)
            else:
                holders = self._holders.setdefault(name, [])
                known[name] = len(holders)
                holders.append(replica)
        while len(known) > max_names:
            self._drop(*known.popitem(last=False))

    def remove(self, replica: int, names: Iterable[bytes]) -> None:
        """Remove pieces that a replica no longer has."""
        known = self._known.get(replica, _NOTHING)
        for name in names:
            if (place := known.pop(name, None)) is not None:
                self._drop(name, place)

    def forget(self, replica: int) -> None:
        """Forget all pieces of a replica whose cache is empty."""
        for name, place in self._known.pop(replica, _NOTHING).items():
            self._drop(name, place)

    def _drop(self, name: bytes, place: int) -> None:
        """Remove the replica at a place, however many have the piece, in constant time."""
        holders = self._holders[name]
        last = holders.pop()
        if place < len(holders):
            holders[place] = last
            self._known[last][name] = place
        elif not holders:
            del self._holders[name]


def _length(names: Sequence[bytes], is_cached: Callable[[bytes], bool]) -> int:
    low, high = 0, len(names)
    while low < high:
        middle = (low + high) // 2
        if is_cached(names[middle]):
            low = middle + 1
        else:
            high = middle
    return low
