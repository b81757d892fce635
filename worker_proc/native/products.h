// Products of rows with packed weights, in which a row's bits depend on nothing but the row.
//
// Every output is one chain of sums over the inputs, from the first to the last, or, where groups of
// inputs have scales, a chain of the sums of groups. The chain is the same for any number of rows, any
// place among them, and any number of threads. Rows are float, Bf16, or int8_t: codes, whose sums are
// whole numbers modulo 2^32 (coded_rows.h).
//
// decoder.cpp calls `multiply` and `multiply_heads`, which divide rows and outputs among the threads;
// experts.h, which divides its work itself, calls `multiply_block`. Behind these `multiply_part`
// takes the way that suits the processor and the number of rows: AMX tiles, vectors, or weights that
// are widened to float32 once for many rows. weights.h states how weights lie in memory.

#pragma once

#include <type_traits>
#include <utility>

#include "float_products.h"
#include "product_inputs.h"
#include "team.h"

// Whether this process may use AMX; set when the library is loaded.
extern bool troika_has_tiles;

namespace {

template <typename T>
struct SumsFor {
  typedef Vec Type;
};

template <>
struct SumsFor<int8_t> {
  typedef VecInt Type;
};

template <typename T>
using SumsOf = typename SumsFor<T>::Type;

#ifdef __AVX512F__

constexpr int kMostRows = 12;  // of which the sums of one pair fit into the registers
constexpr bool kHasManyRegisters = true;
// Pairs that one row is multiplied by at once. A thread reads memory fastest in few places.
constexpr int kPairsOfOneRow = 1;

template <typename T>
inline SumsOf<T> add_product(SumsOf<T> sum, Unit unit, VecBits weights);

template <>
inline Vec add_product<float>(Vec sum, Unit unit, VecBits weights) {
  return multiply_add(splat(float_of(unit)), (Vec)weights, sum);
}

template <>
inline Vec add_product<Bf16>(Vec sum, Unit unit, VecBits weights) {
#ifdef __AVX512BF16__
  const __m512i x = _mm512_set1_epi32(static_cast<int>(unit));
  return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)weights);
#else
  sum = add_product<float>(sum, unit << 16, weights << 16);
  return add_product<float>(sum, unit & 0xffff0000u, weights & 0xffff0000u);
#endif
}

// Codes of weights have no sign, those of rows do.
template <>
inline VecInt add_product<int8_t>(VecInt sum, Unit unit, VecBits weights) {
  const __m512i x = _mm512_set1_epi32(static_cast<int>(unit)), w = (__m512i)weights;
#ifdef __AVX512VNNI__
  return (VecInt)_mm512_dpbusd_epi32((__m512i)sum, w, x);
#else
  const __m512i low = _mm512_madd_epi16(_mm512_and_si512(w, _mm512_set1_epi16(0xff)),
                                        _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8));
  const __m512i high = _mm512_madd_epi16(_mm512_srli_epi16(w, 8), _mm512_srai_epi16(x, 8));
  return (VecInt)_mm512_add_epi32((__m512i)sum, _mm512_add_epi32(low, high));
#endif
}

// Rows whose inputs are read one after another. One pointer and the stride address three rows: so
// twelve rows need few registers.
template <int R>
class RowInputs {
 public:
  [[gnu::always_inline]] explicit RowInputs(const UnitRows& rows) : stride_(rows.stride) {
#pragma GCC unroll 32
    for (int r = 0; r < R; r += kPerPointer) {
      const Unit*& at = inputs_[r / kPerPointer];
      at = rows.data + r * rows.stride;
      asm("" : "+r"(at));  // else the compiler would address all rows from the first one
    }
  }

  // The unit of a row that lies some units ahead.
  [[gnu::always_inline]] Unit at(int row, int64_t ahead) const {
    return inputs_[row / kPerPointer][row % kPerPointer * stride_ + ahead];
  }

  [[gnu::always_inline]] void advance(int count) {
#pragma GCC unroll 32
    for (int r = 0; r < R; r += kPerPointer) inputs_[r / kPerPointer] += count;
  }

 private:
  static constexpr int kPerPointer = 3;

  const int64_t stride_;
  const Unit* inputs_[(R + kPerPointer - 1) / kPerPointer];
};

struct DoNothing {
  [[gnu::always_inline]] void operator()() const {}
};

// Adds products of R rows and units [first, last) of the panels of some pairs to their sums, and those of
// the units a group further on to the sums behind them, if there are two groups. `meanwhile` is called
// for each step of units.
template <typename T, int kGroups, int R, int P, class W, class F = DoNothing>
[[gnu::always_inline]] inline void add_products(const W& w, RowInputs<R>& inputs, int64_t pair,
                                                int64_t first, int64_t last, WeightsAhead& ahead,
                                                SumsOf<T> (&sums)[kGroups * R][P],
                                                const F& meanwhile = {}) {
  constexpr int64_t kSecondGroup = (kGroups - 1) * W::kGroupUnits;
  static_assert(kGroups == 1 || (kGroups == 2 && W::kMakesVectors));
  alignas(64) Unit space[W::kAreCodes ? P : 1][kTile];
  for (; first < last; first += kUnitStep) {
    for (int group = 0; group < kGroups; group++) ahead.fetch<kSecondCache>();
    meanwhile();
    if constexpr (W::kMakesVectors)
      if (!w.has_exceptions(pair, first)) {
        static_assert(P == 2);
        constexpr int kVectors = 4;  // made by the same instructions in each part of a step
        const typename W::Step step(w, pair, first), second(w, pair, first + kSecondGroup);
#pragma GCC unroll 1
        for (int part = 0; part < kUnitStep; part += kVectors) {
#pragma GCC unroll 8
          for (int i = 0; i < kGroups * kVectors; i++) {
            const int group = i % kGroups, v = i / kGroups;
            const typename W::Step& from = group == 0 ? step : second;
            const VecBits low = from.vector(part + v, 0), high = from.vector(part + v, 1);
#pragma GCC unroll 32
            for (int r = 0; r < R; r++) {
              const Unit x = inputs.at(r, group * W::kGroupUnits + v);
              SumsOf<T>(&own)[P] = sums[group * R + r];
              own[0] = add_product<T>(own[0], x, low);
              own[1] = add_product<T>(own[1], x, high);
            }
          }
          inputs.advance(kVectors);
        }
        continue;
      }
    const Unit* tiles[P];
#pragma GCC unroll 32
    for (int p = 0; p < P; p++)
      tiles[p] = w.tile(pair + p / 2, p % 2, first, space[W::kAreCodes ? p : 0]);
#pragma GCC unroll 1
    for (int64_t unit = 0; unit < kUnitStep; unit++) {
      VecBits weights[P];
#pragma GCC unroll 32
      for (int p = 0; p < P; p++) {
        weights[p] = *reinterpret_cast<const VecBits*>(tiles[p]);
        tiles[p] += kLanes;
      }
#pragma GCC unroll 32
      for (int r = 0; r < R; r++) {
        const Unit x = inputs.at(r, 0);
#pragma GCC unroll 32
        for (int p = 0; p < P; p++) sums[r][p] = add_product<T>(sums[r][p], x, weights[p]);
      }
      inputs.advance(1);
    }
  }
}

