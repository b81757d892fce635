// Packed weights: their layouts, and how kernels read them, tile by tile.
//
// Inputs come in units of four bytes: one float32, or two bfloat16 values side by side. A panel has
// 16 outputs; a tile is 16 units of a panel, [16][16], and as large as an AMX tile. There are zeros
// past the last input and output: the units of a panel are a multiple of 16, and the panels a
// multiple of 2.
//
// Weights lie as units, or as codes of 8 or 4 bits with scales. A code stands for code · scale, with 4 bits
// rounded to bfloat16. A kernel makes the units of a tile of codes when it reads the tile. Units of codes
// of 8 bits are the codes themselves, and the sums of an output are multiplied by its scale. Without AMX,
// those of 4 bits are so, too, and the sums of a group of inputs are multiplied by its scales. Where rows
// are codes, too (coded_rows.h), a unit has four codes of 8 bits, and kernels multiply these.

#pragma once

#include <algorithm>

#include "vec.h"

namespace {

typedef uint32_t Unit __attribute__((may_alias));

constexpr int64_t kUnitStep = 16;  // units of a tile
constexpr int64_t kTile = kUnitStep * kLanes;
constexpr int64_t kTileInputs = 2 * kUnitStep;  // in bfloat16
constexpr int64_t kPairOutputs = 2 * kLanes;
constexpr int64_t kLine = 64;          // bytes of a line of the caches
constexpr int64_t kCodesAhead = 4096;  // bytes

// Numbers that packed_weights.py knows.
enum Format : int32_t {
  kUnits,
  kInt8,
  kInt4,
  kInt8ForCodes,  // rows are codes, too
  kCompact,       // that of compact_weights.h
  kGroupedInt4,   // those of grouped_codes.h
  kGroupedInt8,
  kGroupedE4m3,
  kGroupedTable,
};

// Weights as units, [outputs / 16][units][16].
struct Panels {
  static constexpr bool kAreCodes = false;  // else `tile` makes units of them
  static constexpr bool kMakesVectors = false;  // else a Step makes them one by one, in registers
  static constexpr int64_t kMostCodedRows = 0;  // for more rows, all units are made beforehand
  static constexpr int64_t kStepLines = kPairOutputs;  // to fetch ahead for a step; 0: `tile` does
  // Units of a group, whose sums are multiplied by `group_scales`; 0: units have their scales.
  static constexpr int64_t kGroupUnits = 0;

  const Unit* units;
  int64_t num_units;  // of a panel
  int64_t num_pairs;  // of panels

  const Unit* panel(int64_t pair) const { return units + pair * kPairOutputs * num_units; }
  const char* start(int64_t pair) const { return reinterpret_cast<const char*>(panel(pair)); }

  // The weight of one expert, of several that lie one after another.
  Panels expert(int64_t number) const { return {panel(number * num_pairs), num_units, num_pairs}; }

  // The tile from a unit on, in the low or high panel of a pair.
  const Unit* tile(int64_t pair, int half, int64_t unit, Unit*) const {
    return panel(pair) + (half * num_units + unit) * kLanes;
  }
};

// Values, and the codes of a format that are nearest to their quotients by a scale.
struct Rounding {
  const float* values;
  int64_t size;  // a multiple of 16

  float greatest() const {  // by magnitude, with its sign
    return *std::max_element(values, values + size, [](float a, float b) {
      return std::fabs(a) < std::fabs(b);
    });
  }

  template <class Code>
  static Vec codes(Vec v, float inverse) {
    const Vec code = (v * inverse + kWhole) - kWhole;
    const Vec bounded = code < Code::kLeast ? splat(Code::kLeast) : code;
    return bounded > Code::kMost ? splat(Code::kMost) : bounded;
  }

