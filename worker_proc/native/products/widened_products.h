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
#include "products/widened_rows.h"

namespace {

constexpr int kManyRows = 4;   // with fewer rows, the kernels of row_sums.h are faster
constexpr int kPanelRows = 6;  // rows of a register tile with one panel

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
  int64_t stride;  // between rows
  float* sums;
};

// The groups of a block whose sums are scaled (placed_codes.h).
struct BlockGroups {
  int64_t group_inputs;
  const float *scales, *terms;  // [groups][outputs]; terms may be null
  const float* input_sums;      // of the tile's rows, times sum_factor()
  int64_t stride;               // between the input sums of groups
};

// Adds the products of `num_inputs` inputs of R rows to sums in registers.
template <int R, int Panels>
[[gnu::always_inline]] inline void add_inputs(const float* weights, const float* rows, int64_t stride,
                                              int64_t num_inputs, Part (&sums)[R][Panels * kParts]) {
#pragma GCC unroll 2
  for (int64_t i = 0; i < num_inputs; i++, weights += Panels * kLanes) {
    const auto weight = [&](int p) { return part_at(weights + p * kPartLanes); };
    add_input(rows + i, stride, weight, sums);
  }
}

// Adds the products of R rows to their sums.
template <int R, int Panels>
[[gnu::noinline]] void add_block(const BlockProducts& block, const BlockGroups&) {
  Part sums[R][Panels * kParts];
  load_sums(block.sums, sums);
  add_inputs<R, Panels>(block.weights, block.rows, block.stride, block.num_inputs, sums);
  save_sums(sums, block.sums);
}

// Scales the sums of a group of R rows, and adds them and the terms to the sums in memory.
template <bool kHasTerms, int R, int P>
[[gnu::always_inline]] inline void add_scaled(const Part (&own)[R][P], const float* scales,
                                              const float* terms, const float* input_sums,
                                              float* sums) {
#pragma GCC unroll 32
  for (int p = 0; p < P; p++)
#pragma GCC unroll 32
    for (int r = 0; r < R; r++) {
      float* const at = sums + r * kPairOutputs + p * kPartLanes;
      Part sum = part_at(at);
      if (kHasTerms)
        sum = multiply_add_part(splat_part(input_sums[r]), part_at(terms + p * kPartLanes), sum);
      save_part(multiply_add_part(own[r][p], part_at(scales + p * kPartLanes), sum), at);
    }
}

// add_block for groups, whose own sums are scaled before they are added.
template <int R, int Panels>
[[gnu::noinline]] void add_groups(const BlockProducts& block, const BlockGroups& groups) {
  constexpr int P = Panels * kParts;
  const float *scales = groups.scales, *terms = groups.terms, *input_sums = groups.input_sums;
  for (int64_t first = 0; first < block.num_inputs; first += groups.group_inputs) {
    Part own[R][P];
#pragma GCC unroll 32
    for (int r = 0; r < R; r++)
#pragma GCC unroll 32
      for (int p = 0; p < P; p++) own[r][p] = splat_part(terms ? 0.0f : input_sums[r]);
    add_inputs<R, Panels>(block.weights + first * Panels * kLanes, block.rows + first, block.stride,
                          std::min(groups.group_inputs, block.num_inputs - first), own);
    forget_loads();  // GCC would keep the sums in memory twice
    if (terms) {
      add_scaled<true>(own, scales, terms, input_sums, block.sums);
      terms += Panels * kLanes;
    } else {
      add_scaled<false>(own, scales, terms, input_sums, block.sums);
    }
    scales += Panels * kLanes;
    input_sums += groups.stride;
  }
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

using BlockAdder = void (*)(const BlockProducts& block, const BlockGroups& groups);

template <int Panels, int... Fewer>
BlockAdder block_adder(int64_t num_rows, std::integer_sequence<int, Fewer...>) {
  static constexpr BlockAdder kAdders[] = {add_block<Fewer + 1, Panels>...};
  return kAdders[num_rows - 1];
}

template <int Panels, int... Fewer>
BlockAdder group_adder(int64_t num_rows, std::integer_sequence<int, Fewer...>) {
  static constexpr BlockAdder kAdders[] = {add_groups<Fewer + 1, Panels>...};
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
      input_sums_ = inputs.sums;
      const InputFactors factors = input_factors_of(w);
      groups_ = {factors.group_inputs, scales_, factors.has_terms ? terms_ : nullptr, nullptr,
                 num_rows_};
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
  static constexpr bool kScalesSums = std::is_same<T, Bf16>::value && kMayScaleSums<W>;
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
    BlockProducts block{wide_, count * kInputs, rows, row_stride_, sums_ + half * kLanes};
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
      block.sums = sums_ + r * kPairOutputs + half * kLanes;
      BlockAdder add = block_adder<kPanels>(last_row - r, kSizes);
      if constexpr (kScalesSums)
        if (groups_.group_inputs > 0) {
          add = group_adder<kPanels>(last_row - r, kSizes);
          groups_.input_sums = input_sums_ + kInputs * first / groups_.group_inputs * num_rows_ + r;
        }
      add(block, groups_);
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

  // Decodes the units [first, first + count) of a pair to float32, [inputs][32], and the factors of their
  // groups.
  void decode(int64_t pair, int64_t first, int64_t count) {
    for (int half = 0; half < 2; half++) {
      Unit* at = reinterpret_cast<Unit*>(wide_) + half * kLanes;
      for (int64_t unit = first; unit < first + count; unit += kUnitStep) {
        w_.decode_tile(pair, half, unit, at);
        at += kUnitStep * kInputs * kPairOutputs;
      }
      if constexpr (kScalesSums) decode_factors(pair, half, kInputs * first, kInputs * count);
    }
  }

  void decode_factors(int64_t pair, int half, int64_t first, int64_t count) {
    if (groups_.group_inputs == 0) return;
    int64_t to = half * kLanes;
    for (int64_t i = 0; i < count; i += groups_.group_inputs, to += kPairOutputs) {
      const GroupFactors factors = w_.group_factors(pair, half, first + i);
      save(factors.scales, scales_ + to, kLanes);
      save(factors.terms, terms_ + to, kLanes);
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
  const float *inputs_, *input_sums_ = nullptr;
  BlockGroups groups_{};  // without group_inputs, no sums are scaled
  int64_t row_stride_, block_stride_;
  alignas(64) float wide_[W::kAreCodes ? kCodedBlock * kInputs * kPairOutputs : kMaxBlockFloats];
  static constexpr int64_t kMaxGroups = kScalesSums ? kCodedBlock * kInputs / 16 : 1;  // of a block
  float scales_[kMaxGroups * kPairOutputs], terms_[kMaxGroups * kPairOutputs];
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
