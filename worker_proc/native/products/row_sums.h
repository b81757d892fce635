// Register-tile kernels: products of a few rows with one or two pairs of panels.
//
// Rows are float, Bf16, or int8_t codes, whose accumulators are integers. With AVX-512, weights may be
// decoded in registers (compact_weights.h, grouped_codes.h); otherwise they are multiplied as stored.
// Used by vector_products.h, tile_products.h and widened_products.h.

#pragma once

#include <type_traits>

#include "products/product_inputs.h"

namespace {

template <typename T>
struct SumsFor {
  typedef Vec Type;
};

template <>
struct SumsFor<int8_t> {
  typedef VecInt Type;
};

template <typename T>
using SumsOf = typename SumsFor<T>::Type;

#ifdef __AVX512F__

constexpr int kMaxRows = 12;  // rows whose accumulators for one pair fit into the registers
constexpr bool kHasManyRegisters = true;
// Pairs that one row is multiplied by at once. A thread reads few memory streams fastest.
constexpr int kPairsOfOneRow = 1;

template <typename T>
inline SumsOf<T> add_product(SumsOf<T> sum, Unit unit, VecBits weights);

template <>
inline Vec add_product<float>(Vec sum, Unit unit, VecBits weights) {
  return multiply_add(splat(float_of(unit)), (Vec)weights, sum);
}

template <>
inline Vec add_product<Bf16>(Vec sum, Unit unit, VecBits weights) {
#ifdef __AVX512BF16__
  const __m512i x = _mm512_set1_epi32(static_cast<int>(unit));
  return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)weights);
#else
  sum = add_product<float>(sum, unit << 16, weights << 16);
  return add_product<float>(sum, unit & 0xffff0000u, weights & 0xffff0000u);
#endif
}

// The codes of weights are unsigned, and those of rows are signed.
template <>
inline VecInt add_product<int8_t>(VecInt sum, Unit unit, VecBits weights) {
  const __m512i x = _mm512_set1_epi32(static_cast<int>(unit)), w = (__m512i)weights;
#ifdef __AVX512VNNI__
  return (VecInt)_mm512_dpbusd_epi32((__m512i)sum, w, x);
#else
  const __m512i low = _mm512_madd_epi16(_mm512_and_si512(w, _mm512_set1_epi16(0xff)),
                                        _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8));
  const __m512i high = _mm512_madd_epi16(_mm512_srli_epi16(w, 8), _mm512_srai_epi16(x, 8));
  return (VecInt)_mm512_add_epi32((__m512i)sum, _mm512_add_epi32(low, high));
#endif
}

// Sequential reads of the inputs of R rows. One pointer and the stride address three rows, so twelve
// rows need few registers.
template <int R>
class RowInputs {
 public:
  [[gnu::always_inline]] explicit RowInputs(const UnitRows& rows) : stride_(rows.stride) {
#pragma GCC unroll 32
    for (int r = 0; r < R; r += kPerPointer) {
      const Unit*& at = inputs_[r / kPerPointer];
      at = rows.data + r * rows.stride;
      asm("" : "+r"(at));  // otherwise GCC would address all rows relative to the first one
    }
  }

  // The unit of a row that is `ahead` units after the current one.
  [[gnu::always_inline]] Unit at(int row, int64_t ahead) const {
    return inputs_[row / kPerPointer][row % kPerPointer * stride_ + ahead];
  }

  [[gnu::always_inline]] void advance(int count) {
#pragma GCC unroll 32
    for (int r = 0; r < R; r += kPerPointer) inputs_[r / kPerPointer] += count;
  }

 private:
  static constexpr int kPerPointer = 3;

  const int64_t stride_;
  const Unit* inputs_[(R + kPerPointer - 1) / kPerPointer];
};

struct DoNothing {
  [[gnu::always_inline]] void operator()() const {}
};

