// Chooses one token of a row of scores, as worker_proc/sampling/inverse_cdf.py defines it.
//
// A first pass finds the best score, and the best of each group of tokens. In most rows a few
// tokens have nearly all of the weight, and a bound for the weights of the others shows which token
// the draw takes (`among_heavy`). Where it does not, one further pass computes all weights, or takes
// them from a table (`value_weights.h`). Nothing is sorted but few tokens: a sample of the row shows
// where top_p may end. A wrong guess or a loose bound costs time and changes no token.
// Sums of weights are integers, so their order is free. The last bits of a weight may differ from
// torch's, which computes another exponential function.

#pragma once

#include <algorithm>
#include <vector>

#include "sampling/value_weights.h"

namespace {

// `SAMPLING_ROW` of structures.py.
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
constexpr int kChunk = 512;  // tokens
constexpr int kGroups = 16;  // of a chunk: every 16th token is of one group
constexpr int kGroupSize = kChunk / kGroups;
constexpr float kNoWeight = 28.0f;     // nats under the best score: the weight is 0
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

// Tokens; past the last one there is room for 16 more.
struct Tokens {
  std::vector<int32_t> ids, parts;
  std::vector<float> scores, weights;
  int size = 0;

  void reserve(size_t count) {
    if (ids.size() >= count + kLanes) return;
    for (auto* values : {&ids, &parts}) values->resize(count + kLanes);
    for (auto* values : {&scores, &weights}) values->resize(count + kLanes);
  }

  // Adds the tokens from an id on that have a bit. Few do, of which there is no branch for each one,
  // since it could not be predicted.
  void append(int32_t first_id, uint64_t bits) {
    constexpr int kFew = 4;
    int32_t* to = &ids[size];
    size += __builtin_popcountll(bits);
    for (; bits != 0; to += kFew)
      for (int i = 0; i < kFew; i++, bits &= bits - 1) to[i] = first_id + lowest_bit(bits);
  }

 private:
  static int lowest_bit(uint64_t bits) {
#ifdef __BMI__
    return static_cast<int>(_tzcnt_u64(bits));
#else
    return bits == 0 ? 64 : __builtin_ctzll(bits);
#endif
  }
};

// Memory of one thread, used again for each row.
struct Scratch {
  std::vector<float> best_of_chunks, best_of_groups, weights_of_groups;
  std::vector<int32_t> chunks;  // to scan again, whose best score is infinite until then
  std::vector<float> sample, weights_of_sample;
  std::vector<int64_t> sums;  // of the chunks of a row
  Tokens tokens;
  ValueWeights values;
  std::vector<uint16_t> places;
  std::vector<int32_t> ends;  // of the chunks, in the places
  std::vector<int32_t> counts;
  std::vector<int64_t> kept;
  std::vector<Candidate> candidates, sorted;
  std::vector<float> weights, weights_of_sorted;  // of the candidates
  int64_t buckets[kNumBuckets];
};

// Tokens whose scores are not those of the logits. Their order is free, and behind the last score there
// is room for a part.
struct EditedTokens {
  int size = 0;
  const int32_t* ids = nullptr;
  const float* scores = nullptr;
};

// The scores of a row of logits.
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

// `Scores` has part(i), the scores from i on, a multiple of kPartLanes, and at(i), a single one. What
// is without edited tokens has the score -inf in their place. Where they are edited, unedited(i) has a bit
// for each token from i on whose score is its logit.
template <class Scores>
class Row {
 public:
  using Value = typename Scores::Value;

  // `upcoming` are values that the thread probably reads next, as many, or null.
  Row(const Scores& scores, int32_t size, Scratch& scratch, const Value* upcoming = nullptr)
      : scores_(scores),
        size_(size),
        scratch_(scratch),
        upcoming_(reinterpret_cast<const char*>(upcoming)) {}

  // Finds the best score; returns whether no score is NaN.
  bool scan() {
    scratch_.best_of_chunks.resize(num_chunks());
    scratch_.best_of_groups.resize(num_chunks() * kGroups);
    bool is_number = true;
    best_ = kNegInf;
    for (int chunk = 0; chunk < num_chunks(); chunk++) {
      is_number &= scan_chunk(chunk);
      best_ = std::max(best_, scratch_.best_of_chunks[chunk]);
    }
    return is_number;
  }

  // The same where a scan of the logits came before, and no other scores than those of the edited tokens
  // differ from them.
  void scan_edited() {
    scratch_.chunks.clear();
    const EditedTokens edited = scores_.edited();
    for (int i = 0; i < edited.size; i++) {
      const int id = edited.ids[i], chunk = id / kChunk;
      const float score = edited.scores[i], logit = scores_.logit(id);
      float& best = scratch_.best_of_groups[chunk * kGroups + id % kGroups];
      float& best_of_chunk = scratch_.best_of_chunks[chunk];
      if (score < logit && logit == best && best_of_chunk < kInfinity) {
        scratch_.chunks.push_back(chunk);  // which of the group's other scores is the best is not known
        best_of_chunk = kInfinity;
      }
      best = std::max(best, score);
      best_of_chunk = std::max(best_of_chunk, score);
    }
    for (const int32_t chunk : scratch_.chunks) scan_chunk(chunk);
    best_ = kNegInf;
    for (const float best : scratch_.best_of_chunks) best_ = std::max(best_, best);
  }

