// Integer weights of scores, and their exact sums, which do not depend on the order of additions.
//
// Functions work on Parts (vec.h), one register each. `Lanes` is the result of a comparison: a mask
// register with AVX-512, and a vector otherwise. Used by choice.h and value_weights.h.

#pragma once

#include <algorithm>
#include <array>
#include <type_traits>

#include "vec.h"

namespace {

inline PartInt splat_int(int32_t x) { return x - PartInt{}; }

inline PartInt int_at(const int32_t* p) { return *reinterpret_cast<const PartInt*>(p); }
inline void save_int(PartInt v, int32_t* p) { std::memcpy(p, &v, sizeof v); }

// 0, 1, 2, ...: the number of each lane.
inline PartInt lane_numbers() {
  PartInt numbers = {};
  for (int lane = 0; lane < kPartLanes; lane++) numbers[lane] = lane;
  return numbers;
}

// The lanes for which a comparison holds.
#ifdef __AVX512F__
typedef __mmask16 Lanes;

inline Lanes above(Part v, Part limit) {
  return _mm512_cmp_ps_mask((__m512)v, (__m512)limit, _CMP_GT_OQ);
}
inline Lanes equal(Part a, Part b) {
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_EQ_OQ);
}
inline Lanes at_most(PartInt v, PartInt limit) {
  return _mm512_cmple_epi32_mask((__m512i)v, (__m512i)limit);
}
// The lanes in which either value is NaN.
inline Lanes unordered(Part a, Part b) {
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_UNORD_Q);
}
inline uint32_t bits_of(Lanes lanes) { return lanes; }
inline Lanes lanes_of(uint32_t bits) { return static_cast<Lanes>(bits); }
inline Part select(Lanes lanes, Part v, Part other) {
  return (Part)_mm512_mask_blend_ps(lanes, (__m512)other, (__m512)v);
}
// Adds v in the given lanes.
inline PartInt sum_where(Lanes lanes, PartInt sum, PartInt v) {
  return (PartInt)_mm512_mask_add_epi32((__m512i)sum, lanes, (__m512i)sum, (__m512i)v);
}
inline Part sum_where(Lanes lanes, Part sum, Part v) {
  return (Part)_mm512_mask_add_ps((__m512)sum, lanes, (__m512)sum, (__m512)v);
}
#else
typedef PartInt Lanes;

inline Lanes above(Part v, Part limit) { return v > limit; }
inline Lanes equal(Part a, Part b) { return a == b; }
inline Lanes at_most(PartInt v, PartInt limit) { return v <= limit; }
#ifdef __AVX2__
inline Lanes unordered(Part a, Part b) {
  return (Lanes)_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_UNORD_Q);
}
inline uint32_t bits_of(Lanes lanes) {
  return static_cast<uint32_t>(_mm256_movemask_ps((__m256)lanes));
}
#else
inline Lanes unordered(Part a, Part b) { return (a != a) | (b != b); }
inline uint32_t bits_of(Lanes lanes) {
  uint32_t bits = 0;
  for (int lane = 0; lane < kPartLanes; lane++) bits |= (lanes[lane] & 1u) << lane;
  return bits;
}
#endif
inline Lanes lanes_of(uint32_t bits) {
  const PartInt own = splat_int(1) << lane_numbers();
  return (splat_int(static_cast<int32_t>(bits)) & own) != 0;
}
inline Part select(Lanes lanes, Part v, Part other) { return lanes ? v : other; }
inline PartInt sum_where(Lanes lanes, PartInt sum, PartInt v) { return sum + (lanes & v); }
inline Part sum_where(Lanes lanes, Part sum, Part v) { return sum + (Part)(lanes & (PartInt)v); }
#endif

inline float max_of(Part v) {
  float best = v[0];
  for (int lane = 1; lane < kPartLanes; lane++) best = std::max(best, v[lane]);
  return best;
}

