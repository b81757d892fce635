// Attention in bfloat16 by products of pairs: AMX tiles, or AVX-512's dot products.
//
// As in attention.h, a row's result depends on its query and its context alone. A context is read
// in spans of 64 positions, each from a multiple of 64 on, and by sections (sections.h). The weights
// of a span are rounded to bfloat16; the sums are float32.
//
// Pools, for heads of a multiple of 32 dimensions and blocks of a multiple of 16 slots: keys
// [block][kv_head][slot / 16][dim / 2][16][2], values [block][kv_head][slot / 2][dim][2]. Both are
// in units of four bytes; 16 of them, side by side, are a vector and a row of an AMX tile. Codes are
// widened to bfloat16, which is exact, before they are read: scores are multiplied by the scales of
// the keys, and weights by those of the values before they are rounded (coded_kv.h).

#pragma once

#include "attention.h"
#include "products.h"

#ifdef __AVX512BF16__
#define TROIKA_HAS_PAIRS 1

namespace {

constexpr int kSpanSlots = 64;
constexpr int kSpanGroups = kSpanSlots / kLanes;
constexpr int kPairRows = 32;  // query rows of a tile
constexpr int kHalfRows = 16;  // of an AMX tile
constexpr int kGroupPairs = kLanes / 2;

// 2 to the power of x, for x <= 0 or not much above, with a relative error of 3e-6 at most; 0 where
// that is less than a normal number.
inline __m512 power_of_two(__m512 x) {
  const __mmask16 is_normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  // Adding kWhole rounds to a whole number, which the lowest bits then hold.
  const __m512 whole = _mm512_add_ps(x, _mm512_set1_ps(kWhole));
  const __m512 rest = _mm512_sub_ps(x, _mm512_sub_ps(whole, _mm512_set1_ps(kWhole)));
  __m512 y = _mm512_set1_ps(9.5701022e-3f);
  for (const float c : {5.5917863e-2f, 2.4024744e-1f, 6.9312179e-1f, 9.9999928e-1f})
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(c));
  const __m512i exponent = _mm512_slli_epi32((__m512i)whole, 23);
  return (__m512)_mm512_maskz_add_epi32(is_normal, (__m512i)y, exponent);
}

constexpr float kLog2E = 1.44269504f;

struct PowerOfTwo {
  static constexpr float kUnit = kLog2E;
  float operator()(float x) const { return _mm512_cvtss_f32(power_of_two(_mm512_set1_ps(x))); }
};

// Codes as values in bfloat16.
inline __m512i bf16_of(const Int8Code* p) {
  const auto floats = [](const Int8Code* from) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
  };
  return (__m512i)_mm512_cvtne2ps_pbh(floats(p + kLanes), floats(p));
}

inline __m512i bf16_of(const Fp8Code* p) {
  const __m512i below = _mm512_castsi128_si512(  // codes below the normal ones
      _mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
  const __m512i codes =
      _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  const __m512i magnitude = _mm512_and_si512(codes, _mm512_set1_epi16(Fp8Code::kMagnitude));
  const __m512i normal =
      _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
  const __mmask32 is_below = _mm512_testn_epi16_mask(codes, _mm512_set1_epi16(15 << 3));
  const __m512i size = _mm512_mask_permutexvar_epi16(normal, is_below, magnitude, below);
  const __m512i sign = _mm512_set1_epi16(static_cast<int16_t>(Fp8Code::kSign << 8));
  // The bits of the code where the sign is, else those of the size.
  return _mm512_ternarylogic_epi32(sign, _mm512_slli_epi16(codes, 8), size, 0xca);
}

// Memory that is fetched while a thread computes, line by line, so that neither waits for the other.
class LinesAhead {
 public:
  void clear() { at_ = num_parts_ = num_lines_ = 0; }

  void add(const void* begin, int64_t num_bytes) {
    const char* const from = static_cast<const char*>(begin);
    parts_[num_parts_++] = {from, from + num_bytes};
    num_lines_ += (num_bytes + kLine - 1) / kLine;
  }

  int64_t num_lines() const { return num_lines_; }

  [[gnu::always_inline]] void fetch(int num_lines) {
    for (; num_lines > 0 && at_ < num_parts_; num_lines--) {
      Part& part = parts_[at_];
      _mm_prefetch(part.next, _MM_HINT_T1);
      part.next += kLine;
      if (part.next >= part.end) at_++;
    }
  }

  void fetch_all() {
    while (at_ < num_parts_) fetch(1);
  }

 private:
  struct Part {
    const char *next, *end;
  };
  Part parts_[kPairRows * 4 * kSpanGroups];  // of each row keys, values and the scales of both
  int at_ = 0, num_parts_ = 0, num_lines_ = 0;
};

// Some query rows of one KV head, with the state of their softmax over the present section. Scores
// are in powers of two.
struct PairTile {
  int dim, vdim;
  float scale, softcap;  // the scale is positive
  TileBiases<kPairRows> biases;
  int position[kPairRows];
  int visible_from[kPairRows];
  float top[kPairRows];
  alignas(64) float sums[kPairRows][kLanes];
  alignas(64) float scores[2][kPairRows][kSpanSlots];  // of a span, and of the next one
  alignas(64) Bf16 weights[kPairRows][kSpanSlots];
  alignas(64) float wide_weights[kPairRows][kSpanSlots];  // the same, where products are of floats
  alignas(64) Unit copied_values[kSpanGroups * kGroupPairs * kMaxDim];
  alignas(64) Unit widened_keys[kSpanGroups * kLanes * kMaxDim / 2];
  EndedSections<kPairRows, PowerOfTwo> ended;
  LinesAhead ahead;
  const Unit* fetched = nullptr;  // the keys of the span that was fetched for the next context
  LinesAhead later;               // what is read after the present rows: their parts fetch it
  int later_lines_per_part = 0;

  void begin_section(int r) {
    top[r] = kNegInf;
    std::memset(sums[r], 0, sizeof(sums[r]));
    std::memset(out(r), 0, vdim * sizeof(float));
  }

  RowSums present(int r) {
    return {top[r], fold(load(sums[r]), [](Vec a, Vec b) { return a + b; }), out(r)};
  }

  void end_section(int r) {
    ended.add(r, present(r), vdim);
    begin_section(r);
  }

  Unit* query(int row) { return queries_ + row * dim / 2; }
  float* wide_query(int row) { return wide_queries_ + row * dim; }
  float* out(int row) { return outs_ + row * out_stride(); }
  int out_stride() const { return vdim + kLanes; }  // rows share few sets of the first cache

 private:
  alignas(64) Unit queries_[kPairRows * kMaxDim / 2];
  alignas(64) float wide_queries_[kPairRows * kMaxDim];  // where products are of floats
  alignas(64) float outs_[kPairRows * (kMaxDim + kLanes)];
};

inline void widen_values(const Bf16* from, int count, float* to) {
  for (int i = 0; i < count; i += kLanes) save(load(from + i), to + i, kLanes);
}

// Consecutive rows of a tile.
struct RowRange {
  int first, count;
};

// The groups of 16 slots of one span.
struct PairSpan {
  int base, count;
  int first_group, num_groups;  // values of others are not read: no row sees them
  const Unit *keys[kSpanGroups], *values[kSpanGroups];
  // Of codes; those are what keys and values point to until they are widened.
  const float *key_scales[kSpanGroups], *value_scales[kSpanGroups];
};

// Widens the codes of a group, which lie in the order of units.
template <class Code>
void widen_group(const Unit*& group, int64_t num_units, Unit* to) {
  const Code* from = reinterpret_cast<const Code*>(group);
  for (int64_t i = 0; i < num_units; i += kLanes)
    _mm512_store_si512(to + i, bf16_of(from + 2 * i));
  group = to;
}

template <class Code>
void widen_span_keys(PairTile& tile, PairSpan& span) {
  const int64_t size = kLanes * tile.dim / 2;
  for (int g = 0; g < kSpanGroups; g++)
    widen_group<Code>(span.keys[g], size, tile.widened_keys + g * size);
}

// Each two groups lie side by side, as tiles take them.
template <class Code>
void widen_span_values(PairTile& tile, PairSpan& span) {
  const int64_t size = kGroupPairs * tile.vdim;
  for (int g = span.first_group / 2 * 2; g < (span.num_groups + 1) / 2 * 2; g++)
    widen_group<Code>(span.values[g], size, tile.copied_values + g * size);
}

constexpr int kLinesPerStep = 4;  // so that scores and values of a span fetch another one

// The scores of the first G groups of a span.
template <int R, int G, bool kFetches>
void score_groups(PairTile& tile, int first, const PairSpan& span, float (*scores)[kSpanSlots]) {
  Vec sums[R][G];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int g = 0; g < G; g++) sums[r][g] = Vec{};
  for (int d = 0; d < tile.dim / 2; d++) {
    VecBits keys[G];
#pragma GCC unroll 4
    for (int g = 0; g < G; g++)
      keys[g] = *reinterpret_cast<const VecBits*>(span.keys[g] + d * kLanes);
    if constexpr (kFetches) tile.ahead.fetch(kLinesPerStep);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int g = 0; g < G; g++)
        sums[r][g] = add_product<Bf16>(sums[r][g], tile.query(first + r)[d], keys[g]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int g = 0; g < G; g++)
      _mm512_store_ps(scores[first + r] + g * kLanes, (__m512)sums[r][g]);
}

