// Lossless compression of bfloat16 weights to 12 bits each.
//
// Trained weights use few of the 256 exponents of bfloat16. Each pair of panels has a lookup table of
// its 16 most frequent exponents, and a weight is stored as sign and mantissa (8 bits) and the index
// of its exponent (4 bits). Weights with other exponents are exceptions, at most kMaxExceptions for
// each tile. Kernels decode exactly the units of Panels.

#pragma once

#include "products/weights.h"

namespace {

#ifdef __AVX512BW__

// Layout: [outputs / 32][tiles][2 panels][4 quarters][3 lines]. A quarter is four vectors of units.
// Each 16 bits of its first line are four exponent indices, from the first vector's in the lowest
// bits on. Each of the other lines holds the signs and mantissas of two vectors: in each 16 bits, the
// higher byte has the sign of the first vector and the mantissa of the second one, and the lower byte
// the others.
struct CompactPanels {
  static constexpr bool kAreCodes = true, kMakesVectors = true;
  static constexpr int64_t kMaxCodedRows = std::numeric_limits<int64_t>::max();
  static constexpr int64_t kUnitInputs = 2;
  static constexpr int kQuarters = 4, kQuarterLines = 3, kQuarterVectors = kUnitStep / kQuarters;
  static constexpr int64_t kBytes = kQuarters * kQuarterLines * kLine;  // bytes of a tile
  static constexpr int64_t kStepLines = 2 * kBytes / kLine, kGroupUnits = 0;
  static constexpr int kNumExponents = 16, kMaxExceptions = 6;

  struct Exception {
    uint16_t index = kNoIndex;  // index of the value in the tile of units
    uint16_t bits = 0;
  };
  static constexpr uint16_t kNoIndex = 0xffff;

  const uint8_t* codes;
  const uint8_t* others;  // [outputs / 32]{16 exponents, Exception[tiles][2 panels][kMaxExceptions]}
  int64_t num_units;
  int64_t num_pairs;

  // Bytes of a pair in `others` and in `codes`.
  int64_t other_bytes() const {
    constexpr int64_t kOfTile = kMaxExceptions * sizeof(Exception);
    return kNumExponents + num_units / kUnitStep * 2 * kOfTile;
  }

  int64_t pair_bytes() const { return num_units / kUnitStep * 2 * kBytes; }

  const char* start(int64_t pair) const {
    return reinterpret_cast<const char*>(codes) + pair * pair_bytes();
  }

  // The weight of an expert. The weights of all experts are consecutive pairs.
  CompactPanels expert(int64_t number) const {
    const int64_t pair = number * num_pairs;
    return {codes + pair * pair_bytes(), others + pair * other_bytes(), num_units, num_pairs};
  }

  // The bit mask of sign and mantissa.
  static __m512i sign_and_mantissa() { return _mm512_set1_epi16(static_cast<int16_t>(0x807f)); }

  // Swaps the bytes of each value.
  static __m512i swapped(__m512i values) {
    return _mm512_shuffle_epi8(
        values, _mm512_set4_epi32(0x0e0f0c0d, 0x0a0b0809, 0x06070405, 0x02030001));
  }

  // Whether a step of a pair has exceptions.
  bool has_exceptions(int64_t pair, int64_t unit) const {
    const Exception* const at = exceptions(pair, unit / kUnitStep * 2);
    return (at[0].index & at[kMaxExceptions].index) != kNoIndex;
  }

  // Decodes vectors of a step of units, in registers. Requires that the step has no exceptions.
  struct Step {
    [[gnu::always_inline]] Step(const CompactPanels& w, int64_t pair, int64_t unit)
        : lines(w.codes + pair * w.pair_bytes() + unit / kUnitStep * 2 * kBytes),
          table(table_of(w.others_of(pair))) {}

    [[gnu::always_inline]] VecBits vector(int number, int half) const {
      const int quarter = number / kQuarterVectors;
      const uint8_t* const at = lines + half * kBytes + quarter * kQuarterLines * kLine;
      return unpacked(at, number % kQuarterVectors, table);
    }

    const uint8_t* const lines;
    const __m512i table;
  };

  // Decodes the tile at a unit into `space`.
  const Unit* tile(int64_t pair, int half, int64_t unit, Unit* space) const {
    const int64_t number = unit / kUnitStep * 2 + half;
    const uint8_t* const tile = codes + pair * pair_bytes() + number * kBytes;
    const __m512i table = table_of(others_of(pair));
    for (int quarter = 0; quarter < kQuarters; quarter++)
      for (int v = 0; v < kQuarterVectors; v++)
        *reinterpret_cast<VecBits*>(space + (quarter * kQuarterVectors + v) * kLanes) =
            unpacked(tile + quarter * kQuarterLines * kLine, v, table);
    const Exception* const at = exceptions(pair, number);
    for (int i = 0; i < kMaxExceptions && at[i].index != kNoIndex; i++)
      std::memcpy(reinterpret_cast<char*>(space) + at[i].index * sizeof(uint16_t), &at[i].bits,
                  sizeof(uint16_t));
    return space;
  }

 private:
  const uint8_t* others_of(int64_t pair) const { return others + pair * other_bytes(); }

  const Exception* exceptions(int64_t pair, int64_t tile) const {
    return reinterpret_cast<const Exception*>(others_of(pair) + kNumExponents) +
           tile * kMaxExceptions;
  }

