// Vectors of 16 floats, the bfloat16 type, and the operations that all kernels share.
//
// A Vec is 16 floats on every CPU: one AVX-512 register, two AVX2 registers or four SSE registers. A
// Part is one register of it.

#pragma once

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace {

constexpr int kLanes = 16;
constexpr float kNegInf = -std::numeric_limits<float>::infinity();
constexpr float kWhole = 12582912.0f;  // 1.5 · 2^23: adding it rounds to the nearest integer

typedef float Vec __attribute__((vector_size(64), aligned(4)));
typedef int32_t VecInt __attribute__((vector_size(64), aligned(4)));
typedef uint32_t VecBits __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t VecHalf __attribute__((vector_size(32), aligned(2)));
typedef uint8_t VecCodes __attribute__((vector_size(16), aligned(1), may_alias));
typedef int8_t VecSignedCodes __attribute__((vector_size(16), aligned(1), may_alias));

// A register's share of a Vec. GCC keeps larger vectors in memory where a loop changes them, so kernels
// hold accumulators as Parts.
#if defined(__AVX512F__)
constexpr int kPartLanes = 16;
#elif defined(__AVX2__)
constexpr int kPartLanes = 8;
#else
constexpr int kPartLanes = 4;
#endif
constexpr int kParts = kLanes / kPartLanes;
typedef float Part __attribute__((vector_size(4 * kPartLanes), aligned(4)));
typedef int32_t PartInt __attribute__((vector_size(4 * kPartLanes), aligned(4)));
typedef uint32_t PartBits __attribute__((vector_size(4 * kPartLanes), aligned(4), may_alias));
typedef uint16_t PartHalf __attribute__((vector_size(2 * kPartLanes), aligned(2)));
typedef int8_t PartBytes __attribute__((vector_size(kPartLanes), aligned(1), may_alias));

struct Bf16 {
  uint16_t bits;
};

inline float widen(float x) { return x; }
inline float widen(Bf16 x) {
  uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

inline void narrow(float x, float& out) { out = x; }
inline void narrow(float x, Bf16& out) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  out.bits = x != x ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline VecCodes low_bytes(VecBits v) {
#ifdef __AVX512F__
  return (VecCodes)_mm512_cvtepi32_epi8((__m512i)v);
#else
  return __builtin_convertvector(__builtin_convertvector(v, VecHalf), VecCodes);
#endif
}

inline Vec widen(VecHalf v) {
#ifdef __AVX512F__
  return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)v), 16);  // GCC would widen in parts
#else
  return (Vec)(__builtin_convertvector(v, VecBits) << 16);
#endif
}

inline Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
inline Vec load(const Bf16* p) { return widen(*reinterpret_cast<const VecHalf*>(p)); }

inline Part part_at(const float* p) { return *reinterpret_cast<const Part*>(p); }
inline Part part_at(const Bf16* p) {
#if defined(__AVX512F__)
  return load(p);
#elif defined(__AVX2__)
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return (Part)_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16);  // GCC would widen in two steps
#else
  const PartHalf half = *reinterpret_cast<const PartHalf*>(p);
  return (Part)(__builtin_convertvector(half, PartBits) << 16);
#endif
}

inline void save_part(Part v, float* p) { *reinterpret_cast<Part*>(p) = v; }

// Whether strip_part gives the even and the odd values of 16 values: AVX2 widens each half of the pairs
// of bfloat16 in 32 bytes by one operation.
#if defined(__AVX2__) && !defined(__AVX512F__)
template <typename T>
constexpr bool kSplitsPairs = std::is_same<T, Bf16>::value;
#else
template <typename T>
constexpr bool kSplitsPairs = false;
#endif

// Part `index` of the 16 values at p. Part 0 has the even values where kSplitsPairs, and Part 1 the odd
// ones.
template <typename T>
[[gnu::always_inline]] inline Part strip_part(const T* p, int index) {
  if constexpr (kSplitsPairs<T>) {
    const PartBits pairs = *reinterpret_cast<const PartBits*>(p);
    return (Part)(index == 0 ? pairs << 16 : pairs & 0xffff0000u);
  } else {
    return part_at(p + index * kPartLanes);
  }
}

