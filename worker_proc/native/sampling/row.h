// A row of scores: the scan for its maximum, the weights of its tokens, and sums of weights.
//
// A row is divided into chunks of kChunk tokens, and a chunk into kGroups groups: tokens whose ids are
// equal modulo kGroups. The scan stores the maximum of each chunk and group in the scratch buffers, so
// that later passes can skip chunks. Weights are summed as integers, so the order of additions is free.
// Used by the files that choose a token (choice.h includes them all) and by edits.h.

#pragma once

#include <algorithm>
#include <vector>

#include "sampling/scratch.h"

namespace {

constexpr int kChunk = 512;  // tokens of a chunk
constexpr int kGroups = 16;  // groups of a chunk
constexpr int kGroupSize = kChunk / kGroups;
constexpr float kNoWeight = 28.0f;  // scores this many nats below the maximum have the weight 0
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The tokens whose scores differ from their logits, in any order. `scores` is padded to whole Parts.
struct EditedTokens {
  int size = 0;
  const int32_t* ids = nullptr;
  const float* scores = nullptr;
};

// Scores that are the logits.
template <typename T>
struct RawScores {
  using Value = T;
  static constexpr bool kAreEdited = false;

  const T* logits;

  Part part(int i) const { return part_at(logits + i); }
  float at(int i) const { return widen(logits[i]); }
  RawScores without_edited() const { return *this; }
  EditedTokens edited() const { return {}; }
};

// `Scores` has part(i), the scores from index i on (a multiple of kPartLanes), and at(i), a single
// score. without_edited() returns scores in which edited tokens are -infinity. If kAreEdited,
// unedited(i) is a bit mask of the tokens from i on whose score is their logit.
template <class Scores>
class Row {
 public:
  using Value = typename Scores::Value;

  // `upcoming` is the row that this thread probably reads next, or null.
  Row(const Scores& scores, int32_t size, Scratch& scratch, const Value* upcoming = nullptr)
      : scores(scores),
        size(size),
        scratch(scratch),
        upcoming_(reinterpret_cast<const char*>(upcoming)) {}

  const Scores scores;
  const int32_t size;
  Scratch& scratch;

  int num_chunks() const { return (size + kChunk - 1) / kChunk; }
  int num_groups() const { return num_chunks() * kGroups; }

  // Finds the maxima of the row, its chunks and groups. Returns whether no score is NaN.
  bool scan() {
    scratch.best_of_chunks.resize(num_chunks());
    scratch.best_of_groups.resize(num_chunks() * kGroups);
    bool is_number = true;
    best_ = kNegInf;
    for (int chunk = 0; chunk < num_chunks(); chunk++) {
      is_number &= scan_chunk(chunk);
      best_ = std::max(best_, scratch.best_of_chunks[chunk]);
    }
    return is_number;
  }

  // Updates the maxima after a scan of the logits, if only edited tokens have other scores.
  void scan_edited() {
    scratch.chunks.clear();
    const EditedTokens edited = scores.edited();
    for (int i = 0; i < edited.size; i++) {
      const int id = edited.ids[i], chunk = id / kChunk;
      const float score = edited.scores[i], logit = scores.logit(id);
      float& best = scratch.best_of_groups[chunk * kGroups + id % kGroups];
      float& best_of_chunk = scratch.best_of_chunks[chunk];
      if (score < logit && logit == best && best_of_chunk < kInfinity) {
        scratch.chunks.push_back(chunk);  // the second-best score of the group is unknown
        best_of_chunk = kInfinity;
      }
      best = std::max(best, score);
      best_of_chunk = std::max(best_of_chunk, score);
    }
    for (const int32_t chunk : scratch.chunks) scan_chunk(chunk);
    best_ = kNegInf;
    for (const float best : scratch.best_of_chunks) best_ = std::max(best_, best);
  }

  // The maximum of the row.
  float best() const { return best_; }

  // Prepares the weights for a temperature > 0 and min_p.
  void set_weights(float temperature, double min_p) {
    per_nat_ = std::min(1.0f / temperature, std::numeric_limits<float>::max());
    weigher_ = Weigher(best_, per_nat_);
    set_least_weight(min_p);
  }

