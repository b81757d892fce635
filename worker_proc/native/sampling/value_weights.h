// The weights of the values that bfloat16 scores have.
//
// A row of a large vocabulary has far fewer values than tokens, so that a table of their weights
// takes less time than an exponential function for each token. The places of the table are in the
// order of the scores: place 0 stands for all that have no weight, the last place for the best
// score, or for the next value above it. Scores near 0 share a place if their differences from the best
// one are rounded to the same number.

#pragma once

#include <vector>

#include "sampling/exact_sums.h"

namespace {

typedef int64_t Pair __attribute__((vector_size(16)));

class ValueWeights {
 public:
  // Chooses the places for a best score, and a lower one under which no score has a weight. Returns
  // their number; 0: there are too many.
  int set_range(float best, float least) {
    const int32_t exponent = bits_of(best) >> 23 & 0xff;
    near_zero_ = std::max(0, exponent - kLostBits) << 7;
    const uint32_t least_bits = bits_of(least);
    const uint32_t rounded = (least_bits >> 16) + (least_bits >> 31);
    first_ = from_zero(std::min(rounded, kNegInfBits)) - 1;
    // An edited best score may lie between two values: the last place has the higher one.
    const uint32_t best_bits = bits_of(best) + (best > 0.0f ? 0xffff : 0);
    const int count = from_zero(best_bits >> 16) - first_ + 1;
    return count_ = count <= kMostPlaces ? count : 0;
  }

  float score_of(int place) const {
    const int32_t distance = first_ + place;
    const uint32_t size = std::abs(distance) + near_zero_;
    return float_of(size << 16 | (distance < 0 ? 1u << 31 : 0));
  }

  // The place of a score, which is rounded to a bfloat16 value.
  int place_of(float score) const {
    return std::clamp(from_zero(bits_of(score) >> 16) - first_, 0, count_ - 1);
  }

  // Whether different scores may have this place.
  bool is_shared(int place) const { return first_ + place == 0 && near_zero_ > 0; }

  int64_t weight_of(int place) const { return pairs_[place][0]; }

  // Computes the weights of all places.
  template <class Weigh>
  void fill(const Weigh& weigh) {
    const size_t size_of_table = count_ + kPartLanes;
    if (pairs_.size() < size_of_table) pairs_.resize(size_of_table);
    for (int place = 0; place < count_; place += kPartLanes) {
      const PartInt distance = lane_numbers() + (first_ + place);
      const PartInt sign = distance >> 31;
      const PartInt size = ((distance ^ sign) - sign) + near_zero_;
      save_weights(weigh((Part)(size << 16 | (sign & INT32_MIN))), &pairs_[place]);
    }
    pairs_[0] = Pair{};
    limit_ = last_place();
  }

  int last_place() const { return count_ - 1; }

  // Sets the place above which `sum` adds weights also on their own.
  void set_limit(int limit) {
    for (int place = limit + 1; place <= limit_; place++) pairs_[place][1] = pairs_[place][0];
    for (int place = limit_ + 1; place <= limit; place++) pairs_[place][1] = 0;
    limit_ = limit;
  }

  void clear_counts() { counts_.assign(count_, 0); }

  // Counts the places of those scores of a sample that have a bit. The others may be above the best
  // score, where the table has no place; they count for place 0.
  template <int kCount>
  void count(const Bf16* scores, uint32_t bits = UINT32_MAX) {
    uint16_t doubled[kCount];
    write_places(scores, kCount, doubled);
    for (int i = 0; i < kCount; i++) counts_[bits >> i & 1 ? doubled[i] / 2 : 0]++;
  }

  // Counts the place of one more score.
  void count(float score) { counts_[place_of(score)]++; }

  // The score at which the weights of the counted sample, from the limit down, reach a sum. The
  // weight of the best score is 1.
  float score_at(float sum, float limit) const {
    int place = place_of(limit);
    for (float left = sum * kUnit; place > 1; place--) {
      left -= static_cast<float>(counts_[place] * pairs_[place][0]);
      if (left < 0.0f) break;
    }
    return score_of(place);
  }

