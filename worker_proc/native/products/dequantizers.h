// Dequantizers: the weights that the codes of quantized checkpoints stand for.
//
// A weight is a float32 number with a single rounding:
//   integer codes:  (code - zero point) * scale, or code * scale + minimum, where the product is exact;
//   fp8 e4m3 codes: number * scale;
//   table indices:  entry * scale, in a lookup table of 16 entries.
// A dequantizer has the scales of the outputs of a Part. Its operator() returns the weights of code k of
// a word of each output. grouped_codes.h has the layout of the words.

#pragma once

#include "products/weights.h"

namespace {

// sum + x · y, where the product is exact, so fusing does not change the result.
inline Part sum_with_product(Part sum, Part x, Part y) {
#ifdef __AVX512F__
  return multiply_add(x, y, sum);
#else
  return x * y + sum;
#endif
}

// Dequantizes unsigned integers of `Bits` bits, the first one in the lowest bits of a word. `offsets`
// are minimums, which are added after the scaling, or zero points, which are subtracted before it.
template <int Bits, bool kHasMinimums>
class IntegerCodes {
 public:
  static constexpr int kPerWord = 32 / Bits;

  IntegerCodes(Part scales, Part offsets, const Vec&) : scales_(scales), minimums_(offsets) {
    const Part zeros = kHasMinimums ? Part{} : offsets;
    for (int k = 0; k < kPerWord; k++) zeros_[k] = zeros + float_of(exponent_of(k));
  }

  // The weights of code k of each word. The difference is exact.
  Part operator()(PartBits words, int k) const {
    const PartBits mask = PartBits{} + (((1u << Bits) - 1) << bit_of(k));
    const Part sum = (Part)((words >> shift_of(k) & mask) | exponent_of(k));
    const Part whole = sum - zeros_[k];
    return kHasMinimums ? sum_with_product(minimums_, whole, scales_) : whole * scales_;
  }

 private:
  // After a shift of the word, code k is in the mantissa bits of a float, from bit_of(k) on.
  static constexpr int shift_of(int k) { return (k + 1) * Bits <= 23 ? 0 : Bits == 4 ? 12 : 16; }
  static constexpr int bit_of(int k) { return k * Bits - shift_of(k); }

  // The exponent with which the bit at bit_of(k) has the value 1.
  static constexpr uint32_t exponent_of(int k) { return (127u + 23 - bit_of(k)) << 23; }

  Part scales_, minimums_, zeros_[kPerWord];
};

// Dequantizes fp8 e4m3, four numbers in a word. A code in the exponent and mantissa bits of a float is
// 2^-120 times the number; the scales include the factor 2^120.
class E4m3Codes {
 public:
  static constexpr int kPerWord = 4;

  E4m3Codes(Part scales, Part, const Vec&) : scales_(scales) {}

  Part operator()(PartBits words, int k) const {
    constexpr uint32_t kSignAndNumber = 0x87f00000;
    const PartBits shifted = (PartBits)((PartInt)(words << (24 - 8 * k)) >> 4);
    return (Part)(shifted & kSignAndNumber) * scales_;
  }

 private:
  Part scales_;
};

// Looks up entries of a table of 16 numbers, at the lowest four bits of the indices.
inline Part entries(const Vec& table, PartBits indices) {
#if defined(__AVX512F__)
  return (Part)_mm512_permutexvar_ps((__m512i)indices, (__m512)table);
#elif defined(__AVX2__)
  __m256 halves[2];
  std::memcpy(halves, &table, sizeof halves);
  const __m256i at = (__m256i)indices;  // with three significant bits
  return (Part)_mm256_blendv_ps(_mm256_permutevar8x32_ps(halves[0], at),
                                _mm256_permutevar8x32_ps(halves[1], at),
                                _mm256_castsi256_ps(_mm256_slli_epi32(at, 28)));
#else
  Part found;
  for (int lane = 0; lane < kPartLanes; lane++) found[lane] = table[indices[lane] & 15];
  return found;
#endif
}

// Whether an offset is subtracted before the scaling (a zero point) or added after it (a minimum).
enum class Offset { kNone, kBeforeScale, kAfterScale };

// Dequantizes indices into a table, eight in a word.
template <Offset kOffset>
class TableCodes {
 public:
  static constexpr int kPerWord = 8;

  TableCodes(Part scales, Part offsets, const Vec& table)
      : scales_(scales), offsets_(offsets), table_(table) {}

  Part operator()(PartBits words, int k) const {
    const Part entry = entries(table_, words >> 4 * k);
    if (kOffset == Offset::kBeforeScale) return (entry - offsets_) * scales_;
    if (kOffset == Offset::kAfterScale) return sum_with_product(offsets_, entry, scales_);
    return entry * scales_;
  }

 private:
  Part scales_, offsets_;
  Vec table_;
};

// 4-bit integers. A lookup takes one instruction less than a conversion if a register holds the table.
#ifdef __AVX512F__
template <Offset kOffset>
using Int4Codes = TableCodes<kOffset>;
#else
template <Offset kOffset>
using Int4Codes = IntegerCodes<4, kOffset == Offset::kAfterScale>;
#endif

// The scales of 16 outputs, and their minimums or zero points.
struct Factors {
  Vec scales, offsets;
};

template <class Codes>
struct ClassOf {
  using Type = Codes;
};

// Rounds two vectors to bfloat16, ties to even, and packs them into pairs.
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

// Dequantizes codes to units: pairs of bfloat16 weights.
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

// Dequantizes num_words words of 16 outputs. Calls store(input, lane, weights of the input, weights
// of the next input) for each second input, from `input` on, and each Part of the outputs.
template <class Codes, class Store>
[[gnu::noinline]] void for_pairs_of(const uint8_t* codes, int64_t input, int num_words,
                                    const Factors& factors, const Vec& table, Store store) {
  Part scale_parts[kParts], offset_parts[kParts];
  std::memcpy(scale_parts, &factors.scales, sizeof scale_parts);
  std::memcpy(offset_parts, &factors.offsets, sizeof offset_parts);
  for (int p = 0; p < kParts; p++) {
    const Codes weights(scale_parts[p], offset_parts[p], table);
    const Unit* from = reinterpret_cast<const Unit*>(codes) + p * kPartLanes;
    for (int word = 0; word < num_words; word++, from += kLanes) {
      const PartBits words = *reinterpret_cast<const PartBits*>(from);
      const int64_t first = input + word * Codes::kPerWord;
#pragma GCC unroll 8
      for (int k = 0; k < Codes::kPerWord; k += 2)
        store(first + k, p * kPartLanes, weights(words, k), weights(words, k + 1));
    }
  }
}

}  // namespace