  // The sum of squared differences, each times a factor that keeps its square in range.
  template <class Code>
  float error(float scale, float factor) const {
    Vec sum = splat(0.0f);
    for (int64_t i = 0; i < size; i += kLanes) {
      const Vec v = load(values + i), lost = v - codes<Code>(v, 1.0f / scale) * scale;
      sum += (lost * factor) * (lost * factor);
    }
    return fold(sum, [](Vec a, Vec b) { return a + b; });
  }
};

// The upper halves of two values, side by side: two bfloat16 values.
inline PartBits high_halves(PartBits first, PartBits second) {
#ifdef __AVX512BW__
  const VecBits bytes = VecBits{} + 0x3020302;
  const VecBits by_lane = {0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12};
  return (PartBits)_mm512_mask_shuffle_epi8((__m512i)second, 0x3333333333333333,
                                           (__m512i)first, (__m512i)(bytes + by_lane * 0x1010101));
#else
  return first >> 16 | (second & 0xffff0000u);
#endif
}

// Codes of 8 bits. An output has one scale.
struct Int8 {
  using Scale = float;
  static constexpr int64_t kGroupTiles = int64_t{1} << 40;  // all
  static constexpr float kLeast = -127.0f, kMost = 127.0f;

  // The greatest value is a bfloat16, and so are 127 scales, rounded: values that have been rounded
  // once have the same scale, and keep their codes. A scale has 14 significant bits, of which the
  // last is 1. So products are exact in float32, and none is halfway between two bfloat16 values.
  static float scale_for(const Rounding& rounding) {
    constexpr uint32_t kLast = 1 << 10;
    return float_of((bits_of(std::fabs(rounding.greatest()) / kMost) & -kLast) | kLast);
  }
};

// Codes of 4 bits. Each 128 inputs of an output have a scale of five significant bits: bfloat16
// holds every product.
struct Int4 {
  using Scale = Bf16;
  static constexpr int64_t kGroupTiles = 4;
  static constexpr float kLeast = -8.0f, kMost = 7.0f;

  // Of the scales with which the greatest value is near -7 or past it, the one with the least error.
  // It is among them again for values that were rounded with it: these have no error.
  static float scale_for(const Rounding& rounding) {
    constexpr uint32_t kStep = 1 << 19;
    const float most = rounding.greatest();
    const float factor = std::ldexp(1.0f, -std::ilogb(most));
    float best = 0.0f, least = std::numeric_limits<float>::infinity();
    for (uint32_t bits = bits_of(std::fabs(most) / 10.0f) / kStep * kStep;; bits += kStep) {
      const float size = float_of(bits);
      if (!(size <= std::fabs(most) / kMost)) return best;
      const float scale = most > 0.0f ? -size : size;
      const float error = rounding.error<Int4>(scale, factor);
      if (error < least) best = scale, least = error;
    }
  }
};

#ifdef __AVX512VBMI__

// The bytes of the bfloat16 values of 0 to 127.
struct Magnitudes {
  static constexpr int kCount = 128;

  constexpr Magnitudes() : low(), high() {
    for (int size = 1, exponent = 0; size < kCount; size++) {
      if (size >> (exponent + 1)) exponent++;
      const int bits = ((127 + exponent) << 7) + ((size << (7 - exponent)) & 0x7f);
      low[size] = static_cast<uint8_t>(bits);
      high[size] = static_cast<uint8_t>(bits >> 8);
    }
  }

  alignas(kLine) uint8_t low[kCount], high[kCount];
};

// The codes of a tile, as sign and magnitude: [8 lines][4 quarters of the outputs][2 units][4 outputs][2].
struct Int8Tile {
  static constexpr int64_t kBytes = 2 * kTile;

  static void place(const int8_t* codes, int64_t lane, uint8_t* tile) {
    for (int64_t i = 0; i < kTileInputs; i++) {
      const int64_t unit = i / 2, value = lane % 4 * 2 + i % 2;
      tile[unit / 2 * kLine + lane / 4 * 16 + unit % 2 * 8 + value] =
          static_cast<uint8_t>(codes[i] < 0 ? 0x80 - codes[i] : codes[i]);
    }
  }

