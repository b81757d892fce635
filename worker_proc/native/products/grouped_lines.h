// Products of one row with the integer codes of quantized checkpoints on processors without AVX-512.
// Called by multiply_part (products.h).

#pragma once

#ifndef __AVX512F__

#include "products/grouped_codes.h"
#include "products/line_products.h"

namespace {

template <>
constexpr bool kHasLines<GroupedPanels<Bf16>> = true;

inline bool can_multiply_lines(const GroupedPanels<Bf16>& w) { return w.weight.has_integers(); }

// Integer codes of `Bits` bits, line by line. A line has one word for each of 16 outputs.
template <int Bits>
struct GroupedLines {
  struct Lines {
    static constexpr int kInputs = PlacedCodes<Bits>::kPerWord;
    static constexpr int64_t kTileBytes = kTileInputs / kInputs * kLine;

    [[gnu::always_inline]] static Part weights(const uint8_t* line, int input, int lane) {
      const auto* words = reinterpret_cast<const PartBits*>(line + lane * sizeof(Unit));
      return PlacedCodes<Bits>::value(*words, input);
    }
  };

  const GroupedPanels<Bf16>& panels;
  const uint8_t* codes = panels.weight.codes;
  int64_t num_units = panels.num_units;

  int64_t tile_at(int64_t pair, int half, int64_t unit) const {
    return ((pair * num_units + unit) / kUnitStep * 2 + half) * Lines::kTileBytes;
  }

  InputFactors input_factors() const { return panels.input_factors(); }

  GroupFactors group_factors(int64_t pair, int half, int64_t input) const {
    return panels.group_factors(pair, half, input);
  }
};

// Multiplies a row by the pairs [pair, last_pair), with the bits of multiply_many_rows.
template <class Out>
void multiply_lines(const GroupedPanels<Bf16>& w, FloatRows::Inputs inputs, int64_t r, int64_t pair,
                    int64_t last_pair, const Out& out) {
  if (w.weight.format == kGroupedInt4)
    multiply_lines(GroupedLines<4>{w}, inputs, r, pair, last_pair, out);
  else
    multiply_lines(GroupedLines<8>{w}, inputs, r, pair, last_pair, out);
}

}  // namespace

#endif
