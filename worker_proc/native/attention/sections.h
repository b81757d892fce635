// Sections of a context, each with its own softmax, and the loop of threads over pieces of work.
//
// A section ends at each multiple of kSectionSlots positions. One function, `merge`, merges the
// sections of a row in order of position, whether one thread computes them one after another or
// several threads compute them in parallel. The bits of a result therefore do not depend on the
// number of threads. Used by attention.h, pair_attention.h and latent_attention.h.

#pragma once

#include "step.h"
#include "team.h"
#include "vec.h"

#include <limits>
#include <vector>

namespace {

constexpr int kMaxDim = 512;         // of a head
constexpr int kSectionSlots = 1024;  // SECTION in attention/work.py

// The dimension of a head's values, rounded up to whole vectors.
inline int padded_dim(const Layer& layer) {
  return (layer.value_head_dim + kLanes - 1) / kLanes * kLanes;
}

// The first position that a token attends to.
inline int first_visible(const Layer& layer, int position) {
  if (layer.window == 0) return 0;
  if (layer.is_chunked) return position / layer.window * layer.window;
  return std::max(0, position - layer.window + 1);
}

// Biases of scores, such as ALiBi, for the rows of a tile.
template <int kRows>
class TileBiases {
 public:
  // Kernels may read this number of biases before and after those of a row: a span of 64 positions,
  // which may begin after the row, at a later row of the tile.
  static constexpr int kRoom = 64 + kRows;

  void begin(const Layer& layer, const RowTerms& terms) {
    num_distances_ = terms.biases.data ? terms.num_distances : 0;
    exist_ = layer.biases || num_distances_;
    const size_t size = static_cast<size_t>(kRows) * (num_distances_ + 2 * kRoom);
    if (num_distances_ && values_.size() < size) values_.resize(size);
  }

  // Sets the biases of row r of the tile.
  template <typename T>
  void take(int r, const Layer& layer, const RowTerms& terms, int64_t row, int head, int position) {
    if (!exist_) return;
    if (!num_distances_) {
      of_row_[r] = layer.biases_of(head, position);
      own_[r] = of_row_[r][position];
      from_[r] = std::numeric_limits<int>::min();
      return;
    }
    float* const to = values_.data() + static_cast<size_t>(r) * (num_distances_ + 2 * kRoom);
    const T* by_distance = static_cast<const T*>(terms.biases.data) +
                           row * terms.biases.row_stride + head * terms.biases.head_stride;
    std::memset(to, 0, kRoom * sizeof(float));
    for (int i = 0; i < num_distances_; i++)
      to[kRoom + i] = widen(by_distance[num_distances_ - 1 - i]);
    std::memset(to + kRoom + num_distances_, 0, kRoom * sizeof(float));
    from_[r] = position - num_distances_ + 1;
    of_row_[r] = to + kRoom - from_[r];
    own_[r] = 0.0f;
  }

  // Whether a row has a bias for any of `count` positions; the count is at most kRoom.
  bool reach(int r, int first_position, int count) const {
    return exist_ && first_position + count > from_[r];
  }

  // The biases of row r from a position on.
  const float* at(int r, int position) const { return of_row_[r] + position; }

  // The bias at the row's own position, which kernels subtract from all others; 0 for biases of a row.
  float own(int r) const { return own_[r]; }

 private:
  bool exist_ = false;
  int num_distances_ = 0;
  int from_[kRows];
  const float* of_row_[kRows];  // by position
  float own_[kRows];
  std::vector<float> values_;
};

// Consecutive rows of a tile.
struct RowRange {
  int first, count;
};

// Positions [begin, end) of a context.
struct Positions {
  int begin, end;
};

// A row's softmax over some positions. Weights are relative to `maximum`, the greatest score or one that
// is lower by at most kRaiseThresholdLn (float_tile.h) or, in kernels on pairs, kRaiseThresholdLog2
// (pair_tile.h). weight_sum is 0 if no position is visible.
struct RowSums {
  float maximum, weight_sum;
  float* values;  // the sums of weighted values, in whole vectors
};

// Adds the sums of later positions. power(x) is the weight of a score that is -x below the maximum.
template <class Power>
[[gnu::noinline]] void merge(RowSums& total, const RowSums& next, int size, const Power& power) {
  if (next.weight_sum == 0.0f) return;
  if (total.weight_sum == 0.0f) {
    std::memcpy(total.values, next.values, size * sizeof(float));
    total.maximum = next.maximum;
    total.weight_sum = next.weight_sum;
    return;
  }
  const auto combine = [&](const auto& sum) {
    for (int i = 0; i < size; i += kLanes)
      save(sum(load(total.values + i), load(next.values + i)), total.values + i, kLanes);
    total.weight_sum = sum(total.weight_sum, next.weight_sum);
  };
  if (next.maximum > total.maximum) {
    const float factor = power(total.maximum - next.maximum);
    combine([&](auto sum, auto more) { return sum * factor + more; });
    total.maximum = next.maximum;
  } else {
    const float factor = power(next.maximum - total.maximum);
    combine([&](auto sum, auto more) { return sum + more * factor; });
  }
}

// The factor that normalizes the sums of all sections. An attention sink adds to the sum of weights,
// and not to the values; it is included here, once. Power::kUnit converts the sink to the unit of the
// scores.
template <class Power>
float averaging_factor(const Layer& layer, const RowTerms& terms, int64_t row, int head,
                       const RowSums& sums) {
  const float* const sinks = terms.sinks ? terms.sinks + row * layer.num_heads : layer.sinks;
  if (sinks == nullptr) return 1.0f / sums.weight_sum;
  const float sink = sinks[head] * Power::kUnit;
  if (sink > sums.maximum) {
    const float factor = Power()(sums.maximum - sink);
    return factor / (sums.weight_sum * factor + 1.0f);
  }
  return 1.0f / (sums.weight_sum + Power()(sink - sums.maximum));
}

// The weight of a score relative to a greater one, both in units of 1.
struct Exponential {
  static constexpr float kUnit = 1.0f;
  float operator()(float x) const { return exp_of(splat(x))[0]; }
};

// The state of the online softmax of a tile's rows: over the current section, and the merged sums of
// the sections before it.
template <int kRows, class Power>
class OnlineSoftmax {
 public:
  int padded_vdim;           // the dimension of a value, in whole vectors
  float running_max[kRows];  // of the scores of the current section, times Power::kUnit
  alignas(64) float weight_sums[kRows][kLanes];  // of the current section, for each lane