  // Unit `number` of a tile.
  [[gnu::always_inline]] static VecBits unit(const uint8_t* tile, int number) {
    static constexpr Magnitudes kMagnitudes;
    constexpr int kOrAnd = 0xf8;
    const auto byte_of = [](__m512i codes, const uint8_t* bytes) {
      return _mm512_permutex2var_epi8(_mm512_load_si512(bytes), codes,
                                      _mm512_load_si512(bytes + kLine));
    };
    // Written so, the compiler sees that two neighbouring units have the same line.
    const __m512i codes = _mm512_loadu_si512(tile + number * (kLine / 2) - number % 2 * (kLine / 2));
    const __m512i low = byte_of(codes, kMagnitudes.low);
    const __m512i high = _mm512_ternarylogic_epi32(byte_of(codes, kMagnitudes.high), codes,
                                                   _mm512_set1_epi8(INT8_MIN), kOrAnd);
    return (VecBits)(number % 2 ? _mm512_unpackhi_epi8(low, high) : _mm512_unpacklo_epi8(low, high));
  }

  static void unpack(const uint8_t* tile, Unit* units) {
#pragma GCC unroll 16
    for (int number = 0; number < kUnitStep; number++)
      *reinterpret_cast<VecBits*>(units + number * kLanes) = unit(tile, number);
  }
};

#else

// The codes of a tile, plus 128: [8 words][outputs], with four codes of an output in a word, rotated left
// by 7 bits. There two of them lie where the mantissa of a float has them, so that floats are made
// without a shift.
struct Int8Tile {
  static constexpr int64_t kBytes = 2 * kTile;

  static void place(const int8_t* codes, int64_t lane, uint8_t* tile) {
    for (int64_t i = 0; i < kTileInputs; i += kPerWord) {
      uint32_t word = 0;
      for (int k = 0; k < kPerWord; k++) word |= (codes[i + k] + kZero) << 8 * k;
      word = word << kRotation | word >> (32 - kRotation);
      std::memcpy(tile + (i / kPerWord * kLanes + lane) * sizeof word, &word, sizeof word);
    }
  }

#ifdef __AVX512BW__
  // Unit `number` of a tile.
  [[gnu::always_inline]] static VecBits unit(const uint8_t* tile, int number) {
    const PartBits words = words_of(tile, number);
    return high_halves(value(words, 0), value(words, 1));
  }
#endif

  [[gnu::noinline]] static void unpack(const uint8_t* tile, Unit* units) {
    for_units(tile, [&](int number, int lane, PartBits first, PartBits second) {
      *reinterpret_cast<PartBits*>(units + number * kLanes + lane) = high_halves(first, second);
    });
  }

  // The same as float32, [inputs][kPairOutputs].
  [[gnu::noinline]] static void widen(const uint8_t* tile, Unit* inputs) {
    for_units(tile, [&](int number, int lane, PartBits first, PartBits second) {
      Unit* const to = inputs + number * 2 * kPairOutputs + lane;
      *reinterpret_cast<PartBits*>(to) = first;
      *reinterpret_cast<PartBits*>(to + kPairOutputs) = second;
    });
  }

 private:
  static constexpr int kPerWord = 4, kRotation = 7;
  static constexpr uint32_t kZero = 128;

  // Calls f(number of a unit, lane of a part, the bits of its first values, those of the second ones).
  template <class F>
  [[gnu::always_inline]] static void for_units(const uint8_t* tile, const F& f) {
    for (int lane = 0; lane < kLanes; lane += kPartLanes)
      for (int number = 0; number < kUnitStep; number++) {
        const PartBits words = words_of(tile + lane * sizeof(Unit), number);
        f(number, lane, value(words, 0), value(words, 1));
      }
  }

