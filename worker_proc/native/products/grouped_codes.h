// Weights of quantized checkpoints (GPTQ, AWQ, GGUF, fp8), which keep their 4-bit or 8-bit codes.
//
// Groups of consecutive inputs of an output, whole tiles or 16 inputs, share a scale and a zero point
// or minimum. Scales and minimums of GGUF's K formats are int8 multiples of a unit that a section of
// groups shares. Weights are dequantized to float32 (dequantizers.h). Kernels for bfloat16 pairs round
// them again, to bfloat16 (tile); the others use float32 (widen_tile). Without AVX-512, integer codes
// are multiplied by bfloat16 rows as they are (placed_codes.h).

#pragma once

#include "products/dequantizers.h"
#include "products/placed_codes.h"

namespace {

// The values are those of packed_weights.py.
enum ScaleType : int32_t {
  kFloat32Scales,
  kBf16Scales,
  kFp16Scales,
  kMultiples,  // int8 multiples of fp16 units
};

inline Vec widen_fp16(const uint16_t* p) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
  const __m256 parts[] = {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
                          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
  Vec v;
  std::memcpy(&v, parts, sizeof v);
  return v;
#else
  Vec v;
  for (int lane = 0; lane < kLanes; lane++) {
    // A product converts the bias of the exponent from 15 to 127, for subnormal numbers too. Scales are
    // finite.
    const uint32_t bits = p[lane];
    const float size = float_of((bits & 0x7fff) << 13) * 0x1p112f;
    v[lane] = bits & 0x8000 ? -size : size;
  }
  return v;
#endif
}

// Converts 8-bit integers to float32. GCC would widen them in parts, or one by one.
#if defined(__AVX512F__)
inline Vec as_floats(VecSignedCodes v) {
  return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)v));
}
inline Vec as_floats(VecCodes v) {
  return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32((__m128i)v));
}
#elif defined(__AVX2__)
inline Vec as_floats(__m256i low, __m256i high) {
  const __m256 parts[] = {_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high)};
  Vec v;
  std::memcpy(&v, parts, sizeof v);
  return v;
}
inline Vec as_floats(VecSignedCodes v) {
  const auto bytes = (__m128i)v;
  return as_floats(_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)));
}
inline Vec as_floats(VecCodes v) {
  const auto bytes = (__m128i)v;
  return as_floats(_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)));
}
#else
template <class Codes>
Vec as_floats(Codes v) {
  return __builtin_convertvector(__builtin_convertvector(v, VecInt), Vec);
}
#endif

// A quantized weight, independent of the type of the rows.
struct GroupedCodes {
  const uint8_t* codes;  // 32-bit words, [outputs / 32][tiles][2 panels][words][16 outputs]
  const void* scales;    // [outputs / 32][groups][2 panels][16]
  const uint8_t* zeros;  // zero points in the layout of the scales; null: all are `zero`
  const void* minimums;  // in the layout and type of the scales; null: none
  const uint16_t *scale_units, *minimum_units;  // fp16, [outputs / 32][sections][2 panels][16], or null
  const float* table;    // the lookup table of kGroupedTable, [16]; otherwise null
  int32_t format, scale_type, zero;
  int32_t group_inputs, section_inputs;

  int64_t scale_bytes() const {
    return scale_type == kFloat32Scales ? 4 : scale_type == kMultiples ? 1 : 2;
  }

  bool has_integers() const { return format == kGroupedInt4 || format == kGroupedInt8; }

  // The size of the codes of num_inputs inputs of one output.
  int64_t code_bytes(int64_t num_inputs) const {
    return format == kGroupedInt4 || format == kGroupedTable ? num_inputs / 2 : num_inputs;
  }

  // The lookup table of 4-bit codes, before the scaling.
  Vec entries() const {
    if (table != nullptr) return load(table);
    const Vec whole = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return whole - (zeros == nullptr && minimums == nullptr ? static_cast<float>(zero) : 0.0f);
  }

  // The scales or minimums of a group, given the offsets of the group and of its section.
  Vec factors_at(const void* factors, int64_t group, const uint16_t* units, int64_t section) const {
    if (scale_type == kMultiples) {
      const auto* whole = static_cast<const int8_t*>(factors) + group;
      return as_floats(*reinterpret_cast<const VecSignedCodes*>(whole)) * widen_fp16(units + section);
    }
    const auto* bits = static_cast<const uint16_t*>(factors) + group;
    if (scale_type == kFp16Scales) return widen_fp16(bits);
    if (scale_type == kBf16Scales) return load(reinterpret_cast<const Bf16*>(bits));
    return load(static_cast<const float*>(factors) + group);
  }

