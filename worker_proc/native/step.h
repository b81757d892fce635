// What attention is given: a layer, a step and rows.

#pragma once

#include <cstdint>
#include <cstring>

// The numbers of KVFormat in kv_format.py.
constexpr int32_t kPlainPools = 0;  // values of the model's type
constexpr int32_t kInt8Pools = 1;   // codes, as in coded_kv.h
constexpr int32_t kFp8Pools = 2;

extern "C" {

// What one layer keeps from step to step.
struct Layer {
  void* keys;
  void* values;
  int32_t num_heads, num_kv_heads, head_dim, value_head_dim;
  int32_t block_size;
  int32_t window;  // 0: none; else the positions that a token sees, itself included
  int32_t is_bf16;
  int32_t has_pairs;  // the layout is that of pair_attention.h
  int32_t kv_format;
  int32_t is_latent;  // values are the first numbers of keys, as in latent_attention.h
  int32_t is_chunked;  // the window begins at a multiple of its size, where the token's chunk does
  int32_t is_shared;   // an earlier layer has stored the keys and values
  // For each head a score without a value, which adds to the weights of the softmax; null: none.
  const float* sinks;
  // For each head what is added to scores, [num_heads][bias_stride], with room for 128 more; null:
  // nothing. The columns are the positions of keys, or distances of keys from the row: then the
  // row's own key has the column bias_origin, and its predecessors the columns before it.
  const float* biases;
  int64_t bias_stride;
  int64_t bias_origin;  // -1: columns are positions

  // The biases of a row of a query head, by the position of the key.
  const float* biases_of(int head, int position) const {
    return biases + head * bias_stride + (bias_origin < 0 ? 0 : bias_origin - position);
  }
};

// One step, shared by its layers. Segment s computes num_tokens[s] tokens, which lie in the packed
// row from first_row[s] and in their text from start[s]; its block b is tables[table_offset[s] + b],
// for those blocks that the layer's window shows to any of its tokens. Offsets may be negative.
struct Step {
  int32_t num_rows, item_size, num_pieces, num_splits;
  const int64_t* slots;
  const int32_t *first_row, *num_tokens, *start, *table_offset, *tables;
  // An item is item_size tokens of a segment, or those that are left, from item_token[i] on.
  const int32_t *item_segment, *item_token;
  // Group g is the items from group_item[g] to group_item[g + 1]: one item, or several of one token
  // each whose first group_shared[g] positions, a multiple of 64, are in the same blocks.
  const int32_t *group_item, *group_shared;
  // Threads take pieces: a group with the whole of its contexts where piece_section[p] is -1, else with
  // one section of them. The sums of a section begin after those of piece_sums[p] tokens in `sums`.
  const int32_t *piece_group, *piece_section, *piece_sums;
  // The first of the successive sections of each group that is split, as a piece.
  const int32_t* split_piece;
  float* sums;
  // For each row whether its result is read; null: all are. Others need not be written.
  const uint8_t* is_read;

  bool reads_any(int64_t first_row, int count) const {
    return is_read == nullptr || std::memchr(is_read + first_row, 1, count) != nullptr;
  }
};

// Strides in elements; the last dimension is contiguous.
struct Rows {
  const void* data;
  int64_t row_stride, head_stride;
};

// What the scores of each row have beside those of its layer.
struct RowTerms {
  // Added to the score of a key, by its distance from the row, in the model's type; null data: nothing.
  // To keys that are num_distances or more positions before the row nothing is added.
  Rows biases;
  int32_t num_distances;
  const float* sinks;  // in place of the layer's, [row][num_heads]; null: none
};
}