  int64_t most_likely() const {
    for (int chunk = 0; chunk < num_chunks(); chunk++) {
      if (scratch.best_of_chunks[chunk] != best_) continue;
      int64_t token = -1;
      each_part(chunk, [&](int i, Part v) {
        const uint32_t bits = bits_of(equal(v, splat_part(best_)));
        if (token < 0 && bits != 0) token = i + __builtin_ctz(bits);
      });
      return token;
    }
    return 0;
  }

  // Calls f(i, scores) for each Part of a chunk. Scores past the end of the row are -infinity.
  template <class F>
  [[gnu::always_inline]] void each_part(int chunk, const F& f) const {
    each_part(scores, chunk, f);
  }

  template <class Source, class F>
  [[gnu::always_inline]] void each_part(const Source& source, int chunk, const F& f) const {
    const int last = std::min((chunk + 1) * kChunk, size);
    int i = chunk * kChunk;
    for (; i + kPartLanes <= last; i += kPartLanes) f(i, source.part(i));
    if (i < last) f(i, tail_part(source, i, last - i));
  }

  // Calls f(i, scores) for each Part of the row.
  template <class F>
  [[gnu::always_inline]] void each_score(const F& f) const {
    for (int chunk = 0; chunk < num_chunks(); chunk++) each_part(chunk, f);
  }

  // Calls f(id, score, weight) for each edited token.
  template <class F>
  void each_edited(const F& f) const {
    const EditedTokens edited = scores.edited();
    for (int i = 0; i < edited.size; i += kPartLanes) {
      const Part part = part_at(edited.scores + i), weights = weigh(part);
      const int count = std::min(kPartLanes, edited.size - i);
      for (int lane = 0; lane < count; lane++)
        f(edited.ids[i + lane], part[lane], whole(weights[lane]));
    }
  }

  // The block of scores at index i, without edited tokens. Scores from index `last` on are -infinity.
  [[gnu::always_inline]] Block block_at(int i, int last) const {
    const auto source = scores.without_edited();
    Block block;
    if (i + kBlock <= last) {
      for (int p = 0; p < kBlockParts; p++) block.parts[p] = source.part(i + p * kPartLanes);
      return block;
    }
    for (int p = 0; p < kBlockParts; p++) {
      const int first = i + p * kPartLanes;
      block.parts[p] = tail_part(source, first, std::clamp(last - first, 0, kPartLanes));
    }
    return block;
  }

  // How far a score is below the maximum, in nats.
  Part distance(Part score) const { return (best_ - score) * per_nat_; }

  // The score that is `nats` below the maximum.
  float score_below_best(float nats) const { return best_ - nats / per_nat_; }

  // Scores this many nats below the maximum have the weight 0 or are dropped by min_p.
  float no_weight() const { return no_weight_; }
  float least_weight() const { return least_weight_; }
  const Weigher& weigher() const { return weigher_; }

  // The weights of scores; 0 for those that min_p drops.
  Part weigh(Part score) const {
    const Part weights = weigher_(score);
    if (least_weight_ == 0.0f) return weights;
    return select(above(splat_part(least_weight_), weights), Part{}, weights);
  }

  [[gnu::always_inline]] Block weigh(const Block& block) const {
    Block weights = weigher_(block);
    if (least_weight_ == 0.0f) return weights;
    for (Part& part : weights.parts) {
      part = select(above(splat_part(least_weight_), part), Part{}, part);
    }
    return weights;
  }

  // The integer part of a weight, which sums use.
  static int64_t whole(float weight) { return static_cast<int64_t>(weight); }

  // Whether any score of a chunk is less than `nats` below the maximum.
  bool any_within(int chunk, float nats) const {
    return (best_ - scratch.best_of_chunks[chunk]) * per_nat_ < nats;
  }

  // The sum of a chunk's weights, without edited tokens.
  int64_t sum_chunk(int chunk) const {
    if (!any_within(chunk, no_weight_)) return 0;
    return any_within(chunk, kNarrowNats) ? sum_of_blocks<WideSum>(chunk)
                                          : sum_of_blocks<NarrowSum>(chunk);
  }