// Groups past the context are not scored: their scores would be masked.
template <int R, bool kFetches>
void score_with_vectors(PairTile& tile, int first, const PairSpan& span,
                        float (*scores)[kSpanSlots]) {
  constexpr int kHalf = kSpanGroups / 2;
  if (span.num_groups <= kHalf)
    score_groups<R, kHalf, kFetches>(tile, first, span, scores);
  else
    score_groups<R, kSpanGroups, kFetches>(tile, first, span, scores);
}

template <int R, int C, bool kFetches>
void add_with_vectors(PairTile& tile, int first, int column, const PairSpan& span) {
  Vec sums[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++)
      sums[r][c] = (Vec)_mm512_load_ps(tile.out(first + r) + column + c * kLanes);
  for (int g = span.first_group; g < span.num_groups; g++)
#pragma GCC unroll 1  // else there are too few registers for the addresses
    for (int pair = 0; pair < kGroupPairs; pair++) {
      const Unit* values = span.values[g] + pair * tile.vdim + column;
      VecBits v[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) v[c] = *reinterpret_cast<const VecBits*>(values + c * kLanes);
      if constexpr (kFetches) tile.ahead.fetch(kLinesPerStep);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        Unit weights;
        std::memcpy(&weights, tile.weights[first + r] + g * kLanes + 2 * pair, sizeof(Unit));
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) sums[r][c] = add_product<Bf16>(sums[r][c], weights, v[c]);
      }
    }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++)
      _mm512_store_ps(tile.out(first + r) + column + c * kLanes, (__m512)sums[r][c]);
}

// The same as score_with_vectors, by float32 (float_products.h).
template <int R, bool kFetches>
[[gnu::noinline]] void score_with_floats(PairTile& tile, int first, const PairSpan& span,
                                         float (*scores)[kSpanSlots]) {
  const NoSubnormals mode;
  Vec sums[R][kSpanGroups];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int g = 0; g < kSpanGroups; g++) sums[r][g] = Vec{};
  const float* const queries = tile.wide_query(first);
  for (int d = 0; d < tile.dim / 2; d++) {
    if constexpr (kFetches) tile.ahead.fetch(kLinesPerStep);
#pragma GCC unroll 2
    for (int half = 1; half >= 0; half--) {
      Vec keys[kSpanGroups];
#pragma GCC unroll 4
      for (int g = 0; g < kSpanGroups; g++)
        keys[g] = half_floats(*reinterpret_cast<const VecBits*>(span.keys[g] + d * kLanes), half);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const Vec x = (Vec)_mm512_set1_ps(queries[r * tile.dim + 2 * d + half]);
#pragma GCC unroll 4
        for (int g = 0; g < kSpanGroups; g++) sums[r][g] = multiply_add(x, keys[g], sums[r][g]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int g = 0; g < kSpanGroups; g++)
      _mm512_store_ps(scores[first + r] + g * kLanes, (__m512)sums[r][g]);
}

// The same as add_with_vectors, by float32.
template <int R, int C, bool kFetches>
[[gnu::noinline]] void add_with_floats(PairTile& tile, int first, int column,
                                       const PairSpan& span) {
  const NoSubnormals mode;
  Vec sums[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++)
      sums[r][c] = (Vec)_mm512_load_ps(tile.out(first + r) + column + c * kLanes);
  for (int g = span.first_group; g < span.num_groups; g++)
#pragma GCC unroll 1
    for (int pair = 0; pair < kGroupPairs; pair++) {
      const Unit* values = span.values[g] + pair * tile.vdim + column;
      const float* const weights = tile.wide_weights[first] + g * kLanes + 2 * pair;
      if constexpr (kFetches) tile.ahead.fetch(kLinesPerStep);
#pragma GCC unroll 2
      for (int half = 1; half >= 0; half--) {
        Vec v[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; c++)
          v[c] = half_floats(*reinterpret_cast<const VecBits*>(values + c * kLanes), half);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          const Vec x = (Vec)_mm512_set1_ps(weights[r * kSpanSlots + half]);
#pragma GCC unroll 4
          for (int c = 0; c < C; c++) sums[r][c] = multiply_add(x, v[c], sums[r][c]);
        }
      }
    }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++)
      _mm512_store_ps(tile.out(first + r) + column + c * kLanes, (__m512)sums[r][c]);
}

