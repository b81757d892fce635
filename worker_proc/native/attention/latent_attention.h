// Multi-head latent attention over a paged cache of latent rows, which all heads share.
//
// A token has one latent row in a layer, [head_dim]: its key, whose first value_head_dim numbers are
// also its value. Layout of the pool: [block][slot][head_dim]. Block 0 is the null block and is never
// written. Each cached row is read once for all heads of a tile. A score is one chain of sums for each
// lane, over the dimensions, and sections.h merges sections, so a row's result depends on its query and
// its context alone. Called by attention.cpp.

#pragma once

#include <algorithm>

#include "attention/sections.h"

namespace {

constexpr int kMaxLatentDim = 640;
constexpr int kMaxLatentRows = 128;   // query rows of a tile: tokens times heads
constexpr int kGoodLatentRows = 64;   // queries and accumulators of these rows fit into the L2 cache
constexpr int kMinLatentHeads = 8;    // of a thread, where threads share the heads of a token
constexpr int kLatentSpan = 32;       // slots of a span
constexpr int kLatentRegisterRows = 4;
// Keys, or registers of values, of a register tile.
constexpr int kLatentRegisterColumns = kPartLanes == kLanes ? 4 : 2;

// Query rows, and the state of their softmax. Rows from num_rows on, up to a multiple of
// kLatentRegisterRows, are padding: zeros.
struct LatentTile : OnlineSoftmax<kMaxLatentRows, Exponential> {
  int num_rows, padded_rows, padded_dim, window;
  int position[kMaxLatentRows];
  alignas(64) float query[kMaxLatentRows * kMaxLatentDim];
  alignas(64) float weights[kMaxLatentRows][kLatentSpan];  // of a span: scores, then weights
  alignas(64) float copy[kLatentSpan * kMaxLatentDim];

  void end_sections() {
    for (int r = 0; r < num_rows; r++) end_section(r);
  }
};

// Consecutive cached rows, whose dimensions are whole vectors.
template <typename T>
struct LatentSpan {
  const T* rows;
  int stride, first_position, count;
};

// Scores of kLatentRegisterRows queries with C cached rows, in tile.weights.
template <typename T, int C>
void score_latent(LatentTile& tile, int first, const LatentSpan<T>& span, int slot) {
  constexpr int R = kLatentRegisterRows;
  Part sums[R][C];
  for (auto& row : sums)
    for (Part& sum : row) sum = Part{};
  const float* query = tile.query + first * tile.padded_dim;
  const T* keys = span.rows + static_cast<int64_t>(slot) * span.stride;
  for (int d = 0; d < tile.padded_dim; d += kPartLanes) {
    Part key[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) key[c] = part_at(keys + c * span.stride + d);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      const Part q = part_at(query + r * tile.padded_dim + d);
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) sums[r][c] = multiply_add_part(q, key[c], sums[r][c]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) tile.weights[first + r][slot + c] = sum_of_part(sums[r][c]);
}

// Replaces a row's scores of a span by softmax weights, 0 for masked positions, and adds them to the
// row's sum.
inline void softmax_latent_row(LatentTile& tile, int r, int first_position, int count) {
  float* const weights = tile.weights[r];
  const int low = tile.window ? tile.position[r] - tile.window + 1 - first_position : 0;
  const int end = std::min(tile.position[r] - first_position + 1, count);
  for (int i = 0; i < kLatentSpan; i++)
    if (i < low || i >= end) weights[i] = kNegInf;
  float highest = kNegInf;
  bool is_nan = false;
  for (int i = std::max(low, 0); i < end; i++) {
    highest = std::max(highest, weights[i]);
    is_nan |= weights[i] != weights[i];
  }
  if (highest > tile.running_max[r]) tile.raise_maximum(r, highest);
  if (tile.running_max[r] == kNegInf && !is_nan) {
    std::memset(weights, 0, sizeof(tile.weights[r]));
    return;
  }
  for (int i = 0; i < kLatentSpan; i += kLanes) {
    const Vec score = load(weights + i);
    Vec weight = exp_of(score - tile.running_max[r]);
    weight = score == kNegInf ? splat(0.0f) : weight;
    weight = score != score ? score : weight;
    save(weight, weights + i, kLanes);
    save(load(tile.weight_sums[r]) + weight, tile.weight_sums[r], kLanes);
  }
}

// Adds the weighted values of kLatentRegisterRows rows, C registers of dimensions from `column` on.
template <typename T, int C>
void accumulate_latent(LatentTile& tile, int first, int column, const LatentSpan<T>& span) {
  constexpr int R = kLatentRegisterRows;
  Part sums[R][C];
  float* const out = tile.accumulator(first) + column;
  const int stride = tile.accumulator_stride();
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) sums[r][c] = part_at(out + r * stride + c * kPartLanes);
  for (int slot = 0; slot < span.count; slot++) {
    const T* values = span.rows + static_cast<int64_t>(slot) * span.stride + column;
    Part value[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) value[c] = part_at(values + c * kPartLanes);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      const Part weight = Part{} + tile.weights[first + r][slot];
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) sums[r][c] = multiply_add_part(weight, value[c], sums[r][c]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) save_part(sums[r][c], out + r * stride + c * kPartLanes);
}

