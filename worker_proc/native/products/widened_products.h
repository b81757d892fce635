// Products of many rows on processors without AVX-512: weights are widened to float32 once for all
// rows. Called by multiply_part (products.h).
//
// Rows and weights are divided into blocks of inputs. The first register tile of rows widens a block of
// bfloat16 weights for the other tiles; codes are decoded before.

#pragma once

#ifndef __AVX512F__

#include <type_traits>
#include <utility>

#include "products/row_sums.h"

namespace {

constexpr int kManyRows = 4;   // with fewer rows, the kernels of row_sums.h are faster
constexpr int kPanelRows = 6;  // rows of a register tile with one panel
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

// How a weight reads its inputs: each one is multiplied by a factor, [kLanes], by its index modulo 16. The
// sum of a group's products begins with the sum of the group's inputs times `zero`.
struct InputFactors {
  const float* factors = nullptr;  // null: all are 1
  float zero = 0.0f;
};

template <class W, class = void>
struct InputFactorsOf {
  static constexpr InputFactors kValue{};
};
template <class W>
struct InputFactorsOf<W, std::void_t<decltype(W::kInputFactors)>> {
  static constexpr InputFactors kValue{W::kInputFactors, -W::kZero};
};

// Rows widened to float32, which are kept until a thread multiplies other rows.
class FloatRows {
 public:
  struct Inputs {
    const float* floats;  // [blocks][rows][inputs of a block], the lower half of a unit first
    const float* begins;  // the first terms of sums of groups, [blocks][rows]; null without factors
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
    float* const to =
        reinterpret_cast<float*>(space_for<FloatRows>(num_floats + num_blocks * num_rows));
    float* const begins = to + num_floats;
    inputs_ = {to, factors_.factors ? begins : nullptr};
    row_ = row;
    last_row_ = last_row;
    for (int64_t r = 0; r < num_rows; r++) {
      const auto* from = reinterpret_cast<const Bf16*>(rows_.data + (row + r) * rows_.stride);
      for (int64_t block = 0; block < num_blocks; block++, from += block_inputs_) {
        const int64_t count = std::min(block_inputs_, num_inputs_ - block * block_inputs_);
        float* const at = to + (block * num_rows + r) * block_inputs_;
        if (factors_.factors)
          begins[block * num_rows + r] = factors_.zero * multiply(from, count, at);
        else
          for (int64_t i = 0; i < count; i += kPartLanes) save_part(part_at(from + i), at + i);
      }
    }
  }

