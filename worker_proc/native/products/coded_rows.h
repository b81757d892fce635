// Dynamic quantization of activations: rows of int8 codes, each with its own scale (w8a8).
//
// The codes of a row depend on its values alone. Sums of products of codes are exact integers, so AMX
// tiles and vectors compute the same bits. The codes of weights have an offset of 128 (CodedUnits),
// which `products` subtracts. Sums are modulo 2^32; the difference must be less than 2^31.

#pragma once

#include "pointwise.h"
#include "products/int8_panels.h"

namespace {

// The header of a quantized row, a cache line, which its codes follow.
struct alignas(kLine) CodedRow {
  float scale;      // NaN if the row has values that are not finite
  uint32_t offset;  // 128 times the sum of the codes

  int8_t* codes() { return reinterpret_cast<int8_t*>(this + 1); }

  // Dequantizes the sums of products of codes, [16 outputs].
  Vec products(VecInt sums, Vec weight_scales, Vec bias) const {
    const Vec whole = __builtin_convertvector((VecInt)((VecBits)sums - offset), Vec);
    return multiply_add(whole * weight_scales, splat(scale), bias);
  }
};

// The greatest magnitude, as bits of a bfloat16. Infinity and NaN are greater than all others.
inline uint16_t greatest_magnitude(const Bf16* x, int64_t size) {
  constexpr uint16_t kMagnitude = 0x7fff;
  const int64_t whole = size / kLanes * kLanes;
  VecHalf most{};
  for (int64_t i = 0; i < whole; i += kLanes) {
    const VecHalf v = *reinterpret_cast<const VecHalf*>(x + i) & kMagnitude;
    most = v > most ? v : most;
  }
  uint16_t greatest = 0;
  for (int lane = 0; lane < kLanes; lane++) greatest = std::max<uint16_t>(greatest, most[lane]);
  for (int64_t i = whole; i < size; i++)
    greatest = std::max<uint16_t>(greatest, x[i].bits & kMagnitude);
  return greatest;
}

// Quantizes a row: each value divided by the scale and rounded to the nearest integer, ties to even.
// Zeros follow up to the end of a tile.
inline void code_row(const Bf16* x, int64_t size, CodedRow& row) {
  constexpr uint16_t kInfinity = 0x7f80;
  constexpr float kMinMagnitude = 1e-30f, kMax = 127.0f;
  constexpr int64_t kStep = CodedUnits::kUnitInputs * kUnitStep;
  const int64_t end = (size + kStep - 1) / kStep * kStep;
  const uint16_t magnitude = greatest_magnitude(x, size);
  const float greatest = widen(Bf16{magnitude});
  const bool is_finite = magnitude < kInfinity;
  row.scale = is_finite ? 0.0f : std::nanf("");
  row.offset = 0;
  std::memset(row.codes(), 0, end);
  if (!is_finite || greatest <= kMinMagnitude) return;
  const float inverse = kMax / greatest;
  VecBits sums{};
  for (int64_t i = 0; i < size; i += kLanes) {
    const Vec v = load_any(x + i, lanes_at(i, size));
    const VecBits codes = nearest_whole(v, inverse);
    *reinterpret_cast<VecCodes*>(row.codes() + i) = low_bytes(codes);
    sums += codes;
  }
  for (int lane = 0; lane < kLanes; lane++) row.offset += 128 * sums[lane];
  row.scale = greatest / kMax;
}

}  // namespace
