// Attention in bfloat16 by products of pairs: AMX tiles, or AVX-512's dot products.
//
// As in attention.h, a row's result depends on its query and its context alone. A context is read
// in spans of 64 positions, each from a multiple of 64 on. The weights of a span are rounded to
// bfloat16; the sums are float32.
//
// Pools, for heads of a multiple of 32 dimensions and blocks of a multiple of 16 slots: keys
// [block][kv_head][slot / 16][dim / 2][16][2], values [block][kv_head][slot / 2][dim][2]. Both are
// in units of four bytes; 16 of them, side by side, are a vector and a row of an AMX tile.

#pragma once

#include "attention.h"
#include "products.h"

#ifdef __AVX512BF16__
#define TROIKA_HAS_PAIRS 1

namespace {

constexpr int kSpanSlots = 64;
constexpr int kSpanGroups = kSpanSlots / kLanes;
constexpr int kPairRows = 16;          // query rows of a tile
constexpr int kGroupPairs = kLanes / 2;

// Some query rows of one KV head, with the state of their softmax.
struct PairTile {
  int num_rows, dim, vdim, window;
  float scale, softcap;
  int position[kPairRows];
  float top[kPairRows], sum[kPairRows];
  alignas(64) Unit query[kPairRows][kMaxDim / 2];
  alignas(64) float scores[kPairRows][kSpanSlots];
  alignas(64) Bf16 weights[kPairRows][kSpanSlots];
  alignas(64) float out[kPairRows][kMaxDim];
  alignas(64) Unit last_values[kGroupPairs * kMaxDim];  // of a group that is not full
};

// The groups of 16 slots of one span.
struct PairSpan {
  int base, count;
  int first_group, num_groups;  // values of others are not read: no row sees them
  const Unit *keys[kSpanGroups], *values[kSpanGroups];
};

template <int R>
void score_with_vectors(PairTile& tile, int first, const PairSpan& span) {
  Vec sums[R][kSpanGroups];
  for (int r = 0; r < R; r++)
    for (int g = 0; g < kSpanGroups; g++) sums[r][g] = Vec{};
  for (int d = 0; d < tile.dim / 2; d++) {
    VecBits keys[kSpanGroups];
#pragma GCC unroll 4
    for (int g = 0; g < kSpanGroups; g++)
      keys[g] = *reinterpret_cast<const VecBits*>(span.keys[g] + d * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int g = 0; g < kSpanGroups; g++)
        sums[r][g] = add_product<Bf16>(sums[r][g], tile.query[first + r][d], keys[g]);
  }
  for (int r = 0; r < R; r++)
    for (int g = 0; g < kSpanGroups; g++)
      std::memcpy(tile.scores[first + r] + g * kLanes, &sums[r][g], sizeof(Vec));
}

template <int R, int C>
void add_with_vectors(PairTile& tile, int first, int column, const PairSpan& span) {
  Vec sums[R][C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) sums[r][c] = load(tile.out[first + r] + column + c * kLanes);
  for (int g = span.first_group; g < span.num_groups; g++)
    for (int pair = 0; pair < kGroupPairs; pair++) {
      const Unit* values = span.values[g] + pair * tile.vdim + column;
      VecBits v[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) v[c] = *reinterpret_cast<const VecBits*>(values + c * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        Unit weights;
        std::memcpy(&weights, tile.weights[first + r] + g * kLanes + 2 * pair, sizeof(Unit));
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) sums[r][c] = add_product<Bf16>(sums[r][c], weights, v[c]);
      }
    }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++)
      std::memcpy(tile.out[first + r] + column + c * kLanes, &sums[r][c], sizeof(Vec));
}

template <int R>
void add_rows_with_vectors(PairTile& tile, int first, const PairSpan& span) {
  int column = 0;
  for (; column + 4 * kLanes <= tile.vdim; column += 4 * kLanes)
    add_with_vectors<R, 4>(tile, first, column, span);
  for (; column < tile.vdim; column += 2 * kLanes) add_with_vectors<R, 2>(tile, first, column, span);
}

