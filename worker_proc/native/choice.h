// Chooses one token of a row of scores, as worker_proc/sampling/inverse_cdf.py defines it.
//
// A first pass finds the best score, and the best of each group of tokens. The weights are computed
// in one further pass, and nothing is sorted but the few tokens around the end of top_k and top_p:
// a sample of the row shows where that end may lie. A wrong guess costs time and changes no token.
// Sums of weights are integers, so their order is free. The last bits of a weight may differ from
// torch's, which computes another exponential function.

#pragma once

#include <algorithm>
#include <vector>

#include "pointwise.h"
#include "exact_sums.h"

namespace {

// `SAMPLING_ROW` of kernels.py.
struct Order {
  int64_t seed, position;
  double min_p, top_p;
  float temperature;               // 0: the most likely token
  int32_t top_k;                   // 0: off
  int32_t row;                     // of the logits
  int32_t mask;                    // line of the masks, or -1
  int32_t first_edit, num_edits;
};

constexpr int kDrawBits = 62;  // NUM_DRAW_BITS of philox.py
// As in inverse_cdf.py: the buckets of similar scores.
constexpr int kNumBuckets = 2048;
constexpr float kBucketsPerNat = kNumBuckets / 28.0f;
constexpr int kChunk = 512;        // tokens; each lane of a chunk is a group
constexpr float kNoWeight = 28.0f;     // nats under the best score: the weight is 0
constexpr float kNarrowNats = 11.2f;   // from here on weights are below 2^24
constexpr float kNearNats = 12.0f;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Philox4x32-10; see worker_proc/sampling/philox.py.
inline int64_t draw(int64_t seed, int64_t position) {
  uint32_t counter[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32)};
  uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  for (int round = 0; round < 10; round++) {
    const uint64_t even = 0xD2511F53ull * counter[0], odd = 0xCD9E8D57ull * counter[2];
    counter[0] = static_cast<uint32_t>(odd >> 32) ^ counter[1] ^ key[0];
    counter[1] = static_cast<uint32_t>(odd);
    counter[2] = static_cast<uint32_t>(even >> 32) ^ counter[3] ^ key[1];
    counter[3] = static_cast<uint32_t>(even);
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return static_cast<int64_t>(counter[0]) << (kDrawBits - 32) | counter[1] >> (64 - kDrawBits);
}

struct Candidate {
  float score;
  int32_t id;

  // The one order of a vocabulary: descending score, ties by ascending id.
  bool operator<(const Candidate& other) const {
    return score > other.score || (score == other.score && id < other.id);
  }
};

// Tokens in the order of their ids; past the last one there is room for 16 more.
struct Tokens {
  std::vector<int32_t> ids, parts;
  std::vector<float> scores, weights;
  int size = 0;

  void reserve(size_t count) {
    if (ids.size() >= count + kLanes) return;
    for (auto* values : {&ids, &parts}) values->resize(count + kLanes);
    for (auto* values : {&scores, &weights}) values->resize(count + kLanes);
  }

  // Without a branch, since it could not be predicted.
  void append(int32_t first_id, uint32_t bits) {
    compress(kLaneNumbers + first_id, bits, &ids[size]);
    size += __builtin_popcount(bits);
  }
};

// A list of vectors. A std::vector of them would take their alignment for 64 bytes.
class Vecs {
 public:
  void clear() { values_.clear(); }
  void push_back(Vec v) {
    values_.resize(values_.size() + kLanes);
    save(v, &values_[values_.size() - kLanes], kLanes);
  }
  size_t size() const { return values_.size() / kLanes; }
  Vec operator[](size_t i) const { return load(&values_[i * kLanes]); }

 private:
  std::vector<float> values_;
};

// Memory of one thread, used again for each row.
struct Scratch {
  Vecs best_of_groups, sample, weights_of_sample;
  std::vector<int64_t> sums;  // of the chunks of a row
  std::vector<float> edited, saved;
  Tokens tokens;
  std::vector<Candidate> candidates;
  std::vector<float> weights;  // of the candidates
  int64_t buckets[kNumBuckets];
};

template <typename T>
class Row {
 public:
  Row(const T* scores, int32_t size, Scratch& scratch)
      : scores_(scores), size_(size), scratch_(scratch) {}