  // Writes twice the places of `count` scores of a chunk; the others get place 0.
  [[gnu::always_inline]] void double_places_of(const Bf16* scores, int count,
                                               uint16_t* doubled) const {
    if (count == kChunkTokens) return write_places(scores, kChunkTokens, doubled);
    write_places(scores, count, doubled);
    std::fill(doubled + count, doubled + kChunkTokens, 0);
  }

  // Sets those of 32 places to 0 that have no bit.
  [[gnu::always_inline]] static void keep_places(uint16_t* doubled, uint32_t bits) {
#ifdef __AVX512BW__
    _mm512_storeu_si512(doubled, _mm512_maskz_loadu_epi16(bits, doubled));
#else
    for (uint32_t others = ~bits; others != 0; others &= others - 1) doubled[__builtin_ctz(others)] = 0;
#endif
  }

  // The sums of the weights of a chunk's places, and of those above the limit.
  [[gnu::always_inline]] Pair sum(const uint16_t* doubled) const {
    constexpr int kSums = 8;
    const int64_t* weights = &pairs_[0][0];
    const auto pair = [&](uint32_t at) { return *reinterpret_cast<const Pair*>(weights + at); };
    Pair sums[kSums] = {};
    for (int i = 0; i < kChunkTokens; i += kSums) {
      for (int k = 0; k < kSums; k += 2) {
        uint32_t two;
        std::memcpy(&two, doubled + i + k, sizeof two);
        sums[k] += pair(two & 0xffff);
        sums[k + 1] += pair(two >> 16);
      }
    }
    for (int half = kSums / 2; half > 0; half /= 2)
      for (int k = 0; k < half; k++) sums[k] += sums[k + half];
    return sums[0];
  }

  // Writes the places of a chunk that are above `low` and not above `high`; returns their number.
  // There is room for a whole chunk.
  static int copy_within(const uint16_t* doubled, int low, int high, uint16_t* to) {
    if (low >= high) return 0;
    const Span span{static_cast<uint16_t>(2 * low + 1), static_cast<uint16_t>(2 * (high - low))};
    int count = 0;
#ifdef __AVX512VBMI2__
    for (int i = 0; i < kChunkTokens; i += 32) {
      const __m512i places = _mm512_loadu_si512(doubled + i);
      const __mmask32 bits = bits_within(places, span);
      const __m512i found = _mm512_maskz_compress_epi16(bits, _mm512_srli_epi16(places, 1));
      _mm512_storeu_si512(to + count, found);
      count += __builtin_popcount(bits);
    }
#else
    // Few places have a bit; a branch for each of them could not be predicted.
    constexpr int kFew = 4;
    for (int i = 0; i < kChunkTokens; i += 64) {
      uint64_t bits = uint64_t{bits_within(doubled + i + 32, span)} << 32;
      bits |= bits_within(doubled + i, span);
      uint16_t* end = to + count;
      count += __builtin_popcountll(bits);
      for (; bits != 0; end += kFew)
        for (int k = 0; k < kFew; k++, bits &= bits - 1)
          end[k] = doubled[i + (bits == 0 ? 0 : __builtin_ctzll(bits))] / 2;
    }
#endif
    return count;
  }

 private:
  static constexpr int kChunkTokens = 512;
  static constexpr int kLostBits = 26;  // of a score: so much smaller ones do not change it
  static constexpr int kMostPlaces = 32767;  // twice a place has 16 bits
  static constexpr uint32_t kNegInfBits = 0xff80;

  // How many values of a sign lie between 0 and a score.
  int32_t from_zero(uint32_t bits) const {
    const int32_t distance = std::max<int32_t>(0, (bits & 0x7fff) - near_zero_);
    return bits >> 15 ? -distance : distance;
  }

  struct Span {
    uint16_t first, length;  // of doubled places
  };

