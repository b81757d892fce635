// Executes a program (program.h), which is the forward of a model or of some layers, over one step.
//
// One parallel region executes all instructions: all threads work on each instruction, and a barrier
// ends it unless joins_next is set. Executor has one function for each kind of instruction, which
// calls the kernels: pointwise.h (norms, activations), products/products.h and epilogues.h
// (projections), attention/rotations.h, attention/pair_attention.h, products/experts.h,
// products/low_rank.h, exchange.h. Values are rounded to the model's dtype where transformers' modules
// round. docs/execution.md shows how a step gets here; native/kernels.py calls the entry point.

#include "products/coded_rows.h"
#include "epilogues.h"
#include "exchange.h"
#include "products/experts.h"
#include "products/grouped_codes.h"
#include "products/int4_panels.h"
#include "products/int8_panels.h"
#include "products/low_rank.h"
#include "attention/pair_attention.h"
#include "pointwise.h"
#include "products/products.h"
#include "program.h"
#include "attention/rotations.h"
#include "step_work.h"

#include <omp.h>

namespace {

struct MovedRows;

template <typename T>
class Executor {
 public:
  Executor(const Run& run, Team& team) : run_(run), team_(team) {}

  void execute(const Instruction& i) {
    switch (i.kind) {
      case kNormalize: return normalize(i);
      case kProject: return project(i);
      case kRotate: return rotate(i);
      case kAttend: return attend_to(i);
      case kAdd: return add(i);
      case kChoose: return choose(i);
      case kGather: return gather(i);
      case kExperts: return compute_experts(i);
      case kCombine: return combine(i);
      case kGate: return gate(i);
      case kCode: return code(i);
      case kEmbed: return embed(i);
      case kKeep: return keep(i);
      case kProjectHeads: return project_heads(i);
      case kPermute: return permute(i);
      case kShrink: return shrink(i);
      case kExpand: return expand(i);
      case kAddRanks: return add_ranks(i);
    }
  }

 private:
  T* row(int buffer, int64_t index) const {
    const Buffer& b = run_.buffers[buffer];
    return reinterpret_cast<T*>(static_cast<char*>(b.data) + index * b.stride);
  }

  UnitRows unit_rows(int buffer) const {
    const Buffer& b = run_.buffers[buffer];
    return {static_cast<const Unit*>(b.data), b.stride / static_cast<int64_t>(sizeof(Unit))};
  }

  CodedRow& coded_row(int buffer, int64_t index) const {
    const Buffer& b = run_.buffers[buffer];
    return *reinterpret_cast<CodedRow*>(static_cast<char*>(b.data) + index * b.stride);
  }

  static Vec round(Vec v) { return rounded(v, T{}); }

  int32_t num_rows(const Instruction& i) const { return num_rows_of(i, run_); }

  // target = norm(source) * weight, for `size` values from `column` on
  void normalize(const Instruction& i) {
    for (int64_t r = team_.first(num_rows(i)); r < team_.last(num_rows(i)); r++)
      normalize_row(row(i.source, r) + i.column, static_cast<const float*>(i.weight),
                    row(i.target, r) + i.column, i.size, i.epsilon, i.rounds_first);
  }

  // Moves the rows that get logits to the front of source and target. A thread moves a range of
  // columns of all rows, so that no row is overwritten before it has been moved.
  void keep(const Instruction& i) {
    int64_t num_in_place = 0;
    while (num_in_place < run_.num_kept && run_.kept[num_in_place] == num_in_place) num_in_place++;
    if (num_in_place == run_.num_kept) return;
    move_kept(run_.buffers[i.source]);
    if (i.target != i.source) move_kept(run_.buffers[i.target]);
  }

  void move_kept(const Buffer& buffer) {
    const int64_t num_lines = buffer.stride / kLine;
    const int64_t first = team_.first(num_lines) * kLine, width = team_.last(num_lines) * kLine - first;
    char* const data = static_cast<char*>(buffer.data) + first;
    char* const moved =
        reinterpret_cast<char*>(space_for<MovedRows>(run_.num_kept * width / sizeof(Unit)));
    for (int64_t r = 0; r < run_.num_kept; r++)
      std::memcpy(moved + r * width, data + run_.kept[r] * buffer.stride, width);
    for (int64_t r = 0; r < run_.num_kept; r++)
      std::memcpy(data + r * buffer.stride, moved + r * width, width);
  }

