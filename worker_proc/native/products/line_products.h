// Products of one row with codes on processors without AVX-512: codes are decoded in registers, for the
// outputs of some pairs. Called by multiply_part (products.h).
//
// With more rows, it is faster to decode a block once for all rows (widened_products.h).

#pragma once

#ifndef __AVX512F__

#include <type_traits>

#include "products/widened_products.h"

namespace {

// Whether the codes of a weight can be decoded line by line.
template <class W, class = void>
constexpr bool kHasLines = false;
template <class W>
constexpr bool kHasLines<W, std::void_t<typename W::Lines>> = true;

// Whether the kernels below multiply by a weight.
template <class W>
bool can_multiply_lines(const W&) {
  return true;
}

// Adds the products of the inputs of a step with `Pairs` pairs to sums. A line has the codes of
// successive inputs for 16 outputs. The codes of a pair are `stride` bytes after those of the pair
// before it. Codes that are `ahead` bytes further are fetched, in the order of their addresses: the
// processor detects a stream of such fetches, and reads further ahead. A step uses the lines of both
// halves in turns, which it does not take for a stream.
template <class Lines, int Pairs>
[[gnu::always_inline]] inline void add_lines(const uint8_t* codes, int64_t stride, int64_t ahead,
                                             const float* row, Part (&sums)[Pairs][2 * kParts]) {
  const auto line_of = [&](int pair, int half) {
    return codes + pair * stride + half * Lines::kTileBytes;
  };
  const uint8_t* next = codes + ahead;
#pragma GCC unroll 1
  for (int i = 0; i < kTileInputs; i += Lines::kInputs, codes += kLine, next += 2 * kLine) {
#pragma GCC unroll 8
    for (int pair = 0; pair < Pairs; pair++)
#pragma GCC unroll 8
      for (int line = 0; line < 2; line++) __builtin_prefetch(next + pair * stride + line * kLine);
#pragma GCC unroll 8
    for (int k = 0; k < Lines::kInputs; k++) {
      const Part x = splat_part(row[i + k]);
#pragma GCC unroll 8
      for (int pair = 0; pair < Pairs; pair++)
#pragma GCC unroll 8
        for (int p = 0; p < 2 * kParts; p++) {
          const uint8_t* const line = line_of(pair, p / kParts);
          const Part weights = Lines::weights(line, k, p % kParts * kPartLanes);
          sums[pair][p] = multiply_add_part(x, weights, sums[pair][p]);
        }
      forget_loads();
    }
  }
}

// Multiplies a row by the pairs [pair, pair + Pairs).
template <int Pairs, class W, class Out>
[[gnu::noinline]] void multiply_lines_of(const W& w, FloatRows::Inputs inputs, int64_t r,
                                         int64_t pair, const Out& out) {
  using Lines = typename W::Lines;
  constexpr bool kAreGroups = W::kGroupUnits > 0;
  constexpr int64_t kGroup = kAreGroups ? W::kGroupUnits : kCodedBlock;
  const int64_t stride = w.tile_at(1, 0, 0);
  Part sums[Pairs][2 * kParts] = {};
  for (int64_t first = 0, group = 0; first < w.num_units; first += kGroup, group++) {
    Part own[Pairs][2 * kParts];
    std::memcpy(own, sums, sizeof own);
    if (kAreGroups)
      for (auto& of_pair : own)
        for (Part& part : of_pair) part = splat_part(inputs.begins[group]);
    const int64_t last = std::min(first + kGroup, w.num_units);
    for (int64_t unit = first; unit < last; unit += kUnitStep) {
      // Near the end of these pairs, codes of the next pairs are fetched.
      const bool is_end = w.tile_at(0, 0, unit) + kCodesAhead >= stride;
      const int64_t ahead = kCodesAhead + (is_end ? (Pairs - 1) * stride : 0);
      add_lines<Lines>(w.codes + w.tile_at(pair, 0, unit), stride, ahead, inputs.floats + 2 * unit,
                       own);
    }
    if constexpr (kAreGroups)
      for (int i = 0; i < Pairs; i++) {
        const Vec scales[] = {w.group_scales(pair + i, 0, first), w.group_scales(pair + i, 1, first)};
        Part parts[2 * kParts];
        std::memcpy(parts, scales, sizeof parts);
        for (int p = 0; p < 2 * kParts; p++)
          own[i][p] = multiply_add_part(own[i][p], parts[p], sums[i][p]);
      }
    std::memcpy(sums, own, sizeof sums);
  }
  for (int i = 0; i < Pairs; i++) {
    Vec halves[2];
    std::memcpy(halves, sums[i], sizeof halves);
    out(r, pair + i, halves[0], halves[1]);
  }
}

// Multiplies a row by the pairs [pair, last_pair), with the bits of multiply_many_rows.
template <class W, class Out>
void multiply_lines(const W& w, FloatRows::Inputs inputs, int64_t r, int64_t pair, int64_t last_pair,
                    const Out& out) {
  for (; pair + kPairsOfOneRow <= last_pair; pair += kPairsOfOneRow)
    multiply_lines_of<kPairsOfOneRow>(w, inputs, r, pair, out);
  for (; pair < last_pair; pair++) multiply_lines_of<1>(w, inputs, r, pair, out);
}

}  // namespace

#endif
