// Online softmax of a tile: the scores of one span become weights.
//
// Scores are scaled, capped, biased and masked, in units of log2(e), and weights are powers of two
// relative to the running maximum of the row. The maximum is raised only when a score exceeds it by
// more than kRaiseThresholdLog2, so most spans rescale nothing. Weights are rounded to bfloat16 for
// the product with the values; their sum is float32. Called by attend_spans (pair_spans.h).

#pragma once

#include "attention/pair_tile.h"

#ifdef __AVX512BF16__

namespace {

// Multiplies a row's scores of a span by the scales of quantized keys, and applies the soft cap and the
// biases. Returns the factor by which the scores must still be multiplied.
template <bool kHasScales>
float adjust_scores(const PairTile& tile, int r, const PairSpan& span, __m512 (&s)[kSpanGroups]) {
  float factor = tile.scale * kLog2E;
  for (int g = 0; g < kSpanGroups; g++)
    if constexpr (kHasScales) s[g] = _mm512_mul_ps(s[g], _mm512_load_ps(span.key_scales[g]));
  if (tile.softcap > 0) {
    factor = tile.softcap * kLog2E;
    for (int g = 0; g < kSpanGroups; g++)
      s[g] = (__m512)tanh_of((Vec)s[g] * (tile.scale / tile.softcap));
  }
  if (!tile.biases.reach(r, span.base, kSpanSlots)) return factor;
  const __m512 unit = _mm512_set1_ps(kLog2E), own = _mm512_set1_ps(tile.biases.own(r));
  for (int g = 0; g < kSpanGroups; g++) {
    const __m512 bias =
        _mm512_sub_ps(_mm512_loadu_ps(tile.biases.at(r, span.base + g * kLanes)), own);
    s[g] = _mm512_fmadd_ps(s[g], _mm512_set1_ps(factor), _mm512_mul_ps(bias, unit));
  }
  return 1.0f;
}

// Sets the scores of positions that a row does not see to -infinity.
inline void mask_scores(const PairTile& tile, int r, const PairSpan& span, __m512 (&s)[kSpanGroups]) {
  const int low = tile.visible_from[r] - span.base;
  const int end = std::min(tile.position[r] - span.base + 1, span.count);
  if (low <= 0 && end >= kSpanSlots) return;
  for (int g = 0; g < kSpanGroups; g++) {
    const int from = std::clamp(low - g * kLanes, 0, kLanes);
    const int to = std::clamp(end - g * kLanes, 0, kLanes);
    const uint32_t visible = ((1u << to) - 1) & ~((1u << from) - 1);
    s[g] = _mm512_mask_mov_ps(_mm512_set1_ps(kNegInf), static_cast<__mmask16>(visible), s[g]);
  }
}

// Raises the running maximum where the scores times a factor require it. Returns false if all
// positions up to the end of the span are masked.
inline bool update_maximum(PairTile& tile, int r, const __m512 (&s)[kSpanGroups], float factor) {
  const __m512 maxima = _mm512_max_ps(_mm512_max_ps(s[0], s[1]), _mm512_max_ps(s[2], s[3]));
  const __m512 limit =
      _mm512_add_ps(_mm512_set1_ps(tile.running_max[r]), _mm512_set1_ps(kRaiseThresholdLog2));
  const bool exceeds =
      _mm512_cmp_ps_mask(_mm512_mul_ps(maxima, _mm512_set1_ps(factor)), limit, _CMP_NLE_UQ);
  if (!exceeds && tile.running_max[r] != kNegInf) return true;
  const float highest = _mm512_reduce_max_ps(maxima) * factor;
  if (highest == kNegInf && tile.running_max[r] == kNegInf) return false;
  if (highest > tile.running_max[r]) tile.raise_maximum(r, highest);
  return true;
}

// Replaces a row's scores of a span by softmax weights, relative to the running maximum, and adds
// them to the row's sum. kHasScales: keys and values are codes.
template <bool kHasScales>
void softmax_row(PairTile& tile, int r, const PairSpan& span, const float* scores) {
  __m512 s[kSpanGroups], weights[kSpanGroups];
  for (int g = 0; g < kSpanGroups; g++) s[g] = _mm512_load_ps(scores + g * kLanes);
  const float factor = adjust_scores<kHasScales>(tile, r, span, s);
  mask_scores(tile, r, span, s);
  if (!update_maximum(tile, r, s, factor)) {
    std::memset(tile.weights[r], 0, sizeof(tile.weights[r]));
    std::memset(tile.wide_weights[r], 0, sizeof(tile.wide_weights[r]));
    return;
  }
  const __m512 factors = _mm512_set1_ps(factor), maximum = _mm512_set1_ps(tile.running_max[r]);
  for (int g = 0; g < kSpanGroups; g++) {
    const __m512 score = s[g];
    s[g] = weights[g] = power_of_two(_mm512_fmsub_ps(score, factors, maximum));
    if constexpr (kHasScales) {  // scales of masked slots may be NaN
      const __mmask16 is_visible =
          _mm512_cmp_ps_mask(score, _mm512_set1_ps(kNegInf), _CMP_NEQ_UQ);
      weights[g] = _mm512_maskz_mul_ps(is_visible, s[g], _mm512_load_ps(span.value_scales[g]));
    }
  }
  for (int g = 0; g < kSpanGroups; g += 2)
    _mm512_store_si512(tile.weights[r] + g * kLanes,
                       (__m512i)_mm512_cvtne2ps_pbh(weights[g + 1], weights[g]));
  if (troika_uses_floats) widen_to_floats(tile.weights[r], kSpanSlots, tile.wide_weights[r]);
  const __m512 total = _mm512_add_ps(_mm512_add_ps(s[0], s[1]), _mm512_add_ps(s[2], s[3]));
  _mm512_store_ps(tile.weight_sums[r], _mm512_add_ps(_mm512_load_ps(tile.weight_sums[r]), total));
}

}  // namespace

#endif
