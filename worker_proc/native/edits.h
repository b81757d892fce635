// Changes to a row's scores before a token is chosen, as worker_proc/sampling/logit_edits.py
// defines them.

#pragma once

#include <algorithm>
#include <vector>

#include "choice.h"

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

// The edited tokens of a row: memory of one thread, used again for each row.
struct EditSpace {
  std::vector<int32_t> ids;           // in the order in which they were edited
  std::vector<uint32_t> bits;         // of the same tokens, 32 to a word
  std::vector<float> by_id, in_order;  // their scores
  std::vector<float> saved;
};

// A row of logits with its edits, as `Row` reads it.
template <typename T>
struct EditedScores {
  using Value = T;
  static constexpr bool kAreEdited = true;

  const T* logits;  // null: the tokens that are not edited have the score `rest`
  float rest;
  const uint32_t* mask;  // one bit a token, or null: others have the score -inf
  int32_t num_words;     // of the mask
  const uint32_t* bits;  // of the edited tokens
  const float* by_id;    // scores of the edited tokens
  EditedTokens tokens;

  EditedTokens edited() const { return tokens; }

  // The score of a token before its own edits.
  float logit(int i) const { return logits ? widen(logits[i]) : rest; }

  Part part(int i) const {
    Part scores = logits ? part_at(logits + i) : splat_part(rest);
    constexpr uint32_t kLaneBits = (1u << kPartLanes) - 1;
    const uint32_t own = bits_from(i);
    if (own & kLaneBits) scores = select(lanes_of(own), part_at(by_id + i), scores);
    return confined(i, scores);
  }

  float at(int i) const {
    if (mask && !(allowed(i) & 1)) return kNegInf;
    return bits_from(i) & 1 ? by_id[i] : logit(i);
  }

  // No branch depends on the edited tokens.
  struct Others {
    const EditedScores& all;

    Part part(int i) const {
      const Part scores = all.logits ? part_at(all.logits + i) : splat_part(all.rest);
      return all.confined(i, select(lanes_of(all.bits_from(i)), splat_part(kNegInf), scores));
    }

    float at(int i) const { return all.bits_from(i) & 1 ? kNegInf : all.at(i); }
  };

  Others without_edited() const { return {*this}; }

  uint32_t unedited(int i) const { return ~bits_from(i) & (mask ? allowed(i) : UINT32_MAX); }

  // The bits of the tokens from i on, of those in the same word.
  uint32_t bits_from(int i) const { return bits[i / 32] >> (i % 32); }
  uint32_t allowed(int i) const { return i / 32 < num_words ? mask[i / 32] >> (i % 32) : 0; }

  Part confined(int i, Part scores) const {
    return mask ? select(lanes_of(allowed(i)), scores, splat_part(kNegInf)) : scores;
  }
};

template <typename T>
class Editor {
 public:
  Editor(const T* logits, int32_t size, const uint32_t* mask, int32_t num_words, EditSpace& space)
      : size_(size), space_(space) {
    space.ids.clear();
    space.bits.assign(size / 32 + 1, 0);
    space.by_id.resize(size);
    scores_ = {logits, 0.0f, mask, num_words, space.bits.data(), space.by_id.data(), {}};
  }

  // The scores after all edits.
  const EditedScores<T>& scores() {
    const auto& ids = space_.ids;
    space_.in_order.resize(ids.size() + kPartLanes);
    for (size_t i = 0; i < ids.size(); i++) space_.in_order[i] = scores_.at(ids[i]);
    scores_.tokens = {static_cast<int>(ids.size()), ids.data(), space_.in_order.data()};
    return scores_;
  }

  // Whether other scores differ from the logits than those of the edited tokens.
  bool changes_others() const { return scores_.mask || !scores_.logits; }

  void apply(const Edit& e) {
    switch (e.kind) {
      case kBan: return each(e, [](int, float& score) { score = kNegInf; });
      case kAddBias:
        return each(e, [&](int i, float& score) { score = bounded(score + e.biases[i]); });
      case kPenalize: return penalize(e);
      case kAllow: return allow(e);
      case kForce: return force(e.ids[0]);
    }
  }

  // Gives every token the same score, whatever was changed before.
  void set_all(float score) {
    scores_.logits = nullptr;
    scores_.rest = score;
    space_.ids.clear();
    std::fill(space_.bits.begin(), space_.bits.end(), 0);
  }

 private:
  bool is_token(int32_t id) const { return static_cast<uint32_t>(id) < static_cast<uint32_t>(size_); }

  // The score of a token, for changes.
  float& at(int32_t id) {
    uint32_t& bits = space_.bits[id / 32];
    const uint32_t own = 1u << (id % 32);
    float& score = space_.by_id[id];
    if (!(bits & own)) {
      space_.ids.push_back(id);
      score = scores_.logit(id);
      bits |= own;
    }
    return score;
  }

  template <class Change>
  void each(const Edit& e, const Change& change) {
    for (int i = 0; i < e.num_ids; i++)
      if (is_token(e.ids[i])) change(i, at(e.ids[i]));
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

  void penalize(const Edit& e) {
    std::vector<float>& saved = space_.saved;
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
      saved.push_back(penalized(e, at(id), known + latest));
    }
    each(e, [&](int i, float& score) { score = penalized(e, score, e.counts[i]); });
    for (int i = 0; i < e.num_latest; i++)
      if (is_token(e.latest[i])) at(e.latest[i]) = saved[i];
  }

  // Where every allowed token is banned, the first of them is allowed.
  void allow(const Edit& e) {
    std::vector<float>& saved = space_.saved;
    saved.clear();
    float best = kNegInf;
    each(e, [&](int, float& score) {
      saved.push_back(score);
      best = std::max(best, score);
    });
    if (best == kNegInf && !saved.empty()) saved[0] = 0.0f;
    set_all(kNegInf);
    size_t place = 0;
    each(e, [&](int, float& score) { score = std::max(score, saved[place++]); });
  }

  void force(int32_t id) {
    if (!is_token(id)) return;
    if (scores_.mask && !(scores_.allowed(id) & 1)) return;
    set_all(kNegInf);
    at(id) = 0.0f;
  }

  const int32_t size_;
  EditSpace& space_;
  EditedScores<T> scores_;
};

}  // namespace
