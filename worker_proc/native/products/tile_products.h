// Products by AMX: up to 32 rows times one pair of panels at a time.
//
// multiply_with_tiles divides the rows into blocks of 32 and multiplies each by a range of pairs.
// Called by multiply_part (products.h).

#pragma once

#ifdef __AMX_BF16__

#include <type_traits>

#include "products/int4_panels.h"
#include "products/row_sums.h"

namespace {

constexpr int kAmxRows = 16;

// A compiler barrier: GCC does not know that tile loads read memory, and could delay stores past them.
inline void finish_stores() { asm volatile("" ::: "memory"); }

// Accumulates the product of a tile of rows and a tile of weights; tile numbers are literals.
#define TROIKA_MULTIPLY_TILES(sums, rows, weights) \
  do {                                             \
    if constexpr (std::is_same<T, int8_t>::value)  \
      _tile_dpbsud(sums, rows, weights);           \
    else                                           \
      _tile_dpbf16ps(sums, rows, weights);         \
  } while (false)

// Tile registers: accumulators of the upper rows (0, 1) and lower rows (2, 3), upper and lower rows (4,
// 5), and weights of the low and high panel (6, 7).
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t num_rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};

  explicit TileConfig(int64_t count) {
    const auto upper = static_cast<uint8_t>(std::min<int64_t>(count, kAmxRows));
    const auto lower = static_cast<uint8_t>(std::max<int64_t>(count - kAmxRows, 1));
    num_rows[0] = num_rows[1] = num_rows[4] = upper;
    num_rows[2] = num_rows[3] = num_rows[5] = std::min<uint8_t>(lower, kAmxRows);
  }
};

// The sums of up to 32 rows and one pair of panels. They are passed to the epilogue while AMX computes
// the next sums, since the vector units are idle then.
template <typename T>
struct PendingSums {
  alignas(64) SumsOf<T> values[2][2][kAmxRows];
  int64_t row = 0, pair = 0, count = 0, num_passed = 0;

  template <class Out>
  [[gnu::always_inline]] void pass_on(int64_t num_rows, const Out& out) {
    for (const int64_t end = std::min(num_passed + num_rows, count); num_passed < end; num_passed++) {
      const auto& tile = values[num_passed / kAmxRows];
      const int64_t i = num_passed % kAmxRows;
      out(row + num_passed, pair, tile[0][i], tile[1][i]);
    }
  }
};

// Multiplies up to 32 rows by one pair of panels. The tiles are configured for this number of rows.
template <typename T, bool HasLower, class W, class Out>
void multiply_tiles(const W& w, UnitRows rows, int64_t row, int64_t count, int64_t pair,
                    WeightsAhead& ahead, PendingSums<T>& sums, PendingSums<T>& previous,
                    const Out& out) {
  // Codes are decoded one step ahead, since a tile load stalls on recent stores to its memory.
  alignas(64) Unit space[2][2][W::kAreCodes ? kTile : 1];
  const Unit* upper = rows.data + row * rows.stride;
  const Unit* lower = upper + kAmxRows * rows.stride;
  const int64_t stride = rows.stride * sizeof(Unit);
  const int64_t num_steps = w.num_units / kUnitStep;
  const int64_t passed_per_step = (previous.count + num_steps - 1) / num_steps;
  _tile_zero(0);
  _tile_zero(1);
  if (HasLower) _tile_zero(2);
  if (HasLower) _tile_zero(3);
  const Unit* low = w.tile(pair, 0, 0, space[0][0]);
  const Unit* high = w.tile(pair, 1, 0, space[0][1]);
  for (int64_t unit = 0; unit < w.num_units; unit += kUnitStep) {
    const int64_t next = std::min(unit + kUnitStep, w.num_units - kUnitStep);
    auto& buffer = space[next / kUnitStep % 2];
    const Unit* next_low = w.tile(pair, 0, next, buffer[0]);
    const Unit* next_high = w.tile(pair, 1, next, buffer[1]);
    if (W::kAreCodes) finish_stores();
    _tile_loadd(6, low, 64);
    _tile_loadd(4, upper + unit, stride);
    TROIKA_MULTIPLY_TILES(0, 4, 6);
    _tile_loadd(7, high, 64);
    TROIKA_MULTIPLY_TILES(1, 4, 7);
    if (HasLower) {
      _tile_loadd(5, lower + unit, stride);
      TROIKA_MULTIPLY_TILES(2, 5, 6);
      TROIKA_MULTIPLY_TILES(3, 5, 7);
    }
    // The prefetched weights fit into the L1 cache only beside few rows.
    if (!W::kAreCodes) ahead.fetch<HasLower ? kL2Cache : kL1Cache>();
    previous.pass_on(passed_per_step, out);
    low = next_low;
    high = next_high;
  }
  _tile_stored(0, sums.values[0][0], 64);
  _tile_stored(1, sums.values[0][1], 64);
  if (HasLower) _tile_stored(2, sums.values[1][0], 64);
  if (HasLower) _tile_stored(3, sums.values[1][1], 64);
  sums.row = row;
  sums.pair = pair;
  sums.count = count;
  sums.num_passed = 0;
}

