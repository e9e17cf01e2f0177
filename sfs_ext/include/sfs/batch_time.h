// What a batch holds, and how long it takes (eq. 9).
#pragma once

#include <cstdint>

namespace sfs {

// The three sums that eq. 9 weighs.
struct BatchShape {
  std::int64_t tokens = 0;
  std::int64_t decode_context_tokens = 0;
  std::int64_t prefill_attention = 0;  // sum of pre*context + pre*(pre + 1)/2

  void add_decode(std::int64_t context) {
    tokens += 1;
    decode_context_tokens += context;
  }
  void add_prefill(std::int64_t new_tokens, std::int64_t context) {
    tokens += new_tokens;
    prefill_attention += new_tokens * context + new_tokens * (new_tokens + 1) / 2;
  }
};

// Coefficients in seconds, calibrated per instance.
struct BatchTime {
  double b0_s = 0.0;
  double b1_s = 0.0;
  double b2_s = 0.0;
  double b3_s = 0.0;

  // An empty batch takes a queue slot and no time (rule 23).
  double seconds(const BatchShape& shape) const {
    if (shape.tokens == 0) return 0.0;
    return b0_s + b1_s * static_cast<double>(shape.tokens) +
           b2_s * static_cast<double>(shape.decode_context_tokens) +
           b3_s * static_cast<double>(shape.prefill_attention);
  }

  // `steps` decode-only batches in a row, each with every context one longer than in the one
  // before: an arithmetic series, so its sum is closed.
  double decode_run_seconds(std::int64_t requests, std::int64_t context_tokens,
                            std::int64_t steps) const {
    const double n = static_cast<double>(requests);
    const double k = static_cast<double>(steps);
    const double first = b0_s + b1_s * n + b2_s * static_cast<double>(context_tokens);
    return k * first + b2_s * n * k * (k - 1.0) / 2.0;
  }
};

}  // namespace sfs
