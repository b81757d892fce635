// Attention of one module; called by attention/native.py.

#include "attention/pair_attention.h"
#include "attention/latent_attention.h"
#include "attention/text_attention.h"

#include <omp.h>

namespace {

template <typename T>
void attend_all(const Layer& layer, const Step& step, const Rows& query, const Rows& key,
                const Rows& value, const RowTerms& terms, T* out, float scale, float softcap) {
  Crew crew;
#pragma omp parallel
  {
    Team team(crew, omp_get_thread_num(), omp_get_num_threads());
    if (layer.is_latent)
      attend_latent(team, layer, step, query, key, value, out, scale);
    else
      attend_any(team, layer, step, query, key, value, terms, out,
                 layer.num_heads * layer.value_head_dim, scale, softcap);
  }
}

}  // namespace

extern "C" void troika_attend(const Layer* layer, const Step* step, const Rows* query,
                              const Rows* key, const Rows* value, const RowTerms* terms, void* out,
                              float scale, float softcap) {
  if (layer->is_bf16)
    attend_all(*layer, *step, *query, *key, *value, *terms, static_cast<Bf16*>(out), scale,
               softcap);
  else
    attend_all(*layer, *step, *query, *key, *value, *terms, static_cast<float*>(out), scale,
               softcap);
}

// For layers that are not causal; their pools, blocks and formats are not read.
extern "C" void troika_attend_texts(const Layer* layer, const WholeTexts* texts, const Rows* query,
                                    const Rows* key, const Rows* value, void* out, float scale,
                                    float softcap) {
  if (layer->is_bf16)
    attend_texts(*layer, *texts, *query, *key, *value, static_cast<Bf16*>(out), scale, softcap);
  else
    attend_texts(*layer, *texts, *query, *key, *value, static_cast<float*>(out), scale, softcap);
}

// Whether the layouts and kernels of pair_attention.h exist here.
extern "C" int32_t troika_has_pairs() {
#ifdef TROIKA_HAS_PAIRS
  return 1;
#else
  return 0;
#endif
}
