// Entry points that pack and quantize the weights of linear layers, and that choose the instructions of
// products. Called by native/kernels.py when the library and a model are loaded. Layouts: weights.h.

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "products/int4_panels.h"
#include "products/int8_panels.h"
#include "products/products.h"

#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

bool troika_has_tiles = false;
bool troika_uses_floats = false;

// Requests permission to use the AMX tile registers from the operating system.
extern "C" void troika_enable_tiles() {
#ifdef __AMX_BF16__
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  troika_has_tiles = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#endif
}

// Whether float32 multiply-adds give the bits of vdpbf16ps on this CPU, and are faster.
extern "C" int32_t troika_floats_are_faster() {
#ifdef __AVX512BF16__
  return floats_are_equal() && floats_are_faster();
#else
  return false;
#endif
}

// Sets whether products use float32 multiply-adds (float_products.h).
extern "C" void troika_use_floats(int32_t uses) { troika_uses_floats = uses != 0; }

namespace {

// A weight in the layout of a checkpoint, [num_outputs, num_inputs].
struct PlainWeight {
  const void* data;
  int64_t num_outputs, num_inputs, item_bytes;
  bool gates;  // the first half of the outputs are gates, the second half factors; panels alternate

  int64_t num_units() const {  // of a panel
    constexpr int64_t kStep = kUnitStep * sizeof(Unit);
    return (num_inputs * item_bytes + kStep - 1) / kStep * kUnitStep;
  }

  int64_t num_columns() const { return gates ? num_outputs / 2 : num_outputs; }

  int64_t num_pairs() const {
    const int64_t per_pair = gates ? kLanes : kPairOutputs;
    return (num_columns() + per_pair - 1) / per_pair;
  }

  // Packs 16 outputs, 16 units of each at a time: a cache line of the source and of the target. The
  // last unit of an output may be incomplete.
  void pack_panel(int64_t panel, Unit* to) const {
    constexpr int64_t kUnit = sizeof(Unit);
    const int64_t num_bytes = num_inputs * item_bytes;
    const int64_t whole = num_bytes / kUnit, rest = num_bytes % kUnit;
    const char* rows[kLanes];
    for (int64_t lane = 0; lane < kLanes; lane++) rows[lane] = row(panel, lane);
    for (int64_t first = 0; first < num_units(); first += kUnitStep) {
      Unit block[kUnitStep][kLanes] = {};
      const int64_t count = std::max<int64_t>(0, std::min(kUnitStep, whole - first));
      for (int64_t lane = 0; lane < kLanes; lane++) {
        if (!rows[lane]) continue;
        const char* from = rows[lane] + first * kUnit;
        for (int64_t i = 0; i < count; i++) std::memcpy(&block[i][lane], from + i * kUnit, kUnit);
        if (rest && whole >= first && whole < first + kUnitStep)
          std::memcpy(&block[count][lane], from + count * kUnit, rest);
      }
      std::memcpy(to + first * kLanes, block, sizeof block);
    }
  }

 private:
  // The weights of one output of a panel, or null past the last output.
  const char* row(int64_t panel, int64_t lane) const {
    const int64_t column = (gates ? panel / 2 : panel) * kLanes + lane;
    if (column >= num_columns()) return nullptr;
    const int64_t output = column + (gates && panel % 2 ? num_columns() : 0);
    return static_cast<const char*>(data) + output * num_inputs * item_bytes;
  }
};

// The position of an output in the panels. With `gates`, panels of gates and of factors alternate.
int64_t position_of(int64_t output, int64_t num_outputs, bool gates) {
  if (!gates) return output;
  const int64_t half = num_outputs / 2, column = output % half;
  return column / kLanes * kPairOutputs + (output < half ? 0 : kLanes) + column % kLanes;
}

// The codes of one output, padded with zeros.
template <class Code>
class CodedOutput {
 public:
  CodedOutput(const Bf16* weight, int64_t num_inputs)
      : values_((num_inputs + kMaxInputs - 1) / kMaxInputs * kMaxInputs), codes_(values_.size()) {
    for (int64_t i = 0; i < num_inputs; i++) values_[i] = widen(weight[i]);
    const auto size = static_cast<int64_t>(values_.size());
    const int64_t group = std::min(Code::kGroupTiles, size) * kTileInputs;
    for (int64_t first = 0; first < size; first += group)
      quantize(first, std::min(group, size - first));
  }

  const std::vector<int8_t>& codes() const { return codes_; }
  const std::vector<float>& scales() const { return scales_; }  // one for each group of inputs

  // Writes the dequantized weights.
  void save(Bf16* weight, int64_t num_inputs) const {
    for (int64_t i = 0; i < num_inputs; i++)
      narrow(codes_[i] * scales_[i / kTileInputs / Code::kGroupTiles], weight[i]);
  }

 private:
  static constexpr int64_t kMaxInputs = CodedUnits::kUnitInputs * kUnitStep;  // of the largest tile

  // Appends the scale of a group, and sets its codes.
  void quantize(int64_t first, int64_t size) {
    constexpr float kMinMagnitude = 1e-30f;  // products of smaller values are not exact
    const ValueGroup group{&values_[first], size};
    const bool is_nonzero = std::fabs(group.signed_absmax()) > kMinMagnitude;
    const float scale = is_nonzero ? Code::scale_for(group) : 0.0f;
    const float inverse = is_nonzero ? 1.0f / scale : 0.0f;
    for (int64_t i = first; i < first + size; i += kLanes) {
      const Vec codes = ValueGroup::codes<Code>(load(&values_[i]), inverse);
      for (int lane = 0; lane < kLanes; lane++) codes_[i + lane] = static_cast<int8_t>(codes[lane]);
    }
    const bool is_negated = Code::kHasSignedScales && starts_positive(first, size);
    if (is_negated)
      for (int64_t i = first; i < first + size; i++) codes_[i] = static_cast<int8_t>(-codes_[i]);
    scales_.push_back(is_negated ? -scale : scale);
  }

