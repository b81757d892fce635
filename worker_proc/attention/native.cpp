// Attention over a paged KV cache on the CPU: the fast path behind attention/native.py.
//
// Compiled by itself (no torch headers) and called with plain pointers. A row's result depends on its
// query and its context alone: never on the rows, chunks or requests that it is computed with, since
// scores are summed in the order of the head's dimensions and contexts in the order of positions.
//
// Pools: keys [block][kv_head][dim][slot], so that 16 keys are scored at once without a horizontal
// sum; values [block][kv_head][slot][dim]. Block 0 is the null block and is never written.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace {

constexpr int kLanes = 16;
constexpr int kMaxDim = 512;
constexpr int kTileRows = 32;
constexpr float kNegInf = -std::numeric_limits<float>::infinity();

typedef float Vec __attribute__((vector_size(64), aligned(4)));
typedef int32_t VecInt __attribute__((vector_size(64), aligned(4)));
typedef uint32_t VecBits __attribute__((vector_size(64), aligned(4)));
typedef uint16_t VecHalf __attribute__((vector_size(32), aligned(2)));

struct Bf16 {
  uint16_t bits;
};

inline float widen(float x) { return x; }
inline float widen(Bf16 x) {
  uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

inline void narrow(float x, float& out) { out = x; }
inline void narrow(float x, Bf16& out) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  out.bits = x != x ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
inline Vec load(const Bf16* p) {
  VecBits bits = __builtin_convertvector(*reinterpret_cast<const VecHalf*>(p), VecBits) << 16;
  return reinterpret_cast<Vec&>(bits);
}

inline Vec splat(float x) { return x - Vec{}; }

inline Vec exp_of(Vec x) {
  x = x < -87.0f ? splat(-87.0f) : x;
  VecInt n = __builtin_convertvector(x * 1.44269504f - 0.5f, VecInt);  // x <= 0: rounds to nearest
  Vec whole = __builtin_convertvector(n, Vec);
  Vec r = x - whole * 0.693359375f;
  r = r + whole * 2.12194440e-4f;
  Vec y = splat(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  VecInt power = (n + 127) << 23;
  return y * reinterpret_cast<Vec&>(power);
}

inline Vec tanh_of(Vec x) {
  Vec size = x < 0.0f ? -x : x;
  Vec e = exp_of(size * -2.0f);
  Vec y = (1.0f - e) / (1.0f + e);
  return x < 0.0f ? -y : y;
}

template <typename Op>
inline float fold(Vec v, Op op) {
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; i++) v[i] = op(v[i], v[i + width]);
  return v[0];
}

}  // namespace

extern "C" {

// What one layer keeps from step to step.
struct Layer {
  void* keys;
  void* values;
  int32_t num_heads, num_kv_heads, head_dim, value_head_dim;
  int32_t block_size;
  int32_t window;  // 0: none
  int32_t is_bf16;
};

// One step, shared by its layers. Segment s computes num_tokens[s] tokens, which lie in the packed
// row from first_row[s] and in their text from start[s]; tables[table_offset[s]...] are its blocks.
struct Step {
  int32_t num_rows, num_segments;
  const int64_t* slots;
  const int32_t *first_row, *num_tokens, *start, *table_offset, *tables;
};

// Strides in elements; the last dimension is contiguous.
struct Rows {
  const void* data;
  int64_t row_stride, head_stride;
};
}

