// Paged attention in float32, for any head dimension, block size and CPU.
//
// A row's result depends on its query and its context alone, and not on the rows, chunks or requests
// that it is computed with: scores are summed in the order of the head's dimensions, and contexts in
// the order of positions, by sections (sections.h). Requests of a group read the blocks of their shared
// prefix once. Layout of the pools: keys [block][kv_head][dim][slot], values
// [block][kv_head][slot][vdim]; codes are dequantized before they are read (coded_kv.h). Block 0 is the
// null block and is never written. Called by attend_any (pair_attention.h) and attend_texts
// (text_attention.h).

#pragma once

#include "attention/coded_kv.h"

namespace {

constexpr int kTileRows = 32;  // query rows of a tile

// Prefetches memory for reads, or for writes where kWrite is 1. Always inlined, because GCC removes a
// call that has no effect but prefetches.
template <int kWrite>
[[gnu::always_inline]] inline void prefetch(const void* begin, int64_t num_bytes) {
  const char* p = static_cast<const char*>(begin);
  for (int64_t i = 0; i < num_bytes; i += 64) __builtin_prefetch(p + i, kWrite);
}

// Stores the keys and values of this step's tokens.
template <typename T>
void store(Team& team, const Layer& layer, const Step& step, const Rows& key, const Rows& value) {
  const int dim = layer.head_dim, vdim = layer.value_head_dim, size = layer.block_size;
  const int64_t block_keys = static_cast<int64_t>(layer.num_kv_heads) * dim * size;
  const int last_row = static_cast<int>(team.last(step.num_rows));
  for (int row = static_cast<int>(team.first(step.num_rows)); row < last_row; row++) {
    const int64_t block = step.slots[row] / size, offset = step.slots[row] % size;
    // The dimensions of a key are spread over the lines of its block, so the next block is prefetched.
    const int64_t next = row + 1 < last_row ? step.slots[row + 1] / size : 0;
    if (next != 0 && next != block)
      prefetch<1>(static_cast<const T*>(layer.keys) + next * block_keys, block_keys * sizeof(T));
    if (block == 0) continue;
    for (int h = 0; h < layer.num_kv_heads; h++) {
      const int64_t head = block * layer.num_kv_heads + h;
      const T* k = static_cast<const T*>(key.data) + row * key.row_stride + h * key.head_stride;
      const T* v = static_cast<const T*>(value.data) + row * value.row_stride + h * value.head_stride;
      T* k_out = static_cast<T*>(layer.keys) + head * dim * size + offset;
      for (int d = 0; d < dim; d++) k_out[static_cast<int64_t>(d) * size] = k[d];
      std::memcpy(static_cast<T*>(layer.values) + (head * size + offset) * vdim, v, vdim * sizeof(T));
    }
  }
}

// Query rows of one KV head, and the state of their softmax.
struct Tile : OnlineSoftmax<kTileRows, Exponential> {
  int dim, vdim;  // dimensions of a key and a value
  float softcap;
  TileBiases<kTileRows> biases;
  int position[kTileRows];      // the last position that a row sees
  int visible_from[kTileRows];  // the first one
  alignas(64) float query[kTileRows * kMaxDim];  // [row][dim], scaled
  alignas(64) float weights[kTileRows][kLanes];  // of a span: scores, then weights