template <int R, bool kFetches>
void add_rows_with_vectors(PairTile& tile, int first, const PairSpan& span) {
  int column = 0;
  constexpr auto kFour = add_with_vectors<R, 4, kFetches>, kTwo = add_with_vectors<R, 2, kFetches>;
  const auto add_four = troika_uses_floats ? add_with_floats<R, 4, kFetches> : kFour;
  const auto add_two = troika_uses_floats ? add_with_floats<R, 2, kFetches> : kTwo;
  for (; column + 4 * kLanes <= tile.vdim; column += 4 * kLanes)
    add_four(tile, first, column, span);
  for (; column < tile.vdim; column += 2 * kLanes) add_two(tile, first, column, span);
}

template <int N>
using Count = std::integral_constant<int, N>;

constexpr int kMostPartRows = 6;

// Whether a part of a tile has few rows, so that there are registers to fetch lines meanwhile.
inline bool fetches_in_parts(RowRange rows) {
  const int rest = rows.count % kMostPartRows;
  return rest > 0 && rest < 5;
}

// Calls f(number of rows, first row, whether lines are fetched meanwhile) for parts of a tile.
template <class F>
void for_parts(RowRange rows, bool fetches, const F& f) {
  constexpr std::true_type kFetches;
  constexpr std::false_type kDoesNot;
  int first = rows.first;
  const int end = rows.first + rows.count;
  for (; first + kMostPartRows <= end; first += kMostPartRows)
    f(Count<kMostPartRows>{}, first, kDoesNot);
  switch (end - first) {
    case 1: return fetches ? f(Count<1>{}, first, kFetches) : f(Count<1>{}, first, kDoesNot);
    case 2: return fetches ? f(Count<2>{}, first, kFetches) : f(Count<2>{}, first, kDoesNot);
    case 3: return fetches ? f(Count<3>{}, first, kFetches) : f(Count<3>{}, first, kDoesNot);
    case 4: return fetches ? f(Count<4>{}, first, kFetches) : f(Count<4>{}, first, kDoesNot);
    case 5: return f(Count<5>{}, first, kDoesNot);
  }
}

// Copies the values of the first `used` slots of a group, with zeros for the others: what is there is
// not the text's, and may be NaN.
inline void copy_values(const Unit* from, int used, int vdim, Unit* to) {
  for (int pair = 0; pair < kGroupPairs; pair++) {
    const int num = used - 2 * pair;
    const Unit mask = num >= 2 ? ~Unit{0} : num == 1 ? 0xffff : 0;
    const VecBits masks = mask - VecBits{};
    for (int d = pair * vdim; d < (pair + 1) * vdim; d += kLanes)
      *reinterpret_cast<VecBits*>(to + d) = *reinterpret_cast<const VecBits*>(from + d) & masks;
  }
}

// Replaces the values of a group that is not full.
inline void mask_values(PairTile& tile, PairSpan& span) {
  const int used = span.count % kLanes;
  if (used == 0) return;
  const Unit*& values = span.values[span.num_groups - 1];
  copy_values(values, used, tile.vdim, tile.copied_values);
  values = tile.copied_values;
}

#ifdef __AMX_BF16__

// Tiles 0 to 3 are sums, 4 and 5 rows of queries or weights, 6 and 7 keys or values. A product adds
// up 32 dimensions or slots before it adds them to a sum.
struct alignas(64) PairTileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t num_rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};

  explicit PairTileConfig(int count) {
    for (int i = 0; i < 6; i++) num_rows[i] = static_cast<uint8_t>(count);
  }
};

// Of at most kHalfRows rows.
void score_with_tiles(PairTile& tile, int first, const PairSpan& span,
                      float (*scores)[kSpanSlots]) {
  finish_stores();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int d = 0; d < tile.dim / 2; d += kLanes) {
    _tile_loadd(4, tile.query(first) + d, tile.dim * sizeof(Bf16));
    _tile_loadd(6, span.keys[0] + d * kLanes, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, span.keys[1] + d * kLanes, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(6, span.keys[2] + d * kLanes, 64);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(7, span.keys[3] + d * kLanes, 64);
    _tile_dpbf16ps(3, 4, 7);
  }
  float* to = scores[first];
  _tile_stored(0, to, sizeof(scores[0]));
  _tile_stored(1, to + kLanes, sizeof(scores[0]));
  _tile_stored(2, to + 2 * kLanes, sizeof(scores[0]));
  _tile_stored(3, to + 3 * kLanes, sizeof(scores[0]));
}

