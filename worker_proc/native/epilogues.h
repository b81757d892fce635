// The epilogues of projections: what happens to products in the registers before they are stored.
//
// An epilogue takes the products of a row and a pair of panels: the sums of 32 outputs in two vectors,
// of float32, or of integers for rows of codes (products/coded_rows.h). Scales and bias are applied
// first, and values are rounded to T where transformers' modules round. Whole panels are written, with
// zeros past the last output. Used by decoder.cpp.

#pragma once

#include "pointwise.h"
#include "products/coded_rows.h"
#include "program.h"

namespace {

// Not inlined, because the compiler could fuse the product and the sum in one caller and not in
// another.
template <typename T>
[[gnu::noinline]] void accumulate_scaled(T* out, Vec value, float factor) {
  save(load(out) + rounded(value * factor, T{}), out, kLanes);
}

// out += factor * value
template <typename T>
void accumulate(T* out, Vec value, float factor) {
  if (factor != 1.0f) return accumulate_scaled(out, value, factor);
  save(load(out) + value, out, kLanes);
}

// The target of a projection and the parameters of its epilogue. Kernels copy them, so that they stay in
// registers: for the compiler, a store could change the instruction.
//
// `weight_pair` is the index of a pair among those of all experts; without experts it is `pair`.
template <typename T>
class Outputs {
 public:
  Outputs(const Instruction& i, const Buffer* buffers)
      : data_(static_cast<char*>(buffers[i.target].data)),
        stride_(buffers[i.target].stride),
        scales_(i.format == kInt8 ? static_cast<const float*>(i.scales) : nullptr),
        bias_(i.bias),
        column_(i.column),
        activation_(i.activation),
        factor_(i.factor),
        has_bounds_(i.limit != 0.0f || i.alpha != 0.0f),
        instruction_(i),
        source_(buffers[i.source]) {}

  // target = product
  template <class Sums>
  void store(int64_t r, int64_t pair, int64_t weight_pair, Sums low, Sums high) const {
    T* out = row(r) + column_ + pair * kPairOutputs;
    save(biased(r, weight_pair * kPairOutputs, low), out, kLanes);
    save(biased(r, weight_pair * kPairOutputs + kLanes, high), out + kLanes, kLanes);
  }

  // target += factor * product
  template <class Sums>
  void add(int64_t r, int64_t pair, Sums low, Sums high) const {
    T* out = row(r) + pair * kPairOutputs;
    accumulate(out, finished(r, pair, 0, low), factor_);
    accumulate(out + kLanes, finished(r, pair, 1, high), factor_);
  }

  // target = f(gate) * up
  template <class Sums>
  void activate(int64_t r, int64_t pair, int64_t weight_pair, Sums gate, Sums up) const {
    T* out = row(r) + pair * kLanes;
    const Vec own_gate = finished(r, weight_pair, 0, gate);
    const Vec own_up = finished(r, weight_pair, 1, up);
    if (has_bounds_) return activate_within(instruction_, own_gate, own_up, out);
    save(round(activation_of<T>(own_gate, activation_)) * own_up, out, kLanes);
  }

  // target = gate, and up from `column` on
  template <class Sums>
  void split(int64_t r, int64_t pair, Sums gate, Sums up) const {
    T* out = row(r) + pair * kLanes;
    save(finished(r, pair, 0, gate), out, kLanes);
    save(finished(r, pair, 1, up), out + column_, kLanes);
  }

  // target = f(product)
  template <class Sums>
  void apply(int64_t r, int64_t pair, int64_t weight_pair, Sums low, Sums high) const {
    T* out = row(r) + pair * kPairOutputs;
    save(activation_of<T>(finished(r, weight_pair, 0, low), activation_), out, kLanes);
    save(activation_of<T>(finished(r, weight_pair, 1, high), activation_), out + kLanes, kLanes);
  }

 private:
  T* row(int64_t index) const { return reinterpret_cast<T*>(data_ + index * stride_); }

  static Vec round(Vec v) { return rounded(v, T{}); }

  // target = f(gate) * up with a limit or an alpha. Not inlined, for the reason of accumulate_scaled.
  [[gnu::noinline]] static void activate_within(const Instruction& i, Vec gate, Vec up, T* out) {
    if (i.limit != 0.0f) {  // NaN stays NaN
      gate = gate > i.limit ? splat(i.limit) : gate;
      up = up > i.limit ? splat(i.limit) : up;
      up = up < -i.limit ? splat(-i.limit) : up;
    }
    Vec opened;
    if (i.alpha != 0.0f) {
      opened = gate * round(sigmoid_of(round(gate * i.alpha)));
      up = round(up + 1.0f);
    } else {
      opened = activation_of<T>(gate, i.activation);
    }
    save(round(opened) * up, out, kLanes);
  }

  // The products of a row and a panel with scales and bias, rounded to T.
  template <class Sums>
  Vec finished(int64_t r, int64_t pair, int half, Sums sums) const {
    return round(biased(r, pair * kPairOutputs + half * kLanes, sums));
  }

  // The sums of a row and 16 outputs, times the scales, plus the bias. The multiply-add with zero
  // rounds the product, so that the compiler cannot fuse it with the addition of the bias.
  Vec biased(int64_t, int64_t output, Vec sums) const {
    if (scales_) sums = multiply_add(sums, load(scales_ + output), Vec{});
    return bias_ ? sums + load(bias_ + output) : sums;
  }

  Vec biased(int64_t r, int64_t output, VecInt sums) const {
    const Instruction& i = instruction_;
    const Vec bias = i.bias ? load(i.bias + output) : splat(0.0f);
    const Vec scales = load(static_cast<const float*>(i.scales) + output);
    const auto* coded = static_cast<const char*>(source_.data) + r * source_.stride;
    return reinterpret_cast<const CodedRow*>(coded)->products(sums, scales, bias);
  }

  char* const data_;
  const int64_t stride_;
  const float *const scales_, *const bias_;  // for each output; null: none
  const int32_t column_, activation_;
  const float factor_;
  const bool has_bounds_;
  const Instruction& instruction_;
  const Buffer& source_;
};

}  // namespace