  float best() const { return best_; }

  // After a scan; the best score is finite.
  int64_t choose(const Order& order) {
    if (order.temperature == 0.0f) return most_likely();
    per_nat_ = std::min(1.0f / order.temperature, std::numeric_limits<float>::max());
    weigher_ = Weigher(best_, per_nat_);
    set_least_weight(order.min_p);
    const int64_t number = draw(order.seed, order.position);
    if (order.top_k > 0) return among_first(order.top_k, order.top_p, number);
    const int64_t token = among_heavy(order.top_p, number);
    if (token >= 0) return token;
    return order.top_p < 1.0 ? within(order.top_p, number) : among_all(number);
  }

  int64_t most_likely() const {
    for (int chunk = 0; chunk < num_chunks(); chunk++) {
      if (scratch_.best_of_chunks[chunk] != best_) continue;
      int64_t token = -1;
      each_part(chunk, [&](int i, Part v) {
        const uint32_t bits = bits_of(equal(v, splat_part(best_)));
        if (token < 0 && bits != 0) token = i + __builtin_ctz(bits);
      });
      return token;
    }
    return 0;
  }

 private:
  int num_chunks() const { return (size_ + kChunk - 1) / kChunk; }
  int num_groups() const { return num_chunks() * kGroups; }

  // The last `count` scores from i on; the other lanes are -inf.
  template <class Some>
  static Part part_of_rest(const Some& scores, int i, int count) {
    float rest[kPartLanes];
    std::fill(rest, rest + kPartLanes, kNegInf);
    for (int lane = 0; lane < count; lane++) rest[lane] = scores.at(i + lane);
    return part_at(rest);
  }

  // Calls part(i, scores) for the parts of a chunk; past the end scores are -inf.
  template <class F>
  [[gnu::always_inline]] void each_part(int chunk, const F& part) const {
    each_part(scores_, chunk, part);
  }

  template <class Some, class F>
  [[gnu::always_inline]] void each_part(const Some& scores, int chunk, const F& part) const {
    const int last = std::min((chunk + 1) * kChunk, size_);
    int i = chunk * kChunk;
    for (; i + kPartLanes <= last; i += kPartLanes) part(i, scores.part(i));
    if (i < last) part(i, part_of_rest(scores, i, last - i));
  }

  // A block of a chunk that ends at `last`, without edited tokens.
  [[gnu::always_inline]] Block block_at(int i, int last) const {
    const auto some = scores_.without_edited();
    Block scores;
    if (i + kBlock <= last) {
      for (int p = 0; p < kBlockParts; p++) scores.parts[p] = some.part(i + p * kPartLanes);
      return scores;
    }
    for (int p = 0; p < kBlockParts; p++) {
      const int first = i + p * kPartLanes;
      scores.parts[p] = part_of_rest(some, first, std::clamp(last - first, 0, kPartLanes));
    }
    return scores;
  }