  // Whether the first code with the greatest magnitude is positive. Rounding can give several values
  // this magnitude, and a scale has the sign that makes the first one's code negative, so that
  // dequantized values get the same scale and codes again.
  bool starts_positive(int64_t first, int64_t size) const {
    const int8_t* const codes = &codes_[first];
    return *std::max_element(codes, codes + size, [](int8_t a, int8_t b) {
      return std::abs(a) < std::abs(b);
    }) > 0;
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
    const int64_t at = position_of(output, num_outputs, gates), pair = at / kPairOutputs;
    const int half = static_cast<int>(at / kLanes % 2);
    panels.pack_output(coded.codes().data(), pair, half, at % kLanes, packed);
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

// Packs a weight, [num_outputs, num_inputs], as Panels (weights.h). With `gates`, the first half of the
// outputs are gates and the second half factors, and the panels alternate between them. All of `packed`
// is written.
extern "C" void troika_pack(const void* weight, int32_t is_bf16, int32_t num_outputs,
                            int32_t num_inputs, int32_t gates, void* packed) {
  const PlainWeight plain{weight, num_outputs, num_inputs, is_bf16 ? 2 : 4, gates != 0};
  Unit* const units = static_cast<Unit*>(packed);
#pragma omp parallel for schedule(static)
  for (int64_t panel = 0; panel < 2 * plain.num_pairs(); panel++)
    plain.pack_panel(panel, units + panel * plain.num_units() * kLanes);
}

// The size in bytes of a pair of compact panels with num_units units: of its codes, and of its tables
// and exceptions (compact_weights.h). Zero where compact weights are not used.
extern "C" void troika_compact_bytes(int32_t num_units, int64_t* codes, int64_t* others) {
  *codes = *others = 0;
#ifdef __AVX512BW__
  if (troika_has_tiles) return;
  const CompactPanels pair{nullptr, nullptr, num_units, 1};
  *codes = pair.pair_bytes();
  *others = pair.other_bytes();
#endif
}

// Packs a bfloat16 weight into 12 bits for each value. Sets `is_packed` to false if that is impossible.
extern "C" void troika_pack_compact(const void* weight, int32_t num_outputs, int32_t num_inputs,
                                    int32_t gates, void* codes, void* others, int32_t* is_packed) {
  *is_packed = false;
#ifdef __AVX512BW__
  const PlainWeight plain{weight, num_outputs, num_inputs, 2, gates != 0};
  const int64_t num_units = plain.num_units(), panel_units = num_units * kLanes;
  const CompactPanels sizes{nullptr, nullptr, num_units, plain.num_pairs()};
  std::atomic<bool> has_room{true};
#pragma omp parallel
  {
    std::vector<Unit> units(2 * panel_units);
#pragma omp for schedule(dynamic)
    for (int64_t pair = 0; pair < plain.num_pairs(); pair++) {
      if (!has_room) continue;
      for (int half = 0; half < 2; half++)
        plain.pack_panel(2 * pair + half, &units[half * panel_units]);
      CompactPair compact({units.data(), num_units, 1},
                          static_cast<uint8_t*>(codes) + pair * sizes.pair_bytes(),
                          static_cast<uint8_t*>(others) + pair * sizes.other_bytes());
      if (!compact.pack()) has_room = false;
    }
  }
  *is_packed = has_room;
#endif
}

// The inputs of quantized weights are padded to a multiple of this number.
extern "C" int32_t troika_coded_inputs(int32_t format) {
  if (format == kInt8ForCodes) return CodedUnits::kUnitInputs * kUnitStep;
  return format == kInt4 && troika_has_tiles ? Int4::kGroupTiles * kTileInputs : kTileInputs;
}

// Quantizes a bfloat16 weight, and packs its codes and scales. `packed` must be filled with zeros.
extern "C" void troika_pack_codes(const void* weight, int32_t format, int32_t num_outputs,
                                  int32_t num_inputs, int32_t gates, void* packed, void* scales) {
  const auto* from = static_cast<const Bf16*>(weight);
  auto* codes = static_cast<uint8_t*>(packed);
  if (format == kInt8)
    return pack_codes<Int8Panels, Int8>(from, num_outputs, num_inputs, gates, codes,
                                        static_cast<float*>(scales));
  if (format == kInt8ForCodes)
    return pack_codes<CodedUnits, Int8>(from, num_outputs, num_inputs, gates, codes,
                                        static_cast<float*>(scales));
  auto pack = pack_codes<Int4Panels, Int4>;
#ifdef __AMX_BF16__
  if (troika_has_tiles) pack = pack_codes<CodedGroups, Int4>;
#endif
  pack(from, num_outputs, num_inputs, gates, codes, static_cast<Bf16*>(scales));
}

// Quantizes and dequantizes a bfloat16 weight in place.
extern "C" void troika_round(void* weight, int32_t format, int32_t num_outputs,
                             int32_t num_inputs) {
  (format == kInt4 ? round_to_codes<Int4> : round_to_codes<Int8>)(static_cast<Bf16*>(weight),
                                                                  num_outputs, num_inputs);
}
