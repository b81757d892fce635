// Scratch buffers of one thread, which are reused for each row, and the types of their elements.
//
// Buffers named `..._of_chunks` and `..._of_groups` are indexed by chunk and by group (row.h). Used by
// row.h and by the files that choose a token.

#pragma once

#include <algorithm>
#include <vector>

#include "sampling/value_weights.h"

namespace {

constexpr int kNumBuckets = 2048;  // buckets of the histogram in top_p_buckets.h

struct Candidate {
  float score;
  int32_t id;

  // The ranking of a vocabulary: descending score, ties by ascending id.
  bool operator<(const Candidate& other) const {
    return score > other.score || (score == other.score && id < other.id);
  }
};

// A list of tokens as parallel arrays, which have room for kLanes more elements.
struct TokenList {
  std::vector<int32_t> ids, bins;
  std::vector<float> scores, weights;
  int size = 0;

  void reserve(size_t count) {
    if (ids.size() >= count + kLanes) return;
    for (auto* values : {&ids, &bins}) values->resize(count + kLanes);
    for (auto* values : {&scores, &weights}) values->resize(count + kLanes);
  }

  // Appends the ids first_id + i for each set bit i. Groups of kUnroll ids are written without a branch
  // for each id, which would be mispredicted.
  void append(int32_t first_id, uint64_t bits) {
    constexpr int kUnroll = 4;
    int32_t* to = &ids[size];
    size += __builtin_popcountll(bits);
    for (; bits != 0; to += kUnroll)
      for (int i = 0; i < kUnroll; i++, bits &= bits - 1) to[i] = first_id + lowest_bit(bits);
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

struct Scratch {
  std::vector<float> best_of_chunks, best_of_groups, weights_of_groups;
  std::vector<int32_t> chunks;  // chunks to scan again; their best score is infinite until then
  std::vector<float> sample, weights_of_sample;
  std::vector<int64_t> sums;  // the sum of weights of each chunk
  TokenList tokens;
  ValueWeights values;
  std::vector<uint16_t> indices;  // table indices of tokens, chunk by chunk
  std::vector<int32_t> ends;      // the end of each chunk in `indices`
  std::vector<int32_t> counts;
  std::vector<int64_t> kept;
  std::vector<Candidate> candidates, sorted;
  std::vector<float> weights, weights_of_sorted;  // of `candidates` and `sorted`
  int64_t buckets[kNumBuckets];
};

}  // namespace
