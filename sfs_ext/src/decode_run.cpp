// Requests that only decode are alike: each gets one token in every batch until shortly before its
// end. The scheduler steps them together, and between two events (an arrival, an admission, an
// end, a lack of blocks), when a batch holds nothing else, takes many steps in one stride. The
// outcome is that of stepping each request in each batch.
#include <algorithm>
#include <limits>

#include "sfs/engine_loop.h"
#include "sfs/scheduler.h"

namespace sfs {

void Scheduler::group_decodes(std::size_t in_flight) {
  groups_decodes_ = true;
  steady_ = SteadyDecodes(config_.block_size);
  steady_.begin_with(static_cast<std::int64_t>(in_flight));
}

// From its next batch on; the two steps before its last token, and that of the token itself, are
// not like the others (rules 4, 16 and 17). Nor is, under async scheduling, a step whose token is
// known already, as after a preemption: that token completes a block at once (rule 20).
bool Scheduler::decodes_steadily(const Request& request) const {
  return request.status == Status::running && request.stale_tokens == 0 &&
         (!config_.async_scheduling || request.placeholders > 0) &&
         request.computed >= request.prompt_tokens &&
         request.known_tokens() + emits_in_flight(request) - request.computed == 1 &&
         request.blocks == config_.blocks_for(request.computed) && steady_batches(request) >= 2;
}

std::int32_t Scheduler::emits_in_flight(const Request& request) const {
  return config_.async_scheduling ? request.placeholders : request.batches_in_flight;
}

// Batches it takes part in before the one that emits its last token.
std::int32_t Scheduler::steady_batches(const Request& request) const {
  return request.final_outputs(config_.max_model_len) - request.outputs - emits_in_flight(request) -
         1;
}

void Scheduler::join_steady(Slot slot, std::int64_t in_flight) {
  Request& request = requests_[slot];
  if (steady_.empty()) steady_admitted_ = 0;
  steady_admitted_ = std::max(steady_admitted_, request.admitted);
  steady_.join({.slot = slot,
                .after = steady_.scheduled() - in_flight,
                .until = steady_.scheduled() + steady_batches(request)},
               request.computed);
  add_steady_batches(request, -static_cast<std::int32_t>(in_flight), 0);
}

void Scheduler::add_steady_batches(Request& request, std::int32_t scheduled,
                                   std::int32_t updated) const {
  const std::int32_t in_flight = scheduled - updated;
  request.computed += scheduled;
  request.outputs += updated;
  request.in_flight_tokens += in_flight;
  request.batches_in_flight += in_flight;
  if (config_.async_scheduling) request.placeholders += in_flight;
}

// Its part in the batches since it joined becomes its own.
void Scheduler::leave_steady(SteadyDecodes::Member member) {
  const auto scheduled = static_cast<std::int32_t>(steady_.scheduled() - member.after);
  const auto updated =
      static_cast<std::int32_t>(std::max<std::int64_t>(steady_.updated() - member.after, 0));
  Request& request = requests_[member.slot];
  add_steady_batches(request, scheduled, updated);
  request.blocks = config_.blocks_for(request.computed);
  // Tokens known when it was scheduled last (rule 20).
  kv_.publish(request, member.slot, request.computed - (config_.async_scheduling ? 1 : 0));
  member.until = steady_.scheduled();
  if (updated < scheduled) departed_.push_back(member);
}

void Scheduler::regroup() {
  const auto before = [this](Slot a, Slot b) {
    return requests_[a].admitted < requests_[b].admitted;
  };
  while (const auto member = steady_.due()) {
    leave_steady(*member);
    steady_.leave_due(requests_[member->slot].computed);
    running_.insert(std::upper_bound(running_.begin(), running_.end(), member->slot, before),
                    member->slot);
  }
  const auto joins = [this](Slot slot) {
    if (!decodes_steadily(requests_[slot])) return false;
    join_steady(slot, 0);
    return true;
  };
  running_.erase(std::remove_if(running_.begin(), running_.end(), joins), running_.end());
}

void Scheduler::ungroup() {
  for (const SteadyDecodes::Member& member : steady_.dissolve()) {
    leave_steady(member);
    running_.push_back(member.slot);
  }
  std::sort(running_.begin(), running_.end(),
            [this](Slot a, Slot b) { return requests_[a].admitted < requests_[b].admitted; });
}

// Whether budget and blocks are enough for every member whatever the others get, so that the order
// of the running requests does not matter to them.
bool Scheduler::leaves_steady_alone(std::int32_t budget, std::int32_t threshold) const {
  if (steady_.empty()) return true;
  budget -= steady_.size();
  if (budget < 0) return false;
  std::int64_t blocks = steady_.blocks_for(1);
  for (const Slot slot : running_) {
    const Request& request = requests_[slot];
    const std::int32_t wanted = wanted_tokens(request, threshold);
    if (wanted > budget && request.admitted < steady_admitted_) return false;
    const std::int32_t tokens = std::min(wanted, budget);
    if (tokens <= 0) continue;
    budget -= tokens;
    blocks += std::max(config_.blocks_for(request.computed + tokens) - request.blocks, 0);
  }
  return blocks <= free_blocks();
}

void Scheduler::schedule_steady(Batch& batch, std::int32_t& budget) {
  if (steady_.empty()) return;
  batch.steady = true;
  batch.shape.tokens += steady_.size();
  batch.shape.decode_context_tokens += steady_.context_tokens();
  budget -= steady_.size();
  kv_.take(steady_.blocks_for(1));
  steady_.schedule(1);
}

// Free blocks only shrink during a run, so a head that is blocked now stays blocked.
bool Scheduler::admits_nothing() {
  if (waiting_.empty() || running_count() >= static_cast<std::size_t>(config_.max_running()))
    return true;
  const std::int32_t budget =
      config_.max_num_batched_tokens - static_cast<std::int32_t>(running_count());
  if (budget <= 0) return true;
  const Slot slot = waiting_.front();
  const Request& head = requests_[slot];
  if (head.stale_tokens > 0) return false;
  const auto [tokens, blocks] =
      admission_of(head, kv_.find_hits(head, slot), budget, long_prefill_threshold());
  return tokens == 0 || !kv_.fits(head, tokens, blocks);
}

std::int64_t Scheduler::decode_run_steps() {
  if (steady_.empty() || !running_.empty() || finished_ ||
      steady_.size() > config_.max_num_batched_tokens)
    return 0;
  const std::int64_t steps =
      std::min(steady_.batches_left(), steady_.batches_within(free_blocks()));
  return steps > 1 && admits_nothing() ? steps : 0;
}

void Scheduler::advance_decode_run(std::int64_t steps) {
  kv_.take(steady_.blocks_for(steps));
  steady_.schedule(steps);
  steady_.update(steps);
}

std::int64_t EngineLoop::advance_decode_run(double& now_s, double next_arrival_s) {
  const bool async_scheduling = scheduler.config().async_scheduling != 0;
  if (count_ != (async_scheduling ? 1U : 0U)) return 0;
  if (async_scheduling && !(oldest().batch.steady && oldest().batch.entries.empty())) return 0;
  std::int64_t steps = scheduler.decode_run_steps();
  if (steps == 0) return 0;

  // Pass j + 1 begins when the batch awaited in pass j has run. Async: the first batch awaited is
  // the one in flight.
  const std::int64_t requests = scheduler.steady().size();
  const std::int64_t context_tokens = scheduler.steady().context_tokens();
  const auto pass_begins_s = [&](std::int64_t pass) {
    if (!async_scheduling)
      return now_s + batch_time.decode_run_seconds(requests, context_tokens, pass);
    if (pass == 0) return now_s;
    return std::max(now_s, oldest().end_s) +
           batch_time.decode_run_seconds(requests, context_tokens, pass - 1);
  };
  // An arrival ends the run: only passes that begin before it are alike.
  if (pass_begins_s(steps - 1) >= next_arrival_s) {
    std::int64_t before = -1, after = steps - 1;
    while (after - before > 1) {
      const std::int64_t middle = before + (after - before) / 2;
      (pass_begins_s(middle) < next_arrival_s ? before : after) = middle;
    }
    steps = after;
    if (steps <= 0) return 0;
  }

  const double end_s = pass_begins_s(steps);
  if (async_scheduling) {
    InFlight& batch = oldest();
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
