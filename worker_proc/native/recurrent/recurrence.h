// Layers with a recurrent state: causal convolutions, and linear attention such as Mamba-2 and the
// gated delta rule.
//
// A state is read from a block of its pool and is saved to blocks after certain rows of the text
// (cuts). Tokens are processed in order, so a row's bits do not depend on how a text is divided into
// steps, on other texts or on the number of threads. Called by recurrence.cpp.

#pragma once

#include <vector>

#include "pointwise.h"

namespace {

// The texts of one step; RecurrentTexts in recurrence.py.
struct RecurrentTexts {
  const int32_t* first_row;
  const int32_t* num_rows;
  const int32_t* source;     // the block with the state before the first row; -1: zeros
  const int32_t* cuts;       // [num_texts + 1]: the first cut of each text
  const int32_t* cut_row;    // of each cut, the number of rows after which the state is saved; ascending
  const int32_t* cut_block;  // of each cut, the block
  int32_t num_texts;
  int32_t total_rows;
};

// ConvolutionArgs in recurrence.py.
struct Convolution {
  const void* rows;  // [total_rows, num_channels]
  void* windows;     // [block, size - 1, num_channels]: the last rows of a text, in order
  void* out;         // [total_rows, num_channels]
  const float* weight;  // [size, num_channels]
  const float* bias;    // [num_channels], or null
  int64_t row_stride;
  int32_t num_channels;
  int32_t size;
  int32_t activation;  // of pointwise.h; -1: none
  int32_t is_bf16;
};

// HeadRowsArgs in recurrence.py.
struct HeadRows {
  const void* rows;  // [num_rows, num_heads, dim]
  float* out;
  int64_t row_stride;
  int32_t num_rows;
  int32_t num_heads;
  int32_t dim;
  int32_t is_bf16;
  int32_t normalizes;  // rows are scaled to unit length
  float epsilon;
  float factor;
};

// ScanArgs in recurrence.py. A head's state is a matrix of num_keys rows and num_values columns.
struct Scan {
  const float* queries;  // [total_rows, num_key_heads, num_keys]
  const float* keys;     // the same
  const void* values;    // [total_rows, num_heads, num_values]
  const float* decays;   // [total_rows, num_heads], or [total_rows, num_heads, num_keys]
  const float* rates;    // [total_rows, num_heads]
  const float* skips;    // [num_heads], or null
  float* states;         // [block, num_heads, tile, num_keys, 16]
  void* out;             // [total_rows, num_heads, num_values]
  int64_t value_stride;
  int32_t num_heads;
  int32_t num_key_heads;
  int32_t num_keys;
  int32_t num_values;
  int32_t has_key_decays;  // a decay for each key, instead of one for each head
  int32_t corrects;        // the delta rule: key · state is subtracted from the value
  int32_t is_bf16;
};

// The text of each row.
inline std::vector<int32_t> texts_of_rows(const RecurrentTexts& texts) {
  std::vector<int32_t> out(texts.total_rows);
  for (int32_t text = 0; text < texts.num_texts; text++)
    std::fill_n(out.begin() + texts.first_row[text], texts.num_rows[text], text);
  return out;
}

constexpr int kMaxTaps = 16;
constexpr int kSpan = 1024;  // channels of a work item

// Convolves some channels of one row, which is row number `index` of its text in this step.
template <typename T>
inline void convolve_row(const Convolution& c, const T* window, int row, int index, int first,
                         int count) {
  const T* taps[kMaxTaps];
  int num_missing = 0;  // taps before the text's first token
  for (int j = 0; j < c.size; j++) {
    const int back = c.size - 1 - j;
    if (back <= index)
      taps[j] = static_cast<const T*>(c.rows) + (row - back) * c.row_stride;
    else if (window)
      taps[j] = window + static_cast<int64_t>(j + index) * c.num_channels;
    else
      num_missing = j + 1;
  }
  T* out = static_cast<T*>(c.out) + static_cast<int64_t>(row) * c.num_channels;
  for_vectors(count, [&](int i, auto lanes) {
    const int channel = first + i;
    Vec sum = c.bias ? load_any(c.bias + channel, lanes) : splat(0.0f);
    for (int j = num_missing; j < c.size; j++)
      sum = multiply_add(load_any(taps[j] + channel, lanes),
                         load_any(c.weight + j * c.num_channels + channel, lanes), sum);
    sum = rounded(sum, T{});
    if (c.activation >= 0) sum = activation_of<T>(sum, c.activation);
    save(sum, out + channel, lanes);
  });
}

// Saves some channels of a text's last rows after each of its cuts.
template <typename T>
inline void save_windows(const Convolution& c, const RecurrentTexts& texts, int text, int first,
                         int count) {
  const int taps = c.size - 1;
  const int64_t block_size = static_cast<int64_t>(taps) * c.num_channels;
  T* windows = static_cast<T*>(c.windows);
  std::vector<T> before(static_cast<size_t>(taps) * count);  // a cut may save to its block
  if (texts.source[text] >= 0)
    for (int j = 0; j < taps; j++)
      std::memcpy(&before[static_cast<size_t>(j) * count],
                  windows + texts.source[text] * block_size + j * int64_t(c.num_channels) + first,
                  count * sizeof(T));
  for (int cut = texts.cuts[text]; cut < texts.cuts[text + 1]; cut++)
    for (int j = 0; j < taps; j++) {
      const int index = texts.cut_row[cut] - taps + j;
      const T* from = index < 0 ? &before[static_cast<size_t>(taps + index) * count]
                                : static_cast<const T*>(c.rows) +
                                      (texts.first_row[text] + index) * c.row_stride + first;
      std::memcpy(
          windows + texts.cut_block[cut] * block_size + j * int64_t(c.num_channels) + first, from,
          count * sizeof(T));
    }
}

template <typename T>
inline void convolve(const Convolution& c, const RecurrentTexts& texts) {
  const std::vector<int32_t> text_of = texts_of_rows(texts);
  const int num_spans = (c.num_channels + kSpan - 1) / kSpan;
  const int64_t num_items = int64_t(texts.total_rows) * num_spans;
  const int64_t num_saved = int64_t(texts.num_texts) * num_spans;
  const auto count_at = [&](int first) { return std::min(kSpan, c.num_channels - first); };
#pragma omp parallel if (int64_t(texts.total_rows) * c.num_channels > 16384)
  {
#pragma omp for schedule(static)
    for (int64_t item = 0; item < num_items; item++) {
      const int row = static_cast<int>(item / num_spans);
      const int first = static_cast<int>(item % num_spans) * kSpan;
      const int text = text_of[row], source = texts.source[text];
      const T* window = source < 0 ? nullptr
                                   : static_cast<const T*>(c.windows) +
                                         int64_t(source) * (c.size - 1) * c.num_channels;
      convolve_row(c, window, row, row - texts.first_row[text], first, count_at(first));
    }
#pragma omp for schedule(static)
    for (int64_t item = 0; item < num_saved; item++) {
      const int first = static_cast<int>(item % num_spans) * kSpan;
      save_windows<T>(c, texts, static_cast<int>(item / num_spans), first, count_at(first));
    }
  }
}

// Converts a row of a head to float32, optionally scaled to unit length, times a factor.
template <typename T>
inline void prepare_head(const T* x, float* y, const HeadRows& heads) {
  float factor = heads.factor;
  if (heads.normalizes) {
    Vec squares = splat(0.0f);
    for_vectors(heads.dim, [&](int i, auto count) {
      const Vec v = load_any(x + i, count);
      squares += v * v;
    });
    const float sum = fold(squares, [](Vec a, Vec b) { return a + b; });
    factor *= 1.0f / std::sqrt(sum + heads.epsilon);
  }
  for_vectors(heads.dim,
              [&](int i, auto count) { save(load_any(x + i, count) * factor, y + i, count); });
}

constexpr int kChains = 4;  // independent accumulators, which hide the latency of additions

// Calls f(key, chain) for all keys of a tile. Keys are distributed over the chains in turn.
template <class F>
[[gnu::always_inline]] inline void for_keys(int num_keys, const F& f) {
  int key = 0;
  for (; key + kChains <= num_keys; key += kChains)
    for (int chain = 0; chain < kChains; chain++) f(key + chain, chain);
  for (; key < num_keys; key++) f(key, 0);
}

// The accumulators of 16 columns.
struct Sums {
  Part chains[kChains][kParts] = {};