  // Finds the best score; returns whether no score is NaN.
  bool scan() {
    auto& groups = scratch_.best_of_groups;
    groups.clear();
    uint32_t is_nan = 0;
    Vec best_of_all = splat(kNegInf);
    for (int chunk = 0; chunk < num_chunks(); chunk++) {
      Vec best = splat(kNegInf);
      each_part(chunk, [&](int, Vec v) {
        is_nan |= bits_not_a_number(v);
        best = larger(v, best);
      });
      groups.push_back(best);
      best_of_all = larger(best, best_of_all);
    }
    best_ = max_of(best_of_all);
    return is_nan == 0;
  }

  float best() const { return best_; }

  // After a scan; the best score is finite.
  int64_t choose(const Order& order) {
    if (order.temperature == 0.0f) return most_likely();
    per_nat_ = std::min(1.0f / order.temperature, std::numeric_limits<float>::max());
    set_least_weight(order.min_p);
    const int64_t number = draw(order.seed, order.position);
    if (order.top_k > 0) return among_first(order.top_k, order.top_p, number);
    return order.top_p < 1.0 ? within(order.top_p, number) : among_all(number);
  }

  int64_t most_likely() const {
    for (int chunk = 0; chunk < num_chunks(); chunk++) {
      if (bits_of(scratch_.best_of_groups[chunk] == best_) == 0) continue;
      int64_t token = -1;
      each_part(chunk, [&](int i, Vec v) {
        const uint32_t bits = bits_of(v == best_);
        if (token < 0 && bits != 0) token = i + __builtin_ctz(bits);
      });
      return token;
    }
    return 0;
  }

 private:
  int num_chunks() const { return (size_ + kChunk - 1) / kChunk; }

  // Calls part(i, scores) for 16 tokens of a chunk at a time; past the end scores are -inf.
  template <class Part>
  [[gnu::always_inline]] void each_part(int chunk, const Part& part) const {
    const int first = chunk * kChunk, last = std::min(first + kChunk, size_);
    const int rest = (last - first) % kLanes;
    for (int i = first; i < last - rest; i += kLanes) part(i, load(scores_ + i));
    if (rest == 0) return;
    part(last - rest, select((1u << rest) - 1, load_part(scores_ + last - rest, rest), splat(kNegInf)));
  }

  // A weight below it is 0: the least float that is not under the bound.
  void set_least_weight(double min_p) {
    const double bound = std::ceil(min_p * kUnit);
    least_weight_ = static_cast<float>(bound);
    if (least_weight_ < bound) {
      least_weight_ = std::nextafter(least_weight_, std::numeric_limits<float>::max());
    }
    const double nats = min_p > 0.0 ? 0.01 - std::log(min_p) : kNoWeight;
    no_weight_ = std::min(static_cast<float>(nats), kNoWeight);
  }

  Vec distance(Vec score) const { return (best_ - score) * per_nat_; }

  // The weights, from 0 to 2^40; their fractions do not count.
  Vec weigh(Vec score) const {
    const Vec weight = weight_of((score - best_) * per_nat_);
    if (least_weight_ == 0.0f) return weight;
    return select(bits_above(splat(least_weight_), weight), splat(0.0f), weight);
  }

  static int64_t whole(float weight) { return static_cast<int64_t>(weight); }

  bool any_within(int chunk, float nats) const {
    return bits_of(distance(scratch_.best_of_groups[chunk]) < nats) != 0;
  }

  static int64_t scaled(int64_t number, int64_t total) {
    return static_cast<int64_t>(static_cast<unsigned __int128>(number) * total >> kDrawBits);
  }

  // The sum of the sorted weights at which top_p ends; at least 1.
  static int64_t top_p_bound(int64_t total, double top_p) {
    const auto bound = static_cast<int64_t>(std::ceil(static_cast<double>(total) * top_p));
    return std::max<int64_t>(1, std::min(bound, total));
  }

