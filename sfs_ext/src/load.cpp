#include "sfs/load.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace sfs {
namespace {

constexpr double never = std::numeric_limits<double>::infinity();

// An arrival that seems to have just missed a pass may as well have caught it, since batches are
// not quite alike: it is taken to have, for a forecast can only tell of instances that it is asked
// of.
constexpr double caught = 0.96;

std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// BatchTime::seconds of a batch of decodes, of which there are so many on average.
double decode_batch_s(const BatchTime& batch_time, double requests, double context_tokens) {
  return batch_time.b0_s + batch_time.b1_s * requests + batch_time.b2_s * context_tokens;
}

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

double Load::first_steps(std::size_t bucket) {
  if (bucket < 8) return static_cast<double>(bucket);
  const std::size_t quarters = bucket - 8;
  return std::ldexp(4.0 + static_cast<double>(quarters % 4), static_cast<int>(quarters / 4) + 1);
}

Load::Load(const EngineLoop& loop) {
  const Scheduler& scheduler = loop.scheduler;
  const SchedulerConfig& config = scheduler.config();
  free_blocks_ = scheduler.free_blocks();
  running_ = static_cast<std::int32_t>(scheduler.running_count());
  for (Slot slot = 0; slot < scheduler.slots(); ++slot) {
    const Request& request = scheduler.request(slot);
    const std::int32_t steps =
        std::max(request.final_outputs(config.max_model_len) - request.outputs, 1);
    const bool runs = request.status == Status::running;
    Ends& ends = (runs ? ends_ : queue_ends_)[bucket(static_cast<std::uint32_t>(steps))];
    ends.requests += 1.0;
    ends.blocks += config.blocks_for(request.known_tokens() + steps);
    if (!runs) {
      queue_.add(config, request.known_tokens(), 0);
      queue_steps_ += steps;
      continue;
    }
    const std::int32_t known = request.known_tokens() + request.placeholders;
    context_tokens_ += known - 1;
    if (known - request.computed > 1) {  // still in its prompt, but seated
      queue_.add(config, known, request.computed);
      --queue_.requests;
    }
  }
  if (queue_.tokens > 0) queue_.first_s = 0.0;

  in_flight_ = static_cast<std::int32_t>(loop.in_flight());
  if (in_flight_ == 0) return;
  oldest_end_s_ = loop.oldest().end_s;
  next_start_s_ = loop.in_flight(loop.in_flight() - 1).end_s;
}

Load::Wait Load::wait_for(const SchedulerConfig& config, const BatchTime& batch_time,
                          const Turn& turn) const {
  // The share of a stretch after which what is missing at its beginning has been gained.
  const auto share = [](double missing, double gained) {
    if (missing > gained) return never;
    return missing > 0.0 ? missing / gained : 0.0;
  };
  const double block_size = config.block_size;
  double running = running_, context_tokens = static_cast<double>(context_tokens_);
  double free_blocks = free_blocks_, grown_tokens = 0.0;  // the latter of each that runs
  double waiting = turn.ahead, waiting_blocks = turn.ahead_blocks;
  const double queue_steps =  // of each
      static_cast<double>(queue_steps_) /
      static_cast<double>(std::max<std::int64_t>(queue_.requests, 1));
  std::array<Ends, buckets> all_ends = ends_;
  Wait wait;
  for (std::size_t i = 0; i < buckets; ++i) {
    // Results of the batches in flight come first; under async scheduling, one later.
    const double last = first_steps(i + 1) - 1.0 - in_flight_ + config.async_scheduling;
    const double batches = std::max(last - wait.batches, 0.0);
    const double ended = all_ends[i].requests, ended_blocks = all_ends[i].blocks;
    if (batches == 0.0 && ended == 0.0) continue;
    const double tokens = wait.batches + batches + 1.0 - grown_tokens;
    const double gained_blocks = ended_blocks - (running - ended / 2) * tokens / block_size;
    const double gained_context = running * batches - ended_blocks * block_size;
    const double turn_comes =
        std::max({share(turn.earliest - wait.batches, batches),
                  share(waiting + 1.0 - (config.max_running() - running), ended),
                  share(waiting_blocks + turn.blocks - free_blocks, gained_blocks)});
    const double part = std::min(turn_comes, 1.0);
    wait.batches += part * batches;
    wait.decodes_s += part * batches *
                      decode_batch_s(batch_time, running - part * ended / 2,
                                     context_tokens + part * gained_context / 2);
    running -= part * ended;
    context_tokens += part * gained_context;
    if (turn_comes <= 1.0) break;
    grown_tokens += tokens;
    free_blocks += gained_blocks;
    if (free_blocks < 0.0 && running > 0.0) {
      // Whoever has to give back blocks waits before all others, and computes its tokens again.
      const double held_blocks = std::max(context_tokens / running / block_size, 1.0);
      const double preempted = std::min(std::ceil(-free_blocks / held_blocks), running);
      running -= preempted;
      waiting += preempted;
      free_blocks += preempted * held_blocks;
      waiting_blocks += preempted * held_blocks;
      context_tokens -= preempted * held_blocks * block_size;
      wait.recomputed_tokens += preempted * held_blocks * block_size;
    } else if (waiting > 0.0) {
      const double prompt_blocks = std::max(waiting_blocks / waiting, 1e-9);
      const double fit = std::min(config.max_running() - running, free_blocks / prompt_blocks);
      const double admitted = std::floor(std::clamp(fit, 0.0, waiting));
      running += admitted;
      waiting -= admitted;
      free_blocks -= admitted * prompt_blocks;
      waiting_blocks -= admitted * prompt_blocks;
      context_tokens += admitted * prompt_blocks * block_size;
      const auto steps = static_cast<std::uint32_t>(wait.batches + queue_steps);
      Ends& end = all_ends[std::min(std::max(bucket(steps), i + 1), buckets - 1)];
      end.requests += admitted;
      end.blocks += admitted * (prompt_blocks + queue_steps / block_size);
    }
    if (running <= 0.0) break;
  }
  wait.next_decodes_s = decode_batch_s(batch_time, running, context_tokens);
  return wait;
}

// Whoever ends within a stretch does so at its beginning, and nobody is preempted: those who are
// come back before the query, so that it waits for their blocks all the same. Prompts ahead are
// answered as if they had been admitted at once.
Load::Wait Load::least_wait_for(const SchedulerConfig& config, const BatchTime& batch_time,
                                const Turn& turn) const {
  double running = running_, context_tokens = static_cast<double>(context_tokens_);
  double free_blocks = free_blocks_;
  double ahead = turn.ahead, ahead_blocks = turn.ahead_blocks;
  const auto all_decodes_s = [&](double batches) {
    const double context = context_tokens + running * std::max(batches - 1.0, 0.0) / 2;
    return batches * decode_batch_s(batch_time, running, std::max(context, 0.0));
  };
  Wait wait;
  for (std::size_t i = 0; i < buckets; ++i) {
    const double next_end = first_steps(i) - in_flight_ + config.async_scheduling;
    const bool fits = running <= 0.0 || (ahead + 1.0 <= config.max_running() - running &&
                                         ahead_blocks + turn.blocks <= free_blocks);
    const double until = fits ? std::min(turn.earliest, next_end) : next_end;
    const double batches = std::max(until - wait.batches, 0.0);
    wait.batches += batches;
    wait.decodes_s += all_decodes_s(batches);
    context_tokens += running * batches;
    free_blocks -= running * batches / config.block_size;
    if (fits && turn.earliest <= next_end) break;
    running -= ends_[i].requests;
    context_tokens -= ends_[i].blocks * config.block_size;
    free_blocks += ends_[i].blocks;
    ahead -= queue_ends_[i].requests;
    ahead_blocks -= queue_ends_[i].blocks;
  }
  wait.next_decodes_s = all_decodes_s(1.0);
  return wait;
}

Load::Ttft Load::ttft(const SchedulerConfig& config, const BatchTime& batch_time, double arrival_s,
                      std::int32_t prompt_tokens, std::int32_t cached_tokens,
                      const PromptsAhead& booked, double now_s) const {
  if (!config.can_admit(prompt_tokens)) return {};
  const auto prefill_s = [&](std::int64_t tokens, double attention) {
    return batch_time.b1_s * static_cast<double>(tokens) + batch_time.b3_s * attention;
  };
  const std::int64_t budget = std::max(config.max_num_batched_tokens - running_, 1);
  const BatchShape own = prefill(prompt_tokens, cached_tokens);
  const double own_s = prefill_s(own.tokens, static_cast<double>(own.prefill_attention));
  const std::int64_t ahead = queue_.requests + booked.requests;
  const std::int64_t ahead_tokens = queue_.tokens + booked.tokens;
  const double ahead_s = prefill_s(ahead_tokens, queue_.attention + booked.attention);
  const auto ahead_batches = static_cast<double>(divide_up(ahead_tokens, budget));

  // Batches are counted from the next to be built. Passes begin as its successors start; under
  // async scheduling they build the batch after the one that starts.
  const double first_arrival_s = std::min({arrival_s, queue_.first_s, booked.first_s});
  const double overdue_s = in_flight_ > 0 ? std::max(now_s - oldest_end_s_, 0.0) : 0.0;
  double pass_s = in_flight_ < config.pipeline_depth() ? 0.0 : oldest_end_s_ + overdue_s;
  double start_s = next_start_s_ + overdue_s;
  double decodes_s = batch_time.b0_s;
  if (running_ > 0) {
    decodes_s = batch_time.seconds({running_, context_tokens_, 0});
  } else {
    pass_s = std::max(pass_s, first_arrival_s);
    start_s = std::max(start_s, first_arrival_s);
  }
  const auto batches_within = [](double span_s, double batch_s) {
    return span_s > 0.0 && batch_s > 0.0 ? std::ceil(caught * span_s / batch_s) : 0.0;
  };
  const double lag = config.async_scheduling;
  const double first =
      first_arrival_s > pass_s ? batches_within(first_arrival_s - start_s, decodes_s) + lag : 0.0;
  double earliest = first + static_cast<double>(ahead_tokens / budget);
  if (arrival_s > pass_s) {
    // Decodes alone, then with the prompts ahead, in full batches first, then with those whom these
    // have become.
    const double alone_s = first * decodes_s, busy_s = ahead_batches * decodes_s + ahead_s;
    const double full_s =
        ahead_tokens > 0
            ? decodes_s + ahead_s * static_cast<double>(std::min(budget, ahead_tokens)) /
                              static_cast<double>(ahead_tokens)
            : 0.0;
    const double joined_s =
        batch_time.seconds({running_ + ahead, context_tokens_ + ahead_tokens, 0});
    const double span_s = arrival_s - start_s;
    earliest =
        std::max(earliest, batches_within(std::min(span_s, alone_s), decodes_s) +
                               std::min(batches_within(span_s - alone_s, full_s), ahead_batches) +
                               batches_within(span_s - alone_s - busy_s, joined_s) + lag);
  }

  const Turn turn{.earliest = earliest,
                  .ahead = static_cast<double>(ahead),
                  .ahead_blocks = static_cast<double>(queue_.blocks + booked.blocks),
                  .blocks = static_cast<double>(config.blocks_for(prompt_tokens) -
                                                config.blocks_for(cached_tokens))};
  const auto ttft_s = [&](const Wait& wait) {
    const double batches =
        std::max(first + static_cast<double>(divide_up(ahead_tokens + own.tokens, budget)),
                 wait.batches + static_cast<double>(divide_up(own.tokens, budget)));
    const double all_decodes_s =
        running_ > 0 ? wait.decodes_s + (batches - wait.batches) * wait.next_decodes_s
                     : batches * decodes_s;
    const double end_s =
        start_s + all_decodes_s + ahead_s + own_s + batch_time.b1_s * wait.recomputed_tokens;
    return std::max(end_s - arrival_s, batch_time.b0_s + own_s);
  };
  const double likely_s = ttft_s(wait_for(config, batch_time, turn));
  // With a threshold, short prompts may overtake long ones.
  const double least_s = config.long_prefill_token_threshold > 0
                             ? batch_time.b0_s + own_s
                             : ttft_s(least_wait_for(config, batch_time, turn));
  return {.likely_s = likely_s, .least_s = std::min(likely_s, least_s)};
}

}  // namespace sfs
