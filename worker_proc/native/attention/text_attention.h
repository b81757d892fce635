// Bidirectional attention of encoders: a token also attends to later tokens of its text.
//
// Each text is computed in one step, so there is no KV cache. Keys and values are copied, head by head,
// into strips of 16 positions, and the tiles of float_tile.h compute the rows. A row's result depends on
// its own text alone. Called by attention.cpp.

#pragma once

#include <vector>

#include "attention/float_tile.h"

extern "C" {

// Text t has num_tokens[t] tokens, which are the rows from first_row[t] on.
struct WholeTexts {
  int32_t num_texts;
  const int32_t *first_row, *num_tokens;
};
}

namespace {

// The keys and values of one head of a text, as float32.
struct TextStrips {
  std::vector<float> keys, values;  // [strip][dim][16] and [strip][16][padded_vdim]

  template <typename T>
  void take(const T* key, int64_t key_stride, const T* value, int64_t value_stride, int num_tokens,
            const Tile& tile) {
    const int num_strips = (num_tokens + kLanes - 1) / kLanes;
    keys.assign(static_cast<size_t>(num_strips) * tile.dim * kLanes, 0.0f);
    values.assign(static_cast<size_t>(num_strips) * kLanes * tile.padded_vdim, 0.0f);
    for (int token = 0; token < num_tokens; token++) {
      const int64_t strip = token / kLanes, lane = token % kLanes;
      float* k = keys.data() + strip * tile.dim * kLanes + lane;
      for (int d = 0; d < tile.dim; d++) k[d * kLanes] = widen(key[token * key_stride + d]);
      float* v = values.data() + (strip * kLanes + lane) * tile.padded_vdim;
      for (int d = 0; d < tile.vdim; d++) v[d] = widen(value[token * value_stride + d]);
    }
  }

  // The span at `base`, of which some row sees the positions [earliest, last].
  Span<float> span(int base, int earliest, int last, const Tile& tile) const {
    const int first_strip = std::max(earliest - base, 0) / kLanes;
    Span<float> found{{base, first_strip, std::min(last - base + 1, kFloatSpan)},
                      kLanes,
                      tile.padded_vdim,
                      {},
                      {}};
    for (int strip = first_strip; strip < found.extent.num_strips(); strip++) {
      const int64_t number = base / kLanes + strip;
      found.keys[strip] = keys.data() + number * tile.dim * kLanes;
      found.values[strip] = values.data() + number * kLanes * tile.padded_vdim;
    }
    return found;
  }
};

// Computes one KV head of one text. A window of w shows a token its w - 1 neighbours on either side.
template <typename T, class Write>
void attend_text(Tile& tile, TextStrips& strips, const Layer& layer, int kv_head, int first_row,
                 int num_tokens, const Rows& query, const Rows& key, const Rows& value, float scale,
                 const Write& write) {
  const int per_kv = layer.num_heads / layer.num_kv_heads, reach = layer.window;
  const auto at = [&](const Rows& rows, int head) {
    return static_cast<const T*>(rows.data) + first_row * rows.row_stride + head * rows.head_stride;
  };
  strips.take(at(key, kv_head), key.row_stride, at(value, kv_head), value.row_stride, num_tokens,
              tile);
  const int tokens_per_tile = std::max(kTileRows / per_kv, 1);
  for (int begin = 0; begin < num_tokens; begin += tokens_per_tile) {
    const int count = std::min(tokens_per_tile, num_tokens - begin);
    const RowRange rows{0, count * per_kv};
    for (int r = 0; r < rows.count; r++) {
      const int token = begin + r / per_kv;
      const T* q = at(query, kv_head * per_kv + r % per_kv) + token * query.row_stride;
      for (int d = 0; d < tile.dim; d++) tile.query[r * tile.dim + d] = widen(q[d]) * scale;
      tile.position[r] = reach ? std::min(token + reach, num_tokens) - 1 : num_tokens - 1;
      tile.visible_from[r] = reach ? std::max(token - reach + 1, 0) : 0;
      tile.begin(r);
    }
    const int earliest = tile.visible_from[0], last = tile.position[rows.count - 1];
    for (int base = earliest / kFloatSpan * kFloatSpan; base <= last; base += kFloatSpan) {
      attend_span(tile, rows, strips.span(base, earliest, last, tile));
      if ((base + kFloatSpan) % kSectionSlots == 0) tile.end_sections(rows);
    }
    for (int r = 0; r < rows.count; r++)
      write(first_row + begin + r / per_kv, kv_head * per_kv + r % per_kv, tile.merged(r));
  }
}

// Attends: query [num_rows][num_heads][dim], key and value [num_rows][num_kv_heads][dim], out
// [num_rows][num_heads][vdim].
template <typename T>
void attend_texts(const Layer& layer, const WholeTexts& texts, const Rows& query, const Rows& key,
                  const Rows& value, T* out, float scale, float softcap) {
#pragma omp parallel
  {
    static thread_local Tile tile;
    static thread_local TextStrips strips;
    tile.dim = layer.head_dim;
    tile.vdim = layer.value_head_dim;
    tile.padded_vdim = padded_dim(layer);
    tile.softcap = softcap;
    const auto write = [&](int64_t row, int head, const RowSums& sums) {
      T* o = out + (row * layer.num_heads + head) * layer.value_head_dim;
      const float factor = 1.0f / sums.weight_sum;
      for (int d = 0; d < layer.value_head_dim; d++) narrow(sums.values[d] * factor, o[d]);
    };
#pragma omp for schedule(dynamic)
    for (int piece = 0; piece < texts.num_texts * layer.num_kv_heads; piece++) {
      const int text = piece / layer.num_kv_heads, kv_head = piece % layer.num_kv_heads;
      attend_text<T>(tile, strips, layer, kv_head, texts.first_row[text], texts.num_tokens[text],
                     query, key, value, scale, write);
    }
  }
}

}  // namespace
