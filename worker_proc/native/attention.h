// Attention over a paged KV cache, in place, by all threads of a parallel region.
//
// A row's result depends on its query and its context alone: never on the rows, chunks or requests
// that it is computed with, since scores are summed in the order of the head's dimensions and
// contexts in the order of positions.
//
// Pools: keys [block][kv_head][dim][slot], so that 16 keys are scored at once without a horizontal
// sum; values [block][kv_head][slot][dim]. Block 0 is the null block and is never written.

#pragma once

#include "team.h"
#include "vec.h"

extern "C" {

// What one layer keeps from step to step.
struct Layer {
  void* keys;
  void* values;
  int32_t num_heads, num_kv_heads, head_dim, value_head_dim;
  int32_t block_size;
  int32_t window;  // 0: none
  int32_t is_bf16;
  int32_t has_pairs;  // the layout is that of attention_pairs.h
};

// One step, shared by its layers. Segment s computes num_tokens[s] tokens, which lie in the packed
// row from first_row[s] and in their text from start[s]; its block b is tables[table_offset[s] + b],
// for those blocks that the layer's window shows to any of its tokens. Offsets may be negative.
struct Step {
  int32_t num_rows, num_items, item_size, num_groups;
  const int64_t* slots;
  const int32_t *first_row, *num_tokens, *start, *table_offset, *tables;
  // Items share the work: item_size tokens of a segment, from item_token[i] on.
  const int32_t *item_segment, *item_token;
  // Group g is the items from group_item[g] to group_item[g + 1]: one item, or whole segments whose
  // first group_shared[g] positions, a multiple of 64, are in the same blocks.
  const int32_t *group_item, *group_shared;
};

// Strides in elements; the last dimension is contiguous.
struct Rows {
  const void* data;
  int64_t row_stride, head_stride;
};
}

namespace {

constexpr int kMaxDim = 512;
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

// Some query rows of one KV head, with the state of their softmax.
struct Tile {
  int num_rows, dim, vdim, padded_vdim, window;
  float softcap;
  int position[kTileRows];
  float top[kTileRows], sum[kTileRows];
  alignas(64) float query[kTileRows * kMaxDim];
  alignas(64) float out[kTileRows * kMaxDim];
  alignas(64) float weight[kTileRows][kLanes];
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

template <typename T>
void attend_context(Tile& tile, const Layer& layer, const Step& step, int segment, int kv_head,
                    Padding<T>& padding) {
  const int size = layer.block_size;
  const int last = tile.position[tile.num_rows - 1];
  const int visible_from = tile.window ? tile.position[0] - tile.window + 1 : 0;
  const int earliest = visible_from > 0 ? visible_from : 0;
  const auto head_in = [&](int block) {
    const int64_t id = step.tables[step.table_offset[segment] + block];
    return id * layer.num_kv_heads + kv_head;
  };
  for (int block = earliest / size; block <= last / size; block++) {
    const int64_t head = head_in(block);
    if (block < last / size) prefetch_block<T>(tile, layer, head_in(block + 1));
    for (int offset = 0; offset < size; offset += kLanes) {
      const int base = block * size + offset;
      const int num_slots = size - offset < kLanes ? size - offset : kLanes;
      if (base > last) break;
      if (base + num_slots <= earliest) continue;
      const int count = last - base + 1 < num_slots ? last - base + 1 : num_slots;
      Span<T> span{static_cast<const T*>(layer.keys) + head * tile.dim * size + offset,
                   static_cast<const T*>(layer.values) + (head * size + offset) * tile.vdim,
                   size, tile.vdim, base, num_slots, count};
      padding.pad(span, tile);
      attend_span(tile, span);
    }
  }
}

// Computes the tokens first_token.. of a segment for one KV head: at most kTileRows query rows.
template <typename T>
void attend_tile(Tile& tile, Padding<T>& padding, const Layer& layer, const Step& step, int segment,
                 int first_token, int num_tokens, int kv_head, const Rows& query, T* out,
                 int64_t out_stride, float scale) {
  const int per_kv = layer.num_heads / layer.num_kv_heads;
  tile.num_rows = num_tokens * per_kv;
  for (int r = 0; r < tile.num_rows; r++) {
    const int token = first_token + r / per_kv, head = kv_head * per_kv + r % per_kv;
    const int64_t row = step.first_row[segment] + token;
    const T* q = static_cast<const T*>(query.data) + row * query.row_stride +
                 head * query.head_stride;
    for (int d = 0; d < tile.dim; d++) tile.query[r * tile.dim + d] = widen(q[d]) * scale;
    tile.position[r] = step.start[segment] + token;
    tile.top[r] = kNegInf;
    tile.sum[r] = 0.0f;
  }
  std::memset(tile.out, 0, sizeof(float) * tile.num_rows * tile.padded_vdim);
  attend_context(tile, layer, step, segment, kv_head, padding);
  for (int r = 0; r < tile.num_rows; r++) {
    const int token = first_token + r / per_kv, head = kv_head * per_kv + r % per_kv;
    const int64_t row = step.first_row[segment] + token;
    T* o = out + row * out_stride + head * tile.vdim;
    const float factor = 1.0f / tile.sum[r];
    for (int d = 0; d < tile.vdim; d++) narrow(tile.out[r * tile.padded_vdim + d] * factor, o[d]);
  }
}

// Calls f(segment, first token, tokens) for the tiles of an item.
template <class F>
void for_tiles(const Step& step, int item, int tokens_per_tile, const F& f) {
  const int segment = step.item_segment[item], begin = step.item_token[item];
  const int num_tokens = std::min(step.num_tokens[segment] - begin, step.item_size);
  const int num_tiles = (num_tokens + tokens_per_tile - 1) / tokens_per_tile;
  const int tile_size = (num_tokens + num_tiles - 1) / num_tiles;
  for (int at = 0; at < num_tokens; at += tile_size)
    f(segment, begin + at, std::min(tile_size, num_tokens - at));
}

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
  tile.padded_vdim = (tile.vdim + kLanes - 1) / kLanes * kLanes;
  tile.window = layer.window;
  tile.softcap = softcap;
  const int tokens_per_tile = kTileRows / (layer.num_heads / layer.num_kv_heads);
  // The longest chunks begin first, and their last tiles, with the longest contexts, before others.
  const int total = step.num_items * layer.num_kv_heads;
  for (int64_t taken; (taken = team.take(total)) < total;) {
    const int place = total - 1 - static_cast<int>(taken), kv_head = place % layer.num_kv_heads;
    for_tiles(step, place / layer.num_kv_heads, tokens_per_tile,
              [&](int segment, int token, int count) {
                attend_tile<T>(tile, padding, layer, step, segment, token, count, kv_head, query,
                               out, out_stride, scale);
              });
  }
}

}  // namespace
