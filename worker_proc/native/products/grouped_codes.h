// Weights of quantized checkpoints: codes of 4 or 8 bits as their files store them.
//
// Consecutive inputs of an output share a scale and a zero point, in groups of whole tiles or of 16
// inputs. A code represents a weight in one of these ways:
//   an integer:             (code - zero point) * scale, or code * scale + minimum;
//   a number in e4m3:       number * scale;
//   an index into a table:  entry * scale, of 16 entries.
// The weight is computed in float32 and rounded once: the product code * scale of a scale with a minimum
// is exact. Kernels that multiply pairs of bfloat16 round the weight to bfloat16, too (tile); the others
// use it in float32 (widen_tile).
//
// Scales and minimums of GGUF's K formats are 8-bit integers, in multiples of a unit that the groups of a
// section share.

#pragma once

#include "products/weights.h"

namespace {

// The values are those of packed_weights.py.
enum ScaleType : int32_t {
  kFloat32Scales,
  kBf16Scales,
  kFp16Scales,
  kMultiples,  // int8, of units in fp16
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
    // The exponent has 15 added, and that of a float has 127: a product moves it, also of the
    // numbers below the normal ones. Scales are finite.
    const uint32_t bits = p[lane];
    const float size = float_of((bits & 0x7fff) << 13) * 0x1p112f;
    v[lane] = bits & 0x8000 ? -size : size;
  }
  return v;
#endif
}

// Whole numbers of 8 bits as floats. GCC would widen them in parts.
#ifdef __AVX512F__
inline Vec as_floats(VecSignedCodes v) {
  return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)v));
}
inline Vec as_floats(VecCodes v) {
  return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32((__m128i)v));
}
#else
template <class Codes>
Vec as_floats(Codes v) {
  return __builtin_convertvector(__builtin_convertvector(v, VecInt), Vec);
}
#endif

// sum + x · y, where the product is exact.
inline Part sum_with_product(Part sum, Part x, Part y) {
#ifdef __AVX512F__
  return multiply_add(x, y, sum);
#else
  return x * y + sum;
#endif
}

// Whole numbers of some bits, from 0 on. A word has the first one in its lowest bits. They are moved by
// a zero point before they are multiplied, or by a minimum afterwards.
template <int Bits, bool kHasMinimums>
class WholeCodes {
 public:
  static constexpr int kPerWord = 32 / Bits;

  WholeCodes(Part scales, Part moved, const Vec&) : scales_(scales), minimums_(moved) {
    const Part zeros = kHasMinimums ? Part{} : moved;
    for (int k = 0; k < kPerWord; k++) offsets_[k] = zeros + float_of(size_of(k));
  }

  // The weights of code k of some words. The difference is exact.
  Part operator()(PartBits words, int k) const {
    const PartBits mask = PartBits{} + (((1u << Bits) - 1) << place_of(k));
    const Part sum = (Part)((words >> shift_of(k) & mask) | size_of(k));
    const Part whole = sum - offsets_[k];
    return kHasMinimums ? sum_with_product(minimums_, whole, scales_) : whole * scales_;
  }

 private:
  // Code k lies in the mantissa of a float, at `place_of`, when its word has been shifted.
  static constexpr int shift_of(int k) { return (k + 1) * Bits <= 23 ? 0 : Bits == 4 ? 12 : 16; }
  static constexpr int place_of(int k) { return k * Bits - shift_of(k); }

  // The bits of a float that changes by 1 there.
  static constexpr uint32_t size_of(int k) { return (127u + 23 - place_of(k)) << 23; }

  Part scales_, minimums_, offsets_[kPerWord];
};

// Numbers in e4m3, four in a word. Their scales have been multiplied by 2^120: so much less is a
// float with the same bits of exponent and mantissa.
class E4m3Codes {
 public:
  static constexpr int kPerWord = 4;

  E4m3Codes(Part scales, Part, const Vec&) : scales_(scales) {}

  Part operator()(PartBits words, int k) const {
    constexpr uint32_t kSignAndNumber = 0x87f00000;
    const PartBits moved = (PartBits)((PartInt)(words << (24 - 8 * k)) >> 4);
    return (Part)(moved & kSignAndNumber) * scales_;
  }

 private:
  Part scales_;
};