  // target = factor * the token's row of the table `weight`, [num_outputs][size], of values or of
  // grouped codes. Invalid tokens get a row of NaN.
  void embed(const Instruction& i) {
    const int64_t width = run_.buffers[i.target].stride / static_cast<int64_t>(sizeof(T));
    for (int64_t r = team_.first(num_rows(i)); r < team_.last(num_rows(i)); r++) {
      const int64_t token = run_.tokens[r];
      const bool is_token = token >= 0 && token < i.num_outputs;
      const float factor = is_token ? i.factor : std::numeric_limits<float>::quiet_NaN();
      const int64_t index = is_token ? token : 0;
      T* out = row(i.target, r);
      if (i.format >= kGroupedInt4) {
        look_up(grouped(i), index, i.size, factor, out);
      } else {
        const T* from = static_cast<const T*>(i.weight) + index * i.size;
        for_vectors(i.size, [&](int d, auto count) {
          save(load_any(from + d, count) * factor, out + d, count);
        });
      }
      std::memset(static_cast<void*>(out + i.size), 0, (width - i.size) * sizeof(T));
    }
  }

  // out = factor * the weights of one output, rounded to T. They are one column of each tile.
  static void look_up(const GroupedPanels<T>& w, int64_t output, int32_t size, float factor, T* out) {
    constexpr int64_t kStep = GroupedPanels<T>::kStepInputs;
    const int64_t lane = output % kLanes;
    alignas(64) Unit tile[kStep * kPairOutputs];
    alignas(64) float weights[kStep];
    for (int64_t first = 0, unit = 0; first < size; first += kStep, unit += kUnitStep) {
      w.widen_tile(output / kPairOutputs, output % kPairOutputs / kLanes, unit, tile);
      for (int64_t k = 0; k < kStep; k++) weights[k] = float_of(tile[k * kPairOutputs + lane]);
      for_vectors(static_cast<int32_t>(std::min<int64_t>(kStep, size - first)), [&](int d, auto count) {
        save(round(load(weights + d)) * factor, out + first + d, count);
      });
    }
  }

  // Calls f(value, weight, rows) with the weight in its format and the rows that it multiplies. The
  // type of `value` is that of the rows.
  template <class F>
  void with_weight(const Instruction& i, const F& f) const {
    const UnitRows rows = unit_rows(i.source);
    const Panels panels{static_cast<const Unit*>(i.weight), i.num_units, i.num_pairs};
    if constexpr (std::is_same<T, Bf16>::value) {
      if (i.format == kInt8ForCodes)
        return f(int8_t{}, panels,
                 UnitRows{rows.data + sizeof(CodedRow) / sizeof(Unit), rows.stride});
      if (i.format == kInt8) return f(T{}, coded<Int8Panels, Int8>(i), rows);
#ifdef __AMX_BF16__
      if (i.format == kInt4 && troika_has_tiles) return f(T{}, coded<CodedGroups, Int4>(i), rows);
#endif
      if (i.format == kInt4) return f(T{}, coded<Int4Panels, Int4>(i), rows);
#ifdef __AVX512BW__
      if (i.format == kCompact) return f(T{}, compact(i), rows);
#endif
    }
    if (i.format >= kGroupedInt4) return f(T{}, grouped(i), rows);
    f(T{}, panels, rows);
  }

#ifdef __AVX512BW__
  static CompactPanels compact(const Instruction& i) {
    return {static_cast<const uint8_t*>(i.weight), static_cast<const uint8_t*>(i.scales),
            i.num_units, i.num_pairs};
  }
#endif

  static GroupedPanels<T> grouped(const Instruction& i) {
    const auto* codes = static_cast<const uint8_t*>(i.weight);
    return {{codes, i.scales, i.zeros, i.minimums, i.scale_units, i.minimum_units, i.table, i.format,
             i.scale_type, i.zero, i.group_inputs, i.section_inputs},
            i.num_units,
            i.num_pairs};
  }

  template <class Out>
  void multiply_by(const Instruction& i, const Out& out) {
    with_weight(i, [&](auto value, const auto& w, UnitRows rows) {
      multiply<decltype(value)>(team_, w, rows, num_rows(i), out);
    });
  }

