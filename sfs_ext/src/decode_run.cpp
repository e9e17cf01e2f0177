// Between two events (an arrival, an admission, an end, a lack of blocks) a batch's make-up is
// constant: everybody decodes. Such runs are taken in one stride, with the same outcome as
// stepping.
#include <algorithm>
#include <limits>

#include "sfs/engine_loop.h"
#include "sfs/scheduler.h"

namespace sfs {

// Free blocks only shrink during a run, so a head that is blocked now stays blocked.
bool Scheduler::admits_nothing() const {
  if (waiting_.empty() || running_.size() >= static_cast<std::size_t>(config_.max_running()))
    return true;
  const std::int32_t budget =
      config_.max_num_batched_tokens - static_cast<std::int32_t>(running_.size());
  if (budget <= 0) return true;
  const Request& head = requests_[waiting_.front()];
  if (head.stale_tokens > 0) return false;
  const auto [tokens, blocks] = admission_of(head, 0, budget, long_prefill_threshold());
  return tokens == 0 || !kv_.fits(head, tokens, blocks);
}

std::int64_t Scheduler::blocks_for_run(std::int32_t steps) const {
  std::int64_t blocks = 0;
  for (const Slot slot : running_) {
    const Request& request = requests_[slot];
    blocks += std::max(config_.blocks_for(request.computed + steps) - request.blocks, 0);
  }
  return blocks;
}

std::int32_t Scheduler::decode_run_steps() const {
  if (running_.empty() || finished_ || config_.enable_prefix_caching) return 0;
  if (running_.size() > static_cast<std::size_t>(config_.max_num_batched_tokens)) return 0;
  const std::int32_t ahead = config_.async_scheduling ? 1 : 0;
  std::int32_t steps = std::numeric_limits<std::int32_t>::max();
  for (const Slot slot : running_) {
    const Request& request = requests_[slot];
    const bool decodes = request.computed >= request.prompt_tokens &&
                         request.placeholders == ahead && request.in_flight_tokens == ahead &&
                         request.known_tokens() + ahead - request.computed == 1;
    if (!decodes) return 0;
    // The steps that emit a last token, or skip one (rule 4), are not alike.
    const std::int32_t length = std::min({request.output_tokens, request.max_tokens - ahead,
                                          config_.max_model_len - request.prompt_tokens - ahead});
    steps = std::min(steps, length - request.outputs - 1);
    if (steps <= 0) return 0;
  }
  if (!admits_nothing()) return 0;
  // As many of them as there are blocks for: the next one preempts.
  const std::int32_t free = free_blocks();
  if (blocks_for_run(steps) <= free) return steps;
  std::int32_t enough = 0;
  for (std::int32_t few = 0, many = steps; many - few > 1; enough = few) {
    const std::int32_t middle = few + (many - few) / 2;
    (blocks_for_run(middle) <= free ? few : many) = middle;
  }
  return enough;
}

std::int64_t Scheduler::decode_run_context_tokens() const {
  std::int64_t tokens = 0;
  for (const Slot slot : running_) tokens += requests_[slot].computed;
  return tokens;
}

void Scheduler::advance_decode_run(std::int32_t steps) {
  for (const Slot slot : running_) {
    Request& request = requests_[slot];
    kv_.allocate(request, slot, steps);
    request.computed += steps;
    request.outputs += steps;
  }
}

std::int32_t EngineLoop::advance_decode_run(double& now_s, double next_arrival_s) {
  const bool async_scheduling = scheduler.config().async_scheduling != 0;
  if (count_ != (async_scheduling ? 1U : 0U)) return 0;
  const auto requests = static_cast<std::int64_t>(scheduler.running().size());
  if (async_scheduling) {
    const Batch& batch = oldest().batch;
    if (static_cast<std::int64_t>(batch.entries.size()) != requests ||
        batch.shape.tokens != requests)
      return 0;
  }
  std::int32_t steps = scheduler.decode_run_steps();
  if (steps == 0) return 0;

  // Pass j + 1 begins when the batch awaited in pass j has run. Async: the first batch awaited is
  // the one in flight.
  const std::int64_t context_tokens = scheduler.decode_run_context_tokens();
  const auto pass_begins_s = [&](std::int32_t pass) {
    if (!async_scheduling)
      return now_s + batch_time.decode_run_seconds(requests, context_tokens, pass);
    if (pass == 0) return now_s;
    return std::max(now_s, oldest().end_s) +
           batch_time.decode_run_seconds(requests, context_tokens, pass - 1);
  };
  // An arrival ends the run: only passes that begin before it are alike.
  if (pass_begins_s(steps - 1) >= next_arrival_s) {
    std::int32_t before = -1, after = steps - 1;
    while (after - before > 1) {
      const std::int32_t middle = before + (after - before) / 2;
      (pass_begins_s(middle) < next_arrival_s ? before : after) = middle;
    }
    steps = after;
    if (steps <= 0) return 0;
  }

  const double end_s = pass_begins_s(steps);
  if (async_scheduling) {
    InFlight& batch = oldest();
    for (Scheduled& entry : batch.batch.entries) entry.decode = true;
    batch.batch.shape = {.tokens = requests,
                         .decode_context_tokens = context_tokens + requests * (steps - 1)};
    batch.start_s = end_s;
    batch.end_s = end_s + batch_time.seconds(batch.batch.shape);
    device_free_s = batch.end_s;
  } else {
    device_free_s = end_s;
  }
  scheduler.advance_decode_run(steps);
  now_s = end_s;
  return steps;
}

}  // namespace sfs
