// int8 weights with one scale for each output.
//
// Int8 chooses scales. Int8Panels is the layout for float and bfloat16 rows, of which Int8Tile
// decodes tiles, and CodedUnits the layout for rows of int8 codes. Scales multiply the sums of an
// output (epilogues.h). linear.cpp packs the weights.

#pragma once

#include "products/value_group.h"
#include "products/weights.h"

namespace {

// int8 codes with one float32 scale for each output.
struct Int8 {
  using Scale = float;
  static constexpr int64_t kGroupTiles = int64_t{1} << 40;  // one group
  static constexpr bool kHasSignedScales = false;
  static constexpr float kMin = -127.0f, kMax = 127.0f;

  // Quantization is idempotent: 127 · scale rounds to the bfloat16 value with the largest magnitude, so
  // dequantized values get the same scale and codes again. A scale has 14 significant bits, the last of
  // which is 1, so code · scale is exact in float32 and never halfway between two bfloat16 values.
  static float scale_for(const ValueGroup& group) {
    constexpr uint32_t kLast = 1 << 10;
    return float_of((bits_of(std::fabs(group.signed_absmax()) / kMax) & -kLast) | kLast);
  }
};

#ifdef __AVX512VBMI__

// A lookup table of the bytes of the integers 0 to 127 in bfloat16.
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

// A tile of int8 codes as sign and magnitude:
// [8 lines][4 quarters of the outputs][2 units][4 outputs][2 inputs].
struct Int8Tile {
  static constexpr int64_t kBytes = 2 * kTile;