  template <class W, class Code>
  static W coded(const Instruction& i) {
    return {static_cast<const uint8_t*>(i.weight),
            static_cast<const typename Code::Scale*>(i.scales), i.num_units, i.num_pairs};
  }

  // target = epilogue(source * weight + bias)
  void project(const Instruction& i) {
    const Outputs<T> to(i, run_.buffers);
    switch (i.epilogue) {
      case kStore:
        return multiply_by(i, [to](int64_t r, int64_t pair, auto low, auto high) {
          to.store(r, pair, pair, low, high);
        });
      case kAddTo:
        return multiply_by(i, [to](int64_t r, int64_t pair, auto low, auto high) {
          to.add(r, pair, low, high);
        });
      case kActivate:
        return multiply_by(i, [to](int64_t r, int64_t pair, auto gate, auto up) {
          to.activate(r, pair, pair, gate, up);
        });
      case kSplit:
        return multiply_by(i, [to](int64_t r, int64_t pair, auto gate, auto up) {
          to.split(r, pair, gate, up);
        });
    }
  }

  // target = source * weight of the head, for each head. A head has head_dim values in source and
  // target_dim values in target, of which the first num_outputs are written. The values after a head's
  // inputs, up to the last unit of its weight, must be finite.
  void project_heads(const Instruction& i) {
    const Panels w{static_cast<const Unit*>(i.weight), i.num_units, i.num_pairs};
    const int64_t head_units = i.head_dim * sizeof(T) / sizeof(Unit);
    multiply_heads<T>(team_, w, i.num_heads, unit_rows(i.source), head_units, num_rows(i),
                      [&](int64_t head, int64_t r, int64_t pair, Vec low, Vec high) {
                        T* out = row(i.target, r) + head * i.target_dim;
                        const Vec sums[] = {low, high};
                        for (int half = 0; half < 2; half++) {
                          const int64_t at = pair * kPairOutputs + half * kLanes;
                          const int64_t count = std::min<int64_t>(i.num_outputs - at, kLanes);
                          if (count > 0) save(sums[half], out + at, static_cast<int>(count));
                        }
                      });
  }

  // LoRA: inner = down * source, for the num_units AdaptedSites in `weight`.
  void shrink(const Instruction& i) {
    shrink_all<T>(team_, *run_.adaptation, static_cast<const AdaptedSite*>(i.weight), i.num_units,
                  i.size, [&](int64_t r) -> const T* { return row(i.source, r); });
  }

  // LoRA: target += scale * up * inner, for the same sites
  void expand(const Instruction& i) {
    expand_all<T>(team_, *run_.adaptation, static_cast<const AdaptedSite*>(i.weight), i.num_units,
                  [&](int64_t r) { return row(i.target, r); });
  }

  // Queries and keys in source, in place: optional norms of each head, and the rotary embedding.
  void rotate(const Instruction& i) {
    return i.has_wide_angles ? rotate_by<float>(i) : rotate_by<T>(i);
  }

  // Products are rounded to the type of the angles, A, as transformers does.
  template <typename A>
  void rotate_by(const Instruction& i) {
    for (int64_t r = team_.first(num_rows(i)); r < team_.last(num_rows(i)); r++) {
      const int64_t at = (run_.positions ? run_.positions[r] : r) * i.num_rotated;
      const A* cosines = static_cast<const A*>(run_.cosines[i.angles]) + at;
      const A* sines = static_cast<const A*>(run_.sines[i.angles]) + at;
      T* x = row(i.source, r);
      for (int head = 0; head < i.num_heads + i.num_kv_heads; head++, x += i.head_dim) {
        const float* norm = head < i.num_heads ? i.query_norm : i.key_norm;
        if (norm) normalize_row(x, norm, x, i.head_dim, i.epsilon, i.rounds_first);
        if (i.rotation == kHalves) rotate_halves(x, cosines, sines, i.num_rotated / 2);
        if (i.rotation == kPairs) rotate_pairs(x, cosines, sines, i.num_rotated);
      }
    }
  }

