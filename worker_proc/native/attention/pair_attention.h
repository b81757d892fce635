// Attention in bfloat16 by products of pairs: AVX-512's vdpbf16ps, or AMX tiles.
//
// The layer's pools have the layout of pair_tile.h. This file distributes the query rows of a step over
// tiles, and attend_spans (pair_spans.h) computes a tile. Scores and sums are float32; softmax weights
// are rounded to bfloat16. As in attention.h, a row's result depends on its query and its context
// alone. Entry point: attend_any, called by attention.cpp and decoder.cpp.

#pragma once

#include "attention/pair_spans.h"

#ifdef __AVX512BF16__
#define TROIKA_HAS_PAIRS 1

namespace {

// Query rows of one segment and KV head, and the rows of a tile that hold them. Query row i is head
// i % (heads per KV head) of token i / (heads per KV head).
struct PairQueries {
  int segment, first;  // the segment, and its first query row
  RowRange rows;
  int group_token;  // number of the segment's token 0 within the piece's group
};

// Attention of one KV head of a layer in one step.
class PairHead {
 public:
  PairHead(PairTile& tile, const Layer& layer, const Step& step, int kv_head, const Rows& query,
           const Rows& value, const RowTerms& terms)
      : tile_(tile),
        layer_(layer),
        step_(step),
        kv_head_(kv_head),
        per_kv_(layer.num_heads / layer.num_kv_heads),
        query_(query),
        value_(value),
        terms_(terms) {}

  // Computes a piece and calls write(row, head, sums) for each result. The upcoming row is the first one
  // of the piece that this thread will probably take next.
  template <class Write>
  void attend_piece(const Piece& piece, const UpcomingRow& upcoming, const Write& write) {
    if (piece.num_items == 1)
      attend_item(piece, upcoming, write);
    else
      attend_group(piece, upcoming, write);
  }

  static UpcomingRow first_row(const Layer& layer, const Step& step, const Piece& piece,
                               int kv_head) {
    const int segment = step.item_segment[piece.first_item];
    const int position = step.start[segment] + step.item_token[piece.first_item];
    return row_of(layer, segment, kv_head, position, piece.positions());
  }

 private:
  static UpcomingRow row_of(const Layer& layer, int segment, int kv_head, int position,
                            Positions positions) {
    const int earliest = std::max(first_visible(layer, position), positions.begin);
    const int last = std::min(position, positions.end - 1);
    return {earliest > last ? -1 : segment, kv_head, earliest, last};
  }

  // Computes the tokens of an item. Tiles are filled, and may end between the heads of a token.
  template <class Write>
  void attend_item(const Piece& piece, const UpcomingRow& upcoming, const Write& write) {
    const int item = piece.first_item, segment = step_.item_segment[item];
    const int token = step_.item_token[item];
    const int num_tokens = std::min(step_.num_tokens[segment] - token, step_.item_size);
    const int end = (token + num_tokens) * per_kv_;
    for (int row = token * per_kv_, count; row < end; row += count) {
      count = num_tile_rows(segment, row, std::min(kPairRows, end - row));
      const int first = row / per_kv_, last = (row + count - 1) / per_kv_;
      if (!step_.reads_any(step_.first_row[segment] + first, last - first + 1)) continue;
      if (row + count < end)
        defer_rows(segment, (row + count) / per_kv_, kv_head_);
      else if (upcoming.segment >= 0)
        defer_rows(upcoming.segment, upcoming.last - step_.start[upcoming.segment],
                   upcoming.kv_head);
      attend_tile(piece, {segment, row, {0, count}, -token}, upcoming, write);
      tile_.deferred_lines_per_call = 0;
    }
  }

  // Lets the kernels of the current tile prefetch the queries and values of the next tile's tokens.
  void defer_rows(int segment, int token, int kv_head) {
    constexpr int kLinesPerCall = 8;
    PrefetchQueue& queue = tile_.deferred;
    queue.clear();
    tile_.deferred_lines_per_call = kLinesPerCall;
    const int last = std::min(step_.num_tokens[segment], token + kPairRows / per_kv_ + 2);
    for (token = std::max(token, 0); token < last; token++) {
      const int64_t row = step_.first_row[segment] + token;
      const auto add = [&](const Rows& rows, int head, int size) {
        const int64_t at = row * rows.row_stride + head * rows.head_stride;
        queue.push(static_cast<const Bf16*>(rows.data) + at, size * sizeof(Bf16));
      };
      add(query_, kv_head * per_kv_, per_kv_ * tile_.dim);
      add(value_, kv_head, tile_.vdim);
    }
  }

  // Returns how many query rows of a segment from `first` on, at most `most`, may share a tile.
  int num_tile_rows(int segment, int first, int most) const {
    if (layer_.kv_format != kPlainPools) return most;  // codes are finite
    const int token = first / per_kv_, last_token = (first + most - 1) / per_kv_;
    const int64_t row = step_.first_row[segment] + token;
    const int num_tokens =
        num_tile_tokens<Bf16>(layer_, value_, kv_head_, row, last_token - token + 1);
    return std::min(most, (token + num_tokens) * per_kv_ - first);
  }