// Adds the sums of R rows and one or two groups, from a unit on, times their scales to the sums of the
// groups before them.
template <typename T, int kGroups, int R, int P, class W>
[[gnu::always_inline]] inline void add_groups(const W& w, RowInputs<R>& inputs, int64_t pair,
                                              int64_t first, WeightsAhead& ahead,
                                              SumsOf<T> (&sums)[R][P]) {
  SumsOf<T> own[kGroups * R][P] = {};
  const int64_t last = std::min(first + W::kGroupUnits, w.num_units);
  add_products<T, kGroups>(w, inputs, pair, first, last, ahead, own);
  inputs.advance((kGroups - 1) * W::kGroupUnits);
#pragma GCC unroll 2
  for (int group = 0; group < kGroups; group++, first += W::kGroupUnits)
#pragma GCC unroll 32
    for (int p = 0; p < P; p++) {
      const Vec scales = w.group_scales(pair + p / 2, p % 2, first);
#pragma GCC unroll 32
      for (int r = 0; r < R; r++)
        sums[r][p] = multiply_add(own[group * R + r][p], scales, sums[r][p]);
    }
}

// The sums of R rows and the panels of some pairs.
template <typename T, int R, int P, class W, class F = DoNothing>
[[gnu::always_inline]] inline void sum_products(const W& w, UnitRows rows, int64_t pair,
                                                WeightsAhead& ahead, SumsOf<T> (&sums)[R][P],
                                                const F& meanwhile = {}) {
  RowInputs<R> inputs(rows);
#pragma GCC unroll 32
  for (int r = 0; r < R; r++)
#pragma GCC unroll 32
    for (int p = 0; p < P; p++) sums[r][p] = SumsOf<T>{};
  if constexpr (W::kGroupUnits == 0) {
    add_products<T, 1>(w, inputs, pair, 0, w.num_units, ahead, sums, meanwhile);
  } else {
    int64_t first = 0;
    // A product waits for the one before it in its group. Of one or two rows, there are too few others.
    constexpr int64_t kTwoGroups = 2 * W::kGroupUnits;
    if constexpr (W::kMakesVectors && R <= 2)
      for (; first + kTwoGroups <= w.num_units; first += kTwoGroups)
        add_groups<T, 2>(w, inputs, pair, first, ahead, sums);
    for (; first < w.num_units; first += W::kGroupUnits)
      add_groups<T, 1>(w, inputs, pair, first, ahead, sums);
  }
}

#else

constexpr int kMostRows = 3;
constexpr bool kHasManyRegisters = false;
constexpr int kPairsOfOneRow = 2;  // the sums of one pair would wait for each other

