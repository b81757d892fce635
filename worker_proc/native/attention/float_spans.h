// The loop over the spans of a context in paged pools: a tile attends to one span after another.
//
// Register tiles read strips of whole blocks in place. Spans that are not in whole vectors, that hold
// codes, or that several register tiles would widen slowly are copied as float32. Called by attention.h.

#pragma once

#include "attention/coded_kv.h"
#include "attention/float_tile.h"

namespace {

// Prefetches memory for reads, or for writes where kWrite is 1. Always inlined, because GCC removes a
// call that has no effect but prefetches.
template <int kWrite>
[[gnu::always_inline]] inline void prefetch(const void* begin, int64_t num_bytes) {
  const char* p = static_cast<const char*>(begin);
  for (int64_t i = 0; i < num_bytes; i += 64) __builtin_prefetch(p + i, kWrite);
}

// Consecutive slots of a block, for one head: keys, [dim][block size], and values, [slot][vdim]. Codes
// have scales, which need not be aligned.
template <typename T>
struct Slots {
  const T *keys, *values;
  const void *key_scales, *value_scales;
  int count;
};

// The pools' blocks of a segment's context, for one head.
template <typename T>
class HeadBlocks {
 public:
  HeadBlocks(const Layer& layer, const Step& step, int segment, int kv_head)
      : layer_(layer), blocks_(step.tables + step.table_offset[segment]), kv_head_(kv_head) {}

  int block_size() const { return layer_.block_size; }

  // The slots from a position on, up to the end of the strip, of the block and of the context.
  Slots<T> slots(int position, int last) const {
    const int size = layer_.block_size, slot = position % size;
    const T *const keys = keys_of(position / size), *const values = values_of(position / size);
    Slots<T> found{keys + slot, values + slot * layer_.value_head_dim, nullptr, nullptr,
                   std::min({kLanes - position % kLanes, size - slot, last - position + 1})};
    if constexpr (kIsCode<T>) {
      found.key_scales = keys + size * layer_.head_dim + slot * sizeof(float);
      found.value_scales = values + size * layer_.value_head_dim + slot * sizeof(float);
    }
    return found;
  }

  // Prefetches the blocks of the positions [begin, end). They are scattered over the pool, so the
  // hardware prefetcher cannot predict them.
  void prefetch_blocks(int begin, int end) const {
    const int size = layer_.block_size;
    for (int block = (begin + size - 1) / size; block < (end + size - 1) / size; block++) {
      prefetch<0>(keys_of(block), head_size<T>(size, layer_.head_dim) * sizeof(T));
      prefetch<0>(values_of(block), head_size<T>(size, layer_.value_head_dim) * sizeof(T));
    }
  }

 private:
  int64_t head_in(int block) const {
    return int64_t{blocks_[block]} * layer_.num_kv_heads + kv_head_;
  }
  const T* keys_of(int block) const {
    return static_cast<const T*>(layer_.keys) +
           head_in(block) * head_size<T>(layer_.block_size, layer_.head_dim);
  }
  const T* values_of(int block) const {
    return static_cast<const T*>(layer_.values) +
           head_in(block) * head_size<T>(layer_.block_size, layer_.value_head_dim);
  }

  const Layer& layer_;
  const int32_t* const blocks_;
  const int kv_head_;
};

// A float32 copy of a span.
struct SpanCopy {
  alignas(64) float keys[kFloatSpan * kMaxDim];    // [strip][dim][16]
  alignas(64) float values[kFloatSpan * kMaxDim];  // [slot][padded_vdim]

