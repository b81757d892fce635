// The selective scan of Mamba-1: each channel has its own state of `num_keys` numbers.
//
// 16 channels are one vector, and their states stay in the L1 cache for all tokens of a text. Sums over
// keys have a fixed order, so a row's bits depend on its own text alone. Called by recurrence.cpp.

#pragma once

#include "recurrent/recurrence.h"

namespace {

// SelectiveScanArgs in recurrence.py.
struct SelectiveScan {
  const void* inputs;   // [total_rows, num_channels]
  const void* steps;    // the same
  const void* keys;     // [total_rows, num_keys]
  const void* queries;  // the same
  const void* gates;    // [total_rows, num_channels], or null
  const float* decays;  // [tile, num_keys, 16], none above 0
  const float* skips;   // [num_channels], or null
  const float* biases;  // [num_channels], of steps, or null
  float* states;        // [block, tile, num_keys, 16]
  void* out;            // [total_rows, num_channels]
  int64_t input_stride, step_stride, key_stride, query_stride, gate_stride;
  int32_t num_channels;
  int32_t num_keys;
  int32_t is_bf16;
};

// log(1 + y) for 0 <= y <= 1, by the series of atanh(y / (2 + y)), with an error below 1e-8.
inline Vec log1p_of(Vec y) {
  const Vec s = y / (y + 2.0f), squared = s * s;
  Vec sum = squared * (1.0f / 13.0f) + 1.0f / 11.0f;
  sum = sum * squared + 1.0f / 9.0f;
  sum = sum * squared + 1.0f / 7.0f;
  sum = sum * squared + 1.0f / 5.0f;
  sum = sum * squared + 1.0f / 3.0f;
  sum = sum * squared + 1.0f;
  return s * sum * 2.0f;
}

// log(1 + exp(x)), without overflow.
inline Vec softplus_of(Vec x) {
  const Vec positive = x > 0.0f ? x : Vec{};
  return positive + log1p_of(exp_of(x > 0.0f ? -x : x));
}

// Advances the states of 16 channels, [num_keys, 16], by one token; returns queries · states.
template <typename T>
inline Vec advance(float* states, const float* decays, const T* keys, const T* queries, Vec step,
                   Vec added, int num_keys) {
  Part steps[kParts], parts[kParts], sums[kParts] = {};
  std::memcpy(steps, &step, sizeof step);
  std::memcpy(parts, &added, sizeof added);
  for (int key = 0; key < num_keys; key++) {
    const Part factor = Part{} + widen(keys[key]), query = Part{} + widen(queries[key]);
    for (int p = 0; p < kParts; p++) {
      float* at = states + key * kLanes + p * kPartLanes;
      const Part decay = exp_of_part(part_at(decays + key * kLanes + p * kPartLanes) * steps[p]);
      const Part v = part_at(at) * decay + factor * parts[p];
      save_part(v, at);
      sums[p] += query * v;
    }
  }
  Vec out;
  std::memcpy(&out, sums, sizeof out);
  return out;
}

// Scans the tokens of a text with the states of 16 channels in a buffer.
template <typename T>
inline void scan_channels(const SelectiveScan& s, const RecurrentTexts& texts, int text, int tile,
                          float* buffer) {
  const int num_tiles = (s.num_channels + kLanes - 1) / kLanes;
  const int64_t tile_size = int64_t(s.num_keys) * kLanes;
  const auto saved = [&](int block) {
    return s.states + (int64_t(block) * num_tiles + tile) * tile_size;
  };
  if (texts.source[text] < 0)
    std::memset(buffer, 0, tile_size * sizeof(float));
  else
    std::memcpy(buffer, saved(texts.source[text]), tile_size * sizeof(float));
  const int first = tile * kLanes, count = lanes_at(first, s.num_channels);
  const float* decays = s.decays + tile * tile_size;
  const Vec bias = s.biases ? load_any(s.biases + first, count) : Vec{};
  const Vec skip = s.skips ? load_any(s.skips + first, count) : Vec{};
  const auto at = [](const void* rows, int64_t index) {
    return static_cast<const T*>(rows) + index;
  };
  int cut = texts.cuts[text];
  for (int index = 0; index < texts.num_rows[text]; index++) {
    const int64_t row = texts.first_row[text] + index;
    const Vec input = load_any(at(s.inputs, row * s.input_stride + first), count);
    const Vec step =
        softplus_of(load_any(at(s.steps, row * s.step_stride + first), count) + bias);
    Vec out = advance(buffer, decays, at(s.keys, row * s.key_stride),
                      at(s.queries, row * s.query_stride), step, step * input, s.num_keys);
    out = multiply_add(input, skip, out);
    if (s.gates) {
      const Vec gate = load_any(at(s.gates, row * s.gate_stride + first), count);
      out *= gate * sigmoid_of(gate);
    }
    save(out, static_cast<T*>(s.out) + row * s.num_channels + first, count);
    for (; cut < texts.cuts[text + 1] && texts.cut_row[cut] == index + 1; cut++)
      std::memcpy(saved(texts.cut_block[cut]), buffer, tile_size * sizeof(float));
  }
}

template <typename T>
inline void selective_scan(const SelectiveScan& s, const RecurrentTexts& texts) {
  const int num_tiles = (s.num_channels + kLanes - 1) / kLanes;
  const int64_t num_items = int64_t(texts.num_texts) * num_tiles;
#pragma omp parallel if (num_items > 1 && num_items * s.num_keys > 256)
  {
    std::vector<Vec> buffer(s.num_keys);
#pragma omp for schedule(dynamic, 4)
    for (int64_t item = 0; item < num_items; item++)
      scan_channels<T>(s, texts, static_cast<int>(item / num_tiles),
                       static_cast<int>(item % num_tiles),
                       reinterpret_cast<float*>(buffer.data()));
  }
}

}  // namespace
