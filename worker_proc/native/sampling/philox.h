// The random number of a sampled token: Philox4x32-10, as worker_proc/sampling/philox.py defines it.
//
// The number depends on the seed of a request and the position of the token alone. Called by choice.h.

#pragma once

#include <cstdint>

namespace {

constexpr int kDrawBits = 62;  // NUM_DRAW_BITS of philox.py

// A random number in [0, 2^kDrawBits).
inline int64_t philox_draw(int64_t seed, int64_t position) {
  uint32_t counter[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32)};
  uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  for (int round = 0; round < 10; round++) {
    const uint64_t even = 0xD2511F53ull * counter[0], odd = 0xCD9E8D57ull * counter[2];
    counter[0] = static_cast<uint32_t>(odd >> 32) ^ counter[1] ^ key[0];
    counter[1] = static_cast<uint32_t>(odd);
    counter[2] = static_cast<uint32_t>(even >> 32) ^ counter[3] ^ key[1];
    counter[3] = static_cast<uint32_t>(even);
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return static_cast<int64_t>(counter[0]) << (kDrawBits - 32) | counter[1] >> (64 - kDrawBits);
}

// The cumulative weight that a draw selects: draw / 2^kDrawBits of the total, rounded down.
inline int64_t scaled(int64_t draw, int64_t total) {
  return static_cast<int64_t>(static_cast<unsigned __int128>(draw) * total >> kDrawBits);
}

}  // namespace
