// From the block table to spans: where a KV head has the keys and values of a context.
//
// A context is read in spans of 64 positions, from multiples of 64 on, whatever the block size is
// (a multiple of 16). The layout of the pools is in pair_tile.h, that of codes in coded_kv.h.

#pragma once

#include "attention/pair_tile.h"

#ifdef __AVX512BF16__

namespace {

// The context that a thread will probably read next: the positions [earliest, last] of a segment that
// its first row sees, in one KV head.
struct UpcomingRow {
  int segment = -1;  // negative: unknown
  int kv_head, earliest, last;
};

// The keys and values of one segment in one KV head of a layer.
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

  // The context of the upcoming row.
  PairContext of(const PairTile& tile, const UpcomingRow& row) const {
    return PairContext(tile, layer_, step_, row.segment, row.kv_head);
  }

  // The span from position `base` on, for rows that see the positions [earliest, last].
  PairSpan span(int base, int earliest, int last) const {
    PairSpan span;
    span.base = base;
    span.count = std::min(kSpanSlots, last - base + 1);
    span.first_group = std::max(0, earliest / kLanes - base / kLanes);
    span.num_groups = (span.count + kLanes - 1) / kLanes;
    // Groups past the context, and in blocks before the window, may have no valid block. Their scores
    // are masked, so the pointers refer to another group.
    const int first = earliest / layer_.block_size * groups_per_block_;
    for (int g = 0; g < kSpanGroups; g++) {
      const int group = std::clamp(base / kLanes + g, first, last / kLanes);
      const int64_t block = tables_[table_ + group / groups_per_block_];
      const int64_t head = block * layer_.num_kv_heads + kv_head_;
      const int index = group % groups_per_block_;
      span.keys[g] = keys_.data(head, index);
      span.values[g] = values_.data(head, index);
      span.key_scales[g] = keys_.scales(head, index);
      span.value_scales[g] = values_.scales(head, index);
    }
    return span;
  }

  // Queues the memory of a span for prefetching.
  void prefetch(const PairSpan& span, PrefetchQueue& queue) const {
    for (int g = span.first_group; g < span.num_groups; g++) {
      queue.push(span.keys[g], keys_.group_bytes);
      queue.push(span.values[g], values_.group_bytes);
      if (layer_.kv_format == kPlainPools) continue;
      queue.push(span.key_scales[g], kLanes * sizeof(float));
      queue.push(span.value_scales[g], kLanes * sizeof(float));
    }
  }

 private:
  // The addresses of groups in a pool. `head` is block * num_kv_heads + kv_head, and `index` is the
  // number of the group within the block.
  struct Groups {
    Groups(const Layer& layer, const void* pool, int dim)
        : pool(static_cast<const char*>(pool)),
          group_bytes(kLanes * dim * (layer.kv_format == kPlainPools ? sizeof(Bf16) : 1)),
          head_bytes(layer.kv_format == kPlainPools ? layer.block_size / kLanes * group_bytes
                                                    : head_size<Int8Code>(layer.block_size, dim)),
          code_bytes(layer.block_size * dim) {}

    const Unit* data(int64_t head, int index) const {
      return reinterpret_cast<const Unit*>(pool + head * head_bytes + index * group_bytes);
    }

    const float* scales(int64_t head, int index) const {
      return reinterpret_cast<const float*>(pool + head * head_bytes + code_bytes) + index * kLanes;
    }

    const char* const pool;
    const int64_t group_bytes, head_bytes, code_bytes;
  };

  const Layer& layer_;
  const Step& step_;
  const int32_t* tables_;
  const int64_t table_;  // offset in the tables; may be negative
  const int kv_head_, groups_per_block_;
  const Groups keys_, values_;
};

}  // namespace

#endif