// Updates all rows of a tile by one span.
template <typename T>
void attend_latent_span(LatentTile& tile, const LatentSpan<T>& span) {
  constexpr int kColumns = kLatentRegisterColumns;
  for (int first = 0; first < tile.padded_rows; first += kLatentRegisterRows) {
    int slot = 0;
    for (; slot + kColumns <= span.count; slot += kColumns)
      score_latent<T, kColumns>(tile, first, span, slot);
    for (; slot < span.count; slot++) score_latent<T, 1>(tile, first, span, slot);
    for (int r = first; r < first + kLatentRegisterRows; r++)
      softmax_latent_row(tile, r, span.first_position, span.count);
    int column = 0;
    for (; column + kColumns * kPartLanes <= tile.padded_vdim; column += kColumns * kPartLanes)
      accumulate_latent<T, kColumns>(tile, first, column, span);
    for (; column < tile.padded_vdim; column += kPartLanes)
      accumulate_latent<T, 1>(tile, first, column, span);
  }
}

// A float32 copy of a span, padded to whole vectors, for several register tiles.
template <typename T>
LatentSpan<float> copy_latent(LatentTile& tile, const LatentSpan<T>& span, int dim) {
  for (int slot = 0; slot < span.count; slot++) {
    const T* from = span.rows + static_cast<int64_t>(slot) * span.stride;
    float* to = tile.copy + slot * tile.padded_dim;
    int d = 0;
    for (; d + kPartLanes <= dim; d += kPartLanes) save_part(part_at(from + d), to + d);
    for (; d < dim; d++) to[d] = widen(from[d]);
    for (; d < tile.padded_dim; d++) to[d] = 0.0f;
  }
  return {tile.copy, tile.padded_dim, span.first_position, span.count};
}

// Attention of one group of heads in one step. There are layer.num_kv_heads groups.
template <typename T>
class LatentHeads {
 public:
  LatentHeads(LatentTile& tile, const Layer& layer, const Step& step, int group, const Rows& query,
              const Rows& value, float scale)
      : tile_(tile),
        layer_(layer),
        step_(step),
        first_head_(layer.num_heads * group / layer.num_kv_heads),
        num_heads_(layer.num_heads * (group + 1) / layer.num_kv_heads - first_head_),
        query_(query),
        value_(value),
        scale_(scale) {}

  template <class Write>
  void attend_piece(const Piece& piece, const Write& write) {
    const int tile_tokens = std::max(1, kGoodLatentRows / num_heads_);
    int index = 0;
    for (int item = piece.first_item; item < piece.first_item + piece.num_items; item++) {
      const int segment = step_.item_segment[item], begin = step_.item_token[item];
      const int num_tokens = std::min(step_.num_tokens[segment] - begin, step_.item_size);
      for (int at = 0, count; at < num_tokens; at += count, index += count) {
        count = num_tile_tokens<T>(layer_, value_, 0, step_.first_row[segment] + begin + at,
                                   std::min(tile_tokens, num_tokens - at));
        attend_tile(piece, index, segment, begin + at, count, write);
      }
    }
  }

 private:
  template <class Write>
  void attend_tile(const Piece& piece, int index, int segment, int first_token, int num_tokens,
                   const Write& write) {
    const int64_t first_row = step_.first_row[segment] + first_token;
    tile_.num_rows = num_tokens * num_heads_;
    tile_.padded_rows =
        (tile_.num_rows + kLatentRegisterRows - 1) / kLatentRegisterRows * kLatentRegisterRows;
    for (int r = 0; r < tile_.padded_rows; r++) {
      float* const to = tile_.query + r * tile_.padded_dim;
      std::memset(to, 0, tile_.padded_dim * sizeof(float));
      tile_.begin(r);
      tile_.position[r] = -1;  // all positions are masked
      if (r >= tile_.num_rows) continue;
      const int token = r / num_heads_, head = first_head_ + r % num_heads_;
      const T* q = static_cast<const T*>(query_.data) + (first_row + token) * query_.row_stride +
                   head * query_.head_stride;
      for (int d = 0; d < layer_.head_dim; d++) to[d] = widen(q[d]) * scale_;
      tile_.position[r] = step_.start[segment] + first_token + token;
    }
    attend_context(segment, piece.positions());
    for (int r = 0; r < tile_.num_rows; r++) {
      const int token = r / num_heads_, head = first_head_ + r % num_heads_;
      piece.finish(first_row + token, index + token, head, tile_.merged(r), write);
    }
  }