  // The sum of a chunk's weights.
  int64_t sum_chunk(int chunk) const {
    if (!any_within(chunk, no_weight_)) return 0;
    const auto total = [&](auto sum) {
      each_part(chunk, [&](int, Vec s) { sum.add(weigh(s)); });
      return sum.total();
    };
    return any_within(chunk, kNarrowNats) ? total(WideSum()) : total(NarrowSum());
  }

  // Chooses among all tokens, which lie in the order of their ids.
  int64_t among_all(int64_t number) {
    scratch_.sums.clear();
    int64_t total = 0;
    for (int chunk = 0; chunk < num_chunks(); chunk++) {
      scratch_.sums.push_back(sum_chunk(chunk));
      total += scratch_.sums.back();
    }
    return by_id({kNegInf, size_}, scaled(number, total));
  }

  // The token at which the running sum of the tokens up to `last` in the order of the vocabulary,
  // taken by id, exceeds `rest`. `sums` has these sums of the chunks.
  int64_t by_id(Candidate last, int64_t rest) const {
    int chunk = 0;
    for (; chunk + 1 < num_chunks() && rest >= scratch_.sums[chunk]; chunk++) {
      rest -= scratch_.sums[chunk];
    }
    int64_t token = -1;
    each_part(chunk, [&](int i, Vec s) {
      if (token >= 0) return;
      const uint32_t kept = bits_kept(s, kLaneNumbers + i, last);
      const Vec weights = select(kept, weigh(s), splat(0.0f));
      for (int lane = 0; lane < kLanes; lane++) {
        const int64_t own = whole(weights[lane]);
        if (token < 0 && rest < own) token = i + lane;
        rest -= own;
      }
    });
    return token >= 0 ? token : most_likely();  // the latter if the parameters make no sense
  }

  // Scores between which the last token is looked for that top_p keeps.
  struct Bracket {
    float low, high;  // low < score <= high
  };

  // Chooses among the tokens that top_p keeps.
  int64_t within(double top_p, int64_t number) {
    const Bracket bracket = guess(top_p);
    int64_t before = 0;
    const int64_t bound = top_p_bound(split(bracket, before), top_p);
    const Candidate last = last_kept_of_tokens(bracket, before, bound);
    if (last.id < 0) return within_any(bound, number);
    Tokens& tokens = scratch_.tokens;
    for (int i = 0; i < tokens.size; i += kLanes) {
      const VecInt ids = load_int(&tokens.ids[i]);
      const uint32_t kept = bits_kept(load(&tokens.scores[i]), ids, last);
      save(select(kept, load(&tokens.weights[i]), splat(0.0f)), &tokens.weights[i], kLanes);
    }
    int64_t total = 0;
    int at = 0;
    for (int chunk = 0; chunk < num_chunks(); chunk++) {
      int64_t& sum = scratch_.sums[chunk];
      for (; at < tokens.size && tokens.ids[at] < (chunk + 1) * kChunk; at++) {
        sum += whole(tokens.weights[at]);
      }
      total += sum;
    }
    return by_id(last, scaled(number, total));
  }

  // The tokens up to `last` in the order of the vocabulary.
  static uint32_t bits_kept(Vec scores, VecInt ids, Candidate last) {
    return bits_of((scores > last.score) | ((scores == last.score) & (ids <= last.id)));
  }

  // Collects the tokens within the bracket; `sums` become those of the tokens above it, and
  // `above` their sum. Returns the sum of all weights.
  int64_t split(Bracket bracket, int64_t& above) {
    Tokens& tokens = scratch_.tokens;
    tokens.reserve(size_);
    tokens.size = 0;
    scratch_.sums.clear();
    int64_t total = 0;
    for (int chunk = 0; chunk < num_chunks(); chunk++) {
      scratch_.sums.push_back(0);
      if (bits_above(scratch_.best_of_groups[chunk], splat(bracket.low)) == 0) {
        total += sum_chunk(chunk);
        continue;
      }
      if (!any_within(chunk, no_weight_)) continue;
      const auto add = [&](auto sum, auto sum_above) {
        each_part(chunk, [&](int i, Vec s) {
          const Vec weights = weigh(s);
          const uint32_t bits_low = bits_above(s, splat(bracket.low));
          const uint32_t bits_high = bits_above(s, splat(bracket.high));
          sum.add(weights);
          sum_above.add(weights, bits_high);
          tokens.append(i, bits_low & ~bits_high);
        });
        total += sum.total();
        scratch_.sums.back() = sum_above.total();
      };
      if (any_within(chunk, kNarrowNats)) {
        add(WideSum(), WideSum());
      } else {
        add(NarrowSum(), NarrowSum());
      }
      above += scratch_.sums.back();
    }
    return total;
  }

