// A request inside a scheduler: a prompt, limits, and how far the engine has come with it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace sfs {

using Slot = std::uint32_t;

// Seconds since 1970 or since a snapshot: what lies beyond, or is no number, is no time.
inline bool is_time(double at_s) { return std::abs(at_s) <= 1e12; }

enum class Status : std::uint8_t { running = 0, waiting = 1, preempted = 2, finished = 3 };

enum class Finish : std::uint8_t { none = 0, stop = 1, length = 2, abort = 3 };

// Trivially copyable, so that a whole scheduler copies as a few memory moves.
struct Request {
  std::uint64_t id = 0;
  double arrival_s = 0.0;
  std::uint32_t rank = 0;  // breaks ties of (priority, arrival): vLLM compares request ids
  std::int32_t prompt_tokens = 0;
  std::int32_t max_tokens = 0;
  std::int32_t output_tokens = 0;  // ends by EOS at this length where it is below max_tokens
  std::int32_t priority = 0;
  float predicted_output_tokens = 0.0F;  // travels with the request into snapshots; 0: unknown

  std::int32_t outputs = 0;       // known on the host
  std::int32_t computed = 0;      // in the KV cache, batches in flight included
  std::int32_t placeholders = 0;  // outputs in flight under async scheduling
  std::int32_t in_flight_tokens = 0;
  std::int32_t stale_tokens = 0;  // in flight since before its last preemption
  std::int32_t blocks = 0;
  std::int32_t batches_in_flight = 0;
  std::uint32_t admitted = 0;  // counts admissions: the running order
  Status status = Status::waiting;
  Finish finish = Finish::none;

  // Outputs after which it ends, by EOS or by a limit (rule 16).
  std::int32_t final_outputs(std::int32_t max_model_len) const {
    return std::min({output_tokens, max_tokens, max_model_len - prompt_tokens});
  }

  std::int32_t known_tokens() const { return prompt_tokens + outputs; }
};

}  // namespace sfs
