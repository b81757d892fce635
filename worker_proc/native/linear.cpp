// Weights of linear layers: packing, rounding, and the right to use AMX.

#include <algorithm>
#include <vector>

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

// Where an output lies in the panels. With `gates`, half of the outputs are gates and half factors,
// and the panels alternate between them.
int64_t place_of(int64_t output, int64_t num_outputs, bool gates) {
  if (!gates) return output;
  const int64_t half = num_outputs / 2, column = output % half;
  return column / kLanes * kPairOutputs + (output < half ? 0 : kLanes) + column % kLanes;
}

// The codes of one output, with zeros past the last input.
template <class Code>
class CodedOutput {
 public:
  CodedOutput(const Bf16* weight, int64_t num_inputs)
      : values_((num_inputs + kMostInputs - 1) / kMostInputs * kMostInputs), codes_(values_.size()) {
    for (int64_t i = 0; i < num_inputs; i++) values_[i] = widen(weight[i]);
    const auto size = static_cast<int64_t>(values_.size());
    const int64_t group = std::min(Code::kGroupTiles, size) * kTileInputs;
    for (int64_t first = 0; first < size; first += group)
      find(first, std::min(group, size - first));
  }

  const std::vector<int8_t>& codes() const { return codes_; }
  const std::vector<float>& scales() const { return scales_; }  // of the groups

  // The weights that the codes stand for.
  void save(Bf16* weight, int64_t num_inputs) const {
    for (int64_t i = 0; i < num_inputs; i++)
      narrow(codes_[i] * scales_[i / kTileInputs / Code::kGroupTiles], weight[i]);
  }

 private:
  static constexpr int64_t kMostInputs = CodedUnits::kUnitInputs * kUnitStep;  // of a tile

  void find(int64_t first, int64_t size) {
    constexpr float kNothing = 1e-30f;  // products of less are not exact
    const Rounding rounding{&values_[first], size};
    const bool is_something = std::fabs(rounding.greatest()) > kNothing;
    const float scale = is_something ? Code::scale_for(rounding) : 0.0f;
    const float inverse = is_something ? 1.0f / scale : 0.0f;
    scales_.push_back(scale);
    for (int64_t i = first; i < first + size; i += kLanes) {
      const Vec codes = Rounding::codes<Code>(load(&values_[i]), inverse);
      for (int lane = 0; lane < kLanes; lane++) codes_[i + lane] = static_cast<int8_t>(codes[lane]);
    }
  }

  std::vector<float> values_, scales_;
  std::vector<int8_t> codes_;
};

template <class W, class Code>
void pack_codes(const Bf16* weight, int64_t num_outputs, int64_t num_inputs, bool gates,
                uint8_t* packed, typename Code::Scale* scales) {
  constexpr int64_t kStepInputs = W::kUnitInputs * kUnitStep;
  const int64_t num_units = (num_inputs + kStepInputs - 1) / kStepInputs * kUnitStep;
  const W panels{packed, scales, num_units, 0};
#pragma omp parallel for schedule(static)
  for (int64_t output = 0; output < num_outputs; output++) {
    const CodedOutput<Code> coded(weight + output * num_inputs, num_inputs);
    const int64_t at = place_of(output, num_outputs, gates), pair = at / kPairOutputs;
    const int half = static_cast<int>(at / kLanes % 2);
    panels.place(coded.codes().data(), pair, half, at % kLanes, packed);
    for (int64_t unit = 0; unit < num_units; unit += kUnitStep)
      narrow(coded.scales()[unit / kUnitStep / Code::kGroupTiles],
             scales[panels.scales_at(pair, half, unit) + at % kLanes]);
  }
}

template <class Code>
void round_to_codes(Bf16* weight, int64_t num_outputs, int64_t num_inputs) {
#pragma omp parallel for schedule(static)
  for (int64_t output = 0; output < num_outputs; output++) {
    Bf16* row = weight + output * num_inputs;
    CodedOutput<Code>(row, num_inputs).save(row, num_inputs);
  }
}

}  // namespace

// Packs a weight, [num_outputs, num_inputs], as units; see weights.h. With `gates`, half of the
// outputs are gates and half factors, and the panels alternate between them. All of `packed` is
// written.
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

// The multiple of inputs that codes are padded to.
extern "C" int32_t troika_coded_inputs(int32_t format) {
  if (format == kInt8ForCodes) return CodedUnits::kUnitInputs * kUnitStep;
  return format == kInt4 && troika_has_tiles ? Int4::kGroupTiles * kTileInputs : kTileInputs;
}

// Packs a weight in bfloat16 as codes with scales, into zeros.
extern "C" void troika_pack_codes(const void* weight, int32_t format, int32_t num_outputs,
                                  int32_t num_inputs, int32_t gates, void* packed, void* scales) {
  const auto* from = static_cast<const Bf16*>(weight);
  auto* codes = static_cast<uint8_t*>(packed);
  if (format == kInt8)
    return pack_codes<CodedPanels<Int8>, Int8>(from, num_outputs, num_inputs, gates, codes,
                                               static_cast<float*>(scales));
  if (format == kInt8ForCodes)
    return pack_codes<CodedUnits, Int8>(from, num_outputs, num_inputs, gates, codes,
                                        static_cast<float*>(scales));
  auto pack = pack_codes<CodedPanels<Int4>, Int4>;
#ifdef __AMX_BF16__
  if (troika_has_tiles) pack = pack_codes<CodedGroups, Int4>;
#endif
  pack(from, num_outputs, num_inputs, gates, codes, static_cast<Bf16*>(scales));
}

// Rounds a weight in bfloat16 to what its codes stand for.
extern "C" void troika_round(void* weight, int32_t format, int32_t num_outputs,
                             int32_t num_inputs) {
  (format == kInt4 ? round_to_codes<Int4> : round_to_codes<Int8>)(static_cast<Bf16*>(weight),
                                                                  num_outputs, num_inputs);
}
