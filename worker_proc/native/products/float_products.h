// Products of six or more bfloat16 rows by float32 multiply-adds, with the bits of vdpbf16ps.
//
// vdpbf16ps adds two products to a sum, first that of the upper halves of two Units. It rounds after
// each addition and flushes subnormal numbers to zero. Two multiply-adds do the same if the processor
// flushes subnormals (FTZ, DAZ). Some processors execute four of them in the time of one vdpbf16ps;
// there, rows are widened to float32, and each block of a weight is widened once for all rows. Used by
// products.h, and by attention on pairs.

#pragma once

#include <utility>

#include "products/product_inputs.h"

// Whether this process uses float32 products; set when the library is loaded.
extern bool troika_uses_floats;

namespace {

#ifdef __AVX512BF16__

constexpr int kMaxFloatRows = 12;     // rows of a register tile, with one pair of panels
constexpr int64_t kMinFloatRows = 6;  // with fewer rows, vdpbf16ps is faster
constexpr int64_t kFloatUnits = 64;   // units of a block of a pair, which stays in the L1 cache
constexpr int64_t kUnitFloats = 2;    // floats of a unit: its upper half, then its lower half

// While it exists, this thread flushes subnormal numbers to zero, as vdpbf16ps does.
class NoSubnormals {
 public:
  NoSubnormals() : saved_(_mm_getcsr()) {
    _mm_setcsr(saved_ | kZeroResults | kZeroOperands);
    asm volatile("" ::: "memory");
  }
  ~NoSubnormals() {
    asm volatile("" ::: "memory");  // results are stored before
    _mm_setcsr(saved_);
  }

 private:
  static constexpr unsigned kZeroResults = 1 << 15, kZeroOperands = 1 << 6;
  const unsigned saved_;
};

inline VecBits upper_floats(VecBits units) { return units & 0xffff0000u; }
inline VecBits lower_floats(VecBits units) { return units << 16; }

[[gnu::always_inline]] inline Vec half_floats(VecBits units, int half) {
  return (Vec)(half ? upper_floats(units) : lower_floats(units));
}

// Rows widened to float32, which are kept until a thread multiplies other rows.
class FloatRows {
 public:
  FloatRows(UnitRows rows, int64_t num_units) : rows_(rows), num_units_(num_units) {}

  int64_t stride() const { return kUnitFloats * num_units_; }

  // The rows [row, last_row), [rows][stride()].
  const float* of(int64_t row, int64_t last_row) {
    if (row != row_ || last_row != last_row_) widen(row, last_row);
    return floats_;
  }

 private:
  void widen(int64_t row, int64_t last_row) {
    float* to = reinterpret_cast<float*>(space_for<FloatRows>((last_row - row) * stride()));
    floats_ = to;
    row_ = row;
    last_row_ = last_row;
    constexpr int kSwapNeighbours = 0xb1;
    for (; row < last_row; row++) {
      const auto* from = reinterpret_cast<const Bf16*>(rows_.data + row * rows_.stride);
      for (const float* const end = to + stride(); to < end; to += kLanes, from += kLanes)
        _mm512_store_ps(to, _mm512_permute_ps((__m512)load(from), kSwapNeighbours));
    }
  }

