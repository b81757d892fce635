// Register-tile kernels of attention in float32: scores, softmax and weighted values of a tile's rows
// for one span.
//
// A span has up to 64 consecutive positions, from a multiple of 64 on, in strips of 16. A row's
// maximum is raised at most once for each span. Scores are summed in the order of the dimensions and
// values in the order of the positions, with one accumulator for each result, so the bits of a row do
// not depend on the other rows of its register tile. Called by float_spans.h and text_attention.h.

#pragma once

#include <algorithm>
#include <array>
#include <utility>

#include "attention/sections.h"

namespace {

constexpr int kTileRows = 32;  // query rows of a tile
constexpr int kStrips = 4;     // of a span
constexpr float kLog2OfE = 1.44269504f;
constexpr int kFloatSpan = kStrips * kLanes;  // positions of a span
// A row's maximum is raised when a score exceeds it by more than this natural logarithm of a weight, so
// most spans rescale nothing.
constexpr float kRaiseThresholdLn = 8.0f;

// Accumulators of a register tile, beside which the registers hold its operands.
constexpr int kAccumulators = kPartLanes == kLanes ? 16 : 12;
constexpr int kRegisterRows = kPartLanes == kLanes ? 8 : kAccumulators / kParts;

// The number of rows whose values are added together. Values that are widened serve more rows.
template <typename T>
constexpr int kValueRows = kPartLanes == kLanes ? 8 : sizeof(T) == sizeof(float) ? 3 : 6;

// The number of columns of a register tile of `rows` rows, each of `parts` Parts: a power of two.
constexpr int num_columns(int rows, int parts, int most) {
  int columns = 1;
  while (2 * columns <= most && 2 * columns * rows * parts <= kAccumulators) columns *= 2;
  return columns;
}

// Query rows of one KV head, and the state of their softmax.
struct Tile : OnlineSoftmax<kTileRows, Exponential> {
  int dim, vdim;  // dimensions of a key and a value
  float softcap;
  TileBiases<kTileRows> biases;
  int position[kTileRows];      // the last position that a row sees
  int visible_from[kTileRows];  // the first one
  alignas(64) float query[kTileRows * kMaxDim];      // [row][dim], scaled
  alignas(64) float weights[kTileRows][kFloatSpan];  // of a span: scores, then weights

  void end_sections(RowRange rows) {
    for (int r = rows.first; r < rows.first + rows.count; r++) end_section(r);
  }
};

// The strips of a span that hold positions which some row sees. Positions from `count` on are visible
// to no row of the tile.
struct SpanExtent {
  int base, first_strip, count;

  int num_strips() const { return (count + kLanes - 1) / kLanes; }
  bool is_empty() const { return num_strips() <= first_strip; }
};

// The keys and values of a span: strips of keys, [dim][16], and of values, [16][vdim].
template <typename T>
struct Span {
  SpanExtent extent;
  int key_stride, value_stride;
  const T *keys[kStrips], *values[kStrips];
};

// Scores of R rows with C strips, in tile.weights.
template <typename T, int R, int C>
void score_strips(Tile& tile, int first, const Span<T>& span, int strip) {
  constexpr int P = C * kParts;
  Part sums[R][P] = {};
  const float* query = tile.query + first * tile.dim;
  const T* keys[C];
#pragma GCC unroll 4
  for (int c = 0; c < C; c++) keys[c] = span.keys[strip + c];
  const int dim = tile.dim;
  const int64_t stride = span.key_stride;
  const auto key = [&](int p) {
    Part part = strip_part(keys[p / kParts], p % kParts);
    hold_in_register(part);
    return part;
  };
  for (int d = 0; d < dim; d++, query++) {
    if constexpr (R < P) {
      Part q[R];
#pragma GCC unroll 32
      for (int r = 0; r < R; r++) {
        q[r] = splat_part(query[r * dim]);
        hold_in_register(q[r]);
      }
#pragma GCC unroll 32
      for (int p = 0; p < P; p++) {
        const Part k = key(p);
#pragma GCC unroll 32
        for (int r = 0; r < R; r++) sums[r][p] = multiply_add_part(q[r], k, sums[r][p]);
      }
    } else {
      Part k[P];
#pragma GCC unroll 32
      for (int p = 0; p < P; p++) k[p] = key(p);
#pragma GCC unroll 32
      for (int r = 0; r < R; r++) {
        const Part q = splat_part(query[r * dim]);
#pragma GCC unroll 32
        for (int p = 0; p < P; p++) sums[r][p] = multiply_add_part(q, k[p], sums[r][p]);
      }
    }
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) keys[c] += stride;
  }
#pragma GCC unroll 32
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++)
      save_strip<T>(sums[r] + c * kParts, tile.weights[first + r] + (strip + c) * kLanes);
}

