// Inputs of product kernels: rows, the prefetch of the next weights, and scratch buffers of a thread.

#pragma once

#include <memory>
#include <new>

#include "products/compact_weights.h"

namespace {

class FloatRows;

// Rows as Units: pairs of bfloat16, or floats.
struct UnitRows {
  const Unit* data;
  int64_t stride;               // between rows, in units
  FloatRows* floats = nullptr;  // the same rows as float32, if a thread multiplies them by several pairs
};

// Localities of __builtin_prefetch: the L1 and the L2 cache.
constexpr int kL1Cache = 3, kL2Cache = 2;

// The weights of the next pair of panels, which are prefetched while a thread multiplies by the
// current one.
struct WeightsAhead {
  const char *next = nullptr, *end = nullptr;
  int64_t lines_per_step = 0;  // cache lines prefetched for each kUnitStep units

  template <int Locality>
  [[gnu::always_inline]] void fetch() {
    const char* const last = std::min(next + lines_per_step * kLine, end);
    for (; next < last; next += kLine) __builtin_prefetch(next, 0, Locality);
  }
};

// The prefetch of a pair, if it precedes `last_pair`. The num_tiles tiles of rows that use the current
// pair share it, so that memory is never idle. Weights with kStepLines = 0 prefetch their own tiles.
template <class W>
WeightsAhead weights_ahead(const W& w, int64_t pair, int64_t last_pair, int64_t num_tiles) {
  if constexpr (W::kStepLines > 0)
    if (pair < last_pair)
      return {w.start(pair), w.start(pair + 1), (W::kStepLines + num_tiles - 1) / num_tiles};
  return {};
}

// Returns this thread's scratch buffer for a type `Use`, of at least num_units units.
template <class Use>
Unit* space_for(int64_t num_units) {
  struct Freed {
    void operator()(void* space) const { ::operator delete(space, std::align_val_t{64}); }
  };
  static thread_local std::unique_ptr<void, Freed> space;
  static thread_local int64_t size = 0;
  if (size < num_units) {
    space.reset();
    size = num_units;
    space.reset(::operator new(size * sizeof(Unit), std::align_val_t{64}));
  }
  return static_cast<Unit*>(space.get());
}

}  // namespace
