#include "sfs/load.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace sfs {
namespace {

std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

BatchShape prefill(std::int64_t known, std::int64_t computed) {
  BatchShape shape;
  shape.add_prefill(known - computed, computed);
  return shape;
}

}  // namespace

void PromptsAhead::add(const SchedulerConfig& config, std::int32_t known, std::int32_t computed) {
  const BatchShape shape = prefill(known, computed);
  ++requests;
  tokens += shape.tokens;
  attention += static_cast<double>(shape.prefill_attention);
  blocks += config.blocks_for(known) - config.blocks_for(computed);
}

std::size_t Load::bucket(std::uint32_t steps) {
  if (steps < 8) return steps;
  const auto doublings = static_cast<std::uint32_t>(std::bit_width(steps)) - 1;
  const std::uint32_t quarter = (steps >> (doublings - 2)) & 3;
  return std::min<std::size_t>(8 + (doublings - 3) * 4 + quarter, buckets - 1);
}

Load::Load(const EngineLoop& loop) {
  const Scheduler& scheduler = loop.scheduler;
  const SchedulerConfig& config = scheduler.config();
  free_blocks_ = scheduler.free_blocks();
  running_ = static_cast<std::int32_t>(scheduler.running_count());
  for (Slot slot = 0; slot < scheduler.slots(); ++slot) {
    const Request& request = scheduler.request(slot);
    if (request.status != Status::running) {
      queue_.add(config, request.known_tokens(), 0);
      continue;
    }
    const std::int32_t known = request.known_tokens() + request.placeholders;
    context_tokens_ += known;
    if (known - request.computed > 1) {  // still in its prompt, but seated
      queue_.add(config, known, request.computed);
      --queue_.requests;
    }
    const std::int32_t steps =
        std::max(request.final_outputs(config.max_model_len) - request.outputs, 1);
    Ends& ends = ends_[bucket(static_cast<std::uint32_t>(steps))];
    ++ends.requests;
    ends.steps += steps;
    ends.blocks += config.blocks_for(request.known_tokens() + steps);
  }
  if (queue_.tokens > 0) queue_.first_s = 0.0;

  in_flight_ = loop.in_flight() > 0;
  if (!in_flight_) return;
  pass_s_ = loop.oldest().end_s;
  // The second batch of a full pipeline; where it is not full yet, one like those that follow.
  if (config.async_scheduling)
    queued_s_ = loop.in_flight() > 1 ? loop.in_flight(1).end_s - pass_s_
                                     : loop.batch_time.seconds({running_, context_tokens_, 0});
}

Load::Wait Load::wait_for(const SchedulerConfig& config, std::int64_t seats,
                          std::int64_t blocks) const {
  Wait wait;
  double free_blocks = free_blocks_, fewest_blocks = 0.0;
  std::int64_t running = running_;
  for (const Ends& ends : ends_) {
    if (config.max_running() - running >= seats && free_blocks >= static_cast<double>(blocks))
      break;
    if (ends.requests == 0) continue;
    const double steps = static_cast<double>(ends.steps) / ends.requests;
    free_blocks -= static_cast<double>(running) * (steps - wait.steps) / config.block_size;
    fewest_blocks = std::min(fewest_blocks, free_blocks);
    free_blocks += ends.blocks;
    running -= ends.requests;
    wait.steps = steps;
  }
  // Blocks that were not there were taken from others, who compute their tokens again.
  wait.recomputed_tokens = static_cast<std::int64_t>(-fewest_blocks) * config.block_size;
  return wait;
}

double Load::ttft_s(const SchedulerConfig& config, const BatchTime& batch_time, double arrival_s,
                    std::int32_t prompt_tokens, std::int32_t cached_tokens,
                    const PromptsAhead& booked, double now_s) const {
  if (!config.can_admit(prompt_tokens)) return std::numeric_limits<double>::infinity();
  const double decode_s = batch_time.seconds({running_, context_tokens_, 0});
  const double pass_s = in_flight_ ? std::max(pass_s_, now_s) : pass_s_;
  const auto batch_after = [&](double at_s) {  // start of the batch that takes what comes then
    const double start_s = pass_s + queued_s_;
    if (decode_s == 0.0) return std::max(start_s, at_s);
    return start_s + std::ceil(std::max(0.0, at_s - pass_s) / decode_s) * decode_s;
  };
  const auto seconds = [&](double batches, std::int64_t tokens, double attention) {
    return batches * (running_ > 0 ? decode_s : batch_time.b0_s) +
           batch_time.b1_s * static_cast<double>(tokens) + batch_time.b3_s * attention;
  };
  const std::int64_t budget = std::max(config.max_num_batched_tokens - running_, 1);

  const BatchShape own = prefill(prompt_tokens, cached_tokens);
  const auto own_attention = static_cast<double>(own.prefill_attention);
  const std::int64_t own_batches = divide_up(own.tokens, budget);
  const double begin_s = batch_after(arrival_s);
  const double alone_s =
      begin_s + seconds(static_cast<double>(own_batches), own.tokens, own_attention);

  const std::int64_t ahead_tokens = queue_.tokens + booked.tokens;
  const std::int64_t seats = queue_.requests + booked.requests + 1;
  // What runs takes blocks, too, until the query's turn has come.
  const double turn = static_cast<double>(divide_up(ahead_tokens, budget)) +
                      (decode_s > 0.0 ? std::ceil(begin_s / decode_s) : 0.0);
  constexpr double most_blocks = 1e15;  // as good as all there are
  const auto grown =
      static_cast<std::int64_t>(std::min(running_ * turn / config.block_size, most_blocks));
  const std::int64_t blocks = queue_.blocks + booked.blocks + grown +
                              config.blocks_for(prompt_tokens) - config.blocks_for(cached_tokens);
  const bool fits = seats <= config.max_running() - running_ && blocks <= free_blocks_;
  if (ahead_tokens == 0 && fits) return alone_s - arrival_s;

  const double first_s = std::min(begin_s, batch_after(std::min(queue_.first_s, booked.first_s)));
  const std::int64_t batches = first_s < begin_s ? divide_up(ahead_tokens, budget) + own_batches
                                                 : divide_up(ahead_tokens + own.tokens, budget);
  const Wait wait = fits ? Wait{} : wait_for(config, seats, blocks);
  const double behind_s = first_s + seconds(std::max(static_cast<double>(batches),
                                                     wait.steps + static_cast<double>(own_batches)),
                                            ahead_tokens + wait.recomputed_tokens + own.tokens,
                                            queue_.attention + booked.attention + own_attention);
  return std::max(alone_s, behind_s) - arrival_s;
}

}  // namespace sfs