  // Prefetches a chunk of the upcoming row.
  void prefetch_upcoming(int chunk) const {
    constexpr int kLine = 64, kBytes = kChunk * sizeof(Value);
    if (upcoming_ == nullptr) return;
    for (int i = 0; i < kBytes; i += kLine) __builtin_prefetch(upcoming_ + chunk * kBytes + i, 0, 2);
  }

  // The lanes with tokens that rank no lower than `last`.
  static Lanes lanes_kept(Part scores, PartInt ids, Candidate last) {
    const Part limit = splat_part(last.score);
    return above(scores, limit) | (equal(scores, limit) & at_most(ids, splat_int(last.id)));
  }

  // Inverts the CDF: returns the token at which the cumulative weight in order of id exceeds `rest`.
  // Tokens that rank lower than `last` do not count. `scratch.sums` has the sums of the chunks.
  int64_t token_at(Candidate last, int64_t rest) const {
    int chunk = 0;
    for (; chunk + 1 < num_chunks() && rest >= scratch.sums[chunk]; chunk++) {
      rest -= scratch.sums[chunk];
    }
    int64_t token = -1;
    each_part(chunk, [&](int i, Part s) {
      if (token >= 0) return;
      const Lanes kept = lanes_kept(s, lane_numbers() + i, last);
      const Part weights = select(kept, weigh(s), Part{});
      for (int lane = 0; lane < kPartLanes; lane++) {
        const int64_t own = whole(weights[lane]);
        if (token < 0 && rest < own) token = i + lane;
        rest -= own;
      }
    });
    return token >= 0 ? token : most_likely();  // the latter for invalid parameters
  }

  // Sets the candidates to the tokens with scores above a limit, in order of id.
  void collect_above(float limit) {
    auto& found = scratch.candidates;
    found.clear();
    for (int chunk = 0; chunk < num_chunks(); chunk++) {
      if (!(scratch.best_of_chunks[chunk] > limit)) continue;
      each_part(scores.without_edited(), chunk,
                [&](int i, Part s) { append(s, i, bits_of(above(s, splat_part(limit)))); });
    }
    const auto num_others = static_cast<std::ptrdiff_t>(found.size());
    const EditedTokens edited = scores.edited();
    for (int i = 0; i < edited.size; i++)
      if (edited.scores[i] > limit) found.push_back({edited.scores[i], edited.ids[i]});
    const auto first_edited = found.begin() + num_others;
    std::sort(first_edited, found.end(), has_lower_id);
    std::inplace_merge(found.begin(), first_edited, found.end(), has_lower_id);
  }

  static bool has_lower_id(const Candidate& a, const Candidate& b) { return a.id < b.id; }

  void weigh_candidates() { weigh_all(scratch.candidates, scratch.weights); }

  void weigh_all(const std::vector<Candidate>& candidates, std::vector<float>& weights) const {
    weights.resize(candidates.size() + kPartLanes);
    for (size_t i = 0; i < candidates.size(); i += kPartLanes) {
      Part s = splat_part(kNegInf);
      for (size_t lane = 0; lane < kPartLanes && i + lane < candidates.size(); lane++) {
        s[lane] = candidates[i + lane].score;
      }
      save_part(weigh(s), &weights[i]);
    }
  }

  int64_t weight_of_candidates() const {
    int64_t total = 0;
    for (size_t i = 0; i < scratch.candidates.size(); i++) total += whole(scratch.weights[i]);
    return total;
  }

  // Bisects for a score that more than `least` group maxima exceed, and if possible at most `most`;
  // -infinity if there are not enough groups.
  float score_of_groups(int least, int most) const {
    float high = best_, low = std::nextafter(least_group(), kNegInf);
    if (groups_above(low) <= least) return kNegInf;
    for (int i = 0; i < kMaxBisections; i++) {
      const float middle = low + (high - low) * 0.5f;
      const int count = groups_above(middle);
      (count > least ? low : high) = middle;
      if (count > least && count <= most) break;
    }
    return low;
  }

  static constexpr int kMaxBisections = 12;