// Scores of R rows with a span.
template <typename T, int R>
void score(Tile& tile, int first, const Span<T>& span) {
  constexpr int C = num_columns(R, kParts, kStrips);
  const int end = span.extent.num_strips();
  int strip = span.extent.first_strip;
  for (; strip + C <= end; strip += C) score_strips<T, R, C>(tile, first, span, strip);
  for (; strip < end; strip++) score_strips<T, R, 1>(tile, first, span, strip);
}

// The weight of a score, e^(score - maximum), and 0 below 2^-125. NaN stays NaN.
inline Part weight_of(Part score, Part maximum) {
  constexpr float kBiased = kWhole + 127.0f;  // adding it rounds to an integer, with a float's bias
  constexpr float kTerms[] = {0.0013399931f, 0.009618489f, 0.055503286f,
                              0.24022646f,   0.6931472f,   1.0f};
  const Part power = (score - maximum) * kLog2OfE;
  const Part whole = power + kBiased;
  const Part rest = power - (whole - kBiased);
  Part y = splat_part(0.00015345812f);
#pragma GCC unroll 8
  for (const float term : kTerms) y = multiply_add_part(y, rest, splat_part(term));
  y *= (Part)((PartBits)whole << 23);
  return power < -125.0f ? Part{} : y;
}

// Sets the scores of positions that a row does not see to -infinity: those outside of [low, end).
inline void mask_scores(float* scores, const SpanExtent& extent, int low, int end) {
  for (int i = extent.first_strip * kLanes; i < low; i++) scores[i] = kNegInf;
  for (int i = std::max(end, extent.first_strip * kLanes); i < extent.num_strips() * kLanes; i++)
    scores[i] = kNegInf;
}

// Applies the soft cap and the biases to a row's scores.
[[gnu::noinline]] inline void adjust_scores(Tile& tile, int r, const SpanExtent& extent) {
  float* const scores = tile.weights[r];
  const bool has_biases = tile.biases.reach(r, extent.base, kFloatSpan);
  for (int i = extent.first_strip * kLanes; i < extent.num_strips() * kLanes; i += kLanes) {
    Vec s = load(scores + i);
    if (tile.softcap > 0) s = tanh_of(s * (1.0f / tile.softcap)) * tile.softcap;
    if (has_biases) s += load(tile.biases.at(r, extent.base + i)) - tile.biases.own(r);
    save(s, scores + i, kLanes);
  }
}

// Raises a row's running maximum to its greatest score, if that is higher by more than the threshold.
// Returns false if the row has seen no score yet.
inline bool raise_maximum(Tile& tile, int r, const SpanExtent& extent) {
  const float* const scores = tile.weights[r];
  const int first = extent.first_strip * kLanes, last = extent.num_strips() * kLanes;
  Part most = splat_part(tile.running_max[r]);
  for (int i = first; i < last; i += kPartLanes) most = larger(part_at(scores + i), most);
  if (exceeds(most, splat_part(tile.running_max[r] + kRaiseThresholdLn))) {
    float highest = kNegInf;
    for (int lane = 0; lane < kPartLanes; lane++) highest = std::max(highest, most[lane]);
    tile.raise_maximum(r, highest);
    return true;
  }
  if (tile.running_max[r] != kNegInf) return true;
  bool has_nan = false;
  for (int i = first; i < last; i++) has_nan |= scores[i] != scores[i];
  return has_nan;
}

