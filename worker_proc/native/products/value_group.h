// Quantization of a group of weights with a common scale: the codes of a scale, and their error.
//
// int8_panels.h and int4_panels.h choose scales with it, and linear.cpp quantizes weights when they are
// loaded.

#pragma once

#include <algorithm>

#include "vec.h"

namespace {

// Values of one output that share a scale.
struct ValueGroup {
  const float* values;
  int64_t size;  // a multiple of 16

  float signed_absmax() const {
    return *std::max_element(values, values + size, [](float a, float b) {
      return std::fabs(a) < std::fabs(b);
    });
  }

  // The codes of a format for v · inverse, where `inverse` is the inverse of the scale.
  template <class Code>
  static Vec codes(Vec v, float inverse) {
    const Vec code = (v * inverse + kWhole) - kWhole;
    const Vec bounded = code < Code::kMin ? splat(Code::kMin) : code;
    return bounded > Code::kMax ? splat(Code::kMax) : bounded;
  }

  // The squared error of a scale. The factor keeps squares in range.
  template <class Code>
  float error(float scale, float factor) const {
    Vec sum = splat(0.0f);
    for (int64_t i = 0; i < size; i += kLanes) {
      const Vec v = load(values + i), error = v - codes<Code>(v, 1.0f / scale) * scale;
      sum += (error * factor) * (error * factor);
    }
    return fold(sum, [](Vec a, Vec b) { return a + b; });
  }
};

}  // namespace
