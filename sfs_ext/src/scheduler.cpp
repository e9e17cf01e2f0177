#include "sfs/scheduler.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>

namespace sfs {

Scheduler::Scheduler(const SchedulerConfig& config) : config_(config), kv_(config) {
  config_.validate();
}

Scheduler::Scheduler(const SchedulerConfig& config, const KvMirror& mirror)
    : config_(config), kv_(config, mirror) {
  config_.validate();
}

void Scheduler::check(const SchedulerConfig& config, const Request& request) {
  if (request.max_tokens < 1 || request.output_tokens < 1)
    throw std::invalid_argument("request: max_tokens and output_tokens must be at least 1, not " +
                                std::to_string(request.max_tokens) + " and " +
                                std::to_string(request.output_tokens));
  if (!config.can_admit(request.prompt_tokens))
    throw std::invalid_argument("request: a prompt of " + std::to_string(request.prompt_tokens) +
                                " tokens can never be admitted (max_model_len " +
                                std::to_string(config.max_model_len) + ")");
}

Slot Scheduler::store(const Request& request) {
  if (free_slots_.empty()) {
    requests_.push_back(request);
    return static_cast<Slot>(requests_.size() - 1);
  }
  const Slot slot = free_slots_.back();
  free_slots_.pop_back();
  requests_[slot] = request;
  return slot;
}

Slot Scheduler::add(const Request& request, std::span<const BlockKey> keys) {
  const Slot slot = store(request);
  kv_.add(request, slot, keys);
  enqueue(slot, /*at_front=*/false);
  return slot;
}

Scheduler::Restored Scheduler::restore(const Request& request, std::int32_t steady_in_flight) {
  const Slot slot = store(request);
  kv_.restore(request, slot);
  if (request.status != Status::running) {
    waiting_.push_back(slot);
    return {slot, false};
  }
  requests_[slot].admitted = admissions_++;
  const bool steady = groups_decodes_ && steady_in_flight <= emits_in_flight(request) &&
                      decodes_steadily(requests_[slot]);
  if (steady)
    join_steady(slot, steady_in_flight);
  else
    running_.push_back(slot);
  return {slot, steady};
}

void Scheduler::enqueue(Slot slot, bool at_front) {
  if (config_.policy == Policy::priority) {
    waiting_.insert_ordered(slot, [this](Slot a, Slot b) {
      const Request &x = requests_[a], &y = requests_[b];
      return std::tie(x.priority, x.arrival_s, x.rank) < std::tie(y.priority, y.arrival_s, y.rank);
    });
  } else if (at_front) {
    waiting_.push_front(slot);
  } else {
    waiting_.push_back(slot);
  }
}

void Scheduler::schedule(Batch& batch) {
  batch.clear();
  std::int32_t budget = config_.max_num_batched_tokens;
  const std::int32_t threshold = long_prefill_threshold();
  if (groups_decodes_) {
    regroup();
    if (!leaves_steady_alone(budget, threshold)) ungroup();
    schedule_steady(batch, budget);
  }
  schedule_running(batch, budget, threshold);
  if (batch.preempted.empty()) schedule_waiting(batch, budget, threshold);
  finish_step(batch);
}

// Rule 3; 0 means no threshold.
std::int32_t Scheduler::long_prefill_threshold() const {
  const auto present = static_cast<std::int32_t>(running_count() + waiting_.size());
  const std::int32_t threshold = present > 1 ? config_.long_prefill_token_threshold : 0;
  if (threshold > 0 && config_.long_prefill_token_threshold_adaptive)
    return std::max(threshold, config_.max_num_batched_tokens / present);
  return threshold;
}

// Rules 4 and 5, before the budget.
std::int32_t Scheduler::wanted_tokens(const Request& request, std::int32_t threshold) const {
  // Its last token is in flight already.
  if (request.placeholders > 0 && request.computed + 2 - request.placeholders >=
                                      std::int64_t{request.prompt_tokens} + request.max_tokens)
    return 0;
  std::int32_t tokens = request.known_tokens() + request.placeholders - request.computed;
  if (threshold > 0) tokens = std::min(tokens, threshold);
  return std::min(tokens, config_.max_model_len - request.computed - 1);
}

void Scheduler::schedule_running(Batch& batch, std::int32_t& budget, std::int32_t threshold) {
  for (std::size_t i = 0; i < running_.size() && budget > 0; ++i) {
    const Slot slot = running_[i];
    Request& request = requests_[slot];
    const std::int32_t tokens = std::min(wanted_tokens(request, threshold), budget);
    if (tokens <= 0) continue;

    bool allocated = kv_.allocate(request, slot, tokens);
    while (!allocated && preempt_for(i, batch, budget))
      allocated = kv_.allocate(request, slot, tokens);
    if (!allocated) return;
    batch.entries.push_back({.slot = slot, .tokens = tokens});
    budget -= tokens;
  }
}

// Rules 7 and 8. `position` follows the asking request when an earlier one leaves; false when the
// asking request was itself the victim.
bool Scheduler::preempt_for(std::size_t& position, Batch& batch, std::int32_t& budget) {
  std::size_t victim_at = running_.size() - 1;
  if (config_.policy == Policy::priority) {
    victim_at = 0;
    for (std::size_t i = 1; i < running_.size(); ++i) {
      const Request &worst = requests_[running_[victim_at]], &other = requests_[running_[i]];
      if (std::tie(worst.priority, worst.arrival_s) < std::tie(other.priority, other.arrival_s))
        victim_at = i;
    }
  }
  const Slot victim = running_[victim_at];
  const bool is_asking = victim_at == position;
  running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(victim_at));
  if (victim_at < position) --position;
  const auto scheduled = std::find_if(batch.entries.begin(), batch.entries.end(),
                                      [victim](const Scheduled& s) { return s.slot == victim; });
  if (scheduled != batch.entries.end()) {
    budget += scheduled->tokens;
    batch.entries.erase(scheduled);
  }