// A transposed copy of up to 32 rows: [2 halves][units][16 rows]. A single row is not copied.
class Columns {
 public:
  Columns(UnitRows rows, int64_t row, int64_t count, int64_t num_units)
      : data_(rows.data + row * rows.stride), num_units_(num_units), is_one_(count == 1) {
    if (is_one_) return;
    const Unit* from = data_;
    Unit* to = space_for<Columns>(2 * num_units * kLanes);
    data_ = to;
    for (int64_t first = 0; first < count; first += kLanes)
      for (int64_t unit = 0; unit < num_units; unit += kUnitStep) {
        __m512i block[kLanes] = {};
        for (int64_t r = first; r < std::min<int64_t>(first + kLanes, count); r++)
          block[r - first] = _mm512_loadu_si512(from + r * rows.stride + unit);
        transpose(block);
        for (int i = 0; i < kLanes; i++, to += kLanes) _mm512_store_si512(to, block[i]);
      }
  }

  const Unit* lower(int64_t unit) const { return is_one_ ? data_ + unit : data_ + unit * kLanes; }
  const Unit* upper(int64_t unit) const { return lower(num_units_ + unit); }
  int64_t stride() const { return is_one_ ? sizeof(Unit) : kLine; }

 private:
  const Unit* data_;
  const int64_t num_units_;
  const bool is_one_;
};