// Calls f(number of rows as a constant, first row) for parts of a tile.
template <class F>
void for_parts(int num_rows, const F& f) {
  int first = 0;
  for (; first + 6 <= num_rows; first += 6) f(std::integral_constant<int, 6>{}, first);
  switch (num_rows - first) {
    case 1: return f(std::integral_constant<int, 1>{}, first);
    case 2: return f(std::integral_constant<int, 2>{}, first);
    case 3: return f(std::integral_constant<int, 3>{}, first);
    case 4: return f(std::integral_constant<int, 4>{}, first);
    case 5: return f(std::integral_constant<int, 5>{}, first);
  }
}

#ifdef __AMX_BF16__

// Tiles 0 to 3 are sums; 4 is queries, 5 weights of 16 slots, 6 keys and 7 values.
struct alignas(64) PairTileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 32, 64, 64};
  uint8_t num_rows[16] = {16, 16, 16, 16, 16, 16, 16, kGroupPairs};

  explicit PairTileConfig(int count) {
    for (int i = 0; i < 6; i++) num_rows[i] = static_cast<uint8_t>(count);
  }
};

void score_with_tiles(PairTile& tile, const PairSpan& span) {
  finish_stores();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int d = 0; d < tile.dim / 2; d += kLanes) {
    _tile_loadd(4, tile.query[0] + d, sizeof(tile.query[0]));
    _tile_loadd(6, span.keys[0] + d * kLanes, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(6, span.keys[1] + d * kLanes, 64);
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(6, span.keys[2] + d * kLanes, 64);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(6, span.keys[3] + d * kLanes, 64);
    _tile_dpbf16ps(3, 4, 6);
  }
  _tile_stored(0, tile.scores[0], sizeof(tile.scores[0]));
  _tile_stored(1, tile.scores[0] + kLanes, sizeof(tile.scores[0]));
  _tile_stored(2, tile.scores[0] + 2 * kLanes, sizeof(tile.scores[0]));
  _tile_stored(3, tile.scores[0] + 3 * kLanes, sizeof(tile.scores[0]));
}

void add_with_tiles(PairTile& tile, const PairSpan& span) {
  finish_stores();
  const int64_t stride = sizeof(tile.out[0]), value_stride = tile.vdim * sizeof(Unit);
  for (int column = 0; column < tile.vdim; column += 2 * kLanes) {
    _tile_loadd(0, tile.out[0] + column, stride);
    _tile_loadd(1, tile.out[0] + column + kLanes, stride);
    for (int g = span.first_group; g < span.num_groups; g++) {
      _tile_loadd(5, tile.weights[0] + g * kLanes, sizeof(tile.weights[0]));
      _tile_loadd(7, span.values[g] + column, value_stride);
      _tile_dpbf16ps(0, 5, 7);
      _tile_loadd(7, span.values[g] + column + kLanes, value_stride);
      _tile_dpbf16ps(1, 5, 7);
    }
    _tile_stored(0, tile.out[0] + column, stride);
    _tile_stored(1, tile.out[0] + column + kLanes, stride);
  }
}

#endif

