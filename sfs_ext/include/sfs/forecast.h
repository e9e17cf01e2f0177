// When would this instance emit a new query's first token? The engine's own loop is run forward
// from its last snapshot, in virtual time, until it does (eqs. 7 and 8).
#pragma once

#include <cstdint>
#include <span>

#include "sfs/engine_loop.h"

namespace sfs {

enum class ForecastStatus : std::int32_t { ok = 0, no_snapshot = 1, never = 2, bound = 3 };

// A query on its way to an instance, under times relative to the snapshot's.
struct Arrival {
  std::uint64_t id = 0;
  double arrival_s = 0.0;
  std::int32_t prompt_tokens = 0;
  double predicted_output_tokens = 0.0;  // 0: unknown, max_tokens counts
  std::int32_t max_tokens = 0;
  std::int32_t priority = 0;
};

struct FirstToken {
  ForecastStatus status = ForecastStatus::ok;
  double waiting_s = 0.0;    // arrival to the start of the first batch that computes it
  double prefill_s = 0.0;    // from there to its first token
  std::int32_t batches = 0;  // simulated
};

// What a simulation may cost: requests looked at over all its passes, some tens of milliseconds.
inline constexpr std::int64_t max_simulated_requests = 4'000'000;

// Runs `loop` on (it is consumed), adding `ahead` and then `query` as their times come. Ends with
// status `bound` and infinite times when it has looked at `max_requests`.
FirstToken forecast_first_token(EngineLoop& loop, std::span<const Arrival> ahead,
                                const Arrival& query,
                                std::int64_t max_requests = max_simulated_requests);

}  // namespace sfs
