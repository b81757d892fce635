// The choice among the tokens that top_p keeps, by a lookup table of the weights of bfloat16 values.
//
// All tokens with the same table index have the same weight, so a histogram of indices shows which
// token is the last one that top_p keeps, without sorting. Edited tokens may have any score; they are
// not in the table and are merged separately. Called by choice.h for bfloat16 logits of large
// vocabularies.

#pragma once

#include <algorithm>

#include "sampling/top_p_buckets.h"
#include "sampling/top_p_estimate.h"

namespace {

// An interval of table indices in which top_p may end: low < index <= high.
struct IndexBracket {
  int low, high;

  // Wider brackets next to this one.
  IndexBracket below() const { return {std::max(0, low - width()), low}; }
  IndexBracket above(int last) const { return {high, std::min(high + width(), last)}; }
  int width() const { return 4 * (high - low + 1); }
};

// The tokens of an IndexBracket that top_p keeps.
struct KeptIndices {
  int64_t sum;          // of the weights above the bracket and of those kept before index `last`
  int last;             // the index at which top_p ends; all tokens of higher indices are kept
  int64_t num_last;     // the number of tokens of this index that are kept, in order of id
  size_t edited, ties;  // the ends of the edited tokens kept before them, and of those of this index
};

// Whether the weights of all values take less time than those of all tokens. Sets the table's range.
template <class Scores>
inline bool has_few_values(Row<Scores>& row) {
  constexpr int kTokensPerValue = 4;
  const float least = row.score_below_best(kNoWeight + 0.1f);
  const int count = row.scratch.values.set_range(row.best(), least);
  return count > 0 && count * kTokensPerValue <= row.size;
}

// Counts the values of the sample of estimate_bracket.
template <class Scores>
inline void count_sample(Row<Scores>& row) {
  ValueWeights& values = row.scratch.values;
  values.clear_counts();
  for (int chunk = 0; chunk < row.num_chunks(); chunk++) {
    const int i = sample_of(chunk);
    if (i + kGroups > row.size) continue;
    if constexpr (Scores::kAreEdited) {
      values.count<kGroups>(row.scores.logits + i, row.scores.unedited(i));
      uint32_t edited = row.scores.bits_from(i) & ((1u << kGroups) - 1);
      for (; edited != 0; edited &= edited - 1)
        values.count(row.scores.at(i + __builtin_ctz(edited)));
    } else {
      values.count<kGroups>(row.scores.logits + i);
    }
  }
}

template <class Scores>
inline IndexBracket estimate_indices(Row<Scores>& row, double top_p) {
  ValueWeights& values = row.scratch.values;
  values.fill([&](Part scores) { return row.weigh(scores); });
  bool is_counted = false;
  const Bracket bracket = estimate_bracket(row, top_p, [&](float sum, float limit) {
    if (!is_counted) count_sample(row);
    is_counted = true;
    return values.score_at(sum, limit);
  });
  // The score at which the sum is reached may be that of the last token.
  const int low = std::max(0, values.index_of(bracket.low) - 1);
  return {low, std::max(low, values.index_of(bracket.high))};
}

// Writes the doubled table indices of the tokens of a chunk; those of edited tokens are 0.
template <class Scores>
[[gnu::always_inline]] inline void write_doubled(const Row<Scores>& row, int chunk,
                                                 uint16_t* doubled) {
  constexpr int kWord = 32;
  const int first = chunk * kChunk, count = std::min(kChunk, row.size - first);
  row.scratch.values.write_doubled(row.scores.logits + first, count, doubled);
  if constexpr (Scores::kAreEdited)
    for (int i = 0; i < count; i += kWord)
      ValueWeights::clear_unset(doubled + i, row.scores.unedited(first + i));
}

// Collects the indices within the bracket, and sums the weights above it for each chunk. Returns the
// sums of all weights and of those above the bracket. Edited tokens are left out.
template <class Scores>
inline Pair split_indices(Row<Scores>& row, IndexBracket bracket) {
  Scratch& scratch = row.scratch;
  const ValueWeights& values = scratch.values;
  auto& indices = scratch.indices;
  if (indices.size() < static_cast<size_t>(row.size) + kChunk) indices.resize(row.size + kChunk);
  scratch.ends.clear();
  scratch.sums.clear();
  Pair total = {};
  int count = 0;
  for (int chunk = 0; chunk < row.num_chunks(); chunk++) {
    row.prefetch_upcoming(chunk);
    Pair sums = {};
    if (row.any_within(chunk, row.no_weight())) {
      uint16_t doubled[kChunk];
      write_doubled(row, chunk, doubled);
      sums = values.sum(doubled);
      count += ValueWeights::copy_within(doubled, bracket.low, bracket.high, &indices[count]);
    }
    scratch.ends.push_back(count);
    scratch.sums.push_back(sums[1]);
    total += sums;
  }
  return total;
}

// Adds the weights of edited tokens to both sums of `total`. The candidates become the edited tokens
// within the bracket, sorted and weighed.
template <class Scores>
inline void add_edited(Row<Scores>& row, IndexBracket bracket, Pair& total) {
  Scratch& scratch = row.scratch;
  auto& within = scratch.candidates;
  within.clear();
  const float low = scratch.values.score_of(bracket.low);
  const float high = scratch.values.score_of(bracket.high);
  row.each_edited([&](int32_t id, float score, int64_t weight) {
    total[0] += weight;
    if (score > high) {
      total[1] += weight;
      scratch.sums[id / kChunk] += weight;
    } else if (score > low) {
      within.push_back({score, id});
    }
  });
  std::sort(within.begin(), within.end());
  row.weigh_candidates();
}

// Builds the histogram of the indices within the bracket.
inline void count_indices(Scratch& scratch, IndexBracket bracket) {
  constexpr int kCounts = 4;  // interleaved histograms, which hide the latency of increments
  const int size = bracket.high - bracket.low + 1, num_indices = scratch.ends.back();
  auto& counts = scratch.counts;
  counts.assign(kCounts * size, 0);
  for (int i = 0; i < num_indices; i++) {
    counts[i % kCounts * size + scratch.indices[i] - bracket.low]++;
  }
  for (int i = size; i < kCounts * size; i++) counts[i % size] += counts[i];
}

// Keeps the tokens of the bracket in rank order until the cumulative weight, `sum` above the bracket,
// reaches the bound. If it does not, the last index is bracket.low.
inline KeptIndices keep_indices(const Scratch& scratch, IndexBracket bracket, int64_t sum,
                                int64_t bound) {
  const ValueWeights& values = scratch.values;
  const auto& edited = scratch.candidates;
  size_t next = 0;
  int index = bracket.high;
  for (; index > bracket.low; index--) {
    const float score = values.score_of(index);
    for (; next < edited.size() && edited[next].score > score; next++) {
      sum += static_cast<int64_t>(scratch.weights[next]);
      if (sum >= bound) return {sum, index, 0, next + 1, next + 1};
    }
    const size_t first = next;
    while (next < edited.size() && edited[next].score == score) next++;
    const int64_t count = scratch.counts[index - bracket.low] + static_cast<int64_t>(next - first);
    const int64_t own = values.weight_of(index);
    if (sum + count * own >= bound) return {sum, index, (bound - sum + own - 1) / own, first, next};
    sum += count * own;
  }
  return {sum, index, 0, next, next};
}

// Adds the weights of the kept tokens within the bracket to the sums of the chunks, up to the chunk
// in which the cumulative weight exceeds `rest`. Of the edited tokens, only ties of the last index
// are added. Returns the id of the last kept token of this index, or the vocabulary size if it is in
// a later chunk.
template <class Scores>
inline int32_t add_kept(Row<Scores>& row, IndexBracket bracket, const KeptIndices& all,
                        int64_t rest) {
  Scratch& scratch = row.scratch;
  const ValueWeights& values = scratch.values;
  const int last = all.last;
  int64_t num_last = all.num_last;
  size_t tie = all.edited;
  auto& kept = scratch.kept;
  kept.assign(bracket.high - bracket.low + 1, 0);
  for (int index = last + 1; index <= bracket.high; index++) {
    kept[index - bracket.low] = values.weight_of(index);
  }
  int32_t last_id = row.size;
  int i = 0;
  for (int chunk = 0; chunk < row.num_chunks() && rest >= 0; chunk++) {
    int64_t sum = 0, count = 0;
    for (; i < scratch.ends[chunk]; i++) {
      sum += kept[scratch.indices[i] - bracket.low];
      count += scratch.indices[i] == last;
    }
    for (; tie < all.ties && scratch.candidates[tie].id / kChunk == chunk; tie++) count++;
    if (num_last > 0 && count >= num_last) {
      last_id = chunk * kChunk - 1;
      for (count = 0; count < num_last;) count += row.scores.at(++last_id) == values.score_of(last);
    }
    count = std::min(count, num_last);
    num_last -= count;
    scratch.sums[chunk] += sum + count * values.weight_of(last);
    rest -= scratch.sums[chunk];
  }
  return last_id;
}

// Requires has_few_values.
template <class Scores>
inline int64_t choose_top_p_by_table(Row<Scores>& row, double top_p, int64_t draw) {
  Scratch& scratch = row.scratch;
  ValueWeights& values = scratch.values;
  IndexBracket bracket = estimate_indices(row, top_p);
  KeptIndices kept{};
  int64_t bound = 0;
  for (int tries = 1; true; tries++) {
    values.set_limit(bracket.high);
    Pair total = split_indices(row, bracket);
    add_edited(row, bracket, total);
    bound = top_p_bound(total[0], top_p);
    const bool is_above = total[1] >= bound;
    if (!is_above) {
      count_indices(scratch, bracket);
      kept = keep_indices(scratch, bracket, total[1], bound);
      if (kept.last > bracket.low) break;
    }
    if (tries == kMaxTries) return choose_top_p_by_buckets(row, bound, draw);
    bracket = is_above ? bracket.above(values.last_index()) : bracket.below();
  }
  const auto& edited = scratch.candidates;
  Candidate last{values.score_of(kept.last), row.size};
  if (kept.num_last == 0) last = edited[kept.edited - 1];
  if (values.is_shared(values.index_of(last.score)))
    return choose_top_p_by_buckets(row, bound, draw);
  for (size_t i = 0; i < kept.edited; i++)
    scratch.sums[edited[i].id / kChunk] += row.whole(scratch.weights[i]);
  const int64_t rest = scaled(draw, kept.sum + kept.num_last * values.weight_of(kept.last));
  const int32_t last_id = add_kept(row, bracket, kept, rest);
  if (kept.num_last > 0) last.id = last_id;
  return row.token_at(last, rest);
}

}  // namespace
