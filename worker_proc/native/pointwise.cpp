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

template <typename T>
void activate(const T* in, int64_t stride, T* out, int num_rows, int size, int kind) {
#pragma omp parallel for schedule(static) if (int64_t(num_rows) * size > 16384)
  for (int row = 0; row < num_rows; row++)
    for (int i = 0; i < size; i += kLanes) {
      const int count = lanes_at(i, size);
      save(activation_of(load_any(in + row * stride + i, count), kind),
           out + static_cast<int64_t>(row) * size + i, count);
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

// y = f(x), for rows of `size` values; rows of x are `stride` apart.
extern "C" void troika_activate(const void* in, int64_t stride, void* out, int32_t num_rows,
                                int32_t size, int32_t kind, int32_t is_bf16) {
  if (is_bf16)
    activate(static_cast<const Bf16*>(in), stride, static_cast<Bf16*>(out), num_rows, size, kind);
  else
    activate(static_cast<const float*>(in), stride, static_cast<float*>(out), num_rows, size, kind);
}