  // Copies the positions from `first` on, which is in the first strip. Earlier slots of that strip,
  // whose blocks may be those of another request, get values of zero.
  template <typename T>
  Span<float> take(const HeadBlocks<T>& blocks, const SpanExtent& extent, int first,
                   const Tile& tile) {
    const int begin = extent.base + extent.first_strip * kLanes;
    if (first > begin)
      std::memset(values_at(begin - extent.base, tile), 0,
                  (first - begin) * tile.padded_vdim * sizeof(float));
    const int last = extent.base + extent.count - 1;
    for (int position = first, count; position <= last; position += count) {
      const Slots<T> slots = blocks.slots(position, last);
      count = slots.count;
      const int at = position - extent.base;
      const auto scaled_key = [&](auto x, int, int i) {
        return x * scales_at(x, static_cast<const char*>(slots.key_scales) + i * sizeof(float));
      };
      const auto scaled_value = [&](auto x, int i, int) {
        return x * scales_at(float{},
                             static_cast<const char*>(slots.value_scales) + i * sizeof(float));
      };
      float* const to = keys + at / kLanes * kLanes * tile.dim + at % kLanes;
      copy_rows(slots.keys, blocks.block_size(), tile.dim, count, to, kLanes, 0, scaled_key);
      copy_rows(slots.values, tile.vdim, count, tile.vdim, values_at(at, tile), tile.padded_vdim,
                tile.padded_vdim - tile.vdim, scaled_value);
    }
    Span<float> span{extent, kLanes, tile.padded_vdim, {}, {}};
    for (int strip = 0; strip < kStrips; strip++) {
      span.keys[strip] = keys + strip * kLanes * tile.dim;
      span.values[strip] = values_at(strip * kLanes, tile);
    }
    return span;
  }

 private:
  float* values_at(int slot, const Tile& tile) { return values + slot * tile.padded_vdim; }

  static Part scales_at(Part, const void* scales) {
    return part_at(static_cast<const float*>(scales));
  }
  static float scales_at(float, const void* scale) {
    float out;
    std::memcpy(&out, scale, sizeof out);
    return out;
  }

  // Copies rows of `width` values, followed by `num_zeros` zeros. Calls scaled(code, row, index in the
  // row) for codes.
  template <typename T, class Scaled>
  static void copy_rows(const T* from, int stride, int num_rows, int width, float* to, int to_stride,
                        int num_zeros, const Scaled& scaled) {
    for (int row = 0; row < num_rows; row++, from += stride, to += to_stride) {
      int i = 0;
      for (; i + kPartLanes <= width; i += kPartLanes) {
        Part part = part_at(from + i);
        if constexpr (kIsCode<T>) part = scaled(part, row, i);
        save_part(part, to + i);
      }
      for (; i < width; i++) {
        to[i] = widen(from[i]);
        if constexpr (kIsCode<T>) to[i] = scaled(to[i], row, i);
      }
      for (; i < width + num_zeros; i++) to[i] = 0.0f;
    }
  }
};

// Whether register tiles widen bfloat16 while they multiply. AVX2 does so at almost no cost.
constexpr bool kWidensInPlace = kPartLanes < kLanes;

// Attends from rows of a tile to a segment's positions, span by span.
template <typename T>
void attend_context(Tile& tile, RowRange rows, const Layer& layer, const Step& step, int segment,
                    int kv_head, Positions positions, SpanCopy& copy) {
  const HeadBlocks<T> blocks(layer, step, segment, kv_head);
  const int size = layer.block_size;
  const int last = std::min(tile.position[rows.first + rows.count - 1], positions.end - 1);
  const int earliest = std::max(tile.visible_from[rows.first], positions.begin);
  // The blocks before that of the earliest position may have been freed.
  const int first = earliest / size * size;
  const bool is_whole = !kIsCode<T> && size % kLanes == 0 && tile.vdim == tile.padded_vdim &&
                        (sizeof(T) == sizeof(float) || kWidensInPlace || rows.count <= kRegisterRows);
  for (int base = earliest / kFloatSpan * kFloatSpan; base <= last; base += kFloatSpan) {
    const int next = base + kFloatSpan;
    const int first_strip = std::max(earliest - base, 0) / kLanes;
    const SpanExtent extent{base, first_strip, std::min(last - base + 1, kFloatSpan)};
    if (next <= last) blocks.prefetch_blocks(next, std::min(next + kFloatSpan, last + 1));
    if constexpr (!kIsCode<T>) {
      if (is_whole) {
        Span<T> span{extent, size, tile.vdim, {}, {}};
        for (int strip = first_strip; strip < extent.num_strips(); strip++) {
          const Slots<T> slots = blocks.slots(base + strip * kLanes, last);
          span.keys[strip] = slots.keys;
          span.values[strip] = slots.values;
        }
        attend_span(tile, rows, span);
      }
    }
    if (!is_whole) {
      const int copied_from = std::max(base + first_strip * kLanes, first);
      attend_span(tile, rows, copy.take(blocks, extent, copied_from, tile));
    }
    if (next % kSectionSlots == 0 && next <= last + 1) tile.end_sections(rows);
  }
}

}  // namespace
