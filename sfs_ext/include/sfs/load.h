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

  struct Ttft {
    double likely_s = std::numeric_limits<double>::infinity();
    double least_s = std::numeric_limits<double>::infinity();
  };

  // Eqs. 7 to 9 without the steps, from `arrival_s` on: whatever runs decodes in batches alike and
  // ends when it is expected to, and prompts wait for tokens, seats and blocks in the order of
  // arrival. Where nothing waits and a seat and blocks are free, both are mostly within a batch of
  // a forecast. `likely_s`: seats and blocks are had as they become free on average; mostly within
  // some percent, yet whether the last block is to be had at once or only when somebody ends takes
  // a simulation. `least_s`: they are had as early as can be, so that a forecast finds less but
  // seldom. It does where prompts ahead have prefixes in the cache, where not the first to come is
  // the first served, where decodes take up much of a small token budget and end, or where batches
  // differ so much that a pass is caught which seems well missed. `now_s`: the load is known to be
  // the newest then, so that an overdue batch still runs.
  Ttft ttft(const SchedulerConfig& config, const BatchTime& batch_time, double arrival_s,
            std::int32_t prompt_tokens, std::int32_t cached_tokens, const PromptsAhead& booked,
            double now_s) const;

 private:
  // Expected ends by steps from here: a bucket for each number below 8, four to a doubling above.
  struct Ends {
    double requests = 0.0;
    double blocks = 0.0;  // held at the end
  };
  static constexpr std::size_t buckets = 64;
  static std::size_t bucket(std::uint32_t steps);

  static double first_steps(std::size_t bucket);

  // A query's place in the queue. Batches are counted from the next to be built.
  struct Turn {
    double earliest = 0.0;      // batch that could take it, were there seats and blocks
    double ahead = 0.0;         // requests
    double ahead_blocks = 0.0;  // that these will take
    double blocks = 0.0;        // that the query will take
  };
  struct Wait {
    double batches = 0.0;            // before the first with the query
    double decodes_s = 0.0;          // what they take but for prefills
    double next_decodes_s = 0.0;     // the same of each batch from there
    double recomputed_tokens = 0.0;  // of requests preempted meanwhile
  };
  Wait wait_for(const SchedulerConfig& config, const BatchTime& batch_time, const Turn& turn) const;
  Wait least_wait_for(const SchedulerConfig& config, const BatchTime& batch_time,
                      const Turn& turn) const;

  std::int32_t running_ = 0;
  std::int32_t free_blocks_ = std::numeric_limits<std::int32_t>::max();
  std::int64_t context_tokens_ = 0;  // of all that run
  PromptsAhead queue_;
  std::int32_t in_flight_ = 0;  // batches
  double oldest_end_s_ = 0.0;
  double next_start_s_ = 0.0;               // of the batch that the next pass builds
  std::array<Ends, buckets> ends_{};        // of those that run
  std::array<Ends, buckets> queue_ends_{};  // of those that wait, as if they ran
  std::int64_t queue_steps_ = 0;            // of all that wait
};

}  // namespace sfs