  Request& request = requests_[victim];
  kv_.release(request, victim);
  request.status = Status::preempted;
  request.computed = 0;
  request.placeholders = 0;
  request.stale_tokens = request.in_flight_tokens;
  enqueue(victim, /*at_front=*/true);
  batch.preempted.push_back(victim);
  return !is_asking;
}

// Rules 12 and 13 for a waiting request: what it would compute, and under which conditions.
Scheduler::Admission Scheduler::admission_of(const Request& request, std::int32_t hit_blocks,
                                             std::int32_t budget, std::int32_t threshold) const {
  std::int32_t tokens = request.known_tokens() - hit_blocks * config_.block_size;
  if (threshold > 0) tokens = std::min(tokens, threshold);
  if (!config_.enable_chunked_prefill && tokens > budget) return {};
  const auto watermark =
      static_cast<std::int32_t>(config_.watermark * static_cast<double>(config_.num_blocks));
  return {.tokens = std::min(tokens, budget),
          .blocks = {.full_sequence = config_.scheduler_reserve_full_isl != 0,
                     .watermark = running_count() == 0 ? 0 : watermark,
                     .hit_blocks = hit_blocks}};
}

void Scheduler::schedule_waiting(Batch& batch, std::int32_t& budget, std::int32_t threshold) {
  const auto cap = static_cast<std::size_t>(config_.max_running());
  // Rule 9: only ever the head, and nobody is evicted for it.
  while (budget > 0 && !waiting_.empty() && running_count() < cap) {
    const Slot slot = waiting_.front();
    Request& request = requests_[slot];
    if (request.stale_tokens > 0) {  // rule 10
      waiting_.pop_front();
      skipped_.push_back(slot);
      continue;
    }
    const std::int32_t hit_blocks = kv_.find_hits(request, slot);  // rule 11
    const auto [tokens, blocks] = admission_of(request, hit_blocks, budget, threshold);
    // Rule 13: a head that does not fit blocks all behind it.
    if (tokens == 0 || !kv_.allocate(request, slot, tokens, blocks)) break;
    // Rule 14.
    waiting_.pop_front();
    running_.push_back(slot);
    request.admitted = admissions_++;
    request.status = Status::running;
    request.computed = hit_blocks * config_.block_size;
    batch.entries.push_back({.slot = slot, .tokens = tokens});
    budget -= tokens;
  }
  for (; !skipped_.empty(); skipped_.pop_back()) enqueue(skipped_.back(), /*at_front=*/true);
}

