// RMS norms and activation functions, each in one pass over a row.
//
// Values are rounded where transformers' modules round, so results differ at most by the order of a sum.
// Used by pointwise.cpp (one module), decoder.cpp (norms), epilogues.h and recurrent/recurrence.h.

#pragma once

#include <type_traits>

#include "vec.h"

namespace {

// The first `count` values as a vector, padded with zeros.
inline Vec load_part(const float* p, int count) {
  Vec v = splat(0.0f);
  std::memcpy(&v, p, count * sizeof(float));
  return v;
}

inline Vec load_part(const Bf16* p, int count) {
  Bf16 padded[kLanes] = {};
  std::memcpy(padded, p, count * sizeof(Bf16));
  return load(padded);
}

template <typename T>
inline Vec load_any(const T* p, int count) { return count == kLanes ? load(p) : load_part(p, count); }

// The number of lanes that hold values, in the vector at index i of `size` values.
inline int lanes_at(int i, int size) { return size - i < kLanes ? size - i : kLanes; }

// Calls f(first, count) for each vector of `size` values. For whole vectors, the count is an integral
// constant, so that single instructions load and save them.
template <class F>
[[gnu::always_inline]] inline void for_vectors(int size, const F& f) {
  int i = 0;
  for (; i + kLanes <= size; i += kLanes) f(i, std::integral_constant<int, kLanes>{});
  if (i < size) f(i, size - i);
}

// The sum of the squares of `size` values, by lanes.
template <typename T>
inline Vec sum_squares(const T* x, int size) {
  Part sums[kParts] = {};
  const auto add = [&](const auto* values) {
    for (int p = 0; p < kParts; p++) {
      const Part v = part_at(values + p * kPartLanes);
      sums[p] += v * v;
    }
  };
  int i = 0;
  for (; i + kLanes <= size; i += kLanes) add(x + i);
  if (i < size) {
    const Vec rest = load_part(x + i, size - i);
    add(reinterpret_cast<const float*>(&rest));
  }
  Vec all;
  std::memcpy(&all, sums, sizeof all);
  return all;
}

// y = x / sqrt(mean(x²) + epsilon) · weight, for one row of `size` values
template <typename T>
inline void normalize_row(const T* x, const float* weight, T* y, int size, float epsilon,
                          bool round_before_weight) {
  const float sum = fold(sum_squares(x, size), [](Vec a, Vec b) { return a + b; });
  const float factor = 1.0f / std::sqrt(sum / size + epsilon);
  for_vectors(size, [&](int i, auto count) {
    Vec v = load_any(x + i, count) * factor;
    if (round_before_weight) v = rounded(v, T{});
    save(v * load_any(weight + i, count), y + i, count);
  });
}

// The values of Activation in structures.py.
constexpr int kSilu = 0;
constexpr int kGeluTanh = 1;
constexpr int kGelu = 2;
constexpr int kReluSquared = 3;

// 1 - erf(x) for x >= 0, to an absolute error of 2e-7 (Abramowitz and Stegun, 7.1.26).
inline Vec erfc_of(Vec x) {
  const Vec t = 1.0f / (x * 0.3275911f + 1.0f);
  Vec y = t * 1.061405429f - 1.453152027f;
  y = y * t + 1.421413741f;
  y = y * t - 0.284496736f;
  y = y * t + 0.254829592f;
  return y * t * exp_of(-x * x);
}

// max(x, 0) - 0.5 · |x| · erfc(|x| / sqrt(2)). Not inlined, because the compiler could fuse a product
// and a sum in one caller and not in another.
[[gnu::noinline]] inline Vec gelu_of(Vec x) {
  const Vec size = x < 0.0f ? -x : x;
  const Vec positive = x < 0.0f ? Vec{} : x;
  return positive - size * erfc_of(size * 0.70710678f) * 0.5f;
}

// x · sigmoid(y). For bfloat16, the relative error before the rounding is at most 3e-6.
inline Vec times_sigmoid(Vec x, Vec y, float) { return x * sigmoid_of(y); }
inline Vec times_sigmoid(Vec x, Vec y, Bf16) {
  constexpr float kBound = 87.0f;          // of |y|: greater values are clamped
  constexpr float kPowers = -1.44269504f;  // sigmoid(y) = 1 / (1 + 2^(kPowers · y))
  constexpr float kTerms[] = {5.5917863e-2f, 2.4024744e-1f, 6.9312179e-1f, 9.9999928e-1f};
  Part parts[kParts], factors[kParts];
  std::memcpy(parts, &y, sizeof y);
  std::memcpy(factors, &x, sizeof x);
  for (int p = 0; p < kParts; p++) {
    const Part bounded = smaller(larger(parts[p], splat_part(-kBound)), splat_part(kBound));
    // Adding kWhole rounds to the nearest integer, which the lowest bits of the sum then hold.
    const Part whole = multiply_add_part(bounded, splat_part(kPowers), splat_part(kWhole));
    const Part rest = multiply_add_part(bounded, splat_part(kPowers), kWhole - whole);
    Part power = splat_part(9.5701022e-3f);  // 2^rest, by a polynomial for |rest| <= 0.5
    for (const float term : kTerms) power = multiply_add_part(power, rest, splat_part(term));
    power = (Part)((PartInt)power + ((PartInt)whole << 23));
    factors[p] /= power + 1.0f;
  }
  std::memcpy(&x, factors, sizeof x);
  return x;
}

// An activation function of each lane. SiLU and tanh-GELU are x times a sigmoid: 0.5 · (1 + tanh(u)) =
// sigmoid(2u), without cancellation.
template <typename T>
inline Vec activation_of(Vec x, int kind) {
  switch (kind) {
    case kSilu: return times_sigmoid(x, x, T{});
    case kGelu: return gelu_of(x);
    case kReluSquared: return x < 0.0f ? Vec{} : x * x;
  }
  const Vec u = x * (x * x * 0.044715f + 1.0f);
  return times_sigmoid(x, u * 1.5957691216f, T{});  // 2 · sqrt(2 / pi)
}

// An RMS norm whose rows are multiplied by a function of gates; GatedNormArgs in recurrence.py.
struct GatedNorm {
  const void* rows;
  const void* gates;
  const float* weight;  // [size]
  void* out;
  int64_t row_stride;
  int64_t gate_stride;
  int32_t num_rows;
  int32_t size;
  int32_t group_size;  // values that are normalized together
  int32_t is_bf16;
  int32_t gates_first;     // gates are applied before the norm, otherwise after the weight
  int32_t is_sigmoid;      // the factor is sigmoid(gate), otherwise gate · sigmoid(gate)
  int32_t rounds_between;  // intermediate results are rounded to the dtype
  float epsilon;
};

// The factor of a gate.
inline Vec gate_of(Vec x, const GatedNorm& norm) {
  const Vec sigmoid = sigmoid_of(x);
  return norm.is_sigmoid ? sigmoid : x * sigmoid;
}

// Normalizes one group of a row; `gated` has room for group_size values.
template <typename T>
inline void normalize_gated(const T* x, const T* gates, const float* weight, T* y,
                            const GatedNorm& norm, float* gated) {
  Vec squares = splat(0.0f);
  for_vectors(norm.group_size, [&](int i, auto count) {
    Vec v = load_any(x + i, count);
    if (norm.gates_first) v *= gate_of(load_any(gates + i, count), norm);
    save(v, gated + i, count);
    squares += v * v;
  });
  const float mean = fold(squares, [](Vec a, Vec b) { return a + b; }) / norm.group_size;
  const float factor = 1.0f / std::sqrt(mean + norm.epsilon);
  for_vectors(norm.group_size, [&](int i, auto count) {
    Vec v = load_any(gated + i, count) * factor;
    if (norm.rounds_between) v = rounded(v, T{});
    v *= load_any(weight + i, count);
    if (!norm.gates_first) {
      if (norm.rounds_between) v = rounded(v, T{});
      v *= gate_of(load_any(gates + i, count), norm);
    }
    save(v, y + i, count);
  });
}

}  // namespace
