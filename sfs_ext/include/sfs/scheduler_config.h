// An engine's scheduling limits, under vLLM's own names. Plain data: it heads every snapshot.
#pragma once

#include <cstdint>

namespace sfs {

enum class Policy : std::uint8_t { fcfs = 0, priority = 1 };

struct SchedulerConfig {
  std::int32_t max_num_batched_tokens = 0;
  std::int32_t max_num_seqs = 0;
  std::int32_t max_num_active_seqs = 0;  // 0: max_num_seqs
  std::int32_t block_size = 0;
  std::int32_t num_blocks = 0;  // the null block included
  std::int32_t max_model_len = 0;
  std::int32_t long_prefill_token_threshold = 0;
  Policy policy = Policy::fcfs;
  // Flags, 0 or 1: a bool that came as another byte would be undefined before it is checked.
  std::uint8_t enable_chunked_prefill = 1;
  std::uint8_t enable_prefix_caching = 1;
  std::uint8_t async_scheduling = 0;
  std::uint8_t long_prefill_token_threshold_adaptive = 0;
  std::uint8_t scheduler_reserve_full_isl = 1;
  std::uint8_t padding[6] = {};
  double watermark = 0.0;

  bool operator==(const SchedulerConfig&) const = default;

  std::int32_t max_running() const {
    return max_num_active_seqs > 0 ? max_num_active_seqs : max_num_seqs;
  }
  std::int32_t usable_blocks() const { return num_blocks - 1; }  // block 0 is the null block
  std::int32_t pipeline_depth() const { return async_scheduling ? 2 : 1; }
  std::int32_t blocks_for(std::int32_t tokens) const {
    return (tokens + block_size - 1) / block_size;
  }

  std::int64_t kv_capacity_tokens() const { return std::int64_t{usable_blocks()} * block_size; }

  // Whether the engine could ever admit such a prompt. vLLM refuses the others at its door, and
  // one among the waiting would block them for good.
  bool can_admit(std::int32_t prompt_tokens) const {
    return prompt_tokens >= 1 && prompt_tokens < max_model_len &&
           blocks_for(prompt_tokens) <= usable_blocks() &&
           (enable_chunked_prefill || prompt_tokens <= max_num_batched_tokens);
  }

  // Throws std::invalid_argument that names the violated relation.
  void validate() const;
};

}  // namespace sfs