// Entries of a table of 16 numbers, at the lowest four bits of places.
inline Part entries(const Vec& table, PartBits places) {
#if defined(__AVX512F__)
  return (Part)_mm512_permutexvar_ps((__m512i)places, (__m512)table);
#elif defined(__AVX2__)
  __m256 halves[2];
  std::memcpy(halves, &table, sizeof halves);
  const __m256i at = (__m256i)places;  // whose three lowest bits count
  return (Part)_mm256_blendv_ps(_mm256_permutevar8x32_ps(halves[0], at),
                                _mm256_permutevar8x32_ps(halves[1], at),
                                _mm256_castsi256_ps(_mm256_slli_epi32(at, 28)));
#else
  Part found;
  for (int lane = 0; lane < kPartLanes; lane++) found[lane] = table[places[lane] & 15];
  return found;
#endif
}

enum class Moved { kNot, kBefore, kAfter };  // by zero points, by minimums

// Places in a table, eight in a word: numbers that are multiplied by the scale.
template <Moved kMoved>
class TableCodes {
 public:
  static constexpr int kPerWord = 8;

  TableCodes(Part scales, Part moved, const Vec& table)
      : scales_(scales), moved_(moved), table_(table) {}

  Part operator()(PartBits words, int k) const {
    const Part entry = entries(table_, words >> 4 * k);
    if (kMoved == Moved::kBefore) return (entry - moved_) * scales_;
    if (kMoved == Moved::kAfter) return sum_with_product(moved_, entry, scales_);
    return entry * scales_;
  }

 private:
  Part scales_, moved_;
  Vec table_;
};

// Whole numbers of 4 bits: a table of them takes an instruction less, where a register holds it.
#ifdef __AVX512F__
template <Moved kMoved>
using Int4Codes = TableCodes<kMoved>;
#else
template <Moved kMoved>
using Int4Codes = WholeCodes<4, kMoved == Moved::kAfter>;
#endif

// The scales of some outputs, and the minimums or zero points.
struct Factors {
  Vec scales, moved;
};

template <class Codes>
struct ClassOf {
  using Type = Codes;
};

// Two vectors of floats as bfloat16, side by side, each rounded to the nearest, of two equally near
// ones to the even one.
inline PartBits rounded_halves(Part first, Part second) {
#ifdef __AVX512BF16__
  const VecBits pairs = VecBits{0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005,
                                0x160006, 0x170007, 0x180008, 0x190009, 0x1a000a, 0x1b000b,
                                0x1c000c, 0x1d000d, 0x1e000e, 0x1f000f};
  const auto halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
  return (PartBits)_mm512_permutexvar_epi16((__m512i)pairs, halves);
#endif
  const auto rounded = [](Part v) {
    const PartBits bits = (PartBits)v;
    return bits + 0x7fff + (bits >> 16 & 1);
  };
  return high_halves(rounded(first), rounded(second));
}

// The units of two neighbouring codes, of which words have several.
template <class Codes>
struct RoundedUnits : Codes {
  using Codes::Codes;

  PartBits units(PartBits words, int number) const {
    return rounded_halves((*this)(words, 2 * number), (*this)(words, 2 * number + 1));
  }

  // Unit `number` of a tile.
  PartBits unit_of(const PartBits* words, int number) const {
    return units(words[number / (Codes::kPerWord / 2)], number % (Codes::kPerWord / 2));
  }
};

// What a weight in codes is, whatever the rows are.
struct GroupedCodes {
  const uint8_t* codes;  // words of 32 bits, [outputs / 32][tiles][2 panels][words][16 outputs]
  const void* scales;    // [outputs / 32][groups][2 panels][16]
  const uint8_t* zeros;  // likewise; null: all are `zero`
  const void* minimums;  // likewise, of the type of the scales; null: there are zero points
  const uint16_t *scale_units, *minimum_units;  // fp16, of multiples, [outputs / 32][sections][2][16]
  const float* table;  // of codes that are places in one, [16]; else null
  int32_t format, scale_type, zero;
  int32_t group_inputs, section_inputs;

  int64_t scale_bytes() const {
    return scale_type == kFloat32Scales ? 4 : scale_type == kMultiples ? 1 : 2;
  }

  // Of some inputs of one output.
  int64_t code_bytes(int64_t num_inputs) const {
    return format == kGroupedInt4 || format == kGroupedTable ? num_inputs / 2 : num_inputs;
  }

  // What codes of 4 bits stand for, before they are multiplied.
  Vec entries() const {
    if (table != nullptr) return load(table);
    const Vec whole = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return whole - (zeros == nullptr && minimums == nullptr ? static_cast<float>(zero) : 0.0f);
  }