// Codes of weights have no sign, those of rows do.
inline PartBits add_coded(PartBits sum, Unit unit, PartBits weights) {
#ifdef __AVX2__
  const __m256i x = _mm256_set1_epi32(static_cast<int>(unit)), w = (__m256i)weights;
#ifdef __AVXVNNI__
  return (PartBits)_mm256_dpbusd_avx_epi32((__m256i)sum, w, x);
#else
  const __m256i low = _mm256_madd_epi16(_mm256_and_si256(w, _mm256_set1_epi16(0xff)),
                                        _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
  const __m256i high = _mm256_madd_epi16(_mm256_srli_epi16(w, 8), _mm256_srai_epi16(x, 8));
  return (PartBits)_mm256_add_epi32((__m256i)sum, _mm256_add_epi32(low, high));
#endif
#else
  for (int k = 0; k < 4; k++)
    sum += (weights >> 8 * k & 0xff) * static_cast<uint32_t>(static_cast<int8_t>(unit >> 8 * k));
  return sum;
#endif
}

// Of codes, a part has the bits of whole numbers.
template <typename T>
inline Part add_product(Part sum, Unit unit, PartBits weights) {
  if constexpr (std::is_same<T, int8_t>::value)
    return (Part)add_coded((PartBits)sum, unit, weights);
  if constexpr (std::is_same<T, float>::value) return sum + float_of(unit) * (Part)weights;
  sum = sum + float_of(unit << 16) * (Part)(weights << 16);
  return sum + float_of(unit & 0xffff0000u) * (Part)(weights & 0xffff0000u);
}

// The sums of R rows and the panels of some pairs.
template <typename T, int R, int P, class W>
[[gnu::always_inline]] inline void sum_products(const W& w, UnitRows rows, int64_t pair,
                                                WeightsAhead&, SumsOf<T> (&sums)[R][P]) {
  static_assert(!W::kAreCodes);  // these are widened
  Part parts[R][P * kParts];
#pragma GCC unroll 32
  for (int r = 0; r < R; r++)
#pragma GCC unroll 32
    for (int i = 0; i < P * kParts; i++) parts[r][i] = Part{};
  for (int64_t first = 0; first < w.num_units; first += kUnitStep) {
    const Unit* tiles[P];
#pragma GCC unroll 32
    for (int p = 0; p < P; p++)
      tiles[p] = w.tile(pair + p / 2, p % 2, first, nullptr);
#pragma GCC unroll 1
    for (int64_t unit = 0; unit < kUnitStep; unit++)
#pragma GCC unroll 32
      for (int i = 0; i < P * kParts; i++) {
        const Unit* at = tiles[i / kParts] + unit * kLanes + i % kParts * kPartLanes;
        const PartBits weights = *reinterpret_cast<const PartBits*>(at);
#pragma GCC unroll 32
        for (int r = 0; r < R; r++) {
          const Unit x = rows.data[r * rows.stride + first + unit];
          parts[r][i] = add_product<T>(parts[r][i], x, weights);
        }
      }
  }
  std::memcpy(&sums, parts, sizeof sums);
}

#endif

// Saves the sums of R rows and some pairs, row by row. `rows` is not copied: a copy is written in parts,
// and to read it as a whole would wait until all stores before have reached the cache.
template <typename T, int R, int Pairs, class W>
[[gnu::noinline]] void save_products(const W& w, const UnitRows& rows, int64_t pair,
                                     WeightsAhead& ahead, SumsOf<T>* saved) {
  SumsOf<T> sums[R][2 * Pairs];
  sum_products<T>(w, rows, pair, ahead, sums);
#pragma GCC unroll 32
  for (int r = 0; r < R; r++)
#pragma GCC unroll 32
    for (int p = 0; p < 2 * Pairs; p++) saved[r * 2 * Pairs + p] = sums[r][p];
}

template <typename T, class W>
using Saver = void (*)(const W& w, const UnitRows& rows, int64_t pair, WeightsAhead& ahead,
                       SumsOf<T>* saved);

// The functions for one pair and 1 to kMostRows rows.
template <typename T, class W, int... Fewer>
Saver<T, W> saver_for(int num_rows, std::integer_sequence<int, Fewer...>) {
  static constexpr Saver<T, W> kSavers[] = {save_products<T, Fewer + 1, 1, W>...};
  return kSavers[num_rows - 1];
}

// Calls f with weights that are made in the way that is fastest for one row.
template <class W, class F>
void with_vectors(const W& w, const F& f) {
  f(w);
}

template <typename T, class W, class Out>
void multiply_rows(const W& w, UnitRows rows, int64_t row, int num_rows, int64_t pair,
                   int num_pairs, WeightsAhead& ahead, const Out& out) {
  SumsOf<T> sums[2 * std::max(kMostRows, kPairsOfOneRow)];
  const UnitRows own{rows.data + row * rows.stride, rows.stride};
  if (num_pairs > 1) {
    save_products<T, 1, kPairsOfOneRow>(w, own, pair, ahead, sums);
  } else if (num_rows == 1) {
    with_vectors(w, [&](const auto& made) { save_products<T, 1, 1>(made, own, pair, ahead, sums); });
  } else {
    const auto save = saver_for<T, W>(num_rows, std::make_integer_sequence<int, kMostRows>());
    save(w, own, pair, ahead, sums);
  }
  const SumsOf<T>* at = sums;
  const Out own_out = out;  // a store could change the other one, as far as the compiler knows
  for (int r = 0; r < num_rows; r++)
    for (int p = 0; p < num_pairs; p++, at += 2) own_out(row + r, pair + p, at[0], at[1]);
}

#ifdef __AVX512BF16__

// The sums of some rows and one pair.
struct TileSums {
  Vec values[kMostRows][2];
  int64_t row = 0;
  int count = 0;
};

// Computes R rows, from `sums.row` on. Row by row, the sums before are passed on meanwhile: much of what
// is done with them takes other units of a core than products do.
template <int R, class Out>
[[gnu::noinline]] void multiply_tile(const Panels& w, const UnitRows& rows, int64_t pair,
                                     WeightsAhead& ahead, const TileSums& before, TileSums& sums,
                                     const Out& out) {
  const Out own_out = out;  // a store could change these, as far as the compiler knows
  const int64_t row = before.row;
  const int count = before.count;
  int num_passed = 0;
  const auto pass_row_on = [&]() __attribute__((always_inline)) {
    if (num_passed == count) return;
    const auto& [low, high] = before.values[num_passed];
    own_out(row + num_passed, pair, low, high);
    num_passed++;
  };
  Vec own[R][2];
  sum_products<Bf16>(w, {rows.data + sums.row * rows.stride, rows.stride}, pair, ahead, own, pass_row_on);
  while (num_passed < count) pass_row_on();  // where there are fewer steps of units than rows
  sums.count = R;
#pragma GCC unroll 32
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int p = 0; p < 2; p++) sums.values[r][p] = own[r][p];
}

constexpr int kLeastTileRows = 10;  // from which on tiles are large, so that there are few such functions

// The same as multiply_tiles_of, where the tiles are large.
template <class Out>
void multiply_large_tiles(const Panels& w, UnitRows rows, int64_t row, int64_t num_rows, int64_t tile,
                          int64_t num_tiles, int64_t pair, WeightsAhead& ahead, const Out& out) {
  static_assert(kLeastTileRows == 10 && kMostRows == 12);
  TileSums sums[2];
  for (; tile < num_tiles; tile++) {
    const TileSums& before = sums[tile % 2];
    TileSums& own = sums[(tile + 1) % 2];
    own.row = row + num_rows * tile / num_tiles;
    switch (row + num_rows * (tile + 1) / num_tiles - own.row) {
      case 10: multiply_tile<10>(w, rows, pair, ahead, before, own, out); break;
      case 11: multiply_tile<11>(w, rows, pair, ahead, before, own, out); break;
      case 12: multiply_tile<12>(w, rows, pair, ahead, before, own, out); break;
    }
  }
  const TileSums& last = sums[num_tiles % 2];
  for (int r = 0; r < last.count; r++) out(last.row + r, pair, last.values[r][0], last.values[r][1]);
}

#endif