// Of two halves of a tile, which begin at rows 0 and `half`: keys are loaded once for both.
void score_halves_with_tiles(PairTile& tile, int half, const PairSpan& span,
                             float (*scores)[kSpanSlots]) {
  finish_stores();
  for (int g = 0; g < kSpanGroups; g += 2) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int d = 0; d < tile.dim / 2; d += kLanes) {
      _tile_loadd(4, tile.query(0) + d, tile.dim * sizeof(Bf16));
      _tile_loadd(6, span.keys[g] + d * kLanes, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, span.keys[g + 1] + d * kLanes, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, tile.query(half) + d, tile.dim * sizeof(Bf16));
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, scores[0] + g * kLanes, sizeof(scores[0]));
    _tile_stored(1, scores[0] + (g + 1) * kLanes, sizeof(scores[0]));
    _tile_stored(2, scores[half] + g * kLanes, sizeof(scores[0]));
    _tile_stored(3, scores[half] + (g + 1) * kLanes, sizeof(scores[0]));
  }
}

// Puts the values of each two groups side by side, as products take them.
inline void join_values(PairTile& tile, PairSpan& span) {
  const int size = kGroupPairs * tile.vdim;
  for (int g = span.first_group / 2 * 2; g < span.num_groups; g += 2) {
    const bool are_full = g >= span.first_group && (g + 2) * kLanes <= span.count;
    if (are_full && span.values[g + 1] == span.values[g] + size) continue;
    for (int i = g; i < g + 2; i++) {
      const int used = i < span.first_group ? 0 : std::clamp(span.count - i * kLanes, 0, kLanes);
      copy_values(span.values[i], used, tile.vdim, tile.copied_values + i * size);
    }
    span.values[g] = tile.copied_values + g * size;
  }
}

// Of at most kHalfRows rows; the values are joined.
void add_with_tiles(PairTile& tile, int first, const PairSpan& span) {
  finish_stores();
  const int64_t stride = tile.out_stride() * sizeof(float), value_stride = tile.vdim * sizeof(Unit);
  for (int column = 0; column < tile.vdim; column += 2 * kLanes) {
    float* out = tile.out(first) + column;
    _tile_loadd(0, out, stride);
    _tile_loadd(1, out + kLanes, stride);
    for (int g = span.first_group / 2 * 2; g < span.num_groups; g += 2) {
      _tile_loadd(4, tile.weights[first] + g * kLanes, sizeof(tile.weights[0]));
      _tile_loadd(6, span.values[g] + column, value_stride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, span.values[g] + column + kLanes, value_stride);
      _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, out, stride);
    _tile_stored(1, out + kLanes, stride);
  }
}

// Of two halves of a tile: the joined values are loaded once for both.
void add_halves_with_tiles(PairTile& tile, int half, const PairSpan& span) {
  finish_stores();
  const int64_t stride = tile.out_stride() * sizeof(float), value_stride = tile.vdim * sizeof(Unit);
  for (int column = 0; column < tile.vdim; column += 2 * kLanes) {
    float *upper = tile.out(0) + column, *lower = tile.out(half) + column;
    _tile_loadd(0, upper, stride);
    _tile_loadd(1, upper + kLanes, stride);
    _tile_loadd(2, lower, stride);
    _tile_loadd(3, lower + kLanes, stride);
    for (int g = span.first_group / 2 * 2; g < span.num_groups; g += 2) {
      _tile_loadd(4, tile.weights[0] + g * kLanes, sizeof(tile.weights[0]));
      _tile_loadd(6, span.values[g] + column, value_stride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, span.values[g] + column + kLanes, value_stride);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, tile.weights[half] + g * kLanes, sizeof(tile.weights[0]));
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, upper, stride);
    _tile_stored(1, upper + kLanes, stride);
    _tile_stored(2, lower, stride);
    _tile_stored(3, lower + kLanes, stride);
  }
}

#endif

// How much scores may be above the one that weights are relative to, in powers of two.
constexpr float kMostAboveTop = 16.0f;

// Makes a row's weights relative to a higher score.
inline void raise_top(PairTile& tile, int r, float top) {
  if (tile.top[r] != kNegInf) {
    const __m512 less = power_of_two(_mm512_set1_ps(tile.top[r] - top));
    _mm512_store_ps(tile.sums[r], _mm512_mul_ps(_mm512_load_ps(tile.sums[r]), less));
    float* out = tile.out(r);
    for (int i = 0; i < tile.vdim; i += kLanes)
      _mm512_store_ps(out + i, _mm512_mul_ps(_mm512_load_ps(out + i), less));
  }
  tile.top[r] = top;
}

