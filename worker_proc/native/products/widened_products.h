// Products of many rows on processors without AVX-512: weights are widened to float32 once for all
// rows. Called by multiply_part (products.h).

#pragma once

#ifndef __AVX512F__

#include <type_traits>

#include "products/row_sums.h"

namespace {

constexpr int kManyRows = 6;                    // with fewer rows, widening is slower
constexpr int64_t kBlockUnits = 4 * kUnitStep;  // a block of a pair stays in the L1 cache

struct WideRows;
struct SavedSums;

// Widens rows to float32, [num_rows][2 * num_units], the lower half of a unit first.
template <typename T>
UnitRows widened(UnitRows rows, int64_t num_rows, int64_t num_units) {
  if constexpr (std::is_same<T, float>::value) return rows;
  const int64_t stride = 2 * num_units;
  Unit* const wide = space_for<WideRows>(num_rows * stride);
  for (int64_t r = 0; r < num_rows; r++)
    for (int64_t i = 0; i < num_units; i++) {
      const Unit unit = rows.data[r * rows.stride + i];
      wide[r * stride + 2 * i] = unit << 16;
      wide[r * stride + 2 * i + 1] = unit & 0xffff0000u;
    }
  return {wide, stride};
}

// Widens the units [first, first + count) of a pair to float32, [inputs][32 outputs].
template <typename T, class W>
void widen_block(const W& w, int64_t pair, int64_t first, int64_t count, Unit* to) {
  constexpr int64_t kInputs = sizeof(Unit) / sizeof(T);
  for (int64_t unit = 0; unit < count; unit += kUnitStep)
    for (int half = 0; half < 2; half++) {
      Unit* at = to + unit * kInputs * kPairOutputs + half * kLanes;
      if constexpr (W::kAreCodes) {
        w.widen_tile(pair, half, first + unit, at);
      } else {
        const Unit* tile = w.tile(pair, half, first + unit, nullptr);
        for (int64_t u = 0; u < kUnitStep; u++, tile += kLanes, at += kInputs * kPairOutputs)
          for (int p = 0; p < kLanes; p += kPartLanes) {
            const PartBits bits = *reinterpret_cast<const PartBits*>(tile + p);
            if constexpr (std::is_same<T, float>::value) {
              *reinterpret_cast<PartBits*>(at + p) = bits;
            } else {
              *reinterpret_cast<PartBits*>(at + p) = bits << 16;
              *reinterpret_cast<PartBits*>(at + kPairOutputs + p) = bits & 0xffff0000u;
            }
          }
      }
    }
}

// Adds the products of R rows and a block to their sums, [R][32]. If a block is a group, its own sums
// are first multiplied by the scales, [32].
template <int R, bool kIsGroup>
[[gnu::noinline]] void add_block(const float* block, int64_t num_inputs, const float* rows,
                                 int64_t stride, const float* scales, float* saved) {
  constexpr int kPairParts = kPairOutputs / kPartLanes;
  Part sums[R][kPairParts];
#pragma GCC unroll 32
  for (int r = 0; r < R; r++)
#pragma GCC unroll 32
    for (int p = 0; p < kPairParts; p++)
      sums[r][p] = kIsGroup ? Part{} : part_at(saved + r * kPairOutputs + p * kPartLanes);
#pragma GCC unroll 2
  for (int64_t i = 0; i < num_inputs; i++, block += kPairOutputs)
#pragma GCC unroll 32
    for (int p = 0; p < kPairParts; p++) {
      Part weights = part_at(block + p * kPartLanes);
      hold_in_register(weights);
#pragma GCC unroll 32
      for (int r = 0; r < R; r++) sums[r][p] = sums[r][p] + rows[r * stride + i] * weights;
    }
  if (kIsGroup)
#pragma GCC unroll 32
    for (int p = 0; p < kPairParts; p++) {
      const Part scale = part_at(scales + p * kPartLanes);
#pragma GCC unroll 32
      for (int r = 0; r < R; r++) {
        const Part before = part_at(saved + r * kPairOutputs + p * kPartLanes);
        sums[r][p] = multiply_add_part(sums[r][p], scale, before);
      }
    }
#pragma GCC unroll 32
  for (int r = 0; r < R; r++)
#pragma GCC unroll 32
    for (int p = 0; p < kPairParts; p++)
      save_part(sums[r][p], saved + r * kPairOutputs + p * kPartLanes);
}

// Multiplies the rows [row, last_row) by the pairs [pair, last_pair), with the bits of
// multiply_with_vectors. Each block of the weights is widened once for all rows, and the sums are
// stored from block to block.
template <typename T, class W, class Out>
void multiply_many_rows(const W& w, UnitRows rows, int64_t row, int64_t last_row, int64_t pair,
                        int64_t last_pair, const Out& out) {
  constexpr int64_t kInputs = sizeof(Unit) / sizeof(T);
  if (pair == last_pair) return;
  const int64_t num_rows = last_row - row;
  const UnitRows given{rows.data + row * rows.stride, rows.stride};
  const UnitRows wide = widened<T>(given, num_rows, w.num_units);
  const float* const inputs = reinterpret_cast<const float*>(wide.data);
  constexpr bool kAreGroups = W::kGroupUnits > 0;  // the blocks
  static_assert(!kAreGroups || W::kGroupUnits == kBlockUnits);
  float* const sums = reinterpret_cast<float*>(space_for<SavedSums>(num_rows * kPairOutputs));
  float scales[kPairOutputs];
  alignas(64) Unit block[kBlockUnits * kInputs * kPairOutputs];
  for (; pair < last_pair; pair++) {
    std::fill(sums, sums + num_rows * kPairOutputs, 0.0f);
    for (int64_t first = 0; first < w.num_units; first += kBlockUnits) {
      const int64_t count = std::min(kBlockUnits, w.num_units - first);
      widen_block<T>(w, pair, first, count, block);
      if constexpr (kAreGroups)
        for (int half = 0; half < 2; half++)
          save(w.group_scales(pair, half, first), scales + half * kLanes, kLanes);
      for (int64_t r = 0; r < num_rows; r += kMaxRows) {
        const auto add = num_rows - r == 1   ? add_block<1, kAreGroups>
                         : num_rows - r == 2 ? add_block<2, kAreGroups>
                                             : add_block<kMaxRows, kAreGroups>;
        add(reinterpret_cast<const float*>(block), count * kInputs,
            inputs + r * wide.stride + first * kInputs, wide.stride, scales, sums + r * kPairOutputs);
      }
    }
    for (int64_t r = 0; r < num_rows; r++) {
      const float* sum = sums + r * kPairOutputs;
      out(row + r, pair, load(sum), load(sum + kLanes));
    }
  }
}

}  // namespace

#endif