  void end_sections(RowRange rows) {
    for (int r = rows.first; r < rows.first + rows.count; r++) end_section(r);
  }
};

// Up to 16 consecutive keys, [dim][num_slots], and their values, [count][vdim]. Positions from `count`
// on are visible to no row of the tile. Codes have scales, which need not be aligned.
template <typename T>
struct Span {
  const T *keys, *values;
  int key_stride, value_stride, first_position, num_slots, count;
  const void *key_scales = nullptr, *value_scales = nullptr;
};

// Rows of a register tile: their accumulators fit into the registers, beside the keys or values.
constexpr int kRegisterRows = kPartLanes == kLanes ? 8 : 3;

// Adds the products of one dimension of R queries and of a span's keys to sums.
template <typename T, int R>
[[gnu::always_inline]] inline void add_dimension(const float* query, int stride, const T* keys,
                                                 Part (&sums)[R][kParts]) {
  Part parts[kParts];
#pragma GCC unroll 32
  for (int p = 0; p < kParts; p++) {
    parts[p] = part_at(keys + p * kPartLanes);
    hold_in_register(parts[p]);
  }
#pragma GCC unroll 32
  for (int r = 0; r < R; r++)
#pragma GCC unroll 32
    for (int p = 0; p < kParts; p++) sums[r][p] += query[r * stride] * parts[p];
}

// Scores of R rows with a span, in tile.weights. Even and odd dimensions have separate sums.
template <typename T, int R>
void score(Tile& tile, int first, const Span<T>& span) {
  Part even[R][kParts], odd[R][kParts];
#pragma GCC unroll 32
  for (int r = 0; r < R; r++)
#pragma GCC unroll 32
    for (int p = 0; p < kParts; p++) even[r][p] = odd[r][p] = Part{};
  const float* const query = tile.query + first * tile.dim;
  const auto keys_of = [&](int d) { return span.keys + d * span.key_stride; };
  int d = 0;
  for (; d + 1 < tile.dim; d += 2) {
    add_dimension(query + d, tile.dim, keys_of(d), even);
    add_dimension(query + d + 1, tile.dim, keys_of(d + 1), odd);
  }
  if (d < tile.dim) add_dimension(query + d, tile.dim, keys_of(d), even);
#pragma GCC unroll 32
  for (int r = 0; r < R; r++)
#pragma GCC unroll 32
    for (int p = 0; p < kParts; p++)
      save_part(even[r][p] + odd[r][p], tile.weights[first + r] + p * kPartLanes);
}

// Raises a row's running maximum to its greatest score.
[[gnu::noinline]] inline void raise_maximum(Tile& tile, int r, const Part (&scores)[kParts]) {
  float highest = kNegInf;
  for (const Part& part : scores)
    for (int lane = 0; lane < kPartLanes; lane++) highest = std::max(highest, part[lane]);
  // Otherwise some score is NaN, and none exceeds the maximum.
  if (highest > tile.running_max[r]) tile.raise_maximum(r, highest);
}

// Replaces a row's scores of a span by softmax weights, and adds them to the row's sum. Returns false,
// and leaves the scores, if no position is visible.
inline bool softmax_row(Tile& tile, int r, int first_position, int num_slots) {
  float* const weights = tile.weights[r];
  const int low = tile.visible_from[r] - first_position;
  const int end = std::min(tile.position[r] - first_position + 1, num_slots);
  if (end <= 0 || low >= kLanes) return false;
  if (tile.softcap > 0) {
    const Vec capped = tanh_of(load(weights) * (1.0f / tile.softcap)) * tile.softcap;
    save(capped, weights, kLanes);
  }
  Part s[kParts];
  for (int p = 0; p < kParts; p++) s[p] = part_at(weights + p * kPartLanes);
  if (tile.biases.reach(r, first_position, kLanes))
    for (int p = 0; p < kParts; p++)
      s[p] += part_at(tile.biases.at(r, first_position + p * kPartLanes)) - tile.biases.own(r);
  if (low > 0 || end < kLanes)
    for (int p = 0; p < kParts; p++)
      for (int i = 0; i < kPartLanes; i++) {
        const int lane = p * kPartLanes + i;
        if (lane < low || lane >= end) s[p][i] = kNegInf;
      }
  bool is_higher = false;
  for (const Part& part : s) is_higher |= exceeds(part, Part{} + tile.running_max[r]);
  if (is_higher)
    raise_maximum(tile, r, s);
  else if (tile.running_max[r] == kNegInf)
    return false;
#pragma GCC unroll 32
  for (int p = 0; p < kParts; p++) {
    const Part weight = s[p] == kNegInf ? Part{} : exp_of_part(s[p] - tile.running_max[r]);
    float* const sums = tile.weight_sums[r] + p * kPartLanes;
    const Part sum = part_at(sums) + weight;
    save_part(weight, weights + p * kPartLanes);
    save_part(sum, sums);
  }
  return true;
}

// Adds the weighted values of R rows, C registers of dimensions from `column` on.
template <typename T, int R, int C>
void accumulate_values(Tile& tile, int first, int column, const Span<T>& span) {
  Part acc[R][C];
  float* const out = tile.accumulator(first) + column;
  const int stride = tile.accumulator_stride();
#pragma GCC unroll 32
  for (int r = 0; r < R; r++)
#pragma GCC unroll 32
    for (int c = 0; c < C; c++) acc[r][c] = part_at(out + r * stride + c * kPartLanes);
  for (int k = 0; k < span.count; k++) {
    const T* values = span.values + k * span.value_stride + column;
#pragma GCC unroll 32
    for (int c = 0; c < C; c++) {
      Part v = part_at(values + c * kPartLanes);
      hold_in_register(v);
#pragma GCC unroll 32
      for (int r = 0; r < R; r++) acc[r][c] += tile.weights[first + r][k] * v;
    }
  }
#pragma GCC unroll 32
  for (int r = 0; r < R; r++)
#pragma GCC unroll 32
    for (int c = 0; c < C; c++)
      save_part(acc[r][c], out + r * stride + c * kPartLanes);
}

// Scores, softmax and weighted values of R rows for one span.
template <typename T, int R>
void attend_rows(Tile& tile, int first, const Span<T>& span) {
  score<T, R>(tile, first, span);
  bool any = false;
  for (int r = first; r < first + R; r++) {
    const bool sees = softmax_row(tile, r, span.first_position, span.num_slots);
    if (!sees) std::memset(tile.weights[r], 0, sizeof(tile.weights[r]));
    any |= sees;
  }
  if (!any) return;
  constexpr int kColumns = R > 4 ? 2 : 4;
  int column = 0;
  for (; column + kColumns * kPartLanes <= tile.padded_vdim; column += kColumns * kPartLanes)
    accumulate_values<T, R, kColumns>(tile, first, column, span);
  for (; column < tile.padded_vdim; column += kPartLanes)
    accumulate_values<T, R, 1>(tile, first, column, span);
}

// At most R rows of a tile.
template <typename T, int R>
void attend_last_rows(Tile& tile, RowRange rows, const Span<T>& span) {
  if constexpr (R > 0) {
    if (rows.count == R) return attend_rows<T, R>(tile, rows.first, span);
    attend_last_rows<T, R - 1>(tile, rows, span);
  }
}

// Updates rows of a tile by one span, a register tile at a time.
template <typename T>
void attend_span(Tile& tile, RowRange rows, const Span<T>& span) {
  for (; rows.count >= kRegisterRows; rows.first += kRegisterRows, rows.count -= kRegisterRows)
    attend_rows<T, kRegisterRows>(tile, rows.first, span);
  attend_last_rows<T, kRegisterRows - 1>(tile, rows, span);
}

// A float32 copy of a span: of one that is not in whole vectors, that several register tiles read, or
// that holds codes.
struct SpanCopy {
  alignas(64) float keys[kMaxDim * kLanes];
  alignas(64) float values[kMaxDim * kLanes];

