// A queue of memory ranges that a kernel prefetches a few cache lines at a time.
//
// The KV blocks of a context are scattered over the pools, so the hardware prefetcher cannot predict
// the next one. Kernels that wait for memory (pair_scores.h, pair_values.h) issue some prefetches in
// each iteration of their inner loops. pair_spans.h and pair_attention.h fill the queues.

#pragma once

#include "products/weights.h"

#ifdef __AVX512BF16__

namespace {

class PrefetchQueue {
 public:
  static constexpr int kMaxRanges = 512;

  void clear() { first_ = num_ranges_ = num_lines_ = 0; }

  void push(const void* begin, int64_t num_bytes) {
    const char* const from = static_cast<const char*>(begin);
    ranges_[num_ranges_++] = {from, from + num_bytes};
    num_lines_ += (num_bytes + kLine - 1) / kLine;
  }

  int64_t num_lines() const { return num_lines_; }

  // Prefetches the next cache lines into the second-level cache.
  [[gnu::always_inline]] void fetch(int num_lines) {
    for (; num_lines > 0 && first_ < num_ranges_; num_lines--) {
      Range& range = ranges_[first_];
      _mm_prefetch(range.next, _MM_HINT_T1);
      range.next += kLine;
      if (range.next >= range.end) first_++;
    }
  }

  // Prefetches all remaining lines.
  void drain() {
    while (first_ < num_ranges_) fetch(1);
  }

 private:
  struct Range {
    const char *next, *end;
  };
  Range ranges_[kMaxRanges];
  int first_ = 0, num_ranges_ = 0, num_lines_ = 0;
};

}  // namespace

#endif
