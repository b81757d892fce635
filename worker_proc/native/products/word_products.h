// Products of one row with codes on processors without AVX-512: each word of codes is decoded in
// registers, for the outputs of a pair. Called by multiply_part (products.h).
//
// With more rows, it is faster to decode a block once for all rows (widened_products.h).

#pragma once

#ifndef __AVX512F__

#include <type_traits>

#include "products/widened_products.h"

namespace {

// Whether the codes of a weight can be decoded word by word.
template <class W, class = void>
constexpr bool kHasWords = false;
template <class W>
constexpr bool kHasWords<W, std::void_t<typename W::Words>> = true;

// Adds the products of the inputs of a step with a pair to sums. Words hold the codes of successive
// inputs, each for all outputs.
template <class Words>
[[gnu::always_inline]] inline void add_words(const uint8_t* codes, const float* row,
                                             Part (&sums)[2 * kParts]) {
#pragma GCC unroll 1
  for (int word = 0; word < kTileInputs / Words::kInputs; word++, row += Words::kInputs) {
    PartBits bits[2 * kParts];
#pragma GCC unroll 8
    for (int p = 0; p < 2 * kParts; p++) {
      const uint8_t* const line = codes + p / kParts * Words::kTileBytes + word * kLine;
      bits[p] = *reinterpret_cast<const PartBits*>(line + p % kParts * sizeof(Part));
      if (p % kParts == 0) __builtin_prefetch(line + kCodesAhead);
    }
#pragma GCC unroll 8
    for (int k = 0; k < Words::kInputs; k++) {
      const Part x = splat_part(row[k]);
#pragma GCC unroll 8
      for (int p = 0; p < 2 * kParts; p++)
        sums[p] = multiply_add_part(x, Words::weights(bits[p], k), sums[p]);
    }
  }
}

// Multiplies a row by the pairs [pair, last_pair), with the bits of multiply_many_rows.
template <class W, class Out>
void multiply_words(const W& w, const float* row, int64_t r, int64_t pair, int64_t last_pair,
                    const Out& out) {
  using Words = typename W::Words;
  constexpr int64_t kGroup = W::kGroupUnits > 0 ? W::kGroupUnits : kCodedBlock;
  for (; pair < last_pair; pair++) {
    Part sums[2 * kParts] = {};
    for (int64_t first = 0; first < w.num_units; first += kGroup) {
      Part own[2 * kParts] = {};
      if (W::kGroupUnits == 0) std::memcpy(own, sums, sizeof own);
      const int64_t last = std::min(first + kGroup, w.num_units);
      for (int64_t unit = first; unit < last; unit += kUnitStep)
        add_words<Words>(w.codes + w.tile_at(pair, 0, unit), row + 2 * unit, own);
      if constexpr (W::kGroupUnits > 0) {
        const Vec scales[] = {w.group_scales(pair, 0, first), w.group_scales(pair, 1, first)};
        Part parts[2 * kParts];
        std::memcpy(parts, scales, sizeof parts);
        for (int p = 0; p < 2 * kParts; p++) sums[p] = multiply_add_part(own[p], parts[p], sums[p]);
      } else {
        std::memcpy(sums, own, sizeof own);
      }
    }
    Vec halves[2];
    std::memcpy(halves, sums, sizeof sums);
    out(r, pair, halves[0], halves[1]);
  }
}

}  // namespace

#endif
