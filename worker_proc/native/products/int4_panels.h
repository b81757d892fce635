// int4 weights with one scale for each output and group of 128 inputs.
//
// Int4 chooses scales. Int4Panels is the layout for vector kernels, and CodedGroups the layout for AMX,
// whose units include the scales. linear.cpp packs the weights.

#pragma once

#include "products/placed_codes.h"
#include "products/value_group.h"
#include "products/weights.h"

namespace {

// int4 codes with a bfloat16 scale for each group of 128 inputs of an output. A scale has five
// significant bits, so code · scale is exact in bfloat16.
struct Int4 {
  using Scale = Bf16;
  static constexpr int64_t kGroupTiles = 4;
  static constexpr bool kHasSignedScales = true;
  static constexpr float kMin = -8.0f, kMax = 7.0f;

  // Searches the scales that map the value with the largest magnitude to -7 or beyond, up to -10, for
  // the least squared error. Quantization is idempotent: dequantized values have an error of 0 with
  // their scale, which is among the searched ones.
  static float scale_for(const ValueGroup& group) {
    constexpr uint32_t kStep = 1 << 19;
    const float most = group.signed_absmax();
    const float factor = std::ldexp(1.0f, -std::ilogb(most));
    float best = 0.0f, least = std::numeric_limits<float>::infinity();
    for (uint32_t bits = bits_of(std::fabs(most) / 10.0f) / kStep * kStep;; bits += kStep) {
      const float size = float_of(bits);
      if (!(size <= std::fabs(most) / kMax)) return best;
      const float scale = most > 0.0f ? -size : size;
      const float error = group.error<Int4>(scale, factor);
      if (error < least) best = scale, least = error;
    }
  }
};

// The place in a word of an input's code, of eight successive inputs.
constexpr int nibble_of(int64_t input) { return static_cast<int>(input % 2 * 4 + input / 2); }

// int4 weights with an offset of 8, [outputs / 32][tiles][2 panels][4 words][16 outputs]. A word has
// four units of an output: the first values in its lower half, from the lowest bits on, and the
// second values in its upper half. Units are codes in bfloat16 without the scales, by which the sums
// of a group of inputs are multiplied.
struct Int4Panels {
  static constexpr bool kAreCodes = true;
#ifdef __AVX512BW__
  static constexpr bool kMakesVectors = true;
#else
  static constexpr bool kMakesVectors = false;
#endif
  static constexpr int64_t kUnitInputs = 2;
  static constexpr int64_t kMaxCodedRows = 0;
  static constexpr int64_t kGroupUnits = Int4::kGroupTiles * kUnitStep;
  static constexpr int kWordUnits = 4;
  static constexpr int64_t kBytes = kTile / kWordUnits * sizeof(Unit);  // bytes of a tile
  static constexpr int64_t kStepLines = 2 * kBytes / kLine;

  const uint8_t* codes;
  const Bf16* scales;  // [outputs / 32][groups][2 panels][16]
  int64_t num_units;
  int64_t num_pairs;

  int64_t tile_at(int64_t pair, int half, int64_t unit) const {
    return ((pair * num_units + unit) / kUnitStep * 2 + half) * kBytes;
  }

  const char* start(int64_t pair) const {
    return reinterpret_cast<const char*>(codes + tile_at(pair, 0, 0));
  }

  int64_t scales_at(int64_t pair, int half, int64_t unit) const {
    const int64_t num_groups = (num_units - 1) / kGroupUnits + 1;
    return ((pair * num_groups + unit / kGroupUnits) * 2 + half) * kLanes;
  }

  // The scales of the group that a unit belongs to.
  Vec group_scales(int64_t pair, int half, int64_t unit) const {
    return load(scales + scales_at(pair, half, unit));
  }

  // The weight of an expert. The weights of all experts are consecutive pairs.
  Int4Panels expert(int64_t number) const {
    const int64_t pair = number * num_pairs;
    return {codes + tile_at(pair, 0, 0), scales + scales_at(pair, 0, 0), num_units, num_pairs};
  }

  // Packs the codes of one output: a lane of a panel.
  void pack_output(const int8_t* output, int64_t pair, int half, int64_t lane, uint8_t* to) const {
    constexpr int kZero = 8;
    for (int64_t i = 0; i < 2 * num_units; i++) {
      const int64_t unit = i / 2, word = unit % kUnitStep / kWordUnits;
      uint8_t* const at = to + tile_at(pair, half, unit) + (word * kLanes + lane) * sizeof(Unit);
      const int64_t nibble = nibble_of(i % (2 * kWordUnits));
      at[nibble / 2] |= (output[i] + kZero) << nibble % 2 * 4;
    }
  }

#ifdef __AVX512BW__
  // Decodes vectors of a step of units, in registers.
  struct Step {
    [[gnu::always_inline]] Step(const Int4Panels& w, int64_t pair, int64_t unit)
        : tiles(w.codes + w.tile_at(pair, 0, unit)) {}