  // Multiplies inputs by the factors, and returns the sum of the inputs.
  float multiply(const Bf16* from, int64_t count, float* to) const {
    Part sum{};
    for (int64_t i = 0; i < count; i += kPartLanes) {
      const Part inputs = part_at(from + i);
      sum += inputs;
      save_part(inputs * part_at(factors_.factors + i % kLanes), to + i);
    }
    return sum_of_part(sum);
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
  return {rows, w.num_units, block_units_of<T>(w), InputFactorsOf<W>::kValue};
}

// Adds the products of one input of R rows and P Parts of weights to sums. The smaller of both sets stays
// in registers. weight(p) loads a Part.
template <int R, int P, class Weight>
[[gnu::always_inline]] inline void add_input(const float* rows, int64_t stride, const Weight& weight,
                                             Part (&sums)[R][P]) {
  if constexpr (R < P) {
#pragma GCC unroll 32
    for (int p = 0; p < P; p++) {
      Part own = weight(p);
      hold_in_register(own);
#pragma GCC unroll 32
      for (int r = 0; r < R; r++) sums[r][p] = sums[r][p] + rows[r * stride] * own;
    }
  } else {
    Part own[P];
#pragma GCC unroll 32
    for (int p = 0; p < P; p++) {
      own[p] = weight(p);
      hold_in_register(own[p]);
    }
#pragma GCC unroll 32
    for (int r = 0; r < R; r++)
#pragma GCC unroll 32
      for (int p = 0; p < P; p++) sums[r][p] = sums[r][p] + rows[r * stride] * own[p];
  }
}

// Sums of R rows are 32 floats apart in memory.
template <int R, int P>
[[gnu::always_inline]] inline void load_sums(const float* saved, Part (&sums)[R][P]) {
#pragma GCC unroll 32
  for (int r = 0; r < R; r++)
#pragma GCC unroll 32
    for (int p = 0; p < P; p++) sums[r][p] = part_at(saved + r * kPairOutputs + p * kPartLanes);
}

template <int R, int P>
[[gnu::always_inline]] inline void save_sums(const Part (&sums)[R][P], float* saved) {
#pragma GCC unroll 32
  for (int r = 0; r < R; r++)
#pragma GCC unroll 32
    for (int p = 0; p < P; p++) save_part(sums[r][p], saved + r * kPairOutputs + p * kPartLanes);
}

// A block of weights as float32, [num_inputs][outputs of one or two panels], and a tile's rows.
struct BlockProducts {
  const float* weights;
  int64_t num_inputs;
  const float* rows;
  int64_t stride;       // between rows
  const float* scales;  // of a group, for each output
  const float* begins;  // of a group, the first terms of the sums, for each row
  float* sums;
};

// Adds the products of R rows to their sums. If a block is a group, its own sums, which begin with a
// term of each row, are first multiplied by the scales.
template <int R, int Panels, bool kIsGroup>
[[gnu::noinline]] void add_block(const BlockProducts& block) {
  constexpr int P = Panels * kParts;
  Part sums[R][P];
  if (kIsGroup) {
#pragma GCC unroll 32
    for (int r = 0; r < R; r++)
#pragma GCC unroll 32
      for (int p = 0; p < P; p++) sums[r][p] = splat_part(block.begins[r]);
  } else {
    load_sums(block.sums, sums);
  }
  const float *weights = block.weights, *rows = block.rows;
  const int64_t num_inputs = block.num_inputs, stride = block.stride;
#pragma GCC unroll 2
  for (int64_t i = 0; i < num_inputs; i++, weights += Panels * kLanes) {
    const auto weight = [&](int p) { return part_at(weights + p * kPartLanes); };
    add_input(rows + i, stride, weight, sums);
  }
  if (kIsGroup) {
    Part before[R][P];
    load_sums(block.sums, before);
#pragma GCC unroll 32
    for (int p = 0; p < P; p++) {
      const Part scale = part_at(block.scales + p * kPartLanes);
#pragma GCC unroll 32
      for (int r = 0; r < R; r++) sums[r][p] = multiply_add_part(sums[r][p], scale, before[r][p]);
    }
  }
  save_sums(sums, block.sums);
}

// add_block for units of a panel in bfloat16. With kKeeps, they are stored in `kept` as float32.
template <int R, bool kKeeps>
[[gnu::noinline]] void add_units(const BlockProducts& block, const Unit* units, float* kept) {
  Part sums[R][kParts];
  load_sums(block.sums, sums);
  const float* rows = block.rows;
  const int64_t num_inputs = block.num_inputs, stride = block.stride;
  const auto widened = [&](int half, int p) {
    const PartBits bits = *reinterpret_cast<const PartBits*>(units + p * kPartLanes);
    const Part part = (Part)(half == 0 ? bits << 16 : bits & 0xffff0000u);
    if (kKeeps) save_part(part, kept + half * kLanes + p * kPartLanes);
    return part;
  };
#pragma GCC unroll 1
  for (int64_t i = 0; i < num_inputs; i += 2, units += kLanes, kept += 2 * kLanes) {
    add_input(rows + i, stride, [&](int p) { return widened(0, p); }, sums);
    forget_loads();  // the registers hold one half of the units beside the sums
    add_input(rows + i + 1, stride, [&](int p) { return widened(1, p); }, sums);
    forget_loads();
  }
  save_sums(sums, block.sums);
}

template <int Panels, bool kIsGroup, int... Fewer>
auto block_adder(int64_t num_rows, std::integer_sequence<int, Fewer...>) {
  static constexpr decltype(&add_block<1, Panels, kIsGroup>) kAdders[] = {
      add_block<Fewer + 1, Panels, kIsGroup>...};
  return kAdders[num_rows - 1];
}

template <bool kKeeps, int... Fewer>
auto unit_adder(int64_t num_rows, std::integer_sequence<int, Fewer...>) {
  static constexpr decltype(&add_units<1, kKeeps>) kAdders[] = {add_units<Fewer + 1, kKeeps>...};
  return kAdders[num_rows - 1];
}

struct SavedSums;

// The products of some rows with one pair after another, in which sums are stored from block to block.
template <typename T, class W>
class ManyRows {
 public:
  ManyRows(const W& w, UnitRows rows, int64_t row, int64_t last_row)
      : w_(w),
        row_(row),
        num_rows_(last_row - row),
        block_units_(block_units_of<T>(w)),
        num_tiles_((num_rows_ + kTileRows - 1) / kTileRows),
        sums_(reinterpret_cast<float*>(space_for<SavedSums>(num_rows_ * kPairOutputs))) {
    if constexpr (std::is_same<T, float>::value) {
      inputs_ = reinterpret_cast<const float*>(rows.data + row * rows.stride);
      row_stride_ = rows.stride;
      block_stride_ = block_units_;
    } else {
      FloatRows own = float_rows<T>(w, rows);
      const FloatRows::Inputs inputs = (rows.floats ? *rows.floats : own).of(row, last_row);
      inputs_ = inputs.floats;
      begins_ = inputs.begins;
      row_stride_ = kInputs * block_units_;
      block_stride_ = num_rows_ * row_stride_;
    }
  }