// Turns a row's scores of a span into weights.
inline void weigh_row(PairTile& tile, int r, const PairSpan& span) {
  const int low = (tile.window ? tile.position[r] - tile.window + 1 : 0) - span.base;
  const int end = std::min(tile.position[r] - span.base + 1, span.count);
  __m512 s[kSpanGroups];
  float highest = kNegInf;
  for (int g = 0; g < kSpanGroups; g++) {
    Vec v = load(tile.scores[r] + g * kLanes) * tile.scale;
    if (tile.softcap > 0) v = tanh_of(v * (1.0f / tile.softcap)) * tile.softcap;
    const int from = std::clamp(low - g * kLanes, 0, kLanes);
    const int to = std::clamp(end - g * kLanes, 0, kLanes);
    const uint32_t seen = ((1u << to) - 1) & ~((1u << from) - 1);
    s[g] = _mm512_mask_mov_ps(_mm512_set1_ps(kNegInf), static_cast<__mmask16>(seen), (__m512)v);
    highest = std::max(highest, _mm512_reduce_max_ps(s[g]));
  }
  if (highest > tile.top[r]) {
    if (tile.top[r] != kNegInf) {
      const float factor = exp_of(splat(tile.top[r] - highest))[0];
      tile.sum[r] *= factor;
      for (int i = 0; i < tile.vdim; i += kLanes) {
        const Vec scaled = load(tile.out[r] + i) * factor;
        std::memcpy(tile.out[r] + i, &scaled, sizeof(Vec));
      }
    }
    tile.top[r] = highest;
  }
  Vec total{};
  for (int g = 0; g < kSpanGroups; g++) {
    const Vec p = (Vec)s[g] == kNegInf ? splat(0.0f) : exp_of((Vec)s[g] - tile.top[r]);
    total += p;
    const __m256i half = (__m256i)_mm512_cvtneps_pbh((__m512)p);
    _mm256_store_si256(reinterpret_cast<__m256i*>(tile.weights[r] + g * kLanes), half);
  }
  tile.sum[r] += fold(total, [](Vec a, Vec b) { return a + b; });
}

// Replaces the values of a group that is not full: what follows is not the text's, and may be NaN.
inline void mask_values(PairTile& tile, PairSpan& span) {
  const int used = span.count % kLanes;
  if (used == 0) return;
  const Unit*& values = span.values[span.num_groups - 1];
  for (int pair = 0; pair < kGroupPairs; pair++)
    for (int d = 0; d < tile.vdim; d++) {
      const Unit both = values[pair * tile.vdim + d];
      const int num = used - 2 * pair;
      tile.last_values[pair * tile.vdim + d] = num >= 2 ? both : num == 1 ? both & 0xffff : 0;
    }
  values = tile.last_values;
}

inline void attend_pair_context(PairTile& tile, const Layer& layer, const Step& step, int segment,
                                int kv_head) {
  const int size = layer.block_size, groups_per_block = size / kLanes;
  const int last = tile.position[tile.num_rows - 1];
  const int visible_from = tile.window ? tile.position[0] - tile.window + 1 : 0;
  const int earliest = visible_from > 0 ? visible_from : 0;
  const int64_t group_keys = tile.dim / 2 * kLanes, group_values = kGroupPairs * tile.vdim;
  const int64_t table = step.table_offset[segment];  // may be negative
  for (int base = earliest / kSpanSlots * kSpanSlots; base <= last; base += kSpanSlots) {
    PairSpan span;
    span.base = base;
    span.count = std::min(kSpanSlots, last - base + 1);
    span.first_group = std::max(0, earliest / kLanes - base / kLanes);
    span.num_groups = (span.count + kLanes - 1) / kLanes;
    for (int g = 0; g < kSpanGroups; g++) {
      // Where a group is past the context, or in a block that the window has passed, the keys of
      // another one are scored, and masked.
      const int wanted = base / kLanes + g;
      const int group = std::clamp(wanted, earliest / size * groups_per_block, last / kLanes);
      const int64_t block = step.tables[table + group / groups_per_block];
      const int64_t head = block * layer.num_kv_heads + kv_head;
      const int64_t place = head * groups_per_block + group % groups_per_block;
      span.keys[g] = static_cast<const Unit*>(layer.keys) + place * group_keys;
      span.values[g] = static_cast<const Unit*>(layer.values) + place * group_values;
    }
    mask_values(tile, span);
#ifdef __AMX_BF16__
    if (troika_has_tiles) {
      score_with_tiles(tile, span);
      for (int r = 0; r < tile.num_rows; r++) weigh_row(tile, r, span);
      add_with_tiles(tile, span);
      continue;
    }
#endif
    for_parts(tile.num_rows, [&](auto count, int first) {
      score_with_vectors<decltype(count)::value>(tile, first, span);
    });
    for (int r = 0; r < tile.num_rows; r++) weigh_row(tile, r, span);
    for_parts(tile.num_rows, [&](auto count, int first) {
      add_rows_with_vectors<decltype(count)::value>(tile, first, span);
    });
  }
}

