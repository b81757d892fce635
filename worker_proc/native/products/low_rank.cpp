// Copies the matrices of an adapter to the layout of low_rank.h, in one thread; called by kernels.py.

#include <cmath>
#include <cstdint>
#include <cstring>

#include "products/low_rank.h"

namespace {

// The values of StoredType in structures.py.
constexpr int32_t kFloat32 = 0, kFloat16 = 1, kBfloat16 = 2;

float widen_half(uint16_t half) {
  const uint32_t sign = uint32_t{half & 0x8000u} << 16, magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00) return float_of(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  if (magnitude < 0x0400) {  // zero or subnormal
    const float size = static_cast<float>(magnitude) * 0x1p-24f;
    return sign ? -size : size;
  }
  return float_of(sign | ((magnitude << 13) + (112u << 23)));
}

float value_at(const char* from, int32_t type, int64_t index) {
  if (type == kFloat32) {
    float value;
    std::memcpy(&value, from + 4 * index, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, from + 2 * index, 2);
  return type == kFloat16 ? widen_half(bits) : widen(Bf16{bits});
}

// The offsets of values in the layouts of low_rank.h.
class Offsets {
 public:
  Offsets(int64_t num_values, int64_t block_lines)
      : block_lines_(block_lines), num_chunks_((num_values + kChunk - 1) / kChunk) {}

  int64_t at(int64_t line, int64_t value) const {
    const int64_t chunk = line / block_lines_ * num_chunks_ + value / kChunk;
    return (chunk * block_lines_ + line % block_lines_) * kChunk + value % kChunk;
  }

 private:
  const int64_t block_lines_, num_chunks_;
};

template <typename T>
bool copy(const char* from, int32_t type, int64_t num_rows, int64_t num_columns, int64_t stride,
          bool transposes, T* to) {
  const Offsets offsets = transposes ? Offsets(num_rows, num_columns) : Offsets(num_columns, kInnerBlock);
  bool is_finite = true;
  for (int64_t row = 0; row < num_rows; row++)
    for (int64_t column = 0; column < num_columns; column++) {
      T& target = to[transposes ? offsets.at(column, row) : offsets.at(row, column)];
      narrow(value_at(from, type, row * stride + column), target);
      is_finite &= std::isfinite(widen(target));
    }
  return is_finite;
}

}  // namespace

// Copies a matrix, [num_rows, num_columns] with rows `stride` values apart, to lines that are filled
// with zeros: to `down`, whose lines are the rows, or, if `transposes`, to `up`, whose lines are the
// columns. Sets `is_finite` to whether all copied values are finite.
extern "C" void troika_copy_low_rank(const void* from, int32_t type, int64_t num_rows,
                                     int64_t num_columns, int64_t stride, int32_t transposes,
                                     void* to, int32_t is_bf16, int32_t* is_finite) {
  const char* source = static_cast<const char*>(from);
  const auto copy_to = [&](auto* target) {
    return copy(source, type, num_rows, num_columns, stride, transposes != 0, target);
  };
  *is_finite = is_bf16 ? copy_to(static_cast<Bf16*>(to)) : copy_to(static_cast<float*>(to));
}
