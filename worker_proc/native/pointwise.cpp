// Normalizations and activations in one pass over a row; called by fused.py.
//
// They round where transformers' own modules round, so that results differ in the order of a sum
// at most.

#include "vec.h"

namespace {

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

inline Vec load_any(const float* p, int count) { return count == kLanes ? load(p) : load_part(p, count); }
inline Vec load_any(const Bf16* p, int count) { return count == kLanes ? load(p) : load_part(p, count); }

inline Vec rounded(Vec v, float) { return v; }
inline Vec rounded(Vec v, Bf16) {
  const VecBits bits = (VecBits)v;
  return (Vec)((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u);
}

inline void save(Vec v, float* p, int count) { std::memcpy(p, &v, count * sizeof(float)); }
inline void save(Vec v, Bf16* p, int count) {
  const VecBits bits = (VecBits)rounded(v, Bf16{}) >> 16;
  const VecHalf half = __builtin_convertvector(bits, VecHalf);
  std::memcpy(p, &half, count * sizeof(Bf16));
}

inline int lanes_at(int i, int size) { return size - i < kLanes ? size - i : kLanes; }

template <typename T>
void rms_norm(const T* in, int64_t stride, const float* weight, T* out, int num_rows, int size,
              float epsilon, bool round_before_weight) {
#pragma omp parallel for schedule(static) if (int64_t(num_rows) * size > 16384)
  for (int row = 0; row < num_rows; row++) {
    const T* x = in + row * stride;
    T* y = out + static_cast<int64_t>(row) * size;
    Vec squares = splat(0.0f);
    for (int i = 0; i < size; i += kLanes) {
      const Vec v = load_any(x + i, lanes_at(i, size));
      squares += v * v;
    }
    const float mean = fold(squares, [](Vec a, Vec b) { return a + b; }) / size;
    const float factor = 1.0f / std::sqrt(mean + epsilon);
    for (int i = 0; i < size; i += kLanes) {
      const int count = lanes_at(i, size);
      Vec v = load_any(x + i, count) * factor;
      if (round_before_weight) v = rounded(v, T{});
      save(v * load_any(weight + i, count), y + i, count);
    }
  }
}

template <typename T>
void silu_and_multiply(const T* in, T* out, int num_rows, int size) {
#pragma omp parallel for schedule(static) if (int64_t(num_rows) * size > 16384)
  for (int row = 0; row < num_rows; row++) {
    const T* gate = in + static_cast<int64_t>(row) * 2 * size;
    T* y = out + static_cast<int64_t>(row) * size;
    for (int i = 0; i < size; i += kLanes) {
      const int count = lanes_at(i, size);
      const Vec g = load_any(gate + i, count);
      save(rounded(g * sigmoid_of(g), T{}) * load_any(gate + size + i, count), y + i, count);
    }
  }
}

}  // namespace

// y = x / sqrt(mean(x²) + epsilon) · weight, per row of `size` values; rows of x are `stride` apart.
extern "C" void troika_rms_norm(const void* in, int64_t stride, const float* weight, void* out,
                                int32_t num_rows, int32_t size, float epsilon, int32_t is_bf16,
                                int32_t round_before_weight) {
  if (is_bf16)
    rms_norm(static_cast<const Bf16*>(in), stride, weight, static_cast<Bf16*>(out), num_rows, size,
             epsilon, round_before_weight);
  else
    rms_norm(static_cast<const float*>(in), stride, weight, static_cast<float*>(out), num_rows, size,
             epsilon, round_before_weight);
}

// Rows of 2 · size values, gates first: y = silu(gate) · up.
extern "C" void troika_silu_and_multiply(const void* in, void* out, int32_t num_rows, int32_t size,
                                         int32_t is_bf16) {
  if (is_bf16)
    silu_and_multiply(static_cast<const Bf16*>(in), static_cast<Bf16*>(out), num_rows, size);
  else
    silu_and_multiply(static_cast<const float*>(in), static_cast<float*>(out), num_rows, size);
}
