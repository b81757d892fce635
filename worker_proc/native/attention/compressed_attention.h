// DeepSeek-V4's attention: over a window of tokens and over compressed entries, in one softmax with
// sinks.
//
// A token has one row in a layer, which is the key and value of all heads, followed by its values and
// gates for one or two series of entries. Entry w combines the `ratio` tokens of group w, and with two
// series also those of group w - 1: each dimension is an average of values, weighted by a softmax over
// gates. A token sees the entries of all complete groups, or those that an indexer, with its own
// entries, scores highest. Each score and sum is one chain in the order of the text, so results do not
// depend on how a text is divided into steps, nor on other rows. Called by compressed.cpp.

#pragma once

#include <omp.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "step.h"
#include "vec.h"

extern "C" {

// How the values and gates of tokens are combined to entries.
struct Compressor {
  const float* biases;   // of gates, [ratio][num_series * dim]
  const float* factors;  // the weights of the RMS norm of an entry, [dim]
  float epsilon;         // of the norm
  int32_t dim;  // of an entry; 0: there is no such compressor
  int32_t values_at, gates_at;  // offsets in the row of a token
  int32_t entry_at;             // offset in the stored entry
};

// One layer: its pool and shape. Offsets, widths and strides count elements.
struct CompressedLayer {
  void *rows, *entries;  // those of block 0; entries are in blocks of their own
  const float* sinks;    // as in Layer
  int64_t block_stride;  // in elements
  int32_t num_heads, head_dim, block_size, window, is_bf16;
  int32_t ratio;  // tokens of an entry; 0: there are no entries
  int32_t num_series, row_width, entry_width, rope_dim;
  int32_t num_index_heads, num_chosen;  // heads of the indexer, and entries that it selects
  float scale, index_scale;
  Compressor attended, indexed;
};

// The inputs of a layer in one step. Ends are the rows of the last tokens of groups.
struct CompressedRows {
  Rows query;
  const int32_t *entry_table_offset, *entry_tables;  // as in Step, of the blocks of entries
  const void* stored;         // [num_rows][row_width]
  const void* index_queries;  // [num_rows][num_index_heads][indexed.dim]
  const float* index_weights;  // [num_rows][num_index_heads]
  const int64_t* end_rows;
  const float *cosines, *sines;  // of the entries, [num_ends][rope_dim / 2]
  int32_t num_ends, num_texts;
};
}

namespace {

constexpr int kHeadsAtOnce = 4;              // heads of a register tile
constexpr int kCopiedRows = 32;              // rows that are widened to float32 at a time
constexpr int kKeysPerPiece = 256;           // indexer keys that a thread takes
constexpr int64_t kMaxKeptScores = 1 << 22;  // indexer scores that are in memory at a time

inline int whole_vectors(int dim) { return (dim + kLanes - 1) / kLanes * kLanes; }

// At most `count` elements as a vector, padded with zeros.
template <typename T>
inline Vec load_some(const T* from, int count) {
  if (count >= kLanes) return load(from);
  alignas(64) T part[kLanes] = {};
  std::memcpy(part, from, count * sizeof(T));
  return load(part);
}

// Converts a row to float32, padded with zeros to whole vectors.
template <typename T>
inline void widen_row(const T* from, int dim, float* to) {
  for (int d = 0; d < dim; d += kLanes) save(load_some(from + d, dim - d), to + d, kLanes);
}

// Computes one layer in one step: stores rows, makes entries, selects them, and attends.
template <typename T>
class Compressed {
 public:
  Compressed(const CompressedLayer& layer, const Step& step, const CompressedRows& rows)
      : layer_(layer), step_(step), rows_(rows), segment_(step.num_rows), position_(step.num_rows) {
    for (int segment = 0; segment < rows.num_texts; segment++)
      for (int i = 0; i < step.num_tokens[segment]; i++) {
        segment_[step.first_row[segment] + i] = segment;
        position_[step.first_row[segment] + i] = step.start[segment] + i;
      }
  }