  Vec zeros_at(int64_t group) const {
    if (zeros == nullptr) return splat(static_cast<float>(zero));
    return as_floats(*reinterpret_cast<const VecCodes*>(zeros + group));
  }
};

// The division of the inputs of a weight into runs of equal length, a multiple of 16.
class Runs {
 public:
  Runs(int64_t num_inputs, int64_t length)
      : count((num_inputs - 1) / std::max(length, kUnit) + 1),
        inverse_((int64_t{1} << 32) / std::max(length / kUnit, int64_t{1}) + 1) {}

  // The index of an input's run, without a division.
  int64_t index_of(int64_t input) const { return input / kUnit * inverse_ >> 32; }

  int64_t count;

 private:
  static constexpr int64_t kUnit = 16;
  int64_t inverse_;
};

// A quantized weight for rows of type T: float, with units of one input, or Bf16, with units of two.
template <typename T>
struct GroupedPanels {
  static constexpr bool kAreCodes = true, kMakesVectors = false;
  static constexpr int64_t kStepLines = 0, kGroupUnits = 0;
  static constexpr int64_t kMaxCodedRows = 0;
  static constexpr int64_t kUnitInputs = sizeof(Unit) / sizeof(T);
  static constexpr int64_t kStepInputs = kUnitInputs * kUnitStep;  // inputs of a tile of units

  GroupedPanels(const GroupedCodes& weight, int64_t num_units, int64_t num_pairs)
      : weight(weight),
        num_units(num_units),
        num_pairs(num_pairs),
        groups(num_units * kUnitInputs, weight.group_inputs),
        sections(num_units * kUnitInputs, weight.section_inputs),
        table(weight.entries()) {}

  GroupedCodes weight;
  int64_t num_units;
  int64_t num_pairs;
  Runs groups, sections;
  Vec table;

  // The weight of an expert. The weights of all experts are consecutive pairs.
  GroupedPanels expert(int64_t number) const {
    const int64_t pair = number * num_pairs, group = offset_of(groups, pair, 0, 0);
    const int64_t bytes = group * weight.scale_bytes(), section = offset_of(sections, pair, 0, 0);
    GroupedPanels own = *this;
    own.weight.codes += codes_at(pair, 0, 0);
    own.weight.scales = static_cast<const char*>(weight.scales) + bytes;
    if (weight.zeros) own.weight.zeros += group;
    if (weight.minimums) own.weight.minimums = static_cast<const char*>(weight.minimums) + bytes;
    if (weight.scale_units) own.weight.scale_units += section;
    if (weight.minimum_units) own.weight.minimum_units += section;
    return own;
  }

  // Dequantizes the tile at a unit into `space`.
  const Unit* tile(int64_t pair, int half, int64_t unit, Unit* space) const {
    for_pairs(pair, half, unit, [=](int64_t input, int64_t lane, Part weights, Part next) {
      Unit* const to = space + input / kUnitInputs * kLanes + lane;
      if (kUnitInputs == 2) return put((Part)rounded_halves(weights, next), to);
      put(weights, to);
      put(next, to + kLanes);
    });
    return space;
  }

#ifndef __AVX512F__
  // Integer codes that are multiplied by bfloat16 rows are not dequantized.
  InputFactors input_factors() const {
    static constexpr auto k4Bits = factors_of_places<4>([](int i) { return i; });
    static constexpr auto k8Bits = factors_of_places<8>([](int i) { return i; });
    constexpr int64_t kMost = 128;
    const int64_t group = weight.group_inputs, power_of_two = group & -group;
    if (kUnitInputs == 1 || !weight.has_integers()) return {};
    return {weight.format == kGroupedInt4 ? k4Bits.data() : k8Bits.data(),
            std::min(power_of_two, kMost), static_cast<float>(weight.zero),
            weight.zeros != nullptr || weight.minimums != nullptr};
  }

  GroupFactors group_factors(int64_t pair, int half, int64_t input) const {
    const auto [scales, offsets] = factors(pair, half, input);
    return {scales, adds_offsets() ? offsets : offsets * -scales};
  }

