// Mixtures of experts: the routing of rows, and the products of experts over the rows of a step.
//
// A row's bits depend on the row alone: its experts are selected from its own logits, every product is
// one chain of sums (products.h), and the experts' results are added in the order of selection. Rows
// are sorted by expert so that the weights of an expert are read once. Used by decoder.cpp.

#pragma once

#include <vector>

#include "pointwise.h"
#include "products/products.h"

namespace {

// One expert of a row, and its weight. The choices of a row are in descending order of probability.
struct Choice {
  int32_t expert;
  float weight;
};

// How the model's router derives weights from probabilities.
struct Weighting {
  bool is_normalized;  // the weights of the selected experts add up to 1
  bool is_rounded;     // weights are rounded to the model's dtype
};

// Selects the most probable experts of a row by the softmax of its logits, [num_experts]. Of equally
// probable experts, the first is selected.
template <typename T>
inline void choose_experts(const T* logits, int num_experts, int num_chosen, Weighting weighting,
                           Choice* choices, std::vector<float>& scratch) {
  scratch.assign((num_experts + kLanes - 1) / kLanes * kLanes, kNegInf);
  for (int e = 0; e < num_experts; e++) scratch[e] = widen(logits[e]);
  Vec most = splat(kNegInf);
  for (size_t e = 0; e < scratch.size(); e += kLanes) {
    const Vec v = load(&scratch[e]);
    most = v > most ? v : most;
  }
  const float greatest = fold(most, [](Vec a, Vec b) { return a > b ? a : b; });
  Vec sums = splat(0.0f);
  for (size_t e = 0; e < scratch.size(); e += kLanes) {
    Vec powers = exp_of(load(&scratch[e]) - greatest);
    const int count = lanes_at(static_cast<int>(e), num_experts);
    for (int lane = count; lane < kLanes; lane++) powers[lane] = 0.0f;
    sums += powers;
    save(powers, &scratch[e], kLanes);
  }
  const float sum = fold(sums, [](Vec a, Vec b) { return a + b; });
  float chosen_sum = 0.0f;
  for (int c = 0; c < num_chosen; c++) {
    int best = -1;
    for (int e = 0; e < num_experts; e++)
      if (scratch[e] >= 0.0f && (best < 0 || scratch[e] > scratch[best])) best = e;
    if (best < 0) best = 0;  // the logits are not finite, and so is the result
    choices[c] = {best, scratch[best] / sum};
    chosen_sum += choices[c].weight;
    scratch[best] = -1.0f;
  }
  for (int c = 0; c < num_chosen; c++) {
    if (weighting.is_normalized) choices[c].weight /= chosen_sum;
    if (weighting.is_rounded) choices[c].weight = rounded(splat(choices[c].weight), T{})[0];
  }
}

// The choices of all rows, sorted by expert. Every thread computes its own copy.
class SortedChoices {
 public:
  // choices(row) returns the choices of a row, [num_chosen].
  template <class Choices>
  SortedChoices(int64_t num_rows, int num_chosen, int num_experts, const Choices& choices)
      : first_(num_experts + 1), position_(num_rows * num_chosen) {
    for (int64_t r = 0; r < num_rows; r++)
      for (int c = 0; c < num_chosen; c++) first_[choices(r)[c].expert + 1]++;
    for (int e = 0; e < num_experts; e++) first_[e + 1] += first_[e];
    std::vector<int64_t> next(first_.begin(), first_.end() - 1);
    for (int64_t r = 0; r < num_rows; r++)
      for (int c = 0; c < num_chosen; c++)
        position_[r * num_chosen + c] = next[choices(r)[c].expert]++;
  }

  // The sorted positions of one expert's rows are [first, last).
  int64_t first(int expert) const { return first_[expert]; }
  int64_t last(int expert) const { return first_[expert + 1]; }

  // The sorted position of choice c of row r; the index is r * num_chosen + c.
  int64_t position(int64_t index) const { return position_[index]; }

 private:
  std::vector<int64_t> first_, position_;
};

// Multiplies sorted rows by the weights of their experts, and calls out(expert, position, pair, low,
// high) with the sums of a row and a pair of panels. `w` is the weight of expert 0, which those of the
// other experts follow. The threads of a team share the work.
template <typename T, class W, class Out>
void multiply_sorted(Team& team, const SortedChoices& sorted, int num_experts, const W& w,
                     UnitRows rows, const Out& out) {
  constexpr int64_t kExpertRows = 128;  // rows of a work item, which stay in the L2 cache
  struct Group {
    int32_t expert;
    int64_t first, last;
  };
  std::vector<Group> groups;
  for (int32_t e = 0; e < num_experts; e++)
    for (int64_t at = sorted.first(e); at < sorted.last(e); at += kExpertRows)
      groups.push_back({e, at, std::min(at + kExpertRows, sorted.last(e))});
  if (groups.empty()) return;
  const int64_t num_groups = static_cast<int64_t>(groups.size());
  const int64_t wanted = (8 * team.size + num_groups - 1) / num_groups;
  const int64_t num_pieces = std::max<int64_t>(1, std::min(w.num_pairs, wanted));
  for (int64_t task; (task = team.take(num_groups * num_pieces)) < num_groups * num_pieces;) {
    const Group& group = groups[task / num_pieces];
    const int64_t piece = task % num_pieces;
    multiply_block<T>(w.expert(group.expert), rows, group.first, group.last,
                      w.num_pairs * piece / num_pieces, w.num_pairs * (piece + 1) / num_pieces,
                      [&](int64_t position, int64_t pair, auto low, auto high) {
                        out(group.expert, position, pair, low, high);
                      });
  }
}

}  // namespace
