// A tile of query rows, and a span of keys and values: the data of attention in bfloat16.
//
// Layout of the pools, for heads of a multiple of 32 dimensions and blocks of a multiple of 16 slots:
// keys [block][kv_head][slot / 16][dim / 2][16][2], values [block][kv_head][slot / 2][dim][2]. These
// are VNNI layouts: a Unit is a pair of bfloat16, and 16 Units are a vector and a row of an AMX tile.
// A group is 16 slots of a block, and a span is four groups.

#pragma once

#include "attention/attention.h"
#include "attention/prefetch_queue.h"
#include "products/products.h"

#ifdef __AVX512BF16__

namespace {

constexpr int kSpanSlots = 64;                    // slots of a span
constexpr int kSpanGroups = kSpanSlots / kLanes;  // groups of 16 slots in a span
constexpr int kGroupPairs = kLanes / 2;           // pairs of slots in a group
constexpr int kPairRows = 32;                     // query rows of a PairTile
constexpr int kHalfRows = kPairRows / 2;          // rows of an AMX tile
constexpr int kLinesPerStep = 4;  // cache lines prefetched in each iteration of an inner loop
constexpr float kLog2E = 1.44269504f;
// A running maximum is raised when a score exceeds it by more than this binary logarithm of a weight.
constexpr float kRaiseThresholdLog2 = 16.0f;

// Each row of a group has ranges of keys, values and the scales of both.
static_assert(kPairRows * kSpanGroups * 4 <= PrefetchQueue::kMaxRanges);

// 2^x for x <= kRaiseThresholdLog2, with a relative error of at most 3e-6. Subnormal results are 0.
inline __m512 power_of_two(__m512 x) {
  const __mmask16 is_normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  // Adding kWhole rounds to the nearest integer, which the lowest bits of the sum then hold.
  const __m512 whole = _mm512_add_ps(x, _mm512_set1_ps(kWhole));
  const __m512 rest = _mm512_sub_ps(x, _mm512_sub_ps(whole, _mm512_set1_ps(kWhole)));
  __m512 y = _mm512_set1_ps(9.5701022e-3f);
  for (const float c : {5.5917863e-2f, 2.4024744e-1f, 6.9312179e-1f, 9.9999928e-1f})
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(c));
  const __m512i exponent = _mm512_slli_epi32((__m512i)whole, 23);
  return (__m512)_mm512_maskz_add_epi32(is_normal, (__m512i)y, exponent);
}

// The weight of a score relative to a greater one. Scores are in units of log2(e).
struct PowerOfTwo {
  static constexpr float kUnit = kLog2E;
  float operator()(float x) const { return _mm512_cvtss_f32(power_of_two(_mm512_set1_ps(x))); }
};

// Query rows of one KV head, and the state of their softmax. padded_vdim is vdim.
struct PairTile : OnlineSoftmax<kPairRows, PowerOfTwo> {
  int dim, vdim;         // dimensions of a key and of a value: multiples of 32, at most kMaxDim
  float scale, softcap;  // of scores; the scale is positive, and a soft cap of 0 means none
  TileBiases<kPairRows> biases;
  int position[kPairRows];       // of the row's token: the last position that the row sees
  int visible_from[kPairRows];   // the first position that the row sees
  alignas(64) float scores[2][kPairRows][kSpanSlots];  // of the current register tile and the next
  alignas(64) Bf16 weights[kPairRows][kSpanSlots];     // of the current span
  alignas(64) float wide_weights[kPairRows][kSpanSlots];  // the same, where products are float32
  alignas(64) Unit copied_values[kSpanGroups * kGroupPairs * kMaxDim];
  alignas(64) Unit widened_keys[kSpanGroups * kLanes * kMaxDim / 2];
  PrefetchQueue prefetch;                 // the spans after the current one
  const Unit* prefetched_keys = nullptr;  // the first keys of the context that was prefetched last
  PrefetchQueue deferred;                 // memory that is read after the current rows
  int deferred_lines_per_call = 0;        // prefetched by each call of a kernel

  // A query row, [dim / 2] units or [dim] floats.
  Unit* query(int row) { return queries_ + row * dim / 2; }
  float* wide_query(int row) { return wide_queries_ + row * dim; }

 private:
  alignas(64) Unit queries_[kPairRows * kMaxDim / 2];
  alignas(64) float wide_queries_[kPairRows * kMaxDim];  // where products are float32
};

// Converts bfloat16 to float32; the count is a multiple of 16.
inline void widen_to_floats(const Bf16* from, int count, float* to) {
  for (int i = 0; i < count; i += kLanes) save(load(from + i), to + i, kLanes);
}

// The keys and values of up to 64 positions of a context, in groups of 16 slots.
struct PairSpan {
  int base, count;              // the first position, a multiple of 64, and the number of positions
  int first_group, num_groups;  // rows see positions of groups [first_group, num_groups) only
  const Unit *keys[kSpanGroups], *values[kSpanGroups];  // of codes, until they are widened
  const float *key_scales[kSpanGroups], *value_scales[kSpanGroups];  // [16] each, of codes
};

}  // namespace

#endif
