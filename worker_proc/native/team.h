// The threads of one parallel region: barriers between phases, and the distribution of work.
//
// A phase is the work between two barriers. Work is a number of pieces, which threads either divide
// evenly (`first`, `last`) or take one by one (`take`, `take_near`). A thread that waits at a barrier
// spins for about 50 us and then sleeps on a futex. Used by the decoder, the products and the
// attention.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

namespace {

// The shared state of the threads. Phases are numbered, and each thread counts them separately.
class Crew {
  friend class Team;
  static constexpr int kPhases = 4, kMaxShares = 8;
  struct alignas(64) Counter {
    std::atomic<int64_t> value{0};
  };
  struct alignas(64) Word {
    std::atomic<int32_t> value{0};
  };
  Word num_waiting_, num_asleep_, last_ended_;
  Counter taken_[kPhases][kMaxShares];
};

// One thread's view of its crew.
class Team {
 public:
  Team(Crew& crew, int id, int size) : id(id), size(size), crew_(crew) {}

  const int id, size;

  // Ends a phase. It returns when all threads have ended it, and their writes are visible.
  void barrier() {
    phase_++;
    if (id < num_shares()) counter(phase_ + 2, id).store(0, std::memory_order_relaxed);
    if (size == 1) return;
    std::atomic<int32_t>& last_ended = crew_.last_ended_.value;
    if (crew_.num_waiting_.value.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
      crew_.num_waiting_.value.store(0, std::memory_order_relaxed);
      last_ended.store(phase_);
      if (crew_.num_asleep_.value.load() > 0) wake(last_ended);
      return;
    }
    for (int turn = 0; turn < kSpins; turn++) {
      if (last_ended.load(std::memory_order_acquire) == phase_) return;
      pause();
    }
    // The other threads have much work left, or have been preempted.
    crew_.num_asleep_.value.fetch_add(1);
    while (last_ended.load() != phase_) sleep(last_ended, phase_ - 1);
    crew_.num_asleep_.value.fetch_sub(1);
  }

  // Takes the next of `count` pieces of this phase and returns its number, or `count` if none is left.
  int64_t take(int64_t count) {
    return std::min(counter(phase_, 0).fetch_add(1, std::memory_order_relaxed), count);
  }

  // Takes a piece like `take`, from this thread's own share first, in ascending order, and then from
  // the shares of other threads. One phase must not mix both functions.
  int64_t take_near(int64_t count) {
    const int shares = num_shares(), own = id * shares / size;
    for (int i = 0; i < shares; i++) {
      const int share = (own + i) % shares;
      const int64_t begin = count * share / shares, end = count * (share + 1) / shares;
      std::atomic<int64_t>& taken = counter(phase_, share);
      if (begin + taken.load(std::memory_order_relaxed) >= end) continue;
      const int64_t index = begin + taken.fetch_add(1, std::memory_order_relaxed);
      if (index < end) return index;
    }
    return count;
  }

  // The number of shares of take_near: one for each thread, up to a bound.
  int num_shares() const { return std::min(size, Crew::kMaxShares); }

  // This thread's part of `count` pieces that are divided evenly: [first, last).
  int64_t first(int64_t count) const { return count * id / size; }
  int64_t last(int64_t count) const { return count * (id + 1) / size; }

 private:
  static constexpr int kSpins = 1000;  // about 50 us

  // The counter of a share. It is cleared two phases ahead, when no thread can still be in the phase
  // that used it last.
  std::atomic<int64_t>& counter(int64_t phase, int share) {
    return crew_.taken_[phase % Crew::kPhases][share].value;
  }

  static void pause() {
#ifdef __x86_64__
    __builtin_ia32_pause();
#endif
  }

#ifdef __linux__
  // Sleeps until another thread wakes this one, if the word has a value.
  static void sleep(std::atomic<int32_t>& word, int32_t value) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
  }

  static void wake(std::atomic<int32_t>& word) {
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
  }
#else
  static void sleep(std::atomic<int32_t>&, int32_t) { sched_yield(); }
  static void wake(std::atomic<int32_t>&) {}
#endif

  Crew& crew_;
  int32_t phase_ = 0;
};

}  // namespace