  void compute(T* out) {
    store();
    if (layer_.ratio > 0) make_entries();
    if (layer_.indexed.dim > 0) choose();
    attend(out);
  }

 private:
  const T* row(int segment, int position) const {
    const int64_t block = step_.tables[step_.table_offset[segment] + position / layer_.block_size];
    const int64_t slot = position % layer_.block_size;
    return static_cast<T*>(layer_.rows) + block * layer_.block_stride + slot * layer_.row_width;
  }

  T* entry(int segment, int number) const {
    const int last = (number + 1) * layer_.ratio - 1;
    const int64_t slot = last % layer_.block_size / layer_.ratio;
    const int64_t block =
        rows_.entry_tables[rows_.entry_table_offset[segment] + last / layer_.block_size];
    return static_cast<T*>(layer_.entries) + block * layer_.block_stride +
           slot * layer_.entry_width;
  }

  // Whether a token is stored. Tokens that are cached already have slots in the null block.
  bool is_kept(int64_t row) const { return step_.slots[row] >= layer_.block_size; }

  int num_visible(int row) const {
    return layer_.ratio == 0 ? 0 : (position_[row] + 1) / layer_.ratio;
  }

  void store() {
    const int64_t width = layer_.row_width;
    const T* const from = static_cast<const T*>(rows_.stored);
#pragma omp parallel for schedule(static) if (step_.num_rows * width > 65536)
    for (int r = 0; r < step_.num_rows; r++)
      if (is_kept(r))
        std::memcpy(const_cast<T*>(row(segment_[r], position_[r])), from + r * width,
                    width * sizeof(T));
  }

  void make_entries() {
    const int64_t num_items = 2 * static_cast<int64_t>(rows_.num_ends);
#pragma omp parallel for schedule(dynamic) if (num_items > 2)
    for (int64_t item = 0; item < num_items; item++) {
      const int64_t end = item / 2, row = rows_.end_rows[end];
      const Compressor& compressor = item % 2 ? layer_.indexed : layer_.attended;
      if (compressor.dim > 0 && is_kept(row)) make_entry(compressor, end, row);
    }
  }

  // The contribution of one token to an entry.
  struct Share {
    const T *values, *gates;
    const float* biases;
  };

  void make_entry(const Compressor& compressor, int64_t end, int64_t row) const {
    const int dim = compressor.dim, padded = whole_vectors(dim), ratio = layer_.ratio;
    const int segment = segment_[row], number = position_[row] / ratio;
    static thread_local std::vector<Share> parts;
    static thread_local std::vector<float> made;
    parts.clear();
    for (int series = 0; series < layer_.num_series; series++) {
      const int group = number - (layer_.num_series - 1) + series;
      for (int i = 0; i < ratio && group >= 0; i++) {
        const T* const from = this->row(segment, group * ratio + i) + series * dim;
        parts.push_back({from + compressor.values_at, from + compressor.gates_at,
                         compressor.biases + (i * layer_.num_series + series) * dim});
      }
    }
    made.assign(padded, 0.0f);
    Vec squares = splat(0.0f);
    for (int d = 0; d < dim; d += kLanes) {
      const Vec average = weighted_average(parts, d, dim - d);
      save(average, made.data() + d, kLanes);
      squares = squares + average * average;
    }
    const float sum = fold(squares, [](Vec a, Vec b) { return a + b; });
    const float factor = 1.0f / std::sqrt(sum / dim + compressor.epsilon);
    for (int d = 0; d < dim; d++) made[d] = compressor.factors[d] * (made[d] * factor);
    rotate(made.data() + dim - layer_.rope_dim, end);
    T* const to = entry(segment, number) + compressor.entry_at;
    for (int d = 0; d < dim; d++) narrow(made[d], to[d]);
  }

