// The choice among the tokens that top_p keeps, by a bracket of scores in which top_p ends.
//
// One pass computes all weights, and sums those above the bracket. Few tokens are within it, and a
// histogram of their weights shows which of them must be sorted to find the last token that top_p
// keeps. If that token is outside of the bracket, an adjacent bracket is tried. Called by choice.h.

#pragma once

#include <algorithm>

#include "sampling/top_p_buckets.h"
#include "sampling/top_p_estimate.h"

namespace {

// The sum of the weights of sampled tokens whose score is above a limit.
inline float sample_above(const Scratch& scratch, float limit) {
  constexpr int kSums = kBlockParts;  // independent chains, which hide the latency of additions
  Part sums[kSums] = {};
  for (size_t k = 0; k < scratch.sample.size(); k += kSums * kPartLanes) {
    for (int i = 0; i < kSums; i++) {
      const size_t index = k + i * kPartLanes;
      const Lanes is_above = above(part_at(&scratch.sample[index]), splat_part(limit));
      sums[i] += select(is_above, part_at(&scratch.weights_of_sample[index]), Part{});
    }
  }
  return sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// Bisects for the score below `high` at which the weights of the sample reach a sum.
template <class Scores>
inline float score_at(const Row<Scores>& row, float sum, float high) {
  float low =
      std::max(row.score_below_best(row.no_weight()), -std::numeric_limits<float>::max());
  for (int i = 0; i < row.kMaxBisections; i++) {
    const float middle = low + (high - low) * 0.5f;
    (sample_above(row.scratch, middle) > sum ? low : high) = middle;
  }
  return low + (high - low) * 0.5f;
}

// Collects the tokens of a chunk within a bracket, sets the last of `sums` to the sum of the weights
// above it, and returns the sum of all weights. Edited tokens are left out.
template <class Scores>
inline int64_t split_chunk(Row<Scores>& shared, int chunk, Bracket bracket) {
  const Row<Scores> row = shared;  // a local copy, which stores cannot alias
  Scratch& scratch = shared.scratch;
  const Part low = splat_part(bracket.low), high = splat_part(bracket.high);
  uint64_t within[kChunk / 64] = {};
  WideSum sum, sum_above;
  const int last = std::min((chunk + 1) * kChunk, shared.size);
  for (int i = chunk * kChunk; i < last; i += kBlock) {
    const Block scores = row.block_at(i, last);
    const Halves<kBlockParts> weights(row.weigh(scores).parts);
    Lanes is_high[kBlockParts];
    uint64_t bits = 0, high_bits = 0;
    for (int p = 0; p < kBlockParts; p++) {
      is_high[p] = above(scores.parts[p], high);
      bits |= uint64_t{bits_of(above(scores.parts[p], low))} << p * kPartLanes;
      high_bits |= uint64_t{bits_of(is_high[p])} << p * kPartLanes;
    }
    sum.add(weights);
    sum_above.add(is_high, weights);
    within[i % kChunk / 64] |= (bits & ~high_bits) << i % 64;
  }
  for (int i = 0; i < kChunk / 64; i++) scratch.tokens.append(chunk * kChunk + i * 64, within[i]);
  scratch.sums.back() = sum_above.total();
  return sum.total();
}

// Collects the tokens within a bracket, sets `sums` to the sums of the weights above it for each chunk,
// and adds them to `before`. Returns the sum of all weights.
template <class Scores>
inline int64_t split(Row<Scores>& row, Bracket bracket, int64_t& before) {
  Scratch& scratch = row.scratch;
  TokenList& tokens = scratch.tokens;
  tokens.reserve(row.size);
  tokens.size = 0;
  scratch.sums.clear();
  int64_t total = 0;
  for (int chunk = 0; chunk < row.num_chunks(); chunk++) {
    row.prefetch_upcoming(chunk);
    scratch.sums.push_back(0);
    if (!(scratch.best_of_chunks[chunk] > bracket.low)) {
      total += row.sum_chunk(chunk);
      continue;
    }
    if (!row.any_within(chunk, row.no_weight())) continue;
    total += split_chunk(row, chunk, bracket);
    before += scratch.sums.back();
  }
  row.each_edited([&](int32_t id, float score, int64_t weight) {
    total += weight;
    if (score > bracket.high) {
      scratch.sums[id / kChunk] += weight;
      before += weight;
    } else if (score > bracket.low) {
      tokens.ids[tokens.size++] = id;
    }
  });
  return total;
}

// Returns the last token that top_p keeps if it is within the bracket, and the id -1 otherwise.
// `before` is the sum of the weights above the bracket, and `bound` the cumulative weight at which
// top_p ends.
template <class Scores>
inline Candidate last_kept_token(Row<Scores>& row, Bracket bracket, int64_t before, int64_t bound) {
  Scratch& scratch = row.scratch;
  TokenList& tokens = scratch.tokens;
  if (before >= bound || tokens.size == 0) return {0.0f, -1};
  for (int i = 0; i < tokens.size; i++) tokens.scores[i] = row.scores.at(tokens.ids[i]);
  constexpr int kNumBins = 512;
  const float high = std::min(bracket.high, row.best());
  const float low = std::max(bracket.low, row.score_below_best(row.no_weight()));
  const float per_score = high > low ? (kNumBins - 1) / (high - low) : 0.0f;
  const Part end = splat_part(kNumBins - 1);
  for (int i = 0; i < tokens.size; i += kPartLanes) {
    const Part s = part_at(&tokens.scores[i]);
    save_part(row.weigh(s), &tokens.weights[i]);
    const Part index = (high - s) * per_score;
    const Part clamped = index < end ? index : end;  // NaN becomes the last bin
    save_int(__builtin_convertvector(clamped, PartInt), &tokens.bins[i]);
  }
  int64_t* sums = scratch.buckets;
  std::fill(sums, sums + kNumBins, 0);
  for (int i = 0; i < tokens.size; i++) sums[tokens.bins[i]] += row.whole(tokens.weights[i]);
  int bin = 0;
  for (; bin < kNumBins && before + sums[bin] < bound; bin++) before += sums[bin];
  if (bin == kNumBins) return {0.0f, -1};
  scratch.candidates.clear();
  std::fill_n(&tokens.bins[tokens.size], kPartLanes, -1);
  for (int i = 0; i < tokens.size; i += kPartLanes) {
    const PartInt wanted = splat_int(bin), bins = int_at(&tokens.bins[i]);
    const Lanes is_member = at_most(bins, wanted) & at_most(wanted, bins);
    uint32_t bits = bits_of(is_member);
    for (; bits != 0; bits &= bits - 1) {
      const int k = i + __builtin_ctz(bits);
      scratch.candidates.push_back({tokens.scores[k], tokens.ids[k]});
    }
  }
  return last_kept_candidate(row, before, bound);
}

template <class Scores>
inline int64_t choose_top_p_by_bracket(Row<Scores>& row, double top_p, int64_t draw) {
  Scratch& scratch = row.scratch;
  Bracket bracket = estimate_bracket(
      row, top_p, [&](float sum, float limit) { return score_at(row, sum, limit); });
  int64_t before = 0, bound = 0;
  Candidate last{0.0f, -1};
  for (int tries = 0; last.id < 0; tries++) {
    if (tries == kMaxTries) return choose_top_p_by_buckets(row, bound, draw);
    if (tries > 0) bracket = before < bound ? bracket.below() : bracket.above();
    before = 0;
    bound = top_p_bound(split(row, bracket, before), top_p);
    last = last_kept_token(row, bracket, before, bound);
  }
  TokenList& tokens = scratch.tokens;
  for (int i = 0; i < tokens.size; i += kPartLanes) {
    const PartInt ids = int_at(&tokens.ids[i]);
    const Lanes kept = row.lanes_kept(part_at(&tokens.scores[i]), ids, last);
    save_part(select(kept, part_at(&tokens.weights[i]), Part{}), &tokens.weights[i]);
  }
  int64_t total = before;
  for (int i = 0; i < tokens.size; i++) {
    const int64_t weight = row.whole(tokens.weights[i]);
    scratch.sums[tokens.ids[i] / kChunk] += weight;
    total += weight;
  }
  return row.token_at(last, scaled(draw, total));
}

}  // namespace
