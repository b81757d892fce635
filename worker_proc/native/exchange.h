// All-reduce and all-gather among the ranks of one machine, in shared memory.
//
// Each rank has a counter and two slots. In exchange number n, every rank writes its rows to slot n %
// 2, publishes n in its counter, and reads the slots of all ranks. A rank that has published n - 1 has
// read everything of n - 2, so after all ranks have published n - 1, exchange n can reuse the slots of
// n - 2. A waiting rank spins for a while and then sleeps on a futex; yielding could cost a whole time
// slice where ranks share processors with other processes. Used by decoder.cpp and exchange.cpp.

#pragma once

#include "vec.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstring>

extern "C" {

// The shared memory as one rank uses it, and the state of an exchange in a program of decoder.cpp.
struct Exchange {
  uint8_t* memory;
  int32_t rank, num_ranks;
  int64_t slot_bytes;
  // The number of the latest exchange of a program.
  int64_t sequence;
  // The timeout of one wait in a program, which then stops and can be resumed.
  int64_t wait_ns;
  // The state of the instruction at which a program has stopped: the missing rank, the number of rows
  // that have been summed, and whether the rows after these have been published.
  int32_t missing, num_summed, is_published;
};

// The rows of one rank, dense values of row_bytes bytes. Rows are `stride` bytes apart.
struct ExchangedRows {
  uint8_t* data;
  int64_t num_rows, row_bytes, stride;
};

}  // extern "C"

namespace {

constexpr int64_t kRankLine = 128;    // bytes between counters: a pair of cache lines
constexpr int kExchangeSpins = 2000;  // before a rank sleeps
constexpr int32_t kAllPublished = -1;

static_assert(std::atomic<int64_t>::is_always_lock_free, "counters are shared by processes");

using Counter = std::atomic<int64_t>;

// The state that all ranks share, in the first line of the memory.
struct Common {
  std::atomic<int32_t> num_published;  // publications of all ranks, modulo 2^32
  std::atomic<int32_t> num_sleeping;   // ranks that wait for num_published to change
};

inline Common& common(const Exchange& exchange) { return *reinterpret_cast<Common*>(exchange.memory); }

inline Counter& published(const Exchange& exchange, int rank) {
  return *reinterpret_cast<Counter*>(exchange.memory + (1 + rank) * kRankLine);
}

inline uint8_t* slot_of(const Exchange& exchange, int rank, int64_t sequence) {
  const int64_t slot = 2 * rank + sequence % 2;
  return exchange.memory + (1 + exchange.num_ranks) * kRankLine + slot * exchange.slot_bytes;
}

inline void wake_others(const Exchange& exchange) {
  Common& shared = common(exchange);
  shared.num_published.fetch_add(1);
  if (shared.num_sleeping.load() > 0)
    syscall(SYS_futex, &shared.num_published, FUTEX_WAKE, exchange.num_ranks, nullptr, nullptr, 0);
}

// Sleeps until num_published differs from `before`, or for `ns` nanoseconds.
inline void sleep_until_published(const Exchange& exchange, int32_t before, int64_t ns) {
  Common& shared = common(exchange);
  const timespec time{static_cast<time_t>(ns / 1'000'000'000), static_cast<long>(ns % 1'000'000'000)};
  shared.num_sleeping.fetch_add(1);
  syscall(SYS_futex, &shared.num_published, FUTEX_WAIT, before, &time, nullptr, 0);
  shared.num_sleeping.fetch_sub(1);
}

inline int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000LL + time.tv_nsec;
}

// Copies the rows [first, last) to this rank's slot.
inline void copy_to_slot(const Exchange& exchange, const ExchangedRows& rows, int64_t sequence,
                         int64_t first, int64_t last) {
  uint8_t* slot = slot_of(exchange, exchange.rank, sequence);
  for (int64_t row = first; row < last; ++row)
    std::memcpy(slot + row * rows.row_bytes, rows.data + row * rows.stride, rows.row_bytes);
}

// Publishes a sequence number: from then on, other ranks may read this rank's slot.
inline void publish(const Exchange& exchange, int64_t sequence) {
  published(exchange, exchange.rank).store(sequence, std::memory_order_release);
  wake_others(exchange);
}

// Waits until all ranks have published a number, and returns kAllPublished. After timeout_ns, it returns
// the first missing rank.
inline int32_t await_ranks(const Exchange& exchange, int64_t sequence, int64_t timeout_ns) {
  const int64_t deadline = now_ns() + timeout_ns;
  Common& shared = common(exchange);
  int rank = 0;
  for (int spins = 0;; ++spins) {
    const int32_t before = shared.num_published.load();
    while (rank < exchange.num_ranks &&
           published(exchange, rank).load(std::memory_order_acquire) >= sequence)
      ++rank;
    if (rank == exchange.num_ranks) return kAllPublished;
    if (spins < kExchangeSpins) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
      continue;
    }
    const int64_t left = deadline - now_ns();
    if (left <= 0) return rank;
    sleep_until_published(exchange, before, left);
  }
}

// Replaces a row by the sum of all ranks' rows, in float32 and in the order of the ranks. The inner
// loops run over values, so that the compiler vectorizes them.
template <typename T>
void add_row(const Exchange& exchange, const ExchangedRows& rows, int64_t sequence, int64_t row) {
  constexpr int64_t kBlock = 256;
  const int64_t width = rows.row_bytes / sizeof(T);
  T* out = reinterpret_cast<T*>(rows.data + row * rows.stride);
  for (int64_t first = 0; first < width; first += kBlock) {
    const int64_t count = first + kBlock < width ? kBlock : width - first;
    float sums[kBlock] = {};
    for (int rank = 0; rank < exchange.num_ranks; ++rank) {
      const T* part =
          reinterpret_cast<const T*>(slot_of(exchange, rank, sequence)) + row * width + first;
      for (int64_t at = 0; at < count; ++at) sums[at] += widen(part[at]);
    }
    for (int64_t at = 0; at < count; ++at) narrow(sums[at], out[first + at]);
  }
}

}  // namespace
