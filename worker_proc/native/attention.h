// Attention over a paged KV cache, in place, by all threads of a parallel region.
//
// A row's result depends on its query and its context alone: never on the rows, chunks or requests
// that it is computed with, since scores are summed in the order of the head's dimensions and
// contexts in the order of positions, by sections (sections.h).
//
// Pools: keys [block][kv_head][dim][slot], so that 16 keys are scored at once without a horizontal
// sum; values [block][kv_head][slot][dim]. Block 0 is the null block and is never written.

#pragma once

#include "sections.h"

namespace {

constexpr int kTileRows = 32;

// Inlined by force: GCC takes a call that only prefetches for one without effect, and drops it.
template <int kWrite>
[[gnu::always_inline]] inline void prefetch(const void* begin, int64_t num_bytes) {
  const char* p = static_cast<const char*>(begin);
  for (int64_t i = 0; i < num_bytes; i += 64) __builtin_prefetch(p + i, kWrite);
}

template <typename T>
void store(Team& team, const Layer& layer, const Step& step, const Rows& key, const Rows& value) {
  const int dim = layer.head_dim, vdim = layer.value_head_dim, size = layer.block_size;
  const int64_t block_keys = static_cast<int64_t>(layer.num_kv_heads) * dim * size;
  const int last_row = static_cast<int>(team.last(step.num_rows));
  for (int row = static_cast<int>(team.first(step.num_rows)); row < last_row; row++) {
    const int64_t block = step.slots[row] / size, offset = step.slots[row] % size;
    // A key's dimensions lie in as many cache lines as a block has: unless they are fetched ahead,
    // the stores wait for them one after another.
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

struct Exponential {
  float operator()(float x) const { return exp_of(splat(x))[0]; }
};

// Some query rows of one KV head, with the state of their softmax over the present section.
struct Tile {
  int num_rows, dim, vdim, padded_vdim, window;
  float softcap;
  int position[kTileRows];
  float top[kTileRows], sum[kTileRows];
  EndedSections<kTileRows, Exponential> ended;
  alignas(64) float query[kTileRows * kMaxDim];
  alignas(64) float out[kTileRows * kMaxDim];
  alignas(64) float weight[kTileRows][kLanes];

  void begin_section(int r) {
    top[r] = kNegInf;
    sum[r] = 0.0f;
    std::memset(out + r * padded_vdim, 0, sizeof(float) * padded_vdim);
  }

  RowSums present(int r) { return {top[r], sum[r], out + r * padded_vdim}; }

  void end_section() {
    for (int r = 0; r < num_rows; r++) {
      ended.add(r, present(r), padded_vdim);
      begin_section(r);
    }
  }
};

// Up to 16 consecutive keys and their values. Lanes from `num_slots` on hold no key of the text;
// keys from `count` on are seen by no row of the tile.
template <typename T>
struct Span {
  const T *keys, *values;
  int key_stride, value_stride, first_position, num_slots, count;
};

template <typename T, int R>
void score(Tile& tile, int first, const Span<T>& span) {
  Vec even[R], odd[R];
  for (int r = 0; r < R; r++) even[r] = odd[r] = splat(0.0f);
  const float* query = tile.query + first * tile.dim;
  int d = 0;
  for (; d + 1 < tile.dim; d += 2) {
    const Vec k0 = load(span.keys + d * span.key_stride);
    const Vec k1 = load(span.keys + (d + 1) * span.key_stride);
    for (int r = 0; r < R; r++) {
      even[r] += query[r * tile.dim + d] * k0;
      odd[r] += query[r * tile.dim + d + 1] * k1;
    }
  }
  if (d < tile.dim) {
    const Vec k0 = load(span.keys + d * span.key_stride);
    for (int r = 0; r < R; r++) even[r] += query[r * tile.dim + d] * k0;
  }
  for (int r = 0; r < R; r++) {
    const Vec sum = even[r] + odd[r];
    std::memcpy(tile.weight[first + r], &sum, sizeof(sum));
  }
}

// Turns a row's scores into weights; false where it sees none of the keys.
bool weigh(Tile& tile, int r, int first_position, int num_slots) {
  Vec s = load(tile.weight[r]);
  if (tile.softcap > 0) s = tanh_of(s * (1.0f / tile.softcap)) * tile.softcap;
  const int low = (tile.window ? tile.position[r] - tile.window + 1 : 0) - first_position;
  const int high = tile.position[r] - first_position;
  const int end = high + 1 < num_slots ? high + 1 : num_slots;
  if (low > 0 || end < kLanes) {
    const VecInt lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    s = (lane < low) | (lane >= end) ? splat(kNegInf) : s;
  }
  const float highest = fold(s, [](Vec a, Vec b) { return a > b ? a : b; });
  if (highest == kNegInf) return false;
  if (highest > tile.top[r]) {
    const bool empty = tile.top[r] == kNegInf;
    const float factor = empty ? 0.0f : exp_of(splat(tile.top[r] - highest))[0];
    float* out = tile.out + r * tile.padded_vdim;
    for (int i = 0; i < tile.padded_vdim; i++) out[i] *= factor;
    tile.sum[r] *= factor;
    tile.top[r] = highest;
  }
  const Vec p = s == kNegInf ? splat(0.0f) : exp_of(s - tile.top[r]);
  std::memcpy(tile.weight[r], &p, sizeof(p));
  tile.sum[r] += fold(p, [](Vec a, Vec b) { return a + b; });
  return true;
}

template <typename T, int R, int C>
void add_values(Tile& tile, int first, int column, const Span<T>& span) {
  Vec acc[R][C];
  float* out = tile.out + first * tile.padded_vdim + column;
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) acc[r][c] = load(out + r * tile.padded_vdim + c * kLanes);
  for (int k = 0; k < span.count; k++) {
    const T* values = span.values + k * span.value_stride + column;
    for (int c = 0; c < C; c++) {
      const Vec v = load(values + c * kLanes);
      for (int r = 0; r < R; r++) acc[r][c] += tile.weight[first + r][k] * v;
    }
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++)
      std::memcpy(out + r * tile.padded_vdim + c * kLanes, &acc[r][c], sizeof(Vec));
}

template <typename T, int R>
void attend_rows(Tile& tile, int first, const Span<T>& span) {
  score<T, R>(tile, first, span);
  bool any = false;
  for (int r = first; r < first + R; r++) {
    const bool sees = weigh(tile, r, span.first_position, span.num_slots);
    if (!sees) std::memset(tile.weight[r], 0, sizeof(tile.weight[r]));
    any |= sees;
  }
  if (!any) return;
  constexpr int kColumns = R > 4 ? 2 : 4;
  int column = 0;
  for (; column + kColumns * kLanes <= tile.padded_vdim; column += kColumns * kLanes)
    add_values<T, R, kColumns>(tile, first, column, span);
  for (; column < tile.padded_vdim; column += kLanes) add_values<T, R, 1>(tile, first, column, span);
}

template <typename T>
void attend_span(Tile& tile, const Span<T>& span) {
  int first = 0;
  for (; first + 8 <= tile.num_rows; first += 8) attend_rows<T, 8>(tile, first, span);
  switch (tile.num_rows - first) {
    case 1: return attend_rows<T, 1>(tile, first, span);
    case 2: return attend_rows<T, 2>(tile, first, span);
    case 3: return attend_rows<T, 3>(tile, first, span);
    case 4: return attend_rows<T, 4>(tile, first, span);
    case 5: return attend_rows<T, 5>(tile, first, span);
    case 6: return attend_rows<T, 6>(tile, first, span);
    case 7: return attend_rows<T, 7>(tile, first, span);
  }
}

// Room for spans whose keys or values do not come in vectors of 16.
template <typename T>
struct Padding {
  T keys[kMaxDim * kLanes];
  T values[kMaxDim * kLanes];

  void pad(Span<T>& span, const Tile& tile) {
    if (span.num_slots < kLanes) {
      std::memset(keys, 0, sizeof(T) * tile.dim * kLanes);
      for (int d = 0; d < tile.dim; d++)
        std::memcpy(keys + d * kLanes, span.keys + d * span.key_stride, sizeof(T) * span.num_slots);
      span.keys = keys;
      span.key_stride = kLanes;
    }
    if (tile.vdim != tile.padded_vdim) {
      std::memset(values, 0, sizeof(T) * tile.padded_vdim * kLanes);
      for (int k = 0; k < span.count; k++)
        std::memcpy(values + k * tile.padded_vdim, span.values + k * tile.vdim,
                    sizeof(T) * tile.vdim);
      span.values = values;
      span.value_stride = tile.padded_vdim;
    }
  }
};

// Blocks lie anywhere, so the hardware does not foresee the next one.
template <typename T>
[[gnu::always_inline]] inline void prefetch_block(const Tile& tile, const Layer& layer, int64_t head) {
  const int64_t size = layer.block_size;
  prefetch<0>(static_cast<const T*>(layer.keys) + head * tile.dim * size, tile.dim * size * sizeof(T));
  prefetch<0>(static_cast<const T*>(layer.values) + head * size * tile.vdim,
           tile.vdim * size * sizeof(T));
}

// Spans begin with a block or a section, and every 16 positions from there on.
template <typename T>
void attend_context(Tile& tile, const Layer& layer, const Step& step, int segment, int kv_head,
                    Positions positions, Padding<T>& padding) {
  const int size = layer.block_size;
  const int last = std::min(tile.position[tile.num_rows - 1], positions.end - 1);
  const int visible_from = tile.window ? tile.position[0] - tile.window + 1 : 0;
  const int earliest = std::max(visible_from, positions.begin);
  const auto head_in = [&](int block) {
    const int64_t id = step.tables[step.table_offset[segment] + block];
    return id * layer.num_kv_heads + kv_head;
  };
  int num_slots;
  for (int base = std::max(earliest / size * size, earliest / kSectionSlots * kSectionSlots);
       base <= last; base += num_slots) {
    const int block = base / size, offset = base % size;
    num_slots = std::min({kLanes, size - offset, kSectionSlots - base % kSectionSlots});
    if (base + num_slots <= earliest) continue;
    const int64_t head = head_in(block);
    if (offset == 0 && block < last / size) prefetch_block<T>(tile, layer, head_in(block + 1));
    const int count = std::min(last - base + 1, num_slots);
    Span<T> span{static_cast<const T*>(layer.keys) + head * tile.dim * size + offset,
                 static_cast<const T*>(layer.values) + (head * size + offset) * tile.vdim,
                 size, tile.vdim, base, num_slots, count};
    padding.pad(span, tile);
    attend_span(tile, span);
    if ((base + count) % kSectionSlots == 0) tile.end_section();
  }
}

// One KV head of a layer in one step.
template <typename T>
class Head {
 public:
  Head(Tile& tile, Padding<T>& padding, const Layer& layer, const Step& step, int kv_head,
       const Rows& query, const Rows& value, float scale)
      : tile_(tile),
        padding_(padding),
        layer_(layer),
        step_(step),
        kv_head_(kv_head),
        per_kv_(layer.num_heads / layer.num_kv_heads),
        query_(query),
        value_(value),
        scale_(scale) {}

  template <class Write>
  void attend_piece(const Piece& piece, const Write& write) {
    int index = 0;
    for (int item = piece.first_item; item < piece.first_item + piece.num_items; item++)
      for_tiles(item, [&](int segment, int token, int count) {
        attend_tile(piece, index, segment, token, count, write);
        index += count;
      });
  }

 private:
  // Calls f(segment, first token, tokens) for the tiles of an item.
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

  // Computes at most kTileRows query rows: tokens of a segment. The first one has the number
  // `index` in its group.
  template <class Write>
  void attend_tile(const Piece& piece, int index, int segment, int first_token, int num_tokens,
                   const Write& write) {
    const int64_t first_row = step_.first_row[segment] + first_token;
    tile_.num_rows = num_tokens * per_kv_;
    for (int r = 0; r < tile_.num_rows; r++) {
      const int token = r / per_kv_, head = kv_head_ * per_kv_ + r % per_kv_;
      const T* q = static_cast<const T*>(query_.data) + (first_row + token) * query_.row_stride +
                   head * query_.head_stride;
      for (int d = 0; d < tile_.dim; d++) tile_.query[r * tile_.dim + d] = widen(q[d]) * scale_;
      tile_.position[r] = step_.start[segment] + first_token + token;
      tile_.ended.clear(r);
      tile_.begin_section(r);
    }
    attend_context(tile_, layer_, step_, segment, kv_head_, piece.positions(), padding_);
    for (int r = 0; r < tile_.num_rows; r++) {
      const int token = r / per_kv_, head = kv_head_ * per_kv_ + r % per_kv_;
      const RowSums sums = tile_.ended.with_present(r, tile_.present(r), tile_.padded_vdim);
      if (piece.is_whole())
        write(first_row + token, head, sums);
      else
        piece.keep(index + token, head, sums);
    }
  }

  Tile& tile_;
  Padding<T>& padding_;
  const Layer& layer_;
  const Step& step_;
  const int kv_head_, per_kv_;
  const Rows &query_, &value_;
  const float scale_;
};

// Stores keys and values, and attends; the caller ends the phase.
template <typename T>
void attend(Team& team, const Layer& layer, const Step& step, const Rows& query, const Rows& key,
            const Rows& value, T* out, int64_t out_stride, float scale, float softcap) {
  store<T>(team, layer, step, key, value);
  team.barrier();
  static thread_local Tile tile;
  static thread_local Padding<T> padding;
  tile.dim = layer.head_dim;
  tile.vdim = layer.value_head_dim;
  tile.padded_vdim = padded_dim(layer);
  tile.window = layer.window;
  tile.softcap = softcap;
  const auto write = [&](int64_t row, int head, const RowSums& sums) {
    T* o = out + row * out_stride + head * layer.value_head_dim;
    const float factor = 1.0f / sums.weights;
    for (int d = 0; d < layer.value_head_dim; d++) narrow(sums.values[d] * factor, o[d]);
  };
  attend_pieces<Exponential>(
      team, layer, step,
      [&](const Piece& piece, int kv_head) {
        Head<T>(tile, padding, layer, step, kv_head, query, value, scale).attend_piece(piece, write);
      },
      write);
}

}  // namespace
