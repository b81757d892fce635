"""Counter-based random numbers: Philox4x32-10 over int64 tensors.

A draw depends only on (seed, position), so a request draws the same numbers alone, in any batch,
after a preemption and on any device. Words are 32-bit values held in int64.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

NUM_DRAW_BITS = 62  # width of a draw: the product of two halves still fits in int64

_NUM_ROUNDS = 10
_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox4x32(counter: Tensor, key: Tensor) -> Tensor:
    """Encrypt counters, int64 [4, n], with keys, int64 [2, n]; return int64 [4, n]."""
    multipliers = torch.tensor(_MULTIPLIERS, device=counter.device)[:, None]
    weyl = torch.tensor(_WEYL, device=counter.device)[:, None]
    even, odd = counter[0::2], counter[1::2]
    for _ in range(_NUM_ROUNDS):
        # The product of two words wraps around in int64, but keeps all of its 64 bits; the mask
        # removes the sign that the shift extends.
        product = even * multipliers
        high = (product >> 32) & _WORD
        even = high.flip(0) ^ odd ^ key
        odd = (product & _WORD).flip(0)
        key = (key + weyl) & _WORD
    return torch.stack((even[0], odd[0], even[1], odd[1]))


def draw(seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
    """Draw a uniform int64 in [0, 2**62) per signed 64-bit seed and position, on the CPU."""
    seed = torch.tensor(seeds, dtype=torch.int64)
    position = torch.tensor(positions, dtype=torch.int64)
    zeros = torch.zeros_like(position)
    counter = torch.stack((position & _WORD, (position >> 32) & _WORD, zeros, zeros))
    key = torch.stack((seed & _WORD, (seed >> 32) & _WORD))
    words = philox4x32(counter, key)
    return (words[0] << (NUM_DRAW_BITS - 32)) | (words[1] >> (64 - NUM_DRAW_BITS))
