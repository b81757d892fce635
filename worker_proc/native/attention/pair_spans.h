// The loop over the spans of a context: scores, softmax and weighted values of a tile, span by span.
//
// For each span, the kernels of pair_scores.h, pair_softmax.h and pair_values.h (or pair_amx.h) update
// the state of the tile's rows, one register tile after another, so that the keys, the values and what
// the kernels of a register tile pass on stay in the L1 cache. The scores of the next register tile are
// computed before the softmax of the current one, so that the processor overlaps the two. Keys and
// values are prefetched two spans ahead where memory is slower than the products. Called by PairHead
// (pair_attention.h).

#pragma once

#include "attention/pair_amx.h"
#include "attention/pair_codes.h"
#include "attention/pair_context.h"
#include "attention/pair_scores.h"
#include "attention/pair_softmax.h"
#include "attention/pair_values.h"

#ifdef __AVX512BF16__

namespace {

template <int N>
using Count = std::integral_constant<int, N>;

constexpr int kMaxRegisterRows = 6;    // rows of a register tile
constexpr int kMaxPrefetchingRows = 4;  // with more rows, no registers are left for prefetches
constexpr int kMaxMemoryBoundRows = 8;  // up to this number of rows, memory limits the speed of a span

// Whether a register tile of these rows can issue prefetches.
inline bool has_spare_registers(RowRange rows) {
  const int rest = rows.count % kMaxRegisterRows;
  return rest > 0 && rest <= kMaxPrefetchingRows;
}

// Calls f(number of rows, whether it prefetches) for a register tile; both arguments are integral
// constants.
template <class F>
void with_register_rows(int count, bool prefetches, const F& f) {
  constexpr std::true_type kPrefetches;
  constexpr std::false_type kDoesNot;
  switch (count) {
    case 1: return prefetches ? f(Count<1>{}, kPrefetches) : f(Count<1>{}, kDoesNot);
    case 2: return prefetches ? f(Count<2>{}, kPrefetches) : f(Count<2>{}, kDoesNot);
    case 3: return prefetches ? f(Count<3>{}, kPrefetches) : f(Count<3>{}, kDoesNot);
    case 4: return prefetches ? f(Count<4>{}, kPrefetches) : f(Count<4>{}, kDoesNot);
    case 5: return f(Count<5>{}, kDoesNot);
    case 6: return f(Count<6>{}, kDoesNot);
  }
}

// Attention of some rows of a tile over one context. More than kHalfRows rows must begin with the first
// row of the tile: AMX computes them in two halves, of which the second may have a row too many.
class SpanLoop {
 public:
  SpanLoop(PairTile& tile, RowRange rows, const PairContext& context, Positions positions)
      : tile_(tile),
        rows_(rows),
        context_(context),
        earliest_(std::max(tile.visible_from[rows.first], positions.begin)),
        last_(std::min(tile.position[rows.first + rows.count - 1], positions.end - 1)),
        half_(rows.count > kHalfRows ? (rows.count + 1) / 2 : rows.count),
        has_codes_(context.layer().kv_format != kPlainPools) {}

  // Adds the visible positions to the state of the rows. is_in_cache: keys and values have been read or
  // prefetched.
  void run(const UpcomingRow& upcoming, bool is_in_cache) {
    if (earliest_ > last_) return;
    const AmxRegisters registers(half_);
    is_memory_bound_ = rows_.count <= kMaxMemoryBoundRows && !is_in_cache;
    PairSpan span = context_.span(earliest_ / kSpanSlots * kSpanSlots, earliest_, last_);
    if (is_memory_bound_) begin_prefetch(span, upcoming);
    widen_keys(span);
    int turn = 0;
    score(span, first_part(), turn);
    for (bool has_next = true; has_next;) {
      has_next = span.base + kSpanSlots <= last_;
      PairSpan next{};
      if (has_next) next = context_.span(span.base + kSpanSlots, earliest_, last_);
      if (is_memory_bound_) prefetch(span.base + 2 * kSpanSlots, upcoming);
      prepare_values(span);
      for (RowRange part = first_part(); part.count > 0; part = part_after(part), turn ^= 1) {
        if (part_after(part).count > 0) {
          score(span, part_after(part), turn ^ 1);
        } else if (has_next) {
          widen_keys(next);
          score(next, first_part(), turn ^ 1);
        }
        has_codes_ ? softmax<true>(span, part, turn) : softmax<false>(span, part, turn);
        accumulate(span, part);
      }
      if ((span.base + span.count) % kSectionSlots == 0)
        for (int r = rows_.first; r < rows_.first + rows_.count; r++) tile_.end_section(r);
      span = next;
    }
  }

 private:
  bool has_halves() const { return rows_.count > kHalfRows; }