  // Multiplies by a pair, and calls out(row, pair, low, high) with the sums of each row. Weights of pairs
  // before last_pair are prefetched.
  template <class Out>
  void multiply(int64_t pair, int64_t last_pair, const Out& out) {
    std::fill(sums_, sums_ + num_rows_ * kPairOutputs, 0.0f);
    for (int64_t first = 0; first < w_.num_units; first += block_units_)
      for (int half = 0; half < 2; half += kPanels) add_block_of(pair, half, first, last_pair, out);
  }

 private:
  static constexpr bool kAreGroups = W::kGroupUnits > 0;  // the blocks
  static_assert(!kAreGroups || W::kGroupUnits == kCodedBlock);
  static constexpr int kPanels = W::kAreCodes ? 2 : 1;  // of a register tile
  static constexpr int kTileRows = kPanelRows / kPanels;
  static constexpr int64_t kInputs = sizeof(Unit) / sizeof(T);
  static constexpr auto kSizes = std::make_integer_sequence<int, kTileRows>();

  int64_t first_of(int64_t tile) const { return num_rows_ * tile / num_tiles_; }

  // Adds the products with a block. The sums of a tile are passed on after the last block, while they are
  // in the cache.
  template <class Out>
  void add_block_of(int64_t pair, int half, int64_t first, int64_t last_pair, const Out& out) {
    const int64_t count = std::min(block_units_, w_.num_units - first);
    const bool is_last = half + kPanels == 2 && first + count == w_.num_units;
    const float* const rows = inputs_ + first / block_units_ * block_stride_;
    const float* const begins = kAreGroups ? begins_ + first / block_units_ * num_rows_ : nullptr;
    BlockProducts block{wide_,   count * kInputs, rows, row_stride_,
                        scales_, begins,          sums_ + half * kLanes};
    WeightsAhead ahead;
    int64_t tile = 0;
    if constexpr (W::kAreCodes) {
      decode(pair, first, count);
    } else {
      ahead = weights_after(pair, half, first, last_pair);
      const Unit* const units = w_.tile(pair, half, first, nullptr);
      if constexpr (std::is_same<T, float>::value) {
        block.weights = reinterpret_cast<const float*>(units);
      } else {
        ahead.fetch<kL2Cache>();
        const auto add = num_tiles_ == 1 ? unit_adder<false>(num_rows_, kSizes)
                                         : unit_adder<true>(first_of(1), kSizes);
        add(block, units, wide_);
        tile = 1;
        if (is_last) pass_on(pair, 0, first_of(1), out);
      }
    }
    for (; tile < num_tiles_; tile++) {
      ahead.fetch<kL2Cache>();
      const int64_t r = first_of(tile), last_row = first_of(tile + 1);
      block.rows = rows + r * row_stride_;
      if (kAreGroups) block.begins = begins + r;
      block.sums = sums_ + r * kPairOutputs + half * kLanes;
      block_adder<kPanels, kAreGroups>(last_row - r, kSizes)(block);
      if (is_last) pass_on(pair, r, last_row, out);
    }
  }