  // target = attention of source, whose row has the queries, keys and values of all heads. Stores the
  // keys and values.
  void attend_to(const Instruction& i) {
    const Layer& layer = *i.layer;
    const int64_t source_stride = run_.buffers[i.source].stride / sizeof(T);
    const int64_t target_stride = run_.buffers[i.target].stride / sizeof(T);
    const T* query = row(i.source, 0);
    const T* key = query + layer.num_heads * layer.head_dim;
    const T* value = key + layer.num_kv_heads * layer.head_dim;
    Step step = *run_.steps[i.group];
    static thread_local std::vector<uint8_t> is_read;
    if (i.of_kept) {
      is_read.assign(run_.num_rows, 0);
      for (int32_t k = 0; k < run_.num_kept; k++) is_read[run_.kept[k]] = 1;
      step.is_read = is_read.data();
    }
    attend_any(team_, layer, step, {query, source_stride, layer.head_dim},
               {key, source_stride, layer.head_dim}, {value, source_stride, layer.value_head_dim},
               RowTerms{}, row(i.target, 0), target_stride, i.scale, i.softcap);
  }

  // target += factor * source
  void add(const Instruction& i) {
    for (int64_t r = team_.first(num_rows(i)); r < team_.last(num_rows(i)); r++)
      for (int d = 0; d < i.size; d += kLanes)
        accumulate(row(i.target, r) + d, load(row(i.source, r) + d), i.factor);
  }

  // target = the sum of all ranks' rows, in pieces that fit into a slot. If a rank is missing, it
  // returns early, and continues when it is executed again.
  void add_ranks(const Instruction& i) {
    Exchange& exchange = *run_.exchange;
    const int64_t row_bytes = i.size * static_cast<int64_t>(sizeof(T));
    const int64_t stride = run_.buffers[i.target].stride, count = num_rows(i);
    const int64_t most = exchange.slot_bytes / row_bytes;
    for (int64_t first = exchange.num_summed; first < count; first += most) {
      uint8_t* const data = reinterpret_cast<uint8_t*>(row(i.target, first));
      const ExchangedRows rows{data, std::min(count - first, most), row_bytes, stride};
      const int64_t own_first = team_.first(rows.num_rows), own_last = team_.last(rows.num_rows);
      // All threads read this before the barrier; thread 0 changes it after the barrier.
      const bool is_published = exchange.is_published;
      const int64_t sequence = exchange.sequence + !is_published;
      if (!is_published) copy_to_slot(exchange, rows, sequence, own_first, own_last);
      team_.barrier();
      if (team_.id == 0) await_all(exchange, sequence, first, is_published);
      team_.barrier();
      if (exchange.missing != kAllPublished) return;
      for (int64_t r = own_first; r < own_last; r++) add_row<T>(exchange, rows, sequence, r);
    }
  }

  // Publishes the slot, unless it has been published, and waits for the other ranks.
  static void await_all(Exchange& exchange, int64_t sequence, int64_t first, bool is_published) {
    exchange.sequence = sequence;
    if (!is_published) publish(exchange, sequence);
    exchange.missing = await_ranks(exchange, sequence, exchange.wait_ns);
    exchange.is_published = exchange.missing != kAllPublished;
    exchange.num_summed = exchange.is_published ? static_cast<int32_t>(first) : 0;
  }

  // target = f(gate) * up with the bits of kActivate, after kSplit has stored gates and factors in
  // source
  void gate(const Instruction& i) {
    for (int64_t r = team_.first(num_rows(i)); r < team_.last(num_rows(i)); r++)
      for (int d = 0; d < i.size; d += kLanes) {
        const Vec opened = activation_of<T>(load(row(i.source, r) + d), i.activation);
        save(round(opened) * load(row(i.source, r) + i.column + d), row(i.target, r) + d, kLanes);
      }
  }

  // target = quantized rows of source (products/coded_rows.h); with num_chosen, a row for each choice
  void code(const Instruction& i) {
    const int64_t count = int64_t{num_rows(i)} * std::max(i.num_chosen, 1);
    if constexpr (std::is_same<T, Bf16>::value)
      for (int64_t r = team_.first(count); r < team_.last(count); r++)
        code_row(row(i.source, r), i.size, coded_row(i.target, r));
  }

