// The arguments of attention: a layer, a step and rows. Mirrored by structures.py and attention/work.py.

#pragma once

#include <cstdint>
#include <cstring>

// The values of KVFormat in kv/kv_format.py.
constexpr int32_t kPlainPools = 0;  // values of the model's dtype
constexpr int32_t kInt8Pools = 1;   // int8 codes with scales (attention/coded_kv.h)
constexpr int32_t kFp8Pools = 2;    // fp8 codes with scales (attention/coded_kv.h)

extern "C" {

// One layer: its pools of keys and values, and its shape.
struct Layer {
  void* keys;
  void* values;
  int32_t num_heads, num_kv_heads, head_dim, value_head_dim;
  int32_t block_size;
  int32_t window;  // the number of positions that a token sees, including its own; 0: all
  int32_t is_bf16;
  int32_t has_pairs;  // the pools have the layout of attention/pair_tile.h, otherwise that of attention.h
  int32_t kv_format;
  int32_t is_latent;  // the pool has the layout of attention/latent_attention.h
  int32_t is_chunked;  // the window begins at the last multiple of its size
  int32_t is_shared;   // an earlier layer has stored the keys and values
  // Attention sinks, [num_heads]: scores that take part in the softmax without a value; null: none.
  const float* sinks;
  // Biases of scores, [num_heads][bias_stride], followed by 128 unused values; null: none. Columns are
  // positions of keys, or distances of keys from the row: the row's own key then has the column
  // bias_origin, and its predecessors have the columns before it.
  const float* biases;
  int64_t bias_stride;
  int64_t bias_origin;  // -1: columns are positions

  // The biases of the row at `position`, in one query head, indexed by the position of the key.
  const float* biases_of(int head, int position) const {
    return biases + head * bias_stride + (bias_origin < 0 ? 0 : bias_origin - position);
  }
};

// The work of one step, shared by all layers of a KV group. Segment s is the part of the step that
// belongs to one request: num_tokens[s] tokens, in the step's rows from first_row[s] on, at the
// positions from start[s] on. Its block b is tables[table_offset[s] + b], for all blocks that some
// token sees. Offsets may be negative.
struct Step {
  int32_t num_rows, item_size, num_pieces, num_splits;
  const int64_t* slots;
  const int32_t *first_row, *num_tokens, *start, *table_offset, *tables;
  // Item i is up to item_size tokens of segment item_segment[i], from token item_token[i] on.
  const int32_t *item_segment, *item_token;
  // Group g is the items [group_item[g], group_item[g + 1]): one item, or several items of one token
  // each, whose first group_shared[g] positions, a multiple of 64, are in the same blocks.
  const int32_t *group_item, *group_shared;
  // Threads take pieces. Piece p is a group with one section of its contexts, or with the whole contexts
  // if piece_section[p] is -1. In `sums`, the sums of a section follow those of piece_sums[p] tokens.
  const int32_t *piece_group, *piece_section, *piece_sums;
  // The first piece of each group that is split into sections. Its sections are successive pieces.
  const int32_t* split_piece;
  float* sums;
  // [num_rows], whether the result of a row is used; null: all are. Unused results may be skipped.
  const uint8_t* is_read;

  bool reads_any(int64_t first_row, int count) const {
    return is_read == nullptr || std::memchr(is_read + first_row, 1, count) != nullptr;
  }
};

// Rows of all heads, [num_rows][num_heads][dim]. Strides count elements; the last dimension is dense.
struct Rows {
  const void* data;
  int64_t row_stride, head_stride;
};

// Biases and sinks of each row, in addition to or instead of those of the layer.
struct RowTerms {
  // Biases, [num_rows][num_heads][num_distances], by the distance of the key from the row, in the
  // model's dtype; null data: none. Keys at a distance of num_distances or more have no bias.
  Rows biases;
  int32_t num_distances;
  const float* sinks;  // [num_rows][num_heads], in place of the layer's; null: none
};
}