  // Scales or minimums of a group.
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

// Calls place(input, lane, weights of the input, weights of the next one) for the codes of some words,
// from an input on, and each part of their outputs.
template <class Codes, class Place>
[[gnu::noinline]] void for_pairs_of(const uint8_t* codes, int64_t input, int num_words,
                                    const Factors& factors, const Vec& table, Place place) {
  Part scale_parts[kParts], moved_parts[kParts];
  std::memcpy(scale_parts, &factors.scales, sizeof scale_parts);
  std::memcpy(moved_parts, &factors.moved, sizeof moved_parts);
  for (int p = 0; p < kParts; p++) {
    const Codes weights(scale_parts[p], moved_parts[p], table);
    const Unit* from = reinterpret_cast<const Unit*>(codes) + p * kPartLanes;
    for (int word = 0; word < num_words; word++, from += kLanes) {
      const PartBits words = *reinterpret_cast<const PartBits*>(from);
      const int64_t first = input + word * Codes::kPerWord;
#pragma GCC unroll 8
      for (int k = 0; k < Codes::kPerWord; k += 2)
        place(first + k, p * kPartLanes, weights(words, k), weights(words, k + 1));
    }
  }
}

// Runs of consecutive inputs of a weight, of equal lengths: multiples of 16.
class Runs {
 public:
  Runs(int64_t num_inputs, int64_t length)
      : count((num_inputs - 1) / std::max(length, kUnit) + 1),
        inverse_((int64_t{1} << 32) / std::max(length / kUnit, int64_t{1}) + 1) {}

  int64_t of(int64_t input) const { return input / kUnit * inverse_ >> 32; }  // without a division

  int64_t count;

 private:
  static constexpr int64_t kUnit = 16;
  int64_t inverse_;
};

// Weights in codes for rows of type T: float, with units of one input, or Bf16, with units of two.
template <typename T>
struct GroupedPanels {
  static constexpr bool kAreCodes = true, kMakesVectors = false;
  static constexpr int64_t kStepLines = 0, kGroupUnits = 0;
  static constexpr int64_t kMostCodedRows = 0;
  static constexpr int64_t kUnitInputs = sizeof(Unit) / sizeof(T);
  static constexpr int64_t kStepInputs = kUnitInputs * kUnitStep;  // of a tile of units

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

  // The weight of one expert, of several that lie one after another.
  GroupedPanels expert(int64_t number) const {
    const int64_t pair = number * num_pairs, group = place(groups, pair, 0, 0);
    const int64_t bytes = group * weight.scale_bytes(), section = place(sections, pair, 0, 0);
    GroupedPanels own = *this;
    own.weight.codes += codes_at(pair, 0, 0);
    own.weight.scales = static_cast<const char*>(weight.scales) + bytes;
    if (weight.zeros) own.weight.zeros += group;
    if (weight.minimums) own.weight.minimums = static_cast<const char*>(weight.minimums) + bytes;
    if (weight.scale_units) own.weight.scale_units += section;
    if (weight.minimum_units) own.weight.minimum_units += section;
    return own;
  }

  // The tile from a unit on, made in `space`.
  const Unit* tile(int64_t pair, int half, int64_t unit, Unit* space) const {
    for_pairs(pair, half, unit, [=](int64_t input, int64_t lane, Part weights, Part next) {
      Unit* const to = space + input / kUnitInputs * kLanes + lane;
      if (kUnitInputs == 2) return put((Part)rounded_halves(weights, next), to);
      put(weights, to);
      put(next, to + kLanes);
    });
    return space;
  }

  // The same as float32, not rounded to bfloat16, [inputs][kPairOutputs].
  void widen_tile(int64_t pair, int half, int64_t unit, Unit* inputs) const {
    for_pairs(pair, half, unit, [=](int64_t input, int64_t lane, Part weights, Part next) {
      Unit* const to = inputs + input * kPairOutputs + lane;
      put(weights, to);
      put(next, to + kPairOutputs);
    });
  }

