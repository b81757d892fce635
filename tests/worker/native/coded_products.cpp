// Products of rows of codes with whatever vector instructions the compiler may use.

#include "products/coded_rows.h"
#include "products/products.h"

bool troika_has_tiles = false;
bool troika_uses_floats = false;

extern "C" void coded_products(const Bf16* rows, char* coded, const Unit* weight,
                               const float* scales, float* out, int64_t num_rows, int64_t size,
                               int64_t stride, int64_t num_units, int64_t num_pairs) {
  const auto row = [&](int64_t r) -> CodedRow& {
    return *reinterpret_cast<CodedRow*>(coded + r * stride);
  };
  for (int64_t r = 0; r < num_rows; r++) code_row(rows + r * size, size, row(r));
  const UnitRows codes{reinterpret_cast<const Unit*>(row(0).codes()),
                       stride / static_cast<int64_t>(sizeof(Unit))};
  multiply_with_vectors<int8_t>(
      Panels{weight, num_units, num_pairs}, codes, 0, num_rows, 0, num_pairs,
      [&](int64_t r, int64_t pair, VecInt low, VecInt high) {
        const Vec bias = splat(0.5f);
        float* to = out + (r * num_pairs + pair) * kPairOutputs;
        const float* by_output = scales + pair * kPairOutputs;
        save(row(r).products(low, load(by_output), bias), to, kLanes);
        save(row(r).products(high, load(by_output + kLanes), bias), to + kLanes, kLanes);
      });
}