// Accumulates the products of R rows with the units [first, last) of P panels. With kGroups = 2, the
// units of the next group are multiplied too, into separate accumulators. `meanwhile` is called once
// for each step of kUnitStep units.
template <typename T, int kGroups, int R, int P, class W, class F = DoNothing>
[[gnu::always_inline]] inline void add_products(const W& w, RowInputs<R>& inputs, int64_t pair,
                                                int64_t first, int64_t last, WeightsAhead& ahead,
                                                SumsOf<T> (&sums)[kGroups * R][P],
                                                const F& meanwhile = {}) {
  constexpr int64_t kSecondGroup = (kGroups - 1) * W::kGroupUnits;
  static_assert(kGroups == 1 || (kGroups == 2 && W::kMakesVectors));
  alignas(64) Unit space[W::kAreCodes ? P : 1][kTile];
  for (; first < last; first += kUnitStep) {
    for (int group = 0; group < kGroups; group++) ahead.fetch<kL2Cache>();
    meanwhile();
    if constexpr (W::kMakesVectors)
      if (!w.has_exceptions(pair, first)) {
        static_assert(P == 2);
        constexpr int kVectors = 4;  // vectors that one iteration decodes
        const typename W::Step step(w, pair, first), second(w, pair, first + kSecondGroup);
#pragma GCC unroll 1
        for (int part = 0; part < kUnitStep; part += kVectors) {
#pragma GCC unroll 8
          for (int i = 0; i < kGroups * kVectors; i++) {
            const int group = i % kGroups, v = i / kGroups;
            const typename W::Step& from = group == 0 ? step : second;
            const VecBits low = from.vector(part + v, 0), high = from.vector(part + v, 1);
#pragma GCC unroll 32
            for (int r = 0; r < R; r++) {
              const Unit x = inputs.at(r, group * W::kGroupUnits + v);
              SumsOf<T>(&own)[P] = sums[group * R + r];
              own[0] = add_product<T>(own[0], x, low);
              own[1] = add_product<T>(own[1], x, high);
            }
          }
          inputs.advance(kVectors);
        }
        continue;
      }
    const Unit* tiles[P];
#pragma GCC unroll 32
    for (int p = 0; p < P; p++)
      tiles[p] = w.tile(pair + p / 2, p % 2, first, space[W::kAreCodes ? p : 0]);
#pragma GCC unroll 1
    for (int64_t unit = 0; unit < kUnitStep; unit++) {
      VecBits weights[P];
#pragma GCC unroll 32
      for (int p = 0; p < P; p++) {
        weights[p] = *reinterpret_cast<const VecBits*>(tiles[p]);
        tiles[p] += kLanes;
      }
#pragma GCC unroll 32
      for (int r = 0; r < R; r++) {
        const Unit x = inputs.at(r, 0);
#pragma GCC unroll 32
        for (int p = 0; p < P; p++) sums[r][p] = add_product<T>(sums[r][p], x, weights[p]);
      }
      inputs.advance(1);
    }
  }
}

// Adds the sums of one or two groups, from unit `first` on, times the groups' scales to the sums of the
// groups before them.
template <typename T, int kGroups, int R, int P, class W>
[[gnu::always_inline]] inline void add_groups(const W& w, RowInputs<R>& inputs, int64_t pair,
                                              int64_t first, WeightsAhead& ahead,
                                              SumsOf<T> (&sums)[R][P]) {
  SumsOf<T> own[kGroups * R][P] = {};
  const int64_t last = std::min(first + W::kGroupUnits, w.num_units);
  add_products<T, kGroups>(w, inputs, pair, first, last, ahead, own);
  inputs.advance((kGroups - 1) * W::kGroupUnits);
#pragma GCC unroll 2
  for (int group = 0; group < kGroups; group++, first += W::kGroupUnits)
#pragma GCC unroll 32
    for (int p = 0; p < P; p++) {
      const Vec scales = w.group_scales(pair + p / 2, p % 2, first);
#pragma GCC unroll 32
      for (int r = 0; r < R; r++)
        sums[r][p] = multiply_add(own[group * R + r][p], scales, sums[r][p]);
    }
}