    [[gnu::always_inline]] VecBits vector(int number, int half) const {
      const uint8_t* const line = tiles + half * kBytes + number / kWordUnits * kLine;
      return units(line, number % kWordUnits);
    }

    const uint8_t* const tiles;  // of the low panel, followed by that of the high panel
  };

  bool has_exceptions(int64_t, int64_t) const { return false; }
#endif

  // Decodes the tile at a unit into `space`.
  const Unit* tile(int64_t pair, int half, int64_t unit, Unit* space) const {
    const uint8_t* const lines = codes + tile_at(pair, half, unit);
    for (int word = 0; word < kUnitStep / kWordUnits; word++)
      for (int k = 0; k < kWordUnits; k++)
#ifdef __AVX512BW__
        *reinterpret_cast<VecBits*>(space + (word * kWordUnits + k) * kLanes) =
            units(lines + word * kLine, k);
#else
        for (int p = 0; p < kLanes; p += kPartLanes) {
          const PartBits words = words_at(lines + word * kLine, p);
          *reinterpret_cast<PartBits*>(space + (word * kWordUnits + k) * kLanes + p) =
              high_halves(value(words, k), value(words, kWordUnits + k));
        }
#endif
    return space;
  }

#ifndef __AVX512F__
  // A line of the codes of successive inputs (line_products.h).
  struct Lines {
    static constexpr int kInputs = 2 * kWordUnits;
    static constexpr int64_t kTileBytes = kBytes;

    [[gnu::always_inline]] static Part weights(const uint8_t* line, int input, int lane) {
      return PlacedCodes<4>::value(words_at(line, lane), nibble_of(input));
    }
  };

  static constexpr auto kInputFactors = factors_of_places<4>(nibble_of);

  static constexpr InputFactors input_factors() {
    return {kInputFactors.data(), 2 * kGroupUnits, 8.0f};
  }

  GroupFactors group_factors(int64_t pair, int half, int64_t input) const {
    return {group_scales(pair, half, input / 2), Vec{}};
  }

  // Decodes to float32, [inputs][kPairOutputs], for inputs with these factors.
  [[gnu::noinline]] void decode_tile(int64_t pair, int half, int64_t unit, Unit* inputs) const {
    const uint8_t* const lines = codes + tile_at(pair, half, unit);
    for (int word = 0; word < kUnitStep / kWordUnits; word++)
      for (int p = 0; p < kLanes; p += kPartLanes) {
        const PartBits words = words_at(lines + word * kLine, p);
        Unit* to = inputs + word * kWordUnits * 2 * kPairOutputs + p;
#pragma GCC unroll 8
        for (int k = 0; k < Lines::kInputs; k++, to += kPairOutputs)
          *reinterpret_cast<PartBits*>(to) = (PartBits)PlacedCodes<4>::value(words, nibble_of(k));
      }
  }
#endif

 private:
  static PartBits words_at(const uint8_t* line, int lane) {
    return *reinterpret_cast<const PartBits*>(line + lane * sizeof(Unit));
  }

  // The value of a code.
  static PartBits value(PartBits words, int nibble) {
    const PartInt code = (PartInt)(words >> 4 * nibble & 0xf) - 8;
    return (PartBits)__builtin_convertvector(code, Part);
  }

#ifdef __AVX512BW__
  // Unit k of each word of a line.
  [[gnu::always_inline]] static VecBits units(const uint8_t* line, int k) {
    // The integers -8 to 7 in bfloat16. The table is repeated, since an index has five significant
    // bits.
    const VecHalf values = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                            0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
    const __m512i codes = _mm512_srli_epi16(_mm512_loadu_si512(line), 4 * k);
    return (VecBits)_mm512_permutexvar_epi16(codes, _mm512_broadcast_i64x4((__m256i)values));
  }
#endif
};

#ifdef __AMX_BF16__

// Transposes [16][16] units.
inline void transpose(__m512i (&rows)[kLanes]) {
  __m512i pairs[kLanes];
#pragma GCC unroll 8
  for (int i = 0; i < kLanes; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < kLanes; i += 4)  // row i + j gets the columns j, 4 + j, ... of four rows
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
      rows[i + 2 * j] = _mm512_unpacklo_epi64(pairs[i + j], pairs[i + j + 2]);
      rows[i + 2 * j + 1] = _mm512_unpackhi_epi64(pairs[i + j], pairs[i + j + 2]);
    }
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    const __m512i first_even = _mm512_shuffle_i32x4(rows[j], rows[4 + j], 0x88);
    const __m512i first_odd = _mm512_shuffle_i32x4(rows[j], rows[4 + j], 0xdd);
    const __m512i last_even = _mm512_shuffle_i32x4(rows[8 + j], rows[12 + j], 0x88);
    const __m512i last_odd = _mm512_shuffle_i32x4(rows[8 + j], rows[12 + j], 0xdd);
    rows[j] = _mm512_shuffle_i32x4(first_even, last_even, 0x88);
    rows[4 + j] = _mm512_shuffle_i32x4(first_odd, last_odd, 0x88);
    rows[8 + j] = _mm512_shuffle_i32x4(first_even, last_even, 0xdd);
    rows[12 + j] = _mm512_shuffle_i32x4(first_odd, last_odd, 0xdd);
  }
}