// Rows [row, row + num_rows) of a pair, in tiles [tile, num_tiles) of few rows each.
template <typename T, class W, class Out>
void multiply_tiles_of(const W& w, UnitRows rows, int64_t row, int64_t num_rows, int64_t tile,
                       int64_t num_tiles, int64_t pair, WeightsAhead& ahead, const Out& out) {
#ifdef __AVX512BF16__
  if constexpr (std::is_same<T, Bf16>::value && std::is_same<W, Panels>::value)
    if (num_tiles - tile > 1 && num_rows / num_tiles >= kLeastTileRows)
      return multiply_large_tiles(w, rows, row, num_rows, tile, num_tiles, pair, ahead, out);
#endif
  for (; tile < num_tiles; tile++) {
    const int64_t first = row + num_rows * tile / num_tiles;
    const int64_t last = row + num_rows * (tile + 1) / num_tiles;
    multiply_rows<T>(w, rows, first, static_cast<int>(last - first), pair, 1, ahead, out);
  }
}

// Whether the first tile of rows keeps the vectors that a Step makes for the other ones. Codes without
// their scales take an instruction or two to make them again.
template <class W>
constexpr bool kKeepsVectors = W::kMakesVectors && W::kGroupUnits == 0;

// Rows [row, row + num_rows) of a pair.
template <typename T, class W, class Out>
void multiply_pair(const W& w, UnitRows rows, int64_t row, int64_t num_rows, int64_t num_tiles,
                   int64_t pair, WeightsAhead ahead, const Out& out) {
  if constexpr (kKeepsVectors<W>)
    if (num_tiles > 1) {
      const KeptUnits<W> kept{w, space_for<KeptUnits<W>>(kPairOutputs * w.num_units)};
      multiply_tiles_of<T>(kept, rows, row, num_rows / num_tiles, 0, 1, pair, ahead, out);
      const auto out_of_pair = [out, pair](int64_t r, int64_t, auto low, auto high) {
        out(r, pair, low, high);
      };
      return multiply_tiles_of<T>(kept.panels(), rows, row, num_rows, 1, num_tiles, 0, ahead,
                                  out_of_pair);
    }
  multiply_tiles_of<T>(w, rows, row, num_rows, 0, num_tiles, pair, ahead, out);
}

// Rows [row, last_row) and pairs [pair, last_pair) with vector instructions. This thread probably goes
// on with `num_next` pairs behind them.
template <typename T, class W, class Out>
void multiply_with_vectors(const W& w, UnitRows rows, int64_t row, int64_t last_row, int64_t pair,
                           int64_t last_pair, const Out& out, int64_t num_next = 0) {
  const int64_t num_rows = last_row - row;
  if (num_rows == 0) return;
  WeightsAhead none;
  if (kPairsOfOneRow > 1 && num_rows == 1)
    for (; pair + kPairsOfOneRow <= last_pair; pair += kPairsOfOneRow)
      multiply_rows<T>(w, rows, row, 1, pair, kPairsOfOneRow, none, out);
  const int64_t num_tiles = (num_rows + kMostRows - 1) / kMostRows;
  for (; pair < last_pair; pair++)
    multiply_pair<T>(w, rows, row, num_rows, num_tiles, pair,
                     weights_ahead(w, pair + 1, last_pair + num_next, num_tiles), out);
}

#ifndef __AVX512F__

constexpr int kManyRows = 6;                    // from which on widened weights pay
constexpr int64_t kBlockUnits = 4 * kUnitStep;  // a block of a pair stays in the first cache

struct WideRows;
struct SavedSums;

// Rows as float32, the lower half of a unit first.
template <typename T>
UnitRows widened(UnitRows rows, int64_t num_rows, int64_t num_units) {
  if constexpr (std::is_same<T, float>::value) return rows;
  const int64_t stride = 2 * num_units;
  Unit* const wide = space_for<WideRows>(num_rows * stride);
  for (int64_t r = 0; r < num_rows; r++)
    for (int64_t i = 0; i < num_units; i++) {
      const Unit unit = rows.data[r * rows.stride + i];
      wide[r * stride + 2 * i] = unit << 16;
      wide[r * stride + 2 * i + 1] = unit & 0xffff0000u;
    }
  return {wide, stride};
}

// Units of a pair as float32, [inputs][32].
template <typename T, class W>
void widen_block(const W& w, int64_t pair, int64_t first, int64_t count, Unit* to) {
  constexpr int64_t kInputs = sizeof(Unit) / sizeof(T);
  for (int64_t unit = 0; unit < count; unit += kUnitStep)
    for (int half = 0; half < 2; half++) {
      Unit* at = to + unit * kInputs * kPairOutputs + half * kLanes;
      if constexpr (W::kAreCodes) {
        w.widen_tile(pair, half, first + unit, at);
      } else {
        const Unit* tile = w.tile(pair, half, first + unit, nullptr);
        for (int64_t u = 0; u < kUnitStep; u++, tile += kLanes, at += kInputs * kPairOutputs)
          for (int p = 0; p < kLanes; p += kPartLanes) {
            const PartBits bits = *reinterpret_cast<const PartBits*>(tile + p);
            if constexpr (std::is_same<T, float>::value) {
              *reinterpret_cast<PartBits*>(at + p) = bits;
            } else {
              *reinterpret_cast<PartBits*>(at + p) = bits << 16;
              *reinterpret_cast<PartBits*>(at + kPairOutputs + p) = bits & 0xffff0000u;
            }
          }
      }
    }
}

// Adds products of R rows with a block to their sums, [R][32]; where a block is a group, they are summed
// and multiplied by its scales, [32], before.
template <int R, bool kIsGroup>
[[gnu::noinline]] void add_block(const float* block, int64_t num_inputs, const float* rows,
                                 int64_t stride, const float* scales, float* saved) {
  constexpr int kPairParts = kPairOutputs / kPartLanes;
  Part sums[R][kPairParts];
#pragma GCC unroll 32
  for (int r = 0; r < R; r++)
#pragma GCC unroll 32
    for (int p = 0; p < kPairParts; p++)
      sums[r][p] = kIsGroup ? Part{} : part_at(saved + r * kPairOutputs + p * kPartLanes);
#pragma GCC unroll 1
  for (int64_t i = 0; i < num_inputs; i++, block += kPairOutputs)
#pragma GCC unroll 32
    for (int p = 0; p < kPairParts; p++) {
      const Part weights = part_at(block + p * kPartLanes);
#pragma GCC unroll 32
      for (int r = 0; r < R; r++) sums[r][p] = sums[r][p] + rows[r * stride + i] * weights;
    }
  if (kIsGroup)
#pragma GCC unroll 32
    for (int p = 0; p < kPairParts; p++) {
      const Part scale = part_at(scales + p * kPartLanes);
#pragma GCC unroll 32
      for (int r = 0; r < R; r++) {
        const Part before = part_at(saved + r * kPairOutputs + p * kPartLanes);
        sums[r][p] = multiply_add_part(sums[r][p], scale, before);
      }
    }
#pragma GCC unroll 32
  for (int r = 0; r < R; r++)
    std::memcpy(saved + r * kPairOutputs, sums[r], sizeof(sums[r]));
}