  // Parts are register tiles. With AMX, all rows are one part. Past the last part, the count is 0.
  RowRange first_part() const { return part_from(rows_.first); }
  RowRange part_after(RowRange part) const { return part_from(part.first + part.count); }
  RowRange part_from(int first) const {
    const int most = troika_has_tiles ? kPairRows : kMaxRegisterRows;
    return {first, std::min(most, rows_.first + rows_.count - first)};
  }

  void widen_keys(PairSpan& span) {
    if (has_codes_)
      with_codes(context_.layer(),
                 [&](auto code) { widen_span_keys<decltype(code)>(tile_, span); });
  }

  void score(const PairSpan& span, RowRange part, int turn) {
    float(*const scores)[kSpanSlots] = tile_.scores[turn];
#ifdef __AMX_BF16__
    if (troika_has_tiles) {
      if (has_halves()) return score_halves_with_amx(tile_, half_, span, scores);
      return score_with_amx(tile_, part.first, span, scores);
    }
#endif
    with_register_rows(part.count, is_memory_bound_, [&](auto count, auto prefetches) {
      const auto score_rows = troika_uses_floats
                                  ? score_with_floats<count.value, prefetches.value>
                                  : score_with_dot_products<count.value, prefetches.value>;
      score_rows(tile_, part.first, span, scores);
    });
    tile_.deferred.fetch(tile_.deferred_lines_per_call);
  }

  template <bool kHasScales>
  void softmax(const PairSpan& span, RowRange part, int turn) {
    for (int i = 0; i < part.count; i++)
      softmax_row<kHasScales>(tile_, part.first + i, span, tile_.scores[turn][i]);
  }

  // Redirects the values of a span to copies where the kernels cannot read them in place.
  void prepare_values(PairSpan& span) {
    if (has_codes_)
      return with_codes(context_.layer(),
                        [&](auto code) { widen_span_values<decltype(code)>(tile_, span); });
#ifdef __AMX_BF16__
    if (troika_has_tiles) return join_value_groups(tile_, span);
#endif
    mask_last_group(tile_, span);
  }

  void accumulate(const PairSpan& span, RowRange part) {
#ifdef __AMX_BF16__
    if (troika_has_tiles) {
      if (has_halves()) return accumulate_halves_with_amx(tile_, half_, span);
      return accumulate_with_amx(tile_, part.first, span);
    }
#endif
    with_register_rows(part.count, is_memory_bound_, [&](auto count, auto prefetches) {
      accumulate_rows<count.value, prefetches.value>(tile_, part.first, span);
    });
    tile_.deferred.fetch(tile_.deferred_lines_per_call);
  }

  // Prefetches the first two spans, unless the loop before has done so.
  void begin_prefetch(const PairSpan& first, const UpcomingRow& upcoming) {
    const bool is_fetched = tile_.prefetched_keys == first.keys[first.first_group];
    if (!is_fetched) prefetch(first.base, upcoming);
    if (!is_fetched || first.base + kSpanSlots > last_)
      prefetch(first.base + kSpanSlots, upcoming);
  }

  // Queues the span at `base`, and issues what is left of the span before.
  void prefetch(int base, const UpcomingRow& upcoming) {
    tile_.prefetch.drain();
    tile_.prefetch.clear();
    queue_span(base, upcoming);
    if (troika_has_tiles || !has_spare_registers(rows_)) tile_.prefetch.drain();
  }

  // Past the end of this context, the spans are the first ones of the upcoming context.
  void queue_span(int base, const UpcomingRow& upcoming) {
    if (base <= last_)
      return context_.prefetch(context_.span(base, earliest_, last_), tile_.prefetch);
    if (upcoming.segment < 0) return;
    const PairContext next = context_.of(tile_, upcoming);
    const int index = (base - 1 - last_) / kSpanSlots;
    const int next_base = (upcoming.earliest / kSpanSlots + index) * kSpanSlots;
    if (next_base > upcoming.last) return;
    const PairSpan span = next.span(next_base, upcoming.earliest, upcoming.last);
    if (index == 0) tile_.prefetched_keys = span.keys[span.first_group];
    next.prefetch(span, tile_.prefetch);
  }

  PairTile& tile_;
  const RowRange rows_;
  const PairContext& context_;
  const int earliest_, last_;  // the positions that some row sees
  const int half_;             // rows of one set of AMX accumulators
  const bool has_codes_;
  bool is_memory_bound_ = false;
};

// Attends to the positions of a context that lie in `positions`, which begin at a multiple of
// kSpanSlots. The first spans of the upcoming context are prefetched at the end.
inline void attend_spans(PairTile& tile, RowRange rows, const PairContext& context,
                         Positions positions, const UpcomingRow& upcoming = {},
                         bool is_in_cache = false) {
  SpanLoop(tile, rows, context, positions).run(upcoming, is_in_cache);
}

}  // namespace

#endif