  // Computes items of one token each. The positions of their shared prefix are read once.
  template <class Write>
  void attend_group(const Piece& piece, const UpcomingRow& upcoming, const Write& write) {
    const auto queries_of = [&](int i, int first_row) -> PairQueries {
      return {step_.item_segment[piece.first_item + i], 0, {first_row, per_kv_}, i};
    };
    // With a window, rows see different positions of the prefix.
    if (layer_.window || piece.num_items * per_kv_ > kPairRows) {
      for (int i = 0; i < piece.num_items; i++)
        attend_tile(piece, queries_of(i, 0), upcoming, write);
      return;
    }
    for (int i = 0; i < piece.num_items; i++) add_queries(queries_of(i, i * per_kv_));
    const auto [begin, end] = piece.positions();
    const Positions shared{begin, std::min(end, piece.num_shared)};
    const Positions own{std::max(begin, piece.num_shared), end};
    const RowRange rows{0, piece.num_items * per_kv_};
    const bool is_in_cache = defer_own_positions(piece, rows, shared, own);
    attend_spans(tile_, rows, context_of(queries_of(0, 0)), shared);
    tile_.deferred_lines_per_call = 0;
    for (int i = 0; i < piece.num_items; i++) {
      const PairQueries queries = queries_of(i, i * per_kv_);
      UpcomingRow next = upcoming;
      if (i + 1 < piece.num_items) {
        const int segment = step_.item_segment[piece.first_item + i + 1];
        next = row_of(layer_, segment, kv_head_, step_.start[segment], own);
      }
      attend_spans(tile_, queries.rows, context_of(queries), own, next, is_in_cache);
      finish(piece, queries, write);
    }
  }

  // Lets the kernels prefetch each token's own positions while they compute the shared ones, if the own
  // positions are few. Returns whether they will.
  bool defer_own_positions(const Piece& piece, RowRange rows, Positions shared, Positions own) {
    constexpr int kMaxLinesPerCall = 64;
    PrefetchQueue& queue = tile_.deferred;
    queue.clear();
    if (troika_has_tiles) return false;
    for (int item = piece.first_item; item < piece.first_item + piece.num_items; item++) {
      const int segment = step_.item_segment[item];
      const UpcomingRow row = row_of(layer_, segment, kv_head_, step_.start[segment], own);
      if (row.segment < 0) continue;
      if (row.last >= own.begin + kSpanSlots) return false;
      const PairContext context(tile_, layer_, step_, segment, kv_head_);
      context.prefetch(context.span(own.begin, row.earliest, row.last), queue);
    }
    const int num_spans = (shared.end - shared.begin + kSpanSlots - 1) / kSpanSlots;
    const int num_calls = 2 * num_spans * ((rows.count + kMaxRegisterRows - 1) / kMaxRegisterRows);
    if (queue.num_lines() > int64_t{kMaxLinesPerCall} * num_calls) return false;
    tile_.deferred_lines_per_call = static_cast<int>(queue.num_lines() / std::max(num_calls, 1)) + 1;
    return true;
  }

  // Computes at most kPairRows query rows of a segment.
  template <class Write>
  void attend_tile(const Piece& piece, const PairQueries& queries, const UpcomingRow& upcoming,
                   const Write& write) {
    add_queries(queries);
    attend_spans(tile_, queries.rows, context_of(queries), piece.positions(), upcoming);
    finish(piece, queries, write);
  }

  PairContext context_of(const PairQueries& queries) const {
    return PairContext(tile_, layer_, step_, queries.segment, kv_head_);
  }

  // Copies query rows into the tile, and resets the state of their softmax.
  void add_queries(const PairQueries& queries) {
    for (int i = 0; i < queries.rows.count; i++) {
      const int r = queries.rows.first + i, token = (queries.first + i) / per_kv_;
      const int64_t row = step_.first_row[queries.segment] + token;
      const int head = kv_head_ * per_kv_ + (queries.first + i) % per_kv_;
      const Bf16* q = static_cast<const Bf16*>(query_.data) + row * query_.row_stride +
                      head * query_.head_stride;
      std::memcpy(tile_.query(r), q, tile_.dim * sizeof(Bf16));
      if (troika_uses_floats) widen_to_floats(q, tile_.dim, tile_.wide_query(r));
      tile_.position[r] = step_.start[queries.segment] + token;
      tile_.visible_from[r] = first_visible(layer_, tile_.position[r]);
      tile_.biases.take<Bf16>(r, layer_, terms_, row, head, tile_.position[r]);
      tile_.begin(r);
    }
  }