  template <typename T>
  Span<float> take(const Span<T>& span, const Tile& tile) {
    float key_scales[kLanes] = {}, value_scales[kLanes] = {};
    if constexpr (kIsCode<T>) {
      std::memcpy(key_scales, span.key_scales, span.num_slots * sizeof(float));
      std::memcpy(value_scales, span.value_scales, span.count * sizeof(float));
    }
    copy_rows(span.keys, span.key_stride, tile.dim, span.num_slots, keys, kLanes,
              [&](auto x, int, int slot) { return x * scales_at(x, key_scales + slot); });
    copy_rows(span.values, span.value_stride, span.count, tile.vdim, values, tile.padded_vdim,
              [&](auto x, int slot, int) { return x * value_scales[slot]; });
    return {keys,           values,     kLanes, tile.padded_vdim, span.first_position,
            span.num_slots, span.count};
  }

 private:
  static Part scales_at(Part, const float* scales) { return part_at(scales); }
  static float scales_at(float, const float* scales) { return *scales; }

  // Calls scaled(code, row, index in the row) for codes; other values are copied.
  template <typename T, class Scaled>
  static void copy_rows(const T* from, int stride, int num_rows, int width, float* to, int padded,
                        const Scaled& scaled) {
    for (int row = 0; row < num_rows; row++, from += stride, to += padded) {
      int i = 0;
      for (; i + kPartLanes <= width; i += kPartLanes) {
        Part part = part_at(from + i);
        if constexpr (kIsCode<T>) part = scaled(part, row, i);
        save_part(part, to + i);
      }
      for (; i < width; i++) {
        to[i] = widen(from[i]);
        if constexpr (kIsCode<T>) to[i] = scaled(to[i], row, i);
      }
      for (; i < padded; i++) to[i] = 0.0f;
    }
  }
};

template <typename T>
void attend_span_or_copy(Tile& tile, RowRange rows, const Span<T>& span, SpanCopy& copy) {
  if constexpr (!kIsCode<T>) {
    const bool is_whole = span.num_slots == kLanes && tile.vdim == tile.padded_vdim;
    const bool widens_once = sizeof(T) == sizeof(float) || rows.count <= kRegisterRows;
    if (is_whole && widens_once) return attend_span(tile, rows, span);
  }
  attend_span(tile, rows, copy.take(span, tile));
}

// Blocks are scattered over the pool, so the hardware prefetcher cannot predict the next one.
template <typename T>
[[gnu::always_inline]] inline void prefetch_block(const Tile& tile, const Layer& layer, int64_t head) {
  const int64_t keys = head_size<T>(layer.block_size, tile.dim);
  const int64_t values = head_size<T>(layer.block_size, tile.vdim);
  prefetch<0>(static_cast<const T*>(layer.keys) + head * keys, keys * sizeof(T));
  prefetch<0>(static_cast<const T*>(layer.values) + head * values, values * sizeof(T));
}

// Attends from rows of a tile to a segment's positions, span by span.
template <typename T>
void attend_context(Tile& tile, RowRange rows, const Layer& layer, const Step& step, int segment,
                    int kv_head, Positions positions, SpanCopy& copy) {
  const int size = layer.block_size;
  const int last = std::min(tile.position[rows.first + rows.count - 1], positions.end - 1);
  const int earliest = std::max(tile.visible_from[rows.first], positions.begin);
  const auto head_in = [&](int block) {
    const int64_t id = step.tables[step.table_offset[segment] + block];
    return id * layer.num_kv_heads + kv_head;
  };
  for_spans<kLanes>(earliest, last, size, [&](int base, int num_slots) {
    const int block = base / size, offset = base % size;
    const int64_t head = head_in(block);
    if (offset == 0 && block < last / size) prefetch_block<T>(tile, layer, head_in(block + 1));
    const int count = std::min(last - base + 1, num_slots);
    const T* keys = static_cast<const T*>(layer.keys) + head * head_size<T>(size, tile.dim);
    const T* values = static_cast<const T*>(layer.values) + head * head_size<T>(size, tile.vdim);
    Span<T> span{keys + offset, values + offset * tile.vdim, size, tile.vdim, base, num_slots, count};
    if constexpr (kIsCode<T>) {
      span.key_scales = keys + size * tile.dim + offset * sizeof(float);
      span.value_scales = values + size * tile.vdim + offset * sizeof(float);
    }
    attend_span_or_copy(tile, rows, span, copy);
    if ((base + count) % kSectionSlots == 0) tile.end_sections(rows);
  });
}

// Attention of one KV head of a layer in one step.
template <typename T>
class Head {
 public:
  Head(Tile& tile, SpanCopy& copy, const Layer& layer, const Step& step, int kv_head,
       const Rows& query, const Rows& value, const RowTerms& terms, float scale)
      : tile_(tile),
        copy_(copy),
        layer_(layer),
        step_(step),
        kv_head_(kv_head),
        per_kv_(layer.num_heads / layer.num_kv_heads),
        query_(query),
        value_(value),
        terms_(terms),
        scale_(scale) {}

