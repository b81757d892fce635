// Entry points of instructions for one module, which are programs of one or two instructions; called by
// native/kernels.py.

#include "products/weights.h"
#include "program.h"

// One projection of a module, from `rows` to `out`. `codes` has room for the quantized rows if the
// weight needs them (kInt8ForCodes).
extern "C" void troika_project(const Instruction* instruction, const Buffer* rows,
                               const Buffer* out, const Buffer* codes, int32_t num_rows,
                               int32_t is_bf16) {
  const Buffer buffers[] = {*rows, *out, *codes};
  Run run{};
  run.buffers = buffers;
  run.num_rows = num_rows;
  Instruction instructions[2] = {{}, *instruction};
  Instruction &code = instructions[0], &project = instructions[1];
  const bool has_codes = project.format == kInt8ForCodes;
  code.kind = kCode;
  code.size = project.size;
  code.target = 2;
  if (has_codes) project.source = 2;
  const Program program{has_codes ? &code : &project, has_codes ? 2 : 1, is_bf16};
  troika_execute(&program, &run);
}

// One embedding of a module: writes the rows of `tokens`, [num_rows], to `out`.
extern "C" void troika_look_up(const Instruction* instruction, const int64_t* tokens, const Buffer* out,
                               int32_t num_rows, int32_t is_bf16) {
  Run run{};
  run.buffers = out;
  run.tokens = tokens;
  run.num_rows = num_rows;
  const Program program{instruction, 1, is_bf16};
  troika_execute(&program, &run);
}

// The LoRA adapters of one projection of a module, which are added to `out`.
extern "C" void troika_adapt(const AdaptedSite* site, int32_t num_inputs, const Buffer* rows,
                             const Buffer* out, const Adaptation* adaptation, int32_t num_rows,
                             int32_t is_bf16) {
  const Buffer buffers[] = {*rows, *out};
  Run run{};
  run.buffers = buffers;
  run.adaptation = adaptation;
  run.num_rows = num_rows;
  Instruction instructions[2] = {};
  instructions[0].kind = kShrink;
  instructions[1].kind = kExpand;
  instructions[1].target = 1;
  for (Instruction& i : instructions) {
    i.weight = site;
    i.num_units = 1;
    i.size = num_inputs;
  }
  const Program program{instructions, 2, is_bf16};
  troika_execute(&program, &run);
}