  // Averages the values of all contributions, weighted by a softmax over their gates.
  Vec weighted_average(const std::vector<Share>& parts, int at, int count) const {
    const auto gate = [&](const Share& part) {
      return load_some(part.gates + at, count) + load_some(part.biases + at, count);
    };
    Vec maximum = splat(kNegInf);
    for (const Share& part : parts) {
      const Vec own = gate(part);
      maximum = own > maximum ? own : maximum;
    }
    Vec sums = splat(0.0f), weights = splat(0.0f);
    for (const Share& part : parts) {
      const Vec weight = exp_of(gate(part) - maximum);
      sums = sums + weight * load_some(part.values + at, count);
      weights = weights + weight;
    }
    return sums / weights;
  }

  // Applies the rotary embedding to adjacent pairs of dimensions.
  void rotate(float* part, int64_t end) const {
    const int half = layer_.rope_dim / 2;
    const float *cosines = rows_.cosines + end * half, *sines = rows_.sines + end * half;
    for (int i = 0; i < half; i++) {
      const float low = part[2 * i], high = part[2 * i + 1];
      part[2 * i] = low * cosines[i] - high * sines[i];
      part[2 * i + 1] = high * cosines[i] + low * sines[i];
    }
  }

  // Selects entries for the rows that see more entries than the indexer selects.
  void choose() {
    std::vector<int> choosing;
    int64_t most = 0;
    for (int r = 0; r < step_.num_rows; r++)
      if (num_visible(r) > layer_.num_chosen) {
        choosing.push_back(r);
        most = std::max<int64_t>(most, num_visible(r));
      }
    if (choosing.empty()) return;
    chosen_row_.assign(step_.num_rows, -1);
    chosen_.resize(choosing.size() * static_cast<size_t>(layer_.num_chosen));
    const int64_t num_choosing = choosing.size();
    const int64_t at_once = std::max<int64_t>(kMaxKeptScores / most, 1);
    const int64_t num_pieces = (most + kKeysPerPiece - 1) / kKeysPerPiece;
    std::vector<float> scores(std::min(at_once, num_choosing) * most);
    for (int64_t first = 0; first < num_choosing; first += at_once) {
      const int64_t count = std::min(at_once, num_choosing - first);
#pragma omp parallel for schedule(dynamic)
      for (int64_t item = 0; item < count * num_pieces; item++) {
        const int row = choosing[first + item / num_pieces];
        const int begin = static_cast<int>(item % num_pieces) * kKeysPerPiece;
        score_keys(row, begin, std::min(begin + kKeysPerPiece, num_visible(row)),
                   scores.data() + item / num_pieces * most);
      }
#pragma omp parallel for schedule(dynamic)
      for (int64_t i = 0; i < count; i++) {
        const int row = choosing[first + i];
        chosen_row_[row] = first + i;
        choose_highest(scores.data() + i * most, num_visible(row),
                       chosen_.data() + (first + i) * layer_.num_chosen);
      }
    }
  }

  // Writes the indexer's scores of a row with the entries [begin, end).
  void score_keys(int row, int begin, int end, float* scores) const {
    const int dim = layer_.indexed.dim, padded = whole_vectors(dim);
    const int num_heads = layer_.num_index_heads;
    static thread_local std::vector<float> queries, key;
    if (begin >= end) return;
    queries.resize(static_cast<size_t>(num_heads) * padded);
    key.resize(padded);
    const T* from =
        static_cast<const T*>(rows_.index_queries) + static_cast<int64_t>(row) * num_heads * dim;
    for (int head = 0; head < num_heads; head++)
      widen_row(from + head * dim, dim, queries.data() + head * padded);
    const float* const weights = rows_.index_weights + static_cast<int64_t>(row) * num_heads;
    for (int number = begin; number < end; number++) {
      widen_row(entry(segment_[row], number) + layer_.indexed.entry_at, dim, key.data());
      float score = 0.0f;
      for (int head = 0; head < num_heads; head++) {
        Part sums = Part{};
        for (int d = 0; d < padded; d += kPartLanes)
          sums = multiply_add_part(part_at(queries.data() + head * padded + d),
                                   part_at(key.data() + d), sums);
        score += std::max(sum_of_part(sums), 0.0f) * layer_.index_scale * weights[head];
      }
      scores[number] = score == score ? score : kNegInf;
    }
  }