// The same chains of sums as those of few rows. Each block of the weights is widened to float32
// once for all rows, and the sums are kept from block to block.
template <typename T, class W, class Out>
void multiply_many_rows(const W& w, UnitRows rows, int64_t row, int64_t last_row, int64_t pair,
                        int64_t last_pair, const Out& out) {
  constexpr int64_t kInputs = sizeof(Unit) / sizeof(T);
  if (pair == last_pair) return;
  const int64_t num_rows = last_row - row;
  const UnitRows given{rows.data + row * rows.stride, rows.stride};
  const UnitRows wide = widened<T>(given, num_rows, w.num_units);
  const float* const inputs = reinterpret_cast<const float*>(wide.data);
  constexpr bool kAreGroups = W::kGroupUnits > 0;  // the blocks
  static_assert(!kAreGroups || W::kGroupUnits == kBlockUnits);
  float* const sums = reinterpret_cast<float*>(space_for<SavedSums>(num_rows * kPairOutputs));
  float scales[kPairOutputs];
  alignas(64) Unit block[kBlockUnits * kInputs * kPairOutputs];
  for (; pair < last_pair; pair++) {
    std::fill(sums, sums + num_rows * kPairOutputs, 0.0f);
    for (int64_t first = 0; first < w.num_units; first += kBlockUnits) {
      const int64_t count = std::min(kBlockUnits, w.num_units - first);
      widen_block<T>(w, pair, first, count, block);
      if constexpr (kAreGroups)
        for (int half = 0; half < 2; half++)
          save(w.group_scales(pair, half, first), scales + half * kLanes, kLanes);
      for (int64_t r = 0; r < num_rows; r += kMostRows) {
        const auto add = num_rows - r == 1   ? add_block<1, kAreGroups>
                         : num_rows - r == 2 ? add_block<2, kAreGroups>
                                             : add_block<kMostRows, kAreGroups>;
        add(reinterpret_cast<const float*>(block), count * kInputs,
            inputs + r * wide.stride + first * kInputs, wide.stride, scales, sums + r * kPairOutputs);
      }
    }
    for (int64_t r = 0; r < num_rows; r++) {
      const float* sum = sums + r * kPairOutputs;
      out(row + r, pair, load(sum), load(sum + kLanes));
    }
  }
}

#endif

#ifdef __AMX_BF16__

constexpr int kAmxRows = 16;

// Keeps the compiler from delaying stores past loads of tiles, which it may not see as loads.
inline void finish_stores() { asm volatile("" ::: "memory"); }

// Adds products of tiles of rows and of weights, given as literals.
#define TROIKA_MULTIPLY_TILES(sums, rows, weights) \
  do {                                             \
    if constexpr (std::is_same<T, int8_t>::value)  \
      _tile_dpbsud(sums, rows, weights);           \
    else                                           \
      _tile_dpbf16ps(sums, rows, weights);         \
  } while (false)

// Tiles 0, 1 are the sums of the upper rows, 2, 3 of the lower ones; 4 and 5 are rows, 6 and 7
// weights.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t num_rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};

  explicit TileConfig(int64_t count) {
    const auto upper = static_cast<uint8_t>(std::min<int64_t>(count, kAmxRows));
    const auto lower = static_cast<uint8_t>(std::max<int64_t>(count - kAmxRows, 1));
    num_rows[0] = num_rows[1] = num_rows[4] = upper;
    num_rows[2] = num_rows[3] = num_rows[5] = std::min<uint8_t>(lower, kAmxRows);
  }
};

// The sums of up to 32 rows and one pair of panels. They are passed on while the next ones are
// computed, when the vector unit is idle.
template <typename T>
struct PendingSums {
  alignas(64) SumsOf<T> values[2][2][kAmxRows];
  int64_t row = 0, pair = 0, count = 0, num_passed = 0;

  template <class Out>
  [[gnu::always_inline]] void pass_on(int64_t num_rows, const Out& out) {
    for (const int64_t end = std::min(num_passed + num_rows, count); num_passed < end; num_passed++) {
      const auto& tile = values[num_passed / kAmxRows];
      const int64_t i = num_passed % kAmxRows;
      out(row + num_passed, pair, tile[0][i], tile[1][i]);
    }
  }
};

