"""Which replicas have which prefixes cached, as far as this client's own requests show.

A prompt is cut into pieces of 64 tokens, and each piece is named by a hash of all tokens up to its
end. A replica gets the names of the prompts that were sent to it. It forgets those that were not
used for the longest time once it has more of them than its cache has room for, as the cache itself
does. So memory is bounded, and the index errs only where requests of other clients have displaced
something, or where a request was cancelled: then a prefix is computed that was expected to be
cached.

Invariant: a replica that has a piece has all pieces before it.
"""

import sys
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from protocol.adapters import Adapter
from protocol.client.packed_prompt import PackedPrompt, PromptIds
from protocol.client.routing import CachedPrefix

PIECE_TOKENS = 64
MAX_PIECES = 1024
"""Pieces of a prompt that have names; what is behind them is not compared."""
_DIGEST_BYTES = 8
_PIECE_BYTES = 4 * PIECE_TOKENS


def piece_names(
    prompt: PromptIds, cache_salt: str = "", adapter: Adapter | None = None
) -> list[bytes]:
    """Return the names of a prompt's whole pieces. Salt and adapter are part of them."""
    packed = _packed(prompt)
    seed = f"{cache_salt}\0{0 if adapter is None else adapter.adapter_id}"
    name = blake2b(seed.encode(errors="surrogatepass"), digest_size=_DIGEST_BYTES).digest()
    names: list[bytes] = []
    for end in range(_PIECE_BYTES, min(len(packed), MAX_PIECES * _PIECE_BYTES) + 1, _PIECE_BYTES):
        piece = packed[end - _PIECE_BYTES : end]
        name = blake2b(piece, key=name, digest_size=_DIGEST_BYTES).digest()
        names.append(name)
    return names


def _packed(prompt: PromptIds) -> bytes:
    if isinstance(prompt, PackedPrompt):
        return prompt.packed
    ids = array("i", prompt[: MAX_PIECES * PIECE_TOKENS])
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


class PrefixIndex:
    """The names of the prefixes of all replicas."""

    def __init__(self) -> None:
        self._known: dict[int, OrderedDict[bytes, None]] = {}
        """Of each replica, the one last used at the end."""
        self._holders: dict[bytes, list[int]] = {}

    def __len__(self) -> int:
        """Names of all replicas together."""
        return sum(map(len, self._known.values()))

    def find(self, names: Sequence[bytes]) -> CachedPrefix:
        """Return the longest prefix of a prompt that is cached anywhere."""
        low, high = 0, len(names)
        while low < high:
            middle = (low + high) // 2
            if names[middle] in self._holders:
                low = middle + 1
            else:
                high = middle
        return CachedPrefix(low * PIECE_TOKENS, self._holders[names[low - 1]] if low else ())

    def add(self, replica: int, names: Sequence[bytes], cache_tokens: int) -> None:
        """Enter a prompt that is sent to a replica, whose cache has room for `cache_tokens`."""
        known = self._known.setdefault(replica, OrderedDict())
        for name in reversed(names):  # so that the last pieces are forgotten first
            if name not in known:
                known[name] = None
                self._holders.setdefault(name, []).append(replica)
            known.move_to_end(name)
        while len(known) > cache_tokens // PIECE_TOKENS:
            self._remove(replica, known.popitem(last=False)[0])

    def forget(self, replica: int) -> None:
        """Forget what a replica has: its cache is empty."""
        for name in self._known.pop(replica, ()):
            self._remove(replica, name)

    def _remove(self, replica: int, name: bytes) -> None:
        holders = self._holders[name]
        holders.remove(replica)
        if not holders:
            del self._holders[name]