  // The words with the codes of a unit, at bits 7 to 22.
  static PartBits words_of(const uint8_t* tile, int number) {
    const PartBits words = *reinterpret_cast<const PartBits*>(tile + number / 2 * kLine);
    return number % 2 ? words >> 16 | words << 16 : words;
  }

  // The bits of the floats that are codes k of some words. A float of this size changes by 1 where the
  // lowest bit of the code lies.
  static PartBits value(PartBits words, int k) {
    const float size = 65536 >> 8 * k;
    const PartBits mask = PartBits{} + (0xffu << (kRotation + 8 * k));
    return (PartBits)((Part)((words & mask) | bits_of(size)) - (size + kZero));
  }
};

#endif

// Weights as codes of 8 bits, [outputs / 32][tiles][2 panels][tile]. Units are the codes, without their
// scales.
struct Int8Panels {
  static constexpr bool kAreCodes = true;
#ifdef __AVX512BW__
  static constexpr bool kMakesVectors = true;
#else
  static constexpr bool kMakesVectors = false;
#endif
  static constexpr int64_t kStepLines = 0, kGroupUnits = 0;
  static constexpr int64_t kUnitInputs = 2;
  static constexpr int64_t kMostCodedRows = 0;

  const uint8_t* codes;
  const float* scales;  // [outputs / 32][2 panels][16]
  int64_t num_units;
  int64_t num_pairs;

  int64_t tile_at(int64_t pair, int half, int64_t unit) const {
    return ((pair * num_units + unit) / kUnitStep * 2 + half) * Int8Tile::kBytes;
  }

  int64_t scales_at(int64_t pair, int half, int64_t) const {
    return pair * kPairOutputs + half * kLanes;
  }

  // The weight of one expert, of several that lie one after another.
  Int8Panels expert(int64_t number) const {
    const int64_t pair = number * num_pairs;
    return {codes + tile_at(pair, 0, 0), scales + scales_at(pair, 0, 0), num_units, num_pairs};
  }

  // Places the codes of one output, a lane of a panel.
  void place(const int8_t* output, int64_t pair, int half, int64_t lane, uint8_t* to) const {
    for (int64_t unit = 0; unit < num_units; unit += kUnitStep)
      Int8Tile::place(output + 2 * unit, lane, to + tile_at(pair, half, unit));
  }

#ifdef __AVX512BW__
  // The units of a step, in registers.
  struct Step {
    [[gnu::always_inline]] Step(const Int8Panels& w, int64_t pair, int64_t unit)
        : tiles(w.codes + w.tile_at(pair, 0, unit)) {}

    [[gnu::always_inline]] VecBits vector(int number, int half) const {
      // The codes that come next are fetched bit by bit, so that memory is never idle.
      if (half == 0) __builtin_prefetch(tiles + kCodesAhead + number * (2 * Int8Tile::kBytes / kUnitStep));
      return Int8Tile::unit(tiles + half * Int8Tile::kBytes, number);
    }

    const uint8_t* const tiles;  // that of the low panel, and that of the high one behind it
  };

  bool has_exceptions(int64_t, int64_t) const { return false; }
#endif

  // The tile from a unit on, made in `space`.
  const Unit* tile(int64_t pair, int half, int64_t unit, Unit* space) const {
    Int8Tile::unpack(fetched_tile(pair, half, unit), space);
    return space;
  }

#ifndef __AVX512F__
  // The same as float32, [inputs][kPairOutputs].
  void widen_tile(int64_t pair, int half, int64_t unit, Unit* inputs) const {
    Int8Tile::widen(fetched_tile(pair, half, unit), inputs);
  }
#endif

