// Low-rank products that are added to the outputs of projections, for rows with several adapters.
//
// A row is computed by itself: one chain of sums for each of its inner values, over the inputs, and
// one for each output, over the inner values. So its result depends neither on the rows beside it
// nor on their adapters, and nothing is padded to the greatest rank. Sums and products are fused by
// intrinsics, as the compiler could fuse them in one place and not in another.

#pragma once

#include "pointwise.h"

#include <algorithm>

extern "C" {

// What an adapter adds to one projection: scale * up * (down * row), for each inner value a line of
// `down` and one of `up`. Lines lie in blocks, those of `down` in blocks of kInnerBlock and all those
// of `up` in one; a block has kChunk values of each of its lines, one line after the other, and then
// the next ones. Zeros fill up the last chunk and the last block. Rank 0: nothing is added.
struct LowRank {
  const void *down, *up;
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
  float* inner;  // a line for each row of the step; such lines for each site of an instruction
  int64_t num_parts, row_stride, site_stride;
};

// A projection among those of one instruction: its site, and where its outputs are.
struct AdaptedSite {
  int32_t site, num_outputs, column;
};
}

namespace {

constexpr int kInnerBlock = 4;
constexpr int kChunk = 32;
constexpr int kStepValues = 2 * kPartLanes;
constexpr int kSteps = kChunk / kStepValues;
constexpr int64_t kRowsOfPiece = 16;    // that one thread computes with a block of a matrix
constexpr int64_t kChunksOfPiece = 8;  // of outputs that one thread computes at once

// kStepValues values. Those of a unit of bfloat16 are in one lane each: widening them so costs least.
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

// sums += kChunk values of R rows times those of a block of lines
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

// inner = a block of lines of `down` times R rows.
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

// outputs += scale * (inner values times a chunk of `up`), for R rows. `count` of the outputs exist.
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

// Calls f(a constant, first row) for some rows, several at once.
template <class F>
void for_row_groups(int64_t first, int64_t last, const F& f) {
  for (; first + 2 <= last; first += 2) f(std::integral_constant<int, 2>{}, first);
  if (first < last) f(std::integral_constant<int, 1>{}, first);
}

// Calls f(number of the site, part, first row, last row, block) for all blocks of all parts that this
// thread takes, whose numbers are count(site, part). `is_mine` is asked once for each.
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

// Computes the inner values of all adapted rows. Each thread has an equal share, so that a product,
// whose pieces are taken one by one, may follow without a barrier.
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

// targets += the products of each row's adapter with its inner values, from the site's column on.
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
