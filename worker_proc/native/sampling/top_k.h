// The choice among the top_k highest-ranked tokens, which top_p may reduce further.
//
// top_k is at least 1, and `draw` a number of philox.h. Called by choice.h after a scan.

#pragma once

#include <algorithm>

#include "sampling/philox.h"
#include "sampling/row.h"

namespace {

template <class Scores>
inline int64_t choose_top_k(Row<Scores>& row, int32_t top_k, double top_p, int64_t draw) {
  Scratch& scratch = row.scratch;
  auto& kept = scratch.candidates;
  // At least top_k groups, and so at least top_k tokens, have a score above the limit.
  row.collect_above(row.score_of_groups(top_k - 1, 2 * std::min(top_k, row.size)));
  if (kept.size() > static_cast<size_t>(top_k)) {
    std::nth_element(kept.begin(), kept.begin() + (top_k - 1), kept.end());
    kept.resize(top_k);
  }
  if (top_p < 1.0) {
    std::sort(kept.begin(), kept.end());
    row.weigh_candidates();
    const int64_t bound = top_p_bound(row.weight_of_candidates(), top_p);
    size_t num_kept = 0;
    for (int64_t sum = 0; sum < bound && num_kept < kept.size(); num_kept++) {
      sum += row.whole(scratch.weights[num_kept]);
    }
    kept.resize(num_kept);
  }
  std::sort(kept.begin(), kept.end(), row.has_lower_id);
  row.weigh_candidates();
  const int64_t total = row.weight_of_candidates();
  int64_t rest = scaled(draw, total);
  for (size_t i = 0; i < kept.size(); i++) {
    const int64_t own = row.whole(scratch.weights[i]);
    if (rest < own) return kept[i].id;
    rest -= own;
  }
  return row.most_likely();  // for invalid parameters
}

}  // namespace