// Turns a row's scores of a span into weights.
template <bool kHasScales>
void weigh_row(PairTile& tile, int r, const PairSpan& span, const float* scores) {
  const int low = tile.visible_from[r] - span.base;
  const int end = std::min(tile.position[r] - span.base + 1, span.count);
  float factor = tile.scale * kLog2E;
  __m512 s[kSpanGroups];
  for (int g = 0; g < kSpanGroups; g++) {
    s[g] = _mm512_load_ps(scores + g * kLanes);
    if constexpr (kHasScales) s[g] = _mm512_mul_ps(s[g], _mm512_load_ps(span.key_scales[g]));
  }
  if (tile.softcap > 0) {
    factor = tile.softcap * kLog2E;
    for (int g = 0; g < kSpanGroups; g++)
      s[g] = (__m512)tanh_of((Vec)s[g] * (tile.scale / tile.softcap));
  }
  if (tile.biases.reach(r, span.base, kSpanSlots)) {
    const __m512 unit = _mm512_set1_ps(kLog2E), own = _mm512_set1_ps(tile.biases.own(r));
    for (int g = 0; g < kSpanGroups; g++) {
      const __m512 bias =
          _mm512_sub_ps(_mm512_loadu_ps(tile.biases.at(r, span.base + g * kLanes)), own);
      s[g] = _mm512_fmadd_ps(s[g], _mm512_set1_ps(factor), _mm512_mul_ps(bias, unit));
    }
    factor = 1.0f;
  }
  const __m512 unseen = _mm512_set1_ps(kNegInf);
  if (low > 0 || end < kSpanSlots)
    for (int g = 0; g < kSpanGroups; g++) {
      const int from = std::clamp(low - g * kLanes, 0, kLanes);
      const int to = std::clamp(end - g * kLanes, 0, kLanes);
      const uint32_t seen = ((1u << to) - 1) & ~((1u << from) - 1);
      s[g] = _mm512_mask_mov_ps(unseen, static_cast<__mmask16>(seen), s[g]);
    }
  const __m512 factors = _mm512_set1_ps(factor);
  const __m512 highest_of = _mm512_max_ps(_mm512_max_ps(s[0], s[1]), _mm512_max_ps(s[2], s[3]));
  __m512 top = _mm512_set1_ps(tile.top[r]);
  // Few spans have a score that is much higher than those before.
  const __m512 most = _mm512_add_ps(top, _mm512_set1_ps(kMostAboveTop));
  if (_mm512_cmp_ps_mask(_mm512_mul_ps(highest_of, factors), most, _CMP_NLE_UQ) ||
      tile.top[r] == kNegInf) {
    const float highest = _mm512_reduce_max_ps(highest_of) * factor;
    if (highest == kNegInf && tile.top[r] == kNegInf) {  // the row sees nothing yet
      std::memset(tile.weights[r], 0, sizeof(tile.weights[r]));
      std::memset(tile.wide_weights[r], 0, sizeof(tile.wide_weights[r]));
      return;
    }
    if (highest > tile.top[r]) raise_top(tile, r, highest);
    top = _mm512_set1_ps(tile.top[r]);
  }
  __m512 weights[kSpanGroups];
  for (int g = 0; g < kSpanGroups; g++) {
    const __m512 score = s[g];
    s[g] = weights[g] = power_of_two(_mm512_fmsub_ps(score, factors, top));
    if constexpr (kHasScales) {  // those of slots that the row does not see may be NaN
      const __mmask16 is_seen = _mm512_cmp_ps_mask(score, unseen, _CMP_NEQ_UQ);
      weights[g] = _mm512_maskz_mul_ps(is_seen, s[g], _mm512_load_ps(span.value_scales[g]));
    }
  }
  for (int g = 0; g < kSpanGroups; g += 2)
    _mm512_store_si512(tile.weights[r] + g * kLanes,
                       (__m512i)_mm512_cvtne2ps_pbh(weights[g + 1], weights[g]));
  if (troika_uses_floats) widen_values(tile.weights[r], kSpanSlots, tile.wide_weights[r]);
  const __m512 total = _mm512_add_ps(_mm512_add_ps(s[0], s[1]), _mm512_add_ps(s[2], s[3]));
  _mm512_store_ps(tile.sums[r], _mm512_add_ps(_mm512_load_ps(tile.sums[r]), total));
}

// What a thread will probably compute next: a row of a segment and a KV head, over some positions.
struct UpcomingRow {
  int segment = -1;  // negative: nothing is known
  int kv_head, earliest, last;
};

// The context of one segment, as one KV head of a layer holds it.
class PairContext {
 public:
  PairContext(const PairTile& tile, const Layer& layer, const Step& step, int segment, int kv_head)
      : layer_(layer),
        step_(step),
        tables_(step.tables),
        table_(step.table_offset[segment]),
        kv_head_(kv_head),
        groups_per_block_(layer.block_size / kLanes),
        keys_(layer, layer.keys, tile.dim),
        values_(layer, layer.values, tile.vdim) {}

  const Layer& layer() const { return layer_; }

  PairContext of(const PairTile& tile, const UpcomingRow& row) const {
    return PairContext(tile, layer_, step_, row.segment, row.kv_head);
  }

  // The span from `base` on, of rows that see positions from `earliest` to `last`.
  PairSpan span(int base, int earliest, int last) const {
    PairSpan span;
    span.base = base;
    span.count = std::min(kSpanSlots, last - base + 1);
    span.first_group = std::max(0, earliest / kLanes - base / kLanes);
    span.num_groups = (span.count + kLanes - 1) / kLanes;
    // Where a group is past the context, or in a block that the window has passed, the keys of
    // another one are scored, and masked.
    const int first = earliest / layer_.block_size * groups_per_block_;
    for (int g = 0; g < kSpanGroups; g++) {
      const int group = std::clamp(base / kLanes + g, first, last / kLanes);
      const int64_t block = tables_[table_ + group / groups_per_block_];
      const int64_t head = block * layer_.num_kv_heads + kv_head_;
      const int place = group % groups_per_block_;
      span.keys[g] = keys_.group(head, place);
      span.values[g] = values_.group(head, place);
      span.key_scales[g] = keys_.scales(head, place);
      span.value_scales[g] = values_.scales(head, place);
    }
    return span;
  }

  // Blocks lie anywhere, so the hardware does not foresee the next one.
  void add_to(LinesAhead& lines, const PairSpan& span) const {
    for (int g = span.first_group; g < span.num_groups; g++) {
      lines.add(span.keys[g], keys_.group_bytes);
      lines.add(span.values[g], values_.group_bytes);
      if (layer_.kv_format == kPlainPools) continue;
      lines.add(span.key_scales[g], kLanes * sizeof(float));
      lines.add(span.value_scales[g], kLanes * sizeof(float));
    }
  }

 private:
  // Where a pool has the groups of 16 slots of a block of one head.
  struct Places {
    Places(const Layer& layer, const void* pool, int dim)
        : pool(static_cast<const char*>(pool)),
          group_bytes(kLanes * dim * (layer.kv_format == kPlainPools ? sizeof(Bf16) : 1)),
          head_bytes(layer.kv_format == kPlainPools ? layer.block_size / kLanes * group_bytes
                                                    : head_size<Int8Code>(layer.block_size, dim)),
          code_bytes(layer.block_size * dim) {}

    const Unit* group(int64_t head, int number) const {
      return reinterpret_cast<const Unit*>(pool + head * head_bytes + number * group_bytes);
    }

    const float* scales(int64_t head, int number) const {
      return reinterpret_cast<const float*>(pool + head * head_bytes + code_bytes) + number * kLanes;
    }

    const char* const pool;
    const int64_t group_bytes, head_bytes, code_bytes;
  };

  const Layer& layer_;
  const Step& step_;
  const int32_t* tables_;
  const int64_t table_;  // may be negative
  const int kv_head_, groups_per_block_;
  const Places keys_, values_;
};

