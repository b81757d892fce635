// Normalizations and activations of one module; called by loading/fused.py.

#include "pointwise.h"

namespace {

template <typename T>
void rms_norm(const T* in, int64_t stride, const float* weight, T* out, int num_rows, int size,
              float epsilon, bool round_before_weight) {
#pragma omp parallel for schedule(static) if (int64_t(num_rows) * size > 16384)
  for (int row = 0; row < num_rows; row++)
    normalize_row(in + row * stride, weight, out + static_cast<int64_t>(row) * size, size, epsilon,
                  round_before_weight);
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
