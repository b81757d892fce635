// Chooses one token of a row of scores, as worker_proc/sampling/inverse_cdf.py defines it.
//
// The row has been scanned (row.h) and has a finite maximum. The methods below try to determine the
// token from few of its scores; a wrong estimate costs time and does not change the token. The last
// bits of a weight may differ from torch's, which computes another exponential function. Called by
// sampling.cpp.

#pragma once

#include <type_traits>

#include "sampling/heavy_tokens.h"
#include "sampling/philox.h"
#include "sampling/row.h"
#include "sampling/top_k.h"
#include "sampling/top_p_bracket.h"
#include "sampling/top_p_table.h"

namespace {

// `SAMPLING_ROW` of structures.py.
struct Order {
  int64_t seed, position;
  double min_p, top_p;
  float temperature;  // 0: the most likely token
  int32_t top_k;      // 0: off
  int32_t row;        // index of the row of logits
  int32_t mask;       // index of the mask, or -1
  int32_t first_edit, num_edits;
};

// Chooses among all tokens, in order of id.
template <class Scores>
inline int64_t choose_any(Row<Scores>& row, int64_t draw) {
  Scratch& scratch = row.scratch;
  scratch.sums.clear();
  int64_t total = 0;
  for (int chunk = 0; chunk < row.num_chunks(); chunk++) {
    row.prefetch_upcoming(chunk);
    scratch.sums.push_back(row.sum_chunk(chunk));
    total += scratch.sums.back();
  }
  row.each_edited([&](int32_t id, float, int64_t weight) {
    scratch.sums[id / kChunk] += weight;
    total += weight;
  });
  return row.token_at({kNegInf, row.size}, scaled(draw, total));
}

template <class Scores>
inline int64_t choose_top_p(Row<Scores>& row, double top_p, int64_t draw) {
  if constexpr (std::is_same_v<typename Scores::Value, Bf16>) {
    if (row.scores.logits && has_few_values(row)) return choose_top_p_by_table(row, top_p, draw);
  }
  return choose_top_p_by_bracket(row, top_p, draw);
}

// Returns the id of the chosen token.
template <class Scores>
inline int64_t choose_token(Row<Scores>& row, const Order& order) {
  if (order.temperature == 0.0f) return row.most_likely();
  row.set_weights(order.temperature, order.min_p);
  const int64_t draw = philox_draw(order.seed, order.position);
  if (order.top_k > 0) return choose_top_k(row, order.top_k, order.top_p, draw);
  const int64_t token = choose_heavy(row, order.top_p, draw);
  if (token >= 0) return token;
  return order.top_p < 1.0 ? choose_top_p(row, order.top_p, draw) : choose_any(row, draw);
}

}  // namespace
