// A lookup table of the weights of all bfloat16 values that the scores of a row can have.
//
// A row of a large vocabulary has far fewer distinct values than tokens, so filling the table takes
// less time than an exponential function for each token. Table indices ascend with the scores: index
// 0 holds all scores without weight, and the last index the maximum, or the next bfloat16 value above
// it. Scores near 0 share an index if their differences from the maximum round to the same number.
// Kernels use doubled indices: offsets into pairs of int64 weights. Used by top_p_table.h.

#pragma once

#include <vector>

#include "sampling/exact_sums.h"

namespace {

typedef int64_t Pair __attribute__((vector_size(16)));

class ValueWeights {
 public:
  // Sets the range of the table: from `least`, below which no score has a weight, to the maximum of the
  // row. Returns the number of indices, or 0 if the table would be too large.
  int set_range(float best, float least) {
    const int32_t exponent = bits_of(best) >> 23 & 0xff;
    near_zero_ = std::max(0, exponent - kLostBits) << 7;
    const uint32_t least_bits = bits_of(least);
    const uint32_t rounded = (least_bits >> 16) + (least_bits >> 31);
    first_ = from_zero(std::min(rounded, kNegInfBits)) - 1;
    // An edited maximum may lie between two bfloat16 values: the last index is the higher one.
    const uint32_t best_bits = bits_of(best) + (best > 0.0f ? 0xffff : 0);
    const int count = from_zero(best_bits >> 16) - first_ + 1;
    return count_ = count <= kMaxIndices ? count : 0;
  }

  float score_of(int index) const {
    const int32_t distance = first_ + index;
    const uint32_t size = std::abs(distance) + near_zero_;
    return float_of(size << 16 | (distance < 0 ? 1u << 31 : 0));
  }

  // The index of a score, truncated to a bfloat16 value.
  int index_of(float score) const {
    return std::clamp(from_zero(bits_of(score) >> 16) - first_, 0, count_ - 1);
  }

  // Whether different scores can have this index.
  bool is_shared(int index) const { return first_ + index == 0 && near_zero_ > 0; }

  int64_t weight_of(int index) const { return pairs_[index][0]; }

  // Computes the weights of all indices.
  template <class Weigh>
  void fill(const Weigh& weigh) {
    const size_t size_of_table = count_ + kPartLanes;
    if (pairs_.size() < size_of_table) pairs_.resize(size_of_table);
    for (int index = 0; index < count_; index += kPartLanes) {
      const PartInt distance = lane_numbers() + (first_ + index);
      const PartInt sign = distance >> 31;
      const PartInt size = ((distance ^ sign) - sign) + near_zero_;
      save_weights(weigh((Part)(size << 16 | (sign & INT32_MIN))), &pairs_[index]);
    }
    pairs_[0] = Pair{};
    limit_ = last_index();
  }

  int last_index() const { return count_ - 1; }

  // Sets the limit: the second result of `sum` adds the weights of higher indices only.
  void set_limit(int limit) {
    for (int index = limit + 1; index <= limit_; index++) pairs_[index][1] = pairs_[index][0];
    for (int index = limit_ + 1; index <= limit; index++) pairs_[index][1] = 0;
    limit_ = limit;
  }

  void clear_counts() { counts_.assign(count_, 0); }

  // Adds the indices of kCount scores to the histogram. Scores without a bit may be above the maximum,
  // outside of the table, and count for index 0.
  template <int kCount>
  void count(const Bf16* scores, uint32_t bits = UINT32_MAX) {
    uint16_t doubled[kCount];
    write_indices(scores, kCount, doubled);
    for (int i = 0; i < kCount; i++) counts_[bits >> i & 1 ? doubled[i] / 2 : 0]++;
  }

  // Adds one score to the histogram.
  void count(float score) { counts_[index_of(score)]++; }

  // The score at which the weights of the counted sample, from `limit` down, reach a sum. The weight of
  // the maximum is 1.
  float score_at(float sum, float limit) const {
    int index = index_of(limit);
    for (float left = sum * kUnit; index > 1; index--) {
      left -= static_cast<float>(counts_[index] * pairs_[index][0]);
      if (left < 0.0f) break;
    }
    return score_of(index);
  }

  // Writes the doubled indices of the first `count` scores of a chunk, and zeros for the others.
  [[gnu::always_inline]] void write_doubled(const Bf16* scores, int count,
                                            uint16_t* doubled) const {
    if (count == kChunkTokens) return write_indices(scores, kChunkTokens, doubled);
    write_indices(scores, count, doubled);
    std::fill(doubled + count, doubled + kChunkTokens, 0);
  }

  // Clears those of 32 doubled indices whose bit is not set.
  [[gnu::always_inline]] static void clear_unset(uint16_t* doubled, uint32_t bits) {
#ifdef __AVX512BW__
    _mm512_storeu_si512(doubled, _mm512_maskz_loadu_epi16(bits, doubled));
#else
    for (uint32_t others = ~bits; others != 0; others &= others - 1) doubled[__builtin_ctz(others)] = 0;
#endif
  }

  // The sums of the weights of a chunk: of all its indices, and of those above the limit.
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

