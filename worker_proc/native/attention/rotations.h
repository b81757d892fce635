// Rotary position embedding of one head.
//
// Cosines and sines belong to the position of the row: [num_rotated], or [num_rotated / 2] for pairs.
// Their type A is that of the products, which are rounded to it as in transformers. Used by
// decoder.cpp.

#pragma once

#include "pointwise.h"

namespace {

// Rotates each of the first `half` dimensions of x with the dimension `half` places after it.
template <typename T, typename A>
void rotate_halves(T* x, const A* cosines, const A* sines, int half) {
  const auto product = [](Vec a, Vec b) { return rounded(a * b, A{}); };
  for_vectors(half, [&](int d, auto count) {
    const Vec a = load_any(x + d, count), b = load_any(x + half + d, count);
    const Vec low =
        product(a, load_any(cosines + d, count)) - product(b, load_any(sines + d, count));
    const Vec high = product(b, load_any(cosines + half + d, count)) +
                     product(a, load_any(sines + half + d, count));
    save(low, x + d, count);
    save(high, x + half + d, count);
  });
}

// Rotates each even dimension of the first `size` dimensions of x with the next dimension.
template <typename T, typename A>
void rotate_pairs(T* x, const A* cosines, const A* sines, int size) {
  const auto product = [](T a, A b) {
    A out;
    narrow(widen(a) * widen(b), out);
    return widen(out);
  };
  for (int d = 0; d < size; d += 2) {
    const T a = x[d], b = x[d + 1];
    const A cosine = cosines[d / 2], sine = sines[d / 2];
    narrow(product(a, cosine) - product(b, sine), x[d]);
    narrow(product(b, cosine) + product(a, sine), x[d + 1]);
  }
}

}  // namespace