 private:
  // The `count` < kPartLanes scores from index i on, padded with -infinity.
  template <class Source>
  static Part tail_part(const Source& source, int i, int count) {
    float tail[kPartLanes];
    std::fill(tail, tail + kPartLanes, kNegInf);
    for (int lane = 0; lane < count; lane++) tail[lane] = source.at(i + lane);
    return part_at(tail);
  }

  // Finds the maxima of a chunk and its groups. Returns whether no score is NaN.
  [[gnu::always_inline]] bool scan_chunk(int chunk) {
    constexpr int kStep = 2 * kGroups;
    const int last = std::min((chunk + 1) * kChunk, size);
    Part best[kParts];
    for (Part& part : best) part = splat_part(kNegInf);
    Lanes is_nan = {};
    int i = chunk * kChunk;
    for (; i + kStep <= last; i += kStep) {
      for (int p = 0; p < kParts; p++) {
        const Part a = scores.part(i + p * kPartLanes);
        const Part b = scores.part(i + kGroups + p * kPartLanes);
        is_nan |= unordered(a, b);
        best[p] = larger(a, larger(b, best[p]));
      }
    }
    for (int p = 0; i < last; i += kPartLanes, p = (p + 1) % kParts) {
      const Part v = last - i < kPartLanes ? tail_part(scores, i, last - i) : scores.part(i);
      is_nan |= unordered(v, v);
      best[p] = larger(v, best[p]);
    }
    float* groups = &scratch.best_of_groups[chunk * kGroups];
    Part best_of_all = best[0];
    for (int p = 0; p < kParts; p++) {
      save_part(best[p], groups + p * kPartLanes);
      best_of_all = larger(best[p], best_of_all);
    }
    scratch.best_of_chunks[chunk] = max_of(best_of_all);
    return bits_of(is_nan) == 0;
  }

  // Sets the smallest float that is not below the bound of min_p; lower weights are dropped.
  void set_least_weight(double min_p) {
    const double bound = std::ceil(min_p * kUnit);
    least_weight_ = static_cast<float>(bound);
    if (least_weight_ < bound) {
      least_weight_ = std::nextafter(least_weight_, std::numeric_limits<float>::max());
    }
    const double nats = min_p > 0.0 ? 0.01 - std::log(min_p) : kNoWeight;
    no_weight_ = std::min(static_cast<float>(nats), kNoWeight);
  }

  template <class Sum>
  int64_t sum_of_blocks(int chunk) const {
    const int last = std::min((chunk + 1) * kChunk, size);
    Sum sum;
    for (int i = chunk * kChunk; i < last; i += kBlock) sum.add(weigh(block_at(i, last)));
    return sum.total();
  }

  void append(Part s, int i, uint32_t bits) {
    for (; bits != 0; bits &= bits - 1) {
      const int lane = __builtin_ctz(bits);
      scratch.candidates.push_back({s[lane], i + lane});
    }
  }

  // The number of groups whose maximum exceeds a score.
  int groups_above(float score) const {
    int count = 0;
    for (int i = 0; i < num_groups(); i += kPartLanes) {
      const Part groups = part_at(&scratch.best_of_groups[i]);
      count += __builtin_popcount(bits_of(above(groups, splat_part(score))));
    }
    return count;
  }

  // The lowest finite maximum of a group.
  float least_group() const {
    Part least = splat_part(best_);
    for (int i = 0; i < num_groups(); i += kPartLanes) {
      const Part groups = part_at(&scratch.best_of_groups[i]);
      const Lanes is_less = above(least, groups) & above(groups, splat_part(kNegInf));
      least = select(is_less, groups, least);
    }
    return -max_of(-least);
  }

  const char* upcoming_;
  float best_ = 0.0f, per_nat_ = 1.0f, least_weight_ = 0.0f, no_weight_ = kNoWeight;
  Weigher weigher_;
};

// The cumulative weight in rank order at which top_p ends; at least 1.
inline int64_t top_p_bound(int64_t total, double top_p) {
  const auto bound = static_cast<int64_t>(std::ceil(static_cast<double>(total) * top_p));
  return std::max<int64_t>(1, std::min(bound, total));
}

}  // namespace