  static constexpr int kFewTokens = 512, kManyTokens = 1024;
  static constexpr int kMaxHalvings = 12;

  // The number of groups with a better score.
  int groups_above(float score) const {
    int count = 0;
    for (int chunk = 0; chunk < num_chunks(); chunk++)
      count += __builtin_popcount(bits_above(scratch_.best_of_groups[chunk], splat(score)));
    return count;
  }

  // Returns a score that more than `least` groups exceed and not many more, or -inf.
  float score_of_groups(int least, int most) const {
    float high = best_;
    Vec least_groups = splat(best_);
    for (int chunk = 0; chunk < num_chunks(); chunk++) {
      const Vec group = scratch_.best_of_groups[chunk];
      least_groups = ((group < least_groups) & (group > kNegInf)) ? group : least_groups;
    }
    const float least_group = fold(least_groups, [](Vec a, Vec b) { return a < b ? a : b; });
    float low = std::nextafter(least_group, kNegInf);
    if (groups_above(low) <= least) return kNegInf;
    for (int i = 0; i < kMaxHalvings; i++) {
      const float middle = low + (high - low) * 0.5f;
      const int count = groups_above(middle);
      (count > least ? low : high) = middle;
      if (count > least && count <= most) break;
    }
    return low;
  }

  // Estimates where top_p ends: the best tokens are known from their groups, and a sample of one in
  // 32 stands for the others.
  Bracket guess(double top_p) {
    const auto& groups = scratch_.best_of_groups;
    const float limit = score_of_groups(kFewTokens, kManyTokens);
    Vec heavy_sums = splat(0.0f), light_sums = splat(0.0f), squares = splat(0.0f);
    for (int chunk = 0; chunk < num_chunks(); chunk++) {
      const uint32_t bits = bits_above(groups[chunk], splat(limit));
      heavy_sums += select(bits, weigh(groups[chunk]), splat(0.0f)) * (1.0f / kUnit);
    }
    auto& sample = scratch_.sample;
    auto& weights = scratch_.weights_of_sample;
    sample.clear();
    weights.clear();
    for (int chunk = 0; chunk < num_chunks(); chunk++) {
      const int at = chunk * kChunk + chunk * 7 % (kChunk / kLanes) * kLanes;
      if (at + kLanes > size_) continue;
      const Vec s = load(scores_ + at);
      const Vec w = select(bits_above(s, splat(limit)), splat(0.0f), weigh(s)) * (1.0f / kUnit);
      sample.push_back(s);
      weights.push_back(w);
      light_sums += w;
      squares += w * w;
    }
    if (sample.size() == 0) return {kNegInf, kInfinity};
    const float each = static_cast<float>(size_) / (sample.size() * kLanes);
    const float heavy = sum_of(heavy_sums), total = heavy + each * sum_of(light_sums);
    const float target = static_cast<float>(top_p) * total;
    const float rest = static_cast<float>(1.0 - top_p);
    const float error = rest * 3.0f * each * std::sqrt(sum_of(squares)) +
                        std::min(0.1f * rest, 0.01f) * total;
    if (target + error < heavy) return {limit, kInfinity};
    // The score above which the sample has a sum.
    const auto score_at = [&](float sum) {
      float low = std::max(best_ - no_weight_ / per_nat_, -std::numeric_limits<float>::max());
      float high = limit;
      for (int i = 0; i < kMaxHalvings; i++) {
        const float middle = low + (high - low) * 0.5f;
        Vec above = splat(0.0f);
        for (size_t k = 0; k < sample.size(); k++)
          above += select(bits_above(sample[k], splat(middle)), weights[k], splat(0.0f));
        (each * sum_of(above) > sum ? low : high) = middle;
      }
      return low + (high - low) * 0.5f;
    };
    Bracket bracket{kNegInf, kInfinity};
    if (target - error > heavy) bracket.high = score_at(target - error - heavy);
    if (target + error < total) bracket.low = score_at(target + error - heavy);
    return bracket;
  }

