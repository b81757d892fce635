// The threads of one parallel region: barriers between phases, and shares of a phase's work.

#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace {

// What the threads of a region share. Phases are numbered; each thread counts them by itself.
class Crew {
 public:
  int size = 1;  // set before the threads begin

 private:
  friend class Team;
  static constexpr int kCounters = 4;
  struct alignas(64) Counter {
    std::atomic<int64_t> value{0};
  };
  Counter num_waiting_;
  Counter num_ended_;
  Counter taken_[kCounters];
};

// One thread's view of its crew.
class Team {
 public:
  Team(Crew& crew, int id) : id(id), size(crew.size), crew_(crew) {}

  const int id, size;

  // Ends a phase: returns once all threads have ended it, and all that they wrote can be read.
  // Waiting threads spin for the usual length of a wait; then they leave the processor to others.
  void barrier() {
    phase_++;
    if (id == 0) counter(phase_ + 2).store(0, std::memory_order_relaxed);
    if (size == 1) return;
    std::atomic<int64_t>& ended = crew_.num_ended_.value;
    if (crew_.num_waiting_.value.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
      crew_.num_waiting_.value.store(0, std::memory_order_relaxed);
      ended.store(phase_, std::memory_order_release);
      return;
    }
    for (int turn = 0; ended.load(std::memory_order_acquire) < phase_; turn++) {
      if (turn < kSpins)
        pause();
      else
        sched_yield();
    }
  }

  // Takes the next of `count` pieces of this phase's work; `count` if none is left.
  int64_t take(int64_t count) {
    return std::min(counter(phase_).fetch_add(1, std::memory_order_relaxed), count);
  }

  // This thread's share of `count` pieces, [first, last).
  int64_t first(int64_t count) const { return count * id / size; }
  int64_t last(int64_t count) const { return count * (id + 1) / size; }

 private:
  static constexpr int kSpins = 2000;  // about 50 us

  static void pause() {
#ifdef __x86_64__
    __builtin_ia32_pause();
#endif
  }

  // Cleared two phases ahead, when no thread can still take from the phase that used it before.
  std::atomic<int64_t>& counter(int64_t phase) {
    return crew_.taken_[phase % Crew::kCounters].value;
  }

  Crew& crew_;
  int64_t phase_ = 0;
};

}  // namespace