  // Calls out with the sums of the rows [first, last), which are counted from row_ on.
  template <class Out>
  void pass_on(int64_t pair, int64_t first, int64_t last, const Out& out) const {
    const float* sum = sums_ + first * kPairOutputs;
    for (int64_t r = first; r < last; r++, sum += kPairOutputs)
      out(row_ + r, pair, load(sum), load(sum + kLanes));
  }

  // Decodes the units [first, first + count) of a pair to float32, [inputs][32], and their scales.
  void decode(int64_t pair, int64_t first, int64_t count) {
    for (int half = 0; half < 2; half++) {
      Unit* at = reinterpret_cast<Unit*>(wide_) + half * kLanes;
      for (int64_t unit = first; unit < first + count; unit += kUnitStep) {
        w_.widen_tile(pair, half, unit, at);
        at += kUnitStep * kInputs * kPairOutputs;
      }
      if constexpr (kAreGroups)
        save(w_.group_scales(pair, half, first), scales_ + half * kLanes, kLanes);
    }
  }

  // The weights of the block after this one. The tiles share their prefetch, so that products do not
  // wait for it; with few tiles, the processor's own prefetch is faster.
  WeightsAhead weights_after(int64_t pair, int half, int64_t first, int64_t last_pair) const {
    constexpr int64_t kMinTiles = 3;
    if (num_tiles_ < kMinTiles) return {};
    if (half == 1) first += block_units_;
    half = 1 - half;
    if (first >= w_.num_units) pair++, first = 0;
    if (pair == last_pair) return {};
    const int64_t count = std::min(block_units_, w_.num_units - first);
    const char* const next = reinterpret_cast<const char*>(w_.tile(pair, half, first, nullptr));
    return {next, next + count * kLine, (count + num_tiles_ - 1) / num_tiles_};
  }

  const W& w_;
  const int64_t row_, num_rows_, block_units_, num_tiles_;
  float* const sums_;
  const float *inputs_, *begins_ = nullptr;
  int64_t row_stride_, block_stride_;
  alignas(64) float wide_[W::kAreCodes ? kCodedBlock * kInputs * kPairOutputs : kMaxBlockFloats];
  float scales_[kPairOutputs];
};

// Multiplies the rows [row, last_row) by the pairs [pair, last_pair), with the bits of
// multiply_with_vectors.
template <typename T, class W, class Out>
void multiply_many_rows(const W& w, UnitRows rows, int64_t row, int64_t last_row, int64_t pair,
                        int64_t last_pair, const Out& out, int64_t num_next) {
  if (pair == last_pair) return;
  ManyRows<T, W> many(w, rows, row, last_row);
  const Out own_out = out;  // a local copy, which stores cannot alias
  for (const int64_t end = last_pair + num_next; pair < last_pair; pair++)
    many.multiply(pair, end, own_out);
}

}  // namespace

#endif
