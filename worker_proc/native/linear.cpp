// Weights of linear layers: their layout, and the right to use AMX.

#include <algorithm>

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

namespace {

// Packs 16 outputs into one panel: 16 units of each at a time, a cache line on both sides. `rows`
// has the outputs of the panel, null where there is none; their last unit may be incomplete.
void pack_panel(const char* const* rows, int64_t num_bytes, int64_t units, char* panel) {
  constexpr int64_t kUnit = sizeof(Unit);
  const int64_t whole = num_bytes / kUnit, rest = num_bytes % kUnit;
  for (int64_t first = 0; first < units; first += kUnitStep) {
    Unit block[kUnitStep][kLanes] = {};
    const int64_t count = std::max<int64_t>(0, std::min(kUnitStep, whole - first));
    for (int64_t lane = 0; lane < kLanes; lane++) {
      if (!rows[lane]) continue;
      const char* from = rows[lane] + first * kUnit;
      for (int64_t i = 0; i < count; i++) std::memcpy(&block[i][lane], from + i * kUnit, kUnit);
      if (rest && whole >= first && whole < first + kUnitStep)
        std::memcpy(&block[count][lane], from + count * kUnit, rest);
    }
    std::memcpy(panel + first * kLanes * kUnit, block, sizeof block);
  }
}

}  // namespace

// Packs a weight, [num_outputs, num_inputs]; see products.h. With `gates`, half of the outputs are
// gates and half factors, and the panels alternate between them. Everything in `packed` is written.
extern "C" void troika_pack(const void* weight, int32_t is_bf16, int32_t num_outputs,
                            int32_t num_inputs, int32_t gates, void* packed) {
  const int64_t num_bytes = num_inputs * int64_t(is_bf16 ? 2 : 4);
  const int64_t step = kUnitStep * sizeof(Unit);
  const int64_t units = (num_bytes + step - 1) / step * kUnitStep;
  const int64_t columns = gates ? num_outputs / 2 : num_outputs;
  const int64_t per_pair = gates ? kLanes : kPairOutputs;
  const int64_t num_panels = (columns + per_pair - 1) / per_pair * 2;
  const char* from = static_cast<const char*>(weight);
  char* to = static_cast<char*>(packed);
#pragma omp parallel for schedule(static)
  for (int64_t panel = 0; panel < num_panels; panel++) {
    const char* rows[kLanes];
    for (int64_t lane = 0; lane < kLanes; lane++) {
      const int64_t column = (gates ? panel / 2 : panel) * kLanes + lane;
      const int64_t output = column + (gates && panel % 2 ? columns : 0);
      rows[lane] = column < columns ? from + output * num_bytes : nullptr;
    }
    pack_panel(rows, num_bytes, units, to + panel * units * kLanes * sizeof(Unit));
  }
}
