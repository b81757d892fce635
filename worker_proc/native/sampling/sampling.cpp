// Sampling: chooses one token for each row of logits; called by worker_proc/sampling/native_choice.py.
//
// Rows are read in place. Edits and masks do not modify logits: edited scores are in memory of the
// thread that processes the row (edits.h). The choice itself is in choice.h.

#include <omp.h>

#include <atomic>

#include "sampling/choice.h"
#include "sampling/edits.h"

namespace {

// LogitsArgs in structures.py.
struct Logits {
  const void* data;
  int64_t stride;  // of rows, in values
  int32_t vocab_size, is_bf16;
};

// MasksArgs in structures.py: [masks][num_words], one bit for each token.
struct Masks {
  const uint32_t* words;
  int32_t num_words;
};

// The values of ChoiceState in structures.py.
constexpr int32_t kChosen = 0;
constexpr int32_t kNotFinite = 1;  // NaN, +inf, or nothing but -inf: the token is 0

template <typename T>
class Chooser {
 public:
  Chooser(const Logits& logits, const Edit* edits, const Masks& masks, Scratch& scratch,
          EditSpace& space)
      : logits_(logits), edits_(edits), masks_(masks), scratch_(scratch), space_(space) {}

  // Sets the token of a row, and returns its ChoiceState. `upcoming` is the order that the thread takes
  // next, or null.
  int32_t choose(const Order& order, const Order* upcoming, int64_t& token) {
    token = 0;
    const T* raw = scores_of(order);
    const T* next = upcoming ? scores_of(*upcoming) : nullptr;
    if (order.mask >= 0 || order.num_edits > 0) return choose_edited(order, raw, next, token);
    Row<RawScores<T>> row({raw}, logits_.vocab_size, scratch_, next);
    if (!row.scan() || !std::isfinite(row.best())) return kNotFinite;
    token = choose_token(row, order);
    return kChosen;
  }

 private:
  const T* scores_of(const Order& order) const {
    return static_cast<const T*>(logits_.data) + order.row * logits_.stride;
  }

  int32_t choose_edited(const Order& order, const T* raw, const T* upcoming, int64_t& token) {
    const int32_t size = logits_.vocab_size;
    const uint32_t* mask =
        order.mask < 0 ? nullptr : masks_.words + int64_t{order.mask} * masks_.num_words;
    Row<RawScores<T>> raw_row({raw}, size, scratch_);
    if (!raw_row.scan() || !std::isfinite(raw_row.best())) return kNotFinite;
    Editor<T> editor(raw, size, mask, masks_.num_words, space_);
    for (int32_t i = 0; i < order.num_edits; i++) editor.apply(edits_[order.first_edit + i]);
    const auto choose_possible = [&] {
      Row<EditedScores<T>> row(editor.scores(), size, scratch_, upcoming);
      if (editor.changes_others())
        row.scan();
      else
        row.scan_edited();
      if (!(row.best() > kNegInf)) return false;
      token = choose_token(row, order);
      return true;
    };
    if (choose_possible()) return kChosen;
    // If all allowed tokens have the score -infinity, they are equally likely.
    editor.set_all(0.0f);
    if (mask && choose_possible()) return kChosen;
    raw_row.scan();
    token = raw_row.most_likely();
    return kChosen;
  }

  const Logits& logits_;
  const Edit* edits_;
  const Masks& masks_;
  Scratch& scratch_;
  EditSpace& space_;
};

template <typename T>
void choose_all(const Logits& logits, const Order* orders, int32_t num_orders, const Edit* edits,
                const Masks& masks, int64_t* tokens, int32_t* states) {
  // With few scores, waking the other threads takes longer than the work.
  constexpr int64_t kFewScores = 1 << 17;
  std::atomic<int32_t> num_taken{0};
#pragma omp parallel if (num_orders > 1 && int64_t{num_orders} * logits.vocab_size > kFewScores)
  {
    thread_local Scratch scratch;
    thread_local EditSpace space;
    Chooser<T> chooser(logits, edits, masks, scratch, space);
    // A thread takes its next order before it processes the current one, so that the scores can be
    // prefetched. The last orders are taken one by one, which balances the threads.
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

// Chooses a token for each order: `tokens` and `states` are [num_orders].
extern "C" void troika_sample(const Logits* logits, const Order* orders, int32_t num_orders,
                              const Edit* edits, const Masks* masks, int64_t* tokens,
                              int32_t* states) {
  const auto choose = logits->is_bf16 ? choose_all<Bf16> : choose_all<float>;
  choose(*logits, orders, num_orders, edits, *masks, tokens, states);
}
