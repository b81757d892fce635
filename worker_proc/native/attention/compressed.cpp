// Attention over a window and over compressed entries; called by attention/compressed_backend.py.

#include "attention/compressed_attention.h"

extern "C" void troika_attend_compressed(const CompressedLayer* layer, const Step* step,
                                         const CompressedRows* rows, void* out) {
  if (layer->is_bf16)
    Compressed<Bf16>(*layer, *step, *rows).compute(static_cast<Bf16*>(out));
  else
    Compressed<float>(*layer, *step, *rows).compute(static_cast<float*>(out));
}
