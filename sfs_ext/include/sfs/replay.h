// A whole workload in virtual time: what the engine would do, step by step.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "sfs/batch_time.h"
#include "sfs/request.h"
#include "sfs/scheduler.h"
#include "sfs/scheduler_config.h"

namespace sfs {

struct ReplayRequest {
  Request request;  // id = its index in the workload
  std::vector<BlockKey> keys;
  double abort_s = std::numeric_limits<double>::infinity();  // when its client goes away
};

struct ReplayStep {
  std::vector<std::pair<std::uint64_t, std::int32_t>> batch;  // request, tokens
  std::vector<std::uint64_t> preempted;
  std::vector<std::uint64_t> finished;  // when the batch's results came back
  std::int32_t free_blocks = 0;         // after scheduling
  std::int32_t free_blocks_after = 0;   // after its results
  double time_s = 0.0;
};

struct ReplayResult {
  std::vector<ReplayStep> steps;
  std::vector<std::vector<double>> token_times_s;  // by request
};

struct ReplayOptions {
  // Without a batch time the clock counts passes of the engine loop: pass k takes what has come by
  // k, and the results it waits for come back at k + 1/2.
  std::optional<BatchTime> batch_time;
  double idle_sleep_s = 0.0;  // rule 24
  std::int64_t max_steps = 200000;
};

// Throws std::invalid_argument for a request that could never run, std::runtime_error when
// `max_steps` passes do not finish the workload.
ReplayResult replay(const SchedulerConfig& config, std::vector<ReplayRequest> requests,
                    const ReplayOptions& options);

}  // namespace sfs
