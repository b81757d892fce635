// LoRA: low-rank products that are added to the outputs of projections, for rows with different
// adapters.
//
// Each row is computed separately: an inner value is one chain of sums over the inputs, and an output
// one chain over the inner values. Its result does not depend on other rows and their adapters, and
// nothing is padded to the greatest rank. Multiply-adds are intrinsics, because the compiler could
// fuse a product and a sum in one place and not in another. Used by decoder.cpp; low_rank.cpp copies
// the matrices.

#pragma once

#include "pointwise.h"

#include <algorithm>

extern "C" {

// The matrices of an adapter for one projection, which add scale * up * (down * row). Each inner value
// has a line of `down`, [num_inputs], and a line of `up`, [num_outputs]. Layouts: down [rank /
// kInnerBlock] [num_inputs / kChunk][kInnerBlock][kChunk], up [num_outputs / kChunk][rank][kChunk],
// padded with zeros. Rank 0 means that the adapter has no matrices here.
struct LowRank {
  const void *down, *up;
  int32_t rank;
  float scale;
};

// The rows of a step that have the same adapter. A site is the index of a projection in `sites`.
struct AdaptedRows {
  const int32_t* rows;
  const LowRank* sites;
  int64_t num_rows;
};

// The adapters of one step, and memory for inner values.
struct Adaptation {
  const AdaptedRows* parts;
  float* inner;  // [sites of an instruction][rows of the step][inner values]; strides count values
  int64_t num_parts, row_stride, site_stride;
};

// A projection of an instruction: its site, and the first column of its outputs.
struct AdaptedSite {
  int32_t site, num_outputs, column;
};
}

namespace {

constexpr int kInnerBlock = 4;                // lines of a block of `down`
constexpr int kChunk = 32;                    // values of a chunk of a line
constexpr int kStepValues = 2 * kPartLanes;   // values of a Halves
constexpr int kSteps = kChunk / kStepValues;  // Halves of a chunk
constexpr int64_t kRowsOfPiece = 16;          // rows of a work item
constexpr int64_t kChunksOfPiece = 8;         // chunks of outputs of a work item

// kStepValues values. For bfloat16, both values of a pair are in the same lane: the widening is
// cheapest.
struct Halves {
  Part low, high;
};

inline Halves halves_at(const float* p) { return {part_at(p), part_at(p + kPartLanes)}; }
inline Halves halves_at(const Bf16* p) {
  PartBits units;
  std::memcpy(&units, p, sizeof units);
  return {(Part)(units << 16), (Part)(units & 0xffff0000u)};
}

inline void save(Halves v, float* p) { std::memcpy(p, &v, sizeof v); }
inline void save(Halves v, Bf16* p) {
  const auto rounded = [](Part part) {
    const PartBits bits = (PartBits)part;
    return bits + 0x7fff + ((bits >> 16) & 1);
  };
  const PartBits units = (rounded(v.low) >> 16) | (rounded(v.high) & 0xffff0000u);
  std::memcpy(static_cast<void*>(p), &units, sizeof units);
}

inline float sum_of(Part v) {
  Vec all{};
  std::memcpy(&all, &v, sizeof v);
  return fold(all, [](Vec a, Vec b) { return a + b; });
}

// Adds the products of a chunk of R rows and a chunk of a block of lines.
template <typename T, int R>
[[gnu::always_inline]] inline void add_chunk(const T* const (&rows)[R], int64_t first,
                                             const T* lines, Part (&sums)[R][kInnerBlock]) {
#pragma GCC unroll 4
  for (int step = 0; step < kSteps; step++) {
    Halves x[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) x[r] = halves_at(rows[r] + first + step * kStepValues);
#pragma GCC unroll 4
    for (int line = 0; line < kInnerBlock; line++) {
      const Halves w = halves_at(lines + line * kChunk + step * kStepValues);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        sums[r][line] = multiply_add_part(x[r].low, w.low, sums[r][line]);
        sums[r][line] = multiply_add_part(x[r].high, w.high, sums[r][line]);
      }
    }
  }
}

// Computes kInnerBlock inner values of R rows.
template <typename T, int R>
[[gnu::noinline]] void shrink_rows(const T* const (&rows)[R], const T* down, int32_t num_inputs,
                                   float* const (&inner)[R]) {
  Part sums[R][kInnerBlock];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int line = 0; line < kInnerBlock; line++) sums[r][line] = Part{};
  const int whole = num_inputs / kChunk * kChunk;
  for (int i = 0; i < whole; i += kChunk) add_chunk<T, R>(rows, i, down + i * kInnerBlock, sums);
  if (whole < num_inputs) {
    T last[R][kChunk] = {};
    const T* ends[R];
    for (int r = 0; r < R; r++) {
      std::memcpy(static_cast<void*>(last[r]), rows[r] + whole, (num_inputs - whole) * sizeof(T));
      ends[r] = last[r];
    }
    add_chunk<T, R>(ends, 0, down + whole * kInnerBlock, sums);
  }
  for (int r = 0; r < R; r++)
    for (int line = 0; line < kInnerBlock; line++) inner[r][line] = sum_of(sums[r][line]);
}