// Adds the positions from a multiple of 64 on to the state of some rows, if they see any of them. If
// there are more than kHalfRows rows, the first one is the tile's first, so that the row too many of
// the second half is in the tile, too.
inline void attend_pair_rows(PairTile& tile, RowRange rows, const PairContext& context,
                             Positions positions, const UpcomingRow& upcoming = {},
                             bool is_in_cache = false) {
  const int earliest = std::max(tile.visible_from[rows.first], positions.begin);
  const int last = std::min(tile.position[rows.first + rows.count - 1], positions.end - 1);
  if (earliest > last) return;
  // Longer than it computes.
  const bool waits_for_memory = rows.count <= kHalfRows / 2 && !is_in_cache;
  const Layer& layer = context.layer();
  const bool has_codes = layer.kv_format != kPlainPools;
#ifdef __AMX_BF16__
  // Where halves differ, the second one computes a row too many, which is never read.
  const bool has_halves = rows.count > kHalfRows;
  const int half = has_halves ? (rows.count + 1) / 2 : rows.count;
  const PairTileConfig config(half);
  finish_stores();
  if (troika_has_tiles) _tile_loadconfig(&config);
#endif
  const auto score = [&](PairSpan& span, float (*scores)[kSpanSlots]) {
    if (has_codes) with_codes(layer, [&](auto code) { widen_span_keys<decltype(code)>(tile, span); });
#ifdef __AMX_BF16__
    if (troika_has_tiles) {
      if (has_halves) return score_halves_with_tiles(tile, half, span, scores);
      return score_with_tiles(tile, rows.first, span, scores);
    }
#endif
    for_parts(rows, waits_for_memory, [&](auto count, int first, auto fetches) {
      const auto score_rows = troika_uses_floats
                                  ? score_with_floats<count.value, fetches.value>
                                  : score_with_vectors<count.value, fetches.value>;
      score_rows(tile, first, span, scores);
      tile.later.fetch(tile.later_lines_per_part);
    });
  };
  const auto prepare_values = [&](PairSpan& span) {
    if (has_codes)
      return with_codes(layer, [&](auto code) { widen_span_values<decltype(code)>(tile, span); });
#ifdef __AMX_BF16__
    if (troika_has_tiles) return join_values(tile, span);
#endif
    mask_values(tile, span);
  };
  const auto add_values = [&](const PairSpan& span) {
#ifdef __AMX_BF16__
    if (troika_has_tiles) {
      if (has_halves) return add_halves_with_tiles(tile, half, span);
      return add_with_tiles(tile, rows.first, span);
    }
#endif
    for_parts(rows, waits_for_memory, [&](auto count, int first, auto fetches) {
      add_rows_with_vectors<count.value, fetches.value>(tile, first, span);
      tile.later.fetch(tile.later_lines_per_part);
    });
  };
  const auto add_lines = [&](int base) {
    if (base <= last) return context.add_to(tile.ahead, context.span(base, earliest, last));
    if (upcoming.segment < 0) return;
    const PairContext next = context.of(tile, upcoming);
    const int number = (base - 1 - last) / kSpanSlots;  // of the upcoming context's span
    const int next_base = (upcoming.earliest / kSpanSlots + number) * kSpanSlots;
    if (next_base > upcoming.last) return;
    const PairSpan next_span = next.span(next_base, upcoming.earliest, upcoming.last);
    if (number == 0) tile.fetched = next_span.keys[next_span.first_group];
    next.add_to(tile.ahead, next_span);
  };
  // Spans are fetched two ahead: those of this context, and then the first two of the upcoming one.
  const bool fetches_meanwhile = !troika_has_tiles && fetches_in_parts(rows);
  const auto fetch_ahead = [&](int base) {
    tile.ahead.fetch_all();
    tile.ahead.clear();
    add_lines(base);
    if (!fetches_meanwhile) tile.ahead.fetch_all();
  };
  int turn = 0;
  PairSpan span = context.span(earliest / kSpanSlots * kSpanSlots, earliest, last);
  if (waits_for_memory) {
    const bool is_fetched = tile.fetched == span.keys[span.first_group];
    if (!is_fetched) fetch_ahead(span.base);
    if (!is_fetched || span.base + kSpanSlots > last) fetch_ahead(span.base + kSpanSlots);
  }
  score(span, tile.scores[turn]);
  for (bool has_next = true; has_next; turn ^= 1) {
    // The next span is scored first, so that its products run while this one's rows are weighed.
    PairSpan next{};
    has_next = span.base + kSpanSlots <= last;
    if (has_next) {
      next = context.span(span.base + kSpanSlots, earliest, last);
      if (waits_for_memory) fetch_ahead(next.base + kSpanSlots);
      score(next, tile.scores[turn ^ 1]);
    } else if (waits_for_memory) {
      fetch_ahead(span.base + 2 * kSpanSlots);
    }
    prepare_values(span);
    const auto weigh_rows = [&](auto has_scales) {
      for (int r = rows.first; r < rows.first + rows.count; r++)
        weigh_row<decltype(has_scales)::value>(tile, r, span, tile.scores[turn][r]);
    };
    has_codes ? weigh_rows(std::true_type{}) : weigh_rows(std::false_type{});
    add_values(span);
    if ((span.base + span.count) % kSectionSlots == 0)
      for (int r = rows.first; r < rows.first + rows.count; r++) tile.end_section(r);
    span = next;
  }
#ifdef __AMX_BF16__
  if (troika_has_tiles) _tile_release();
#endif
}

// Query rows of one segment and one KV head, the heads of each token side by side, and the rows of
// a tile that hold them.
struct PairQueries {
  int segment, first;
  RowRange rows;
  int number;  // of the segment's first token in the group
};

// One KV head of a layer in one step.
class PairHead {
 public:
  PairHead(PairTile& tile, const Layer& layer, const Step& step, int kv_head, const Rows& query,
           const Rows& value, const RowTerms& terms)
      : tile_(tile),
        layer_(layer),
        step_(step),
        kv_head_(kv_head),
        per_kv_(layer.num_heads / layer.num_kv_heads),
        query_(query),
        value_(value),
        terms_(terms) {}

  // The upcoming row is the first one of the piece that this thread will probably take next.
  template <class Write>
  void attend_piece(const Piece& piece, const UpcomingRow& upcoming, const Write& write) {
    if (piece.num_items == 1)
      attend_item(piece, upcoming, write);
    else
      attend_group(piece, upcoming, write);
  }