  // target = the values of source in the order of the indices in `weight`, int32, followed by zeros
  void permute(const Instruction& i) {
    const auto* order = static_cast<const int32_t*>(i.weight);
    const int64_t width = run_.buffers[i.target].stride / static_cast<int64_t>(sizeof(T));
    for (int64_t r = team_.first(num_rows(i)); r < team_.last(num_rows(i)); r++) {
      const T* from = row(i.source, r);
      T* out = row(i.target, r);
      for (int64_t d = 0; d < i.size; d++) out[d] = from[order[d]];
      std::memset(static_cast<void*>(out + i.size), 0, (width - i.size) * sizeof(T));
    }
  }

  // choices = the experts of each row, from the logits in source
  void choose(const Instruction& i) {
    std::vector<float> scratch;
    for (int64_t r = team_.first(num_rows(i)); r < team_.last(num_rows(i)); r++)
      choose_experts(row(i.source, r), i.num_experts, i.num_chosen,
                     {i.normalizes != 0, i.rounds_weights != 0}, choices(i, r), scratch);
  }

  // target = a copy of each row of source, or of its codes, for each of its experts, sorted by expert
  void gather(const Instruction& i) {
    const SortedChoices sorted = sort(i);
    const int64_t size = std::min(run_.buffers[i.source].stride, run_.buffers[i.target].stride);
    for (int64_t r = team_.first(num_rows(i)); r < team_.last(num_rows(i)); r++)
      for (int c = 0; c < i.num_chosen; c++)
        std::memcpy(row(i.target, sorted.position(r * i.num_chosen + c)), row(i.source, r), size);
  }

  // target = epilogue(source * weight of the expert + bias), for sorted rows. The weights of the
  // experts follow each other.
  void compute_experts(const Instruction& i) {
    const SortedChoices sorted = sort(i);
    const Outputs<T> to(i, run_.buffers);
    with_weight(i, [&](auto value, const auto& w, UnitRows rows) {
      multiply_sorted<decltype(value)>(
          team_, sorted, i.num_experts, w, rows,
          [&](int64_t expert, int64_t r, int64_t pair, auto low, auto high) {
            const int64_t weight_pair = expert * i.num_pairs + pair;
            if (i.epilogue == kActivate) return to.activate(r, pair, weight_pair, low, high);
            if (i.epilogue == kApply) return to.apply(r, pair, weight_pair, low, high);
            to.store(r, pair, weight_pair, low, high);
          });
    });
  }

  // target = the sum of the results of a row's experts in source, times their weights
  void combine(const Instruction& i) {
    const SortedChoices sorted = sort(i);
    for (int64_t r = team_.first(num_rows(i)); r < team_.last(num_rows(i)); r++)
      for (int d = 0; d < i.size; d += kLanes) {
        Vec sum = splat(0.0f);
        for (int c = 0; c < i.num_chosen; c++) {
          const Vec value = load(row(i.source, sorted.position(r * i.num_chosen + c)) + d);
          const Vec product = value * choices(i, r)[c].weight;
          sum += i.rounds_weights ? round(product) : product;
        }
        save(sum, row(i.target, r) + d, kLanes);
      }
  }

  Choice* choices(const Instruction& i, int64_t r) const {
    return reinterpret_cast<Choice*>(row(i.choices, r));
  }

  SortedChoices sort(const Instruction& i) const {
    return SortedChoices(num_rows(i), i.num_chosen, i.num_experts,
                         [&](int64_t r) { return choices(i, r); });
  }

  const Run& run_;
  Team& team_;
};

template <typename T>
int32_t execute_all(const Program& program, const Run& run) {
  Crew crew;
  int32_t num_done = program.num_instructions;
#pragma omp parallel if (!is_for_one_thread(program, run))
  {
    Team team(crew, omp_get_thread_num(), omp_get_num_threads());
    Executor<T> executor(run, team);
    for (int32_t i = program.num_done; i < program.num_instructions; i++) {
      const Instruction& instruction = program.instructions[i];
      executor.execute(instruction);
      if (instruction.kind == kAddRanks && run.exchange->missing != kAllPublished) {
        if (team.id == 0) num_done = i;
        break;
      }
      if (!instruction.joins_next) team.barrier();
    }
  }
  return num_done;
}

}  // namespace

extern "C" int32_t troika_execute(const Program* program, const Run* run) {
  return (program->is_bf16 ? execute_all<Bf16> : execute_all<float>)(*program, *run);
}
