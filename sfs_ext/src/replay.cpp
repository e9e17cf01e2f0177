#include "sfs/replay.h"

#include <algorithm>
#include <deque>
#include <stdexcept>
#include <string>

#include "sfs/engine_loop.h"

namespace sfs {

ReplayResult replay(const SchedulerConfig& config, std::vector<ReplayRequest> requests,
                    const ReplayOptions& options) {
  for (const ReplayRequest& next : requests) Scheduler::check(config, next.request);
  ReplayResult result;
  result.token_times_s.resize(requests.size());
  std::stable_sort(requests.begin(), requests.end(), [](const auto& a, const auto& b) {
    return a.request.arrival_s < b.request.arrival_s;
  });

  EngineLoop loop(config, options.batch_time.value_or(BatchTime{}));
  std::deque<std::size_t> steps_in_flight;
  std::vector<Token> tokens;
  double now_s = 0.0;
  double pass = 0.0;
  double& clock = options.batch_time ? now_s : pass;
  auto next = requests.begin();

  for (;; pass += 1.0) {
    if (!loop.busy()) {
      if (next == requests.end()) return result;
      clock = std::max(clock, next->request.arrival_s);
    }
    if (static_cast<std::int64_t>(result.steps.size()) >= options.max_steps)
      throw std::runtime_error("replay: the workload is unfinished after " +
                               std::to_string(options.max_steps) + " steps");
    for (; next != requests.end() && next->request.arrival_s <= clock; ++next)
      loop.scheduler.add(next->request, std::move(next->keys));

    const EngineLoop::Pass done = loop.schedule(now_s);
    if (done.scheduled) {
      ReplayStep& step = result.steps.emplace_back();
      const Batch& batch = loop.newest().batch;
      const auto id = [&](Slot slot) { return loop.scheduler.request(slot).id; };
      for (const Scheduled& entry : batch.entries)
        step.batch.emplace_back(id(entry.slot), entry.tokens);
      for (const Slot slot : batch.preempted) step.preempted.push_back(id(slot));
      step.free_blocks = loop.scheduler.free_blocks();
      step.time_s = now_s;
      steps_in_flight.push_back(result.steps.size() - 1);
    }
    if (done.waits) {
      if (options.batch_time) now_s = std::max(now_s, loop.oldest().end_s);
      tokens.clear();
      loop.complete_oldest(tokens);
      ReplayStep& step = result.steps[steps_in_flight.front()];
      steps_in_flight.pop_front();
      for (const Token& token : tokens) {
        result.token_times_s[token.request_id].push_back(now_s);
        if (token.finish != Finish::none) step.finished.push_back(token.request_id);
      }
      step.free_blocks_after = loop.scheduler.free_blocks();
    }
    if (options.batch_time && !done.executed && loop.scheduler.has_requests())
      now_s += options.idle_sleep_s;
  }
}

}  // namespace sfs