  static UpcomingRow first_row(const Layer& layer, const Step& step, const Piece& piece,
                               int kv_head) {
    const int segment = step.item_segment[piece.first_item];
    const int position = step.start[segment] + step.item_token[piece.first_item];
    return row_of(layer, segment, kv_head, position, piece.positions());
  }

 private:
  static UpcomingRow row_of(const Layer& layer, int segment, int kv_head, int position,
                            Positions positions) {
    const int earliest = std::max(first_visible(layer, position), positions.begin);
    const int last = std::min(position, positions.end - 1);
    return {earliest > last ? -1 : segment, kv_head, earliest, last};
  }

  // Computes the tokens of an item. Tiles are full, so that they may end within a token.
  template <class Write>
  void attend_item(const Piece& piece, const UpcomingRow& upcoming, const Write& write) {
    const int item = piece.first_item, segment = step_.item_segment[item];
    const int token = step_.item_token[item];
    const int num_tokens = std::min(step_.num_tokens[segment] - token, step_.item_size);
    const int end = (token + num_tokens) * per_kv_;
    for (int row = token * per_kv_, count; row < end; row += count) {
      count = num_tile_rows(segment, row, std::min(kPairRows, end - row));
      const int first = row / per_kv_, last = (row + count - 1) / per_kv_;
      if (!step_.reads_any(step_.first_row[segment] + first, last - first + 1)) continue;
      if (row + count < end)
        fetch_rows_later(segment, (row + count) / per_kv_, kv_head_);
      else if (upcoming.segment >= 0)
        fetch_rows_later(upcoming.segment, upcoming.last - step_.start[upcoming.segment],
                         upcoming.kv_head);
      attend_tile(piece, {segment, row, {0, count}, -token}, upcoming, write);
      tile_.later_lines_per_part = 0;
    }
  }

  // Lets the parts of the present rows fetch the queries and values of the tokens of another tile.
  void fetch_rows_later(int segment, int token, int kv_head) {
    constexpr int kLinesPerPart = 8;
    LinesAhead& lines = tile_.later;
    lines.clear();
    tile_.later_lines_per_part = kLinesPerPart;
    const int last = std::min(step_.num_tokens[segment], token + kPairRows / per_kv_ + 2);
    for (token = std::max(token, 0); token < last; token++) {
      const int64_t row = step_.first_row[segment] + token;
      const auto add = [&](const Rows& rows, int head, int size) {
        const int64_t at = row * rows.row_stride + head * rows.head_stride;
        lines.add(static_cast<const Bf16*>(rows.data) + at, size * sizeof(Bf16));
      };
      add(query_, kv_head * per_kv_, per_kv_ * tile_.dim);
      add(value_, kv_head, tile_.vdim);
    }
  }

  // Counts the query rows of a segment from `first` on, at most `most`, that one tile may hold.
  int num_tile_rows(int segment, int first, int most) const {
    if (layer_.kv_format != kPlainPools) return most;  // codes are finite
    const int token = first / per_kv_, last_token = (first + most - 1) / per_kv_;
    const int64_t row = step_.first_row[segment] + token;
    const int num_tokens =
        num_tile_tokens<Bf16>(layer_, value_, kv_head_, row, last_token - token + 1);
    return std::min(most, (token + num_tokens) * per_kv_ - first);
  }

  // Computes items of one token each. The positions that they share are read once.
  template <class Write>
  void attend_group(const Piece& piece, const UpcomingRow& upcoming, const Write& write) {
    const auto queries_of = [&](int i, int first_row) -> PairQueries {
      return {step_.item_segment[piece.first_item + i], 0, {first_row, per_kv_}, i};
    };
    // With a window each row sees others of them.
    if (layer_.window || piece.num_items * per_kv_ > kPairRows) {
      for (int i = 0; i < piece.num_items; i++)
        attend_tile(piece, queries_of(i, 0), upcoming, write);
      return;
    }
    for (int i = 0; i < piece.num_items; i++) add_queries(queries_of(i, i * per_kv_));
    const auto [begin, end] = piece.positions();
    const Positions shared{begin, std::min(end, piece.num_shared)};
    const Positions own{std::max(begin, piece.num_shared), end};
    const RowRange rows{0, piece.num_items * per_kv_};
    const bool is_in_cache = fetch_own_later(piece, rows, shared, own);
    attend_pair_rows(tile_, rows, context_of(queries_of(0, 0)), shared);
    tile_.later_lines_per_part = 0;
    for (int i = 0; i < piece.num_items; i++) {
      const PairQueries queries = queries_of(i, i * per_kv_);
      UpcomingRow next = upcoming;
      if (i + 1 < piece.num_items) {
        const int segment = step_.item_segment[piece.first_item + i + 1];
        next = row_of(layer_, segment, kv_head_, step_.start[segment], own);
      }
      attend_pair_rows(tile_, queries.rows, context_of(queries), own, next, is_in_cache);
      finish(piece, queries, write);
    }
  }

  // Lets the parts of the shared positions fetch those that each token has alone, if these are few.
  // Returns whether they will.
  bool fetch_own_later(const Piece& piece, RowRange rows, Positions shared, Positions own) {
    constexpr int kMostLines = 64;  // for each part
    LinesAhead& lines = tile_.later;
    lines.clear();
    if (troika_has_tiles) return false;
    for (int item = piece.first_item; item < piece.first_item + piece.num_items; item++) {
      const int segment = step_.item_segment[item];
      const UpcomingRow row = row_of(layer_, segment, kv_head_, step_.start[segment], own);
      if (row.segment < 0) continue;
      if (row.last >= own.begin + kSpanSlots) return false;
      const PairContext context(tile_, layer_, step_, segment, kv_head_);
      context.add_to(lines, context.span(own.begin, row.earliest, row.last));
    }
    const int num_spans = (shared.end - shared.begin + kSpanSlots - 1) / kSpanSlots;
    const int num_parts = 2 * num_spans * ((rows.count + kMostPartRows - 1) / kMostPartRows);
    if (lines.num_lines() > int64_t{kMostLines} * num_parts) return false;
    tile_.later_lines_per_part = static_cast<int>(lines.num_lines() / std::max(num_parts, 1)) + 1;
    return true;
  }

