// An estimate of the work of a step, by which a single thread computes a brief one. Used by decoder.cpp.

#pragma once

#include <algorithm>
#include <cstdint>

#include <omp.h>

#include "program.h"

namespace {

// An estimate of the work of an instruction, in products of vectors. A few rows take as long as
// kMinRows, because they wait for the weights.
inline int64_t work_of(const Instruction& i, const Run& run, int64_t num_visible) {
  constexpr int64_t kMinRows = 8;
  const auto products = [&](int64_t num_taken, int64_t num_weights) {
    return std::max(num_taken, kMinRows * num_weights) * i.num_units * i.num_pairs * 2;
  };
  const int64_t num_rows = num_rows_of(i, run), num_sorted = num_rows * i.num_chosen;
  switch (i.kind) {
    case kProject: return products(num_rows, 1);
    case kExperts: return products(num_sorted, std::min<int64_t>(num_sorted, i.num_experts));
    case kAttend:
      return num_visible * i.layer->num_heads * (i.layer->head_dim + i.layer->value_head_dim) / 32;
  }
  return 0;
}

// Whether a single thread computes a step: with at most two threads, for a whole model, if that takes
// less than about a millisecond. On two processors, the second thread competes with the core and the
// API, and each barrier would wait for it.
inline bool is_for_one_thread(const Program& program, const Run& run) {
  constexpr int kMaxThreads = 2;
  constexpr int64_t kBriefWork = 2'000'000;
  if (run.positions == nullptr || omp_get_max_threads() > kMaxThreads) return false;
  int64_t num_visible = 0, work = 0;
  for (int32_t r = 0; r < run.num_rows; r++) num_visible += run.positions[r] + 1;
  const int32_t num_all = program.num_instructions + program.num_later;
  for (int32_t i = 0; i < num_all && work < kBriefWork; i++)
    work += work_of(program.instructions[i], run, num_visible);
  return work < kBriefWork;
}

}  // namespace