  // Calls f with a value whose Type is the class of the codes.
  template <class F>
  void with_codes(const F& f) const {
    if (weight.format == kGroupedTable) return f(ClassOf<TableCodes<Moved::kNot>>{});
    if (weight.format == kGroupedE4m3) return f(ClassOf<E4m3Codes>{});
    if (weight.format == kGroupedInt8 && weight.minimums) return f(ClassOf<WholeCodes<8, true>>{});
    if (weight.format == kGroupedInt8) return f(ClassOf<WholeCodes<8, false>>{});
    if (weight.minimums) return f(ClassOf<Int4Codes<Moved::kAfter>>{});
    if (weight.zeros && !moves_after()) return f(ClassOf<Int4Codes<Moved::kBefore>>{});
    if (weight.zeros) return f(ClassOf<Int4Codes<Moved::kAfter>>{});
    f(ClassOf<Int4Codes<Moved::kNot>>{});
  }

  // The codes of a tile of units of two inputs.
  const uint8_t* tile_codes(int64_t pair, int half, int64_t unit) const {
    static_assert(kStepInputs == kTileInputs);
    return codes(pair, half, unit / kUnitStep);
  }

  // What makes floats or units of a tile's codes.
  template <class Codes>
  Codes codes_of(int64_t pair, int half, int64_t unit) const {
    const Factors own = factors(pair, half, kUnitInputs * unit);
    return {(Part)own.scales, (Part)own.moved, table};
  }

  // Whether groups are shorter than a step.
  bool has_short_groups() const { return weight.group_inputs < kStepInputs; }

 private:
  static void put(Part v, Unit* to) { *reinterpret_cast<PartBits*>(to) = (PartBits)v; }

  // What the group of an input has.
  Factors factors(int64_t pair, int half, int64_t input) const {
    const int64_t group = place(groups, pair, half, input);
    const int64_t section = weight.scale_units ? place(sections, pair, half, input) : 0;
    const Vec scales = weight.factors_at(weight.scales, group, weight.scale_units, section);
    if (weight.minimums)
      return {scales,
              weight.factors_at(weight.minimums, group, weight.minimum_units, section)};
    const Vec zeros = weight.zeros_at(group);
    return {scales, moves_after() ? zeros * -scales : zeros};
  }

  // The codes of a tile of 32 inputs.
  const uint8_t* codes(int64_t pair, int half, int64_t tile) const {
    return weight.codes + codes_at(pair, half, tile);
  }

  int64_t codes_at(int64_t pair, int half, int64_t tile) const {
    const int64_t num_tiles = num_units * kUnitInputs / kTileInputs;
    return ((pair * num_tiles + tile) * 2 + half) * kLanes * weight.code_bytes(kTileInputs);
  }

  // Whether products with zero points are exact, so that they can be subtracted from products.
  bool moves_after() const {
    return weight.zeros && weight.format == kGroupedInt4 && weight.scale_type != kFloat32Scales;
  }

  // The place of what the run of an input has.
  static int64_t place(const Runs& runs, int64_t pair, int half, int64_t input) {
    return ((pair * runs.count + runs.of(input)) * 2 + half) * kLanes;
  }

  // A tile of units is one of codes, or half of one, where units are float32.
  template <class Place>
  void for_pairs(int64_t pair, int half, int64_t unit, const Place& place) const {
    const int64_t first = unit * kUnitInputs, tile = first / kTileInputs;
    const uint8_t* const at =
        codes(pair, half, tile) + kLanes * weight.code_bytes(first % kTileInputs);
    for (int64_t i = 0; i < kLanes * weight.code_bytes(kStepInputs); i += kLine)
      __builtin_prefetch(at + kCodesAhead + i);
    const int64_t span = std::min<int64_t>(weight.group_inputs, kStepInputs);
    const auto words = static_cast<int>(weight.code_bytes(span) / sizeof(Unit));
    with_codes([&](auto type) {
      using Codes = typename decltype(type)::Type;
      for (int64_t input = 0; input < kStepInputs; input += span)
        for_pairs_of<Codes>(at + kLanes * weight.code_bytes(input), input, words,
                            factors(pair, half, first + input), table, place);
    });
  }
};

#ifdef __AVX512BF16__

// Weights whose vectors are made one by one, in registers: for one row. `Codes` makes units of the words
// of a tile.
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
      // The codes that come next are fetched bit by bit, so that memory is never idle.
      if (half == 0) __builtin_prefetch(tiles_ + kCodesAhead + number * (2 * kBytes / kUnitStep));
      const auto* words = reinterpret_cast<const PartBits*>(tiles_ + half * kBytes);
      return (VecBits)codes_[half].unit_of(words, number);
    }

   private:
    static constexpr int64_t kBytes = kLanes * kTileInputs * sizeof(Unit) / Codes::kPerWord;

    const uint8_t* const tiles_;  // that of the low panel, and that of the high one behind it
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
