// How soon an instance could answer, read off its load instead of running its engine on: cheap
// enough to ask of every instance, and close enough to tell which of them deserve a forecast.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "sfs/batch_time.h"
#include "sfs/engine_loop.h"
#include "sfs/scheduler_config.h"

namespace sfs {

// Prompts that an engine computes before a query's, in its queue or on their way to it.
struct PromptsAhead {
  double first_s = std::numeric_limits<double>::infinity();  // arrival of the first
  std::int64_t requests = 0;
  std::int64_t tokens = 0;
  double attention = 0.0;  // as BatchShape::prefill_attention
  std::int64_t blocks = 0;

  // One with `computed` of its `known` tokens in the KV cache.
  void add(const SchedulerConfig& config, std::int32_t known, std::int32_t computed);
};

class Load {
 public:
  // Of an engine that holds nothing.
  Load() = default;

  // Of a loop as restored from a snapshot; so times below are relative to the snapshot's.
  explicit Load(const EngineLoop& loop);

  // Eqs. 7 to 9 without the steps, from `arrival_s` on: whatever runs decodes in batches alike and
  // ends when it is expected to, and prompts wait for tokens, seats and blocks in the order of
  // arrival. As good as a forecast where nothing waits; within some ten percent where much does.
  // `now_s`: the load is known to be the newest then, so that an overdue batch still runs.
  double ttft_s(const SchedulerConfig& config, const BatchTime& batch_time, double arrival_s,
                std::int32_t prompt_tokens, std::int32_t cached_tokens, const PromptsAhead& booked,
                double now_s) const;

 private:
  // Expected ends by steps from here: a bucket for each number below 8, four to a doubling above.
  struct Ends {
    std::int64_t steps = 0;  // of all its requests
    std::int32_t requests = 0;
    std::int64_t blocks = 0;  // held at the end
  };
  static constexpr std::size_t buckets = 64;
  static std::size_t bucket(std::uint32_t steps);

  // Until so many seats and blocks are free.
  struct Wait {
    double steps = 0.0;
    std::int64_t recomputed_tokens = 0;  // of requests preempted meanwhile
  };
  Wait wait_for(const SchedulerConfig& config, std::int64_t seats, std::int64_t blocks) const;

  std::int32_t running_ = 0;
  std::int32_t free_blocks_ = std::numeric_limits<std::int32_t>::max();
  std::int64_t context_tokens_ = 0;  // of all that run
  PromptsAhead queue_;
  bool in_flight_ = false;
  double pass_s_ = 0.0;    // when the next pass takes arrivals
  double queued_s_ = 0.0;  // from a pass to the start of the batch that it builds
  std::array<Ends, buckets> ends_{};
};

}  // namespace sfs
