// Lanes as bits, the weights of scores, and exact sums of weights.
//
// All values are what one register holds (`Part`), so that loops keep them in registers.

#pragma once

#include <algorithm>
#include <array>
#include <type_traits>

#include "vec.h"

namespace {

inline Part splat_part(float x) { return x - Part{}; }
inline PartInt splat_int(int32_t x) { return x - PartInt{}; }

inline PartInt int_at(const int32_t* p) { return *reinterpret_cast<const PartInt*>(p); }
inline void save_part(Part v, float* p) { std::memcpy(p, &v, sizeof v); }
inline void save_int(PartInt v, int32_t* p) { std::memcpy(p, &v, sizeof v); }

// The numbers of the lanes from 0 on.
inline PartInt lane_numbers() {
  PartInt numbers = {};
  for (int lane = 0; lane < kPartLanes; lane++) numbers[lane] = lane;
  return numbers;
}

// Lanes that a comparison selects.
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
// Where one of both is not a number.
inline Lanes unordered(Part a, Part b) {
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_UNORD_Q);
}
inline uint32_t bits_of(Lanes lanes) { return lanes; }
inline Lanes lanes_of(uint32_t bits) { return static_cast<Lanes>(bits); }
inline Part select(Lanes lanes, Part v, Part other) {
  return (Part)_mm512_mask_blend_ps(lanes, (__m512)other, (__m512)v);
}
inline PartInt only(Lanes lanes, PartInt v) {
  return (PartInt)_mm512_maskz_mov_epi32(lanes, (__m512i)v);
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
inline PartInt only(Lanes lanes, PartInt v) { return lanes & v; }
#endif

// `b` where `a` is not a number.
inline Part larger(Part a, Part b) {
#if defined(__AVX512F__)
  return (Part)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Part)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

// x · y + z, rounded once where the processor can.
inline Part fused(Part x, Part y, Part z) {
#if defined(__AVX512F__)
  return (Part)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Part)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z);
#else
  return x * y + z;
#endif
}

inline float max_of(Part v) {
  float best = v[0];
  for (int lane = 1; lane < kPartLanes; lane++) best = std::max(best, v[lane]);
  return best;
}

inline float sum_of(Part v) {
  float sum = v[0];
  for (int lane = 1; lane < kPartLanes; lane++) sum += v[lane];
  return sum;
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// For each set of bits, the numbers of its lanes side by side, one byte each.
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

// Writes the lanes that have a bit side by side; a whole part is overwritten. The caller counts.
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

// Some parts at once: a processor computes their chains of operations side by side.
constexpr int kBlockParts = 4;
constexpr int kBlock = kBlockParts * kPartLanes;  // values
struct Block {
  Part parts[kBlockParts];
};

// Weights of scores, from 0 to 2^40; their fractions do not count.
//
// The weight of a score is 2^40 · 2^z, with z = (score - best) · factor. Below -64 it is 0, and z
// counts as -64. One sequence of operations computes it everywhere, so that it always has the same
// bits.
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
    // Adding 1.5 · 2^23 rounds to a whole number, which the lowest bits then hold.
    const Part factor = splat_part(factor_), whole = splat_part(kWhole + 40.0f);
    Part r[kCount], n[kCount];
    for (int i = 0; i < kCount; i++) r[i] = larger(v[i] - best_, splat_part(farthest_));
    for (int i = 0; i < kCount; i++) n[i] = fused(r[i], factor, whole);
    for (int i = 0; i < kCount; i++) r[i] = fused(r[i], factor, whole - n[i]);
    // A polynomial for 2^r, |r| <= 0.5, with a relative error of 1e-7.
    constexpr float kTerms[] = {9.67151299e-3f, 5.55073358e-2f, 2.40222424e-1f, 6.93147004e-1f, 1};
    for (int i = 0; i < kCount; i++) v[i] = splat_part(1.32647273e-3f);
    for (const float term : kTerms) {
      for (int i = 0; i < kCount; i++) v[i] = fused(v[i], r[i], splat_part(term));
    }
    for (int i = 0; i < kCount; i++) v[i] = (Part)((PartInt)v[i] + ((PartInt)n[i] << 23));
  }

  float best_ = 0.0f, factor_ = 1.0f, farthest_ = 0.0f;
};

// Weights as whole numbers of two halves: high · 2^20 + low.
struct Halves {
  explicit Halves(Part weights) {
    high = __builtin_convertvector(weights * 0x1p-20f, PartInt);
    const Part above = __builtin_convertvector(high, Part);
    low = __builtin_convertvector(fused(above, splat_part(-0x1p20f), weights), PartInt);
  }

  PartInt high, low;
};

inline int64_t total_of(PartInt sums) {
  int64_t total = 0;
  for (int lane = 0; lane < kPartLanes; lane++) total += sums[lane];
  return total;
}

// A sum of weights, each rounded down; up to 2^10 of them for each lane.
class WideSum {
 public:
  [[gnu::always_inline]] void add(const Block& weights) {
    for (const Part part : weights.parts) add(Halves(part));
  }
  void add(Halves weights) {
    high_ += weights.high;
    low_ += weights.low;
  }
  void add(Lanes lanes, Halves weights) {
    high_ += only(lanes, weights.high);
    low_ += only(lanes, weights.low);
  }
  int64_t total() const { return (total_of(high_) << 20) + total_of(low_); }

 private:
  PartInt high_ = {}, low_ = {};
};

constexpr float kNarrowNats = 11.8f;  // from here on under the best score, weights are below 2^23

// The same for weights below 2^23, up to 2^7 of them for each lane.
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