// Computes the tokens first_token.. of a segment for one KV head: at most kPairRows query rows.
inline void attend_pair_tile(PairTile& tile, const Layer& layer, const Step& step, int segment,
                             int first_token, int num_tokens, int kv_head, const Rows& query,
                             Bf16* out, int64_t out_stride) {
  const int per_kv = layer.num_heads / layer.num_kv_heads;
  tile.num_rows = num_tokens * per_kv;
  for (int r = 0; r < tile.num_rows; r++) {
    const int token = first_token + r / per_kv, head = kv_head * per_kv + r % per_kv;
    const int64_t row = step.first_row[segment] + token;
    const Bf16* q = static_cast<const Bf16*>(query.data) + row * query.row_stride +
                    head * query.head_stride;
    std::memcpy(tile.query[r], q, tile.dim * sizeof(Bf16));
    std::memset(tile.out[r], 0, tile.vdim * sizeof(float));
    tile.position[r] = step.start[segment] + token;
    tile.top[r] = kNegInf;
    tile.sum[r] = 0.0f;
  }
#ifdef __AMX_BF16__
  if (troika_has_tiles) {
    const PairTileConfig config(tile.num_rows);
    finish_stores();
    _tile_loadconfig(&config);
  }
#endif
  attend_pair_context(tile, layer, step, segment, kv_head);
#ifdef __AMX_BF16__
  if (troika_has_tiles) _tile_release();
#endif
  for (int r = 0; r < tile.num_rows; r++) {
    const int token = first_token + r / per_kv, head = kv_head * per_kv + r % per_kv;
    Bf16* o = out + (step.first_row[segment] + token) * out_stride + head * tile.vdim;
    const float factor = 1.0f / tile.sum[r];
    for (int d = 0; d < tile.vdim; d += kLanes) {
      // A sum of zeros may have either sign.
      const Vec v = load(tile.out[r] + d) * factor + 0.0f;
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(o + d),
                          (__m256i)_mm512_cvtneps_pbh((__m512)v));
    }
  }
}

// Keys and values of this step's tokens; two tokens of one pair of slots may be stored at once.
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

// Stores keys and values, and attends; the caller ends the phase.
inline void attend_pairs(Team& team, const Layer& layer, const Step& step, const Rows& query,
                         const Rows& key, const Rows& value, Bf16* out, int64_t out_stride,
                         float scale, float softcap) {
  store_pairs(team, layer, step, key, value);
  team.barrier();
  static thread_local PairTile tile;
  tile.dim = layer.head_dim;
  tile.vdim = layer.value_head_dim;
  tile.window = layer.window;
  tile.scale = scale;
  tile.softcap = softcap;
  const int tokens_per_tile = kPairRows / (layer.num_heads / layer.num_kv_heads);
  for_items(team, layer, step, tokens_per_tile, [&](int segment, int token, int count, int kv_head) {
    attend_pair_tile(tile, layer, step, segment, token, count, kv_head, query, out, out_stride);
  });
}

}  // namespace

#endif

namespace {

// Attends over a layer's pools in their layout.
template <typename T>
void attend_any(Team& team, const Layer& layer, const Step& step, const Rows& query,
                const Rows& key, const Rows& value, T* out, int64_t out_stride, float scale,
                float softcap) {
#ifdef TROIKA_HAS_PAIRS
  if constexpr (sizeof(T) == sizeof(Bf16))
    if (layer.has_pairs)
      return attend_pairs(team, layer, step, query, key, value, out, out_stride, scale, softcap);
#endif
  attend(team, layer, step, query, key, value, out, out_stride, scale, softcap);
}

}  // namespace