 private:
  // The codes of a tile, while those that come next are fetched.
  const uint8_t* fetched_tile(int64_t pair, int half, int64_t unit) const {
    const uint8_t* at = codes + tile_at(pair, half, unit);
    for (int64_t i = 0; i < Int8Tile::kBytes; i += kLine) __builtin_prefetch(at + kCodesAhead + i);
    return at;
  }
};

// Weights as codes of 4 bits plus 8, [outputs / 32][tiles][2 panels][4 words][16 outputs]: a word has
// four units of an output. The lower half of the word has the first values of the units, from the lowest
// bits on, and the upper half the second ones. Units are the codes, without their scales.
struct Int4Panels {
  static constexpr bool kAreCodes = true;
#ifdef __AVX512BW__
  static constexpr bool kMakesVectors = true;
#else
  static constexpr bool kMakesVectors = false;
#endif
  static constexpr int64_t kUnitInputs = 2;
  static constexpr int64_t kMostCodedRows = 0;
  static constexpr int64_t kGroupUnits = Int4::kGroupTiles * kUnitStep;
  static constexpr int kWordUnits = 4;
  static constexpr int64_t kBytes = kTile / kWordUnits * sizeof(Unit);  // of a tile
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

  // The weight of one expert, of several that lie one after another.
  Int4Panels expert(int64_t number) const {
    const int64_t pair = number * num_pairs;
    return {codes + tile_at(pair, 0, 0), scales + scales_at(pair, 0, 0), num_units, num_pairs};
  }

  // Places the codes of one output, a lane of a panel.
  void place(const int8_t* output, int64_t pair, int half, int64_t lane, uint8_t* to) const {
    constexpr int kZero = 8;
    for (int64_t i = 0; i < 2 * num_units; i++) {
      const int64_t unit = i / 2, word = unit % kUnitStep / kWordUnits;
      uint8_t* const at = to + tile_at(pair, half, unit) + (word * kLanes + lane) * sizeof(Unit);
      const int64_t place = i % 2 * kWordUnits + unit % kWordUnits;
      at[place / 2] |= (output[i] + kZero) << place % 2 * 4;
    }
  }

#ifdef __AVX512BW__
  // The units of a step, in registers.
  struct Step {
    [[gnu::always_inline]] Step(const Int4Panels& w, int64_t pair, int64_t unit)
        : tiles(w.codes + w.tile_at(pair, 0, unit)) {}

    [[gnu::always_inline]] VecBits vector(int number, int half) const {
      const uint8_t* const line = tiles + half * kBytes + number / kWordUnits * kLine;
      return units(line, number % kWordUnits);
    }

    const uint8_t* const tiles;  // that of the low panel, and that of the high one behind it
  };

  bool has_exceptions(int64_t, int64_t) const { return false; }
#endif

  // The tile from a unit on, made in `space`.
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
              high_halves(values(words, k), values(words >> 16, k));
        }
#endif
    return space;
  }

  // The same as float32, [inputs][kPairOutputs].
  [[gnu::noinline]] void widen_tile(int64_t pair, int half, int64_t unit, Unit* inputs) const {
    const uint8_t* const lines = codes + tile_at(pair, half, unit);
    for (int word = 0; word < kUnitStep / kWordUnits; word++)
      for (int p = 0; p < kLanes; p += kPartLanes) {
        const PartBits words = words_at(lines + word * kLine, p);
        Unit* to = inputs + word * kWordUnits * 2 * kPairOutputs + p;
#pragma GCC unroll 4
        for (int k = 0; k < kWordUnits; k++, to += 2 * kPairOutputs) {
          *reinterpret_cast<PartBits*>(to) = values(words, k);
          *reinterpret_cast<PartBits*>(to + kPairOutputs) = values(words >> 16, k);
        }
      }
  }

 private:
  static PartBits words_at(const uint8_t* line, int lane) {
    return *reinterpret_cast<const PartBits*>(line + lane * sizeof(Unit));
  }

  // The bits of the floats that are codes k of the lower halves of words. A float of this size changes by
  // 1 where the lowest bit of the code lies.
  static PartBits values(PartBits words, int k) {
    const float size = 1 << (23 - 4 * k);
    const PartBits mask = PartBits{} + (0xfu << 4 * k);
    return (PartBits)((Part)((words & mask) | bits_of(size)) - (size + 8.0f));
  }