  // Decodes a tile to float32, [inputs][kPairOutputs], for inputs with these factors.
  void decode_tile(int64_t pair, int half, int64_t unit, Unit* inputs) const {
    if (kUnitInputs == 2 && weight.format == kGroupedInt4)
      return place_tile<4>(pair, half, unit, inputs);
    if (kUnitInputs == 2 && weight.format == kGroupedInt8)
      return place_tile<8>(pair, half, unit, inputs);
    widen_tile(pair, half, unit, inputs);
  }
#endif

  // Dequantizes a tile to float32, [inputs][kPairOutputs], without rounding to bfloat16.
  void widen_tile(int64_t pair, int half, int64_t unit, Unit* inputs) const {
    for_pairs(pair, half, unit, [=](int64_t input, int64_t lane, Part weights, Part next) {
      Unit* const to = inputs + input * kPairOutputs + lane;
      put(weights, to);
      put(next, to + kPairOutputs);
    });
  }

  // Calls f(ClassOf<Codes>) with the class that dequantizes the codes.
  template <class F>
  void with_codes(const F& f) const {
    if (weight.format == kGroupedTable) return f(ClassOf<TableCodes<Offset::kNone>>{});
    if (weight.format == kGroupedE4m3) return f(ClassOf<E4m3Codes>{});
    if (weight.format == kGroupedInt8 && weight.minimums) return f(ClassOf<IntegerCodes<8, true>>{});
    if (weight.format == kGroupedInt8) return f(ClassOf<IntegerCodes<8, false>>{});
    if (weight.minimums) return f(ClassOf<Int4Codes<Offset::kAfterScale>>{});
    if (weight.zeros && !scales_zeros()) return f(ClassOf<Int4Codes<Offset::kBeforeScale>>{});
    if (weight.zeros) return f(ClassOf<Int4Codes<Offset::kAfterScale>>{});
    f(ClassOf<Int4Codes<Offset::kNone>>{});
  }

  // The codes of a tile, for units of two inputs.
  const uint8_t* tile_codes(int64_t pair, int half, int64_t unit) const {
    static_assert(kStepInputs == kTileInputs);
    return codes(pair, half, unit / kUnitStep);
  }

  // The dequantizer of the tile at a unit.
  template <class Codes>
  Codes codes_of(int64_t pair, int half, int64_t unit) const {
    const Factors own = factors(pair, half, kUnitInputs * unit);
    return {(Part)own.scales, (Part)own.offsets, table};
  }

  // The factors of the group of an input.
  Factors factors(int64_t pair, int half, int64_t input) const {
    const int64_t group = offset_of(groups, pair, half, input);
    const int64_t section = weight.scale_units ? offset_of(sections, pair, half, input) : 0;
    const Vec scales = weight.factors_at(weight.scales, group, weight.scale_units, section);
    if (weight.minimums)
      return {scales,
              weight.factors_at(weight.minimums, group, weight.minimum_units, section)};
    const Vec zeros = weight.zeros_at(group);
    return {scales, scales_zeros() ? zeros * -scales : zeros};
  }

  // Whether zero point * scale is exact. It is then subtracted after the scaling.
  bool scales_zeros() const {
    return weight.zeros && weight.format == kGroupedInt4 && weight.scale_type != kFloat32Scales;
  }

  // Whether offsets are added after the scaling.
  bool adds_offsets() const { return weight.minimums || scales_zeros(); }

  // Whether groups are shorter than a tile.
  bool has_short_groups() const { return weight.group_inputs < kStepInputs; }

 private:
  static void put(Part v, Unit* to) { *reinterpret_cast<PartBits*>(to) = (PartBits)v; }

  // The codes of a tile of 32 inputs.
  const uint8_t* codes(int64_t pair, int half, int64_t tile) const {
    return weight.codes + codes_at(pair, half, tile);
  }

#ifndef __AVX512F__
  // decode_tile for integers of `Bits` bits, at their places in words.
  template <int Bits>
  void place_tile(int64_t pair, int half, int64_t unit, Unit* inputs) const {
    using Placed = PlacedCodes<Bits>;
    const uint8_t* from = prefetching_codes(pair, half, unit);
    for (int i = 0; i < kTileInputs; i += Placed::kPerWord, from += kLine)
      for (int p = 0; p < kLanes; p += kPartLanes) {
        const PartBits words = *reinterpret_cast<const PartBits*>(from + p * sizeof(Unit));
        Unit* to = inputs + i * kPairOutputs + p;
#pragma GCC unroll 8
        for (int k = 0; k < Placed::kPerWord; k++, to += kPairOutputs)
          put(Placed::value(words, k), to);
      }
  }
#endif

