#include "sfs/virtual_engine.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <utility>

#include "sfs/block_keys.h"
#include "sfs/engine_state.h"

namespace sfs {
namespace {

constexpr double never_s = std::numeric_limits<double>::infinity();

}  // namespace

VirtualEngine::VirtualEngine(const SchedulerConfig& config, const BatchTime& batch_time)
    : loop_(config, batch_time) {
  if (config.enable_prefix_caching) forgotten_.emplace(config.num_blocks);
}

void VirtualEngine::submit(Request request, std::span<const std::int32_t> prompt_token_ids,
                           std::span<const std::int32_t> answer_token_ids) {
  const SchedulerConfig& config = loop_.scheduler.config();
  request.prompt_tokens = static_cast<std::int32_t>(prompt_token_ids.size());
  request.rank = next_rank_;
  Scheduler::check(config, request);
  if (!is_time(request.arrival_s))
    throw std::invalid_argument("virtual engine: a request's arrival_s is no time");
  ++next_rank_;
  Submission submission{request, {}};
  if (config.enable_prefix_caching) {
    std::vector<std::int32_t> content(prompt_token_ids.begin(), prompt_token_ids.end());
    const auto outputs = static_cast<std::size_t>(request.final_outputs(config.max_model_len));
    const auto answer = answer_token_ids.first(std::min(answer_token_ids.size(), outputs));
    content.insert(content.end(), answer.begin(), answer.end());
    submission.keys = block_keys(content, config.block_size);
  }
  const auto later = std::upper_bound(coming_.begin(), coming_.end(), request.arrival_s,
                                      [](double arrival_s, const Submission& other) {
                                        return arrival_s < other.request.arrival_s;
                                      });
  coming_.insert(later, std::move(submission));
}

void VirtualEngine::abort(std::uint64_t request_id, double at_s) {
  if (!is_time(at_s)) throw std::invalid_argument("virtual engine: an abort's at_s is no time");
  aborts_.emplace(at_s, request_id);
}

double VirtualEngine::next_event_s() const {
  if (awaits_results_) return std::max(now_s_, loop_.oldest().end_s);
  if (loop_.busy()) return now_s_;
  return coming_.empty() ? never_s : std::max(clock_s_, coming_.front().request.arrival_s);
}

void VirtualEngine::step(std::vector<EngineEvent>& events) {
  const double at_s = next_event_s();
  if (at_s == never_s) return;
  // Said each time: a copy's cache tells nobody.
  if (forgotten_) loop_.scheduler.record_to(&journal_);
  now_s_ = at_s;
  clock_s_ = std::max(clock_s_, at_s);
  if (awaits_results_) take_results(events);
  if (next_event_s() == at_s) begin_pass(events);
}

void VirtualEngine::run_until(double until_s, std::vector<EngineEvent>& events) {
  while (next_event_s() < until_s) step(events);
  if (std::isfinite(until_s)) clock_s_ = std::max(clock_s_, until_s);
}

void VirtualEngine::begin_pass(std::vector<EngineEvent>& events) {
  forget_old_journal();
  take_arrivals();
  take_aborts(events);
  const std::size_t running_before = loop_.scheduler.running().size();
  pass_ = loop_.schedule(now_s_);
  awaits_results_ = pass_.waits;
  if (pass_.scheduled) {
    count_admissions(running_before);
    sequence_ += restamps() + 1;
    published_s_ = now_s_;
    // The loop may sleep after such a pass, its results taken but not yet
    // published.
    if (!pass_.executed) snapshot();
  }
  if (!awaits_results_) sleep_if_idle();
}

void VirtualEngine::take_arrivals() {
  while (!coming_.empty() && coming_.front().request.arrival_s <= now_s_) {
    Submission& next = coming_.front();
    const Slot slot = loop_.scheduler.add(next.request, next.keys);
    never_ran_.resize(std::max<std::size_t>(never_ran_.size(), slot + 1));
    never_ran_[slot] = true;
    coming_.pop_front();
  }
}

// One that has not been taken yet is aborted once it has been.
void VirtualEngine::take_aborts(std::vector<EngineEvent>& events) {
  for (auto next = aborts_.begin(); next != aborts_.end() && next->first <= now_s_;) {
    const std::uint64_t id = next->second;
    if (std::any_of(coming_.begin(), coming_.end(),
                    [id](const Submission& other) { return other.request.id == id; })) {
      ++next;
      continue;
    }
    if (loop_.scheduler.abort(id))
      events.push_back({id, 0, static_cast<std::int32_t>(Finish::abort), now_s_});
    next = aborts_.erase(next);
  }
}

void VirtualEngine::take_results(std::vector<EngineEvent>& events) {
  awaits_results_ = false;
  take_aborts(events);
  tokens_.clear();
  loop_.complete_oldest(tokens_);
  for (const Token& token : tokens_)
    events.push_back(
        {token.request_id, token.outputs, static_cast<std::int32_t>(token.finish), now_s_});
  sleep_if_idle();
}

void VirtualEngine::sleep_if_idle() {
  if (!pass_.executed && loop_.scheduler.has_requests()) now_s_ += idle_sleep_s;
}

// Those that the pass admitted stand last, in the batch as among the running.
void VirtualEngine::count_admissions(std::size_t running_before) {
  const Batch& batch = loop_.newest().batch;
  const auto& running = loop_.scheduler.running();
  if (!batch.preempted.empty() || running.size() <= running_before) return;
  auto entry = batch.entries.end() - static_cast<std::ptrdiff_t>(running.size() - running_before);
  for (; entry != batch.entries.end(); ++entry) {
    if (!never_ran_[entry->slot]) continue;
    never_ran_[entry->slot] = false;
    const Request& request = loop_.scheduler.request(entry->slot);
    admitted_prompt_tokens_ += request.prompt_tokens;
    prefix_hit_tokens_ += request.computed - entry->tokens;
  }
}

std::uint64_t VirtualEngine::restamps() const {
  return static_cast<std::uint64_t>(std::floor((clock_s_ - published_s_) / heartbeat_s));
}

const Snapshot& VirtualEngine::snapshot() {
  const std::uint64_t stamps = restamps();
  if (snapshot_.header.sequence != sequence_ + stamps) {
    capture(loop_, published_s_ + static_cast<double>(stamps) * heartbeat_s, snapshot_);
    SnapshotHeader& header = snapshot_.header;
    header.sequence = sequence_ + stamps;
    header.kv_journaled = forgotten_.has_value();
    if (forgotten_) header.kv_position = forgotten_->position() + journal_.size();
  }
  return snapshot_;
}

// A reader who is not further behind than this needs no checkpoint.
void VirtualEngine::forget_old_journal() {
  if (!forgotten_) return;
  const auto kept = std::size_t{4} * static_cast<std::size_t>(forgotten_->num_blocks());
  if (journal_.size() < 2 * kept) return;
  forgotten_->apply(std::span(journal_).first(kept));
  journal_.erase(journal_.begin(), journal_.begin() + static_cast<std::ptrdiff_t>(kept));
}

KvJournalMessage VirtualEngine::journal_message(std::uint64_t after) {
  if (!forgotten_) throw std::logic_error("virtual engine: without prefix caching, no KV journal");
  const std::uint64_t to = snapshot().header.kv_position;
  const std::uint64_t forgotten = forgotten_->position();
  const std::uint64_t from = after < forgotten ? 0 : std::min(after, to);
  KvJournalMessage message{forgotten_->num_blocks(), from, to, {}};
  if (from == 0) message.events = forgotten_->compact();
  const auto at = [&](std::uint64_t position) {
    return journal_.begin() + static_cast<std::ptrdiff_t>(position - forgotten);
  };
  message.events.insert(message.events.end(), at(std::max(from, forgotten)), at(to));
  return message;
}

}  // namespace sfs