// int4 weights for AMX, [outputs / 32][groups][2 panels][16 outputs][32 words of 16 bits]. The codes
// of an output and group are one vector: word i has the inputs i, 32 + i, 64 + i and 96 + i, from the
// lowest bits on. A lookup table of the 16 products code · scale decodes the vector.
struct CodedGroups {
  static constexpr bool kAreCodes = true, kMakesVectors = false;
  static constexpr int64_t kStepLines = 0, kGroupUnits = 0;
  static constexpr int64_t kUnitInputs = 2;
  static constexpr int64_t kMaxCodedRows = 128;  // maximum number of rows for multiply_columns
  static constexpr int64_t kGroupTiles = Int4::kGroupTiles;
  static constexpr int64_t kGroupInputs = kGroupTiles * kTileInputs;
  static constexpr int64_t kBytes = kLanes * kGroupInputs / 2;  // bytes of a group's panel

  const uint8_t* codes;
  const Bf16* scales;  // [outputs / 32][groups][2 panels][16]
  int64_t num_units;
  int64_t num_pairs;

  int64_t num_groups() const { return (num_units / kUnitStep - 1) / kGroupTiles + 1; }

  // The index of a group's panel.
  int64_t index(int64_t pair, int half, int64_t group) const {
    return (pair * num_groups() + group) * 2 + half;
  }

  int64_t scales_at(int64_t pair, int half, int64_t unit) const {
    return index(pair, half, unit / kUnitStep / kGroupTiles) * kLanes;
  }

  // The weight of an expert. The weights of all experts are consecutive pairs.
  CodedGroups expert(int64_t number) const {
    const int64_t at = index(number * num_pairs, 0, 0);
    return {codes + at * kBytes, scales + at * kLanes, num_units, num_pairs};
  }

  // Packs the codes of one output: a lane of a panel.
  void pack_output(const int8_t* output, int64_t pair, int half, int64_t lane, uint8_t* to) const {
    constexpr int kZero = 8;
    for (int64_t i = 0; i < 2 * num_units; i++) {
      const int64_t at = i % kGroupInputs, word = at % kTileInputs, tile = at / kTileInputs;
      uint8_t* output_to = to + index(pair, half, i / kGroupInputs) * kBytes + lane * kLine;
      output_to[2 * word + tile / 2] |= (output[i] + kZero) << tile % 2 * 4;
    }
  }

  // The lookup table of the products of a scale and the 16 codes, repeated.
  static __m512i table(float scale) {
    const VecHalf twice = {1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
    const Vec values = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
    const __m512i upper_halves = _mm512_broadcast_i64x4((__m256i)twice);
    return _mm512_permutexvar_epi16(upper_halves, (__m512i)(values * scale));
  }

  // Decodes the units of one tile from the words of a group.
  static __m512i units(__m512i words, int tile, __m512i table) {
    return _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4 * tile), table);
  }

  // Decodes four outputs of a group's panel to [tiles][16 outputs][16 units].
  [[gnu::always_inline]] static void unpack_outputs(const uint8_t* at, const float* scales,
                                                    int first, Unit* space) {
#pragma GCC unroll 4
    for (int output = first; output < first + 4; output++) {
      const __m512i words = _mm512_load_si512(at + output * kLine), products = table(scales[output]);
      __builtin_prefetch(at + output * kLine + kCodesAhead);
#pragma GCC unroll 4
      for (int tile = 0; tile < kGroupTiles; tile++)
        _mm512_store_si512(space + tile * kTile + output * kUnitStep, units(words, tile, products));
    }
  }

  // Decodes the tile at a unit into `space`.
  [[gnu::noinline]] const Unit* tile(int64_t pair, int half, int64_t unit, Unit* space) const {
    const int64_t tile = unit / kUnitStep % kGroupTiles;
    const int64_t at = index(pair, half, unit / kUnitStep / kGroupTiles);
    const uint8_t* words = codes + at * kBytes;
    alignas(64) float by_output[kLanes];
    save(load(scales + at * kLanes), by_output, kLanes);
    __m512i rows[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i++)
      rows[i] = units(_mm512_load_si512(words + i * kLine), tile, table(by_output[i]));
    for (int64_t line = 0; line < kLanes / kGroupTiles; line++)
      __builtin_prefetch(words + kCodesAhead + (tile * kLanes / kGroupTiles + line) * kLine);
    transpose(rows);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i++) _mm512_store_si512(space + i * kLanes, rows[i]);
    return space;
  }
};

#endif

}  // namespace