namespace {

template <typename T>
void store(const Layer& layer, const Step& step, const Rows& key, const Rows& value) {
  const int dim = layer.head_dim, vdim = layer.value_head_dim, size = layer.block_size;
#pragma omp for schedule(static)
  for (int row = 0; row < step.num_rows; row++) {
    const int64_t block = step.slots[row] / size, offset = step.slots[row] % size;
    if (block == 0) continue;
    for (int h = 0; h < layer.num_kv_heads; h++) {
      const int64_t head = block * layer.num_kv_heads + h;
      const T* k = static_cast<const T*>(key.data) + row * key.row_stride + h * key.head_stride;
      const T* v = static_cast<const T*>(value.data) + row * value.row_stride + h * value.head_stride;
      T* k_out = static_cast<T*>(layer.keys) + head * dim * size + offset;
      for (int d = 0; d < dim; d++) k_out[static_cast<int64_t>(d) * size] = k[d];
      std::memcpy(static_cast<T*>(layer.values) + (head * size + offset) * vdim, v, vdim * sizeof(T));
    }
  }
}

// Some query rows of one KV head, with the state of their softmax.
struct Tile {
  int num_rows, dim, vdim, padded_vdim;
  int position[kTileRows];
  float top[kTileRows], sum[kTileRows];
  alignas(64) float query[kTileRows * kMaxDim];
  alignas(64) float out[kTileRows * kMaxDim];
  alignas(64) float weight[kTileRows][kLanes];
};

template <typename T, int R>
void score(Tile& tile, int first, const T* keys, int stride) {
  Vec even[R], odd[R];
  for (int r = 0; r < R; r++) even[r] = odd[r] = splat(0.0f);
  const float* query = tile.query + first * tile.dim;
  int d = 0;
  for (; d + 1 < tile.dim; d += 2) {
    const Vec k0 = load(keys + static_cast<int64_t>(d) * stride);
    const Vec k1 = load(keys + static_cast<int64_t>(d + 1) * stride);
    for (int r = 0; r < R; r++) {
      even[r] += query[r * tile.dim + d] * k0;
      odd[r] += query[r * tile.dim + d + 1] * k1;
    }
  }
  if (d < tile.dim) {
    const Vec k0 = load(keys + static_cast<int64_t>(d) * stride);
    for (int r = 0; r < R; r++) even[r] += query[r * tile.dim + d] * k0;
  }
  for (int r = 0; r < R; r++) {
    const Vec sum = even[r] + odd[r];
    std::memcpy(tile.weight[first + r], &sum, sizeof(sum));
  }
}

// Turns the scores of the keys from `base` on into weights; false where the row sees none of them.
bool weigh(Tile& tile, int r, int base, int window, float softcap) {
  Vec s = load(tile.weight[r]);
  if (softcap > 0) s = tanh_of(s * (1.0f / softcap)) * softcap;
  const int low = window ? tile.position[r] - window + 1 : 0;
  const int high = tile.position[r];
  if (base < low || base + kLanes - 1 > high) {
    for (int i = 0; i < kLanes; i++)
      if (base + i < low || base + i > high) s[i] = kNegInf;
  }
  const float highest = fold(s, [](float a, float b) { return a > b ? a : b; });
  if (highest == kNegInf) return false;
  if (highest > tile.top[r]) {
    const float shrink = exp_of(splat(tile.top[r] - highest))[0];
    const float factor = tile.top[r] == kNegInf ? 0.0f : shrink;
    float* out = tile.out + r * tile.padded_vdim;
    for (int i = 0; i < tile.padded_vdim; i++) out[i] *= factor;
    tile.sum[r] *= factor;
    tile.top[r] = highest;
  }
  const Vec p = s == kNegInf ? splat(0.0f) : exp_of(s - tile.top[r]);
  std::memcpy(tile.weight[r], &p, sizeof(p));
  tile.sum[r] += fold(p, [](float a, float b) { return a + b; });
  return true;
}

template <typename T, int R, int C>
void add_values(Tile& tile, int first, int column, const T* values, int stride, int count) {
  Vec acc[R][C];
  float* out = tile.out + first * tile.padded_vdim + column;
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) acc[r][c] = load(out + r * tile.padded_vdim + c * kLanes);
  for (int k = 0; k < count; k++) {
    for (int c = 0; c < C; c++) {
      const Vec v = load(values + static_cast<int64_t>(k) * stride + column + c * kLanes);
      for (int r = 0; r < R; r++) acc[r][c] += tile.weight[first + r][k] * v;
    }
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++)
      *reinterpret_cast<Vec*>(out + r * tile.padded_vdim + c * kLanes) = acc[r][c];
}

