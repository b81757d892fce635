// An estimate of the score at which top_p ends, from the maxima of groups and a sample of the row.
//
// The tokens with high scores are represented by their groups' maxima, all others by a sample of one
// token in 32. The result is a bracket of scores; a wrong estimate costs time and does not change the
// chosen token. Used by top_p_bracket.h and top_p_table.h after find_heavy has set weights_of_groups.

#pragma once

#include <algorithm>

#include "sampling/row.h"

namespace {

// An interval of scores in which top_p may end: low < score <= high.
struct Bracket {
  float low, high;

  // Wider brackets next to this one.
  Bracket below() const { return {low - kWider * (high - low), low}; }
  Bracket above() const { return {high, high + kWider * (high - low)}; }
  static constexpr float kWider = 4.0f;
};

constexpr int kMaxTries = 3;  // brackets that are tried
constexpr int kMinTopGroups = 512, kMaxTopGroups = 1024;  // groups above the limit of the sample

// The first token of the sample of a chunk, which is kGroups consecutive tokens.
inline int sample_of(int chunk) { return chunk * kChunk + chunk * 7 % kGroupSize * kGroups; }

// Estimates a bracket. score_at(sum, limit) returns the score below `limit` at which the weights of the
// sample reach a sum, where the weight of the maximum is 1.
template <class Scores, class ScoreAt>
inline Bracket estimate_bracket(Row<Scores>& row, double top_p, const ScoreAt& score_at) {
  Scratch& scratch = row.scratch;
  const float limit = row.score_of_groups(kMinTopGroups, kMaxTopGroups);
  Part heavy_sums = {}, light_sums = {}, squares = {};
  for (int i = 0; i < row.num_groups(); i += kPartLanes) {
    const Part weights = part_at(&scratch.weights_of_groups[i]);
    const Lanes is_heavy = above(part_at(&scratch.best_of_groups[i]), splat_part(limit)) &
                           ~above(splat_part(row.least_weight()), weights);
    heavy_sums += select(is_heavy, weights, Part{}) / kUnit;
  }
  auto& sample = scratch.sample;
  auto& weights = scratch.weights_of_sample;
  const int most = (row.num_chunks() * kGroups + kBlock - 1) / kBlock * kBlock;
  sample.resize(most);
  weights.resize(most);
  int count = 0;
  for (int chunk = 0; chunk < row.num_chunks(); chunk++) {
    int i = sample_of(chunk);
    if (i + kGroups > row.size) continue;
    for (const int last = i + kGroups; i < last; i += kPartLanes, count += kPartLanes) {
      const Part s = row.scores.part(i);
      const Part w = select(above(s, splat_part(limit)), Part{}, row.weigh(s)) / kUnit;
      save_part(s, &sample[count]);
      save_part(w, &weights[count]);
      light_sums += w;
      squares += w * w;
    }
  }
  if (count == 0) return {kNegInf, kInfinity};
  const float each = static_cast<float>(row.size) / count;
  for (; count < most; count += kPartLanes) {
    save_part(splat_part(kNegInf), &sample[count]);
    save_part(Part{}, &weights[count]);
  }
  const float heavy = sum_of(heavy_sums), total = heavy + each * sum_of(light_sums);
  const float target = static_cast<float>(top_p) * total;
  const float rest = static_cast<float>(1.0 - top_p);
  const float error = rest * 3.0f * each * std::sqrt(sum_of(squares)) +
                      std::min(0.02f * rest, 0.002f) * total;
  if (target + error < heavy) return {limit, kInfinity};
  Bracket bracket{kNegInf, kInfinity};
  if (target - error > heavy) bracket.high = score_at((target - error - heavy) / each, limit);
  if (target + error < total) bracket.low = score_at((target + error - heavy) / each, limit);
  return bracket;
}

}  // namespace