// Up to 32 rows of one pair of panels, with tiles configured for this number of rows.
template <typename T, bool HasLower, class W, class Out>
void multiply_tiles(const W& w, UnitRows rows, int64_t row, int64_t count, int64_t pair,
                    WeightsAhead& ahead, PendingSums<T>& sums, PendingSums<T>& previous,
                    const Out& out) {
  // Tiles that are made from codes are made a step ahead: a load waits for stores just before it.
  alignas(64) Unit space[2][2][W::kAreCodes ? kTile : 1];
  const Unit* upper = rows.data + row * rows.stride;
  const Unit* lower = upper + kAmxRows * rows.stride;
  const int64_t stride = rows.stride * sizeof(Unit);
  const int64_t num_steps = w.num_units / kUnitStep;
  const int64_t passed_per_step = (previous.count + num_steps - 1) / num_steps;
  _tile_zero(0);
  _tile_zero(1);
  if (HasLower) _tile_zero(2);
  if (HasLower) _tile_zero(3);
  const Unit* low = w.tile(pair, 0, 0, space[0][0]);
  const Unit* high = w.tile(pair, 1, 0, space[0][1]);
  for (int64_t unit = 0; unit < w.num_units; unit += kUnitStep) {
    const int64_t next = std::min(unit + kUnitStep, w.num_units - kUnitStep);
    auto& place = space[next / kUnitStep % 2];
    const Unit* next_low = w.tile(pair, 0, next, place[0]);
    const Unit* next_high = w.tile(pair, 1, next, place[1]);
    if (W::kAreCodes) finish_stores();
    _tile_loadd(6, low, 64);
    _tile_loadd(4, upper + unit, stride);
    TROIKA_MULTIPLY_TILES(0, 4, 6);
    _tile_loadd(7, high, 64);
    TROIKA_MULTIPLY_TILES(1, 4, 7);
    if (HasLower) {
      _tile_loadd(5, lower + unit, stride);
      TROIKA_MULTIPLY_TILES(2, 5, 6);
      TROIKA_MULTIPLY_TILES(3, 5, 7);
    }
    // The first cache has room for them only beside few rows.
    if (!W::kAreCodes) ahead.fetch<HasLower ? kSecondCache : kFirstCache>();
    previous.pass_on(passed_per_step, out);
    low = next_low;
    high = next_high;
  }
  _tile_stored(0, sums.values[0][0], 64);
  _tile_stored(1, sums.values[0][1], 64);
  if (HasLower) _tile_stored(2, sums.values[1][0], 64);
  if (HasLower) _tile_stored(3, sums.values[1][1], 64);
  sums.row = row;
  sums.pair = pair;
  sums.count = count;
  sums.num_passed = 0;
}

// Up to 32 rows, one beside the other: [units][16 rows] for each 16 of them. One row is as it is.
class Columns {
 public:
  Columns(UnitRows rows, int64_t row, int64_t count, int64_t num_units)
      : data_(rows.data + row * rows.stride), num_units_(num_units), is_one_(count == 1) {
    if (is_one_) return;
    const Unit* from = data_;
    Unit* to = space_for<Columns>(2 * num_units * kLanes);
    data_ = to;
    for (int64_t first = 0; first < count; first += kLanes)
      for (int64_t unit = 0; unit < num_units; unit += kUnitStep) {
        __m512i block[kLanes] = {};
        for (int64_t r = first; r < std::min<int64_t>(first + kLanes, count); r++)
          block[r - first] = _mm512_loadu_si512(from + r * rows.stride + unit);
        transpose(block);
        for (int i = 0; i < kLanes; i++, to += kLanes) _mm512_store_si512(to, block[i]);
      }
  }

  const Unit* lower(int64_t unit) const { return is_one_ ? data_ + unit : data_ + unit * kLanes; }
  const Unit* upper(int64_t unit) const { return lower(num_units_ + unit); }
  int64_t stride() const { return is_one_ ? sizeof(Unit) : kLine; }

 private:
  const Unit* data_;
  const int64_t num_units_;
  const bool is_one_;
};

// Up to 32 rows and pairs [first_pair, last_pair). The outputs are the rows of the tiles, and the
// rows are columns: the products and the order of their sums are the same. The units of a group are
// made while the tiles of the group before it are multiplied.
template <bool HasUpper, class Out>
void multiply_columns(const CodedGroups& w, UnitRows rows, int64_t row, int64_t count,
                      int64_t first_pair, int64_t last_pair, const Out& out) {
  constexpr int kParts = CodedGroups::kGroupTiles, kPartOutputs = kPairOutputs / kParts;
  alignas(64) Unit space[2][2][kParts * kTile];
  alignas(64) float scales[2][kLanes];
  alignas(64) __m512i sums[2][2][kLanes];
  const int64_t num_groups = w.num_groups(), num_steps = w.num_units / kUnitStep;
  const int64_t total = (last_pair - first_pair) * num_groups;
  if (total <= 0) return;
  const Columns columns(rows, row, count, w.num_units);
  const int64_t stride = columns.stride(), at = w.index(first_pair, 0, 0);
  TileConfig config(2 * kAmxRows);
  for (const int tile : {0, 1, 4})
    config.bytes_per_row[tile] = std::min<int64_t>(count, kAmxRows) * sizeof(Unit);
  if (HasUpper)
    for (const int tile : {2, 3, 5})
      config.bytes_per_row[tile] = (count - kAmxRows) * sizeof(Unit);
  const auto unpack = [&](int64_t group, int part) {
    const int half = part * kPartOutputs / kLanes, output = part * kPartOutputs % kLanes;
    const int64_t panel = at + 2 * group + half;
    if (output == 0) save(load(w.scales + panel * kLanes), scales[half], kLanes);
    for (int i = 0; i < kPartOutputs; i += 4)
      CodedGroups::unpack_outputs(w.codes + panel * CodedGroups::kBytes, scales[half], output + i,
                                  space[group % 2][half]);
  };
  for (int part = 0; part < kParts; part++) unpack(0, part);
  finish_stores();
  _tile_loadconfig(&config);
  for (int64_t pair = first_pair, group = 0; pair < last_pair; pair++) {
    _tile_zero(0);
    _tile_zero(1);
    if (HasUpper) _tile_zero(2);
    if (HasUpper) _tile_zero(3);
    for (int64_t step = 0; step < num_groups * kParts; step++) {
      const int part = step % kParts;
      if (group + 1 < total) unpack(group + 1, part);
      const auto& made = space[group % 2];
      if (step < num_steps) {
        _tile_loadd(4, columns.lower(step * kUnitStep), stride);
        _tile_loadd(6, made[0] + part * kTile, kLine);
        _tile_dpbf16ps(0, 6, 4);
        _tile_loadd(7, made[1] + part * kTile, kLine);
        _tile_dpbf16ps(1, 7, 4);
        if (HasUpper) {
          _tile_loadd(5, columns.upper(step * kUnitStep), stride);
          _tile_dpbf16ps(2, 6, 5);
          _tile_dpbf16ps(3, 7, 5);
        }
      }
      if (part == kParts - 1) {
        group++;
        finish_stores();
      }
    }
    _tile_stored(0, sums[0][0], stride);
    _tile_stored(1, sums[0][1], stride);
    if (HasUpper) _tile_stored(2, sums[1][0], stride);
    if (HasUpper) _tile_stored(3, sums[1][1], stride);
    finish_stores();
    for (int64_t first = 0; first < count; first += kLanes) {
      auto& [low, high] = sums[first / kLanes];
      if (count > 1) transpose(low), transpose(high);
      for (int64_t r = first; r < std::min<int64_t>(first + kLanes, count); r++)
        out(row + r, pair, (Vec)low[r - first], (Vec)high[r - first]);
    }
  }
  _tile_release();
}

