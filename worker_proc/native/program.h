// The program of a model's forward: instructions over buffers, written by
// worker_proc/decoder/program.py.
//
// The program is written once, when a model is loaded. A buffer has one row for each token of the
// step. For each step, a Run supplies the buffers, the tokens and the attention's work. Mirrored by
// structures.py and executed by decoder.cpp.

#pragma once

#include "exchange.h"
#include "products/low_rank.h"
#include "step.h"

extern "C" {

// The kinds of instructions. The comment of each function of Executor defines one.
enum Kind : int32_t {
  kNormalize,     // RMS norm
  kProject,       // product with a packed weight, with an Epilogue
  kRotate,        // rotary embedding, with optional norms of heads
  kAttend,        // stores keys and values, and attends
  kAdd,           // addition to the residual
  kChoose,        // routing of experts
  kGather,        // sorts rows by expert
  kExperts,       // products of experts
  kCombine,       // weighted sum of experts
  kGate,          // gated activation, after kSplit
  kCode,          // quantization of rows
  kEmbed,         // embedding
  kKeep,          // moves the rows that get logits to the front
  kProjectHeads,  // product with a weight for each head
  kPermute,       // permutation of columns
  kShrink,        // LoRA: inner values
  kExpand,        // LoRA: outputs
  kAddRanks,      // all-reduce among ranks
};

// What a projection does with its products, in the registers.
enum Epilogue : int32_t {
  kStore,     // target = product
  kAddTo,     // target += factor * product
  kActivate,  // a pair of panels holds gates and factors (up): target = f(gate) * up
  kSplit,     // a pair of panels holds gates and factors: target = gate, and up from a column on
  kApply,     // target = f(product)
};

// The dimensions that the rotary embedding rotates together.
enum Rotation : int32_t {
  kHalves,  // dimension d and d + num_rotated / 2
  kPairs,   // dimensions 2d and 2d + 1
  kNone,
};

// Rows of values of the model's dtype.
struct Buffer {
  void* data;
  int64_t stride;  // bytes between rows: a multiple of 64; outside of programs, of 4
};

// One instruction. Sizes and columns count values. A kind uses only some of the fields.
struct Instruction {
  int32_t kind;
  int32_t source, target;  // indices of buffers
  int32_t size, column;    // a part of a row: its number of values and first column
  int32_t epilogue, activation;
  int32_t rounds_first;    // a norm rounds before the multiplication by its weight
  int32_t num_heads, num_kv_heads, head_dim, num_rotated, rotation;
  int32_t angles, has_wide_angles;  // the index of the angles, and whether they are float32
  int32_t group;                    // the KV group of an attention layer
  int32_t num_experts, num_chosen;  // experts, and experts of one row
  int32_t choices;                  // index of the buffer with the choices of each row
  int32_t normalizes, rounds_weights;  // Weighting of products/experts.h
  // The rows are those that kKeep has kept. For kAttend, which precedes kKeep: results of other rows are
  // not used.
  int32_t of_kept;
  int32_t num_outputs, target_dim;  // of each head: its outputs, and its stride in the target
  int32_t joins_next;  // no barrier: the next instruction reads only results of the same thread, or none
  float factor, epsilon, scale, softcap;
  // Bounds of kActivate, or 0: gate <= limit and |up| <= limit; with alpha, the result is
  // gate * sigmoid(alpha * gate) * (up + 1).
  float limit, alpha;
  int32_t format;  // Format (products/weights.h) of a packed weight
  int32_t scale_type, zero, group_inputs, section_inputs;  // of grouped codes
  int64_t num_units, num_pairs;
  const void *weight, *scales;
  const uint8_t* zeros;
  const void* minimums;
  const uint16_t *scale_units, *minimum_units;
  const float* table;
  const float *bias, *query_norm, *key_norm;
  const Layer* layer;
};

// A range of instructions that one call executes.
struct Program {
  const Instruction* instructions;
  int32_t num_instructions;
  int32_t is_bf16;
  // Other calls execute the first num_done instructions, and num_later instructions after the last one.
  int32_t num_done, num_later;
};

// The data of one step.
struct Run {
  const Buffer* buffers;
  const Step* const* steps;     // one for each KV group
  const void* const* cosines;   // for each index of angles: [num_rows][num_rotated], or tables
  const void* const* sines;
  // For a program that begins with the embedding, otherwise null: the tokens and their positions,
  // [num_rows], which are rows of the tables of angles, and the rows that get logits, [num_kept].
  const int64_t *tokens, *positions, *kept;
  const Adaptation* adaptation;  // for a program with kShrink and kExpand
  Exchange* exchange;            // for a program with kAddRanks
  int32_t num_rows, num_kept;
};

// Executes a program over one step (decoder.cpp). Returns the number of instructions, or that of the
// instruction at which it has stopped because a rank is missing.
int32_t troika_execute(const Program* program, const Run* run);
}

namespace {

// The number of rows that an instruction computes.
inline int32_t num_rows_of(const Instruction& i, const Run& run) {
  return i.of_kept ? run.num_kept : run.num_rows;
}

}  // namespace
