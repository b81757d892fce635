// Chooses one token per row of logits, as worker_proc/sampling/inverse_cdf.py defines it.
//
// A row is read a few times from the cache and never sorted or copied as a whole. Sums of weights
// are integers (in doubles while they are below 2^53), so their order is free. The last bits of a
// weight may differ from torch's, which computes another exponential function.

#include <algorithm>
#include <vector>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include "pointwise.h"

namespace {

// `SAMPLING_ROW` of kernels.py.
struct Order {
  int64_t seed, position;
  double min_p, top_p;
  float temperature;  // 0: the most likely token
  int32_t top_k;      // 0: off
  int32_t row;        // of the logits
  int32_t mask;       // line of the masks, or -1
};

// `LogitsArgs` of kernels.py.
struct Logits {
  const void* data;
  int64_t stride;  // of rows, in values
  int32_t vocab_size, is_bf16;
  int32_t are_edited;  // then a row may consist of -inf
};

// Numbers that kernels.py knows.
constexpr int32_t kChosen = 0;
constexpr int32_t kNonePossible = 1;  // the token is the most likely one without the mask
constexpr int32_t kNotFinite = 2;     // NaN, +inf, or nothing but -inf: the token is 0

constexpr int kDrawBits = 62;  // NUM_DRAW_BITS of philox.py
// As in inverse_cdf.py: the weight of the most likely token, and the buckets of similar scores.
constexpr float kUnit = 1099511627776.0f;  // 2^40
constexpr int kNumBuckets = 2048;
constexpr float kBucketsPerNat = kNumBuckets / 28.0f;
constexpr int kChunk = 512;  // tokens; their weights sum to less than 2^53
constexpr float kNearNats = 12.0f;
constexpr VecInt kLaneNumbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
constexpr VecInt kLaneBits = {1 << 0,  1 << 1,  1 << 2,  1 << 3, 1 << 4,  1 << 5,
                              1 << 6,  1 << 7,  1 << 8,  1 << 9, 1 << 10, 1 << 11,
                              1 << 12, 1 << 13, 1 << 14, 1 << 15};

inline VecInt splat_int(int32_t x) { return x - VecInt{}; }

// One bit per lane; lanes are 0 or -1.
inline uint32_t bits_of(VecInt lanes) {
#ifdef __AVX512F__
  return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes);
#else
  uint32_t bits = 0;
  for (int lane = 0; lane < kLanes; lane++) bits |= (lanes[lane] & 1u) << lane;
  return bits;
#endif
}

// Rounds values from 0 to 2^40 down.
inline Vec floor_of(Vec v) {
#ifdef __AVX512F__
  return (Vec)_mm512_roundscale_ps((__m512)v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#else
  const Vec end = splat(16777216.0f);  // from here on all floats are whole
  const Vec small = __builtin_convertvector(__builtin_convertvector(v < end ? v : end, VecInt), Vec);
  return v < end ? small : v;
#endif
}

// A sum of whole numbers that stays below 2^53.
class ExactSum {
 public:
  void add(Vec v) {
#ifdef __AVX512F__
    const __m512d halves = _mm512_castps_pd((__m512)v);
    low_ += (Doubles)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)v));
    high_ += (Doubles)_mm512_cvtps_pd(_mm256_castpd_ps(_mm512_extractf64x4_pd(halves, 1)));
#else
    for (int lane = 0; lane < kLanes / 2; lane++) low_[lane] += v[lane];
    for (int lane = 0; lane < kLanes / 2; lane++) high_[lane] += v[lane + kLanes / 2];
#endif
  }

  int64_t total() const {
    double sum = 0.0;
    for (int lane = 0; lane < kLanes / 2; lane++) sum += low_[lane] + high_[lane];
    return static_cast<int64_t>(sum);
  }

 private:
  typedef double Doubles __attribute__((vector_size(64)));
  Doubles low_ = {}, high_ = {};
};

