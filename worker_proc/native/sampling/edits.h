// Edits of a row's logits before a token is chosen: bans, biases, penalties, and allowed or forced
// tokens, as worker_proc/sampling/logit_edits.py defines them.
//
// Logits are not modified. The scores of edited tokens are stored separately, with a bit for each
// token, and EditedScores combines both where Row (row.h) reads scores. Used by sampling.cpp.

#pragma once

#include <algorithm>
#include <vector>

#include "sampling/row.h"

namespace {

// The values of EditKind in structures.py.
enum EditKind : int32_t {
  kBan,       // the score of each id becomes -infinity
  kAddBias,   // a bias is added to the score of each id
  kPenalize,  // repetition, frequency and presence penalties of ids that have occurred
  kAllow,     // only the ids can be chosen
  kForce,     // the first id is chosen, if the mask allows it
};

// `SCORE_EDIT` of structures.py.
struct Edit {
  const int32_t* ids;
  const float* biases;
  const int32_t* counts;  // outputs with this id
  const int32_t* latest;  // the latest outputs, which are not counted yet
  int32_t kind, num_ids, num_latest;
  float repetition, frequency, presence;
};

// The edited tokens of a row: memory of one thread, which is reused for each row.
struct EditSpace {
  std::vector<int32_t> ids;           // in the order in which they were edited
  std::vector<uint32_t> bits;          // a bit for each token: whether it is edited
  std::vector<float> by_id, in_order;  // scores, by token id and in the order of `ids`
  std::vector<float> saved;
};

// A row of logits with its edits, as `Row` reads it.
template <typename T>
struct EditedScores {
  using Value = T;
  static constexpr bool kAreEdited = true;

  const T* logits;  // null: tokens that are not edited have the score `rest`
  float rest;
  const uint32_t* mask;  // a bit for each token, or null; tokens without a bit have the score -infinity
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

  // The scores of all tokens but the edited ones, without branches that depend on these.
  struct Others {
    const EditedScores& all;

    Part part(int i) const {
      const Part scores = all.logits ? part_at(all.logits + i) : splat_part(all.rest);
      return all.confined(i, select(lanes_of(all.bits_from(i)), splat_part(kNegInf), scores));
    }

    float at(int i) const { return all.bits_from(i) & 1 ? kNegInf : all.at(i); }
  };

  Others without_edited() const { return {*this}; }

  // A bit for each token from i on, within a word: whether it may be chosen and is not edited.
  uint32_t unedited(int i) const { return ~bits_from(i) & (mask ? allowed(i) : UINT32_MAX); }

  // The bits of the tokens from i on that are in the same word.
  uint32_t bits_from(int i) const { return bits[i / 32] >> (i % 32); }
  uint32_t allowed(int i) const { return i / 32 < num_words ? mask[i / 32] >> (i % 32) : 0; }

  Part confined(int i, Part scores) const {
    return mask ? select(lanes_of(allowed(i)), scores, splat_part(kNegInf)) : scores;
  }
};

// Applies the edits of one row.
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

  // Whether scores of tokens that are not edited differ from the logits.
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

  // Gives every token the same score, and drops earlier edits.
  void set_all(float score) {
    scores_.logits = nullptr;
    scores_.rest = score;
    space_.ids.clear();
    std::fill(space_.bits.begin(), space_.bits.end(), 0);
  }

 private:
  bool is_token(int32_t id) const { return static_cast<uint32_t>(id) < static_cast<uint32_t>(size_); }

  // Returns the score of a token for modification, and marks the token as edited.
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

  // If every allowed token is banned, the first of them stays possible.
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