#ifdef __AVX512BW__
  // Unit k of the words of a line.
  [[gnu::always_inline]] static VecBits units(const uint8_t* line, int k) {
    // -8 to 7 in bfloat16. Of an index, the five lowest bits count: all values stand there twice.
    const VecHalf values = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                            0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
    const __m512i codes = _mm512_srli_epi16(_mm512_loadu_si512(line), 4 * k);
    return (VecBits)_mm512_permutexvar_epi16(codes, _mm512_broadcast_i64x4((__m256i)values));
  }
#endif
};

// Weights as units of four codes of 8 bits, plus 128 each, in the places of Panels.
struct CodedUnits {
  static constexpr int64_t kUnitInputs = 4;

  const uint8_t* codes;
  const float* scales;  // [outputs / 32][2 panels][16]
  int64_t num_units;
  int64_t num_pairs;

  int64_t scales_at(int64_t pair, int half, int64_t) const {
    return pair * kPairOutputs + half * kLanes;
  }

  // Places the codes of one output, a lane of a panel.
  void place(const int8_t* output, int64_t pair, int half, int64_t lane, uint8_t* to) const {
    constexpr int kZero = 128;
    to += ((pair * 2 + half) * num_units * kLanes + lane) * sizeof(Unit);
    for (int64_t i = 0; i < kUnitInputs * num_units; i++)
      to[i / kUnitInputs * kLine + i % kUnitInputs] = static_cast<uint8_t>(output[i] + kZero);
  }
};

#ifdef __AMX_BF16__

// Turns [16][16] units around.
inline void transpose(__m512i (&rows)[kLanes]) {
  __m512i pairs[kLanes];
#pragma GCC unroll 8
  for (int i = 0; i < kLanes; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < kLanes; i += 4)  // row i + j has columns j, 4 + j, ... of four rows
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

// Weights as codes of 4 bits, [outputs / 32][groups][2 panels][16 outputs][32 words], where AMX is
// in use. The codes of an output that share a scale are one vector: word i has inputs i, 32 + i,
// 64 + i and 96 + i, from the lowest bits on. A table of 16 products makes units of all of them.
struct CodedGroups {
  static constexpr bool kAreCodes = true, kMakesVectors = false;
  static constexpr int64_t kStepLines = 0, kGroupUnits = 0;
  static constexpr int64_t kUnitInputs = 2;
  static constexpr int64_t kMostCodedRows = 128;  // most rows that multiply_columns computes
  static constexpr int64_t kGroupTiles = Int4::kGroupTiles;
  static constexpr int64_t kGroupInputs = kGroupTiles * kTileInputs;
  static constexpr int64_t kBytes = kLanes * kGroupInputs / 2;  // of a panel

  const uint8_t* codes;
  const Bf16* scales;  // [outputs / 32][groups][2 panels][16]
  int64_t num_units;
  int64_t num_pairs;

  int64_t num_groups() const { return (num_units / kUnitStep - 1) / kGroupTiles + 1; }

  // The number of a group's panel.
  int64_t index(int64_t pair, int half, int64_t group) const {
    return (pair * num_groups() + group) * 2 + half;
  }

  int64_t scales_at(int64_t pair, int half, int64_t unit) const {
    return index(pair, half, unit / kUnitStep / kGroupTiles) * kLanes;
  }

  // The weight of one expert, of several that lie one after another.
  CodedGroups expert(int64_t number) const {
    const int64_t at = index(number * num_pairs, 0, 0);
    return {codes + at * kBytes, scales + at * kLanes, num_units, num_pairs};
  }

  // Places the codes of one output, a lane of a panel.
  void place(const int8_t* output, int64_t pair, int half, int64_t lane, uint8_t* to) const {
    constexpr int kZero = 8;
    for (int64_t i = 0; i < 2 * num_units; i++) {
      const int64_t at = i % kGroupInputs, word = at % kTileInputs, tile = at / kTileInputs;
      uint8_t* output_to = to + index(pair, half, i / kGroupInputs) * kBytes + lane * kLine;
      output_to[2 * word + tile / 2] |= (output[i] + kZero) << tile % 2 * 4;
    }
  }

  // The products of a scale and the 16 codes, twice.
  static __m512i table(float scale) {
    const VecHalf twice = {1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
    const Vec values = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
    const __m512i upper_halves = _mm512_broadcast_i64x4((__m256i)twice);
    return _mm512_permutexvar_epi16(upper_halves, (__m512i)(values * scale));
  }

  // Units of one tile, from the words of the group.
  static __m512i units(__m512i words, int tile, __m512i table) {
    return _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4 * tile), table);
  }

  // The units of four outputs of a group's panel, in [tiles][16 outputs][16 units].
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

  // The tile from a unit on, made in `space`.
  [[gnu::noinline]] const Unit* tile(int64_t pair, int half, int64_t unit, Unit* space) const {
    const int64_t tile = unit / kUnitStep % kGroupTiles;
    const int64_t at = index(pair, half, unit / kUnitStep / kGroupTiles);
    const uint8_t* words = codes + at * kBytes;
    alignas(64) float by_output[kLanes];
    save(load(scales + at * kLanes), by_output, kLanes);
    __m512i made[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i++)
      made[i] = units(_mm512_load_si512(words + i * kLine), tile, table(by_output[i]));
    for (int64_t line = 0; line < kLanes / kGroupTiles; line++)
      __builtin_prefetch(words + kCodesAhead + (tile * kLanes / kGroupTiles + line) * kLine);
    transpose(made);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i++) _mm512_store_si512(space + i * kLanes, made[i]);
    return space;
  }
};

