// Recurrences over independent channels: the gated linear recurrence of Griffin (RecurrentGemma), and
// the weighted averages of RWKV.
//
// A channel has one or three numbers of state. 16 channels are one vector, and tokens are processed in
// order, so a row's bits depend on its own text alone. Called by recurrence.cpp.

#pragma once

#include "recurrent/recurrence.h"

namespace {

// GatedRecurrenceArgs in recurrence.py.
struct GatedRecurrence {
  const float* inputs;  // [total_rows, num_channels]
  const float* decays;  // the same
  float* states;        // [block, num_channels]
  float* out;           // [total_rows, num_channels]
  int32_t num_channels;
};

// WeightedAverageArgs in recurrence.py.
struct WeightedAverage {
  const void* keys;      // [total_rows, num_channels]
  const void* values;    // the same
  const float* decays;   // [num_channels], added to the exponent of earlier tokens
  const float* bonuses;  // [num_channels], added to the exponent of a token in its own average
  float* states;         // [block, 3, num_channels]: sum of weighted values, of weights, exponent
  void* out;             // [total_rows, num_channels]
  int32_t num_channels;
  int32_t is_bf16;
};

constexpr float kNoExponent = -1e38f;  // of empty sums

// Calls advance(row, first channel, number of channels, state) for each token of each text, where
// `state` has kNumbers vectors for up to 16 channels. States are [block][kNumbers][num_channels].
template <int kNumbers, class Advance>
inline void scan_texts(const RecurrentTexts& texts, float* states, int num_channels,
                       const Vec (&initial)[kNumbers], const Advance& advance) {
  const int num_tiles = (num_channels + kLanes - 1) / kLanes;
  const int64_t num_items = int64_t(texts.num_texts) * num_tiles;
#pragma omp parallel for schedule(dynamic, 4) if (int64_t(texts.total_rows) * num_channels > 16384)
  for (int64_t item = 0; item < num_items; item++) {
    const int text = static_cast<int>(item / num_tiles);
    const int first = static_cast<int>(item % num_tiles) * kLanes;
    const int count = lanes_at(first, num_channels);
    const auto saved = [&](int block, int number) {
      return states + (int64_t(block) * kNumbers + number) * num_channels + first;
    };
    Vec state[kNumbers];
    for (int n = 0; n < kNumbers; n++)
      state[n] = texts.source[text] < 0 ? initial[n]
                                        : load_any(saved(texts.source[text], n), count);
    int cut = texts.cuts[text];
    for (int index = 0; index < texts.num_rows[text]; index++) {
      advance(int64_t(texts.first_row[text]) + index, first, count, state);
      for (; cut < texts.cuts[text + 1] && texts.cut_row[cut] == index + 1; cut++)
        for (int n = 0; n < kNumbers; n++) save(state[n], saved(texts.cut_block[cut], n), count);
    }
  }
}

inline void gated_recurrence(const GatedRecurrence& g, const RecurrentTexts& texts) {
  const Vec initial[] = {Vec{}};
  const auto advance = [&](int64_t row, int first, int count, Vec (&state)[1]) {
    const int64_t at = row * g.num_channels + first;
    state[0] = multiply_add(load_any(g.decays + at, count), state[0], load_any(g.inputs + at, count));
    save(state[0], g.out + at, count);
  };
  scan_texts(texts, g.states, g.num_channels, initial, advance);
}

inline Vec greater_of(Vec x, Vec y) { return x > y ? x : y; }

// Both sums are relative to exp(exponent), so that weights do not overflow.
template <typename T>
inline void weighted_average(const WeightedAverage& w, const RecurrentTexts& texts) {
  const Vec initial[] = {Vec{}, Vec{}, splat(kNoExponent)};
  const auto advance = [&](int64_t row, int first, int count, Vec (&state)[3]) {
    const int64_t at = row * w.num_channels + first;
    const Vec key = load_any(static_cast<const T*>(w.keys) + at, count);
    const Vec value = load_any(static_cast<const T*>(w.values) + at, count);
    const Vec own = key + load_any(w.bonuses + first, count);
    Vec exponent = greater_of(state[2], own);
    Vec before = exp_of(state[2] - exponent), added = exp_of(own - exponent);
    const Vec sum = multiply_add(before, state[0], added * value);
    const Vec weight = multiply_add(before, state[1], added);
    save(sum / weight, static_cast<T*>(w.out) + at, count);
    const Vec decayed = state[2] + load_any(w.decays + first, count);
    exponent = greater_of(decayed, key);
    before = exp_of(decayed - exponent);
    added = exp_of(key - exponent);
    state[0] = multiply_add(before, state[0], added * value);
    state[1] = multiply_add(before, state[1], added);
    state[2] = exponent;
  };
  scan_texts(texts, w.states, w.num_channels, initial, advance);
}

}  // namespace