// Replaces a row's scores by their weights, e^(score - maximum), and adds these to the row's sum.
[[gnu::always_inline]] inline void weigh_scores(Tile& tile, int r, int first, int last) {
  float* const weights = tile.weights[r];
  const Part maximum = splat_part(tile.running_max[r]);
  Part sums[kParts];
  for (int p = 0; p < kParts; p++) sums[p] = part_at(tile.weight_sums[r] + p * kPartLanes);
#pragma GCC unroll 1
  for (int i = first; i < last; i += kLanes)
#pragma GCC unroll 4
    for (int p = 0; p < kParts; p++) {
      float* const at = weights + i + p * kPartLanes;
      const Part weight = weight_of(part_at(at), maximum);
      sums[p] += weight;
      save_part(weight, at);
    }
  for (int p = 0; p < kParts; p++) save_part(sums[p], tile.weight_sums[r] + p * kPartLanes);
}

// Replaces a row's scores of a span by softmax weights, and adds them to the row's sum. Returns false,
// and leaves the scores, if no position is visible.
[[gnu::noinline]] inline bool softmax_row(Tile& tile, int r, const SpanExtent& extent) {
  float* const scores = tile.weights[r];
  const int low = tile.visible_from[r] - extent.base;
  const int end = std::min(tile.position[r] - extent.base + 1, extent.count);
  const int first = extent.first_strip * kLanes, last = extent.num_strips() * kLanes;
  if (end <= first || low >= last) return false;
  if (tile.softcap > 0 || tile.biases.reach(r, extent.base, kFloatSpan))
    adjust_scores(tile, r, extent);
  if (low > first || end < last) mask_scores(scores, extent, low, end);
  if (!raise_maximum(tile, r, extent)) return false;
  weigh_scores(tile, r, first, last);
  return true;
}

// Whether some rows see all positions of a whole span, no score is adjusted, and no maximum is raised.
[[gnu::always_inline]] inline bool only_weigh(const Tile& tile, RowRange rows,
                                              const SpanExtent& extent) {
  if (tile.softcap > 0 || extent.first_strip > 0 || extent.count < kFloatSpan) return false;
  for (int r = rows.first; r < rows.first + rows.count; r++) {
    const bool sees_all = tile.visible_from[r] <= extent.base &&
                          tile.position[r] >= extent.base + kFloatSpan - 1;
    if (!sees_all || tile.biases.reach(r, extent.base, kFloatSpan)) return false;
    if (tile.running_max[r] == kNegInf) return false;
  }
  for (int r = rows.first; r < rows.first + rows.count; r++) {
    const float* const scores = tile.weights[r];
    Part most[2] = {part_at(scores), part_at(scores + kPartLanes)};
#pragma GCC unroll 16
    for (int i = 2; i < kFloatSpan / kPartLanes; i++)
      most[i % 2] = larger(part_at(scores + i * kPartLanes), most[i % 2]);
    const Part bound = splat_part(tile.running_max[r] + kRaiseThresholdLn);
    if (exceeds(most[0], bound) || exceeds(most[1], bound)) return false;
  }
  return true;
}

// Replaces scores by softmax weights, like softmax_row, with weights of 0 for rows that see no position.
// Returns whether any row sees one.
template <int R>
[[gnu::always_inline]] inline bool softmax_rows(Tile& tile, int first, const SpanExtent& extent) {
  if (only_weigh(tile, {first, R}, extent)) {
#pragma GCC unroll 1
    for (int r = first; r < first + R; r++) weigh_scores(tile, r, 0, kFloatSpan);
    return true;
  }
  bool any = false;
  for (int r = first; r < first + R; r++) {
    const bool sees = softmax_row(tile, r, extent);
    if (!sees) std::memset(tile.weights[r], 0, sizeof(tile.weights[r]));
    any |= sees;
  }
  return any;
}

