#include "sfs/scheduler_config.h"

#include <stdexcept>
#include <string>

namespace sfs {
namespace {

void require(bool holds, const char* relation, double value) {
  if (!holds)
    throw std::invalid_argument("scheduler config: " + std::string(relation) + " does not hold (" +
                                std::to_string(value) + ")");
}

}  // namespace

void SchedulerConfig::validate() const {
  require(max_num_batched_tokens >= 1, "max_num_batched_tokens >= 1", max_num_batched_tokens);
  require(max_num_seqs >= 1, "max_num_seqs >= 1", max_num_seqs);
  require(max_num_active_seqs >= 0, "max_num_active_seqs >= 0", max_num_active_seqs);
  require(block_size >= 1, "block_size >= 1", block_size);
  require(block_size <= 65536, "block_size <= 65536", block_size);
  require(num_blocks >= 2, "num_blocks >= 2", num_blocks);
  require(max_model_len >= 2, "max_model_len >= 2", max_model_len);
  require(max_model_len <= 1 << 28, "max_model_len <= 2^28", max_model_len);
  require(long_prefill_token_threshold >= 0, "long_prefill_token_threshold >= 0",
          long_prefill_token_threshold);
  require(watermark >= 0.0 && watermark < 1.0, "0 <= watermark < 1", watermark);
  for (const std::uint8_t flag :
       {enable_chunked_prefill, enable_prefix_caching, async_scheduling,
        long_prefill_token_threshold_adaptive, scheduler_reserve_full_isl})
    require(flag <= 1, "a flag is 0 or 1", flag);
  require(policy == Policy::fcfs || policy == Policy::priority, "policy is fcfs or priority",
          static_cast<double>(policy));
}

}  // namespace sfs