  // The codes of the tile at a unit; prefetches those that follow.
  const uint8_t* prefetching_codes(int64_t pair, int half, int64_t unit) const {
    const int64_t first = unit * kUnitInputs, tile = first / kTileInputs;
    const uint8_t* const at =
        codes(pair, half, tile) + kLanes * weight.code_bytes(first % kTileInputs);
    for (int64_t i = 0; i < kLanes * weight.code_bytes(kStepInputs); i += kLine)
      __builtin_prefetch(at + kCodesAhead + i);
    return at;
  }

  int64_t codes_at(int64_t pair, int half, int64_t tile) const {
    const int64_t num_tiles = num_units * kUnitInputs / kTileInputs;
    return ((pair * num_tiles + tile) * 2 + half) * kLanes * weight.code_bytes(kTileInputs);
  }

  // The offset of a run's scales.
  static int64_t offset_of(const Runs& runs, int64_t pair, int half, int64_t input) {
    return ((pair * runs.count + runs.index_of(input)) * 2 + half) * kLanes;
  }

  // Calls store as for_pairs_of does for the tile at a unit. For float32 it is half a tile of codes.
  template <class Store>
  void for_pairs(int64_t pair, int half, int64_t unit, const Store& store) const {
    const int64_t first = unit * kUnitInputs;
    const uint8_t* const at = prefetching_codes(pair, half, unit);
    const int64_t span = std::min<int64_t>(weight.group_inputs, kStepInputs);
    const auto words = static_cast<int>(weight.code_bytes(span) / sizeof(Unit));
    with_codes([&](auto type) {
      using Codes = typename decltype(type)::Type;
      for (int64_t input = 0; input < kStepInputs; input += span)
        for_pairs_of<Codes>(at + kLanes * weight.code_bytes(input), input, words,
                            factors(pair, half, first + input), table, store);
    });
  }
};

#ifdef __AVX512BF16__

// A quantized weight whose vectors are dequantized in registers, one by one: the fastest form for one
// row.
template <class Codes>
struct VectorsInRegisters {
  static constexpr bool kAreCodes = true, kMakesVectors = true;
  static constexpr int64_t kStepLines = 0, kGroupUnits = 0;

  const GroupedPanels<Bf16>& panels;
  const int64_t num_units = panels.num_units;

  bool has_exceptions(int64_t, int64_t) const { return panels.has_short_groups(); }

  class Step {
   public:
    [[gnu::always_inline]] Step(const VectorsInRegisters& w, int64_t pair, int64_t unit)
        : tiles_(w.panels.tile_codes(pair, 0, unit)),
          codes_{w.panels.template codes_of<Codes>(pair, 0, unit),
                 w.panels.template codes_of<Codes>(pair, 1, unit)} {}

    [[gnu::always_inline]] VecBits vector(int number, int half) const {
      // Prefetches are spread over the step, so that memory is never idle.
      if (half == 0) __builtin_prefetch(tiles_ + kCodesAhead + number * (2 * kBytes / kUnitStep));
      const auto* words = reinterpret_cast<const PartBits*>(tiles_ + half * kBytes);
      return (VecBits)codes_[half].unit_of(words, number);
    }

   private:
    static constexpr int64_t kBytes = kLanes * kTileInputs * sizeof(Unit) / Codes::kPerWord;

    const uint8_t* const tiles_;  // of the low panel, followed by that of the high panel
    const Codes codes_[2];
  };

  const Unit* tile(int64_t pair, int half, int64_t unit, Unit* space) const {
    return panels.tile(pair, half, unit, space);
  }
};

template <class F>
void with_vectors(const GroupedPanels<Bf16>& w, const F& f) {
  w.with_codes([&](auto type) {
    f(VectorsInRegisters<RoundedUnits<typename decltype(type)::Type>>{w});
  });
}

#endif

}  // namespace