// Adds the weighted values of R rows, C registers of dimensions from `column` on.
template <typename T, int R, int C>
void accumulate_values(Tile& tile, int first, int column, const Span<T>& span) {
  Part sums[R][C];
  float* const out = tile.accumulator(first) + column;
  const int stride = tile.accumulator_stride();
#pragma GCC unroll 32
  for (int r = 0; r < R; r++)
#pragma GCC unroll 32
    for (int c = 0; c < C; c += kParts)
      load_strip<T>(out + r * stride + c * kPartLanes, sums[r] + c);
  const int64_t value_stride = span.value_stride;
  for (int strip = span.extent.first_strip; strip < span.extent.num_strips(); strip++) {
    const T* values = span.values[strip] + column;
    const float* weights = tile.weights[first] + strip * kLanes;
    const float* const end = weights + std::min(kLanes, span.extent.count - strip * kLanes);
    for (; weights < end; weights++, values += value_stride) {
      if constexpr (R < C) {
        Part w[R];
#pragma GCC unroll 32
        for (int r = 0; r < R; r++) {
          w[r] = splat_part(weights[r * kFloatSpan]);
          hold_in_register(w[r]);
        }
#pragma GCC unroll 32
        for (int c = 0; c < C; c++) {
          Part v = strip_part(values + c / kParts * kLanes, c % kParts);
          hold_in_register(v);
#pragma GCC unroll 32
          for (int r = 0; r < R; r++) sums[r][c] = multiply_add_part(w[r], v, sums[r][c]);
        }
      } else {
        Part v[C];
#pragma GCC unroll 32
        for (int c = 0; c < C; c++) {
          v[c] = strip_part(values + c / kParts * kLanes, c % kParts);
          hold_in_register(v[c]);
        }
#pragma GCC unroll 32
        for (int r = 0; r < R; r++) {
          const Part w = splat_part(weights[r * kFloatSpan]);
#pragma GCC unroll 32
          for (int c = 0; c < C; c++) sums[r][c] = multiply_add_part(w, v[c], sums[r][c]);
        }
      }
    }
  }
#pragma GCC unroll 32
  for (int r = 0; r < R; r++)
#pragma GCC unroll 32
    for (int c = 0; c < C; c += kParts)
      save_strip<T>(sums[r] + c, out + r * stride + c * kPartLanes);
}

// Adds the weighted values of R rows.
template <typename T, int R>
void accumulate(Tile& tile, int first, const Span<T>& span) {
  if constexpr (R > kValueRows<T>) {
    accumulate<T, kValueRows<T>>(tile, first, span);
    accumulate<T, R - kValueRows<T>>(tile, first + kValueRows<T>, span);
  } else {
    constexpr int C = num_columns(R, 1, 8);
    int column = 0;
    for (; column + C * kPartLanes <= tile.padded_vdim; column += C * kPartLanes)
      accumulate_values<T, R, C>(tile, first, column, span);
    for (; column < tile.padded_vdim; column += kLanes)
      accumulate_values<T, R, kParts>(tile, first, column, span);
  }
}

// Scores, softmax and weighted values of R rows for one span.
template <typename T, int R>
void attend_rows(Tile& tile, int first, const Span<T>& span) {
  score<T, R>(tile, first, span);
  if (softmax_rows<R>(tile, first, span.extent)) accumulate<T, R>(tile, first, span);
}

template <typename T>
using RowsFunction = void (*)(Tile& tile, int first, const Span<T>& span);

template <typename T, int... Fewer>
constexpr std::array<RowsFunction<T>, sizeof...(Fewer)> rows_functions(
    std::integer_sequence<int, Fewer...>) {
  return {attend_rows<T, Fewer + 1>...};
}

// Updates rows of a tile by one span, a register tile at a time. Strips that no row of a register tile
// sees are skipped.
template <typename T>
void attend_span(Tile& tile, RowRange rows, const Span<T>& span) {
  static constexpr auto kFunctions =
      rows_functions<T>(std::make_integer_sequence<int, kRegisterRows>());
  Span<T> own = span;
  for (int count; rows.count > 0; rows.first += count, rows.count -= count) {
    count = std::min(kRegisterRows, rows.count);
    const int* const positions = tile.position + rows.first;
    const int last = *std::max_element(positions, positions + count);
    own.extent.count = std::min(span.extent.count, last - span.extent.base + 1);
    if (!own.extent.is_empty()) kFunctions[count - 1](tile, rows.first, own);
  }
}

}  // namespace
