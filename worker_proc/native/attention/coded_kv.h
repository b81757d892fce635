// Quantized KV cache: keys and values as 8-bit codes (int8 or fp8 e4m3), with a float32 scale for each
// token and KV head.
//
// A scale depends on the values of its token and head alone. Every code is exactly a bfloat16 value. A
// token with values that are not finite has the scale NaN and codes of zero. Layout of a pool: for each
// block and KV head the codes of all slots, in the order of the plain layout, followed by the scales,
// [block_size]. Stored by attention.h and pair_attention.h.

#pragma once

#include "pointwise.h"
#include "attention/sections.h"

namespace {

// An integer from -127 to 127.
struct Int8Code {
  static constexpr float kMax = 127.0f;
  int8_t bits;
};

// fp8 e4m3: a sign bit, four exponent bits and three mantissa bits.
struct Fp8Code {
  static constexpr float kMax = 448.0f;
  static constexpr uint32_t kSign = 0x80, kMagnitude = 0x7f;
  static constexpr uint32_t kMinNormal = 8;  // its exponent is -6; smaller codes are multiples of 2^-9
  uint8_t bits;
};

template <class T>
constexpr bool kIsCode = std::is_same_v<T, Int8Code> || std::is_same_v<T, Fp8Code>;

// Calls f with a value of the code type of a layer's pools.
template <class F>
void with_codes(const Layer& layer, const F& f) {
  if (layer.kv_format == kInt8Pools) return f(Int8Code{});
  f(Fp8Code{});
}

// The size of one head of a block, in elements of the pool.
template <class T>
int64_t head_size(int num_slots, int dim) {
  return static_cast<int64_t>(num_slots) * (dim + (kIsCode<T> ? sizeof(float) : 0));
}

inline VecBits encode(Vec v, float inverse, Int8Code) {
  return nearest_whole(v, inverse);
}

// Rounds v · inverse to the nearest code, ties to even.
inline VecBits encode(Vec v, float inverse, Fp8Code) {
  constexpr int kLost = 23 - 3, kBias = 127 - 7;
  const VecBits bits = (VecBits)(v * inverse), magnitude = bits & 0x7fffffff;
  const VecBits normal =
      ((magnitude + ((1 << (kLost - 1)) - 1) + (magnitude >> kLost & 1)) >> kLost) - (kBias << 3);
  const VecBits below = nearest_whole((Vec)magnitude, 0x1p9f);
  return (magnitude < bits_of(0x1p-6f) ? below : normal) | (bits >> 24 & Fp8Code::kSign);
}

// Quantizes one token's key or value of one head, [size], and returns the scale. `codes` must have room
// for whole vectors.
template <class Code, typename T>
float encode_row(const T* x, int size, uint8_t* codes) {
  constexpr float kMinMagnitude = 1e-30f;
  VecBits most{};
  for_vectors(size, [&](int i, auto count) {
    const VecBits magnitude = (VecBits)load_any(x + i, count) & 0x7fffffff;
    most = magnitude > most ? magnitude : most;
  });
  uint32_t bits = 0;
  for (int lane = 0; lane < kLanes; lane++) bits = std::max<uint32_t>(bits, most[lane]);
  const float greatest = float_of(bits);
  const bool is_finite = greatest <= std::numeric_limits<float>::max();
  if (!is_finite || greatest <= kMinMagnitude) {
    std::memset(codes, 0, size);
    return is_finite ? 0.0f : std::nanf("");
  }
  const float inverse = Code::kMax / greatest;
  for_vectors(size, [&](int i, auto count) {
    const VecCodes low = low_bytes(encode(load_any(x + i, count), inverse, Code{}));
    std::memcpy(codes + i, &low, sizeof(low));
  });
  return greatest / Code::kMax;
}

// The offsets of a token's codes within its head of a block: of the first pair of codes, the stride
// from pair to pair, and the stride within a pair.
struct CodeOffsets {
  int64_t first, pair_step, step;

  static CodeOffsets of_keys(const Layer& layer, int slot) {
    if (!layer.has_pairs) return {slot, 2 * layer.block_size, layer.block_size};
    return {slot / kLanes * kLanes * layer.head_dim + slot % kLanes * 2, 2 * kLanes, 1};
  }

  static CodeOffsets of_values(const Layer& layer, int slot) {
    if (!layer.has_pairs) return {slot * layer.value_head_dim, 2, 1};
    return {slot / 2 * 2 * layer.value_head_dim + slot % 2, 4, 2};
  }

  void write(const uint8_t* codes, int size, uint8_t* block) const {
    uint8_t* to = block + first;
    int i = 0;
    for (; i + 1 < size; i += 2, to += pair_step) {
      to[0] = codes[i];
      to[step] = codes[i + 1];
    }
    if (i < size) to[0] = codes[i];
  }
};

// Quantizes and stores the keys and values of this step's tokens, [num_rows][num_kv_heads][dim].
template <class Code, typename T>
void store_codes(Team& team, const Layer& layer, const Step& step, const Rows& key,
                 const Rows& value) {
  alignas(64) uint8_t codes[kMaxDim];
  const int size = layer.block_size;
  const auto store_row = [&](const Rows& rows, int64_t row, int head, int dim, void* pool,
                             const CodeOffsets& offsets) {
    const int64_t block = step.slots[row] / size, slot = step.slots[row] % size;
    const T* x = static_cast<const T*>(rows.data) + row * rows.row_stride + head * rows.head_stride;
    uint8_t* to = static_cast<uint8_t*>(pool) +
                  (block * layer.num_kv_heads + head) * head_size<Code>(size, dim);
    const float scale = encode_row<Code>(x, dim, codes);
    offsets.write(codes, dim, to);
    std::memcpy(to + size * dim + slot * sizeof(float), &scale, sizeof(float));
  };
  for (int64_t row = team.first(step.num_rows); row < team.last(step.num_rows); row++) {
    if (step.slots[row] / size == 0) continue;
    const int slot = step.slots[row] % size;
    const CodeOffsets of_keys = CodeOffsets::of_keys(layer, slot);
    const CodeOffsets of_values = CodeOffsets::of_values(layer, slot);
    for (int h = 0; h < layer.num_kv_heads; h++) {
      store_row(key, row, h, layer.head_dim, layer.keys, of_keys);
      store_row(value, row, h, layer.value_head_dim, layer.values, of_values);
    }
  }
}

inline float widen(Int8Code code) { return code.bits; }
inline float widen(Fp8Code code) {
  const uint32_t magnitude = code.bits & Fp8Code::kMagnitude;
  const float size = magnitude < Fp8Code::kMinNormal ? magnitude * 0x1p-9f
                                                       : float_of((magnitude << 20) + (120u << 23));
  return code.bits & Fp8Code::kSign ? -size : size;
}

inline Part part_at(const Int8Code* p) { return __builtin_convertvector(part_of_bytes(p), Part); }

inline Part part_at(const Fp8Code* p) {
  const PartBits codes = (PartBits)part_of_bytes(p), magnitude = codes & Fp8Code::kMagnitude;
  const PartBits normal = (magnitude << 20) + (120u << 23);
  const PartBits below = (PartBits)(__builtin_convertvector((PartInt)magnitude, Part) * 0x1p-9f);
  const PartBits size = magnitude < Fp8Code::kMinNormal ? below : normal;
  return (Part)(size | (codes & Fp8Code::kSign) << 24);
}

}  // namespace