  Vec total() const {
    Vec out;
    for (int p = 0; p < kParts; p++) {
      const Part sum = (chains[0][p] + chains[1][p]) + (chains[2][p] + chains[3][p]);
      std::memcpy(reinterpret_cast<char*>(&out) + p * sizeof sum, &sum, sizeof sum);
    }
    return out;
  }
};

// Multiplies a tile, [num_keys, 16], by its decays; returns keys · tile.
template <bool kKeyDecays>
inline Vec decay_and_read(float* tile, const float* keys, const float* decays, int num_keys) {
  Sums sums;
  for_keys(num_keys, [&](int key, int chain) {
    const Part decay = Part{} + decays[kKeyDecays ? key : 0], factor = Part{} + keys[key];
    for (int p = 0; p < kParts; p++) {
      float* at = tile + key * kLanes + p * kPartLanes;
      const Part v = part_at(at) * decay;
      save_part(v, at);
      sums.chains[chain][p] += factor * v;
    }
  });
  return sums.total();
}

// Adds keys ⊗ added to a tile; returns queries · tile.
inline Vec add_and_read(float* tile, const float* keys, const float* queries, Vec added,
                        int num_keys) {
  Part parts[kParts];
  std::memcpy(parts, &added, sizeof added);
  Sums sums;
  for_keys(num_keys, [&](int key, int chain) {
    const Part factor = Part{} + keys[key], query = Part{} + queries[key];
    for (int p = 0; p < kParts; p++) {
      float* at = tile + key * kLanes + p * kPartLanes;
      const Part v = part_at(at) + factor * parts[p];
      save_part(v, at);
      sums.chains[chain][p] += query * v;
    }
  });
  return sums.total();
}

// Multiplies a tile by its decays, adds keys ⊗ added, and returns queries · tile.
template <bool kKeyDecays>
inline Vec decay_add_and_read(float* tile, const float* keys, const float* queries,
                              const float* decays, Vec added, int num_keys) {
  Part parts[kParts];
  std::memcpy(parts, &added, sizeof added);
  Sums sums;
  for_keys(num_keys, [&](int key, int chain) {
    const Part decay = Part{} + decays[kKeyDecays ? key : 0];
    const Part factor = Part{} + keys[key], query = Part{} + queries[key];
    for (int p = 0; p < kParts; p++) {
      float* at = tile + key * kLanes + p * kPartLanes;
      const Part v = part_at(at) * decay + factor * parts[p];
      save_part(v, at);
      sums.chains[chain][p] += query * v;
    }
  });
  return sums.total();
}

// Scans the tokens of a text with a tile of one head's state, [num_keys, 16 columns], which stays in
// the L1 cache.
template <typename T, bool kCorrects, bool kKeyDecays>
inline void scan_tile(const Scan& s, const RecurrentTexts& texts, int text, int head, int tile,
                      float* buffer) {
  const int num_tiles = (s.num_values + kLanes - 1) / kLanes;
  const int64_t tile_size = int64_t(s.num_keys) * kLanes;
  const auto saved = [&](int block) {
    return s.states + ((int64_t(block) * s.num_heads + head) * num_tiles + tile) * tile_size;
  };
  if (texts.source[text] < 0)
    std::memset(buffer, 0, tile_size * sizeof(float));
  else
    std::memcpy(buffer, saved(texts.source[text]), tile_size * sizeof(float));
  const int key_head = head / (s.num_heads / s.num_key_heads);
  const int first = tile * kLanes, count = lanes_at(first, s.num_values);
  int cut = texts.cuts[text];
  for (int index = 0; index < texts.num_rows[text]; index++) {
    const int64_t row = texts.first_row[text] + index, at = row * s.num_heads + head;
    const float* keys = s.keys + (row * s.num_key_heads + key_head) * s.num_keys;
    const float* queries = s.queries + (row * s.num_key_heads + key_head) * s.num_keys;
    const float* decays = s.decays + (kKeyDecays ? at * s.num_keys : at);
    const T* values = static_cast<const T*>(s.values) + row * s.value_stride +
                      int64_t(head) * s.num_values + first;
    const Vec value = load_any(values, count);
    Vec out;
    if (kCorrects) {
      const Vec known = decay_and_read<kKeyDecays>(buffer, keys, decays, s.num_keys);
      out = add_and_read(buffer, keys, queries, (value - known) * s.rates[at], s.num_keys);
    } else {
      out = decay_add_and_read<kKeyDecays>(buffer, keys, queries, decays, value * s.rates[at],
                                           s.num_keys);
    }
    if (s.skips) out = multiply_add(value, splat(s.skips[head]), out);
    save(out, static_cast<T*>(s.out) + at * s.num_values + first, count);
    for (; cut < texts.cuts[text + 1] && texts.cut_row[cut] == index + 1; cut++)
      std::memcpy(saved(texts.cut_block[cut]), buffer, tile_size * sizeof(float));
  }
}

template <typename T, bool kCorrects, bool kKeyDecays>
inline void scan(const Scan& s, const RecurrentTexts& texts) {
  const int num_tiles = (s.num_values + kLanes - 1) / kLanes;
  const int64_t num_items = int64_t(texts.num_texts) * s.num_heads * num_tiles;
#pragma omp parallel if (num_items > 1 && num_items * s.num_keys > 2048)
  {
    std::vector<Vec> buffer(s.num_keys);
#pragma omp for schedule(dynamic, 4)
    for (int64_t item = 0; item < num_items; item++) {
      const int64_t pair = item / num_tiles;
      scan_tile<T, kCorrects, kKeyDecays>(
          s, texts, static_cast<int>(pair / s.num_heads), static_cast<int>(pair % s.num_heads),
          static_cast<int>(item % num_tiles), reinterpret_cast<float*>(buffer.data()));
    }
  }
}

}  // namespace