// Rule 15: computed tokens advance when the batch is built, not when it has run.
void Scheduler::finish_step(Batch& batch) {
  for (Scheduled& entry : batch.entries) {
    Request& request = requests_[entry.slot];
    entry.decode = entry.tokens == 1 && request.computed >= request.prompt_tokens;
    if (entry.decode)
      batch.shape.add_decode(request.computed);
    else
      batch.shape.add_prefill(entry.tokens, request.computed);
    request.computed += entry.tokens;
    request.in_flight_tokens += entry.tokens;
    ++request.batches_in_flight;
    entry.emits = request.computed >= request.known_tokens() + request.placeholders;
    if (entry.emits && config_.async_scheduling) ++request.placeholders;
  }
  finished_ = false;
}

void Scheduler::update(const Batch& batch, std::vector<Token>& tokens) {
  bool running_finished = false;
  for (const Scheduled& entry : batch.entries) take_result(entry, tokens, running_finished);
  if (batch.steady) {
    steady_.update(1);
    // None of these ends here: a member leaves before its last token.
    for (const SteadyDecodes::Member& gone : departed_)
      if (gone.after < steady_.updated() && steady_.updated() <= gone.until)
        take_result({.slot = gone.slot, .tokens = 1, .emits = true}, tokens, running_finished);
    std::erase_if(departed_, [this](const SteadyDecodes::Member& gone) {
      return gone.until <= steady_.updated();
    });
  }
  if (running_finished) drop_finished_from_running();
}

void Scheduler::take_result(const Scheduled& entry, std::vector<Token>& tokens,
                            bool& running_finished) {
  Request& request = requests_[entry.slot];
  --request.batches_in_flight;
  if (request.status == Status::finished) {  // rule 17: it ended while this batch was in flight
    if (request.batches_in_flight == 0) free_slots_.push_back(entry.slot);
    return;
  }
  request.in_flight_tokens -= entry.tokens;
  const bool stale = request.stale_tokens > 0;
  if (stale) request.stale_tokens -= entry.tokens;
  if (!entry.emits) return;

  // Rule 16.
  ++request.outputs;
  if (request.outputs == request.output_tokens && request.output_tokens < request.max_tokens)
    request.finish = Finish::stop;
  else if (request.known_tokens() >= config_.max_model_len || request.outputs >= request.max_tokens)
    request.finish = Finish::length;
  tokens.push_back({entry.slot, request.id, request.outputs, request.finish});
  if (config_.async_scheduling) {  // rule 18
    if (!stale) --request.placeholders;
    if (request.status == Status::running)
      kv_.publish(request, entry.slot, request.computed - request.placeholders);
  }
  if (request.finish == Finish::none) return;
  if (request.status == Status::running)
    running_finished = true;
  else
    waiting_.remove(entry.slot);
  retire(entry.slot);
}

void Scheduler::withdraw(Slot slot) {
  waiting_.remove(slot);
  kv_.withdraw_newest();
  free_slots_.push_back(slot);
}

bool Scheduler::abort(std::uint64_t request_id) {
  const auto named = [&](Slot slot) { return requests_[slot].id == request_id; };
  if (const auto at = std::find_if(running_.begin(), running_.end(), named); at != running_.end()) {
    const Slot slot = *at;
    running_.erase(at);
    requests_[slot].finish = Finish::abort;
    retire(slot);
    return true;
  }
  if (const auto at = std::find_if(waiting_.begin(), waiting_.end(), named); at != waiting_.end()) {
    const Slot slot = *at;
    waiting_.remove(slot);
    requests_[slot].finish = Finish::abort;
    retire(slot);
    return true;
  }
  return false;
}

void Scheduler::retire(Slot slot) {
  Request& request = requests_[slot];
  kv_.remove(request, slot);
  request.status = Status::finished;
  finished_ = true;
  if (request.batches_in_flight == 0) free_slots_.push_back(slot);
}

void Scheduler::drop_finished_from_running() {
  running_.erase(
      std::remove_if(running_.begin(), running_.end(),
                     [this](Slot slot) { return requests_[slot].status == Status::finished; }),
      running_.end());
}

}  // namespace sfs
