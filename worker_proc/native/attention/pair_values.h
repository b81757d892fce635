// Weighted values of a tile, P · V, for one span: softmax weights [rows][64] in bfloat16 times values
// [group][slot / 2][vdim][2], added to the accumulators of the rows in float32.
//
// As in pair_scores.h, R rows form a register tile, and each sum is one chain over the positions.
// With AMX, pair_amx.h replaces the products. Called by attend_spans (pair_spans.h).

#pragma once

#include "attention/pair_tile.h"

#ifdef __AVX512BF16__

namespace {

// Copies the values of the first `used` slots of a group, and zeros for the others: those slots belong
// to no token of the context, and may hold NaN.
inline void copy_masked(const Unit* from, int used, int vdim, Unit* to) {
  for (int pair = 0; pair < kGroupPairs; pair++) {
    const int num = used - 2 * pair;
    const Unit mask = num >= 2 ? ~Unit{0} : num == 1 ? 0xffff : 0;
    const VecBits masks = mask - VecBits{};
    for (int d = pair * vdim; d < (pair + 1) * vdim; d += kLanes)
      *reinterpret_cast<VecBits*>(to + d) = *reinterpret_cast<const VecBits*>(from + d) & masks;
  }
}

// Replaces the last group of a span by a masked copy if the context ends within it.
inline void mask_last_group(PairTile& tile, PairSpan& span) {
  const int used = span.count % kLanes;
  if (used == 0) return;
  const Unit*& values = span.values[span.num_groups - 1];
  copy_masked(values, used, tile.vdim, tile.copied_values);
  values = tile.copied_values;
}

// Adds the weighted values of R rows, C vectors of dimensions from `column` on, by vdpbf16ps.
template <int R, int C, bool kPrefetches>
void accumulate_with_dot_products(PairTile& tile, int first, int column, const PairSpan& span) {
  float* const out = tile.accumulator(first) + column;
  const int64_t stride = tile.accumulator_stride();  // a store could change it, for the compiler
  Vec sums[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) sums[r][c] = (Vec)_mm512_load_ps(out + r * stride + c * kLanes);
  for (int g = span.first_group; g < span.num_groups; g++)
#pragma GCC unroll 1  // otherwise the addresses do not fit into registers
    for (int pair = 0; pair < kGroupPairs; pair++) {
      const Unit* values = span.values[g] + pair * tile.vdim + column;
      VecBits v[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) v[c] = *reinterpret_cast<const VecBits*>(values + c * kLanes);
      if constexpr (kPrefetches) tile.prefetch.fetch(kLinesPerStep);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        Unit weights;
        std::memcpy(&weights, tile.weights[first + r] + g * kLanes + 2 * pair, sizeof(Unit));
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) sums[r][c] = add_product<Bf16>(sums[r][c], weights, v[c]);
      }
    }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++)
      _mm512_store_ps(out + r * stride + c * kLanes, (__m512)sums[r][c]);
}

// Computes the same bits as accumulate_with_dot_products with float32 multiply-adds.
template <int R, int C, bool kPrefetches>
[[gnu::noinline]] void accumulate_with_floats(PairTile& tile, int first, int column,
                                              const PairSpan& span) {
  const NoSubnormals mode;
  float* const out = tile.accumulator(first) + column;
  const int64_t stride = tile.accumulator_stride();  // a store could change it, for the compiler
  Vec sums[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) sums[r][c] = (Vec)_mm512_load_ps(out + r * stride + c * kLanes);
  for (int g = span.first_group; g < span.num_groups; g++)
#pragma GCC unroll 1
    for (int pair = 0; pair < kGroupPairs; pair++) {
      const Unit* values = span.values[g] + pair * tile.vdim + column;
      const float* const weights = tile.wide_weights[first] + g * kLanes + 2 * pair;
      if constexpr (kPrefetches) tile.prefetch.fetch(kLinesPerStep);
#pragma GCC unroll 2
      for (int half = 1; half >= 0; half--) {
        Vec v[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; c++)
          v[c] = half_floats(*reinterpret_cast<const VecBits*>(values + c * kLanes), half);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          const Vec x = (Vec)_mm512_set1_ps(weights[r * kSpanSlots + half]);
#pragma GCC unroll 4
          for (int c = 0; c < C; c++) sums[r][c] = multiply_add(x, v[c], sums[r][c]);
        }
      }
    }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++)
      _mm512_store_ps(out + r * stride + c * kLanes, (__m512)sums[r][c]);
}

// Adds the weighted values of R rows, all dimensions.
template <int R, bool kPrefetches>
void accumulate_rows(PairTile& tile, int first, const PairSpan& span) {
  int column = 0;
  constexpr auto kFour = accumulate_with_dot_products<R, 4, kPrefetches>;
  constexpr auto kTwo = accumulate_with_dot_products<R, 2, kPrefetches>;
  const auto add_four = troika_uses_floats ? accumulate_with_floats<R, 4, kPrefetches> : kFour;
  const auto add_two = troika_uses_floats ? accumulate_with_floats<R, 2, kPrefetches> : kTwo;
  for (; column + 4 * kLanes <= tile.vdim; column += 4 * kLanes)
    add_four(tile, first, column, span);
  for (; column < tile.vdim; column += 2 * kLanes) add_two(tile, first, column, span);
}

}  // namespace

#endif