  // Writes the indices of a chunk in (low, high], and returns their number. `to` must have room for a
  // whole chunk.
  static int copy_within(const uint16_t* doubled, int low, int high, uint16_t* to) {
    if (low >= high) return 0;
    const Span span{static_cast<uint16_t>(2 * low + 1), static_cast<uint16_t>(2 * (high - low))};
    int count = 0;
#ifdef __AVX512VBMI2__
    for (int i = 0; i < kChunkTokens; i += 32) {
      const __m512i indices = _mm512_loadu_si512(doubled + i);
      const __mmask32 bits = bits_within(indices, span);
      const __m512i found = _mm512_maskz_compress_epi16(bits, _mm512_srli_epi16(indices, 1));
      _mm512_storeu_si512(to + count, found);
      count += __builtin_popcount(bits);
    }
#else
    // Few bits are set. A branch for each of them would be mispredicted.
    constexpr int kUnroll = 4;
    for (int i = 0; i < kChunkTokens; i += 64) {
      uint64_t bits = uint64_t{bits_within(doubled + i + 32, span)} << 32;
      bits |= bits_within(doubled + i, span);
      uint16_t* end = to + count;
      count += __builtin_popcountll(bits);
      for (; bits != 0; end += kUnroll)
        for (int k = 0; k < kUnroll; k++, bits &= bits - 1)
          end[k] = doubled[i + (bits == 0 ? 0 : __builtin_ctzll(bits))] / 2;
    }
#endif
    return count;
  }

 private:
  static constexpr int kChunkTokens = 512;
  static constexpr int kLostBits = 26;  // scores smaller by 2^-26 do not change a difference
  static constexpr int kMaxIndices = 32767;  // a doubled index has 16 bits
  static constexpr uint32_t kNegInfBits = 0xff80;

  // The signed number of bfloat16 values between 0 and a score, given its bits.
  int32_t from_zero(uint32_t bits) const {
    const int32_t distance = std::max<int32_t>(0, (bits & 0x7fff) - near_zero_);
    return bits >> 15 ? -distance : distance;
  }

  struct Span {
    uint16_t first, length;  // in doubled indices
  };

  // A bit mask of those of 32 doubled indices that are in a span.
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
    const auto half = [&](const uint16_t* indices) {
      const __m256i from = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(indices));
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
    const auto save = [&](__m256 eight, Pair* index) {
      const __m512i whole = _mm512_cvttps_epi64(eight);
      const __m512i high = _mm512_shuffle_i64x2(whole, whole, 0b11101110);
      _mm512_storeu_si512(index, _mm512_maskz_permutexvar_epi64(0x55, spread, whole));
      _mm512_storeu_si512(index + 4, _mm512_maskz_permutexvar_epi64(0x55, spread, high));
    };
    save(_mm512_castps512_ps256((__m512)weights), to);
    save(_mm512_extractf32x8_ps((__m512)weights, 1), to + 8);
#else
    // Past the last index, the weights are undefined and may not fit into an integer.
    const Part bounded = smaller(larger(weights, Part{}), splat_part(2 * kUnit));
    for (int lane = 0; lane < kPartLanes; lane++) {
      to[lane] = Pair{static_cast<int64_t>(bounded[lane]), 0};
    }
#endif
  }

  // Writes the doubled indices of scores.
  [[gnu::always_inline]] void write_indices(const Bf16* scores, int count, uint16_t* doubled) const {
    int i = 0;
#ifdef __AVX512BW__
    const __m512i near_zero = _mm512_set1_epi16(static_cast<int16_t>(near_zero_));
    const __m512i first = _mm512_set1_epi16(static_cast<int16_t>(first_));
    for (; i + 32 <= count; i += 32) {
      const __m512i bits = _mm512_loadu_si512(scores + i), none = _mm512_setzero_si512();
      const __m512i size = _mm512_and_si512(bits, _mm512_set1_epi16(0x7fff));
      const __m512i distance = _mm512_subs_epu16(size, near_zero);
      const __mmask32 is_negative = _mm512_movepi16_mask(bits);
      const __m512i index = _mm512_mask_sub_epi16(distance, is_negative, none, distance);
      const __m512i from_first = _mm512_sub_epi16(_mm512_max_epi16(index, first), first);
      _mm512_storeu_si512(doubled + i, _mm512_add_epi16(from_first, from_first));
    }
#endif
    const auto near = static_cast<uint16_t>(near_zero_);
    const auto least = static_cast<int16_t>(first_);
    for (; i < count; i++) {
      const uint16_t bits = scores[i].bits, size = bits & 0x7fff;
      const auto distance = static_cast<int16_t>(size > near ? size - near : 0);
      const auto index = static_cast<int16_t>(bits >> 15 ? -distance : distance);
      doubled[i] = static_cast<uint16_t>((std::max(index, least) - least) * 2);
    }
  }

  int32_t near_zero_ = 0;  // the bits of the largest score that shares the index of 0
  int32_t first_ = 0;      // from_zero of index 0
  int count_ = 0;
  int limit_ = 0;  // the index above which both elements of a pair are the weight
  std::vector<Pair> pairs_;  // the weight, and the weight or 0
  std::vector<int32_t> counts_;
};

}  // namespace