#undef TROIKA_MULTIPLY_TILES

template <typename T, class W, class Out>
void multiply_with_tiles(const W& w, UnitRows rows, int64_t row, int64_t last_row,
                         int64_t first_pair, int64_t last_pair, const Out& out) {
  constexpr int64_t kBothRows = 2 * kAmxRows;
  if constexpr (std::is_same<W, CodedGroups>::value) {
    for (; row < last_row; row += kBothRows) {
      const int64_t count = std::min(kBothRows, last_row - row);
      (count > kAmxRows ? multiply_columns<true, Out> : multiply_columns<false, Out>)(
          w, rows, row, count, first_pair, last_pair, out);
    }
    return;
  }
  const int64_t last_whole = row + (last_row - row) / kBothRows * kBothRows;
  const TileConfig whole(kBothRows), rest(last_row - last_whole);
  PendingSums<T> sums[2];
  int turn = 0;
  finish_stores();
  if (last_whole > row) {
    const int64_t num_blocks = (last_whole - row) / kBothRows;
    _tile_loadconfig(&whole);
    for (int64_t pair = first_pair; pair < last_pair; pair++) {
      WeightsAhead ahead = weights_ahead(w, pair + 1, last_pair, num_blocks);
      for (int64_t at = row; at < last_whole; at += kBothRows, turn ^= 1)
        multiply_tiles<T, true>(w, rows, at, kBothRows, pair, ahead, sums[turn], sums[turn ^ 1],
                                out);
    }
  }
  if (const int64_t count = last_row - last_whole; count > 0) {
    const auto multiply_rest =
        count > kAmxRows ? multiply_tiles<T, true, W, Out> : multiply_tiles<T, false, W, Out>;
    const bool are_cached = last_whole > row;
    _tile_loadconfig(&rest);
    for (int64_t pair = first_pair; pair < last_pair; pair++, turn ^= 1) {
      WeightsAhead ahead;
      if (!are_cached) ahead = weights_ahead(w, pair + 1, last_pair, 1);
      multiply_rest(w, rows, last_whole, count, pair, ahead, sums[turn], sums[turn ^ 1], out);
    }
  }
  _tile_release();
  sums[turn ^ 1].pass_on(kBothRows, out);
}

#endif

template <typename T>
bool uses_tiles() {
#ifdef __AMX_INT8__
  if (std::is_same<T, int8_t>::value) return troika_has_tiles;
#endif
#ifdef __AMX_BF16__
  if (std::is_same<T, Bf16>::value) return troika_has_tiles;
#endif
  return false;
}

// Most rows for which the weights are read once.
template <typename T>
int64_t rows_at_once() {
#ifdef __AMX_BF16__
  if (uses_tiles<T>()) return 2 * kAmxRows;
#endif
  return kMostRows;
}

template <typename T, class W, class Out>
void multiply_part(const W& w, UnitRows rows, int64_t row, int64_t last_row, int64_t pair,
                   int64_t last_pair, const Out& out, int64_t num_next = 0) {
#ifdef __AMX_BF16__
  if constexpr (!std::is_same<T, float>::value && W::kGroupUnits == 0)
    if (uses_tiles<T>())
      return multiply_with_tiles<T>(w, rows, row, last_row, pair, last_pair, out);
#endif
#ifdef __AVX512BF16__
  if constexpr (std::is_same<T, Bf16>::value && (!W::kAreCodes || W::kMakesVectors))
    if (troika_uses_floats && last_row - row >= kLeastFloatRows) {
      FloatRows own(rows, w.num_units);
      return multiply_floats(w, rows.floats ? *rows.floats : own, row, last_row, pair, last_pair,
                             num_next, out);
    }
#endif
#ifndef __AVX512F__
  if constexpr (!std::is_same<T, int8_t>::value)
    if (W::kAreCodes || last_row - row >= kManyRows)
      return multiply_many_rows<T>(w, rows, row, last_row, pair, last_pair, out);
#endif
  if constexpr (kHasManyRegisters || !W::kAreCodes)
    multiply_with_vectors<T>(w, rows, row, last_row, pair, last_pair, out, num_next);
}

template <typename T>
bool uses_floats() {
#ifdef __AVX512BF16__
  return std::is_same<T, Bf16>::value && !uses_tiles<T>() && troika_uses_floats;
#endif
  return false;
}

// Rows that stay in a core's cache; vectors read them again for each pair.
template <typename T>
int64_t rows_in_cache(int64_t num_units) {
  constexpr int64_t kMostFloats = 256 * 1024;
  if (uses_tiles<T>()) return 256;
  if (uses_floats<T>()) return std::clamp<int64_t>(kMostFloats / (2 * num_units), 32, 128);
  return 128;
}

// Rows [row, last_row) and pairs [pair, last_pair): makes the units of some pairs, then computes all
// rows with them.
template <typename T, class W, class Out>
void multiply_unpacked(const W& w, UnitRows rows, int64_t row, int64_t last_row, int64_t pair,
                       int64_t last_pair, const Out& out) {
  constexpr int64_t kMostBytes = 512 * 1024;  // that stay in a core's cache, beside the rows
  const int64_t pair_units = 2 * kLanes * w.num_units;
  const int64_t most = std::max<int64_t>(1, kMostBytes / (pair_units * sizeof(Unit)));
  for (int64_t end; pair < last_pair; pair = end) {
    end = std::min(pair + most, last_pair);
    const Panels panels = unpacked(w, pair, end, space_for<W>((end - pair) * pair_units));
    const int64_t group = rows_in_cache<T>(w.num_units);
    for (int64_t first = row; first < last_row; first += group)
      multiply_part<T>(panels, rows, first, std::min(first + group, last_row), 0, end - pair,
                       [&](int64_t r, int64_t p, Vec low, Vec high) { out(r, pair + p, low, high); });
  }
}