  // The last token that top_p keeps, of the tokens within the bracket; id -1: it is not there.
  Candidate last_kept_of_tokens(Bracket bracket, int64_t before, int64_t bound) {
    Tokens& tokens = scratch_.tokens;
    if (before >= bound || tokens.size == 0) return {0.0f, -1};
    for (int i = 0; i < tokens.size; i++) tokens.scores[i] = widen(scores_[tokens.ids[i]]);
    constexpr int kNumParts = 512;
    const float high = std::min(bracket.high, best_);
    const float low = std::max(bracket.low, best_ - no_weight_ / per_nat_);
    const float per_score = high > low ? (kNumParts - 1) / (high - low) : 0.0f;
    const Vec end = splat(kNumParts - 1);
    for (int i = 0; i < tokens.size; i += kLanes) {
      const Vec s = load(&tokens.scores[i]);
      save(weigh(s), &tokens.weights[i], kLanes);
      const Vec place = (high - s) * per_score;
      const Vec within = place < end ? place : end;  // the end also if it is NaN
      save_int(__builtin_convertvector(within, VecInt), &tokens.parts[i]);
    }
    int64_t* sums = scratch_.buckets;
    std::fill(sums, sums + kNumParts, 0);
    for (int i = 0; i < tokens.size; i++) sums[tokens.parts[i]] += whole(tokens.weights[i]);
    int part = 0;
    for (; part < kNumParts && before + sums[part] < bound; part++) before += sums[part];
    if (part == kNumParts) return {0.0f, -1};
    scratch_.candidates.clear();
    for (int i = 0; i < tokens.size; i++) {
      if (tokens.parts[i] == part) scratch_.candidates.push_back({tokens.scores[i], tokens.ids[i]});
    }
    return last_kept_of_candidates(before, bound);
  }

  // The last token that top_p keeps, if it is among the candidates.
  Candidate last_kept_of_candidates(int64_t before, int64_t bound) {
    auto& members = scratch_.candidates;
    if (!std::is_sorted(members.begin(), members.end())) std::sort(members.begin(), members.end());
    weigh_candidates();
    for (size_t i = 0; i < members.size(); i++) {
      before += whole(scratch_.weights[i]);
      if (before >= bound) return members[i];
    }
    return {0.0f, -1};
  }

  // Chooses among the tokens that top_p keeps, without a bracket.
  int64_t within_any(int64_t bound, int64_t number) {
    int bucket;
    int64_t before = 0;
    // Most of the weight is near the best score, where few tokens are.
    for (const float nats : {kNearNats, std::numeric_limits<float>::max()}) {
      fill_buckets(nats);
      before = 0;
      for (bucket = 0; bucket < kNumBuckets; bucket++) {
        if (before + scratch_.buckets[bucket] >= bound) break;
        before += scratch_.buckets[bucket];
      }
      if (bucket < kNumBuckets) break;
    }
    scratch_.candidates.clear();
    each_score([&](int i, Vec s) {
      append(s, i, bits_of((bucket_of(distance(s)) == bucket) & (s > kNegInf)));
    });
    Candidate last = last_kept_of_candidates(before, bound);
    if (last.id < 0) last = {kNegInf, size_};  // only if the parameters make no sense
    scratch_.sums.clear();
    int64_t total = 0;
    for (int chunk = 0; chunk < num_chunks(); chunk++) {
      WideSum sum;
      each_part(chunk, [&](int i, Vec s) {
        sum.add(weigh(s), bits_kept(s, kLaneNumbers + i, last));
      });
      scratch_.sums.push_back(sum.total());
      total += scratch_.sums.back();
    }
    return by_id(last, scaled(number, total));
  }

