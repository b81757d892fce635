// Conversion of quantized keys and values of a span to bfloat16, for the kernels on pairs.
//
// Every code (int8 or fp8 e4m3; see coded_kv.h) is exactly a bfloat16 value, so the conversion does
// not round. Scales are applied elsewhere: pair_softmax.h multiplies scores by the scales of keys,
// and softmax weights by the scales of values.

#pragma once

#include "attention/pair_tile.h"

#ifdef __AVX512BF16__

namespace {

// 32 codes as bfloat16.
inline __m512i bf16_of(const Int8Code* p) {
  const auto floats = [](const Int8Code* from) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
  };
  return (__m512i)_mm512_cvtne2ps_pbh(floats(p + kLanes), floats(p));
}

inline __m512i bf16_of(const Fp8Code* p) {
  const __m512i subnormals = _mm512_castsi128_si512(  // values of the subnormal codes
      _mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
  const __m512i codes =
      _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  const __m512i magnitude = _mm512_and_si512(codes, _mm512_set1_epi16(Fp8Code::kMagnitude));
  const __m512i normal =
      _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
  const __mmask32 is_subnormal = _mm512_testn_epi16_mask(codes, _mm512_set1_epi16(15 << 3));
  const __m512i value = _mm512_mask_permutexvar_epi16(normal, is_subnormal, magnitude, subnormals);
  const __m512i sign = _mm512_set1_epi16(static_cast<int16_t>(Fp8Code::kSign << 8));
  // Bitwise select: the sign bit of the code, and all other bits of the value.
  return _mm512_ternarylogic_epi32(sign, _mm512_slli_epi16(codes, 8), value, 0xca);
}

// Converts a group of codes, which are stored in the order of Units, and redirects its pointer.
template <class Code>
void widen_group(const Unit*& group, int64_t num_units, Unit* to) {
  const Code* from = reinterpret_cast<const Code*>(group);
  for (int64_t i = 0; i < num_units; i += kLanes)
    _mm512_store_si512(to + i, bf16_of(from + 2 * i));
  group = to;
}

template <class Code>
void widen_span_keys(PairTile& tile, PairSpan& span) {
  const int64_t size = kLanes * tile.dim / 2;
  for (int g = 0; g < kSpanGroups; g++)
    widen_group<Code>(span.keys[g], size, tile.widened_keys + g * size);
}

// Even and odd groups become adjacent, as the AMX kernels read them.
template <class Code>
void widen_span_values(PairTile& tile, PairSpan& span) {
  const int64_t size = kGroupPairs * tile.vdim;
  for (int g = span.first_group / 2 * 2; g < (span.num_groups + 1) / 2 * 2; g++)
    widen_group<Code>(span.values[g], size, tile.copied_values + g * size);
}

}  // namespace

#endif