  // Computes a piece and calls write(row, head, sums) for each result.
  template <class Write>
  void attend_piece(const Piece& piece, const Write& write) {
    // With a window, rows see different positions of the prefix.
    const bool has_prefix = piece.num_shared > 0 && layer_.window == 0;
    if (has_prefix && piece.num_items * per_kv_ <= kTileRows) return attend_group(piece, write);
    int index = 0;
    for (int item = piece.first_item; item < piece.first_item + piece.num_items; item++)
      for_tiles(item, [&](int segment, int token, int count) {
        if (step_.reads_any(step_.first_row[segment] + token, count))
          attend_tile(piece, index, segment, token, count, write);
        index += count;
      });
  }

 private:
  // Calls f(segment, first token, number of tokens) for the tiles of an item.
  template <class F>
  void for_tiles(int item, const F& f) const {
    const int segment = step_.item_segment[item], begin = step_.item_token[item];
    const int num_tokens = std::min(step_.num_tokens[segment] - begin, step_.item_size);
    const int tokens_per_tile = kTileRows / per_kv_;
    const int num_tiles = (num_tokens + tokens_per_tile - 1) / tokens_per_tile;
    const int tile_size = (num_tokens + num_tiles - 1) / num_tiles;
    for (int at = 0, count; at < num_tokens; at += count) {
      const int64_t row = step_.first_row[segment] + begin + at;
      count = std::min(tile_size, num_tokens - at);
      count = num_tile_tokens<T>(layer_, value_, kv_head_, row, count);
      f(segment, begin + at, count);
    }
  }