  void attend_context(int segment, Positions positions) {
    const int size = layer_.block_size, dim = layer_.head_dim;
    const int last = std::min(tile_.position[tile_.num_rows - 1], positions.end - 1);
    const int visible_from = tile_.window ? tile_.position[0] - tile_.window + 1 : 0;
    const int earliest = std::max(visible_from, positions.begin);
    for_spans<kLatentSpan>(earliest, last, size, [&](int base, int num_slots) {
      const int64_t block = step_.tables[step_.table_offset[segment] + base / size];
      const T* rows = static_cast<const T*>(layer_.keys) + (block * size + base % size) * dim;
      const LatentSpan<T> span{rows, dim, base, std::min(last - base + 1, num_slots)};
      const bool widens_once = sizeof(T) == sizeof(float) || tile_.num_rows <= kLatentRegisterRows;
      if (dim % kLanes == 0 && layer_.value_head_dim % kLanes == 0 && widens_once)
        attend_latent_span(tile_, span);
      else
        attend_latent_span(tile_, copy_latent(tile_, span, dim));
      if ((base + span.count) % kSectionSlots == 0) tile_.end_sections();
    });
  }

  LatentTile& tile_;
  const Layer& layer_;
  const Step& step_;
  const int first_head_, num_heads_;
  const Rows &query_, &value_;
  const float scale_;
};

template <typename T>
void store_latent(Team& team, const Layer& layer, const Step& step, const Rows& key) {
  const int last_row = static_cast<int>(team.last(step.num_rows));
  for (int row = static_cast<int>(team.first(step.num_rows)); row < last_row; row++)
    if (step.slots[row] >= layer.block_size)  // not in the null block
      std::memcpy(static_cast<T*>(layer.keys) + step.slots[row] * layer.head_dim,
                  static_cast<const T*>(key.data) + row * key.row_stride,
                  layer.head_dim * sizeof(T));
}

// The number of groups into which heads are divided among threads. Each group reads the whole context.
inline int num_latent_groups(const Layer& layer, const Step& step, int num_threads) {
  const int least = (layer.num_heads + kMaxLatentRows - 1) / kMaxLatentRows;
  const int most = std::max(layer.num_heads / kMinLatentHeads, least);
  const int wanted = (2 * num_threads + step.num_pieces - 1) / std::max(step.num_pieces, 1);
  return num_threads == 1 ? least : std::clamp(wanted, least, most);
}

// Stores the latent rows, and attends: query [num_rows][num_heads][head_dim], out
// [num_rows][num_heads][value_head_dim]. `key` has the latent rows, and `value` their first numbers.
// The caller ends the phase with a barrier.
template <typename T>
void attend_latent(Team& team, const Layer& layer, const Step& step, const Rows& query,
                   const Rows& key, const Rows& value, T* out, float scale) {
  store_latent<T>(team, layer, step, key);
  team.barrier();
  static thread_local LatentTile tile;
  tile.padded_dim = (layer.head_dim + kLanes - 1) / kLanes * kLanes;
  tile.padded_vdim = padded_dim(layer);
  tile.window = layer.window;
  Layer shared = layer;  // with groups of heads in place of KV heads
  shared.num_kv_heads = num_latent_groups(layer, step, team.size);
  const auto write = [&](int64_t row, int head, const RowSums& sums) {
    T* o = out + (row * layer.num_heads + head) * layer.value_head_dim;
    const float factor = 1.0f / sums.weight_sum;
    for (int d = 0; d < layer.value_head_dim; d++) narrow(sums.values[d] * factor, o[d]);
  };
  attend_pieces<Exponential>(
      team, shared, step,
      [&](const Piece& piece, int group, const PieceOfHead&) {
        LatentHeads<T>(tile, shared, step, group, query, value, scale).attend_piece(piece, write);
      },
      write);
}

}  // namespace