#endif

// Weights whose units are kept as a kernel makes them, of one pair: it must read all of its tiles.
template <class W>
struct KeptUnits {
  static constexpr bool kAreCodes = true, kMakesVectors = W::kMakesVectors;
  static constexpr int64_t kStepLines = W::kStepLines, kMostCodedRows = W::kMostCodedRows;
  static constexpr int64_t kGroupUnits = 0;

  const W& weights;
  Unit* const units;
  const int64_t num_units = weights.num_units;

  Panels panels() const { return {units, num_units, 1}; }

  bool has_exceptions(int64_t pair, int64_t unit) const {
    return weights.has_exceptions(pair, unit);
  }

  struct Step {
    [[gnu::always_inline]] Step(const KeptUnits& kept, int64_t pair, int64_t unit)
        : made(kept.weights, pair, unit),
          to{kept.units + unit * kLanes, kept.units + (kept.num_units + unit) * kLanes} {}

    [[gnu::always_inline]] VecBits vector(int number, int half) const {
      const VecBits units = made.vector(number, half);
      *reinterpret_cast<VecBits*>(to[half] + number * kLanes) = units;
      return units;
    }

    const typename W::Step made;
    Unit* const to[2];
  };

  const Unit* tile(int64_t pair, int half, int64_t unit, Unit*) const {
    return weights.tile(pair, half, unit, units + (half * num_units + unit) * kLanes);
  }
};

// The units of some pairs, made in `space`.
template <class W>
Panels unpacked(const W& w, int64_t first_pair, int64_t last_pair, Unit* space) {
  Unit* to = space;
  for (int64_t pair = first_pair; pair < last_pair; pair++)
    for (int half = 0; half < 2; half++)
      for (int64_t unit = 0; unit < w.num_units; unit += kUnitStep, to += kTile)
        w.tile(pair, half, unit, to);
  return {space, w.num_units, last_pair - first_pair};
}

}  // namespace