  // Tokens of a segment, and the rows of the tile that hold all of their heads: row rows.first + i is
  // that of token first + i / per_kv_.
  struct Tokens {
    int segment, first, count;
    RowRange rows;
    int index;  // number of the first token within the piece's group
  };

  // Computes at most kTileRows query rows. `index` is the number of the first token within the piece's
  // group.
  template <class Write>
  void attend_tile(const Piece& piece, int index, int segment, int first_token, int num_tokens,
                   const Write& write) {
    const Tokens tokens{segment, first_token, num_tokens, {0, num_tokens * per_kv_}, index};
    add(tokens);
    attend_positions(tokens.rows, segment, piece.positions());
    finish(piece, tokens, write);
  }

  // Computes items of one token each. The positions of their shared prefix are read once.
  template <class Write>
  void attend_group(const Piece& piece, const Write& write) {
    const auto tokens_of = [&](int i) -> Tokens {
      const int item = piece.first_item + i;
      return {step_.item_segment[item], step_.item_token[item], 1, {i * per_kv_, per_kv_}, i};
    };
    for (int i = 0; i < piece.num_items; i++) add(tokens_of(i));
    const auto [begin, end] = piece.positions();
    attend_positions({0, piece.num_items * per_kv_}, step_.item_segment[piece.first_item],
                     {begin, std::min(end, piece.num_shared)});
    for (int i = 0; i < piece.num_items; i++) {
      const Tokens tokens = tokens_of(i);
      attend_positions(tokens.rows, tokens.segment, {std::max(begin, piece.num_shared), end});
      finish(piece, tokens, write);
    }
  }

