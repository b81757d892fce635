// Rows as codes of 8 bits, each with a scale of its own.
//
// A row depends on nothing but its values. Sums of products of codes are whole numbers, and exact:
// they are the same by tiles, by vectors, and in any order. They are taken modulo 2^32, since codes
// of weights have 128 added (weights.h), and so must be less than 2^31 once that part is subtracted.

#pragma once

#include "pointwise.h"
#include "weights.h"

namespace {

// A row's line of the cache before its codes.
struct alignas(kLine) CodedRow {
  float scale;      // NaN: the row has values that are not finite
  uint32_t offset;  // 128 times the sum of the codes

  int8_t* codes() { return reinterpret_cast<int8_t*>(this + 1); }

  // The sums of products with weights, from those with codes of weights.
  Vec products(VecInt sums, Vec weight_scales, Vec bias) const {
    const Vec whole = __builtin_convertvector((VecInt)((VecBits)sums - offset), Vec);
    return multiply_add(whole * weight_scales, splat(scale), bias);
  }
};

// The greatest magnitude, as bits of a bfloat16; those of infinity and NaN are the greatest.
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

// Makes the codes of a row: each value over the scale, rounded to the nearest whole number, of two
// equally near ones to the even one. There are zeros up to the end of a tile.
inline void code_row(const Bf16* x, int64_t size, CodedRow& row) {
  constexpr uint16_t kInfinity = 0x7f80;
  constexpr float kNothing = 1e-30f, kMost = 127.0f;
  constexpr int64_t kStep = CodedUnits::kUnitInputs * kUnitStep;
  const int64_t end = (size + kStep - 1) / kStep * kStep;
  const uint16_t magnitude = greatest_magnitude(x, size);
  const float greatest = widen(Bf16{magnitude});
  const bool is_finite = magnitude < kInfinity;
  row.scale = is_finite ? 0.0f : std::nanf("");
  row.offset = 0;
  std::memset(row.codes(), 0, end);
  if (!is_finite || greatest <= kNothing) return;
  const float inverse = kMost / greatest;
  VecBits sums{};
  for (int64_t i = 0; i < size; i += kLanes) {
    const Vec v = load_any(x + i, lanes_at(i, size));
    const VecBits codes = nearest_whole(v, inverse);
    *reinterpret_cast<VecCodes*>(row.codes() + i) = low_bytes(codes);
    sums += codes;
  }
  for (int lane = 0; lane < kLanes; lane++) row.offset += 128 * sums[lane];
  row.scale = greatest / kMost;
}

}  // namespace
