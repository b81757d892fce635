// Entry points of the exchange among ranks, for tensors outside of a program; called by exchange.py.

#include "exchange.h"

namespace {

constexpr int64_t kParallelBytes = 1 << 17;  // more bytes are summed by several threads

template <typename T>
void add_all(const Exchange& exchange, const ExchangedRows& rows, int64_t sequence) {
#pragma omp parallel for if (rows.num_rows * rows.row_bytes > kParallelBytes)
  for (int64_t row = 0; row < rows.num_rows; ++row) add_row<T>(exchange, rows, sequence, row);
}

}  // namespace

// Writes this rank's rows to its slot, and publishes the sequence number.
extern "C" void troika_publish(const Exchange* exchange, const ExchangedRows* rows,
                               int64_t sequence) {
  copy_to_slot(*exchange, *rows, sequence, 0, rows->num_rows);
  publish(*exchange, sequence);
}

// Waits for all ranks; see await_ranks.
extern "C" int32_t troika_await_ranks(const Exchange* exchange, int64_t sequence,
                                      int64_t timeout_ns) {
  return await_ranks(*exchange, sequence, timeout_ns);
}

// Replaces rows by the sums of all ranks' rows, in float32 and in the order of the ranks.
extern "C" void troika_add_ranks(const Exchange* exchange, const ExchangedRows* rows,
                                 int64_t sequence, int32_t is_bf16) {
  if (is_bf16)
    add_all<Bf16>(*exchange, *rows, sequence);
  else
    add_all<float>(*exchange, *rows, sequence);
}

// Concatenates the columns of all ranks: `out` is [num_rows][num_ranks][row_bytes].
extern "C" void troika_gather_ranks(const Exchange* exchange, const ExchangedRows* rows,
                                    int64_t sequence, uint8_t* out) {
  const int64_t row_bytes = rows->row_bytes, all_bytes = row_bytes * exchange->num_ranks;
  for (int rank = 0; rank < exchange->num_ranks; ++rank) {
    const uint8_t* slot = slot_of(*exchange, rank, sequence);
    for (int64_t row = 0; row < rows->num_rows; ++row)
      std::memcpy(out + row * all_bytes + rank * row_bytes, slot + row * row_bytes, row_bytes);
  }
}