inline float max_of(Vec v) {
  return fold(v, [](Vec a, Vec b) { return a > b ? a : b; });
}

// Philox4x32-10; see worker_proc/sampling/philox.py.
int64_t draw(int64_t seed, int64_t position) {
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

// Memory of one thread, used again for each row.
struct Scratch {
  std::vector<int64_t> sums;  // of the chunks of a row
  std::vector<Candidate> candidates;
  std::vector<float> weights;  // of the candidates
  int64_t buckets[kNumBuckets];
};

// With `kMasked` only the tokens of a mask may be chosen.
template <typename T, bool kMasked>
class Row {
 public:
  Row(const Logits& logits, int32_t row, const uint32_t* mask, int32_t num_words, Scratch& scratch)
      : logits_(static_cast<const T*>(logits.data) + row * logits.stride),
        size_(logits.vocab_size),
        are_edited_(logits.are_edited != 0),
        mask_(mask),
        num_words_(num_words),
        scratch_(scratch) {}

  // Returns the state of the row, and sets the token.
  int32_t choose(const Order& order, int64_t& token) {
    token = 0;
    if (!find_best()) return kNotFinite;
    if (best_ == kNegInf) {
      // All that the mask allows has score -inf: each of these tokens is equally likely.
      least_ = best_ = 0.0f;
      if (!kMasked || !any_allowed()) return kNonePossible;
    }
    if (order.temperature == 0.0f) {
      token = most_likely();
      return kChosen;
    }
    per_nat_ = std::min(1.0f / order.temperature, std::numeric_limits<float>::max());
    set_least_weight(order.min_p);
    const int64_t number = draw(order.seed, order.position);
    if (order.top_k > 0) {
      token = among_first(order.top_k, order.top_p, number);
    } else {
      token = order.top_p < 1.0 ? by_id<true>(last_kept(order.top_p), number)
                                : by_id<false>({}, number);
    }
    return kChosen;
  }

 private:
  int lanes(int i) const { return lanes_at(i, size_); }

  VecInt allowed(int i) const {
    const int word = i / 32;
    const uint32_t bits = word < num_words_ ? mask_[word] >> (i % 32) : 0;
    return (splat_int(static_cast<int32_t>(bits & 0xffffu)) & kLaneBits) != 0;
  }

  Vec score(int i) const { return score(i, load_any(logits_ + i, lanes(i))); }

  // The scores of 16 tokens from `i` on; -inf where a token is not allowed, or past the end.
  Vec score(int i, Vec v) const {
    if (kMasked) v = allowed(i) ? (v > least_ ? v : splat(least_)) : splat(kNegInf);
    if (lanes(i) < kLanes) v = kLaneNumbers < splat_int(lanes(i)) ? v : splat(kNegInf);
    return v;
  }

  // Sets the largest score; returns whether the row can be used: a row of nothing but -inf can be
  // after edits.
  bool find_best() {
    Vec raw = splat(kNegInf), best = splat(kNegInf);
    VecInt is_nan = {};
    for (int i = 0; i < size_; i += kLanes) {
      Vec v = load_any(logits_ + i, lanes(i));
      is_nan |= v != v;
      if (lanes(i) < kLanes) v = kLaneNumbers < splat_int(lanes(i)) ? v : splat(kNegInf);
      raw = v > raw ? v : raw;
      if (!kMasked) continue;
      v = allowed(i) ? v : splat(kNegInf);
      best = v > best ? v : best;
    }
    const float largest = max_of(raw);
    best_ = kMasked ? max_of(best) : largest;
    if (are_edited_ && largest == kNegInf) return true;
    return bits_of(is_nan) == 0 && std::isfinite(largest);
  }

  bool any_allowed() const {
    for (int i = 0; i < size_; i += kLanes) {
      if (bits_of(score(i) > kNegInf) != 0) return true;
    }
    return false;
  }

  int64_t most_likely() const {
    for (int i = 0; i < size_; i += kLanes) {
      const uint32_t bits = bits_of(score(i) == best_);
      if (bits != 0) return i + __builtin_ctz(bits);
    }
    return 0;
  }

  // A weight below it is 0: the least float that is not under the bound.
  void set_least_weight(double min_p) {
    const double bound = std::ceil(min_p * kUnit);
    least_weight_ = static_cast<float>(bound);
    if (least_weight_ < bound) {
      least_weight_ = std::nextafter(least_weight_, std::numeric_limits<float>::max());
    }
  }

  Vec distance(Vec score) const { return (best_ - score) * per_nat_; }

  // Whole numbers from 0 to 2^40.
  Vec weight(Vec distance) const {
    const Vec exact = floor_of(exp_of(-distance) * kUnit);
    return exact >= least_weight_ ? exact : splat(0.0f);
  }

  // Weights of 16 tokens; with `kCut` those after `last` in the order of the vocabulary weigh 0.
  template <bool kCut>
  Vec weight_up_to(Candidate last, int i) const {
    const Vec s = score(i);
    if (!kCut) return weight(distance(s));
    const VecInt kept = (s > last.score) | ((s == last.score) & (kLaneNumbers + i <= last.id));
    return kept ? weight(distance(s)) : splat(0.0f);
  }

  static int64_t scaled(int64_t number, int64_t total) {
    return static_cast<int64_t>(static_cast<unsigned __int128>(number) * total >> kDrawBits);
  }

  // The sum of the sorted weights at which top_p ends; at least 1.
  static int64_t top_p_bound(int64_t total, double top_p) {
    const auto bound = static_cast<int64_t>(std::ceil(static_cast<double>(total) * top_p));
    return std::max<int64_t>(1, std::min(bound, total));
  }

  // Sums the chunks, and returns the total.
  template <bool kCut>
  int64_t sum_chunks(Candidate last) {
    scratch_.sums.clear();
    int64_t total = 0;
    for (int first = 0; first < size_; first += kChunk) {
      ExactSum sum;
      const int end = std::min(first + kChunk, size_);
      for (int i = first; i < end; i += kLanes) {
        sum.add(weight_up_to<kCut>(last, i));
      }
      scratch_.sums.push_back(sum.total());
      total += scratch_.sums.back();
    }
    return total;
  }

  // Chooses among the tokens up to `last`, which lie in the order of their ids.
  template <bool kCut>
  int64_t by_id(Candidate last, int64_t number) {
    int64_t rest = scaled(number, sum_chunks<kCut>(last));
    int first = 0;  // of the chunk
    for (; first + kChunk < size_; first += kChunk) {
      const int64_t sum = scratch_.sums[first / kChunk];
      if (rest < sum) break;
      rest -= sum;
    }
    for (int i = first; i < size_; i += kLanes) {
      const Vec weights = weight_up_to<kCut>(last, i);
      for (int lane = 0; lane < kLanes; lane++) {
        const int64_t own = whole(weights[lane]);
        if (rest < own) return i + lane;
        rest -= own;
      }
    }
    return most_likely();  // only if the parameters make no sense
  }

  // The last token that top_p keeps.
  Candidate last_kept(double top_p) {
    const int64_t bound = top_p_bound(sum_chunks<false>({}), top_p);
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
    collect([&](Vec s) { return bucket_of(distance(s)) == bucket; });
    auto& members = scratch_.candidates;
    std::sort(members.begin(), members.end());
    weigh_candidates();
    for (size_t i = 0; i < members.size(); i++) {
      before += whole(scratch_.weights[i]);
      if (before >= bound) return members[i];
    }
    return {kNegInf, size_};  // only if the parameters make no sense
  }

  static VecInt bucket_of(Vec distance) {
    const Vec place = distance * kBucketsPerNat;
    const Vec end = splat(kNumBuckets - 1);
    return __builtin_convertvector(place < end ? place : end, VecInt);
  }

  // Sums the weights of the tokens that are less than `nats` under the best one, by their score.
  void fill_buckets(float nats) {
    std::fill(scratch_.buckets, scratch_.buckets + kNumBuckets, 0);
    for (int i = 0; i < size_; i += kLanes) {
      const Vec d = distance(score(i));
      uint32_t bits = bits_of(d < nats);
      if (bits == 0) continue;
      const VecInt bucket = bucket_of(d);
      const Vec weights = weight(d);
      for (; bits != 0; bits &= bits - 1) {
        const int lane = __builtin_ctz(bits);
        scratch_.buckets[bucket[lane]] += whole(weights[lane]);
      }
    }
  }

  // Collects the tokens with a score above -inf that `is_member` marks.
  template <typename IsMember>
  void collect(IsMember is_member) {
    scratch_.candidates.clear();
    for (int i = 0; i < size_; i += kLanes) {
      const Vec s = score(i);
      append(s, i, bits_of(is_member(s) & (s > kNegInf)));
    }
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
      const Vec weights = weight(distance(s));
      std::memcpy(&scratch_.weights[i], &weights, sizeof weights);
    }
  }

  int64_t weight_of_candidates() const {
    int64_t total = 0;
    for (size_t i = 0; i < scratch_.candidates.size(); i++) total += whole(scratch_.weights[i]);
    return total;
  }

  static int64_t whole(float weight) { return static_cast<int64_t>(weight); }

  // Chooses among the first `top_k` tokens, cut by top_p.
  int64_t among_first(int32_t top_k, double top_p, int64_t number) {
    auto& kept = scratch_.candidates;
    kept.clear();
    const size_t count = top_k, many = 2 * count + 256;
    const auto cut = [&] {
      std::nth_element(kept.begin(), kept.begin() + (count - 1), kept.end());
      kept.resize(count);
    };
    float least = kNegInf;  // a later token with this score comes after all that are kept
    for (int i = 0; i < size_; i += kLanes) {
      const Vec s = score(i);
      append(s, i, bits_of(s > least));
      if (kept.size() < many) continue;
      cut();
      least = kept.back().score;
    }
    if (kept.size() > count) cut();
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

  const T* logits_;
  const int32_t size_;
  const bool are_edited_;
  const uint32_t* mask_;
  const int32_t num_words_;
  Scratch& scratch_;
  float least_ = kNegInf;  // score of an allowed token
  float best_ = 0.0f, per_nat_ = 1.0f, least_weight_ = 0.0f;
};

template <typename T>
void choose_all(const Logits& logits, const Order* orders, int32_t num_orders,
                const uint32_t* masks, int32_t num_words, int64_t* tokens, int32_t* states) {
  // A single row does not wait until the other threads have been woken.
#pragma omp parallel if (num_orders > 1)
  {
    Scratch scratch;
#pragma omp for schedule(dynamic, 1)
    for (int32_t i = 0; i < num_orders; i++) {
      Order order = orders[i];
      Row<T, false> unmasked(logits, order.row, nullptr, 0, scratch);
      if (order.mask < 0) {
        states[i] = unmasked.choose(order, tokens[i]);
        continue;
      }
      const uint32_t* mask = masks + static_cast<int64_t>(order.mask) * num_words;
      Row<T, true> masked(logits, order.row, mask, num_words, scratch);
      states[i] = masked.choose(order, tokens[i]);
      if (states[i] != kNonePossible) continue;
      order.temperature = 0.0f;
      unmasked.choose(order, tokens[i]);
    }
  }
}

}  // namespace

// Chooses a token for each order. A line of `masks` has `num_words` words of 32 tokens.
extern "C" void troika_sample(const Logits* logits, const Order* orders, int32_t num_orders,
                              const uint32_t* masks, int32_t num_words, int64_t* tokens,
                              int32_t* states) {
  const auto choose = logits->is_bf16 ? choose_all<Bf16> : choose_all<float>;
  choose(*logits, orders, num_orders, masks, num_words, tokens, states);
}