  // Finds the best scores of a chunk and its groups; returns whether no score is NaN.
  [[gnu::always_inline]] bool scan_chunk(int chunk) {
    constexpr int kStep = 2 * kGroups;
    const int last = std::min((chunk + 1) * kChunk, size_);
    Part best[kParts];
    for (Part& part : best) part = splat_part(kNegInf);
    Lanes is_nan = {};
    int i = chunk * kChunk;
    for (; i + kStep <= last; i += kStep) {
      for (int p = 0; p < kParts; p++) {
        const Part a = scores_.part(i + p * kPartLanes);
        const Part b = scores_.part(i + kGroups + p * kPartLanes);
        is_nan |= unordered(a, b);
        best[p] = larger(a, larger(b, best[p]));
      }
    }
    for (int p = 0; i < last; i += kPartLanes, p = (p + 1) % kParts) {
      const Part v = last - i < kPartLanes ? part_of_rest(scores_, i, last - i) : scores_.part(i);
      is_nan |= unordered(v, v);
      best[p] = larger(v, best[p]);
    }
    float* groups = &scratch_.best_of_groups[chunk * kGroups];
    Part best_of_all = best[0];
    for (int p = 0; p < kParts; p++) {
      save_part(best[p], groups + p * kPartLanes);
      best_of_all = larger(best[p], best_of_all);
    }
    scratch_.best_of_chunks[chunk] = max_of(best_of_all);
    return bits_of(is_nan) == 0;
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

  Part distance(Part score) const { return (best_ - score) * per_nat_; }

  // The weights, where those that min_p drops are 0.
  Part weigh(Part score) const {
    const Part weights = weigher_(score);
    if (least_weight_ == 0.0f) return weights;
    return select(above(splat_part(least_weight_), weights), Part{}, weights);
  }

  [[gnu::always_inline]] Block weigh(const Block& scores) const {
    Block weights = weigher_(scores);
    if (least_weight_ == 0.0f) return weights;
    for (Part& part : weights.parts) {
      part = select(above(splat_part(least_weight_), part), Part{}, part);
    }
    return weights;
  }

  static int64_t whole(float weight) { return static_cast<int64_t>(weight); }

  bool any_within(int chunk, float nats) const {
    return (best_ - scratch_.best_of_chunks[chunk]) * per_nat_ < nats;
  }

  static int64_t scaled(int64_t number, int64_t total) {
    return static_cast<int64_t>(static_cast<unsigned __int128>(number) * total >> kDrawBits);
  }

  // The sum of the sorted weights at which top_p ends; at least 1.
  static int64_t top_p_bound(int64_t total, double top_p) {
    const auto bound = static_cast<int64_t>(std::ceil(static_cast<double>(total) * top_p));
    return std::max<int64_t>(1, std::min(bound, total));
  }

  // The tokens with a score above `limit`, and a bound for the sum of the weights of all others.
  struct Heavy {
    float limit;
    int64_t others;
  };

  static constexpr int kMaxHeavyGroups = 1024;

  // Returns a score that is lower than `limit` by what rounding may have added to it.
  float below(float limit) const {
    const float size = std::max(std::fabs(limit), std::fabs(best_));
    return limit - (std::nextafter(size, kInfinity) - size);
  }

  // Returns the highest limit that leaves little weight to the other tokens, others -1: none does.
  Heavy find_heavy() {
    weigh_groups();
    const float* scores = scratch_.best_of_groups.data();
    const float* weights = scratch_.weights_of_groups.data();
    for (const float nats : {8.0f, 12.0f, 16.0f, 20.0f, kNoWeight}) {
      const float limit = below(best_ - std::min(nats, no_weight_) / per_nat_);
      Part heavy = {}, light = {};
      int count = 0;
      for (int i = 0; i < num_groups(); i += kPartLanes) {
        const Lanes is_heavy = above(part_at(scores + i), splat_part(limit));
        heavy += select(is_heavy, part_at(weights + i), Part{});
        light += select(is_heavy, Part{}, part_at(weights + i));
        count += __builtin_popcount(bits_of(is_heavy));
      }
      if (count > kMaxHeavyGroups) break;
      if (nats >= no_weight_) return {limit, 0};
      // Rounding errors are smaller than the factor allows for.
      const float others = 1.001f * (kGroupSize * sum_of(light) +
                                     (kGroupSize - 1) * count * weigher_.of(limit));
      if (others * count < sum_of(heavy) / 8) return {limit, static_cast<int64_t>(others) + 1};
    }
    return {0.0f, -1};
  }

  void weigh_groups() {
    scratch_.weights_of_groups.resize(num_groups());
    for (int i = 0; i < num_groups(); i += kPartLanes) {
      const Part scores = part_at(&scratch_.best_of_groups[i]);
      save_part(weigher_(scores), &scratch_.weights_of_groups[i]);
    }
  }

  // Chooses a token from the heavy ones alone; -1: the others may change the choice.
  int64_t among_heavy(double top_p, int64_t number) {
    const Heavy heavy = find_heavy();
    if (heavy.others < 0) return -1;
    collect_above(heavy.limit);
    weigh_candidates();
    const auto& kept = scratch_.candidates;
    int64_t total = weight_of_candidates(), others = heavy.others;
    Candidate last{kNegInf, size_};
    if (top_p < 1.0) {
      last = last_of_heavy(total, others, top_p);
      if (last.id < 0) return -1;
      total = 0, others = 0;
      for (size_t i = 0; i < kept.size(); i++) {
        if (last < kept[i]) scratch_.weights[i] = 0.0f;
        total += whole(scratch_.weights[i]);
      }
    }
    // The other tokens may lie anywhere before the chosen one.
    const int64_t least = scaled(number, total), most = scaled(number, total + others);
    int64_t sum = 0;
    for (size_t i = 0; i < kept.size(); i++) {
      const int64_t before = sum;
      sum += whole(scratch_.weights[i]);
      if (least < sum) return before + others <= least && most < sum ? kept[i].id : -1;
    }
    return -1;
  }

  // The last token that top_p keeps, whatever the others weigh; id -1: that depends on them.
  Candidate last_of_heavy(int64_t total, int64_t others, double top_p) {
    auto& sorted = scratch_.sorted;
    sorted = scratch_.candidates;
    std::sort(sorted.begin(), sorted.end());
    const int64_t least = top_p_bound(total, top_p), most = top_p_bound(total + others, top_p);
    weigh_all(sorted, scratch_.weights_of_sorted);
    int64_t sum = 0;
    for (size_t i = 0; i < sorted.size(); i++) {
      sum += whole(scratch_.weights_of_sorted[i]);
      if (sum >= most) return sorted[i];
      if (sum >= least) break;
    }
    return {0.0f, -1};
  }

  // Fetches the chunk of the upcoming row, while this one is computed.
  void fetch_upcoming(int chunk) const {
    constexpr int kLine = 64, kBytes = kChunk * sizeof(Value);
    if (upcoming_ == nullptr) return;
    for (int i = 0; i < kBytes; i += kLine) __builtin_prefetch(upcoming_ + chunk * kBytes + i, 0, 2);
  }

  // Calls f(id, score, weight) for the edited tokens.
  template <class F>
  void each_edited(const F& f) const {
    const EditedTokens edited = scores_.edited();
    for (int i = 0; i < edited.size; i += kPartLanes) {
      const Part scores = part_at(edited.scores + i), weights = weigh(scores);
      const int count = std::min(kPartLanes, edited.size - i);
      for (int lane = 0; lane < count; lane++)
        f(edited.ids[i + lane], scores[lane], whole(weights[lane]));
    }
  }

  // The sum of a chunk's weights, without edited tokens.
  int64_t sum_chunk(int chunk) const {
    if (!any_within(chunk, no_weight_)) return 0;
    return any_within(chunk, kNarrowNats) ? sum_of_blocks<WideSum>(chunk)
                                          : sum_of_blocks<NarrowSum>(chunk);
  }

  template <class Sum>
  int64_t sum_of_blocks(int chunk) const {
    const int last = std::min((chunk + 1) * kChunk, size_);
    Sum sum;
    for (int i = chunk * kChunk; i < last; i += kBlock) sum.add(weigh(block_at(i, last)));
    return sum.total();
  }

  // Chooses among all tokens, which lie in the order of their ids.
  int64_t among_all(int64_t number) {
    scratch_.sums.clear();
    int64_t total = 0;
    for (int chunk = 0; chunk < num_chunks(); chunk++) {
      fetch_upcoming(chunk);
      scratch_.sums.push_back(sum_chunk(chunk));
      total += scratch_.sums.back();
    }
    each_edited([&](int32_t id, float, int64_t weight) {
      scratch_.sums[id / kChunk] += weight;
      total += weight;
    });
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
    return token >= 0 ? token : most_likely();  // the latter if the parameters make no sense
  }

  // Scores between which the last token is looked for that top_p keeps.
  struct Bracket {
    float low, high;  // low < score <= high

    // Wider ones beside it.
    Bracket below() const { return {low - kWider * (high - low), low}; }
    Bracket above() const { return {high, high + kWider * (high - low)}; }
    static constexpr float kWider = 4.0f;
  };
  static constexpr int kMostTries = 3;

  // Chooses among the tokens that top_p keeps.
  int64_t within(double top_p, int64_t number) {
    if constexpr (std::is_same_v<Value, Bf16>) {
      if (scores_.logits && has_few_values()) return within_values(top_p, number);
    }
    const auto score_of = [&](float sum, float limit) { return score_at(sum, limit); };
    Bracket bracket = guess(top_p, score_of);
    int64_t before = 0, bound = 0;
    Candidate last{0.0f, -1};
    for (int tries = 0; last.id < 0; tries++) {
      if (tries == kMostTries) return within_any(bound, number);
      if (tries > 0) bracket = before < bound ? bracket.below() : bracket.above();
      before = 0;
      bound = top_p_bound(split(bracket, before), top_p);
      last = last_kept_of_tokens(bracket, before, bound);
    }
    Tokens& tokens = scratch_.tokens;
    for (int i = 0; i < tokens.size; i += kPartLanes) {
      const PartInt ids = int_at(&tokens.ids[i]);
      const Lanes kept = lanes_kept(part_at(&tokens.scores[i]), ids, last);
      save_part(select(kept, part_at(&tokens.weights[i]), Part{}), &tokens.weights[i]);
    }
    int64_t total = before;
    for (int i = 0; i < tokens.size; i++) {
      const int64_t weight = whole(tokens.weights[i]);
      scratch_.sums[tokens.ids[i] / kChunk] += weight;
      total += weight;
    }
    return by_id(last, scaled(number, total));
  }

  // Whether a table of the weights of all values takes less time than the weights of all tokens.
  bool has_few_values() {
    constexpr int kTokensOfValue = 4;
    const float least = best_ - (kNoWeight + 0.1f) / per_nat_;
    const int count = scratch_.values.set_range(best_, least);
    return count > 0 && count * kTokensOfValue <= size_;
  }

  // Places among which the last token is that top_p keeps.
  struct PlaceBracket {
    int low, high;  // low < place <= high

    // Wider ones beside it.
    PlaceBracket below() const { return {std::max(0, low - width()), low}; }
    PlaceBracket above(int last) const { return {high, std::min(high + width(), last)}; }
    int width() const { return 4 * (high - low + 1); }
  };

  // What top_p keeps of the tokens within a bracket of places, from the best ones on.
  struct KeptPlaces {
    int64_t sum;          // of the weights above the bracket and of those that are kept before `last`
    int last;             // the place where top_p ends; places above it are kept
    int64_t num_last;     // tokens of this place that are kept, in the order of their ids
    size_t edited, ties;  // edited tokens that are kept before those, and the end of those of this place
  };

  // As `within`, with a table of weights. All tokens of a place of the table have the same weight,
  // so that the counts of the places show which token is the last one that top_p keeps. Edited tokens
  // are no part of the table, and have any scores.
  int64_t within_values(double top_p, int64_t number) {
    ValueWeights& values = scratch_.values;
    PlaceBracket bracket = guess_places(top_p);
    KeptPlaces kept{};
    int64_t bound = 0;
    for (int tries = 1; true; tries++) {
      values.set_limit(bracket.high);
      Pair total = split_places(bracket);
      add_edited_above(bracket, total);
      bound = top_p_bound(total[0], top_p);
      const bool is_above = total[1] >= bound;
      if (!is_above) {
        count_places(bracket);
        kept = keep_places(bracket, total[1], bound);
        if (kept.last > bracket.low) break;
      }
      if (tries == kMostTries) return within_any(bound, number);
      bracket = is_above ? bracket.above(values.last_place()) : bracket.below();
    }
    const auto& edited = scratch_.candidates;
    Candidate last{values.score_of(kept.last), size_};
    if (kept.num_last == 0) last = edited[kept.edited - 1];
    if (values.is_shared(values.place_of(last.score))) return within_any(bound, number);
    for (size_t i = 0; i < kept.edited; i++)
      scratch_.sums[edited[i].id / kChunk] += whole(scratch_.weights[i]);
    const int64_t rest = scaled(number, kept.sum + kept.num_last * values.weight_of(kept.last));
    const int32_t last_id = add_kept_places(bracket, kept, rest);
    if (kept.num_last > 0) last.id = last_id;
    return by_id(last, rest);
  }

  // Adds the weights of edited tokens to the sum of all, and to those of tokens above the bracket. The
  // candidates become the edited tokens within it, from the best one on.
  void add_edited_above(PlaceBracket bracket, Pair& total) {
    auto& within = scratch_.candidates;
    within.clear();
    const float low = scratch_.values.score_of(bracket.low);
    const float high = scratch_.values.score_of(bracket.high);
    each_edited([&](int32_t id, float score, int64_t weight) {
      total[0] += weight;
      if (score > high) {
        total[1] += weight;
        scratch_.sums[id / kChunk] += weight;
      } else if (score > low) {
        within.push_back({score, id});
      }
    });
    std::sort(within.begin(), within.end());
    weigh_candidates();
  }

  // Keeps tokens from the best ones of the bracket on until the sum of the weights, with those above the
  // bracket, reaches the bound. The last place is that below the bracket if all of them do not.
  KeptPlaces keep_places(PlaceBracket bracket, int64_t sum, int64_t bound) {
    const ValueWeights& values = scratch_.values;
    const auto& edited = scratch_.candidates;
    size_t next = 0;
    int place = bracket.high;
    for (; place > bracket.low; place--) {
      const float score = values.score_of(place);
      for (; next < edited.size() && edited[next].score > score; next++) {
        sum += whole(scratch_.weights[next]);
        if (sum >= bound) return {sum, place, 0, next + 1, next + 1};
      }
      const size_t first = next;
      while (next < edited.size() && edited[next].score == score) next++;
      const int64_t count = scratch_.counts[place - bracket.low] + static_cast<int64_t>(next - first);
      const int64_t own = values.weight_of(place);
      if (sum + count * own >= bound) return {sum, place, (bound - sum + own - 1) / own, first, next};
      sum += count * own;
    }
    return {sum, place, 0, next, next};
  }

  PlaceBracket guess_places(double top_p) {
    ValueWeights& values = scratch_.values;
    values.fill([&](Part scores) { return weigh(scores); });
    bool is_counted = false;
    const Bracket bracket = guess(top_p, [&](float sum, float limit) {
      if (!is_counted) count_sample();
      is_counted = true;
      return values.score_at(sum, limit);
    });
    // The score that a sum leads to may be that of the last token.
    const int low = std::max(0, values.place_of(bracket.low) - 1);
    return {low, std::max(low, values.place_of(bracket.high))};
  }

  // Counts the values of the sample that `guess` takes.
  void count_sample() {
    scratch_.values.clear_counts();
    for (int chunk = 0; chunk < num_chunks(); chunk++) {
      const int i = sample_of(chunk);
      if (i + kGroups > size_) continue;
      if constexpr (Scores::kAreEdited) {
        scratch_.values.count<kGroups>(scores_.logits + i, scores_.unedited(i));
        uint32_t edited = scores_.bits_from(i) & ((1u << kGroups) - 1);
        for (; edited != 0; edited &= edited - 1)
          scratch_.values.count(scores_.at(i + __builtin_ctz(edited)));
      } else {
        scratch_.values.count<kGroups>(scores_.logits + i);
      }
    }
  }

  // Writes twice the places of the tokens of a chunk; edited ones get place 0.
  [[gnu::always_inline]] void double_places_of(int chunk, uint16_t* doubled) const {
    constexpr int kWord = 32;
    const int first = chunk * kChunk, count = std::min(kChunk, size_ - first);
    scratch_.values.double_places_of(scores_.logits + first, count, doubled);
    if constexpr (Scores::kAreEdited)
      for (int i = 0; i < count; i += kWord)
        ValueWeights::keep_places(doubled + i, scores_.unedited(first + i));
  }

  // Collects the places within the bracket, and sums the weights above it for each chunk. Returns
  // the sums of all weights and of those above it. None of them are of edited tokens.
  Pair split_places(PlaceBracket bracket) {
    const ValueWeights& values = scratch_.values;
    auto& places = scratch_.places;
    if (places.size() < static_cast<size_t>(size_) + kChunk) places.resize(size_ + kChunk);
    scratch_.ends.clear();
    scratch_.sums.clear();
    Pair total = {};
    int count = 0;
    for (int chunk = 0; chunk < num_chunks(); chunk++) {
      fetch_upcoming(chunk);
      Pair sums = {};
      if (any_within(chunk, no_weight_)) {
        uint16_t doubled[kChunk];
        double_places_of(chunk, doubled);
        sums = values.sum(doubled);
        count += ValueWeights::copy_within(doubled, bracket.low, bracket.high, &places[count]);
      }
      scratch_.ends.push_back(count);
      scratch_.sums.push_back(sums[1]);
      total += sums;
    }
    return total;
  }

  // Counts the tokens of each place within the bracket.
  void count_places(PlaceBracket bracket) {
    constexpr int kCounts = 4;  // side by side: an addition waits for the one before
    const int size = bracket.high - bracket.low + 1, num_places = scratch_.ends.back();
    auto& counts = scratch_.counts;
    counts.assign(kCounts * size, 0);
    for (int i = 0; i < num_places; i++) {
      counts[i % kCounts * size + scratch_.places[i] - bracket.low]++;
    }
    for (int i = size; i < kCounts * size; i++) counts[i % size] += counts[i];
  }

  // Adds the weights of the tokens within the bracket that top_p keeps to the sums of the chunks, up
  // to the one where they exceed `rest`; of edited tokens, only those of the last place. Returns the last
  // token of that place, or the size of the vocabulary if that is in a later chunk.
  int32_t add_kept_places(PlaceBracket bracket, const KeptPlaces& all, int64_t rest) {
    const ValueWeights& values = scratch_.values;
    const int last = all.last;
    int64_t num_last = all.num_last;
    size_t tie = all.edited;
    auto& kept = scratch_.kept;
    kept.assign(bracket.high - bracket.low + 1, 0);
    for (int place = last + 1; place <= bracket.high; place++) {
      kept[place - bracket.low] = values.weight_of(place);
    }
    int32_t last_id = size_;
    int i = 0;
    for (int chunk = 0; chunk < num_chunks() && rest >= 0; chunk++) {
      int64_t sum = 0, count = 0;
      for (; i < scratch_.ends[chunk]; i++) {
        sum += kept[scratch_.places[i] - bracket.low];
        count += scratch_.places[i] == last;
      }
      for (; tie < all.ties && scratch_.candidates[tie].id / kChunk == chunk; tie++) count++;
      if (num_last > 0 && count >= num_last) {
        last_id = chunk * kChunk - 1;
        for (count = 0; count < num_last;) count += scores_.at(++last_id) == values.score_of(last);
      }
      count = std::min(count, num_last);
      num_last -= count;
      scratch_.sums[chunk] += sum + count * values.weight_of(last);
      rest -= scratch_.sums[chunk];
    }
    return last_id;
  }

  // The tokens up to `last` in the order of the vocabulary.
  static Lanes lanes_kept(Part scores, PartInt ids, Candidate last) {
    const Part limit = splat_part(last.score);
    return above(scores, limit) | (equal(scores, limit) & at_most(ids, splat_int(last.id)));
  }

  // Collects the tokens within the bracket; `sums` become those of the tokens above it, and
  // `before` their sum. Returns the sum of all weights.
  int64_t split(Bracket bracket, int64_t& before) {
    Tokens& tokens = scratch_.tokens;
    tokens.reserve(size_);
    tokens.size = 0;
    scratch_.sums.clear();
    int64_t total = 0;
    for (int chunk = 0; chunk < num_chunks(); chunk++) {
      fetch_upcoming(chunk);
      scratch_.sums.push_back(0);
      if (!(scratch_.best_of_chunks[chunk] > bracket.low)) {
        total += sum_chunk(chunk);
        continue;
      }
      if (!any_within(chunk, no_weight_)) continue;
      total += split_chunk(chunk, bracket);
      before += scratch_.sums.back();
    }
    each_edited([&](int32_t id, float score, int64_t weight) {
      total += weight;
      if (score > bracket.high) {
        scratch_.sums[id / kChunk] += weight;
        before += weight;
      } else if (score > bracket.low) {
        tokens.ids[tokens.size++] = id;
      }
    });
    return total;
  }

  // The same of one chunk. What it writes is no part of what it reads: so that stays in registers.
  int64_t split_chunk(int chunk, Bracket bracket) {
    const Row row = *this;
    const Part low = splat_part(bracket.low), high = splat_part(bracket.high);
    uint64_t within[kChunk / 64] = {};
    WideSum sum, sum_above;
    const int last = std::min((chunk + 1) * kChunk, size_);
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
    for (int i = 0; i < kChunk / 64; i++) scratch_.tokens.append(chunk * kChunk + i * 64, within[i]);
    scratch_.sums.back() = sum_above.total();
    return sum.total();
  }

  static constexpr int kFewTokens = 512, kManyTokens = 1024;
  static constexpr int kMaxHalvings = 12;

  // The number of groups with a better score.
  int groups_above(float score) const {
    int count = 0;
    for (int i = 0; i < num_groups(); i += kPartLanes) {
      const Part groups = part_at(&scratch_.best_of_groups[i]);
      count += __builtin_popcount(bits_of(above(groups, splat_part(score))));
    }
    return count;
  }

  // The least best score of a group that has a token with a finite score.
  float least_group() const {
    Part least = splat_part(best_);
    for (int i = 0; i < num_groups(); i += kPartLanes) {
      const Part groups = part_at(&scratch_.best_of_groups[i]);
      const Lanes is_less = above(least, groups) & above(groups, splat_part(kNegInf));
      least = select(is_less, groups, least);
    }
    return -max_of(-least);
  }

  // Returns a score that more than `least` groups exceed and not many more, or -inf.
  float score_of_groups(int least, int most) const {
    float high = best_, low = std::nextafter(least_group(), kNegInf);
    if (groups_above(low) <= least) return kNegInf;
    for (int i = 0; i < kMaxHalvings; i++) {
      const float middle = low + (high - low) * 0.5f;
      const int count = groups_above(middle);
      (count > least ? low : high) = middle;
      if (count > least && count <= most) break;
    }
    return low;
  }

  // The first token of a chunk's sample.
  static int sample_of(int chunk) { return chunk * kChunk + chunk * 7 % kGroupSize * kGroups; }

  // Estimates where top_p ends: the best tokens are known from their groups, and a sample of one in
  // 32 stands for the others.
  template <class ScoreAt>
  Bracket guess(double top_p, const ScoreAt& score_at) {
    const float limit = score_of_groups(kFewTokens, kManyTokens);
    Part heavy_sums = {}, light_sums = {}, squares = {};
    for (int i = 0; i < num_groups(); i += kPartLanes) {
      const Part weights = part_at(&scratch_.weights_of_groups[i]);
      const Lanes is_heavy = above(part_at(&scratch_.best_of_groups[i]), splat_part(limit)) &
                             ~above(splat_part(least_weight_), weights);
      heavy_sums += select(is_heavy, weights, Part{}) / kUnit;
    }
    auto& sample = scratch_.sample;
    auto& weights = scratch_.weights_of_sample;
    const int most = (num_chunks() * kGroups + kBlock - 1) / kBlock * kBlock;
    sample.resize(most);
    weights.resize(most);
    int count = 0;
    for (int chunk = 0; chunk < num_chunks(); chunk++) {
      int i = sample_of(chunk);
      if (i + kGroups > size_) continue;
      for (const int last = i + kGroups; i < last; i += kPartLanes, count += kPartLanes) {
        const Part s = scores_.part(i);
        const Part w = select(above(s, splat_part(limit)), Part{}, weigh(s)) / kUnit;
        save_part(s, &sample[count]);
        save_part(w, &weights[count]);
        light_sums += w;
        squares += w * w;
      }
    }
    if (count == 0) return {kNegInf, kInfinity};
    const float each = static_cast<float>(size_) / count;
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

  // The sum of the weights of the sample's tokens with a better score.
  float sample_above(float score) const {
    constexpr int kSums = kBlockParts;  // side by side: an addition waits for the one before
    Part sums[kSums] = {};
    for (size_t k = 0; k < scratch_.sample.size(); k += kSums * kPartLanes) {
      for (int i = 0; i < kSums; i++) {
        const size_t place = k + i * kPartLanes;
        const Lanes is_above = above(part_at(&scratch_.sample[place]), splat_part(score));
        sums[i] += select(is_above, part_at(&scratch_.weights_of_sample[place]), Part{});
      }
    }
    return sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
  }

  // The score, below `high`, above which the weights of the sample have a sum.
  float score_at(float sum, float high) const {
    float low = std::max(best_ - no_weight_ / per_nat_, -std::numeric_limits<float>::max());
    for (int i = 0; i < kMaxHalvings; i++) {
      const float middle = low + (high - low) * 0.5f;
      (sample_above(middle) > sum ? low : high) = middle;
    }
    return low + (high - low) * 0.5f;
  }

  // The last token that top_p keeps, of the tokens within the bracket; id -1: it is not there.
  Candidate last_kept_of_tokens(Bracket bracket, int64_t before, int64_t bound) {
    Tokens& tokens = scratch_.tokens;
    if (before >= bound || tokens.size == 0) return {0.0f, -1};
    for (int i = 0; i < tokens.size; i++) tokens.scores[i] = scores_.at(tokens.ids[i]);
    constexpr int kNumParts = 512;
    const float high = std::min(bracket.high, best_);
    const float low = std::max(bracket.low, best_ - no_weight_ / per_nat_);
    const float per_score = high > low ? (kNumParts - 1) / (high - low) : 0.0f;
    const Part end = splat_part(kNumParts - 1);
    for (int i = 0; i < tokens.size; i += kPartLanes) {
      const Part s = part_at(&tokens.scores[i]);
      save_part(weigh(s), &tokens.weights[i]);
      const Part place = (high - s) * per_score;
      const Part within = place < end ? place : end;  // the end also if it is NaN
      save_int(__builtin_convertvector(within, PartInt), &tokens.parts[i]);
    }
    int64_t* sums = scratch_.buckets;
    std::fill(sums, sums + kNumParts, 0);
    for (int i = 0; i < tokens.size; i++) sums[tokens.parts[i]] += whole(tokens.weights[i]);
    int part = 0;
    for (; part < kNumParts && before + sums[part] < bound; part++) before += sums[part];
    if (part == kNumParts) return {0.0f, -1};
    scratch_.candidates.clear();
    std::fill_n(&tokens.parts[tokens.size], kPartLanes, -1);
    for (int i = 0; i < tokens.size; i += kPartLanes) {
      const PartInt number = splat_int(part), parts = int_at(&tokens.parts[i]);
      const Lanes is_number = at_most(parts, number) & at_most(number, parts);
      uint32_t bits = bits_of(is_number);
      for (; bits != 0; bits &= bits - 1) {
        const int k = i + __builtin_ctz(bits);
        scratch_.candidates.push_back({tokens.scores[k], tokens.ids[k]});
      }
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
    each_score([&](int i, Part s) {
      const PartInt is_member = (bucket_of(distance(s)) == bucket) & (s > kNegInf);
      for (int lane = 0; lane < kPartLanes; lane++) {
        if (is_member[lane]) scratch_.candidates.push_back({s[lane], i + lane});
      }
    });
    Candidate last = last_kept_of_candidates(before, bound);
    if (last.id < 0) last = {kNegInf, size_};  // only if the parameters make no sense
    scratch_.sums.clear();
    int64_t total = 0;
    for (int chunk = 0; chunk < num_chunks(); chunk++) {
      WideSum sum;
      each_part(chunk, [&](int i, Part s) {
        const Part weights = weigh(s);
        const Lanes kept = lanes_kept(s, lane_numbers() + i, last);
        sum.add(&kept, Halves<1>(&weights));
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

  static PartInt bucket_of(Part distance) {
    const Part place = distance * kBucketsPerNat;
    const Part end = splat_part(kNumBuckets - 1);
    return __builtin_convertvector(place < end ? place : end, PartInt);
  }

  // Sums the weights of the tokens that are less than `nats` under the best one, by their score.
  void fill_buckets(float nats) {
    std::fill(scratch_.buckets, scratch_.buckets + kNumBuckets, 0);
    each_score([&](int, Part s) {
      const Part d = distance(s);
      uint32_t bits = bits_of(above(splat_part(nats), d));
      if (bits == 0) return;
      const PartInt bucket = bucket_of(d);
      const Part weights = weigh(s);
      for (; bits != 0; bits &= bits - 1) {
        const int lane = __builtin_ctz(bits);
        scratch_.buckets[bucket[lane]] += whole(weights[lane]);
      }
    });
  }

  // Collects the tokens with a better score, in the order of their ids.
  void collect_above(float limit) {
    auto& found = scratch_.candidates;
    found.clear();
    for (int chunk = 0; chunk < num_chunks(); chunk++) {
      if (!(scratch_.best_of_chunks[chunk] > limit)) continue;
      each_part(scores_.without_edited(), chunk,
                [&](int i, Part s) { append(s, i, bits_of(above(s, splat_part(limit)))); });
    }
    const auto num_others = static_cast<std::ptrdiff_t>(found.size());
    const EditedTokens edited = scores_.edited();
    for (int i = 0; i < edited.size; i++)
      if (edited.scores[i] > limit) found.push_back({edited.scores[i], edited.ids[i]});
    const auto first_edited = found.begin() + num_others;
    std::sort(first_edited, found.end(), has_lower_id);
    std::inplace_merge(found.begin(), first_edited, found.end(), has_lower_id);
  }

  static bool has_lower_id(const Candidate& a, const Candidate& b) { return a.id < b.id; }

  void append(Part s, int i, uint32_t bits) {
    for (; bits != 0; bits &= bits - 1) {
      const int lane = __builtin_ctz(bits);
      scratch_.candidates.push_back({s[lane], i + lane});
    }
  }

  void weigh_candidates() { weigh_all(scratch_.candidates, scratch_.weights); }

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
    for (size_t i = 0; i < scratch_.candidates.size(); i++) total += whole(scratch_.weights[i]);
    return total;
  }

  // Chooses among the first `top_k` tokens, cut by top_p.
  int64_t among_first(int32_t top_k, double top_p, int64_t number) {
    auto& kept = scratch_.candidates;
    // At least `top_k` groups have a better score than the limit, and as many tokens.
    collect_above(score_of_groups(top_k - 1, 2 * std::min(top_k, size_)));
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

  const Scores scores_;
  const int32_t size_;
  Scratch& scratch_;
  const char* upcoming_;
  float best_ = 0.0f, per_nat_ = 1.0f, least_weight_ = 0.0f, no_weight_ = kNoWeight;
  Weigher weigher_;
};

}  // namespace