// Stores 16 values in their order, given their Parts as strip_part gives them.
template <typename T>
[[gnu::always_inline]] inline void save_strip(const Part* parts, float* to) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  if constexpr (kSplitsPairs<T>) {
    const __m256 low = _mm256_unpacklo_ps((__m256)parts[0], (__m256)parts[1]);
    const __m256 high = _mm256_unpackhi_ps((__m256)parts[0], (__m256)parts[1]);
    save_part((Part)_mm256_permute2f128_ps(low, high, 0x20), to);
    save_part((Part)_mm256_permute2f128_ps(low, high, 0x31), to + kPartLanes);
    return;
  }
#endif
#pragma GCC unroll 4
  for (int p = 0; p < kParts; p++) save_part(parts[p], to + p * kPartLanes);
}

// Loads 16 values that are stored in their order, as Parts like those of strip_part.
template <typename T>
[[gnu::always_inline]] inline void load_strip(const float* from, Part* parts) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  if constexpr (kSplitsPairs<T>) {
    const __m256 low = (__m256)part_at(from), high = (__m256)part_at(from + kPartLanes);
    const __m256 first = _mm256_permute2f128_ps(low, high, 0x20);
    const __m256 second = _mm256_permute2f128_ps(low, high, 0x31);
    parts[0] = (Part)_mm256_shuffle_ps(first, second, 0x88);
    parts[1] = (Part)_mm256_shuffle_ps(first, second, 0xdd);
    return;
  }
#endif
#pragma GCC unroll 4
  for (int p = 0; p < kParts; p++) parts[p] = part_at(from + p * kPartLanes);
}

// Signed bytes as the integers of a Part. GCC would convert them one by one.
inline PartInt part_of_bytes(const void* p) {
#if defined(__AVX512F__)
  return (PartInt)_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
  return (PartInt)_mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
#else
  return __builtin_convertvector(*static_cast<const PartBytes*>(p), PartInt);
#endif
}

// Whether any lane is greater than the bound, or NaN.
inline bool exceeds(Part v, Part bound) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)v, (__m512)bound, _CMP_NLE_UQ) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps(_mm256_cmp_ps((__m256)v, (__m256)bound, _CMP_NLE_UQ)) != 0;
#else
  bool any = false;
  for (int lane = 0; lane < kPartLanes; lane++) any |= !(v[lane] <= bound[lane]);
  return any;
#endif
}

inline Vec splat(float x) { return x - Vec{}; }

// x · y + z, with a single rounding if the processor has such an instruction.
inline Vec multiply_add(Vec x, Vec y, Vec z) {
#ifdef __AVX512F__
  return (Vec)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z);
#else
  return x * y + z;
#endif
}

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline Part splat_part(float x) { return x - Part{}; }

// Keeps GCC from loading a value again for each of its uses. AVX2 loads as many Parts in a clock cycle
// as it multiplies.
[[gnu::always_inline]] inline void hold_in_register(Part& v) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  asm("" : "+x"(v));
#endif
}

// Keeps GCC from holding loaded values in registers, of which it would spill others.
[[gnu::always_inline]] inline void forget_loads() { asm("" ::: "memory"); }

// Whether multiply_add_part rounds once.
#ifdef __FP_FAST_FMAF
constexpr bool kRoundsOnce = true;
#else
constexpr bool kRoundsOnce = false;
#endif

// multiply_add for a Part.
inline Part multiply_add_part(Part x, Part y, Part z) {
#if defined(__AVX512F__)
  return multiply_add(x, y, z);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Part)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z);
#else
  return x * y + z;
#endif
}

// The maximum of each lane; `b` where `a` is NaN.
inline Part larger(Part a, Part b) {
#if defined(__AVX512F__)
  return (Part)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Part)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

