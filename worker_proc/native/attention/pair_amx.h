// Scores and weighted values of a tile by AMX: the kernels of pair_scores.h and pair_values.h for
// processors with tile registers.
//
// One tdpbf16ps sums 32 dimensions, or 32 slots, before it adds them to an accumulator. Up to 16
// query rows use one set of accumulators; up to 32 rows are two halves that share the loads of keys
// and values. Called by attend_spans (pair_spans.h).

#pragma once

#include "attention/pair_values.h"

#ifdef __AMX_BF16__

namespace {

// The shapes of the eight tile registers: 0 to 3 are accumulators, 4 and 5 hold query rows or weights,
// and 6 and 7 keys or values. Registers 0 to 5 have a row for each query row.
struct alignas(64) AmxConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t num_rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};

  explicit AmxConfig(int num_query_rows) {
    for (int i = 0; i < 6; i++) num_rows[i] = static_cast<uint8_t>(num_query_rows);
  }
};

// Holds the tile registers, if this process may use them.
class AmxRegisters {
 public:
  explicit AmxRegisters(int num_query_rows) : config_(num_query_rows) {
    finish_stores();
    if (troika_has_tiles) _tile_loadconfig(&config_);
  }
  ~AmxRegisters() {
    if (troika_has_tiles) _tile_release();
  }

 private:
  const AmxConfig config_;
};

// Scores of at most kHalfRows rows.
void score_with_amx(PairTile& tile, int first, const PairSpan& span, float (*scores)[kSpanSlots]) {
  finish_stores();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int d = 0; d < tile.dim / 2; d += kLanes) {
    _tile_loadd(4, tile.query(first) + d, tile.dim * sizeof(Bf16));
    _tile_loadd(6, span.keys[0] + d * kLanes, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, span.keys[1] + d * kLanes, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(6, span.keys[2] + d * kLanes, 64);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(7, span.keys[3] + d * kLanes, 64);
    _tile_dpbf16ps(3, 4, 7);
  }
  float* to = scores[0];
  _tile_stored(0, to, sizeof(scores[0]));
  _tile_stored(1, to + kLanes, sizeof(scores[0]));
  _tile_stored(2, to + 2 * kLanes, sizeof(scores[0]));
  _tile_stored(3, to + 3 * kLanes, sizeof(scores[0]));
}

// Scores of two halves of a tile, from rows 0 and `half` on. Keys are loaded once for both halves.
void score_halves_with_amx(PairTile& tile, int half, const PairSpan& span,
                           float (*scores)[kSpanSlots]) {
  finish_stores();
  for (int g = 0; g < kSpanGroups; g += 2) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int d = 0; d < tile.dim / 2; d += kLanes) {
      _tile_loadd(4, tile.query(0) + d, tile.dim * sizeof(Bf16));
      _tile_loadd(6, span.keys[g] + d * kLanes, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, span.keys[g + 1] + d * kLanes, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, tile.query(half) + d, tile.dim * sizeof(Bf16));
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, scores[0] + g * kLanes, sizeof(scores[0]));
    _tile_stored(1, scores[0] + (g + 1) * kLanes, sizeof(scores[0]));
    _tile_stored(2, scores[half] + g * kLanes, sizeof(scores[0]));
    _tile_stored(3, scores[half] + (g + 1) * kLanes, sizeof(scores[0]));
  }
}

// Makes the values of even and odd groups adjacent, since a tile register holds 32 slots.
inline void join_value_groups(PairTile& tile, PairSpan& span) {
  const int size = kGroupPairs * tile.vdim;
  for (int g = span.first_group / 2 * 2; g < span.num_groups; g += 2) {
    const bool are_full = g >= span.first_group && (g + 2) * kLanes <= span.count;
    if (are_full && span.values[g + 1] == span.values[g] + size) continue;
    for (int i = g; i < g + 2; i++) {
      const int used = i < span.first_group ? 0 : std::clamp(span.count - i * kLanes, 0, kLanes);
      copy_masked(span.values[i], used, tile.vdim, tile.copied_values + i * size);
    }
    span.values[g] = tile.copied_values + g * size;
  }
}

// Adds the weighted values of at most kHalfRows rows. The groups of values have been joined.
void accumulate_with_amx(PairTile& tile, int first, const PairSpan& span) {
  finish_stores();
  const int64_t stride = tile.accumulator_stride() * sizeof(float);
  const int64_t value_stride = tile.vdim * sizeof(Unit);
  for (int column = 0; column < tile.vdim; column += 2 * kLanes) {
    float* out = tile.accumulator(first) + column;
    _tile_loadd(0, out, stride);
    _tile_loadd(1, out + kLanes, stride);
    for (int g = span.first_group / 2 * 2; g < span.num_groups; g += 2) {
      _tile_loadd(4, tile.weights[first] + g * kLanes, sizeof(tile.weights[0]));
      _tile_loadd(6, span.values[g] + column, value_stride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, span.values[g] + column + kLanes, value_stride);
      _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, out, stride);
    _tile_stored(1, out + kLanes, stride);
  }
}

// Adds the weighted values of two halves of a tile. Values are loaded once for both halves.
void accumulate_halves_with_amx(PairTile& tile, int half, const PairSpan& span) {
  finish_stores();
  const int64_t stride = tile.accumulator_stride() * sizeof(float);
  const int64_t value_stride = tile.vdim * sizeof(Unit);
  for (int column = 0; column < tile.vdim; column += 2 * kLanes) {
    float *upper = tile.accumulator(0) + column, *lower = tile.accumulator(half) + column;
    _tile_loadd(0, upper, stride);
    _tile_loadd(1, upper + kLanes, stride);
    _tile_loadd(2, lower, stride);
    _tile_loadd(3, lower + kLanes, stride);
    for (int g = span.first_group / 2 * 2; g < span.num_groups; g += 2) {
      _tile_loadd(4, tile.weights[0] + g * kLanes, sizeof(tile.weights[0]));
      _tile_loadd(6, span.values[g] + column, value_stride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, span.values[g] + column + kLanes, value_stride);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, tile.weights[half] + g * kLanes, sizeof(tile.weights[0]));
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, upper, stride);
    _tile_stored(1, upper + kLanes, stride);
    _tile_stored(2, lower, stride);
    _tile_stored(3, lower + kLanes, stride);
  }
}

}  // namespace

#else

namespace {

struct AmxRegisters {
  explicit AmxRegisters(int) {}
};

}  // namespace

#endif
