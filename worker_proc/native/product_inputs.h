// What products read: rows, the weights that come next, and memory of a thread.

#pragma once

#include <memory>
#include <new>

#include "compact_weights.h"

namespace {

class FloatRows;

struct UnitRows {
  const Unit* data;
  int64_t stride;               // in units
  FloatRows* floats = nullptr;  // the same rows, where a thread multiplies them by several pairs
};

// Caches, as prefetches name them.
constexpr int kFirstCache = 3, kSecondCache = 2;

// Weights that a thread reads after the present pair of panels, fetched while it multiplies.
struct WeightsAhead {
  const char *next = nullptr, *end = nullptr;
  int64_t lines_per_step = 0;  // fetched at each step of kUnitStep units

  template <int Locality>
  [[gnu::always_inline]] void fetch() {
    const char* const last = std::min(next + lines_per_step * kLine, end);
    for (; next < last; next += kLine) __builtin_prefetch(next, 0, Locality);
  }
};

// The weights of a pair, if it comes before the last one. The tiles of rows that are computed until
// then share in fetching them, so that memory is never idle. Tiles of other codes fetch their own.
template <class W>
WeightsAhead weights_ahead(const W& w, int64_t pair, int64_t last_pair, int64_t num_tiles) {
  if constexpr (W::kStepLines > 0)
    if (pair < last_pair)
      return {w.start(pair), w.start(pair + 1), (W::kStepLines + num_tiles - 1) / num_tiles};
  return {};
}

// Memory of a thread for units, one for each use.
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
