// Packed weights: units, panels, tiles, and weights that are not quantized.
//
// A unit is four bytes of inputs: one float32, or a pair of bfloat16 values. A panel is 16 outputs,
// and a tile 16 units of a panel, [unit][output], the size of an AMX tile. Weights are padded with
// zeros to an even number of panels and a multiple of 16 units. Quantized formats (int8_panels.h,
// int4_panels.h, grouped_codes.h) and compressed ones (compact_weights.h) have the interface of
// Panels and decode tiles to units. Used by all kernels of products.h; linear.cpp packs the weights.

#pragma once

#include <algorithm>

#include "vec.h"

namespace {

typedef uint32_t Unit __attribute__((may_alias));

constexpr int64_t kUnitStep = 16;  // units of a tile
constexpr int64_t kTile = kUnitStep * kLanes;
constexpr int64_t kTileInputs = 2 * kUnitStep;  // bfloat16 inputs of a tile
constexpr int64_t kPairOutputs = 2 * kLanes;
constexpr int64_t kLine = 64;          // bytes of a cache line
constexpr int64_t kCodesAhead = 4096;  // prefetch distance of codes in bytes

// The values are those of packed_weights.py.
enum Format : int32_t {
  kUnits,
  kInt8,
  kInt4,
  kInt8ForCodes,  // CodedUnits, for rows of codes (coded_rows.h)
  kCompact,       // compact_weights.h
  kGroupedInt4,   // this and the following: grouped_codes.h
  kGroupedInt8,
  kGroupedE4m3,
  kGroupedTable,
};

// Weights as units, [outputs / 16][units][16].
struct Panels {
  static constexpr bool kAreCodes = false;  // whether `tile` decodes codes to units
  static constexpr bool kMakesVectors = false;  // whether a Step decodes single vectors in registers
  static constexpr int64_t kMaxCodedRows = 0;  // with more rows, codes are decoded beforehand
  // Cache lines to prefetch for each step of units; 0: `tile` prefetches.
  static constexpr int64_t kStepLines = kPairOutputs;
  // Units of a group, whose sums must be multiplied by `group_scales`; 0: no such scales.
  static constexpr int64_t kGroupUnits = 0;

  const Unit* units;
  int64_t num_units;  // units of a panel
  int64_t num_pairs;  // pairs of panels

  const Unit* panel(int64_t pair) const { return units + pair * kPairOutputs * num_units; }
  const char* start(int64_t pair) const { return reinterpret_cast<const char*>(panel(pair)); }

  // The weight of an expert. The weights of all experts are consecutive pairs.
  Panels expert(int64_t number) const { return {panel(number * num_pairs), num_units, num_pairs}; }

  // The tile at a unit of the low (half = 0) or high panel of a pair.
  const Unit* tile(int64_t pair, int half, int64_t unit, Unit*) const {
    return panel(pair) + (half * num_units + unit) * kLanes;
  }
};

// Packs the upper halves of two vectors into pairs of bfloat16.
inline PartBits high_halves(PartBits first, PartBits second) {
#ifdef __AVX512BW__
  const VecBits bytes = VecBits{} + 0x3020302;
  const VecBits by_lane = {0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12};
  return (PartBits)_mm512_mask_shuffle_epi8((__m512i)second, 0x3333333333333333,
                                           (__m512i)first, (__m512i)(bytes + by_lane * 0x1010101));
#else
  return first >> 16 | (second & 0xffff0000u);
#endif
}

// Weights of one pair whose decoded units are stored in `units` as a kernel reads them. After it has
// read all tiles, panels() returns the decoded pair.
template <class W>
struct KeptUnits {
  static constexpr bool kAreCodes = true, kMakesVectors = W::kMakesVectors;
  static constexpr int64_t kStepLines = W::kStepLines, kMaxCodedRows = W::kMaxCodedRows;
  static constexpr int64_t kGroupUnits = 0;

  const W& weights;
  Unit* const units;
  const int64_t num_units = weights.num_units;

  Panels panels() const { return {units, num_units, 1}; }

  bool has_exceptions(int64_t pair, int64_t unit) const {
    return weights.has_exceptions(pair, unit);
  }

  struct Step {
    [[gnu::always_inline]] Step(const KeptUnits& kept, int64_t pair, int64_t unit)
        : decoder(kept.weights, pair, unit),
          to{kept.units + unit * kLanes, kept.units + (kept.num_units + unit) * kLanes} {}

    [[gnu::always_inline]] VecBits vector(int number, int half) const {
      const VecBits units = decoder.vector(number, half);
      *reinterpret_cast<VecBits*>(to[half] + number * kLanes) = units;
      return units;
    }

    const typename W::Step decoder;
    Unit* const to[2];
  };

  const Unit* tile(int64_t pair, int half, int64_t unit, Unit*) const {
    return weights.tile(pair, half, unit, units + (half * num_units + unit) * kLanes);
  }
};

// Decodes the pairs [first_pair, last_pair) into `space`.
template <class W>
Panels unpacked(const W& w, int64_t first_pair, int64_t last_pair, Unit* space) {
  Unit* to = space;
  for (int64_t pair = first_pair; pair < last_pair; pair++)
    for (int half = 0; half < 2; half++)
      for (int64_t unit = 0; unit < w.num_units; unit += kUnitStep, to += kTile)
        w.tile(pair, half, unit, to);
  return {space, w.num_units, last_pair - first_pair};
}

}  // namespace
