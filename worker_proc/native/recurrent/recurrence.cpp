// Entry points of causal convolutions and recurrences, for one module; called by native/recurrence.py.

#include "recurrent/channel_scan.h"
#include "recurrent/recurrence.h"
#include "recurrent/selective_scan.h"

namespace {

template <typename T>
void prepare(const HeadRows& heads) {
  const int64_t num_items = int64_t(heads.num_rows) * heads.num_heads;
#pragma omp parallel for schedule(static) if (num_items * heads.dim > 16384)
  for (int64_t item = 0; item < num_items; item++)
    prepare_head(static_cast<const T*>(heads.rows) + item / heads.num_heads * heads.row_stride +
                     item % heads.num_heads * heads.dim,
                 heads.out + item * heads.dim, heads);
}

template <typename T>
void scan(const Scan& s, const RecurrentTexts& texts) {
  if (s.corrects)
    s.has_key_decays ? scan<T, true, true>(s, texts) : scan<T, true, false>(s, texts);
  else
    s.has_key_decays ? scan<T, false, true>(s, texts) : scan<T, false, false>(s, texts);
}

}  // namespace

// Convolves the channels of each text with `size` taps; the last tap is the row itself.
extern "C" void troika_convolve(const Convolution* convolution, const RecurrentTexts* texts) {
  convolution->is_bf16 ? convolve<Bf16>(*convolution, *texts) : convolve<float>(*convolution, *texts);
}

// Converts the rows of heads, [num_rows, num_heads, dim], to float32; see HeadRows.
extern "C" void troika_prepare_heads(const HeadRows* heads) {
  heads->is_bf16 ? prepare<Bf16>(*heads) : prepare<float>(*heads);
}

// For each token and head: state = decay · state, then state += key ⊗ (rate · (value - correction)),
// where the correction is key · state or 0; out = query · state + skip · value.
extern "C" void troika_scan(const Scan* s, const RecurrentTexts* texts) {
  s->is_bf16 ? scan<Bf16>(*s, *texts) : scan<float>(*s, *texts);
}

// For each token, channel and key: state = exp(decay · step) · state + step · input · key, and
// out = Σ query · state + skip · input, times SiLU(gate); a step is softplus(step + bias).
extern "C" void troika_selective_scan(const SelectiveScan* s, const RecurrentTexts* texts) {
  s->is_bf16 ? selective_scan<Bf16>(*s, *texts) : selective_scan<float>(*s, *texts);
}

// For each token and channel: state = decay · state + input, and out = state.
extern "C" void troika_gated_recurrence(const GatedRecurrence* g, const RecurrentTexts* texts) {
  gated_recurrence(*g, *texts);
}

// For each token and channel: the average of the values so far, weighted by exp(key) · exp(decay) to
// the power of their distance; the token's own weight is exp(key + bonus).
extern "C" void troika_weighted_average(const WeightedAverage* w, const RecurrentTexts* texts) {
  w->is_bf16 ? weighted_average<Bf16>(*w, *texts) : weighted_average<float>(*w, *texts);
}