  // Writes the numbers of the entries with the highest scores, ascending. Of equal scores, the earlier
  // entry comes first.
  void choose_highest(const float* scores, int count, int* chosen) const {
    static thread_local std::vector<int> numbers;
    numbers.resize(count);
    std::iota(numbers.begin(), numbers.end(), 0);
    const auto middle = numbers.begin() + layer_.num_chosen;
    std::nth_element(numbers.begin(), middle, numbers.end(), [&](int one, int other) {
      return scores[one] != scores[other] ? scores[one] > scores[other] : one < other;
    });
    std::sort(numbers.begin(), middle);
    std::copy(numbers.begin(), middle, chosen);
  }

  void attend(T* out) const {
    const int num_threads = omp_get_max_threads();
    int heads = layer_.num_heads;  // of a work item
    while (heads > kHeadsAtOnce && step_.num_rows * (layer_.num_heads / heads) < 2 * num_threads)
      heads = (heads / 2 + kHeadsAtOnce - 1) / kHeadsAtOnce * kHeadsAtOnce;
    const int per_row = (layer_.num_heads + heads - 1) / heads;
    const int64_t num_items = static_cast<int64_t>(step_.num_rows) * per_row;
#pragma omp parallel for schedule(dynamic)
    for (int64_t item = 0; item < num_items; item++) {
      const int first = static_cast<int>(item % per_row) * heads;
      attend_row(static_cast<int>(item / per_row), first, std::min(heads, layer_.num_heads - first),
                 out);
    }
  }

  // Lists the keys that a row attends to: the tokens of its window, followed by entries.
  void list_seen(int row, std::vector<const T*>& seen) const {
    seen.clear();
    const int position = position_[row], segment = segment_[row];
    for (int p = std::max(0, position - layer_.window + 1); p <= position; p++)
      seen.push_back(this->row(segment, p));
    const int visible = num_visible(row);
    const bool chooses = layer_.indexed.dim > 0 && visible > layer_.num_chosen;
    const int* chosen = chooses ? chosen_.data() + chosen_row_[row] * layer_.num_chosen : nullptr;
    for (int i = 0; i < (chooses ? layer_.num_chosen : visible); i++)
      seen.push_back(entry(segment, chooses ? chosen[i] : i) + layer_.attended.entry_at);
  }

  // Computes some heads of one row.
  void attend_row(int row, int first_head, int num_heads, T* out) const {
    const int dim = layer_.head_dim, padded = whole_vectors(dim);
    const int padded_heads = (num_heads + kHeadsAtOnce - 1) / kHeadsAtOnce * kHeadsAtOnce;
    static thread_local std::vector<const T*> seen;
    static thread_local std::vector<float> queries, sums, scores, copied;
    list_seen(row, seen);
    const int count = static_cast<int>(seen.size());
    const int64_t stride = whole_vectors(count);
    queries.assign(static_cast<size_t>(padded_heads) * padded, 0.0f);
    sums.assign(static_cast<size_t>(padded_heads) * padded, 0.0f);
    scores.assign(static_cast<size_t>(padded_heads) * stride, kNegInf);
    copied.resize(static_cast<size_t>(kCopiedRows) * padded);
    for (int h = 0; h < num_heads; h++)
      widen_row(static_cast<const T*>(rows_.query.data) + row * rows_.query.row_stride +
                    (first_head + h) * rows_.query.head_stride,
                dim, queries.data() + h * padded);
    const auto copy = [&](int begin) {
      const int number = std::min(kCopiedRows, count - begin);
      for (int i = 0; i < number; i++) widen_row(seen[begin + i], dim, copied.data() + i * padded);
      return number;
    };
    for (int begin = 0; begin < count; begin += kCopiedRows) {
      const int number = copy(begin);
      for (int h = 0; h < padded_heads; h += kHeadsAtOnce)
        for (int i = 0; i < number; i++)
          score(queries.data() + h * padded, copied.data() + i * padded, padded,
                scores.data() + h * stride + begin + i, stride);
    }
    float factors[kMaxHeads];
    for (int h = 0; h < num_heads; h++)
      factors[h] = softmax(scores.data() + h * stride, count, first_head + h);
    for (int begin = 0; begin < count; begin += kCopiedRows) {
      const int number = copy(begin);
      for (int h = 0; h < padded_heads; h += kHeadsAtOnce)
        for (int d = 0; d < padded; d += kPartLanes)
          add(scores.data() + h * stride + begin, stride, copied.data() + d, padded, number,
              sums.data() + h * padded + d);
    }
    for (int h = 0; h < num_heads; h++) {
      T* const to = out + (static_cast<int64_t>(row) * layer_.num_heads + first_head + h) * dim;
      for (int d = 0; d < dim; d++) narrow(sums[h * padded + d] * factors[h], to[d]);
    }
  }