// Computes the sums of R rows and P panels, from those of `pair` on.
template <typename T, int R, int P, class W, class F = DoNothing>
[[gnu::always_inline]] inline void sum_products(const W& w, UnitRows rows, int64_t pair,
                                                WeightsAhead& ahead, SumsOf<T> (&sums)[R][P],
                                                const F& meanwhile = {}) {
  RowInputs<R> inputs(rows);
#pragma GCC unroll 32
  for (int r = 0; r < R; r++)
#pragma GCC unroll 32
    for (int p = 0; p < P; p++) sums[r][p] = SumsOf<T>{};
  if constexpr (W::kGroupUnits == 0) {
    add_products<T, 1>(w, inputs, pair, 0, w.num_units, ahead, sums, meanwhile);
  } else {
    int64_t first = 0;
    // The products of a group are one dependency chain. One or two rows have too few chains to hide the
    // latency, so two groups are interleaved.
    constexpr int64_t kTwoGroups = 2 * W::kGroupUnits;
    if constexpr (W::kMakesVectors && R <= 2)
      for (; first + kTwoGroups <= w.num_units; first += kTwoGroups)
        add_groups<T, 2>(w, inputs, pair, first, ahead, sums);
    for (; first < w.num_units; first += W::kGroupUnits)
      add_groups<T, 1>(w, inputs, pair, first, ahead, sums);
  }
}

#else

constexpr int kMaxRows = 3;
constexpr bool kHasManyRegisters = false;
constexpr int kPairsOfOneRow = 2;  // one pair has too few chains to hide the latency

// The codes of weights are unsigned, and those of rows are signed.
inline PartBits add_coded(PartBits sum, Unit unit, PartBits weights) {
#ifdef __AVX2__
  const __m256i x = _mm256_set1_epi32(static_cast<int>(unit)), w = (__m256i)weights;
#ifdef __AVXVNNI__
  return (PartBits)_mm256_dpbusd_avx_epi32((__m256i)sum, w, x);
#else
  const __m256i low = _mm256_madd_epi16(_mm256_and_si256(w, _mm256_set1_epi16(0xff)),
                                        _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
  const __m256i high = _mm256_madd_epi16(_mm256_srli_epi16(w, 8), _mm256_srai_epi16(x, 8));
  return (PartBits)_mm256_add_epi32((__m256i)sum, _mm256_add_epi32(low, high));
#endif
#else
  for (int k = 0; k < 4; k++)
    sum += (weights >> 8 * k & 0xff) * static_cast<uint32_t>(static_cast<int8_t>(unit >> 8 * k));
  return sum;
#endif
}

// For codes, `sum` holds the bits of integers.
template <typename T>
inline Part add_product(Part sum, Unit unit, PartBits weights) {
  if constexpr (std::is_same<T, int8_t>::value)
    return (Part)add_coded((PartBits)sum, unit, weights);
  if constexpr (std::is_same<T, float>::value) return sum + float_of(unit) * (Part)weights;
  sum = sum + float_of(unit << 16) * (Part)(weights << 16);
  return sum + float_of(unit & 0xffff0000u) * (Part)(weights & 0xffff0000u);
}

// Computes the sums of R rows and P panels, from those of `pair` on.
template <typename T, int R, int P, class W>
[[gnu::always_inline]] inline void sum_products(const W& w, UnitRows rows, int64_t pair,
                                                WeightsAhead&, SumsOf<T> (&sums)[R][P]) {
  static_assert(!W::kAreCodes);  // codes are multiplied by widened_products.h
  Part parts[R][P * kParts];
#pragma GCC unroll 32
  for (int r = 0; r < R; r++)
#pragma GCC unroll 32
    for (int i = 0; i < P * kParts; i++) parts[r][i] = Part{};
  for (int64_t first = 0; first < w.num_units; first += kUnitStep) {
    const Unit* tiles[P];
#pragma GCC unroll 32
    for (int p = 0; p < P; p++)
      tiles[p] = w.tile(pair + p / 2, p % 2, first, nullptr);
#pragma GCC unroll 1
    for (int64_t unit = 0; unit < kUnitStep; unit++)
#pragma GCC unroll 32
      for (int i = 0; i < P * kParts; i++) {
        const Unit* at = tiles[i / kParts] + unit * kLanes + i % kParts * kPartLanes;
        const PartBits weights = *reinterpret_cast<const PartBits*>(at);
#pragma GCC unroll 32
        for (int r = 0; r < R; r++) {
          const Unit x = rows.data[r * rows.stride + first + unit];
          parts[r][i] = add_product<T>(parts[r][i], x, weights);
        }
      }
  }
  std::memcpy(&sums, parts, sizeof sums);
}

#endif

}  // namespace
