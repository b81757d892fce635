// The choice among few tokens that have nearly all of the weight.
//
// In most rows, the tokens above some score have so much of the weight that an upper bound for the
// weights of all others suffices to determine the chosen token, without computing them. The bound
// follows from the maxima of the groups. Called by choice.h before any pass over all weights.

#pragma once

#include <algorithm>
#include <vector>

#include "sampling/philox.h"
#include "sampling/row.h"

namespace {

constexpr int kMaxHeavyGroups = 1024;

// Heavy tokens have a score above `limit`. `others` is an upper bound for the sum of all other weights,
// or -1 if no limit leaves the others little weight.
struct HeavyBound {
  float limit;
  int64_t others;
};

template <class Scores>
inline void weigh_groups(Row<Scores>& row) {
  Scratch& scratch = row.scratch;
  scratch.weights_of_groups.resize(row.num_groups());
  for (int i = 0; i < row.num_groups(); i += kPartLanes) {
    const Part scores = part_at(&scratch.best_of_groups[i]);
    save_part(row.weigher()(scores), &scratch.weights_of_groups[i]);
  }
}

// Returns a score that is lower than `limit` by what rounding may have added to it.
template <class Scores>
inline float below_rounding(const Row<Scores>& row, float limit) {
  const float size = std::max(std::fabs(limit), std::fabs(row.best()));
  return limit - (std::nextafter(size, kInfinity) - size);
}

// Finds the highest limit that leaves the other tokens little weight. Sets weights_of_groups.
template <class Scores>
inline HeavyBound find_heavy(Row<Scores>& row) {
  weigh_groups(row);
  const float* scores = row.scratch.best_of_groups.data();
  const float* weights = row.scratch.weights_of_groups.data();
  for (const float nats : {8.0f, 12.0f, 16.0f, 20.0f, kNoWeight}) {
    const float limit =
        below_rounding(row, row.score_below_best(std::min(nats, row.no_weight())));
    Part heavy = {}, light = {};
    int count = 0;
    for (int i = 0; i < row.num_groups(); i += kPartLanes) {
      const Lanes is_heavy = above(part_at(scores + i), splat_part(limit));
      heavy += select(is_heavy, part_at(weights + i), Part{});
      light += select(is_heavy, Part{}, part_at(weights + i));
      count += __builtin_popcount(bits_of(is_heavy));
    }
    if (count > kMaxHeavyGroups) break;
    if (nats >= row.no_weight()) return {limit, 0};
    // The factor 1.001 exceeds the rounding errors.
    const float others = 1.001f * (kGroupSize * sum_of(light) +
                                   (kGroupSize - 1) * count * row.weigher().of(limit));
    if (others * count < sum_of(heavy) / 8) return {limit, static_cast<int64_t>(others) + 1};
  }
  return {0.0f, -1};
}

// Returns the last token that top_p keeps, or the id -1 if it depends on the weights of the others.
template <class Scores>
inline Candidate last_heavy(Row<Scores>& row, int64_t total, int64_t others, double top_p) {
  auto& sorted = row.scratch.sorted;
  sorted = row.scratch.candidates;
  std::sort(sorted.begin(), sorted.end());
  const int64_t least = top_p_bound(total, top_p), most = top_p_bound(total + others, top_p);
  row.weigh_all(sorted, row.scratch.weights_of_sorted);
  int64_t sum = 0;
  for (size_t i = 0; i < sorted.size(); i++) {
    sum += row.whole(row.scratch.weights_of_sorted[i]);
    if (sum >= most) return sorted[i];
    if (sum >= least) break;
  }
  return {0.0f, -1};
}

// Chooses a token from the heavy ones alone, or returns -1 if the others may change the choice.
template <class Scores>
inline int64_t choose_heavy(Row<Scores>& row, double top_p, int64_t draw) {
  const HeavyBound heavy = find_heavy(row);
  if (heavy.others < 0) return -1;
  row.collect_above(heavy.limit);
  row.weigh_candidates();
  Scratch& scratch = row.scratch;
  const auto& kept = scratch.candidates;
  int64_t total = row.weight_of_candidates(), others = heavy.others;
  Candidate last{kNegInf, row.size};
  if (top_p < 1.0) {
    last = last_heavy(row, total, others, top_p);
    if (last.id < 0) return -1;
    total = 0, others = 0;
    for (size_t i = 0; i < kept.size(); i++) {
      if (last < kept[i]) scratch.weights[i] = 0.0f;
      total += row.whole(scratch.weights[i]);
    }
  }
  // Any part of the others' weight may precede the chosen token.
  const int64_t least = scaled(draw, total), most = scaled(draw, total + others);
  int64_t sum = 0;
  for (size_t i = 0; i < kept.size(); i++) {
    const int64_t before = sum;
    sum += row.whole(scratch.weights[i]);
    if (least < sum) return before + others <= least && most < sum ? kept[i].id : -1;
  }
  return -1;
}

}  // namespace
