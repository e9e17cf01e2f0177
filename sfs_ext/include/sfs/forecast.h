// When would this instance emit a new query's first token? The engine's own loop is run forward
// from its last snapshot, in virtual time, until it does (eqs. 7 and 8).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
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
  std::span<const BlockKey> keys = {};  // of the prompt's full blocks, where prefixes are known
};

struct FirstToken {
  ForecastStatus status = ForecastStatus::ok;
  double waiting_s = 0.0;    // arrival to the start of the first batch that computes it
  double prefill_s = 0.0;    // from there to its first token
  std::int32_t batches = 0;  // until then, or as many as the type holds
};

// What a simulation may cost: requests looked at over all its passes, some tens of milliseconds.
inline constexpr std::int64_t max_simulated_requests = 4'000'000;

// An engine on its way through virtual time, right after a pass of its loop has scheduled. It is
// copied into place, so that repeated forecasts allocate nothing.
struct Simulation {
  // Begins at the time of the snapshot that `loop` was restored from.
  void begin();

  EngineLoop loop;
  EngineLoop::Pass pass;
  double now_s = 0.0;
  std::size_t arrived = 0;  // of the arrivals ahead of the query
  std::int64_t batches = 0;
  std::int64_t looked_at = 0;
};

// Takes copies of a simulation that is good for later queries, too: the query, left out of it, is
// still waiting, and has stood behind somebody ever since it came.
// First come, first served, so nothing until then depends on who comes last.
using KeepSimulation = std::function<void(const Simulation&)>;

// Runs `simulation` on (it is consumed), adding `ahead`, by arrival, and `query` as their times
// come. Ends with status `bound` and infinite times when it has looked at `max_requests`. `keep`,
// if given, is called each time the queue ahead has shrunk to an eighth.
FirstToken forecast_first_token(Simulation& simulation, std::span<const Arrival> ahead,
                                const Arrival& query, const KeepSimulation& keep = {},
                                std::int64_t max_requests = max_simulated_requests);

}  // namespace sfs
