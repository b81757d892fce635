// Low-rank products that are added to the outputs of projections, for rows with several adapters.
//
// A row is computed by itself: one chain of sums for each of its inner values, over the inputs, and
// one for each output, over the inner values. So its result depends neither on the rows beside it
// nor on their adapters, and nothing is padded to the greatest rank.

#pragma once

#include "pointwise.h"

#include <algorithm>

extern "C" {

// What an adapter adds to one projection: scale * up * (down * row). `down` has a line for each inner
// value, in blocks of kInnerBlock lines; `up` has a line of outputs for each inner value. Lines are
// filled up with zeros to whole vectors. Rank 0: nothing is added.
struct LowRank {
  const void *down, *up;
  int64_t down_stride, up_stride;  // values between lines
  int32_t rank;
  float scale;
};

// The rows of a step that have one adapter, whose products lie at the sites of the projections.
struct AdaptedRows {
  const int32_t* rows;
  const LowRank* sites;
  int64_t num_rows;
};

struct Adaptation {
  const AdaptedRows* parts;
  float* inner;  // a line for each row of the step
  int64_t num_parts, inner_stride;
};
}

namespace {

constexpr int kInnerBlock = 4;
constexpr int kOutputVecs = 4;
constexpr int kOutputBlock = kOutputVecs * kLanes;
constexpr int64_t kChunkRows = 16;  // rows that one thread computes with a block of a matrix

// inner = a block of lines of `down` times a row. Not inlined, as every place could contract its
// products and sums otherwise.
template <typename T>
[[gnu::noinline]] void shrink_row(const T* row, const T* down, int64_t stride, int32_t num_inputs,
                                  float* inner) {
  Part sums[kInnerBlock][kParts] = {};
  const int whole = num_inputs / kLanes * kLanes;
  for (int i = 0; i < whole; i += kLanes)
    for (int p = 0; p < kParts; p++) {
      const Part x = part_at(row + i + p * kPartLanes);
      for (int line = 0; line < kInnerBlock; line++)
        sums[line][p] += x * part_at(down + line * stride + i + p * kPartLanes);
    }
  if (whole < num_inputs) {
    const Vec last = load_any(row + whole, num_inputs - whole);
    Part x[kParts];
    std::memcpy(x, &last, sizeof last);
    for (int p = 0; p < kParts; p++)
      for (int line = 0; line < kInnerBlock; line++)
        sums[line][p] += x[p] * part_at(down + line * stride + whole + p * kPartLanes);
  }
  for (int line = 0; line < kInnerBlock; line++) {
    Vec all;
    std::memcpy(&all, sums[line], sizeof all);
    inner[line] = fold(all, [](Vec a, Vec b) { return a + b; });
  }
}

// outputs += scale * (inner values times a block of columns of `up`)
template <typename T>
[[gnu::noinline]] void expand_row(const float* inner, const LowRank& site, int64_t first,
                                  int32_t num_outputs, T* outputs) {
  const T* up = static_cast<const T*>(site.up) + first;
  const int count = static_cast<int>(std::min<int64_t>(kOutputBlock, num_outputs - first));
  for (int vec = 0; vec * kLanes < count; vec++) {
    Part sums[kParts] = {};
    for (int32_t line = 0; line < site.rank; line++)
      for (int p = 0; p < kParts; p++)
        sums[p] += part_at(up + line * site.up_stride + vec * kLanes + p * kPartLanes) * inner[line];
    Vec sum;
    std::memcpy(&sum, sums, sizeof sum);
    T* out = outputs + first + vec * kLanes;
    const int lanes = lanes_at(vec * kLanes, count);
    save(load_any(out, lanes) + sum * site.scale, out, lanes);
  }
}

// Calls f(part, first row, last row, block) for this thread's share of all blocks of all parts, whose
// numbers are count(part).
template <class Team, class Count, class F>
void for_blocks(const Team& team, const Adaptation& adaptation, const Count& count, const F& f) {
  int64_t piece = 0;
  for (int64_t p = 0; p < adaptation.num_parts; p++) {
    const AdaptedRows& part = adaptation.parts[p];
    const int64_t num_blocks = count(part);
    for (int64_t first = 0; first < part.num_rows; first += kChunkRows)
      for (int64_t block = 0; block < num_blocks; block++, piece++)
        if (piece % team.size == team.id)
          f(part, first, std::min(first + kChunkRows, part.num_rows), block);
  }
}

// targets += the products of each row's adapter at a site. All threads call it.
template <typename T, class Team, class Source, class Target>
void adapt_rows(Team& team, const Adaptation& adaptation, int32_t site, int32_t num_inputs,
                int32_t num_outputs, const Source& source, const Target& target) {
  bool is_adapted = false;
  for (int64_t p = 0; p < adaptation.num_parts; p++)
    is_adapted |= adaptation.parts[p].sites[site].rank > 0;
  if (!is_adapted) return;
  const auto inner = [&](int32_t row) { return adaptation.inner + row * adaptation.inner_stride; };
  for_blocks(
      team, adaptation,
      [&](const AdaptedRows& part) {
        return (part.sites[site].rank + kInnerBlock - 1) / kInnerBlock;
      },
      [&](const AdaptedRows& part, int64_t first, int64_t last, int64_t block) {
        const LowRank& w = part.sites[site];
        const int64_t line = block * kInnerBlock;
        const T* down = static_cast<const T*>(w.down) + line * w.down_stride;
        for (int64_t i = first; i < last; i++)
          shrink_row(source(part.rows[i]), down, w.down_stride, num_inputs,
                     inner(part.rows[i]) + line);
      });
  team.barrier();
  for_blocks(
      team, adaptation,
      [&](const AdaptedRows& part) -> int64_t {
        if (part.sites[site].rank == 0) return 0;
        return (num_outputs + kOutputBlock - 1) / kOutputBlock;
      },
      [&](const AdaptedRows& part, int64_t first, int64_t last, int64_t block) {
        for (int64_t i = first; i < last; i++)
          expand_row(inner(part.rows[i]), part.sites[site], block * kOutputBlock, num_outputs,
                     target(part.rows[i]));
      });
}

}  // namespace
