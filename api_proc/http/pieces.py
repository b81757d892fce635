"""Divides a response into pieces that are written one at a time, so that no copy is buffered."""

from collections.abc import Iterator, Sequence

PIECE_BYTES = 64 * 1024
"""Bytes of a response that are written at once if it has more."""


def divided(pieces: Sequence[bytes]) -> Iterator[bytes]:
    """Yield the same bytes in pieces of up to `PIECE_BYTES`; small neighbours are joined."""
    joined: list[bytes] = []
    num_bytes = 0
    for piece in pieces:
        for start in range(0, len(piece), PIECE_BYTES):
            part = piece[start : start + PIECE_BYTES]
            if num_bytes + len(part) > PIECE_BYTES:
                yield b"".join(joined)
                joined, num_bytes = [], 0
            joined.append(part)
            num_bytes += len(part)
    yield b"".join(joined)
