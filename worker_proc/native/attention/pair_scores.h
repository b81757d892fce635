// Scores of a tile, Q · Kᵀ, for one span: queries [rows][dim / 2] times keys [group][dim / 2][16].
//
// R rows form a register tile: their accumulators, [R][4] vectors of 16 slots, stay in registers.
// Each score is one chain of sums over the dimensions, so its bits do not depend on R. Scores are
// neither scaled nor masked; pair_softmax.h does both. With AMX, pair_amx.h replaces these kernels.
// Called by attend_spans (pair_spans.h).

#pragma once

#include "attention/pair_tile.h"

#ifdef __AVX512BF16__

namespace {

// The scores of R rows with the first G groups of a span, by vdpbf16ps.
template <int R, int G, bool kPrefetches>
void score_groups(PairTile& tile, int first, const PairSpan& span, float (*scores)[kSpanSlots]) {
  Vec sums[R][G];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int g = 0; g < G; g++) sums[r][g] = Vec{};
  for (int d = 0; d < tile.dim / 2; d++) {
    VecBits keys[G];
#pragma GCC unroll 4
    for (int g = 0; g < G; g++)
      keys[g] = *reinterpret_cast<const VecBits*>(span.keys[g] + d * kLanes);
    if constexpr (kPrefetches) tile.prefetch.fetch(kLinesPerStep);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int g = 0; g < G; g++)
        sums[r][g] = add_product<Bf16>(sums[r][g], tile.query(first + r)[d], keys[g]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int g = 0; g < G; g++)
      _mm512_store_ps(scores[r] + g * kLanes, (__m512)sums[r][g]);
}

// Scores R rows. Groups past the context are skipped: their scores would be masked anyway.
template <int R, bool kPrefetches>
void score_with_dot_products(PairTile& tile, int first, const PairSpan& span,
                             float (*scores)[kSpanSlots]) {
  constexpr int kHalf = kSpanGroups / 2;
  if (span.num_groups <= kHalf)
    score_groups<R, kHalf, kPrefetches>(tile, first, span, scores);
  else
    score_groups<R, kSpanGroups, kPrefetches>(tile, first, span, scores);
}

// Computes the same bits as score_with_dot_products with multiply-adds (products/float_products.h).
template <int R, bool kPrefetches>
[[gnu::noinline]] void score_with_floats(PairTile& tile, int first, const PairSpan& span,
                                         float (*scores)[kSpanSlots]) {
  const NoSubnormals mode;
  Vec sums[R][kSpanGroups];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int g = 0; g < kSpanGroups; g++) sums[r][g] = Vec{};
  const float* const queries = tile.wide_query(first);
  for (int d = 0; d < tile.dim / 2; d++) {
    if constexpr (kPrefetches) tile.prefetch.fetch(kLinesPerStep);
#pragma GCC unroll 2
    for (int half = 1; half >= 0; half--) {
      Vec keys[kSpanGroups];
#pragma GCC unroll 4
      for (int g = 0; g < kSpanGroups; g++)
        keys[g] = half_floats(*reinterpret_cast<const VecBits*>(span.keys[g] + d * kLanes), half);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const Vec x = (Vec)_mm512_set1_ps(queries[r * tile.dim + 2 * d + half]);
#pragma GCC unroll 4
        for (int g = 0; g < kSpanGroups; g++) sums[r][g] = multiply_add(x, keys[g], sums[r][g]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int g = 0; g < kSpanGroups; g++)
      _mm512_store_ps(scores[r] + g * kLanes, (__m512)sums[r][g]);
}

}  // namespace

#endif
