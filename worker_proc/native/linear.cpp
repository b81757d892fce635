// Weights of linear layers: their layout, and the right to use AMX.

#include "products.h"

#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

bool troika_has_tiles = false;

// Requests the tile registers from the operating system.
extern "C" void troika_enable_tiles() {
#ifdef __AMX_BF16__
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  troika_has_tiles = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#endif
}

// Packs a weight, [num_outputs, num_inputs]; see products.h. With `gates`, half of the outputs are
// gates and half factors, and the panels alternate between them.
extern "C" void troika_pack(const void* weight, int32_t is_bf16, int32_t num_outputs,
                            int32_t num_inputs, int32_t gates, void* packed) {
  const int64_t value = is_bf16 ? 2 : 4, per_unit = 4 / value;
  const int64_t units = (num_inputs + per_unit * kUnitStep - 1) / (per_unit * kUnitStep) * kUnitStep;
  const int64_t half = num_outputs / 2;
  const auto place = [&](int64_t output) {
    if (!gates) return output;
    const int64_t column = output % half;
    return column / kLanes * kPairOutputs + (output < half ? 0 : kLanes) + column % kLanes;
  };
  const char* from = static_cast<const char*>(weight);
  char* to = static_cast<char*>(packed);  // zeroed
#pragma omp parallel for schedule(static)
  for (int64_t output = 0; output < num_outputs; output++) {
    const int64_t at = place(output), panel = at / kLanes, lane = at % kLanes;
    for (int64_t input = 0; input < num_inputs; input++) {
      const int64_t unit = (panel * units + input / per_unit) * kLanes + lane;
      std::memcpy(to + unit * 4 + input % per_unit * value,
                  from + (output * num_inputs + input) * value, value);
    }
  }
}
