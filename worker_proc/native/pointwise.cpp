// Entry points of norms, activations and hyper-connections, for one module; called by native/kernels.py.

#include <vector>

#include "pointwise.h"
#include "stream_mixing.h"

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
      save(activation_of<T>(load_any(in + row * stride + i, count), kind),
           out + static_cast<int64_t>(row) * size + i, count);
    }
}

template <typename T>
void gated_norm(const GatedNorm& norm) {
  const int num_groups = norm.size / norm.group_size;
  const int64_t num_items = int64_t(norm.num_rows) * num_groups;
#pragma omp parallel if (num_items * norm.group_size > 16384)
  {
    std::vector<float> gated(norm.group_size);
#pragma omp for schedule(static)
    for (int64_t item = 0; item < num_items; item++) {
      const int64_t row = item / num_groups, first = item % num_groups * norm.group_size;
      normalize_gated(static_cast<const T*>(norm.rows) + row * norm.row_stride + first,
                      static_cast<const T*>(norm.gates) + row * norm.gate_stride + first,
                      norm.weight + first, static_cast<T*>(norm.out) + row * norm.size + first,
                      norm, gated.data());
    }
  }
}

}  // namespace

// y = x / sqrt(mean(x²) + epsilon) · weight, [num_rows][size]. Rows of x are `stride` values apart.
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

// y = f(x), [num_rows][size]. Rows of x are `stride` values apart.
extern "C" void troika_activate(const void* in, int64_t stride, void* out, int32_t num_rows,
                                int32_t size, int32_t kind, int32_t is_bf16) {
  if (is_bf16)
    activate(static_cast<const Bf16*>(in), stride, static_cast<Bf16*>(out), num_rows, size, kind);
  else
    activate(static_cast<const float*>(in), stride, static_cast<float*>(out), num_rows, size, kind);
}

// Normalizes each group of each row; see GatedNorm.
extern "C" void troika_gated_norm(const GatedNorm* norm) {
  norm->is_bf16 ? gated_norm<Bf16>(*norm) : gated_norm<float>(*norm);
}

// Computes the inputs and mixing weights of hyper-connections; see StreamMixing.
extern "C" void troika_mix_streams(const StreamMixing* mixing) {
  mixing->is_bf16 ? StreamMixer<Bf16>(*mixing).compute() : StreamMixer<float>(*mixing).compute();
}
