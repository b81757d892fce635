// Lanes as bits, and exact sums of weights.

#pragma once

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include "vec.h"

namespace {

constexpr VecInt kLaneNumbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
constexpr VecInt kLaneBits = {1 << 0,  1 << 1,  1 << 2,  1 << 3, 1 << 4,  1 << 5,
                              1 << 6,  1 << 7,  1 << 8,  1 << 9, 1 << 10, 1 << 11,
                              1 << 12, 1 << 13, 1 << 14, 1 << 15};

inline VecInt splat_int(int32_t x) { return x - VecInt{}; }

inline VecInt load_int(const int32_t* p) { return *reinterpret_cast<const VecInt*>(p); }
inline void save_int(VecInt v, int32_t* p) { std::memcpy(p, &v, sizeof v); }

// One bit per lane; lanes are 0 or -1.
inline uint32_t bits_of(VecInt lanes) {
#ifdef __AVX512F__
  return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes);
#else
  uint32_t bits = 0;
  for (int lane = 0; lane < kLanes; lane++) bits |= (lanes[lane] & 1u) << lane;
  return bits;
#endif
}

inline uint32_t bits_above(Vec v, Vec limit) {
#ifdef __AVX512F__
  return _mm512_cmp_ps_mask((__m512)v, (__m512)limit, _CMP_GT_OQ);
#else
  return bits_of(v > limit);
#endif
}

inline uint32_t bits_not_a_number(Vec v) {
#ifdef __AVX512F__
  return _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_UNORD_Q);
#else
  return bits_of(v != v);
#endif
}

// The lanes of `v` that have a bit, and `other` in the rest.
inline Vec select(uint32_t bits, Vec v, Vec other) {
#ifdef __AVX512F__
  return (Vec)_mm512_mask_blend_ps(static_cast<__mmask16>(bits), (__m512)other, (__m512)v);
#else
  return (splat_int(static_cast<int32_t>(bits)) & kLaneBits) != 0 ? v : other;
#endif
}

// `b` where `a` is NaN.
inline Vec larger(Vec a, Vec b) {
#ifdef __AVX512F__
  return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}

inline float max_of(Vec v) { return fold(v, larger); }
inline float sum_of(Vec v) {
  return fold(v, [](Vec a, Vec b) { return a + b; });
}

constexpr int kUnitBits = 40;
constexpr float kUnit = 1099511627776.0f;  // 2^40: the weight of the most likely token

// 2^40 * exp(x), for x <= 0: the bits of exp_of, with fewer instructions.
inline Vec weight_of(Vec x) {
#ifdef __AVX512F__
  const auto sum = [](__m512 a, __m512 b, float c) { return _mm512_fmadd_ps(a, b, _mm512_set1_ps(c)); };
  const __m512 v = _mm512_max_ps((__m512)x, _mm512_set1_ps(-87.0f));
  const __m512i n = _mm512_cvttps_epi32(sum(v, _mm512_set1_ps(1.44269504f), -0.5f));
  const __m512 whole = _mm512_cvtepi32_ps(n);
  __m512 r = _mm512_fnmadd_ps(whole, _mm512_set1_ps(0.693359375f), v);
  r = _mm512_fmadd_ps(whole, _mm512_set1_ps(2.12194440e-4f), r);
  __m512 y = sum(_mm512_set1_ps(1.9875691500e-4f), r, 1.3981999507e-3f);
  y = sum(y, r, 8.3334519073e-3f);
  y = sum(y, r, 4.1665795894e-2f);
  y = sum(y, r, 1.6666665459e-1f);
  y = sum(y, r, 5.0000001201e-1f);
  y = _mm512_fmadd_ps(_mm512_mul_ps(y, r), r, r);
  y = _mm512_add_ps(y, _mm512_set1_ps(1.0f));
  const __m512i exponent = _mm512_slli_epi32(n, 23);
  const __m512i scaled = _mm512_add_epi32(_mm512_castps_si512(y), exponent);
  return (Vec)_mm512_castsi512_ps(_mm512_add_epi32(scaled, _mm512_set1_epi32(kUnitBits << 23)));
#else
  return exp_of(x) * kUnit;
#endif
}

// Writes the lanes that have a bit side by side; up to 16 values are overwritten. The caller counts.
inline void compress(VecInt v, uint32_t bits, int32_t* to) {
#ifdef __AVX512F__
  _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(static_cast<__mmask16>(bits), (__m512i)v));
#else
  for (; bits != 0; bits &= bits - 1) *to++ = v[__builtin_ctz(bits)];
#endif
}

// A sum of values from 0 to 2^40, each rounded down; up to 2^13 of them for each lane.
class WideSum {
 public:
#if defined(__AVX512F__) && defined(__AVX512DQ__)
  void add(Vec v) { add(v, 0xffffu); }

  void add(Vec v, uint32_t bits) {
    const __m512d halves = _mm512_castps_pd((__m512)v);
    const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(halves, 1));
    const __m512i whole = _mm512_cvttps_epi64(_mm512_castps512_ps256((__m512)v));
    low_ = _mm512_mask_add_epi64(low_, static_cast<__mmask8>(bits), low_, whole);
    const auto high_bits = static_cast<__mmask8>(bits >> 8);
    high_ = _mm512_mask_add_epi64(high_, high_bits, high_, _mm512_cvttps_epi64(high));
  }

  int64_t total() const { return _mm512_reduce_add_epi64(_mm512_add_epi64(low_, high_)); }

 private:
  __m512i low_ = _mm512_setzero_si512(), high_ = _mm512_setzero_si512();
#else
  void add(Vec v) {
    for (int lane = 0; lane < kLanes; lane++) sums_[lane] += static_cast<int64_t>(v[lane]);
  }

  void add(Vec v, uint32_t bits) { add(select(bits, v, splat(0.0f))); }

  int64_t total() const {
    int64_t total = 0;
    for (const int64_t sum : sums_) total += sum;
    return total;
  }

 private:
  int64_t sums_[kLanes] = {};
#endif
};

// The same for values below 2^24, up to 2^6 of them for each lane.
class NarrowSum {
 public:
  void add(Vec v) { sums_ += __builtin_convertvector(v, VecInt); }
  void add(Vec v, uint32_t bits) { add(select(bits, v, splat(0.0f))); }

  int64_t total() const {
    int64_t total = 0;
    for (int lane = 0; lane < kLanes; lane++) total += sums_[lane];
    return total;
  }

 private:
  VecInt sums_ = {};
};

}  // namespace