  const UnitRows rows_;
  const int64_t num_units_;
  const float* floats_ = nullptr;
  int64_t row_ = 0, last_row_ = 0;
};

// Widens the units [first, first + count) of a pair to float32, [units][2 halves][32 outputs].
template <class W>
void widen_units(const W& w, int64_t pair, int64_t first, int64_t count, float* to) {
  alignas(64) Unit space[W::kAreCodes ? kTile : 1];
  for (int64_t unit = 0; unit < count; unit += kUnitStep)
    for (int half = 0; half < 2; half++) {
      const Unit* tile = w.tile(pair, half, first + unit, space);
      float* at = to + unit * kUnitFloats * kPairOutputs + half * kLanes;
      for (int64_t u = 0; u < kUnitStep; u++, tile += kLanes, at += kUnitFloats * kPairOutputs) {
        const VecBits units = *reinterpret_cast<const VecBits*>(tile);
        _mm512_store_ps(at, (__m512)upper_floats(units));
        _mm512_store_ps(at + kPairOutputs, (__m512)lower_floats(units));
      }
    }
}

// Adds the products of R rows and a block to their sums, [R][32].
template <int R>
[[gnu::noinline]] void add_floats(const float* block, int64_t num_floats, const float* rows,
                                  int64_t stride, float* saved) {
  const NoSubnormals mode;
  // One pointer and the stride address three rows.
  constexpr int kRowsPerPointer = 3;
  const float* inputs[(R + kRowsPerPointer - 1) / kRowsPerPointer];
#pragma GCC unroll 32
  for (int r = 0; r < R; r += kRowsPerPointer) {
    const float*& at = inputs[r / kRowsPerPointer];
    at = rows + r * stride;
    asm("" : "+r"(at));  // otherwise GCC would address all rows relative to the first one
  }
  __m512 sums[R][2];
#pragma GCC unroll 32
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int p = 0; p < 2; p++) sums[r][p] = _mm512_load_ps(saved + r * kPairOutputs + p * kLanes);
#pragma GCC unroll 1
  for (int64_t i = 0; i < num_floats; i++, block += kPairOutputs) {
    const __m512 low = _mm512_load_ps(block), high = _mm512_load_ps(block + kLanes);
#pragma GCC unroll 32
    for (int r = 0; r < R; r++) {
      const __m512 x = _mm512_set1_ps(inputs[r / kRowsPerPointer][r % kRowsPerPointer * stride]);
      sums[r][0] = _mm512_fmadd_ps(x, low, sums[r][0]);
      sums[r][1] = _mm512_fmadd_ps(x, high, sums[r][1]);
    }
#pragma GCC unroll 32
    for (int r = 0; r < R; r += kRowsPerPointer) inputs[r / kRowsPerPointer]++;
  }
#pragma GCC unroll 32
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int p = 0; p < 2; p++) _mm512_store_ps(saved + r * kPairOutputs + p * kLanes, sums[r][p]);
}

using FloatAdder = void (*)(const float* block, int64_t num_floats, const float* rows,
                            int64_t stride, float* saved);

template <int... Fewer>
FloatAdder float_adder(int64_t num_rows, std::integer_sequence<int, Fewer...>) {
  static constexpr FloatAdder kAdders[] = {add_floats<Fewer + 1>...};
  return kAdders[num_rows - 1];
}

// Adds the sums of a group, [rows][32], times its scales to the sums of earlier groups, and clears
// them. Subnormal numbers are not flushed here.
template <class W>
void add_group(const W& w, int64_t pair, int64_t unit, int64_t num_rows, float* group, float* sums) {
  const Vec low = w.group_scales(pair, 0, unit), high = w.group_scales(pair, 1, unit);
  for (const float* const end = group + num_rows * kPairOutputs; group < end;
       group += kPairOutputs, sums += kPairOutputs) {
    save(multiply_add(load(group), low, load(sums)), sums, kLanes);
    save(multiply_add(load(group + kLanes), high, load(sums + kLanes)), sums + kLanes, kLanes);
    std::fill(group, group + kPairOutputs, 0.0f);
  }
}

struct FloatBlock;
struct FloatSums;

// Multiplies the rows [row, last_row) by the pairs [pair, last_pair), like multiply_with_vectors.
// num_next: the number of pairs after these whose weights are prefetched.
template <class W, class Out>
void multiply_floats(const W& w, FloatRows& rows, int64_t row, int64_t last_row, int64_t pair,
                     int64_t last_pair, int64_t num_next, const Out& out) {
  const int64_t num_rows = last_row - row;
  if (num_rows == 0 || pair >= last_pair) return;
  const float* const inputs = rows.of(row, last_row);
  const int64_t num_tiles = (num_rows + kMaxFloatRows - 1) / kMaxFloatRows;
  float* const block =
      reinterpret_cast<float*>(space_for<FloatBlock>(kFloatUnits * kUnitFloats * kPairOutputs));
  constexpr bool kAreGroups = W::kGroupUnits > 0;  // the blocks
  static_assert(!kAreGroups || W::kGroupUnits == kFloatUnits);
  const int64_t num_sums = num_rows * kPairOutputs;
  float* const saved =
      reinterpret_cast<float*>(space_for<FloatSums>(kAreGroups ? 2 * num_sums : num_sums));
  float* const sums = kAreGroups ? saved + num_sums : saved;  // of the current block, or of all blocks
  for (; pair < last_pair; pair++) {
    WeightsAhead ahead = weights_ahead(w, pair + 1, last_pair + num_next, num_tiles);
    std::fill(saved, sums + num_sums, 0.0f);
    for (int64_t first = 0; first < w.num_units; first += kFloatUnits) {
      const int64_t count = std::min(kFloatUnits, w.num_units - first);
      widen_units(w, pair, first, count, block);
      for (int64_t tile = 0; tile < num_tiles; tile++) {
        for (int64_t unit = 0; unit < count; unit += kUnitStep) ahead.fetch<kL2Cache>();
        const int64_t begin = num_rows * tile / num_tiles, end = num_rows * (tile + 1) / num_tiles;
        const auto add =
            float_adder(end - begin, std::make_integer_sequence<int, kMaxFloatRows>());
        add(block, count * kUnitFloats, inputs + begin * rows.stride() + first * kUnitFloats,
            rows.stride(), sums + begin * kPairOutputs);
      }
      if constexpr (kAreGroups) add_group(w, pair, first, num_rows, sums, saved);
    }
    for (int64_t r = 0; r < num_rows; r++) {
      const float* const sum = saved + r * kPairOutputs;
      out(row + r, pair, load(sum), load(sum + kLanes));
    }
  }
}