// Multiplies up to 32 rows by the pairs [first_pair, last_pair), transposed: the rows of a tile are
// outputs, and its columns are rows. The order of the sums is that of multiply_tiles. The units of a
// group are decoded while the tiles of the previous group are multiplied.
template <bool HasUpper, class Out>
void multiply_columns(const CodedGroups& w, UnitRows rows, int64_t row, int64_t count,
                      int64_t first_pair, int64_t last_pair, const Out& out) {
  constexpr int kParts = CodedGroups::kGroupTiles, kPartOutputs = kPairOutputs / kParts;
  alignas(64) Unit space[2][2][kParts * kTile];
  alignas(64) float scales[2][kLanes];
  alignas(64) __m512i sums[2][2][kLanes];
  const int64_t num_groups = w.num_groups(), num_steps = w.num_units / kUnitStep;
  const int64_t total = (last_pair - first_pair) * num_groups;
  if (total <= 0) return;
  const Columns columns(rows, row, count, w.num_units);
  const int64_t stride = columns.stride(), at = w.index(first_pair, 0, 0);
  TileConfig config(2 * kAmxRows);
  for (const int tile : {0, 1, 4})
    config.bytes_per_row[tile] = std::min<int64_t>(count, kAmxRows) * sizeof(Unit);
  if (HasUpper)
    for (const int tile : {2, 3, 5})
      config.bytes_per_row[tile] = (count - kAmxRows) * sizeof(Unit);
  const auto unpack = [&](int64_t group, int part) {
    const int half = part * kPartOutputs / kLanes, output = part * kPartOutputs % kLanes;
    const int64_t panel = at + 2 * group + half;
    if (output == 0) save(load(w.scales + panel * kLanes), scales[half], kLanes);
    for (int i = 0; i < kPartOutputs; i += 4)
      CodedGroups::unpack_outputs(w.codes + panel * CodedGroups::kBytes, scales[half], output + i,
                                  space[group % 2][half]);
  };
  for (int part = 0; part < kParts; part++) unpack(0, part);
  finish_stores();
  _tile_loadconfig(&config);
  for (int64_t pair = first_pair, group = 0; pair < last_pair; pair++) {
    _tile_zero(0);
    _tile_zero(1);
    if (HasUpper) _tile_zero(2);
    if (HasUpper) _tile_zero(3);
    for (int64_t step = 0; step < num_groups * kParts; step++) {
      const int part = step % kParts;
      if (group + 1 < total) unpack(group + 1, part);
      const auto& decoded = space[group % 2];
      if (step < num_steps) {
        _tile_loadd(4, columns.lower(step * kUnitStep), stride);
        _tile_loadd(6, decoded[0] + part * kTile, kLine);
        _tile_dpbf16ps(0, 6, 4);
        _tile_loadd(7, decoded[1] + part * kTile, kLine);
        _tile_dpbf16ps(1, 7, 4);
        if (HasUpper) {
          _tile_loadd(5, columns.upper(step * kUnitStep), stride);
          _tile_dpbf16ps(2, 6, 5);
          _tile_dpbf16ps(3, 7, 5);
        }
      }
      if (part == kParts - 1) {
        group++;
        finish_stores();
      }
    }
    _tile_stored(0, sums[0][0], stride);
    _tile_stored(1, sums[0][1], stride);
    if (HasUpper) _tile_stored(2, sums[1][0], stride);
    if (HasUpper) _tile_stored(3, sums[1][1], stride);
    finish_stores();
    for (int64_t first = 0; first < count; first += kLanes) {
      auto& [low, high] = sums[first / kLanes];
      if (count > 1) transpose(low), transpose(high);
      for (int64_t r = first; r < std::min<int64_t>(first + kLanes, count); r++)
        out(row + r, pair, (Vec)low[r - first], (Vec)high[r - first]);
    }
  }
  _tile_release();
}

#undef TROIKA_MULTIPLY_TILES

template <typename T, class W, class Out>
void multiply_with_tiles(const W& w, UnitRows rows, int64_t row, int64_t last_row,
                         int64_t first_pair, int64_t last_pair, const Out& out) {
  constexpr int64_t kBothRows = 2 * kAmxRows;
  if constexpr (std::is_same<W, CodedGroups>::value) {
    for (; row < last_row; row += kBothRows) {
      const int64_t count = std::min(kBothRows, last_row - row);
      (count > kAmxRows ? multiply_columns<true, Out> : multiply_columns<false, Out>)(
          w, rows, row, count, first_pair, last_pair, out);
    }
    return;
  }
  const int64_t last_whole = row + (last_row - row) / kBothRows * kBothRows;
  const TileConfig whole(kBothRows), rest(last_row - last_whole);
  PendingSums<T> sums[2];
  int turn = 0;
  finish_stores();
  if (last_whole > row) {
    const int64_t num_blocks = (last_whole - row) / kBothRows;
    _tile_loadconfig(&whole);
    for (int64_t pair = first_pair; pair < last_pair; pair++) {
      WeightsAhead ahead = weights_ahead(w, pair + 1, last_pair, num_blocks);
      for (int64_t at = row; at < last_whole; at += kBothRows, turn ^= 1)
        multiply_tiles<T, true>(w, rows, at, kBothRows, pair, ahead, sums[turn], sums[turn ^ 1],
                                out);
    }
  }
  if (const int64_t count = last_row - last_whole; count > 0) {
    const auto multiply_rest =
        count > kAmxRows ? multiply_tiles<T, true, W, Out> : multiply_tiles<T, false, W, Out>;
    const bool are_cached = last_whole > row;
    _tile_loadconfig(&rest);
    for (int64_t pair = first_pair; pair < last_pair; pair++, turn ^= 1) {
      WeightsAhead ahead;
      if (!are_cached) ahead = weights_ahead(w, pair + 1, last_pair, 1);
      multiply_rest(w, rows, last_whole, count, pair, ahead, sums[turn], sums[turn ^ 1], out);
    }
  }
  _tile_release();
  sums[turn ^ 1].pass_on(kBothRows, out);
}

}  // namespace

#endif