inline float sum_of(Part v) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps((__m512)v);
#endif
  float sum = v[0];
  for (int lane = 1; lane < kPartLanes; lane++) sum += v[lane];
  return sum;
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// For each set of lanes, their numbers as bytes, without gaps.
constexpr std::array<uint64_t, 256> lanes_of_sets() {
  std::array<uint64_t, 256> orders{};
  for (unsigned bits = 0; bits < 256; bits++) {
    int place = 0;
    for (uint64_t lane = 0; lane < 8; lane++)
      if (bits >> lane & 1) orders[bits] |= lane << 8 * place++;
  }
  return orders;
}
constexpr std::array<uint64_t, 256> kLanesOfSets = lanes_of_sets();
#endif

// Stores the lanes whose bit is set, without gaps. A whole Part is overwritten.
inline void compress(PartInt v, uint32_t bits, int32_t* to) {
#if defined(__AVX512F__)
  _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(static_cast<__mmask16>(bits), (__m512i)v));
#elif defined(__AVX2__)
  const __m128i bytes = _mm_cvtsi64_si128(static_cast<int64_t>(kLanesOfSets[bits]));
  save_int((PartInt)_mm256_permutevar8x32_epi32((__m256i)v, _mm256_cvtepu8_epi32(bytes)), to);
#else
  for (; bits != 0; bits &= bits - 1) *to++ = v[__builtin_ctz(bits)];
#endif
}

constexpr float kUnit = 1099511627776.0f;  // 2^40: the weight of the most likely token

// Several Parts, whose independent chains of operations hide the latency of each other.
constexpr int kBlockParts = 4;
constexpr int kBlock = kBlockParts * kPartLanes;  // values of a block
struct Block {
  Part parts[kBlockParts];
};

// The weight of a score is 2^40 · 2^z with z = (score - best) · factor, of which sums use the integer
// part. Values of z below -64 are taken as -64, which gives the weight 0. The same sequence of
// operations computes a weight everywhere, so that it always has the same bits.
class Weigher {
 public:
  Weigher() = default;
  Weigher(float best, float per_nat) : best_(best) {
    constexpr float kPerNat = 1.44269504f, kGreatest = std::numeric_limits<float>::max();
    factor_ = std::clamp(per_nat * kPerNat, 1e-30f, kGreatest);
    farthest_ = -64.0f / factor_;
  }

  Part operator()(Part score) const {
    weigh(&score, std::integral_constant<int, 1>{});
    return score;
  }

  [[gnu::always_inline]] Block operator()(Block scores) const {
    weigh(scores.parts, std::integral_constant<int, kBlockParts>{});
    return scores;
  }

  float of(float score) const { return (*this)(splat_part(score))[0]; }

 private:
  // Turns scores into weights.
  template <int kCount>
  [[gnu::always_inline]] void weigh(Part* v, std::integral_constant<int, kCount>) const {
    // Adding 1.5 · 2^23 rounds to the nearest integer, which the lowest bits of the sum then hold.
    const Part factor = splat_part(factor_), whole = splat_part(kWhole + 40.0f);
    Part r[kCount], n[kCount];
    for (int i = 0; i < kCount; i++) r[i] = larger(v[i] - best_, splat_part(farthest_));
    for (int i = 0; i < kCount; i++) n[i] = multiply_add_part(r[i], factor, whole);
    for (int i = 0; i < kCount; i++) r[i] = multiply_add_part(r[i], factor, whole - n[i]);
    // A polynomial for 2^r, |r| <= 0.5, with a relative error of 1e-7.
    constexpr float kTerms[] = {9.67151299e-3f, 5.55073358e-2f, 2.40222424e-1f, 6.93147004e-1f, 1};
    for (int i = 0; i < kCount; i++) v[i] = splat_part(1.32647273e-3f);
    for (const float term : kTerms) {
      for (int i = 0; i < kCount; i++) v[i] = multiply_add_part(v[i], r[i], splat_part(term));
    }
    for (int i = 0; i < kCount; i++) v[i] = (Part)((PartBits)v[i] + ((PartBits)n[i] << 23));
  }

