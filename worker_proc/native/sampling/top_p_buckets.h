// The choice among the tokens that top_p keeps, by a histogram of weights over score.
//
// The histogram shows in which bucket top_p ends, and the tokens of this bucket are sorted. Buckets
// have the same width in nats as those of inverse_cdf.py. This is the slow general method, which
// top_p_bracket.h and top_p_table.h call when their estimates have failed.

#pragma once

#include <algorithm>

#include "sampling/philox.h"
#include "sampling/row.h"

namespace {

constexpr float kBucketsPerNat = kNumBuckets / 28.0f;
constexpr float kNearNats = 12.0f;

inline PartInt bucket_of(Part distance) {
  const Part index = distance * kBucketsPerNat;
  const Part end = splat_part(kNumBuckets - 1);
  return __builtin_convertvector(index < end ? index : end, PartInt);
}

// Adds up the weights of each bucket, for tokens less than `nats` below the maximum.
template <class Scores>
inline void fill_buckets(Row<Scores>& row, float nats) {
  int64_t* const buckets = row.scratch.buckets;
  std::fill(buckets, buckets + kNumBuckets, 0);
  row.each_score([&](int, Part s) {
    const Part d = row.distance(s);
    uint32_t bits = bits_of(above(splat_part(nats), d));
    if (bits == 0) return;
    const PartInt bucket = bucket_of(d);
    const Part weights = row.weigh(s);
    for (; bits != 0; bits &= bits - 1) {
      const int lane = __builtin_ctz(bits);
      buckets[bucket[lane]] += row.whole(weights[lane]);
    }
  });
}

// Sorts and weighs the candidates. Returns the one at which the cumulative weight reaches the bound, or
// the id -1; `before` is the cumulative weight before the first candidate.
template <class Scores>
inline Candidate last_kept_candidate(Row<Scores>& row, int64_t before, int64_t bound) {
  auto& members = row.scratch.candidates;
  if (!std::is_sorted(members.begin(), members.end())) std::sort(members.begin(), members.end());
  row.weigh_candidates();
  for (size_t i = 0; i < members.size(); i++) {
    before += row.whole(row.scratch.weights[i]);
    if (before >= bound) return members[i];
  }
  return {0.0f, -1};
}

// Chooses a token, given the cumulative weight at which top_p ends.
template <class Scores>
inline int64_t choose_top_p_by_buckets(Row<Scores>& row, int64_t bound, int64_t draw) {
  Scratch& scratch = row.scratch;
  int bucket;
  int64_t before = 0;
  // Most of the weight is near the maximum, where few tokens are.
  for (const float nats : {kNearNats, std::numeric_limits<float>::max()}) {
    fill_buckets(row, nats);
    before = 0;
    for (bucket = 0; bucket < kNumBuckets; bucket++) {
      if (before + scratch.buckets[bucket] >= bound) break;
      before += scratch.buckets[bucket];
    }
    if (bucket < kNumBuckets) break;
  }
  scratch.candidates.clear();
  row.each_score([&](int i, Part s) {
    const PartInt is_member = (bucket_of(row.distance(s)) == bucket) & (s > kNegInf);
    for (int lane = 0; lane < kPartLanes; lane++) {
      if (is_member[lane]) scratch.candidates.push_back({s[lane], i + lane});
    }
  });
  Candidate last = last_kept_candidate(row, before, bound);
  if (last.id < 0) last = {kNegInf, row.size};  // for invalid parameters
  scratch.sums.clear();
  int64_t total = 0;
  for (int chunk = 0; chunk < row.num_chunks(); chunk++) {
    WideSum sum;
    row.each_part(chunk, [&](int i, Part s) {
      const Part weights = row.weigh(s);
      const Lanes kept = row.lanes_kept(s, lane_numbers() + i, last);
      sum.add(&kept, Halves<1>(&weights));
    });
    scratch.sums.push_back(sum.total());
    total += scratch.sums.back();
  }
  return row.token_at(last, scaled(draw, total));
}

}  // namespace