  // The lookup table of exponents, repeated, since an index has five significant bits.
  [[gnu::always_inline]] static __m512i table_of(const uint8_t* exponents) {
    const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(exponents));
    return _mm512_broadcast_i64x4(_mm256_slli_epi16(_mm256_cvtepu8_epi16(values), 7));
  }

  // Decodes vector v of a quarter.
  [[gnu::always_inline]] static VecBits unpacked(const uint8_t* quarter, int v, __m512i table) {
    constexpr int kAndOr = 0xea;
    const __m512i indices = _mm512_srli_epi16(_mm512_loadu_si512(quarter), 4 * v);
    __m512i rest = _mm512_loadu_si512(quarter + (1 + v / 2) * kLine);
    if (v % 2) rest = swapped(rest);
    const __m512i exponents = _mm512_permutexvar_epi16(indices, table);
    return (VecBits)_mm512_ternarylogic_epi32(rest, sign_and_mantissa(), exponents, kAndOr);
  }
};

// Compresses one pair of panels.
class CompactPair {
 public:
  CompactPair(const Panels& pair, uint8_t* codes, uint8_t* others)
      : pair_(pair), codes_(codes), others_(others) {}

  // Returns false if a tile has too many exceptions.
  bool pack() {
    choose_exponents();
    int64_t number = 0;
    for (int64_t unit = 0; unit < pair_.num_units; unit += kUnitStep)
      for (int half = 0; half < 2; half++, number++)
        if (!pack_tile(pair_.tile(0, half, unit, nullptr), number)) return false;
    return true;
  }

 private:
  using W = CompactPanels;
  static constexpr int kValues = 2 * kLanes;  // values of a vector of units

  void choose_exponents() {
    constexpr int kAll = 256, kTables = 4;  // interleaved histograms hide the latency of increments
    uint32_t counts[kTables][kAll] = {};
    const Unit* const units = pair_.panel(0);
    for (int64_t i = 0; i < kPairOutputs * pair_.num_units; i += kTables / 2)
      for (int k = 0; k < kTables; k++) counts[k][units[i + k / 2] >> (7 + k % 2 * 16) & 0xff]++;
    int64_t sums[kAll];
    for (int i = 0; i < kAll; i++)
      sums[i] = int64_t{counts[0][i]} + counts[1][i] + counts[2][i] + counts[3][i];
    for (int i = 0; i < W::kNumExponents; i++) {
      const auto most = std::max_element(sums, sums + kAll) - sums;
      sums[most] = -1;
      others_[i] = static_cast<uint8_t>(most);
    }
  }

  bool pack_tile(const Unit* units, int64_t number) {
    int num_exceptions = 0;
    W::Exception exceptions[W::kMaxExceptions];
    for (int quarter = 0; quarter < W::kQuarters; quarter++) {
      __m512i indices = _mm512_setzero_si512(), lines[2] = {indices, indices};
      for (int v = 0; v < W::kQuarterVectors; v++) {
        const int vector = quarter * W::kQuarterVectors + v;
        const __m512i values = _mm512_loadu_si512(units + vector * kLanes);
        __mmask32 is_exception = ~__mmask32{0};
        const __m512i own = indices_of(values, is_exception);
        indices = _mm512_or_si512(indices, _mm512_slli_epi16(own, 4 * v));
        __m512i rest = _mm512_and_si512(values, W::sign_and_mantissa());
        if (v % 2) rest = W::swapped(rest);
        lines[v / 2] = _mm512_or_si512(lines[v / 2], rest);
        for (; is_exception; is_exception &= is_exception - 1) {
          if (num_exceptions == W::kMaxExceptions) return false;
          const int i = __builtin_ctz(is_exception);
          auto& exception = exceptions[num_exceptions++];
          exception.index = static_cast<uint16_t>(vector * kValues + i);
          exception.bits = static_cast<uint16_t>(units[vector * kLanes + i / 2] >> i % 2 * 16);
        }
      }
      uint8_t* const to = codes_ + number * W::kBytes + quarter * W::kQuarterLines * kLine;
      _mm512_storeu_si512(to, indices);
      _mm512_storeu_si512(to + kLine, lines[0]);
      _mm512_storeu_si512(to + 2 * kLine, lines[1]);
    }
    std::memcpy(others_ + W::kNumExponents + number * sizeof exceptions, exceptions,
                sizeof exceptions);
    return true;
  }

  // Looks up the indices of the values' exponents, and clears the bits of those that are found.
  __m512i indices_of(__m512i values, __mmask32& is_exception) const {
    const __m512i exponents = _mm512_andnot_si512(W::sign_and_mantissa(), values);
    __m512i indices = _mm512_setzero_si512();
    for (int i = 0; i < W::kNumExponents; i++) {
      const __m512i exponent = _mm512_set1_epi16(static_cast<int16_t>(others_[i] << 7));
      const __mmask32 is_equal = _mm512_cmpeq_epi16_mask(exponents, exponent);
      indices = _mm512_mask_mov_epi16(indices, is_equal, _mm512_set1_epi16(static_cast<int16_t>(i)));
      is_exception &= ~is_equal;
    }
    return indices;
  }

  const Panels pair_;
  uint8_t *const codes_, *const others_;
};

#endif

}  // namespace
