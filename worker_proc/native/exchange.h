// What ranks of one machine exchange, through memory that they share.
//
// Each rank has a counter and two slots. An exchange has a sequence number: every rank writes its
// part to the slot of that number, publishes the number, and reads the parts of all. A rank that has
// published n has read all parts of n - 1, so once all ranks have published n - 1, nothing of n - 2
// is read any more, and n can take its slots.
//
// A rank that waits spins for a while, and then sleeps until another one publishes: ranks may share
// their processors with other processes, to which a rank that yields would lose a whole time slice.

#pragma once

#include "vec.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstring>

extern "C" {

struct Exchange {
  uint8_t* memory;
  int32_t rank, num_ranks;
  int64_t slot_bytes;
  // Of the latest publication, by callers that count them here.
  int64_t sequence;
  // Of one wait within a program; after it, the program stops and can go on.
  int64_t wait_ns;
  // Of the instruction at which a program has stopped: the rank that is missing, rows that have been
  // added up, and whether the next ones have been published.
  int32_t missing, num_summed, is_published;
};

// Rows of one rank: dense values, with a number of bytes between the rows.
struct ExchangedRows {
  uint8_t* data;
  int64_t num_rows, row_bytes, stride;
};

}  // extern "C"

namespace {

constexpr int64_t kRankLine = 128;  // bytes that no two ranks write
constexpr int kExchangeSpins = 2000;
constexpr int32_t kAllPublished = -1;

static_assert(std::atomic<int64_t>::is_always_lock_free, "counters are shared by processes");

using Counter = std::atomic<int64_t>;

// What the ranks have in common, in the first line of the memory.
struct Common {
  std::atomic<int32_t> num_published;  // by all ranks together; it may wrap
  std::atomic<int32_t> num_sleeping;   // ranks that wait for it to change
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

// Sleeps until a rank publishes after the first `before` publications, or for a time.
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

// Copies rows to this rank's slot, from row `first` to `last` of those of the exchange.
inline void copy_to_slot(const Exchange& exchange, const ExchangedRows& rows, int64_t sequence,
                         int64_t first, int64_t last) {
  uint8_t* slot = slot_of(exchange, exchange.rank, sequence);
  for (int64_t row = first; row < last; ++row)
    std::memcpy(slot + row * rows.row_bytes, rows.data + row * rows.stride, rows.row_bytes);
}

// Lets the other ranks read what is in the slot of a sequence number.
inline void publish(const Exchange& exchange, int64_t sequence) {
  published(exchange, exchange.rank).store(sequence, std::memory_order_release);
  wake_others(exchange);
}

// Waits until all ranks have published a number, and returns kAllPublished; after `timeout_ns` it
// returns the first rank that is missing.
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

// Replaces a row by the sum of all ranks' rows, in float32 and in the order of the ranks; the inner
// loops are over values, so that the compiler computes several at once.
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
