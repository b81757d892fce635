// Weights of quantized checkpoints: codes of 4 or 8 bits as their files store them.
//
// Consecutive inputs of an output share a scale and a zero point, in groups of whole tiles, or of 16
// inputs. A whole number stands for (code - zero point) · scale or for code · scale + minimum, and a
// number in e4m3 for number · scale, in float32, rounded once: products with scales that have a minimum
// are exact. Kernels that multiply pairs of bfloat16 round it to bfloat16, too (tile); others take it in
// float32 (widen_tile).
//
// Scales and minimums of GGUF's K formats are whole numbers of 8 bits, in multiples of a unit that the
// groups of a section share.

#pragma once

#include "weights.h"

namespace {

// Numbers that kernels.py knows.
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

// Whole numbers of some bits, from 0 on. A word has the first one in its lowest bits. They are moved by
// a zero point before they are multiplied, or by a minimum afterwards.
template <int Bits, bool kHasMinimums>
class WholeCodes {
 public:
  static constexpr int kPerWord = 32 / Bits;

  WholeCodes(Part scales, Part moved) : scales_(scales), minimums_(moved) {
    const Part zeros = kHasMinimums ? Part{} : moved;
    for (int k = 0; k < kPerWord; k++) offsets_[k] = zeros + float_of(size_of(k));
  }

  // The weights of code k of some words. The difference is exact.
  Part operator()(PartBits words, int k) const {
    const PartBits mask = PartBits{} + (((1u << Bits) - 1) << place_of(k));
    const Part sum = (Part)((words >> shift_of(k) & mask) | size_of(k));
    const Part product = (sum - offsets_[k]) * scales_;
    return kHasMinimums ? product + minimums_ : product;
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

  E4m3Codes(Part scales, Part) : scales_(scales) {}

  Part operator()(PartBits words, int k) const {
    constexpr uint32_t kSignAndNumber = 0x87f00000;
    const PartBits moved = (PartBits)((PartInt)(words << (24 - 8 * k)) >> 4);
    return (Part)(moved & kSignAndNumber) * scales_;
  }

 private:
  Part scales_;
};

// Two vectors of floats as bfloat16, side by side, each rounded to the nearest, of two equally near
// ones to the even one.
inline PartBits rounded_halves(Part first, Part second) {
  const auto rounded = [](Part v) {
    const PartBits bits = (PartBits)v;
    return bits + 0x7fff + (bits >> 16 & 1);
  };
  return high_halves(rounded(first), rounded(second));
}

// What a weight in codes is, whatever the rows are.
struct GroupedCodes {
  const uint8_t* codes;  // words of 32 bits, [outputs / 32][tiles][2 panels][words][16 outputs]
  const void* scales;    // [outputs / 32][groups][2 panels][16]
  const uint8_t* zeros;  // likewise; null: all are `zero`
  const void* minimums;  // likewise, of the type of the scales; null: there are zero points
  const uint16_t *scale_units, *minimum_units;  // fp16, of multiples, [outputs / 32][sections][2][16]
  int32_t format, scale_type, zero;
  int32_t group_inputs, section_inputs;

  int64_t scale_bytes() const {
    return scale_type == kFloat32Scales ? 4 : scale_type == kMultiples ? 1 : 2;
  }

  // Of some inputs of one output.
  int64_t code_bytes(int64_t num_inputs) const {
    return format == kGroupedInt4 ? num_inputs / 2 : num_inputs;
  }

  // Scales or minimums of a group.
  Vec factors_at(const void* factors, int64_t group, const uint16_t* units, int64_t section) const {
    if (scale_type == kMultiples) {
      const auto whole = *reinterpret_cast<const VecSignedCodes*>(
          static_cast<const int8_t*>(factors) + group);
      return __builtin_convertvector(__builtin_convertvector(whole, VecInt), Vec) *
             widen_fp16(units + section);
    }
    const auto* bits = static_cast<const uint16_t*>(factors) + group;
    if (scale_type == kFp16Scales) return widen_fp16(bits);
    if (scale_type == kBf16Scales) return load(reinterpret_cast<const Bf16*>(bits));
    return load(static_cast<const float*>(factors) + group);
  }