  // Writes the results of rows, or keeps the sums of a section until all sections are merged.
  template <class Write>
  void finish(const Piece& piece, const PairQueries& queries, const Write& write) {
    for (int i = 0; i < queries.rows.count; i++) {
      const int r = queries.rows.first + i, token = (queries.first + i) / per_kv_;
      const int head = kv_head_ * per_kv_ + (queries.first + i) % per_kv_;
      piece.finish(step_.first_row[queries.segment] + token, queries.group_token + token, head,
                   tile_.merged(r), write);
    }
  }

  PairTile& tile_;
  const Layer& layer_;
  const Step& step_;
  const int kv_head_, per_kv_;
  const Rows &query_, &value_;
  const RowTerms& terms_;
};

// Stores the keys and values of this step's tokens. Two threads may store into one pair of slots at the
// same time, since each writes its own half.
inline void store_pairs(Team& team, const Layer& layer, const Step& step, const Rows& key,
                        const Rows& value) {
  const int size = layer.block_size, dim = layer.head_dim, vdim = layer.value_head_dim;
  for (int64_t row = team.first(step.num_rows); row < team.last(step.num_rows); row++) {
    const int64_t block = step.slots[row] / size, slot = step.slots[row] % size;
    if (block == 0) continue;
    for (int h = 0; h < layer.num_kv_heads; h++) {
      const int64_t head = block * layer.num_kv_heads + h;
      const Bf16* k = static_cast<const Bf16*>(key.data) + row * key.row_stride +
                      h * key.head_stride;
      const Bf16* v = static_cast<const Bf16*>(value.data) + row * value.row_stride +
                      h * value.head_stride;
      Unit* keys = static_cast<Unit*>(layer.keys) + head * size * (dim / 2) +
                   slot / kLanes * (dim / 2) * kLanes + slot % kLanes;
      for (int d = 0; d < dim / 2; d++) std::memcpy(keys + d * kLanes, k + 2 * d, sizeof(Unit));
      Bf16* values = static_cast<Bf16*>(layer.values) +
                     (head * size / 2 + slot / 2) * vdim * 2 + slot % 2;
      for (int d = 0; d < vdim; d++) values[2 * d] = v[d];
    }
  }
}

// Stores this step's keys and values, and attends: query [num_rows][num_heads][dim], key and value
// [num_rows][num_kv_heads][dim], out [num_rows][num_heads][vdim]. out_stride counts elements. The
// caller ends the phase with a barrier.
inline void attend_pairs(Team& team, const Layer& layer, const Step& step, const Rows& query,
                         const Rows& key, const Rows& value, const RowTerms& terms, Bf16* out,
                         int64_t out_stride, float scale, float softcap) {
  if (!layer.is_shared) {
    if (layer.kv_format == kPlainPools)
      store_pairs(team, layer, step, key, value);
    else
      with_codes(layer, [&](auto code) {
        store_codes<decltype(code), Bf16>(team, layer, step, key, value);
      });
    team.barrier();
  }
  static thread_local PairTile tile;
  tile.dim = layer.head_dim;
  tile.vdim = tile.padded_vdim = layer.value_head_dim;
  tile.biases.begin(layer, terms);
  tile.scale = scale;
  tile.softcap = softcap;
  tile.prefetch.clear();
  tile.prefetched_keys = nullptr;
  const auto write = [&](int64_t row, int head, const RowSums& sums) {
    Bf16* o = out + row * out_stride + head * layer.value_head_dim;
    const float factor = averaging_factor<PowerOfTwo>(layer, terms, row, head, sums);
    for (int d = 0; d < layer.value_head_dim; d += kLanes) {
      // Adding zero turns -0 into 0.
      const Vec v = load(sums.values + d) * factor + 0.0f;
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(o + d), (__m256i)_mm512_cvtneps_pbh((__m512)v));
    }
  };
  attend_pieces<PowerOfTwo>(
      team, layer, step,
      [&](const Piece& piece, int kv_head, const PieceOfHead& next) {
        UpcomingRow upcoming;
        if (next.exists()) upcoming = PairHead::first_row(layer, step, next.piece(), next.kv_head());
        PairHead(tile, layer, step, kv_head, query, value, terms)
            .attend_piece(piece, upcoming, write);
      },
      write);
}

}  // namespace

#endif

namespace {

// Attends by the kernels for the layout of the layer's pools; the arguments are those of attend_pairs.
template <typename T>
void attend_any(Team& team, const Layer& layer, const Step& step, const Rows& query,
                const Rows& key, const Rows& value, const RowTerms& terms, T* out,
                int64_t out_stride, float scale, float softcap) {
#ifdef TROIKA_HAS_PAIRS
  if constexpr (sizeof(T) == sizeof(Bf16))
    if (layer.has_pairs)
      return attend_pairs(team, layer, step, query, key, value, terms, out, out_stride, scale,
                          softcap);
#endif
  attend(team, layer, step, query, key, value, terms, out, out_stride, scale, softcap);
}

}  // namespace
