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

// Adds the products of the inputs [first, last) of a tile with `Pairs` pairs to sums. A line has the
// codes of successive inputs for 16 outputs. The codes of a pair are `stride` bytes after those of the
// pair before it. Codes that are `ahead` bytes further are fetched, in the order of their addresses: the
// processor detects a stream of such fetches, and reads further ahead. A tile uses the lines of both
// halves in turns, which it does not take for a stream.
template <class Lines, int Pairs>
[[gnu::always_inline]] inline void add_lines(const uint8_t* tile, int64_t first, int64_t last,
                                             int64_t stride, int64_t ahead, const float* row,
                                             Part (&sums)[Pairs][2 * kParts]) {
  const int64_t begin = first / Lines::kInputs * kLine;
  const uint8_t *codes = tile + begin, *next = tile + ahead + 2 * begin;
  const auto line_of = [&](int pair, int half) {
    return codes + pair * stride + half * Lines::kTileBytes;
  };
#pragma GCC unroll 1
  for (int64_t i = first; i < last; i += Lines::kInputs, codes += kLine, next += 2 * kLine) {
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

// Scales the sums of a group of inputs, and adds them to the sums of the groups before it.
template <int Pairs, class W>
[[gnu::always_inline]] inline void add_group(const W& w, int64_t pair, int64_t input, bool has_terms,
                                             float input_sum, const Part (&own)[Pairs][2 * kParts],
                                             Part (&sums)[Pairs][2 * kParts]) {
#pragma GCC unroll 8
  for (int i = 0; i < Pairs; i++) {
    const GroupFactors low = w.group_factors(pair + i, 0, input);
    const GroupFactors high = w.group_factors(pair + i, 1, input);
    const Vec all_scales[] = {low.scales, high.scales}, all_terms[] = {low.terms, high.terms};
    Part scales[2 * kParts], terms[2 * kParts];
    std::memcpy(scales, all_scales, sizeof scales);
    std::memcpy(terms, all_terms, sizeof terms);
#pragma GCC unroll 8
    for (int p = 0; p < 2 * kParts; p++) {
      if (has_terms) sums[i][p] = multiply_add_part(splat_part(input_sum), terms[p], sums[i][p]);
      sums[i][p] = multiply_add_part(own[i][p], scales[p], sums[i][p]);
    }
  }
}

// Multiplies a row by the pairs [pair, pair + Pairs).
template <int Pairs, class W, class Out>
[[gnu::noinline]] void multiply_lines_of(const W& w, FloatRows::Inputs inputs, int64_t r,
                                         int64_t pair, const Out& out) {
  using Lines = typename W::Lines;
  constexpr bool kScalesSums = kMayScaleSums<W>;
  const int64_t num_inputs = 2 * w.num_units, stride = w.tile_at(1, 0, 0);
  const InputFactors factors = input_factors_of(w);
  const int64_t group = kScalesSums ? factors.group_inputs : num_inputs;
  Part sums[Pairs][2 * kParts] = {};
  for (int64_t first = 0; first < num_inputs; first += group) {
    const int64_t last = std::min(first + group, num_inputs);
    const float input_sum = kScalesSums ? inputs.sums[first / group] : 0.0f;
    const float begin_of_sums = factors.has_terms ? 0.0f : input_sum;
    Part own[Pairs][2 * kParts];
#pragma GCC unroll 8
    for (int i = 0; i < Pairs; i++)
#pragma GCC unroll 8
      for (int p = 0; p < 2 * kParts; p++) own[i][p] = splat_part(begin_of_sums);
    for (int64_t input = first; input < last; input += kTileInputs) {
      const int64_t tile = w.tile_at(0, 0, input / 2), begin = input % kTileInputs;
      // Near the end of these pairs, codes of the next pairs are fetched.
      const bool is_end = tile + kCodesAhead >= stride;
      const int64_t ahead = kCodesAhead + (is_end ? (Pairs - 1) * stride : 0);
      add_lines<Lines>(w.codes + w.tile_at(pair, 0, input / 2), begin,
                       std::min(begin + last - input, kTileInputs), stride, ahead,
                       inputs.floats + input - begin, own);
    }
    if constexpr (kScalesSums)
      add_group(w, pair, first, factors.has_terms, input_sum, own, sums);
    else
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
