// Rows of bfloat16 that are widened to float32, on processors without AVX-512.
//
// The inputs of rows and weights are divided into blocks. Inputs of codes are also multiplied by factors,
// and the inputs of a group are summed (placed_codes.h). Used by widened_products.h and line_products.h.

#pragma once

#ifndef __AVX512F__

#include "products/placed_codes.h"
#include "products/product_inputs.h"

namespace {

constexpr int kMaxBlockFloats = 5 * 1024;       // of a panel, which stay in the L1 cache
constexpr int64_t kCodedBlock = 4 * kUnitStep;  // units of a block of codes

// The number of units of a block of a weight. All blocks but the last one have the same size.
template <typename T, class W>
int64_t block_units_of(const W& w) {
  if (W::kAreCodes) return kCodedBlock;
  constexpr int64_t kMost = kMaxBlockFloats * sizeof(T) / sizeof(Unit) / kLanes / kUnitStep;
  const int64_t num_steps = w.num_units / kUnitStep, num_blocks = (num_steps + kMost - 1) / kMost;
  return (num_steps + num_blocks - 1) / num_blocks * kUnitStep;
}

// Rows widened to float32, which are kept until a thread multiplies other rows.
class FloatRows {
 public:
  struct Inputs {
    const float* floats;  // [blocks][rows][inputs of a block], the lower half of a unit first
    const float* sums;    // of groups of inputs times sum_factor(), [groups][rows]; null without factors
  };

  FloatRows(UnitRows rows, int64_t num_units, int64_t block_units, InputFactors factors)
      : rows_(rows),
        num_inputs_(2 * num_units),
        block_inputs_(2 * block_units),
        factors_(factors) {}

  // The rows [row, last_row).
  Inputs of(int64_t row, int64_t last_row) {
    if (row != row_ || last_row != last_row_) widen(row, last_row);
    return inputs_;
  }

 private:
  void widen(int64_t row, int64_t last_row) {
    const int64_t num_rows = last_row - row;
    const int64_t num_blocks = (num_inputs_ + block_inputs_ - 1) / block_inputs_;
    const int64_t num_floats = num_blocks * num_rows * block_inputs_;
    const int64_t num_groups = factors_.factors ? (num_inputs_ - 1) / factors_.group_inputs + 1 : 0;
    float* const to =
        reinterpret_cast<float*>(space_for<FloatRows>(num_floats + num_groups * num_rows));
    float* const sums = to + num_floats;
    inputs_ = {to, factors_.factors ? sums : nullptr};
    row_ = row;
    last_row_ = last_row;
    for (int64_t r = 0; r < num_rows; r++) {
      const auto* from = reinterpret_cast<const Bf16*>(rows_.data + (row + r) * rows_.stride);
      for (int64_t first = 0; first < num_inputs_; first += block_inputs_, from += block_inputs_) {
        const int64_t count = std::min(block_inputs_, num_inputs_ - first);
        float* const at = to + first * num_rows + r * block_inputs_;
        if (factors_.factors)
          multiply(from, count, at, sums + first / factors_.group_inputs * num_rows + r, num_rows);
        else
          for (int64_t i = 0; i < count; i += kPartLanes) save_part(part_at(from + i), at + i);
      }
    }
  }

  // Multiplies the inputs of a block by the factors, and sums those of each group. Successive sums are
  // `stride` apart.
  void multiply(const Bf16* from, int64_t count, float* to, float* sums, int64_t stride) const {
    for (int64_t first = 0; first < count; first += factors_.group_inputs, sums += stride) {
      const int64_t last = std::min(first + factors_.group_inputs, count);
      Part sum{};
      for (int64_t i = first; i < last; i += kPartLanes) {
        const Part inputs = part_at(from + i);
        sum += inputs;
        save_part(inputs * part_at(factors_.factors + i % kLanes), to + i);
      }
      *sums = factors_.sum_factor() * sum_of_part(sum);
    }
  }

  const UnitRows rows_;
  const int64_t num_inputs_, block_inputs_;
  const InputFactors factors_;
  Inputs inputs_{};
  int64_t row_ = 0, last_row_ = 0;
};

// The rows of a weight's products.
template <typename T, class W>
FloatRows float_rows(const W& w, UnitRows rows) {
  return {rows, w.num_units, block_units_of<T>(w), input_factors_of(w)};
}

}  // namespace

#endif
