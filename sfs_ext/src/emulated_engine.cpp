#include "sfs/emulated_engine.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "sfs/block_keys.h"
#include "sfs/engine_state.h"

namespace sfs {
namespace {

using Clock = std::chrono::system_clock;
constexpr std::uint32_t max_residents = 16384;
constexpr std::uint32_t max_steps = 8192;

double unix_time_s() {
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

Clock::time_point time_point(double at_s) {
  const auto since_epoch = std::chrono::duration<double>(at_s);
  return Clock::time_point(std::chrono::duration_cast<Clock::duration>(since_epoch));
}

}  // namespace

EmulatedEngine::EmulatedEngine(const SchedulerConfig& config, const BatchTime& batch_time,
                               const std::string& snapshot_path)
    : loop_(config, batch_time),
      writer_(snapshot_path, config, max_residents, max_steps, config.enable_prefix_caching) {
  if (config.enable_prefix_caching) loop_.scheduler.record_to(&journal_);
  publish();
  thread_ = std::thread([this] { run(); });
}

EmulatedEngine::~EmulatedEngine() { stop(); }

EmulatedEngine::EventDescriptor::EventDescriptor()
    : descriptor(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (descriptor < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
}

EmulatedEngine::EventDescriptor::~EventDescriptor() { ::close(descriptor); }

void EmulatedEngine::submit(Request request, std::span<const std::int32_t> prompt_token_ids) {
  const SchedulerConfig& config = loop_.scheduler.config();
  request.prompt_tokens = static_cast<std::int32_t>(prompt_token_ids.size());
  Scheduler::check(config, request);
  Submission submission{request, {}};
  if (config.enable_prefix_caching)
    submission.keys = block_keys(prompt_token_ids, config.block_size);
  const std::lock_guard lock(mutex_);
  if (stopping_ || error_) throw std::runtime_error("the emulated engine has stopped");
  submission.request.rank = next_rank_++;
  submissions_.push_back(std::move(submission));
  wake_.notify_one();
}

void EmulatedEngine::abort(std::uint64_t request_id) {
  const std::lock_guard lock(mutex_);
  aborts_.push_back(request_id);
  wake_.notify_one();
}

std::vector<EngineEvent> EmulatedEngine::take_events() {
  std::uint64_t count = 0;
  [[maybe_unused]] const auto drained = ::read(event_.descriptor, &count, sizeof count);
  const std::lock_guard lock(mutex_);
  return std::exchange(events_, {});
}

std::optional<std::string> EmulatedEngine::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

void EmulatedEngine::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    wake_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
  writer_.close();
}

void EmulatedEngine::run() {
  try {
    loop_until_stopped();
  } catch (const std::exception& failure) {
    const std::lock_guard lock(mutex_);
    error_ = failure.what();
    signal();
  }
}

void EmulatedEngine::loop_until_stopped() {
  while (take_submissions()) {
    const EngineLoop::Pass pass = loop_.schedule(unix_time_s());
    if (pass.scheduled) publish();
    if (pass.waits) {
      if (!wait_until(loop_.oldest().end_s)) return;
      complete_oldest();
    }
    const bool idles = !pass.executed && loop_.scheduler.has_requests();
    if (idles && !wait_until(unix_time_s() + idle_sleep_s)) return;
  }
}

bool EmulatedEngine::take_submissions() {
  outgoing_.clear();
  {
    std::unique_lock lock(mutex_);
    const auto has_news = [this] { return stopping_ || !submissions_.empty() || !aborts_.empty(); };
    while (!loop_.busy() &&
           !wake_.wait_until(lock, time_point(unix_time_s() + heartbeat_s), has_news))
      publish();
    if (stopping_) return false;
    for (Submission& submission : submissions_)
      loop_.scheduler.add(submission.request, submission.keys);
    submissions_.clear();
    take_aborts();
  }
  notify(outgoing_);
  return true;
}

// Rule 25.
void EmulatedEngine::take_aborts() {
  const double now_s = unix_time_s();
  std::erase_if(aborts_, [&](std::uint64_t id) {
    const auto is_to_come = [id](const Submission& other) { return other.request.id == id; };
    if (std::ranges::any_of(submissions_, is_to_come)) return false;
    if (loop_.scheduler.abort(id))
      outgoing_.push_back({id, 0, static_cast<std::int32_t>(Finish::abort), now_s});
    return true;
  });
}

bool EmulatedEngine::wait_until(double at_s) {
  std::unique_lock lock(mutex_);
  for (double now_s = unix_time_s(); now_s < at_s; now_s = unix_time_s()) {
    const double next_s = std::min(at_s, now_s + heartbeat_s);
    if (wake_.wait_until(lock, time_point(next_s), [this] { return stopping_; })) return false;
    if (next_s < at_s) publish();
  }
  return !stopping_;
}

void EmulatedEngine::complete_oldest() {
  const InFlight& batch = loop_.oldest();
  const double done_s = unix_time_s();
  const BatchShape& shape = batch.batch.shape;
  if (shape.tokens > 0) {
    StepRecord step{};
    step.scheduled_s = batch.scheduled_s;
    step.started_s = std::max(batch.scheduled_s, previous_done_s_);
    step.done_s = done_s;
    for (const Scheduled& entry : batch.batch.entries) {
      ++(entry.decode ? step.decode_requests : step.prefill_requests);
      if (!entry.decode) step.prefill_tokens += entry.tokens;
    }
    step.preempted = static_cast<std::int32_t>(batch.batch.preempted.size());
    step.decode_context_tokens = shape.decode_context_tokens;
    step.prefill_attention = shape.prefill_attention;
    step.running = static_cast<std::int32_t>(loop_.scheduler.running().size());
    step.waiting = static_cast<std::int32_t>(loop_.scheduler.waiting().size());
    step.free_blocks = loop_.scheduler.free_blocks();
    writer_.record_step(step);
    previous_done_s_ = done_s;
  }
  outgoing_.clear();
  {
    const std::lock_guard lock(mutex_);
    take_aborts();
  }
  tokens_.clear();
  loop_.complete_oldest(tokens_);
  for (const Token& token : tokens_)
    outgoing_.push_back(
        {token.request_id, token.outputs, static_cast<std::int32_t>(token.finish), done_s});
  notify(outgoing_);
}

void EmulatedEngine::publish() {
  capture(loop_, unix_time_s(), scratch_);
  if (!journal_.empty()) writer_.append(journal_);
  journal_.clear();
  writer_.publish(scratch_.header, scratch_.residents.data(), scratch_.residents.size());
}

void EmulatedEngine::notify(std::span<const EngineEvent> events) {
  if (events.empty()) return;
  const std::lock_guard lock(mutex_);
  events_.insert(events_.end(), events.begin(), events.end());
  signal();
}

void EmulatedEngine::signal() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(event_.descriptor, &one, sizeof one);
}

}  // namespace sfs
