// Changes to a row's scores before a token is chosen, as worker_proc/sampling/logit_edits.py
// defines them.

#pragma once

#include <algorithm>
#include <vector>

#include "vec.h"

namespace {

// Numbers that structures.py knows.
enum EditKind : int32_t {
  kBan,       // the ids
  kAddBias,   // to each id
  kPenalize,  // ids that have occurred, with their numbers of outputs
  kAllow,     // the ids alone
  kForce,     // the first id, if the mask allows it
};

// `SCORE_EDIT` of structures.py.
struct Edit {
  const int32_t* ids;
  const float* biases;
  const int32_t* counts;  // outputs with this id
  const int32_t* latest;  // outputs that are not counted yet: few
  int32_t kind, num_ids, num_latest;
  float repetition, frequency, presence;
};

class Editor {
 public:
  // `mask` has one bit a token, or is null.
  Editor(float* scores, int32_t size, const uint32_t* mask, int32_t num_words)
      : scores_(scores), size_(size), mask_(mask), num_words_(num_words) {}

  void apply(const Edit& e, std::vector<float>& saved) {
    switch (e.kind) {
      case kBan: return each(e, [](int, float& score) { score = kNegInf; });
      case kAddBias:
        return each(e, [&](int i, float& score) { score = bounded(score + e.biases[i]); });
      case kPenalize: return penalize(e, saved);
      case kAllow: return allow(e, saved);
      case kForce: return force(e.ids[0]);
    }
  }

 private:
  bool is_token(int32_t id) const { return static_cast<uint32_t>(id) < static_cast<uint32_t>(size_); }

  template <class Change>
  void each(const Edit& e, const Change& change) {
    for (int i = 0; i < e.num_ids; i++)
      if (is_token(e.ids[i])) change(i, scores_[e.ids[i]]);
  }

  static float bounded(float score) { return std::min(score, std::numeric_limits<float>::max()); }

  static float penalized(const Edit& e, float score, int32_t count) {
    if (e.repetition != 1.0f) {
      score = bounded(score > 0.0f ? score / e.repetition : score * e.repetition);
    }
    if (count > 0 && (e.frequency != 0.0f || e.presence != 0.0f)) {
      // The product is rounded before the sum.
      const auto product = static_cast<float>(static_cast<double>(e.frequency) * count);
      score = bounded(score - (product + e.presence));
    }
    return score;
  }

  void penalize(const Edit& e, std::vector<float>& saved) {
    saved.clear();
    for (int i = 0; i < e.num_latest; i++) {
      const int32_t id = e.latest[i];
      if (!is_token(id)) {
        saved.push_back(0.0f);
        continue;
      }
      const int32_t* found = std::find(e.ids, e.ids + e.num_ids, id);
      const int32_t known = found == e.ids + e.num_ids ? 0 : e.counts[found - e.ids];
      const auto latest = static_cast<int32_t>(std::count(e.latest, e.latest + e.num_latest, id));
      saved.push_back(penalized(e, scores_[id], known + latest));
    }
    each(e, [&](int i, float& score) { score = penalized(e, score, e.counts[i]); });
    for (int i = 0; i < e.num_latest; i++)
      if (is_token(e.latest[i])) scores_[e.latest[i]] = saved[i];
  }

  // Where every allowed token is banned, the first of them is allowed.
  void allow(const Edit& e, std::vector<float>& saved) {
    saved.clear();
    float best = kNegInf;
    each(e, [&](int, float& score) {
      saved.push_back(score);
      best = std::max(best, score);
    });
    if (best == kNegInf && !saved.empty()) saved[0] = 0.0f;
    std::fill(scores_, scores_ + size_, kNegInf);
    size_t at = 0;
    each(e, [&](int, float& score) { score = std::max(score, saved[at++]); });
  }

  void force(int32_t id) {
    if (!is_token(id)) return;
    if (mask_ && !(id / 32 < num_words_ && mask_[id / 32] >> (id % 32) & 1)) return;
    std::fill(scores_, scores_ + size_, kNegInf);
    scores_[id] = 0.0f;
  }

  float* scores_;
  const int32_t size_;
  const uint32_t* mask_;
  const int32_t num_words_;
};

}  // namespace
