// Paged attention in float32, for any head dimension, block size and CPU.
//
// A row's result depends on its query and its context alone, and not on the rows, chunks or requests
// that it is computed with: scores are summed in the order of the head's dimensions, and contexts in
// the order of positions, by sections (sections.h). A tile attends to one span after another
// (float_spans.h, float_tile.h). Requests of a group read the blocks of their shared prefix once. Layout
// of the pools: keys [block][kv_head][dim][slot], values [block][kv_head][slot][vdim]; codes are
// dequantized before they are read (coded_kv.h). Block 0 is the null block and is never written. Called
// by attend_any (pair_attention.h).

#pragma once

#include "attention/float_spans.h"

namespace {

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
      float* const to = tile_.query + r * tile_.dim;
      for_vectors(tile_.dim, [&](int d, auto count) {
        save(load_any(q + d, count) * scale_, to + d, count);
      });
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
    for_vectors(layer.value_head_dim, [&](int d, auto count) {
      save(load(sums.values + d) * factor, o + d, count);
    });
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
