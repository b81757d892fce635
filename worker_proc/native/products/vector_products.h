// Products of any number of rows with vector instructions: a pair of panels is multiplied by tiles of a
// few rows, one after the other.

#pragma once

#include <utility>

#include "products/row_sums.h"

namespace {

// Saves the sums of R rows and some pairs, row by row. `rows` is not copied: a copy is written in parts,
// and to read it as a whole would wait until all stores before have reached the cache.
template <typename T, int R, int Pairs, class W>
[[gnu::noinline]] void save_products(const W& w, const UnitRows& rows, int64_t pair,
                                     WeightsAhead& ahead, SumsOf<T>* saved) {
  SumsOf<T> sums[R][2 * Pairs];
  sum_products<T>(w, rows, pair, ahead, sums);
#pragma GCC unroll 32
  for (int r = 0; r < R; r++)
#pragma GCC unroll 32
    for (int p = 0; p < 2 * Pairs; p++) saved[r * 2 * Pairs + p] = sums[r][p];
}

template <typename T, class W>
using Saver = void (*)(const W& w, const UnitRows& rows, int64_t pair, WeightsAhead& ahead,
                       SumsOf<T>* saved);

// The functions for one pair and 1 to kMostRows rows.
template <typename T, class W, int... Fewer>
Saver<T, W> saver_for(int num_rows, std::integer_sequence<int, Fewer...>) {
  static constexpr Saver<T, W> kSavers[] = {save_products<T, Fewer + 1, 1, W>...};
  return kSavers[num_rows - 1];
}

// Calls f with weights that are decoded in the way that is fastest for one row.
template <class W, class F>
void with_vectors(const W& w, const F& f) {
  f(w);
}

template <typename T, class W, class Out>
void multiply_rows(const W& w, UnitRows rows, int64_t row, int num_rows, int64_t pair,
                   int num_pairs, WeightsAhead& ahead, const Out& out) {
  SumsOf<T> sums[2 * std::max(kMostRows, kPairsOfOneRow)];
  const UnitRows own{rows.data + row * rows.stride, rows.stride};
  if (num_pairs > 1) {
    save_products<T, 1, kPairsOfOneRow>(w, own, pair, ahead, sums);
  } else if (num_rows == 1) {
    with_vectors(w, [&](const auto& made) { save_products<T, 1, 1>(made, own, pair, ahead, sums); });
  } else {
    const auto save = saver_for<T, W>(num_rows, std::make_integer_sequence<int, kMostRows>());
    save(w, own, pair, ahead, sums);
  }
  const SumsOf<T>* at = sums;
  const Out own_out = out;  // a store could change the other one, as far as the compiler knows
  for (int r = 0; r < num_rows; r++)
    for (int p = 0; p < num_pairs; p++, at += 2) own_out(row + r, pair + p, at[0], at[1]);
}

#ifdef __AVX512BF16__

// The sums of some rows and one pair.
struct TileSums {
  Vec values[kMostRows][2];
  int64_t row = 0;
  int count = 0;
};

// Computes R rows, from `sums.row` on. Meanwhile the sums of the previous tile are passed to the epilogue,
// row by row: most of its work uses other execution units of a core than products do.
template <int R, class Out>
[[gnu::noinline]] void multiply_tile(const Panels& w, const UnitRows& rows, int64_t pair,
                                     WeightsAhead& ahead, const TileSums& before, TileSums& sums,
                                     const Out& out) {
  const Out own_out = out;  // a store could change these, as far as the compiler knows
  const int64_t row = before.row;
  const int count = before.count;
  int num_passed = 0;
  const auto pass_row_on = [&]() __attribute__((always_inline)) {
    if (num_passed == count) return;
    const auto& [low, high] = before.values[num_passed];
    own_out(row + num_passed, pair, low, high);
    num_passed++;
  };
  Vec own[R][2];
  sum_products<Bf16>(w, {rows.data + sums.row * rows.stride, rows.stride}, pair, ahead, own, pass_row_on);
  while (num_passed < count) pass_row_on();  // where there are fewer steps of units than rows
  sums.count = R;
#pragma GCC unroll 32
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int p = 0; p < 2; p++) sums.values[r][p] = own[r][p];
}

constexpr int kLeastTileRows = 10;  // from which on tiles are large, so that there are few such functions

