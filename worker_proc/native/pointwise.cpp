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

template <typename T>
inline Vec load_any(const T* p, int count) { return count == kLanes ? load(p) : load_part(p, count); }

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

// Numbers that kernels.py knows.
constexpr int kSilu = 0;
constexpr int kGeluTanh = 1;

// Both are x times a sigmoid: 0.5 · (1 + tanh(u)) = sigmoid(2u), without the cancellation.
template <int Kind>
inline Vec activation_of(Vec x) {
  if (Kind == kSilu) return x * sigmoid_of(x);
  const Vec u = x * (x * x * 0.044715f + 1.0f);
  return x * sigmoid_of(u * 1.5957691216f);  // 2 · sqrt(2 / pi)
}

// With Multiplies a row holds `size` gates, and then as many factors.
template <typename T, int Kind, bool Multiplies>
void activate(const T* in, int64_t stride, T* out, int num_rows, int size) {
#pragma omp parallel for schedule(static) if (int64_t(num_rows) * size > 16384)
  for (int row = 0; row < num_rows; row++) {
    const T* x = in + row * stride;
    T* y = out + static_cast<int64_t>(row) * size;
    for (int i = 0; i < size; i += kLanes) {
      const int count = lanes_at(i, size);
      Vec v = activation_of<Kind>(load_any(x + i, count));
      if (Multiplies) v = rounded(v, T{}) * load_any(x + size + i, count);
      save(v, y + i, count);
    }
  }
}

template <typename T, int Kind>
void activate_any(const void* in, int64_t stride, void* out, int num_rows, int size,
                  bool multiplies) {
  (multiplies ? activate<T, Kind, true> : activate<T, Kind, false>)(
      static_cast<const T*>(in), stride, static_cast<T*>(out), num_rows, size);
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

// Per row: y = f(x), of `size` values; or, if it multiplies, y = f(gate) · up, of 2 · size values
// with the gates first. Rows of x are `stride` apart.
extern "C" void troika_activate(const void* in, int64_t stride, void* out, int32_t num_rows,
                                int32_t size, int32_t kind, int32_t multiplies, int32_t is_bf16) {
  if (is_bf16)
    (kind == kSilu ? activate_any<Bf16, kSilu> : activate_any<Bf16, kGeluTanh>)(
        in, stride, out, num_rows, size, multiplies);
  else
    (kind == kSilu ? activate_any<float, kSilu> : activate_any<float, kGeluTanh>)(
        in, stride, out, num_rows, size, multiplies);
}