  Vec zeros_at(int64_t group) const {
    if (zeros == nullptr) return splat(static_cast<float>(zero));
    const auto codes = *reinterpret_cast<const VecCodes*>(zeros + group);
    return __builtin_convertvector(__builtin_convertvector(codes, VecInt), Vec);
  }
};

// Calls place(input, lane, weights of the input, weights of the next one) for the codes of some words,
// from an input on, and each part of their outputs.
template <class Codes, class Place>
[[gnu::noinline]] void for_pairs_of(const uint8_t* codes, int64_t input, int num_words, Vec scales,
                                    Vec moved, Place place) {
  Part scale_parts[kParts], moved_parts[kParts];
  std::memcpy(scale_parts, &scales, sizeof scales);
  std::memcpy(moved_parts, &moved, sizeof moved);
  for (int p = 0; p < kParts; p++) {
    const Codes weights(scale_parts[p], moved_parts[p]);
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

// Weights in codes for rows of type T: float, with units of one input, or Bf16, with units of two.
template <typename T>
struct GroupedPanels {
  static constexpr bool kAreCodes = true, kMakesVectors = false;
  static constexpr int64_t kStepLines = 0;
  static constexpr int64_t kMostCodedRows = 0;
  static constexpr int64_t kUnitInputs = sizeof(Unit) / sizeof(T);
  static constexpr int64_t kStepInputs = kUnitInputs * kUnitStep;  // of a tile of units

  GroupedCodes weight;
  int64_t num_units;
  int64_t num_pairs;

  // The weight of one expert, of several that lie one after another.
  GroupedPanels expert(int64_t number) const {
    const int64_t pair = number * num_pairs, group = group_at(pair, 0, 0);
    const int64_t bytes = group * weight.scale_bytes();
    GroupedPanels own = *this;
    own.weight.codes += codes_at(pair, 0, 0);
    own.weight.scales = static_cast<const char*>(weight.scales) + bytes;
    if (weight.zeros) own.weight.zeros += group;
    if (weight.minimums) own.weight.minimums = static_cast<const char*>(weight.minimums) + bytes;
    if (weight.scale_units) own.weight.scale_units += section_at(pair, 0, 0);
    if (weight.minimum_units) own.weight.minimum_units += section_at(pair, 0, 0);
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

 private:
  static void put(Part v, Unit* to) { *reinterpret_cast<PartBits*>(to) = (PartBits)v; }

  int64_t codes_at(int64_t pair, int half, int64_t tile) const {
    const int64_t num_tiles = num_units * kUnitInputs / kTileInputs;
    return ((pair * num_tiles + tile) * 2 + half) * kLanes * weight.code_bytes(kTileInputs);
  }

  // The place of what the group of an input has.
  int64_t group_at(int64_t pair, int half, int64_t input) const {
    return part_at(pair, half, input, weight.group_inputs);
  }

  int64_t section_at(int64_t pair, int half, int64_t input) const {
    return part_at(pair, half, input, weight.section_inputs);
  }

  int64_t part_at(int64_t pair, int half, int64_t input, int64_t part_inputs) const {
    const int64_t num_parts = (num_units * kUnitInputs - 1) / part_inputs + 1;
    return ((pair * num_parts + input / part_inputs) * 2 + half) * kLanes;
  }

  // A tile of units is one of codes, or half of one, where units are float32.
  template <class Place>
  void for_pairs(int64_t pair, int half, int64_t unit, const Place& place) const {
    const int64_t first = unit * kUnitInputs, tile = first / kTileInputs;
    const int64_t within = kLanes * weight.code_bytes(first % kTileInputs);
    const uint8_t* const at = weight.codes + codes_at(pair, half, tile) + within;
    for (int64_t i = 0; i < kLanes * weight.code_bytes(kStepInputs); i += kLine)
      __builtin_prefetch(at + kCodesAhead + i);
    const int64_t span = std::min<int64_t>(weight.group_inputs, kStepInputs);
    for (int64_t input = 0; input < kStepInputs; input += span)
      for_group(at + kLanes * weight.code_bytes(input), pair, half, first + input, input, span, place);
  }

  // Some inputs of one group, from `input` of the weight and from `within` of the tile on.
  template <class Place>
  void for_group(const uint8_t* codes, int64_t pair, int half, int64_t input, int64_t within,
                 int64_t span, const Place& place) const {
    const auto words = static_cast<int>(weight.code_bytes(span) / sizeof(Unit));
    const int64_t group = group_at(pair, half, input);
    const int64_t section = weight.scale_units ? section_at(pair, half, input) : 0;
    const Vec scales = weight.factors_at(weight.scales, group, weight.scale_units, section);
    if (weight.minimums) {
      const Vec minimums = weight.factors_at(weight.minimums, group, weight.minimum_units, section);
      if (weight.format == kGroupedInt4)
        return for_pairs_of<WholeCodes<4, true>>(codes, within, words, scales, minimums, place);
      return for_pairs_of<WholeCodes<8, true>>(codes, within, words, scales, minimums, place);
    }
    const Vec zeros = weight.zeros_at(group);
    if (weight.format == kGroupedInt4)
      return for_pairs_of<WholeCodes<4, false>>(codes, within, words, scales, zeros, place);
    if (weight.format == kGroupedInt8)
      return for_pairs_of<WholeCodes<8, false>>(codes, within, words, scales, zeros, place);
    for_pairs_of<E4m3Codes>(codes, within, words, scales, zeros, place);
  }
};

}  // namespace
