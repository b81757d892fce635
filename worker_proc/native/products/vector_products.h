// Products by vector instructions, for any number of rows: a pair of panels is multiplied by one
// register tile of up to kMaxRows rows after another. Called by multiply_part (products.h).

#pragma once

#include <utility>

#include "products/row_sums.h"

namespace {

// Computes the sums of R rows and `Pairs` pairs, and stores them row by row. `rows` is a reference,
// since loads of a copy would stall: store forwarding fails if the loads are wider than the stores.
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

// Returns the function for one pair and num_rows <= kMaxRows rows.
template <typename T, class W, int... Fewer>
Saver<T, W> saver_for(int num_rows, std::integer_sequence<int, Fewer...>) {
  static constexpr Saver<T, W> kSavers[] = {save_products<T, Fewer + 1, 1, W>...};
  return kSavers[num_rows - 1];
}

// Calls f with weights in the form that is fastest for one row.
template <class W, class F>
void with_vectors(const W& w, const F& f) {
  f(w);
}

template <typename T, class W, class Out>
void multiply_rows(const W& w, UnitRows rows, int64_t row, int num_rows, int64_t pair,
                   int num_pairs, WeightsAhead& ahead, const Out& out) {
  SumsOf<T> sums[2 * std::max(kMaxRows, kPairsOfOneRow)];
  const UnitRows own{rows.data + row * rows.stride, rows.stride};
  if (num_pairs > 1) {
    save_products<T, 1, kPairsOfOneRow>(w, own, pair, ahead, sums);
  } else if (num_rows == 1) {
    with_vectors(w, [&](const auto& v) { save_products<T, 1, 1>(v, own, pair, ahead, sums); });
  } else {
    const auto save = saver_for<T, W>(num_rows, std::make_integer_sequence<int, kMaxRows>());
    save(w, own, pair, ahead, sums);
  }
  const SumsOf<T>* at = sums;
  const Out own_out = out;  // a local copy, which stores cannot alias
  for (int r = 0; r < num_rows; r++)
    for (int p = 0; p < num_pairs; p++, at += 2) own_out(row + r, pair + p, at[0], at[1]);
}

#ifdef __AVX512BF16__

// The sums of `count` rows, from `row` on, and one pair.
struct TileSums {
  Vec values[kMaxRows][2];
  int64_t row = 0;
  int count = 0;
};

// Computes R rows, from `sums.row` on, and interleaves the epilogue of the previous tile row by row,
// since it uses mostly other execution ports than the products.
template <int R, class Out>
[[gnu::noinline]] void multiply_tile(const Panels& w, const UnitRows& rows, int64_t pair,
                                     WeightsAhead& ahead, const TileSums& before, TileSums& sums,
                                     const Out& out) {
  const Out own_out = out;  // local copies, which stores cannot alias
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
  while (num_passed < count) pass_row_on();  // with fewer steps than rows
  sums.count = R;
#pragma GCC unroll 32
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int p = 0; p < 2; p++) sums.values[r][p] = own[r][p];
}

constexpr int kMinTileRows = 10;  // rows of the smallest large tile; bounds the number of instances

// multiply_tiles_of for tiles of at least kMinTileRows rows.
template <class Out>
void multiply_large_tiles(const Panels& w, UnitRows rows, int64_t row, int64_t num_rows, int64_t tile,
                          int64_t num_tiles, int64_t pair, WeightsAhead& ahead, const Out& out) {
  static_assert(kMinTileRows == 10 && kMaxRows == 12);
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

// Multiplies rows by one pair. The rows [row, row + num_rows) are num_tiles tiles, of which those
// before `tile` are skipped.
template <typename T, class W, class Out>
void multiply_tiles_of(const W& w, UnitRows rows, int64_t row, int64_t num_rows, int64_t tile,
                       int64_t num_tiles, int64_t pair, WeightsAhead& ahead, const Out& out) {
#ifdef __AVX512BF16__
  if constexpr (std::is_same<T, Bf16>::value && std::is_same<W, Panels>::value)
    if (num_tiles - tile > 1 && num_rows / num_tiles >= kMinTileRows)
      return multiply_large_tiles(w, rows, row, num_rows, tile, num_tiles, pair, ahead, out);
#endif
  for (; tile < num_tiles; tile++) {
    const int64_t first = row + num_rows * tile / num_tiles;
    const int64_t last = row + num_rows * (tile + 1) / num_tiles;
    multiply_rows<T>(w, rows, first, static_cast<int>(last - first), pair, 1, ahead, out);
  }
}

// Whether the first register tile stores the vectors that it decodes for the other tiles. Codes without
// scales are cheap enough to decode again.
template <class W>
constexpr bool kKeepsVectors = W::kMakesVectors && W::kGroupUnits == 0;

// Multiplies the rows [row, row + num_rows) by one pair.
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

// Multiplies the rows [row, last_row) by the pairs [pair, last_pair). This thread will probably
// continue with the next num_next pairs, which are prefetched.
template <typename T, class W, class Out>
void multiply_with_vectors(const W& w, UnitRows rows, int64_t row, int64_t last_row, int64_t pair,
                           int64_t last_pair, const Out& out, int64_t num_next = 0) {
  const int64_t num_rows = last_row - row;
  if (num_rows == 0) return;
  WeightsAhead none;
  if (kPairsOfOneRow > 1 && num_rows == 1)
    for (; pair + kPairsOfOneRow <= last_pair; pair += kPairsOfOneRow)
      multiply_rows<T>(w, rows, row, 1, pair, kPairsOfOneRow, none, out);
  const int64_t num_tiles = (num_rows + kMaxRows - 1) / kMaxRows;
  for (; pair < last_pair; pair++)
    multiply_pair<T>(w, rows, row, num_rows, num_tiles, pair,
                     weights_ahead(w, pair + 1, last_pair + num_next, num_tiles), out);
}

}  // namespace