  // Packs kTileInputs codes of one output.
  static void pack_lane(const int8_t* codes, int64_t lane, uint8_t* tile) {
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
    // In this form, the compiler recognizes that two adjacent units share a line.
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

// A tile of int8 codes, [32 inputs][16 outputs].
struct Int8Tile {
  static constexpr int64_t kBytes = 2 * kTile;

  // Packs kTileInputs codes of one output.
  static void pack_lane(const int8_t* codes, int64_t lane, uint8_t* tile) {
    for (int64_t i = 0; i < kTileInputs; i++)
      tile[i * kLanes + lane] = static_cast<uint8_t>(codes[i]);
  }

  // The weights of an input as float32, for a Part of the outputs from `lane` on.
  [[gnu::always_inline]] static Part weights(const uint8_t* tile, int64_t input, int lane) {
    return __builtin_convertvector(part_of_bytes(tile + input * kLanes + lane), Part);
  }

#ifdef __AVX512BW__
  // Unit `number` of a tile.
  [[gnu::always_inline]] static VecBits unit(const uint8_t* tile, int number) {
    return pair_of(tile, number, 0);
  }
#endif

  [[gnu::noinline]] static void unpack(const uint8_t* tile, Unit* units) {
    for (int number = 0; number < kUnitStep; number++)
      for (int lane = 0; lane < kLanes; lane += kPartLanes)
        *reinterpret_cast<PartBits*>(units + number * kLanes + lane) = pair_of(tile, number, lane);
  }

  // Decodes to float32, [inputs][kPairOutputs], without the scales.
  [[gnu::noinline]] static void widen(const uint8_t* tile, float* inputs) {
    for (int64_t i = 0; i < kTileInputs; i++)
      for (int lane = 0; lane < kLanes; lane += kPartLanes)
        save_part(weights(tile, i, lane), inputs + i * kPairOutputs + lane);
  }

 private:
  static PartBits pair_of(const uint8_t* tile, int number, int lane) {
    return high_halves((PartBits)weights(tile, 2 * number, lane),
                       (PartBits)weights(tile, 2 * number + 1, lane));
  }
};

#endif

// int8 weights, [outputs / 32][tiles][2 panels][tile]. Units are codes in bfloat16 without the
// scales, by which the sums of an output are multiplied.
struct Int8Panels {
  static constexpr bool kAreCodes = true;
#ifdef __AVX512BW__
  static constexpr bool kMakesVectors = true;
#else
  static constexpr bool kMakesVectors = false;
#endif
  static constexpr int64_t kStepLines = 0, kGroupUnits = 0;
  static constexpr int64_t kUnitInputs = 2;
  static constexpr int64_t kMaxCodedRows = 0;

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

  // The weight of an expert. The weights of all experts are consecutive pairs.
  Int8Panels expert(int64_t number) const {
    const int64_t pair = number * num_pairs;
    return {codes + tile_at(pair, 0, 0), scales + scales_at(pair, 0, 0), num_units, num_pairs};
  }

  // Packs the codes of one output: a lane of a panel.
  void pack_output(const int8_t* output, int64_t pair, int half, int64_t lane, uint8_t* to) const {
    for (int64_t unit = 0; unit < num_units; unit += kUnitStep)
      Int8Tile::pack_lane(output + 2 * unit, lane, to + tile_at(pair, half, unit));
  }

#ifdef __AVX512BW__
  // Decodes vectors of a step of units, in registers.
  struct Step {
    [[gnu::always_inline]] Step(const Int8Panels& w, int64_t pair, int64_t unit)
        : tiles(w.codes + w.tile_at(pair, 0, unit)) {}

    [[gnu::always_inline]] VecBits vector(int number, int half) const {
      // Prefetches are spread over the step, so that memory is never idle.
      if (half == 0) __builtin_prefetch(tiles + kCodesAhead + number * (2 * Int8Tile::kBytes / kUnitStep));
      return Int8Tile::unit(tiles + half * Int8Tile::kBytes, number);
    }

    const uint8_t* const tiles;  // of the low panel, followed by that of the high panel
  };

  bool has_exceptions(int64_t, int64_t) const { return false; }
#endif

  // Decodes the tile at a unit into `space`.
  const Unit* tile(int64_t pair, int half, int64_t unit, Unit* space) const {
    Int8Tile::unpack(prefetching_tile(pair, half, unit), space);
    return space;
  }

#ifndef __AVX512F__
  // A line of the codes of successive inputs (line_products.h).
  struct Lines {
    static constexpr int kInputs = kLine / kLanes;
    static constexpr int64_t kTileBytes = Int8Tile::kBytes;

    [[gnu::always_inline]] static Part weights(const uint8_t* line, int input, int lane) {
      return Int8Tile::weights(line, input, lane);
    }
  };

  // Decodes to float32, [inputs][kPairOutputs], without the scales.
  void decode_tile(int64_t pair, int half, int64_t unit, Unit* inputs) const {
    Int8Tile::widen(prefetching_tile(pair, half, unit), reinterpret_cast<float*>(inputs));
  }
#endif

 private:
  // The codes of a tile; prefetches those that follow.
  const uint8_t* prefetching_tile(int64_t pair, int half, int64_t unit) const {
    const uint8_t* at = codes + tile_at(pair, half, unit);
    for (int64_t i = 0; i < Int8Tile::kBytes; i += kLine) __builtin_prefetch(at + kCodesAhead + i);
    return at;
  }
};

// int8 weights for rows of codes (coded_rows.h), in the layout of Panels: a unit is four codes with an
// offset of 128.
struct CodedUnits {
  static constexpr int64_t kUnitInputs = 4;

  const uint8_t* codes;
  const float* scales;  // [outputs / 32][2 panels][16]
  int64_t num_units;
  int64_t num_pairs;

  int64_t scales_at(int64_t pair, int half, int64_t) const {
    return pair * kPairOutputs + half * kLanes;
  }

  // Packs the codes of one output: a lane of a panel.
  void pack_output(const int8_t* output, int64_t pair, int half, int64_t lane, uint8_t* to) const {
    constexpr int kZero = 128;
    to += ((pair * 2 + half) * num_units * kLanes + lane) * sizeof(Unit);
    for (int64_t i = 0; i < kUnitInputs * num_units; i++)
      to[i / kUnitInputs * kLine + i % kUnitInputs] = static_cast<uint8_t>(output[i] + kZero);
  }
};

}  // namespace
