// Linear layers in bfloat16 on CPUs with AMX; called by packed_linear.py.
//
// Every output is one chain of tile products over the inputs, 32 at a time, from the first to the
// last. The chain does not depend on the number of rows or on a row's place, so a row has the same
// bits in every batch.

#include "vec.h"

#if defined(__linux__) && defined(__AMX_BF16__) && defined(__AVX512F__)

#include <immintrin.h>
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

namespace {

constexpr int kTileRows = 16;           // rows of activations, or outputs, of one tile
constexpr int kTileInputs = 32;         // inputs of one tile
constexpr int kTileValues = 16 * 32;    // bfloat16 values of one tile: 1 KiB
constexpr int kPanelRows = 2 * kTileRows;
constexpr int kBlockPanels = 4;         // panels that share weights while these are in the cache

inline int64_t num_parts(int64_t size, int64_t part) { return (size + part - 1) / part; }

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t num_rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

struct Product {
  const Bf16* rows;     // [num_rows, num_inputs], rows `stride` apart
  int64_t stride;
  const Bf16* weight;   // packed: [outputs / 16, inputs / 32] tiles
  const float* bias;    // or null
  Bf16* out;            // [num_rows, num_outputs]
  int64_t num_rows, num_inputs, num_outputs;

  int64_t input_tiles() const { return num_parts(num_inputs, kTileInputs); }
  int64_t output_tiles() const { return num_parts(num_outputs, kTileRows); }
};

// Copies rows into tiles, with zeros past the last row and the last input.
void pack_rows(const Product& p, int64_t first_row, Bf16* panel) {
  const int64_t count = std::min<int64_t>(kPanelRows, p.num_rows - first_row);
  for (int64_t tile = 0; tile < p.input_tiles(); tile++) {
    const int64_t first = tile * kTileInputs;
    const size_t bytes = std::min<int64_t>(kTileInputs, p.num_inputs - first) * sizeof(Bf16);
    for (int64_t row = 0; row < kPanelRows; row++) {
      Bf16* to = panel + (tile * kPanelRows + row) * kTileInputs;
      if (row >= count || bytes < 64) std::memset(to, 0, 64);
      if (row < count) std::memcpy(to, p.rows + (first_row + row) * p.stride + first, bytes);
    }
  }
}

// Rounds one tile of sums and writes the rows and outputs that exist.
void save_tile(const Product& p, const float* sums, int64_t row, int64_t output) {
  const int64_t num_rows = std::min<int64_t>(kTileRows, p.num_rows - row);
  const int count = static_cast<int>(std::min<int64_t>(kLanes, p.num_outputs - output));
  const __mmask16 mask = static_cast<__mmask16>((1u << count) - 1);
  const __m512 bias = p.bias ? _mm512_maskz_loadu_ps(mask, p.bias + output) : _mm512_setzero_ps();
  for (int64_t i = 0; i < num_rows; i++) {
    __m512 sum = _mm512_loadu_ps(sums + i * kLanes);
    if (p.bias) sum = _mm512_add_ps(sum, bias);
    const __m256i half = (__m256i)_mm512_cvtneps_pbh(sum);
    _mm256_mask_storeu_epi16(p.out + (row + i) * p.num_outputs + output, mask, half);
  }
}

// Sums one or two tiles of rows times one or two tiles of outputs.
template <bool HasTwoRows, bool HasTwoOutputs>
void sum_tiles(const Product& p, const Bf16* panel, int64_t row, int64_t output_tile) {
  const int64_t num_tiles = p.input_tiles();
  const Bf16* weight = p.weight + output_tile * num_tiles * kTileValues;
  const Bf16* second = weight + num_tiles * kTileValues;
  _tile_zero(0);
  if (HasTwoOutputs) _tile_zero(1);
  if (HasTwoRows) _tile_zero(2);
  if (HasTwoRows && HasTwoOutputs) _tile_zero(3);
  for (int64_t tile = 0; tile < num_tiles; tile++) {
    const Bf16* rows = panel + tile * kPanelRows * kTileInputs;
    _tile_loadd(4, rows, 64);
    _tile_loadd(6, weight + tile * kTileValues, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (HasTwoOutputs) {
      _tile_loadd(7, second + tile * kTileValues, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (HasTwoRows) {
      _tile_loadd(5, rows + kTileRows * kTileInputs, 64);
      _tile_dpbf16ps(2, 5, 6);
      if (HasTwoOutputs) _tile_dpbf16ps(3, 5, 7);
    }
  }
  alignas(64) float sums[4][kTileRows * kLanes];
  const int64_t output = output_tile * kTileRows;
  _tile_stored(0, sums[0], 64);
  save_tile(p, sums[0], row, output);
  if (HasTwoOutputs) {
    _tile_stored(1, sums[1], 64);
    save_tile(p, sums[1], row, output + kTileRows);
  }
  if (HasTwoRows) {
    _tile_stored(2, sums[2], 64);
    save_tile(p, sums[2], row + kTileRows, output);
  }
  if (HasTwoRows && HasTwoOutputs) {
    _tile_stored(3, sums[3], 64);
    save_tile(p, sums[3], row + kTileRows, output + kTileRows);
  }
}

// Computes outputs [first_tile, last_tile) of the rows of one block.
void multiply_block(const Product& p, int64_t first_row, int64_t first_tile, int64_t last_tile,
                    Bf16* panels) {
  const int64_t panel_values = p.input_tiles() * kPanelRows * kTileInputs;
  const int64_t num_rows = std::min<int64_t>(kBlockPanels * kPanelRows, p.num_rows - first_row);
  const int64_t num_panels = num_parts(num_rows, kPanelRows);
  for (int64_t i = 0; i < num_panels; i++)
    pack_rows(p, first_row + i * kPanelRows, panels + i * panel_values);
  for (int64_t tile = first_tile; tile < last_tile; tile += 2) {
    const bool has_two_outputs = tile + 1 < last_tile;
    for (int64_t i = 0; i < num_panels; i++) {
      const int64_t row = first_row + i * kPanelRows;
      const bool has_two_rows = p.num_rows - row > kTileRows;
      const auto sum = has_two_rows ? (has_two_outputs ? sum_tiles<true, true> : sum_tiles<true, false>)
                                    : (has_two_outputs ? sum_tiles<false, true> : sum_tiles<false, false>);
      sum(p, panels + i * panel_values, row, tile);
    }
  }
}

void multiply(const Product& p) {
  if (p.num_rows == 0) return;
  const int64_t block_rows = kBlockPanels * kPanelRows;
  const int64_t num_blocks = num_parts(p.num_rows, block_rows);
  const int64_t pairs = num_parts(p.output_tiles(), 2);
  const int64_t num_threads = omp_get_max_threads();
  // With few rows the threads share the outputs; with many, each has rows of its own.
  const int64_t num_chunks = std::min(pairs, num_parts(2 * num_threads, num_blocks));
  const int64_t chunk = 2 * num_parts(pairs, num_chunks);
#pragma omp parallel num_threads(num_threads) if (p.num_inputs * p.num_outputs * p.num_rows > 65536)
  {
    const TileConfig config;
    _tile_loadconfig(&config);
    static thread_local std::vector<Bf16> panels;
    panels.resize(kBlockPanels * p.input_tiles() * kPanelRows * kTileInputs);
#pragma omp for schedule(dynamic) collapse(2)
    for (int64_t block = 0; block < num_blocks; block++)
      for (int64_t i = 0; i < num_chunks; i++)
        multiply_block(p, block * block_rows, std::min(i * chunk, p.output_tiles()),
                       std::min((i + 1) * chunk, p.output_tiles()), panels.data());
    _tile_release();
  }
}

}  // namespace

// Requests the tile registers from the kernel; returns whether this process may use them.
extern "C" int32_t troika_enable_tiles() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// Packs a weight, [num_outputs, num_inputs], into tiles: pairs of inputs side by side.
extern "C" void troika_pack_weight(const void* weight, int32_t num_outputs, int32_t num_inputs,
                                   void* packed) {
  const Bf16* from = static_cast<const Bf16*>(weight);
  const int64_t num_tiles = num_parts(num_inputs, kTileInputs);
  const int64_t num_rows = num_parts(num_outputs, kTileRows) * kTileRows;
#pragma omp parallel for schedule(static)
  for (int64_t output = 0; output < num_rows; output++) {
    Bf16* tiles = static_cast<Bf16*>(packed) + output / kTileRows * num_tiles * kTileValues;
    const int64_t column = output % kTileRows;
    for (int64_t input = 0; input < num_tiles * kTileInputs; input++) {
      const int64_t place = input / kTileInputs * kTileValues + input % kTileInputs / 2 * 32;
      const bool exists = output < num_outputs && input < num_inputs;
      tiles[place + 2 * column + input % 2] =
          exists ? from[output * num_inputs + input] : Bf16{0};
    }
  }
}

// out = rows · weightᵀ + bias; `weight` is packed, `bias` float32 or null.
extern "C" void troika_linear(const void* rows, int64_t stride, const void* weight,
                              const float* bias, void* out, int32_t num_rows, int32_t num_inputs,
                              int32_t num_outputs) {
  multiply({static_cast<const Bf16*>(rows), stride, static_cast<const Bf16*>(weight), bias,
            static_cast<Bf16*>(out), num_rows, num_inputs, num_outputs});
}

#else

extern "C" int32_t troika_enable_tiles() { return 0; }
extern "C" void troika_pack_weight(const void*, int32_t, int32_t, void*) {}
extern "C" void troika_linear(const void*, int64_t, const void*, const float*, void*, int32_t,
                              int32_t, int32_t) {}

#endif
