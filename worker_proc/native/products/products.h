// Products of rows with packed weights, in which the bits of a result depend on its row alone.
//
// Every output is one chain of sums over the inputs in order or, if groups of inputs have scales, a
// chain of the sums of groups. The chain does not depend on the other rows or on the number of
// threads. Rows are float, Bf16, or int8_t codes, whose sums are integers modulo 2^32 (coded_rows.h).
//
// decoder.cpp calls `multiply` and `multiply_heads`, which divide the work among the threads;
// experts.h divides its work itself and calls `multiply_block`. All of them call `multiply_part`,
// which selects the kernel for the processor and the number of rows: AMX tiles (tile_products.h),
// vectors (vector_products.h), or weights that are widened to float32 once for many rows
// (float_products.h, widened_products.h). weights.h describes the layout of packed weights.

#pragma once

#include <type_traits>

#include "products/float_products.h"
#include "products/tile_products.h"
#include "products/vector_products.h"
#include "products/widened_products.h"
#include "products/line_products.h"
#include "products/grouped_lines.h"
#include "team.h"

// Whether this process may use AMX; set when the library is loaded.
extern bool troika_has_tiles;

namespace {

template <typename T>
bool uses_tiles() {
#ifdef __AMX_INT8__
  if (std::is_same<T, int8_t>::value) return troika_has_tiles;
#endif
#ifdef __AMX_BF16__
  if (std::is_same<T, Bf16>::value) return troika_has_tiles;
#endif
  return false;
}

// The maximum number of rows for which weights are read only once.
template <typename T>
int64_t rows_at_once() {
#ifdef __AMX_BF16__
  if (uses_tiles<T>()) return 2 * kAmxRows;
#endif
  return kMaxRows;
}

// Multiplies the rows [row, last_row) by the pairs [pair, last_pair) with the fastest kernel, and calls
// out(row, pair, low, high) with the sums of each row and pair.
template <typename T, class W, class Out>
void multiply_part(const W& w, UnitRows rows, int64_t row, int64_t last_row, int64_t pair,
                   int64_t last_pair, const Out& out, int64_t num_next = 0) {
#ifdef __AMX_BF16__
  if constexpr (!std::is_same<T, float>::value && W::kGroupUnits == 0)
    if (uses_tiles<T>())
      return multiply_with_tiles<T>(w, rows, row, last_row, pair, last_pair, out);
#endif
#ifdef __AVX512BF16__
  if constexpr (std::is_same<T, Bf16>::value && (!W::kAreCodes || W::kMakesVectors))
    if (troika_uses_floats && last_row - row >= kMinFloatRows) {
      FloatRows own(rows, w.num_units);
      return multiply_floats(w, rows.floats ? *rows.floats : own, row, last_row, pair, last_pair,
                             num_next, out);
    }
#endif
#ifndef __AVX512F__
  if constexpr (std::is_same<T, Bf16>::value && kHasLines<W>)
    if (last_row - row == 1 && can_multiply_lines(w)) {
      FloatRows own = float_rows<T>(w, rows);
      const FloatRows::Inputs inputs = (rows.floats ? *rows.floats : own).of(row, last_row);
      return multiply_lines(w, inputs, row, pair, last_pair, out);
    }
  if constexpr (!std::is_same<T, int8_t>::value)
    if (W::kAreCodes || last_row - row >= kManyRows)
      return multiply_many_rows<T>(w, rows, row, last_row, pair, last_pair, out, num_next);
#endif
  if constexpr (kHasManyRegisters || !W::kAreCodes)
    multiply_with_vectors<T>(w, rows, row, last_row, pair, last_pair, out, num_next);
}

template <typename T>
bool uses_floats() {
#ifdef __AVX512BF16__
  return std::is_same<T, Bf16>::value && !uses_tiles<T>() && troika_uses_floats;
#endif
  return false;
}

// The number of rows that stay in a core's cache while they are multiplied by one pair after another.
template <typename T>
int64_t rows_in_cache(int64_t num_units) {
  constexpr int64_t kMaxFloats = 256 * 1024;
  if (uses_tiles<T>()) return 256;
  if (uses_floats<T>()) return std::clamp<int64_t>(kMaxFloats / (2 * num_units), 32, 128);
  return 128;
}

// multiply_part for codes and many rows: decodes the units of some pairs, and multiplies all rows by
// them.
template <typename T, class W, class Out>
void multiply_unpacked(const W& w, UnitRows rows, int64_t row, int64_t last_row, int64_t pair,
                       int64_t last_pair, const Out& out) {
  constexpr int64_t kMaxBytes = 512 * 1024;  // of units, which stay in a core's cache beside the rows
  const int64_t pair_units = 2 * kLanes * w.num_units;
  const int64_t most = std::max<int64_t>(1, kMaxBytes / (pair_units * sizeof(Unit)));
  for (int64_t end; pair < last_pair; pair = end) {
    end = std::min(pair + most, last_pair);
    const Panels panels = unpacked(w, pair, end, space_for<W>((end - pair) * pair_units));
    const int64_t group = rows_in_cache<T>(w.num_units);
    for (int64_t first = row; first < last_row; first += group)
      multiply_part<T>(panels, rows, first, std::min(first + group, last_row), 0, end - pair,
                       [&](int64_t r, int64_t p, Vec low, Vec high) { out(r, pair + p, low, high); });
  }
}

// Whether codes can be decoded beforehand, for all rows.
template <class W>
constexpr bool kCanUnpack = kHasManyRegisters && W::kAreCodes && W::kGroupUnits == 0;

// Whether codes are decoded beforehand for this number of rows. While the rows stay in the cache, it is
// faster if the first register tile stores the vectors that it decodes (kKeepsVectors).
template <typename T, class W>
bool unpacks(int64_t num_rows) {
  constexpr int64_t kMaxRowsOfKept = kKeepsVectors<W> ? 128 : 0;
  const int64_t of_kept = uses_tiles<T>() || uses_floats<T>() ? 0 : kMaxRowsOfKept;
  return kCanUnpack<W> && num_rows > std::max({rows_at_once<T>(), W::kMaxCodedRows, of_kept});
}

// multiply_part, with codes decoded beforehand if that is faster.
template <typename T, class W, class Out>
void multiply_block(const W& w, UnitRows rows, int64_t row, int64_t last_row, int64_t pair,
                    int64_t last_pair, const Out& out, int64_t num_next = 0) {
  if constexpr (kCanUnpack<W>)
    if (unpacks<T, W>(last_row - row))
      return multiply_unpacked<T>(w, rows, row, last_row, pair, last_pair, out);
  multiply_part<T>(w, rows, row, last_row, pair, last_pair, out, num_next);
}

// multiply for one row on processors without AVX-512. A thread takes the pairs that it multiplies at
// once, from its own share of the weights first. The threads do not read equally fast, in particular
// while another process runs on the core of one of them. Where this would leave threads without work,
// they take single pairs.
template <typename T, class W, class Out>
void multiply_one_row(Team& team, const W& w, UnitRows rows, const Out& out) {
  const int64_t size = w.num_pairs < kPairsOfOneRow * team.size ? 1 : kPairsOfOneRow;
  const int64_t num_pieces = (w.num_pairs + size - 1) / size;
  for (int64_t piece; (piece = team.take_near(num_pieces)) < num_pieces;) {
    const int64_t pair = piece * size;
    multiply_block<T>(w, rows, 0, 1, pair, std::min(pair + size, w.num_pairs), out);
  }
}

// Calls out(row, pair, low, high) with the sums of each row and pair of panels. The threads of a team
// share the work. The caller ends the phase with a barrier.
template <typename T, class W, class Out>
void multiply(Team& team, const W& w, UnitRows rows, int64_t num_rows, const Out& out) {
  constexpr int64_t kFewRows = 16;  // memory-bound: each thread reads an equal part of the weights
  if (num_rows == 0) return;
#ifdef __AVX512BF16__
  FloatRows floats(rows, w.num_units);
  rows.floats = &floats;
#elif !defined(__AVX512F__)
  FloatRows floats = float_rows<T>(w, rows);
  rows.floats = &floats;
#endif
  if constexpr (!kHasManyRegisters)
    if (num_rows == 1 && team.size > 1) return multiply_one_row<T>(team, w, rows, out);
  const bool shares_units = unpacks<T, W>(num_rows);
  // With AVX-512, formats with kStepLines = 0 prefetch the weights that follow in memory, so threads take
  // longer pieces of them. Without it, they would wait for each other for a tenth of a decode step.
  constexpr bool kTakesPairs = !kHasManyRegisters || W::kStepLines > 0;
  const bool takes_pairs = kTakesPairs && team.size > 1 && !uses_tiles<T>() && !shares_units;
  if (!takes_pairs && num_rows <= std::max(kFewRows, W::kMaxCodedRows))
    return multiply_block<T>(w, rows, 0, num_rows, team.first(w.num_pairs),
                             team.last(w.num_pairs), out);
  int64_t most = rows_in_cache<T>(w.num_units);
  // The first of these rows decode compact weights for the others, so groups of rows are larger.
  constexpr int64_t kMaxUnits = 80 * 1024, kMaxRowsOfUnits = 288;
  if (takes_pairs && kKeepsVectors<W> && !uses_floats<T>())
    most = std::clamp(kMaxUnits / w.num_units, most, kMaxRowsOfUnits);
  int64_t num_groups = shares_units ? 1 : (num_rows + most - 1) / most;
  if (takes_pairs) {
    // A thread takes adjacent pairs and, if there are many rows, the share of the rows that it has in
    // its cache, since it computes the same share in other phases.
    constexpr int64_t kMinRowsOfShare = 128;
    const int64_t shares = team.num_shares();
    if (num_rows >= shares * kMinRowsOfShare) num_groups = (num_groups + shares - 1) / shares * shares;
    const int64_t total = num_groups * w.num_pairs;
    for (int64_t task; (task = team.take_near(total)) < total;) {
      const int64_t group = task / w.num_pairs, pair = task % w.num_pairs;
      multiply_block<T>(w, rows, num_rows * group / num_groups, num_rows * (group + 1) / num_groups,
                        pair, pair + 1, out, w.num_pairs - (pair + 1));
    }
    return;
  }
  // Few, long pieces: prefetches of the next weights do not cross the end of a piece.
  const int64_t group = (num_rows + num_groups * kLanes - 1) / (num_groups * kLanes) * kLanes;
  const int64_t num_pieces = std::min<int64_t>(w.num_pairs, 2 * team.size);
  const int64_t total = num_groups * num_pieces;
  for (int64_t task; (task = team.take(total)) < total;) {
    const int64_t row = task / num_pieces * group, piece = task % num_pieces;
    multiply_block<T>(w, rows, std::min(row, num_rows), std::min(row + group, num_rows),
                      w.num_pairs * piece / num_pieces, w.num_pairs * (piece + 1) / num_pieces, out);
  }
}

// Multiplies the rows of each head by the head's own weight, and calls out(head, row, pair, low,
// high). The threads of a team share the work. The inputs of successive heads are head_units apart in
// each row. `w` is the weight of head 0, which those of the other heads follow.
template <typename T, class W, class Out>
void multiply_heads(Team& team, const W& w, int64_t num_heads, UnitRows rows, int64_t head_units,
                    int64_t num_rows, const Out& out) {
  const int64_t most = rows_in_cache<T>(w.num_units);
  const int64_t num_groups = (num_rows + most - 1) / most;
  const int64_t per_head = std::max<int64_t>(num_groups, 1);
  const int64_t wanted = (4 * team.size + num_heads * per_head - 1) / (num_heads * per_head);
  const int64_t num_pieces = std::min(w.num_pairs, wanted);
  const int64_t total = num_heads * num_groups * num_pieces;
  for (int64_t task; (task = team.take(total)) < total;) {
    const int64_t head = task / (num_groups * num_pieces);
    const int64_t row = task / num_pieces % num_groups * most, piece = task % num_pieces;
    multiply_block<T>(w.expert(head), {rows.data + head * head_units, rows.stride}, row,
                      std::min(row + most, num_rows), w.num_pairs * piece / num_pieces,
                      w.num_pairs * (piece + 1) / num_pieces,
                      [&](int64_t r, int64_t pair, auto low, auto high) {
                        out(head, r, pair, low, high);
                      });
  }
}

}  // namespace