// Whether rows can share units that are made of codes before.
template <class W>
constexpr bool kCanUnpack = kHasManyRegisters && W::kAreCodes && W::kGroupUnits == 0;

// Whether this many rows share them. Vectors that the first tile of rows keeps take less time than all
// units made before, while the rows stay in a core's cache.
template <typename T, class W>
bool unpacks(int64_t num_rows) {
  constexpr int64_t kMostRowsOfKept = kKeepsVectors<W> ? 128 : 0;
  const int64_t of_kept = uses_tiles<T>() || uses_floats<T>() ? 0 : kMostRowsOfKept;
  return kCanUnpack<W> && num_rows > std::max({rows_at_once<T>(), W::kMostCodedRows, of_kept});
}

// Rows [row, last_row) and pairs [pair, last_pair), in the way that suits their number.
template <typename T, class W, class Out>
void multiply_block(const W& w, UnitRows rows, int64_t row, int64_t last_row, int64_t pair,
                    int64_t last_pair, const Out& out, int64_t num_next = 0) {
  if constexpr (kCanUnpack<W>)
    if (unpacks<T, W>(last_row - row))
      return multiply_unpacked<T>(w, rows, row, last_row, pair, last_pair, out);
  multiply_part<T>(w, rows, row, last_row, pair, last_pair, out, num_next);
}

// Calls out(row, pair, low, high) with the sums of each row and each pair of panels; the threads of
// a team share them. The caller ends the phase.
template <typename T, class W, class Out>
void multiply(Team& team, const W& w, UnitRows rows, int64_t num_rows, const Out& out) {
  constexpr int64_t kFewRows = 16;  // the weights are all that matters: each thread reads a part
  if (num_rows == 0) return;
#ifdef __AVX512BF16__
  FloatRows floats(rows, w.num_units);
  rows.floats = &floats;
#endif
  const bool shares_units = unpacks<T, W>(num_rows);
  // Tiles of other codes fetch the weights that lie behind them, not those of the pair taken next.
  const bool takes_pairs =
      kHasManyRegisters && team.size > 1 && !uses_tiles<T>() && W::kStepLines > 0 && !shares_units;
  if (!takes_pairs && num_rows <= std::max(kFewRows, W::kMostCodedRows))
    return multiply_block<T>(w, rows, 0, num_rows, team.first(w.num_pairs),
                             team.last(w.num_pairs), out);
  int64_t most = rows_in_cache<T>(w.num_units);
  // The first of these rows make the units of compact weights for the others, so there are more of them.
  constexpr int64_t kMostUnits = 80 * 1024, kMostRowsOfUnits = 288;
  if (takes_pairs && kKeepsVectors<W> && !uses_floats<T>())
    most = std::clamp(kMostUnits / w.num_units, most, kMostRowsOfUnits);
  int64_t num_groups = shares_units ? 1 : (num_rows + most - 1) / most;
  if (takes_pairs) {
    // A thread takes neighbouring pairs, and of many rows those that it has in its cache: it makes the
    // same share of the rows in other phases.
    constexpr int64_t kLeastRowsOfShare = 128;
    const int64_t shares = team.num_shares();
    if (num_rows >= shares * kLeastRowsOfShare) num_groups = (num_groups + shares - 1) / shares * shares;
    const int64_t total = num_groups * w.num_pairs;
    for (int64_t task; (task = team.take_near(total)) < total;) {
      const int64_t group = task / w.num_pairs, pair = task % w.num_pairs;
      multiply_block<T>(w, rows, num_rows * group / num_groups, num_rows * (group + 1) / num_groups,
                        pair, pair + 1, out, w.num_pairs - (pair + 1));
    }
    return;
  }
  // Few and long pieces, within which the next weights are fetched while the present ones are used.
  const int64_t group = (num_rows / num_groups + kLanes) / kLanes * kLanes;
  const int64_t num_pieces = std::min<int64_t>(w.num_pairs, 2 * team.size);
  const int64_t total = num_groups * num_pieces;
  for (int64_t task; (task = team.take(total)) < total;) {
    const int64_t row = task / num_pieces * group, piece = task % num_pieces;
    multiply_block<T>(w, rows, std::min(row, num_rows), std::min(row + group, num_rows),
                      w.num_pairs * piece / num_pieces, w.num_pairs * (piece + 1) / num_pieces, out);
  }
}

// Calls out(head, row, pair, low, high) with the sums of each row of each head and the head's own
// weight; the threads of a team share them. `rows` are those of the first head, and those of the next
// one begin `head_units` further in each row. `w` is the weight of head 0, and the others lie behind it.
template <typename T, class W, class Out>
void multiply_heads(Team& team, const W& w, int64_t num_heads, UnitRows rows, int64_t head_units,
                    int64_t num_rows, const Out& out) {
  const int64_t most = rows_in_cache<T>(w.num_units);
  const int64_t num_groups = (num_rows + most - 1) / most;
  const int64_t per_head = std::max<int64_t>(num_groups, 1);
  const int64_t wanted = (4 * team.size + num_heads * per_head - 1) / (num_heads * per_head);
  const int64_t num_pieces = std::min(w.num_pairs, wanted);
  const int64_t total = num_heads * num_groups * num_pieces;
  for (int64_t task; (task = team.take(total)) < total;) {
    const int64_t head = task / (num_groups * num_pieces);
    const int64_t row = task / num_pieces % num_groups * most, piece = task % num_pieces;
    multiply_block<T>(w.expert(head), {rows.data + head * head_units, rows.stride}, row,
                      std::min(row + most, num_rows), w.num_pairs * piece / num_pieces,
                      w.num_pairs * (piece + 1) / num_pieces,
                      [&](int64_t r, int64_t pair, auto low, auto high) {
                        out(head, r, pair, low, high);
                      });
  }
}

}  // namespace