  // Computes at most kPairRows query rows of a segment.
  template <class Write>
  void attend_tile(const Piece& piece, const PairQueries& queries, const UpcomingRow& upcoming,
                   const Write& write) {
    add_queries(queries);
    attend_pair_rows(tile_, queries.rows, context_of(queries), piece.positions(), upcoming);
    finish(piece, queries, write);
  }

  PairContext context_of(const PairQueries& queries) const {
    return PairContext(tile_, layer_, step_, queries.segment, kv_head_);
  }

  void add_queries(const PairQueries& queries) {
    for (int i = 0; i < queries.rows.count; i++) {
      const int r = queries.rows.first + i, token = (queries.first + i) / per_kv_;
      const int64_t row = step_.first_row[queries.segment] + token;
      const int head = kv_head_ * per_kv_ + (queries.first + i) % per_kv_;
      const Bf16* q = static_cast<const Bf16*>(query_.data) + row * query_.row_stride +
                      head * query_.head_stride;
      std::memcpy(tile_.query(r), q, tile_.dim * sizeof(Bf16));
      if (troika_uses_floats) widen_values(q, tile_.dim, tile_.wide_query(r));
      tile_.position[r] = step_.start[queries.segment] + token;
      tile_.visible_from[r] = first_visible(layer_, tile_.position[r]);
      tile_.biases.take<Bf16>(r, layer_, terms_, row, head, tile_.position[r]);
      tile_.ended.clear(r);
      tile_.begin_section(r);
    }
  }

  template <class Write>
  void finish(const Piece& piece, const PairQueries& queries, const Write& write) {
    for (int i = 0; i < queries.rows.count; i++) {
      const int r = queries.rows.first + i, token = (queries.first + i) / per_kv_;
      const int head = kv_head_ * per_kv_ + (queries.first + i) % per_kv_;
      const RowSums sums = tile_.ended.with_present(r, tile_.present(r), tile_.vdim);
      if (piece.is_whole())
        write(step_.first_row[queries.segment] + token, head, sums);
      else
        piece.keep(queries.number + token, head, sums);
    }
  }

  PairTile& tile_;
  const Layer& layer_;
  const Step& step_;
  const int kv_head_, per_kv_;
  const Rows &query_, &value_;
  const RowTerms& terms_;
};

// Keys and values of this step's tokens; two tokens of one pair of slots may be stored at once.
inline void store_pairs(Team& team, const Layer& layer, const Step& step, const Rows& key,
                        const Rows& value) {
  const int size = layer.block_size, dim = layer.head_dim, vdim = layer.value_head_dim;
  for (int64_t row = team.first(step.num_rows); row < team.last(step.num_rows); row++) {
    const int64_t block = step.slots[row] / size, slot = step.slots[row] % size;
    if (block == 0) continue;
    for (int h = 0; h < layer.num_kv_heads; h++) {
      const int64_t head = block * layer.num_kv_heads + h;
      const Bf16* k = static_cast<const Bf16*>(key.data) + row * key.row_stride +
                      h * key.head_stride;
      const Bf16* v = static_cast<const Bf16*>(value.data) + row * value.row_stride +
                      h * value.head_stride;
      Unit* keys = static_cast<Unit*>(layer.keys) + head * size * (dim / 2) +
                   slot / kLanes * (dim / 2) * kLanes + slot % kLanes;
      for (int d = 0; d < dim / 2; d++) std::memcpy(keys + d * kLanes, k + 2 * d, sizeof(Unit));
      Bf16* values = static_cast<Bf16*>(layer.values) +
                     (head * size / 2 + slot / 2) * vdim * 2 + slot % 2;
      for (int d = 0; d < vdim; d++) values[2 * d] = v[d];
    }
  }
}

// Stores keys and values, and attends; the caller ends the phase.
inline void attend_pairs(Team& team, const Layer& layer, const Step& step, const Rows& query,
                         const Rows& key, const Rows& value, const RowTerms& terms, Bf16* out,
                         int64_t out_stride, float scale, float softcap) {
  if (!layer.is_shared) {
    if (layer.kv_format == kPlainPools)
      store_pairs(team, layer, step, key, value);
    else
      with_codes(layer, [&](auto code) {
        store_codes<decltype(code), Bf16>(team, layer, step, key, value);
      });
    team.barrier();
  }
  static thread_local PairTile tile;
  tile.dim = layer.head_dim;
  tile.vdim = layer.value_head_dim;
  tile.biases.begin(layer, terms);
  tile.scale = scale;
  tile.softcap = softcap;
  tile.ahead.clear();
  tile.fetched = nullptr;
  const auto write = [&](int64_t row, int head, const RowSums& sums) {
    Bf16* o = out + row * out_stride + head * layer.value_head_dim;
    const float factor = averaging_factor<PowerOfTwo>(layer, terms, row, head, sums);
    for (int d = 0; d < layer.value_head_dim; d += kLanes) {
      // A sum of zeros may have either sign.
      const Vec v = load(sums.values + d) * factor + 0.0f;
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(o + d), (__m256i)_mm512_cvtneps_pbh((__m512)v));
    }
  };
  attend_pieces<PowerOfTwo>(
      team, layer, step,
      [&](const Piece& piece, int kv_head, const PieceOfHead& next) {
        UpcomingRow upcoming;
        if (next.exists()) upcoming = PairHead::first_row(layer, step, next.piece(), next.kv_head());
        PairHead(tile, layer, step, kv_head, query, value, terms)
            .attend_piece(piece, upcoming, write);
      },
      write);
}

}  // namespace

#endif

namespace {

// Attends over a layer's pools in their layout.
template <typename T>
void attend_any(Team& team, const Layer& layer, const Step& step, const Rows& query,
                const Rows& key, const Rows& value, const RowTerms& terms, T* out,
                int64_t out_stride, float scale, float softcap) {
#ifdef TROIKA_HAS_PAIRS
  if constexpr (sizeof(T) == sizeof(Bf16))
    if (layer.has_pairs)
      return attend_pairs(team, layer, step, query, key, value, terms, out, out_stride, scale,
                          softcap);
#endif
  attend(team, layer, step, query, key, value, terms, out, out_stride, scale, softcap);
}

}  // namespace