  // Copies the queries of tokens into the tile, and resets the state of their softmax.
  void add(const Tokens& tokens) {
    for (int i = 0; i < tokens.rows.count; i++) {
      const int r = tokens.rows.first + i, token = tokens.first + i / per_kv_;
      const int64_t row = step_.first_row[tokens.segment] + token;
      const int head = kv_head_ * per_kv_ + i % per_kv_;
      const T* q = static_cast<const T*>(query_.data) + row * query_.row_stride +
                   head * query_.head_stride;
      for (int d = 0; d < tile_.dim; d++) tile_.query[r * tile_.dim + d] = widen(q[d]) * scale_;
      tile_.position[r] = step_.start[tokens.segment] + token;
      tile_.visible_from[r] = first_visible(layer_, tile_.position[r]);
      tile_.biases.take<T>(r, layer_, terms_, row, head, tile_.position[r]);
      tile_.begin(r);
    }
  }

  void attend_positions(RowRange rows, int segment, Positions positions) {
    const auto attend_pools = [&](auto element) {
      attend_context<decltype(element)>(tile_, rows, layer_, step_, segment, kv_head_, positions,
                                        copy_);
    };
    if (layer_.kv_format == kPlainPools)
      attend_pools(T{});
    else
      with_codes(layer_, attend_pools);
  }

  // Writes the results of tokens, or keeps the sums of a section until all sections are merged.
  template <class Write>
  void finish(const Piece& piece, const Tokens& tokens, const Write& write) {
    for (int i = 0; i < tokens.rows.count; i++) {
      const int token = i / per_kv_, head = kv_head_ * per_kv_ + i % per_kv_;
      piece.finish(step_.first_row[tokens.segment] + tokens.first + token, tokens.index + token, head,
                   tile_.merged(tokens.rows.first + i), write);
    }
  }

  Tile& tile_;
  SpanCopy& copy_;
  const Layer& layer_;
  const Step& step_;
  const int kv_head_, per_kv_;
  const Rows &query_, &value_;
  const RowTerms& terms_;
  const float scale_;
};

// Stores this step's keys and values, and attends: query [num_rows][num_heads][dim], key and value
// [num_rows][num_kv_heads][dim], out [num_rows][num_heads][vdim]. out_stride counts elements. The
// caller ends the phase with a barrier.
template <typename T>
void attend(Team& team, const Layer& layer, const Step& step, const Rows& query, const Rows& key,
            const Rows& value, const RowTerms& terms, T* out, int64_t out_stride, float scale,
            float softcap) {
  if (!layer.is_shared) {
    if (layer.kv_format == kPlainPools)
      store<T>(team, layer, step, key, value);
    else
      with_codes(layer,
                 [&](auto code) { store_codes<decltype(code), T>(team, layer, step, key, value); });
    team.barrier();
  }
  static thread_local Tile tile;
  static thread_local SpanCopy copy;
  tile.dim = layer.head_dim;
  tile.vdim = layer.value_head_dim;
  tile.padded_vdim = padded_dim(layer);
  tile.softcap = softcap;
  tile.biases.begin(layer, terms);
  const auto write = [&](int64_t row, int head, const RowSums& sums) {
    T* o = out + row * out_stride + head * layer.value_head_dim;
    const float factor = averaging_factor<Exponential>(layer, terms, row, head, sums);
    for (int d = 0; d < layer.value_head_dim; d++) narrow(sums.values[d] * factor, o[d]);
  };
  attend_pieces<Exponential>(
      team, layer, step,
      [&](const Piece& piece, int kv_head, const PieceOfHead&) {
        Head<T>(tile, copy, layer, step, kv_head, query, value, terms, scale)
            .attend_piece(piece, write);
      },
      write);
}

}  // namespace