// Whether float32 multiply-adds give the bits of vdpbf16ps, for random numbers of all magnitudes.
inline bool floats_are_equal() {
  constexpr int kRounds = 4096;
  uint64_t state = 1;
  const auto next = [&] {
    VecBits bits;
    for (int lane = 0; lane < kLanes; lane++) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      bits[lane] = static_cast<uint32_t>(state >> 32);
    }
    return bits;
  };
  const NoSubnormals mode;
  bool are_equal = true;
  for (int round = 0; round < kRounds; round++) {
    // Exponents near that of 1, so that sums are rounded and cancel; in every eighth round, any
    // exponents.
    const VecBits kept = VecBits{} + (round % 8 == 0 ? 0xffffffffu : 0x83ff83ffu);
    const VecBits added = VecBits{} + (round % 8 == 0 ? 0 : 0x3c003c00u);
    const VecBits x = (next() & kept) | added, y = (next() & kept) | added;
    const Vec sum = (Vec)((next() & kept) | added);
    const Vec expected = (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)y);
    Vec found = multiply_add((Vec)upper_floats(x), (Vec)upper_floats(y), sum);
    found = multiply_add((Vec)lower_floats(x), (Vec)lower_floats(y), found);
    const VecInt are_nan = (expected != expected) & (found != found);  // whose bits may differ
    const VecInt differs = ~are_nan & ((VecInt)expected != (VecInt)found);
    are_equal &= _mm512_test_epi32_mask((__m512i)differs, (__m512i)differs) == 0;
  }
  return are_equal;
}

// The shortest time of several measurements of one kind of product, in ticks of the time stamp counter.
template <class F>
inline int64_t least_ticks(const F& add) {
  constexpr int kTurns = 16, kSteps = 256;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int turn = 0; turn < kTurns; turn++) {
    // Ten independent chains hide the latency. GCC would keep an array of them in memory.
    __m512 a{}, b{}, c{}, d{}, e{}, f{}, g{}, h{}, i{}, j{};
    const auto begin = static_cast<int64_t>(__builtin_ia32_rdtsc());
    for (int step = 0; step < kSteps; step++) {
      a = add(a), b = add(b), c = add(c), d = add(d), e = add(e);
      f = add(f), g = add(g), h = add(h), i = add(i), j = add(j);
      asm volatile("" : "+v"(a), "+v"(b), "+v"(c), "+v"(d), "+v"(e));
      asm volatile("" : "+v"(f), "+v"(g), "+v"(h), "+v"(i), "+v"(j));
    }
    least = std::min(least, static_cast<int64_t>(__builtin_ia32_rdtsc()) - begin);
  }
  return least;
}

// Whether two float32 multiply-adds are faster than one vdpbf16ps.
inline bool floats_are_faster() {
  const __m512 floats = _mm512_setzero_ps();
  const __m512bh pairs = (__m512bh)floats;
  const int64_t of_floats = least_ticks([&](__m512 sum) { return _mm512_fmadd_ps(floats, floats, sum); });
  const int64_t of_pairs = least_ticks([&](__m512 sum) { return _mm512_dpbf16_ps(sum, pairs, pairs); });
  return 2 * of_floats < of_pairs;
}

#endif

}  // namespace