  // Which of 32 doubled places are in a span.
#ifdef __AVX512BW__
  static uint32_t bits_within(__m512i doubled, Span span) {
    const __m512i distance = _mm512_sub_epi16(doubled, _mm512_set1_epi16(span.first));
    return _mm512_cmplt_epu16_mask(distance, _mm512_set1_epi16(span.length));
  }
#endif
  static uint32_t bits_within(const uint16_t* doubled, Span span) {
#if defined(__AVX512BW__)
    return bits_within(_mm512_loadu_si512(doubled), span);
#elif defined(__AVX2__)
    const auto half = [&](const uint16_t* places) {
      const __m256i from = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(places));
      const __m256i distance = _mm256_sub_epi16(from, _mm256_set1_epi16(span.first));
      const __m256i last = _mm256_set1_epi16(span.length - 1);
      return _mm256_cmpeq_epi16(_mm256_min_epu16(distance, last), distance);
    };
    const __m256i bytes = _mm256_packs_epi16(half(doubled), half(doubled + 16));
    return static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_permute4x64_epi64(bytes, 0b11011000)));
#else
    uint32_t bits = 0;
    for (int i = 0; i < 32; i++)
      bits |= uint32_t{static_cast<uint16_t>(doubled[i] - span.first) < span.length} << i;
    return bits;
#endif
  }

  static void save_weights(Part weights, Pair* to) {
#ifdef __AVX512DQ__
    const __m512i spread = _mm512_set_epi64(3, 3, 2, 2, 1, 1, 0, 0);
    const auto save = [&](__m256 eight, Pair* place) {
      const __m512i whole = _mm512_cvttps_epi64(eight);
      const __m512i high = _mm512_shuffle_i64x2(whole, whole, 0b11101110);
      _mm512_storeu_si512(place, _mm512_maskz_permutexvar_epi64(0x55, spread, whole));
      _mm512_storeu_si512(place + 4, _mm512_maskz_permutexvar_epi64(0x55, spread, high));
    };
    save(_mm512_castps512_ps256((__m512)weights), to);
    save(_mm512_extractf32x8_ps((__m512)weights, 1), to + 8);
#else
    // Places past the last one have any bits as weights.
    const Part bounded = smaller(larger(weights, Part{}), splat_part(2 * kUnit));
    for (int lane = 0; lane < kPartLanes; lane++) {
      to[lane] = Pair{static_cast<int64_t>(bounded[lane]), 0};
    }
#endif
  }

  // Writes twice the places of scores.
  [[gnu::always_inline]] void write_places(const Bf16* scores, int count, uint16_t* doubled) const {
    int i = 0;
#ifdef __AVX512BW__
    const __m512i near_zero = _mm512_set1_epi16(static_cast<int16_t>(near_zero_));
    const __m512i first = _mm512_set1_epi16(static_cast<int16_t>(first_));
    for (; i + 32 <= count; i += 32) {
      const __m512i bits = _mm512_loadu_si512(scores + i), none = _mm512_setzero_si512();
      const __m512i size = _mm512_and_si512(bits, _mm512_set1_epi16(0x7fff));
      const __m512i distance = _mm512_subs_epu16(size, near_zero);
      const __mmask32 is_negative = _mm512_movepi16_mask(bits);
      const __m512i place = _mm512_mask_sub_epi16(distance, is_negative, none, distance);
      const __m512i from_first = _mm512_sub_epi16(_mm512_max_epi16(place, first), first);
      _mm512_storeu_si512(doubled + i, _mm512_add_epi16(from_first, from_first));
    }
#endif
    const auto near = static_cast<uint16_t>(near_zero_);
    const auto least = static_cast<int16_t>(first_);
    for (; i < count; i++) {
      const uint16_t bits = scores[i].bits, size = bits & 0x7fff;
      const auto distance = static_cast<int16_t>(size > near ? size - near : 0);
      const auto place = static_cast<int16_t>(bits >> 15 ? -distance : distance);
      doubled[i] = static_cast<uint16_t>((std::max(place, least) - least) * 2);
    }
  }

  int32_t near_zero_ = 0;  // the bits of the largest score with the place of 0
  int32_t first_ = 0;      // place 0, counted from the place of 0
  int count_ = 0;
  int limit_ = 0;  // the place above which pairs have a weight twice
  std::vector<Pair> pairs_;  // a weight, and the same again or 0
  std::vector<int32_t> counts_;
};

}  // namespace