template <typename T, int R>
void attend_rows(Tile& tile, int first, const T* keys, int key_stride, const T* values,
                 int value_stride, int base, int count, int window, float softcap) {
  score<T, R>(tile, first, keys, key_stride);
  bool any = false;
  for (int r = first; r < first + R; r++) {
    if (weigh(tile, r, base, window, softcap))
      any = true;
    else
      std::memset(tile.weight[r], 0, sizeof(tile.weight[r]));
  }
  if (!any) return;
  constexpr int kColumns = R > 4 ? 2 : 4;
  int column = 0;
  for (; column + kColumns * kLanes <= tile.padded_vdim; column += kColumns * kLanes)
    add_values<T, R, kColumns>(tile, first, column, values, value_stride, count);
  for (; column < tile.padded_vdim; column += kLanes)
    add_values<T, R, 1>(tile, first, column, values, value_stride, count);
}

// Lets the tile see `count` <= 16 keys that begin at position `base`.
template <typename T>
void attend_keys(Tile& tile, const T* keys, int key_stride, const T* values, int value_stride,
                 int base, int count, int window, float softcap) {
  int first = 0;
  for (; first + 8 <= tile.num_rows; first += 8)
    attend_rows<T, 8>(tile, first, keys, key_stride, values, value_stride, base, count, window,
                      softcap);
  switch (tile.num_rows - first) {
#define REST(R)                                                                               \
  case R:                                                                                     \
    attend_rows<T, R>(tile, first, keys, key_stride, values, value_stride, base, count, window, \
                      softcap);                                                               \
    break;
    REST(1) REST(2) REST(3) REST(4) REST(5) REST(6) REST(7)
#undef REST
  }
}

template <typename T>
void attend_context(Tile& tile, const Layer& layer, const int32_t* table, int kv_head,
                    float softcap) {
  const int size = layer.block_size, dim = tile.dim, vdim = tile.vdim;
  const int last = tile.position[tile.num_rows - 1];
  const int earliest = layer.window ? tile.position[0] - layer.window + 1 : 0;
  T padded_keys[kMaxDim * kLanes], padded_values[kMaxDim * kLanes];
  for (int block = earliest > 0 ? earliest / size : 0; block <= last / size; block++) {
    const int64_t head = static_cast<int64_t>(table[block]) * layer.num_kv_heads + kv_head;
    for (int offset = 0; offset < size && block * size + offset <= last; offset += kLanes) {
      const int base = block * size + offset;
      const int slots = size - offset < kLanes ? size - offset : kLanes;
      const int count = last - base + 1 < slots ? last - base + 1 : slots;
      if (base + slots <= earliest) continue;
      const T* keys = static_cast<const T*>(layer.keys) + head * dim * size + offset;
      const T* values = static_cast<const T*>(layer.values) + (head * size + offset) * vdim;
      int key_stride = size, value_stride = vdim;
      if (slots < kLanes) {
        std::memset(padded_keys, 0, sizeof(T) * dim * kLanes);
        for (int d = 0; d < dim; d++)
          std::memcpy(padded_keys + d * kLanes, keys + static_cast<int64_t>(d) * size,
                      sizeof(T) * slots);
        keys = padded_keys;
        key_stride = kLanes;
      }
      if (vdim != tile.padded_vdim) {
        std::memset(padded_values, 0, sizeof(T) * tile.padded_vdim * kLanes);
        for (int k = 0; k < count; k++)
          std::memcpy(padded_values + k * tile.padded_vdim, values + k * vdim, sizeof(T) * vdim);
        values = padded_values;
        value_stride = tile.padded_vdim;
      }
      // Slots past a short block belong to the next one: positions there are not these keys.
      const int window = layer.window;
      if (slots < kLanes) {
        attend_short(tile, keys, key_stride, values, value_stride, base, slots, count, window,
                     softcap);
      } else {
        attend_keys(tile, keys, key_stride, values, value_stride, base, count, window, softcap);
      }
    }
  }
}

}  // namespace