  // The sums of weighted values of the current section, [padded_vdim].
  float* accumulator(int row) { return accumulators_ + row * accumulator_stride(); }

  // The padding spreads rows over the sets of the L1 cache.
  int accumulator_stride() const { return padded_vdim + kLanes; }

  // Resets the state of a row.
  void begin(int row) {
    ended_[row] = {kNegInf, 0.0f, values_of_ended_ + row * kMaxDim};
    begin_section(row);
  }

  // Raises a row's running maximum, and rescales its weights and accumulators.
  void raise_maximum(int row, float maximum) {
    if (running_max[row] != kNegInf) {
      const float factor = Power()(running_max[row] - maximum);
      save(load(weight_sums[row]) * factor, weight_sums[row], kLanes);
      float* const sums = accumulator(row);
      for (int i = 0; i < padded_vdim; i += kLanes) save(load(sums + i) * factor, sums + i, kLanes);
    }
    running_max[row] = maximum;
  }

  void end_section(int row) {
    merge(ended_[row], current_section(row), padded_vdim, Power());
    begin_section(row);
  }

  // Returns the sums of all sections, including the current one.
  RowSums merged(int row) {
    if (ended_[row].weight_sum == 0.0f) return current_section(row);
    merge(ended_[row], current_section(row), padded_vdim, Power());
    return ended_[row];
  }

 private:
  void begin_section(int row) {
    running_max[row] = kNegInf;
    std::memset(weight_sums[row], 0, sizeof(weight_sums[row]));
    std::memset(accumulator(row), 0, padded_vdim * sizeof(float));
  }

  RowSums current_section(int row) {
    const float sum = fold(load(weight_sums[row]), [](Vec a, Vec b) { return a + b; });
    return {running_max[row], sum, accumulator(row)};
  }

  alignas(64) float accumulators_[kRows * (kMaxDim + kLanes)];
  alignas(64) float values_of_ended_[kRows * kMaxDim];
  RowSums ended_[kRows];
};

// Calls f(base, number of slots) for the spans of the positions [earliest, last]. A span begins at
// the start of a block or a section, or kSlots positions after another span, so that the first one
// may begin before `earliest`.
template <int kSlots, class F>
void for_spans(int earliest, int last, int block_size, const F& f) {
  int num_slots;
  for (int base = std::max(earliest / block_size * block_size,
                           earliest / kSectionSlots * kSectionSlots);
       base <= last; base += num_slots) {
    num_slots = std::min(
        {kSlots, block_size - base % block_size, kSectionSlots - base % kSectionSlots});
    if (base + num_slots > earliest) f(base, num_slots);
  }
}

// A unit of work of a thread: a group of items with its whole contexts, or with one section of them.
class Piece {
 public:
  Piece(const Layer& layer, const Step& step, int number)
      : first_item(step.group_item[step.piece_group[number]]),
        num_items(step.group_item[step.piece_group[number] + 1] - first_item),
        num_shared(step.group_shared[step.piece_group[number]]),
        section(step.piece_section[number]),
        num_heads_(layer.num_heads),
        size_(padded_dim(layer)),
        sums_(step.sums + static_cast<int64_t>(step.piece_sums[number]) * num_heads_ * stride()) {}

  const int first_item, num_items, num_shared;
  const int section;  // negative: all sections

  bool is_whole() const { return section < 0; }

  Positions positions() const {
    if (is_whole()) return {0, std::numeric_limits<int>::max()};
    return {section * kSectionSlots, (section + 1) * kSectionSlots};
  }

  // Calls write(row, head, sums) with the result of a row, or keeps the sums of a section until all
  // sections are merged. `token` is the number of the row's token within the group.
  template <class Write>
  void finish(int64_t row, int token, int head, const RowSums& sums, const Write& write) const {
    if (is_whole())
      write(row, head, sums);
    else
      keep(token, head, sums);
  }