// The minimum of each lane; `b` where `a` is NaN.
inline Part smaller(Part a, Part b) {
#if defined(__AVX512F__)
  return (Part)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Part)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}

// v · factor rounded to the nearest integer, ties to even, in two's complement. |v · factor| < 2^22.
inline VecBits nearest_whole(Vec v, float factor) {
  return (VecBits)multiply_add(v, splat(factor), splat(kWhole)) - bits_of(kWhole);
}

// Rounds to the nearest bfloat16, ties to even.
inline VecHalf narrow(Vec v) {
#ifdef __AVX512BF16__
  return (VecHalf)_mm512_cvtneps_pbh((__m512)v);  // subnormal values become 0
#else
  const VecBits bits = (VecBits)v;
  return __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, VecHalf);
#endif
}

inline Vec rounded(Vec v, float) { return v; }
inline Vec rounded(Vec v, Bf16) {
#ifdef __AVX512F__
  return widen(narrow(v));
#else
  const VecBits bits = (VecBits)v;
  return (Vec)((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u);
#endif
}

inline void save(Vec v, float* p, int count) { std::memcpy(p, &v, count * sizeof(float)); }
inline void save(Vec v, Bf16* p, int count) {
  const VecHalf half = narrow(v);
  std::memcpy(p, &half, count * sizeof(Bf16));
}

// The sum of all lanes, by halving: the order of the additions is fixed.
inline float sum_of_part(Part v) {
#ifdef __AVX2__
#ifdef __AVX512F__
  const __m512d whole = (__m512d)v;
  const __m256 half = _mm256_add_ps((__m256)_mm512_castpd512_pd256(whole),
                                    (__m256)_mm512_extractf64x4_pd(whole, 1));
#else
  const __m256 half = (__m256)v;
#endif
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
  for (int count = kPartLanes / 2; count > 0; count /= 2)
    for (int lane = 0; lane < count; lane++) v[lane] += v[lane + count];
  return v[0];
#endif
}

// Applies f to each Part of a Vec.
template <class F>
inline Vec by_parts(Vec v, const F& f) {
  Part parts[kParts];
  std::memcpy(parts, &v, sizeof v);
  for (Part& part : parts) part = f(part);
  std::memcpy(&v, parts, sizeof v);
  return v;
}

// exp(x) for x <= 0. Values below -87 are taken as -87.
inline Part exp_of_part(Part x) {
  x = x < -87.0f ? Part{} - 87.0f : x;
  // The operand is negative, so truncating after subtracting 0.5 rounds to nearest.
  const PartInt n = __builtin_convertvector(x * 1.44269504f - 0.5f, PartInt);
  const Part whole = __builtin_convertvector(n, Part);
  Part r = x - whole * 0.693359375f;
  r = r + whole * 2.12194440e-4f;
  Part y = r * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  return y * (Part)((n + 127) << 23);
}

inline Vec exp_of(Vec x) { return by_parts(x, exp_of_part); }

inline Vec tanh_of(Vec x) {
  Vec size = x < 0.0f ? -x : x;
  Vec e = exp_of(size * -2.0f);
  Vec y = (1.0f - e) / (1.0f + e);
  return x < 0.0f ? -y : y;
}

// Reduces a vector to one value, by halving: the order of the operations is fixed.
template <typename Op>
inline float fold(Vec v, Op op) {
  const VecInt by8 = {8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7};
  const VecInt by4 = {4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11};
  const VecInt by2 = {2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13};
  const VecInt by1 = {1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14};
  v = op(v, __builtin_shuffle(v, by8));
  v = op(v, __builtin_shuffle(v, by4));
  v = op(v, __builtin_shuffle(v, by2));
  v = op(v, __builtin_shuffle(v, by1));
  return v[0];
}

// 1 / (1 + exp(-x)), without overflow.
inline Vec sigmoid_of(Vec x) {
  const Vec e = exp_of(x < 0.0f ? x : -x);
  return (x < 0.0f ? e : splat(1.0f)) / (1.0f + e);
}

}  // namespace