  float best_ = 0.0f, factor_ = 1.0f, farthest_ = 0.0f;
};

// Weights as sums of a multiple of kHigh and an integer. Fractions are dropped.
template <int kCount>
struct Halves {
  // A sum of 512 / kPartLanes weights is 2^24 · kHigh at most, and so exact.
  static constexpr float kHigh = 0x1p21f * 16 / kPartLanes;

  [[gnu::always_inline]] explicit Halves(const Part* weights) {
#ifdef __AVX512F__
    // Adding 1.5 · 2^23 · kHigh rounds to the nearest multiple of kHigh: the rest may be negative.
    Part rest[kCount];
    for (int i = 0; i < kCount; i++) high[i] = weights[i] + kHigh * kWhole;
    for (int i = 0; i < kCount; i++) high[i] -= kHigh * kWhole;
    for (int i = 0; i < kCount; i++) rest[i] = weights[i] - high[i];
    for (int i = 0; i < kCount; i++)
      low[i] = (PartInt)_mm512_cvt_roundps_epi32((__m512)rest[i],
                                                 _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#else
    for (int i = 0; i < kCount; i++) {
      const PartInt multiples = __builtin_convertvector(weights[i] / kHigh, PartInt);
      high[i] = __builtin_convertvector(multiples, Part) * kHigh;
      low[i] = __builtin_convertvector(weights[i] - high[i], PartInt);
    }
#endif
  }

  Part high[kCount];
  PartInt low[kCount];
};

inline int64_t total_of(PartInt sums) {
#ifdef __AVX512F__
  const __m512i halves[] = {_mm512_cvtepi32_epi64(_mm512_castsi512_si256((__m512i)sums)),
                            _mm512_cvtepi32_epi64(_mm512_extracti64x4_epi64((__m512i)sums, 1))};
  return _mm512_reduce_add_epi64(_mm512_add_epi64(halves[0], halves[1]));
#else
  int64_t total = 0;
  for (int lane = 0; lane < kPartLanes; lane++) total += sums[lane];
  return total;
#endif
}

// The exact sum of up to 512 weights, each rounded down.
class WideSum {
 public:
  [[gnu::always_inline]] void add(const Block& weights) { add(Halves<kBlockParts>(weights.parts)); }
  template <int kCount>
  [[gnu::always_inline]] void add(const Halves<kCount>& weights) {
    for (int i = 0; i < kCount; i++) high_ += weights.high[i];
    for (int i = 0; i < kCount; i++) low_ += weights.low[i];
  }
  template <int kCount>
  [[gnu::always_inline]] void add(const Lanes* lanes, const Halves<kCount>& weights) {
    for (int i = 0; i < kCount; i++) high_ = sum_where(lanes[i], high_, weights.high[i]);
    for (int i = 0; i < kCount; i++) low_ = sum_where(lanes[i], low_, weights.low[i]);
  }
  int64_t total() const {
    const PartInt high = __builtin_convertvector(high_ / kHigh, PartInt);
    return total_of(high) * static_cast<int64_t>(kHigh) + total_of(low_);
  }

 private:
  static constexpr float kHigh = Halves<1>::kHigh;

  Part high_ = {};
  PartInt low_ = {};
};

constexpr float kNarrowNats = 11.8f;  // weights of scores this far below the best one are below 2^23

// The exact sum of weights below 2^23, each rounded down, at most 2^7 in each lane.
class NarrowSum {
 public:
  [[gnu::always_inline]] void add(const Block& weights) {
    for (const Part part : weights.parts) sums_ += __builtin_convertvector(part, PartInt);
  }
  int64_t total() const { return total_of(sums_); }

 private:
  PartInt sums_ = {};
};

}  // namespace
