// Integer codes that are multiplied at their places in a word, on processors without AVX-512.
//
// A word has several codes. A mask selects one of them, and without a shift its bits have the value of
// the code times a power of two. The input is multiplied by the inverse of that power beforehand, once
// for all outputs, so each product is that of the code. Sums of a group of inputs are scaled once:
//   (sum of products - zero · sum of inputs) · scale      if all codes have the same zero point;
//   sum of products · scale + term · sum of inputs        otherwise: the term is -zero · scale, or a
//                                                         minimum.

#pragma once

#ifndef __AVX512F__

#include <array>
#include <type_traits>
#include <utility>

#include "vec.h"

namespace {

template <int Bits>
struct PlacedCodes {
  static constexpr int kPerWord = 32 / Bits;

  // Code k of each word, times 1 / input_factor(k). The last one is shifted: at its place, it would have
  // the sign bit.
  [[gnu::always_inline]] static Part value(PartBits words, int k) {
    constexpr uint32_t kMask = (1u << Bits) - 1;
    constexpr int kLast = kPerWord - 1;
    const PartBits codes =
        k == kLast ? words >> Bits * kLast : words & (PartBits{} + (kMask << Bits * k));
    return __builtin_convertvector((PartInt)codes, Part);
  }

  // The factor of the input of code k.
  static constexpr float input_factor(int k) {
    return k == kPerWord - 1 ? 1.0f : 1.0f / static_cast<float>(1u << Bits * k);
  }
};

// How a weight reads its inputs: each one is multiplied by a factor, by its index modulo 16.
struct InputFactors {
  const float* factors = nullptr;  // [kLanes]; null: all are 1
  // The number of inputs of a group whose sum is scaled: 16, 32, 64 or 128. 0: weights are scaled.
  int64_t group_inputs = 0;
  float zero = 0.0f;  // the zero point of all codes, without terms
  bool has_terms = false;

  // The factor of the sum of a group's inputs.
  float sum_factor() const { return has_terms ? 1.0f : -zero; }
};

// The factors of the inputs of PlacedCodes, where place_of(i) is the place of input i in a word.
template <int Bits, class PlaceOf>
constexpr std::array<float, kLanes> factors_of_places(PlaceOf place_of) {
  std::array<float, kLanes> factors{};
  for (int i = 0; i < kLanes; i++)
    factors[i] = PlacedCodes<Bits>::input_factor(place_of(i % PlacedCodes<Bits>::kPerWord));
  return factors;
}

// The factors of a group, for 16 outputs.
struct GroupFactors {
  Vec scales, terms;
};

// Whether a weight may have groups whose sums are scaled.
template <class W, class = void>
constexpr bool kMayScaleSums = false;
template <class W>
constexpr bool kMayScaleSums<W, std::void_t<decltype(std::declval<const W&>().input_factors())>> = true;

template <class W>
InputFactors input_factors_of(const W& w) {
  if constexpr (kMayScaleSums<W>) return w.input_factors();
  return {};
}

}  // namespace

#endif
