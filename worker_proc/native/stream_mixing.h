// Hyper-connections: the input row of a module from the residual streams of a token, and the weights
// that mix the module's result and the streams to new streams.
//
// The inputs are products of the streams and a matrix. From them follow gates of the streams, gates of
// the result, and a mixing matrix that is made doubly stochastic by Sinkhorn iterations: its rows and
// columns are divided by their sums in turn. Each row is computed separately. Called by pointwise.cpp.

#pragma once

#include "pointwise.h"

extern "C" {

// StreamMixingArgs in structures.py.
struct StreamMixing {
  const float* products;  // [num_rows][num_streams * (2 + num_streams)], the rows `stride` apart
  const void* streams;    // [num_rows][num_streams][size]
  const float* biases;    // of the products, [num_streams * (2 + num_streams)]
  const float* scales;    // [3]: of the gates of streams, the gates of the result, and the matrix
  float* gates;           // of the result, [num_rows][num_streams]
  float* matrix;          // [num_rows][num_streams][num_streams]
  void* out;              // [num_rows][size]
  int64_t stride;
  int32_t num_rows, num_streams, size, num_iterations, is_bf16;
  float epsilon;
};
}

namespace {

constexpr int kMaxStreams = 8;  // the lanes of an AVX2 register

template <typename T>
class StreamMixer {
 public:
  explicit StreamMixer(const StreamMixing& mixing) : mixing_(mixing), count_(mixing.num_streams) {
    for (int i = 0; i < kLanes; i++) is_stream_[i] = i < count_ ? -1 : 0;
  }

  void compute() const {
    const int64_t work = static_cast<int64_t>(mixing_.num_rows) * count_ * mixing_.size;
#pragma omp parallel for schedule(static) if (work > 16384)
    for (int row = 0; row < mixing_.num_rows; row++) compute_row(row);
  }

 private:
  void compute_row(int64_t row) const {
    const float* const products = mixing_.products + row * mixing_.stride;
    const Vec weights = sigmoid_of(scaled(products, 0, 0)) + mixing_.epsilon;
    save(2.0f * sigmoid_of(scaled(products, count_, 1)), mixing_.gates + row * count_, count_);
    balance(products, mixing_.matrix + row * count_ * count_);
    const T* const streams = static_cast<const T*>(mixing_.streams) + row * count_ * mixing_.size;
    T* const out = static_cast<T*>(mixing_.out) + row * mixing_.size;
    for (int d = 0; d < mixing_.size; d += kLanes) {
      const int width = lanes_at(d, mixing_.size);
      Vec sum = splat(0.0f);
      for (int i = 0; i < count_; i++)
        sum = sum + weights[i] * load_any(streams + static_cast<int64_t>(i) * mixing_.size + d, width);
      save(sum, out + d, width);
    }
  }

  // The products from `first` on, scaled and biased; `kind` is an index of `scales`.
  Vec scaled(const float* products, int first, int kind) const {
    return load_any(products + first, count_) * mixing_.scales[kind] +
           load_any(mixing_.biases + first, count_);
  }

  // Sinkhorn iterations: a softmax of each row, then columns and rows are divided by their sums in turn.
  void balance(const float* products, float* matrix) const {
    Vec rows[kMaxStreams];
    for (int i = 0; i < count_; i++) {
      const Vec values = scaled(products, (2 + i) * count_, 2);
      const Vec known = is_stream_ ? values : splat(kNegInf);
      const float top = fold(known, [](Vec a, Vec b) { return a > b ? a : b; });
      const Vec powers = is_stream_ ? exp_of(values - top) : splat(0.0f);
      rows[i] = is_stream_ ? powers / sum_of(powers) + mixing_.epsilon : splat(0.0f);
    }
    divide_columns(rows);
    for (int iteration = 1; iteration < mixing_.num_iterations; iteration++) {
      for (int i = 0; i < count_; i++) rows[i] = rows[i] / (sum_of(rows[i]) + mixing_.epsilon);
      divide_columns(rows);
    }
    for (int i = 0; i < count_; i++) save(rows[i], matrix + i * count_, count_);
  }

  void divide_columns(Vec* rows) const {
    Vec sums = is_stream_ ? splat(mixing_.epsilon) : splat(1.0f);
    for (int i = 0; i < count_; i++) sums = sums + rows[i];
    for (int i = 0; i < count_; i++) rows[i] = rows[i] / sums;
  }

  static float sum_of(Vec values) {
    return fold(values, [](Vec a, Vec b) { return a + b; });
  }

  const StreamMixing& mixing_;
  const int count_;
  VecInt is_stream_;
};

}  // namespace