  // Stores the sums of a section, for one head of one of the group's tokens.
  void keep(int token, int head, const RowSums& row) const {
    float* to = sums_of(token, head);
    std::memcpy(to, row.values, size_ * sizeof(float));
    to[size_] = row.maximum;
    to[size_ + 1] = row.weight_sum;
  }

  // Returns what `keep` has stored.
  RowSums kept(int token, int head) const {
    float* from = sums_of(token, head);
    return {from[size_], from[size_ + 1], from};
  }

 private:
  int stride() const { return size_ + kLanes; }

  float* sums_of(int token, int head) const {
    return sums_ + (static_cast<int64_t>(token) * num_heads_ + head) * stride();
  }

  const int num_heads_, size_;
  float* const sums_;
};

// Calls f(index in the group, segment, index in the segment) for all tokens of some items.
template <class F>
void for_tokens(const Step& step, int first_item, int num_items, const F& f) {
  int index = 0;
  for (int item = first_item; item < first_item + num_items; item++) {
    const int segment = step.item_segment[item], begin = step.item_token[item];
    const int end = std::min(step.num_tokens[segment], begin + step.item_size);
    for (int token = begin; token < end; token++) f(index++, segment, token);
  }
}

// Returns how many tokens from row `first` on, at most `most`, may share a tile. Every row of a tile
// multiplies the values of all tokens of the tile, those of later tokens by zero, and 0 · NaN is NaN.
// So a token whose values are not all finite does not share a tile with earlier tokens. Rows whose
// window has passed such a token may still be NaN, like other rows of their request.
template <typename T>
int num_tile_tokens(const Layer& layer, const Rows& values, int kv_head, int64_t first, int most) {
  constexpr uint32_t kExponent = 0x7f800000;
  for (int count = 1; count < most; count++) {
    const T* value = static_cast<const T*>(values.data) + (first + count) * values.row_stride +
                     kv_head * values.head_stride;
    uint32_t is_not_finite = 0;
    for (int d = 0; d < layer.value_head_dim; d++) {
      const float x = widen(value[d]);
      uint32_t bits;
      std::memcpy(&bits, &x, sizeof(bits));
      is_not_finite |= (bits & kExponent) == kExponent;
    }
    if (is_not_finite) return count;
  }
  return most;
}

// A piece and a KV head, by their index in the order of work. A negative index means none.
struct PieceOfHead {
  const Layer& layer;
  const Step& step;
  int index;

  bool exists() const { return index >= 0; }
  Piece piece() const { return Piece(layer, step, index / layer.num_kv_heads); }
  int kv_head() const { return index % layer.num_kv_heads; }
};

// Distributes the pieces of a step over the threads, and merges the sections of groups that are split.
// attend(piece, kv_head, next) computes a piece, where `next` is the one that the thread will probably
// take next; write(row, head, sums) receives each result of a split group.
template <class Power, class Attend, class Write>
void attend_pieces(Team& team, const Layer& layer, const Step& step, const Attend& attend,
                  const Write& write) {
  // The last pieces have the longest contexts, so they are taken first. If there are many pieces, a
  // thread takes all heads of a piece: they are adjacent in each block, and longer reads are faster.
  constexpr int kManyPieces = 8;  // for each thread
  const int total = step.num_pieces * layer.num_kv_heads;
  const int num_heads = step.num_pieces < kManyPieces * team.size ? 1 : layer.num_kv_heads;
  for (int64_t taken; (taken = team.take(total / num_heads)) < total / num_heads;) {
    const int first = total - 1 - static_cast<int>(taken) * num_heads;
    for (int index = first; index > first - num_heads; index--) {
      const bool is_last = index == first - num_heads + 1;
      const PieceOfHead taken_piece{layer, step, index};
      const PieceOfHead next{layer, step, is_last ? first - team.size * num_heads : index - 1};
      attend(taken_piece.piece(), taken_piece.kv_head(), next);
    }
  }
  if (step.num_splits == 0) return;
  team.barrier();
  const int num_merges = step.num_splits * layer.num_heads;
  for (int64_t taken; (taken = team.take(num_merges)) < num_merges;) {
    const int head = static_cast<int>(taken) % layer.num_heads;
    const int first_piece = step.split_piece[taken / layer.num_heads];
    const Piece first(layer, step, first_piece);
    for_tokens(step, first.first_item, first.num_items, [&](int index, int segment, int token) {
      if (!step.reads_any(step.first_row[segment] + token, 1)) return;
      const int position = step.start[segment] + token;
      const int begin = std::max(first.section, first_visible(layer, position) / kSectionSlots);
      alignas(64) float values[kMaxDim] = {};  // the result if all scores are -infinity
      RowSums sums{kNegInf, 0.0f, values};
      for (int section = begin; section <= position / kSectionSlots; section++) {
        const Piece piece(layer, step, first_piece + section - first.section);
        merge(sums, piece.kept(index, head), padded_dim(layer), Power());
      }
      write(step.first_row[segment] + token, head, sums);
    });
  }
}

}  // namespace