// Adds scale * (inner values · up) to a chunk of outputs of R rows. Only `count` of the outputs exist.
template <typename T, int R>
[[gnu::noinline]] void expand_rows(const float* const (&inner)[R], const T* up, int32_t rank,
                                   float scale, int count, T* const (&outputs)[R]) {
  Halves sums[R][kSteps];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int step = 0; step < kSteps; step++) sums[r][step] = {Part{}, Part{}};
  for (int32_t line = 0; line < rank; line++) {
    Part factors[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) factors[r] = inner[r][line] - Part{};
#pragma GCC unroll 4
    for (int step = 0; step < kSteps; step++) {
      const Halves w = halves_at(up + line * kChunk + step * kStepValues);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        sums[r][step].low = multiply_add_part(factors[r], w.low, sums[r][step].low);
        sums[r][step].high = multiply_add_part(factors[r], w.high, sums[r][step].high);
      }
    }
  }
  const Part scales = scale - Part{};
  for (int r = 0; r < R; r++) {
    T part[kChunk] = {};
    T* const out = count == kChunk ? outputs[r] : part;
    if (out == part) std::memcpy(static_cast<void*>(part), outputs[r], count * sizeof(T));
    for (int step = 0; step < kSteps; step++) {
      const Halves before = halves_at(out + step * kStepValues);
      const Halves sum = sums[r][step];
      save({multiply_add_part(sum.low, scales, before.low),
            multiply_add_part(sum.high, scales, before.high)},
           out + step * kStepValues);
    }
    if (out == part) std::memcpy(static_cast<void*>(outputs[r]), part, count * sizeof(T));
  }
}

// Calls f(number of rows, first row) for groups of up to two rows; the number is an integral constant.
template <class F>
void for_row_groups(int64_t first, int64_t last, const F& f) {
  for (; first + 2 <= last; first += 2) f(std::integral_constant<int, 2>{}, first);
  if (first < last) f(std::integral_constant<int, 1>{}, first);
}

// Calls f(site, part, first row, last row, block) for the work items of this thread, which are those
// for which is_mine() returns true: it is called once for each item. count(site, matrices) is the
// number of blocks.
template <class Count, class Mine, class F>
void for_blocks(const Adaptation& adaptation, const AdaptedSite* sites, int64_t num_sites,
                const Count& count, const Mine& is_mine, const F& f) {
  for (int64_t s = 0; s < num_sites; s++)
    for (int64_t p = 0; p < adaptation.num_parts; p++) {
      const AdaptedRows& part = adaptation.parts[p];
      const LowRank& w = part.sites[sites[s].site];
      const int64_t num_blocks = w.rank > 0 ? count(sites[s], w) : 0;
      for (int64_t first = 0; num_blocks > 0 && first < part.num_rows; first += kRowsOfPiece)
        for (int64_t block = 0; block < num_blocks; block++)
          if (is_mine()) f(s, part, first, std::min(first + kRowsOfPiece, part.num_rows), block);
    }
}

inline float* inner_at(const Adaptation& adaptation, int64_t site, int64_t row) {
  return adaptation.inner + site * adaptation.site_stride + row * adaptation.row_stride;
}

// Computes the inner values of all adapted rows. The work is divided evenly, so that a product, which
// takes its work dynamically, can follow without a barrier.
template <typename T, class Team, class Source>
void shrink_all(const Team& team, const Adaptation& adaptation, const AdaptedSite* sites,
                int64_t num_sites, int32_t num_inputs, const Source& source) {
  int64_t piece = 0;
  for_blocks(
      adaptation, sites, num_sites,
      [](const AdaptedSite&, const LowRank& w) {
        return (w.rank + kInnerBlock - 1) / kInnerBlock;
      },
      [&] { return piece++ % team.size == team.id; },
      [&](int64_t site, const AdaptedRows& part, int64_t first, int64_t last, int64_t block) {
        const int64_t width = (num_inputs + kChunk - 1) / kChunk * kChunk;
        const T* down = static_cast<const T*>(part.sites[sites[site].site].down) +
                        block * kInnerBlock * width;
        for_row_groups(first, last, [&](auto count, int64_t i) {
          const T* rows[count];
          float* inner[count];
          for (int r = 0; r < count; r++) {
            rows[r] = source(part.rows[i + r]);
            inner[r] = inner_at(adaptation, site, part.rows[i + r]) + block * kInnerBlock;
          }
          shrink_rows<T, count>(rows, down, num_inputs, inner);
        });
      });
}

// Adds the products of `up` and the inner values to the targets, from the site's column on.
template <typename T, class Team, class Target>
void expand_all(Team& team, const Adaptation& adaptation, const AdaptedSite* sites,
                int64_t num_sites, const Target& target) {
  constexpr int64_t kOutputs = kChunksOfPiece * kChunk, kEnd = std::numeric_limits<int64_t>::max();
  int64_t piece = 0, mine = team.take(kEnd);
  for_blocks(
      adaptation, sites, num_sites,
      [](const AdaptedSite& site, const LowRank&) {
        return (site.num_outputs + kOutputs - 1) / kOutputs;
      },
      [&] { return piece++ == mine; },
      [&](int64_t site, const AdaptedRows& part, int64_t first, int64_t last, int64_t block) {
        mine = team.take(kEnd);
        const LowRank& w = part.sites[sites[site].site];
        const int64_t end = std::min<int64_t>(sites[site].num_outputs, (block + 1) * kOutputs);
        for (int64_t output = block * kOutputs; output < end; output += kChunk) {
          const T* up = static_cast<const T*>(w.up) + output * w.rank;
          for_row_groups(first, last, [&](auto count, int64_t i) {
            const float* inner[count];
            T* outputs[count];
            for (int r = 0; r < count; r++) {
              inner[r] = inner_at(adaptation, site, part.rows[i + r]);
              outputs[r] = target(part.rows[i + r]) + sites[site].column + output;
            }
            const int lanes = static_cast<int>(std::min<int64_t>(kChunk, end - output));
            expand_rows<T, count>(inner, up, w.rank, w.scale, lanes, outputs);
          });
        }
      });
}

}  // namespace
