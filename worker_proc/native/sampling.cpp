// Chooses one token for each row of logits that a step samples.
//
// A row is read where it lies. Only the scores of a row with edits or a mask are copied, to memory
// of the thread that treats it.

#include <omp.h>

#include <atomic>

#include "choice.h"
#include "edits.h"

namespace {

// `LogitsArgs` of kernels.py.
struct Logits {
  const void* data;
  int64_t stride;  // of rows, in values
  int32_t vocab_size, is_bf16;
};

// `MasksArgs` of kernels.py: lines of words, each of 32 tokens.
struct Masks {
  const uint32_t* words;
  int32_t num_words;
};

// Numbers that kernels.py knows.
constexpr int32_t kChosen = 0;
constexpr int32_t kNotFinite = 1;  // NaN, +inf, or nothing but -inf: the token is 0

template <typename T>
class Chooser {
 public:
  Chooser(const Logits& logits, const Edit* edits, const Masks& masks, Scratch& scratch)
      : logits_(logits), edits_(edits), masks_(masks), scratch_(scratch) {}

  // Returns the state of the row, and sets the token. The thread takes the `upcoming` order next, if
  // there is one.
  int32_t choose(const Order& order, const Order* upcoming, int64_t& token) {
    token = 0;
    const T* raw = scores_of(order);
    if (order.mask >= 0 || order.num_edits > 0) return choose_edited(order, raw, token);
    Row<T> row(raw, logits_.vocab_size, scratch_, upcoming ? scores_of(*upcoming) : nullptr);
    if (!row.scan() || !std::isfinite(row.best())) return kNotFinite;
    token = row.choose(order);
    return kChosen;
  }

 private:
  const T* scores_of(const Order& order) const {
    return static_cast<const T*>(logits_.data) + order.row * logits_.stride;
  }

  int32_t choose_edited(const Order& order, const T* raw, int64_t& token) {
    const int32_t size = logits_.vocab_size;
    const uint32_t* mask =
        order.mask < 0 ? nullptr : masks_.words + int64_t{order.mask} * masks_.num_words;
    float* scores = copied(raw);
    Row<float> row(scores, size, scratch_);
    if (!row.scan() || !std::isfinite(row.best())) return kNotFinite;
    const int64_t most_likely = row.most_likely();
    Editor editor(scores, size, mask, masks_.num_words);
    for (int32_t i = 0; i < order.num_edits; i++) {
      editor.apply(edits_[order.first_edit + i], scratch_.saved);
    }
    const bool is_possible = !mask || confine(scores, mask);
    row.scan();
    token = is_possible && row.best() > kNegInf ? row.choose(order) : most_likely;
    return kChosen;
  }

  float* copied(const T* raw) {
    const int size = logits_.vocab_size;
    scratch_.edited.resize(size);
    float* scores = scratch_.edited.data();
    int i = 0;
    for (; i + kPartLanes <= size; i += kPartLanes) save_part(part_at(raw + i), scores + i);
    for (; i < size; i++) scores[i] = widen(raw[i]);
    return scores;
  }

  uint32_t allowed(const uint32_t* mask, int i) const {
    const int word = i / 32;
    return word < masks_.num_words ? mask[word] >> (i % 32) : 0;
  }

  // Bans the tokens that are not allowed; returns whether one is left. Where all that is allowed
  // has score -inf, each of these tokens is equally likely.
  bool confine(float* scores, const uint32_t* mask) const {
    const int size = logits_.vocab_size;
    float best = kNegInf;
    const auto each = [&](const auto& score_of) {
      Part best_of_lanes = splat_part(kNegInf);
      int i = 0;
      for (; i + kPartLanes <= size; i += kPartLanes) {
        const Part score = score_of(part_at(scores + i));
        const Part v = select(lanes_of(allowed(mask, i)), score, splat_part(kNegInf));
        best_of_lanes = larger(v, best_of_lanes);
        save_part(v, scores + i);
      }
      best = max_of(best_of_lanes);
      for (; i < size; i++) {
        scores[i] = allowed(mask, i) & 1 ? score_of(splat_part(scores[i]))[0] : kNegInf;
        best = std::max(best, scores[i]);
      }
    };
    each([](Part v) { return v; });
    if (best > kNegInf) return true;
    each([](Part) { return Part{}; });
    return best > kNegInf;
  }

  const Logits& logits_;
  const Edit* edits_;
  const Masks& masks_;
  Scratch& scratch_;
};

template <typename T>
void choose_all(const Logits& logits, const Order* orders, int32_t num_orders, const Edit* edits,
                const Masks& masks, int64_t* tokens, int32_t* states) {
  // For few scores, waking the other threads takes longer than the work.
  constexpr int64_t kFewScores = 1 << 17;
  std::atomic<int32_t> num_taken{0};
#pragma omp parallel if (num_orders > 1 && int64_t{num_orders} * logits.vocab_size > kFewScores)
  {
    thread_local Scratch scratch;
    Chooser<T> chooser(logits, edits, masks, scratch);
    // Except for the last ones, an order is taken before the one ahead of it is chosen, so that its
    // scores can be fetched.
    const int32_t num_last = 2 * omp_get_num_threads();
    for (int32_t i = num_taken++, next; i < num_orders; i = next) {
      const bool is_last = i + num_last >= num_orders;
      if (!is_last) next = num_taken++;
      const Order* const upcoming = is_last || next >= num_orders ? nullptr : &orders[next];
      states[i] = chooser.choose(orders[i], upcoming, tokens[i]);
      if (is_last) next = num_taken++;
    }
  }
}

}  // namespace

// Chooses a token for each order.
extern "C" void troika_sample(const Logits* logits, const Order* orders, int32_t num_orders,
                              const Edit* edits, const Masks* masks, int64_t* tokens,
                              int32_t* states) {
  const auto choose = logits->is_bf16 ? choose_all<Bf16> : choose_all<float>;
  choose(*logits, orders, num_orders, edits, *masks, tokens, states);
}