// The same as multiply_tiles_of, where the tiles are large.
template <class Out>
void multiply_large_tiles(const Panels& w, UnitRows rows, int64_t row, int64_t num_rows, int64_t tile,
                          int64_t num_tiles, int64_t pair, WeightsAhead& ahead, const Out& out) {
  static_assert(kLeastTileRows == 10 && kMostRows == 12);
  TileSums sums[2];
  for (; tile < num_tiles; tile++) {
    const TileSums& before = sums[tile % 2];
    TileSums& own = sums[(tile + 1) % 2];
    own.row = row + num_rows * tile / num_tiles;
    switch (row + num_rows * (tile + 1) / num_tiles - own.row) {
      case 10: multiply_tile<10>(w, rows, pair, ahead, before, own, out); break;
      case 11: multiply_tile<11>(w, rows, pair, ahead, before, own, out); break;
      case 12: multiply_tile<12>(w, rows, pair, ahead, before, own, out); break;
    }
  }
  const TileSums& last = sums[num_tiles % 2];
  for (int r = 0; r < last.count; r++) out(last.row + r, pair, last.values[r][0], last.values[r][1]);
}

#endif

// Rows [row, row + num_rows) of a pair, in tiles [tile, num_tiles) of few rows each.
template <typename T, class W, class Out>
void multiply_tiles_of(const W& w, UnitRows rows, int64_t row, int64_t num_rows, int64_t tile,
                       int64_t num_tiles, int64_t pair, WeightsAhead& ahead, const Out& out) {
#ifdef __AVX512BF16__
  if constexpr (std::is_same<T, Bf16>::value && std::is_same<W, Panels>::value)
    if (num_tiles - tile > 1 && num_rows / num_tiles >= kLeastTileRows)
      return multiply_large_tiles(w, rows, row, num_rows, tile, num_tiles, pair, ahead, out);
#endif
  for (; tile < num_tiles; tile++) {
    const int64_t first = row + num_rows * tile / num_tiles;
    const int64_t last = row + num_rows * (tile + 1) / num_tiles;
    multiply_rows<T>(w, rows, first, static_cast<int>(last - first), pair, 1, ahead, out);
  }
}

// Whether the first tile of rows keeps the vectors that a Step makes for the other ones. Codes without
// their scales take an instruction or two to make them again.
template <class W>
constexpr bool kKeepsVectors = W::kMakesVectors && W::kGroupUnits == 0;

// Rows [row, row + num_rows) of a pair.
template <typename T, class W, class Out>
void multiply_pair(const W& w, UnitRows rows, int64_t row, int64_t num_rows, int64_t num_tiles,
                   int64_t pair, WeightsAhead ahead, const Out& out) {
  if constexpr (kKeepsVectors<W>)
    if (num_tiles > 1) {
      const KeptUnits<W> kept{w, space_for<KeptUnits<W>>(kPairOutputs * w.num_units)};
      multiply_tiles_of<T>(kept, rows, row, num_rows / num_tiles, 0, 1, pair, ahead, out);
      const auto out_of_pair = [out, pair](int64_t r, int64_t, auto low, auto high) {
        out(r, pair, low, high);
      };
      return multiply_tiles_of<T>(kept.panels(), rows, row, num_rows, 1, num_tiles, 0, ahead,
                                  out_of_pair);
    }
  multiply_tiles_of<T>(w, rows, row, num_rows, 0, num_tiles, pair, ahead, out);
}

// Rows [row, last_row) and pairs [pair, last_pair) with vector instructions. This thread probably goes
// on with `num_next` pairs behind them.
template <typename T, class W, class Out>
void multiply_with_vectors(const W& w, UnitRows rows, int64_t row, int64_t last_row, int64_t pair,
                           int64_t last_pair, const Out& out, int64_t num_next = 0) {
  const int64_t num_rows = last_row - row;
  if (num_rows == 0) return;
  WeightsAhead none;
  if (kPairsOfOneRow > 1 && num_rows == 1)
    for (; pair + kPairsOfOneRow <= last_pair; pair += kPairsOfOneRow)
      multiply_rows<T>(w, rows, row, 1, pair, kPairsOfOneRow, none, out);
  const int64_t num_tiles = (num_rows + kMostRows - 1) / kMostRows;
  for (; pair < last_pair; pair++)
    multiply_pair<T>(w, rows, row, num_rows, num_tiles, pair,
                     weights_ahead(w, pair + 1, last_pair + num_next, num_tiles), out);
}

}  // namespace
