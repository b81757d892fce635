// Products of one row with the integer codes of quantized checkpoints on processors without AVX-512:
// weights are dequantized in registers, for the outputs of one pair. Called by multiply_part
// (products.h).

#pragma once

#ifndef __AVX512F__

#include "products/grouped_codes.h"
#include "products/line_products.h"

namespace {

template <>
constexpr bool kHasLines<GroupedPanels<Bf16>> = true;

inline bool can_multiply_lines(const GroupedPanels<Bf16>& w) { return w.has_terms(); }

constexpr int kPairParts = 2 * kParts;

// The scales of a pair in one group, and the terms that are added to code · scale: minimums, or zero
// points times the negative scales.
struct PairFactors {
  PairFactors(const GroupedPanels<Bf16>& w, int64_t pair, int64_t input) {
    alignas(kLine) float all_scales[kPairOutputs], all_terms[kPairOutputs];
    for (int half = 0; half < 2; half++) {
      const Factors own = w.factors(pair, half, input);
      save(own.scales, all_scales + half * kLanes, kLanes);
      save(w.adds_offsets() ? own.offsets : own.offsets * -own.scales, all_terms + half * kLanes,
           kLanes);
    }
#pragma GCC unroll 8
    for (int p = 0; p < kPairParts; p++) {
      scales[p] = part_at(all_scales + p * kPartLanes);
      terms[p] = part_at(all_terms + p * kPartLanes);
    }
  }

  Part scales[kPairParts], terms[kPairParts];
};

// Adds the products of inputs of a tile, from the input `first` on, to sums. They belong to one group. A
// tile has the lines of the low panel, followed by those of the high panel. A line has one word for each
// of 16 outputs, with the codes of successive inputs of `Bits` bits. Lines are fetched in the order of
// their addresses (line_products.h).
template <int Bits>
[[gnu::always_inline]] inline void add_integers(const uint8_t* tile, int64_t first, const float* row,
                                                int64_t num_inputs, const PairFactors& factors,
                                                Part (&sums)[kPairParts]) {
  constexpr int kPerWord = 32 / Bits;
  constexpr int64_t kPanelBytes = kTileInputs / kPerWord * kLine;
  const int64_t begin = first / kPerWord * kLine;
  const uint8_t *line = tile + begin, *next = tile + kCodesAhead + 2 * begin;
#pragma GCC unroll 1
  for (int64_t i = 0; i < num_inputs; i += kPerWord, line += kLine, next += 2 * kLine) {
    for (int k = 0; k < 2; k++) __builtin_prefetch(next + k * kLine);
#pragma GCC unroll 8
    for (int k = 0; k < kPerWord; k++) {
      const Part x = splat_part(row[i + k]);
#pragma GCC unroll 8
      for (int p = 0; p < kPairParts; p++) {
        const uint8_t* const at = line + p / kParts * kPanelBytes + p % kParts * sizeof(Part);
        const PartBits words = *reinterpret_cast<const PartBits*>(at);
        const PartBits codes = words >> k * Bits & ((1u << Bits) - 1);
        const Part whole = __builtin_convertvector((PartInt)codes, Part);
        const Part weights = multiply_add_part(whole, factors.scales[p], factors.terms[p]);
        sums[p] = multiply_add_part(x, weights, sums[p]);
      }
      forget_loads();
    }
  }
}

// Multiplies a row by a pair.
template <int Bits, class Out>
[[gnu::noinline]] void multiply_integers(const GroupedPanels<Bf16>& w, const float* row, int64_t r,
                                         int64_t pair, const Out& out) {
  const int64_t num_inputs = 2 * w.num_units, group = w.weight.group_inputs;
  const int64_t span = std::min(group, kTileInputs);
  Part sums[kPairParts] = {};
  for (int64_t first = 0; first < num_inputs; first += group) {
    const PairFactors factors(w, pair, first);
    const int64_t last = std::min(first + group, num_inputs);
    for (int64_t input = first; input < last; input += span)
      add_integers<Bits>(w.tile_codes(pair, 0, input / 2), input % kTileInputs, row + input, span,
                         factors, sums);
  }
  alignas(kLine) float saved[kPairOutputs];
#pragma GCC unroll 8
  for (int p = 0; p < kPairParts; p++) save_part(sums[p], saved + p * kPartLanes);
  out(r, pair, load(saved), load(saved + kLanes));
}

// Multiplies a row by the pairs [pair, last_pair), with the bits of multiply_many_rows.
template <class Out>
void multiply_lines(const GroupedPanels<Bf16>& w, FloatRows::Inputs inputs, int64_t r, int64_t pair,
                    int64_t last_pair, const Out& out) {
  const auto multiply_pair_of =
      w.weight.format == kGroupedInt4 ? multiply_integers<4, Out> : multiply_integers<8, Out>;
  for (; pair < last_pair; pair++) multiply_pair_of(w, inputs.floats, r, pair, out);
}

}  // namespace

#endif