  // Writes the scores of kHeadsAtOnce queries with one key.
  void score(const float* queries, const float* key, int padded, float* scores,
             int64_t stride) const {
    Part products[kHeadsAtOnce] = {};
    for (int d = 0; d < padded; d += kPartLanes) {
      const Part part = part_at(key + d);
#pragma GCC unroll 4
      for (int h = 0; h < kHeadsAtOnce; h++)
        products[h] = multiply_add_part(part_at(queries + h * padded + d), part, products[h]);
    }
    for (int h = 0; h < kHeadsAtOnce; h++)
      scores[h * stride] = sum_of_part(products[h]) * layer_.scale;
  }

  // Replaces scores by softmax weights, and returns the factor that normalizes their sum, including the
  // sink.
  float softmax(float* scores, int count, int head) const {
    const float sink = layer_.sinks == nullptr ? kNegInf : layer_.sinks[head];
    float maximum = sink;
    for (int i = 0; i < count; i++) maximum = std::max(maximum, scores[i]);
    Vec sums = splat(0.0f);
    for (int i = 0; i < count; i += kLanes) {
      const Vec score = load(scores + i);
      Vec weight = exp_of(score - maximum);
      weight = score == kNegInf ? splat(0.0f) : weight;  // padding
      save(weight, scores + i, kLanes);
      sums = sums + weight;
    }
    float sum = fold(sums, [](Vec a, Vec b) { return a + b; });
    if (sink != kNegInf) sum += exp_of(splat(sink - maximum))[0];
    return 1.0f / sum;
  }

  // Adds `number` weighted rows to the sums of kHeadsAtOnce heads, one register of dimensions.
  static void add(const float* weights, int64_t stride, const float* values, int padded, int number,
                  float* sums) {
    Part parts[kHeadsAtOnce];
    for (int h = 0; h < kHeadsAtOnce; h++) parts[h] = part_at(sums + h * padded);
    for (int i = 0; i < number; i++) {
      const Part value = part_at(values + i * padded);
#pragma GCC unroll 4
      for (int h = 0; h < kHeadsAtOnce; h++)
        parts[h] = multiply_add_part(Part{} + weights[h * stride + i], value, parts[h]);
    }
    for (int h = 0; h < kHeadsAtOnce; h++) save_part(parts[h], sums + h * padded);
  }

  static constexpr int kMaxHeads = 256;
  const CompressedLayer& layer_;
  const Step& step_;
  const CompressedRows& rows_;
  std::vector<int> segment_, position_;  // of each row
  std::vector<int64_t> chosen_row_;           // of each row; -1: none is selected
  std::vector<int> chosen_;
};

}  // namespace