  template <class Part>
  [[gnu::always_inline]] void each_score(const Part& part) const {
    for (int chunk = 0; chunk < num_chunks(); chunk++) each_part(chunk, part);
  }

  static VecInt bucket_of(Vec distance) {
    const Vec place = distance * kBucketsPerNat;
    const Vec end = splat(kNumBuckets - 1);
    return __builtin_convertvector(place < end ? place : end, VecInt);
  }

  // Sums the weights of the tokens that are less than `nats` under the best one, by their score.
  void fill_buckets(float nats) {
    std::fill(scratch_.buckets, scratch_.buckets + kNumBuckets, 0);
    each_score([&](int, Vec s) {
      const Vec d = distance(s);
      uint32_t bits = bits_of(d < nats);
      if (bits == 0) return;
      const VecInt bucket = bucket_of(d);
      const Vec weights = weigh(s);
      for (; bits != 0; bits &= bits - 1) {
        const int lane = __builtin_ctz(bits);
        scratch_.buckets[bucket[lane]] += whole(weights[lane]);
      }
    });
  }

  void append(Vec s, int i, uint32_t bits) {
    for (; bits != 0; bits &= bits - 1) {
      const int lane = __builtin_ctz(bits);
      scratch_.candidates.push_back({s[lane], i + lane});
    }
  }

  void weigh_candidates() {
    const auto& candidates = scratch_.candidates;
    scratch_.weights.resize((candidates.size() + kLanes - 1) / kLanes * kLanes);
    for (size_t i = 0; i < candidates.size(); i += kLanes) {
      Vec s = splat(kNegInf);
      for (size_t lane = 0; lane < kLanes && i + lane < candidates.size(); lane++) {
        s[lane] = candidates[i + lane].score;
      }
      const Vec weights = weigh(s);
      std::memcpy(&scratch_.weights[i], &weights, sizeof weights);
    }
  }

  int64_t weight_of_candidates() const {
    int64_t total = 0;
    for (size_t i = 0; i < scratch_.candidates.size(); i++) total += whole(scratch_.weights[i]);
    return total;
  }

  // Chooses among the first `top_k` tokens, cut by top_p.
  int64_t among_first(int32_t top_k, double top_p, int64_t number) {
    auto& kept = scratch_.candidates;
    kept.clear();
    // At least `top_k` groups have a better score than `limit`, and as many tokens.
    const float limit = score_of_groups(top_k - 1, 2 * std::min(top_k, size_));
    for (int chunk = 0; chunk < num_chunks(); chunk++) {
      if (bits_above(scratch_.best_of_groups[chunk], splat(limit)) == 0) continue;
      each_part(chunk, [&](int i, Vec s) { append(s, i, bits_above(s, splat(limit))); });
    }
    if (kept.size() > static_cast<size_t>(top_k)) {
      std::nth_element(kept.begin(), kept.begin() + (top_k - 1), kept.end());
      kept.resize(top_k);
    }
    if (top_p < 1.0) {
      std::sort(kept.begin(), kept.end());
      weigh_candidates();
      const int64_t bound = top_p_bound(weight_of_candidates(), top_p);
      size_t num_kept = 0;
      for (int64_t sum = 0; sum < bound && num_kept < kept.size(); num_kept++) {
        sum += whole(scratch_.weights[num_kept]);
      }
      kept.resize(num_kept);
    }
    const auto has_lower_id = [](const Candidate& a, const Candidate& b) { return a.id < b.id; };
    std::sort(kept.begin(), kept.end(), has_lower_id);
    weigh_candidates();
    const int64_t total = weight_of_candidates();
    int64_t rest = scaled(number, total);
    for (size_t i = 0; i < kept.size(); i++) {
      const int64_t own = whole(scratch_.weights[i]);
      if (rest < own) return kept[i].id;
      rest -= own;
    }
    return most_likely();  // only if the parameters make no sense
  }

  const T* scores_;
  const int32_t size_;
  Scratch& scratch_;
  float best_ = 0.0f, per_nat_ = 1.0f, least_weight_ = 0.0f, no_weight_ = kNoWeight;
};

}  // namespace
