#include "sfs/replay.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <map>
#include <stdexcept>
#include <string>

#include "sfs/engine_loop.h"

namespace sfs {
namespace {

// Requests by the time at which their clients go away.
using Aborts = std::multimap<double, const ReplayRequest*>;

// Those due by `now`, of requests that arrived by `taken`: the engine does not know the others yet.
void take_aborts(Aborts& aborts, Scheduler& scheduler, double now, double taken) {
  for (auto next = aborts.begin(); next != aborts.end() && next->first <= now;) {
    const Request& request = next->second->request;
    if (request.arrival_s > taken) {
      ++next;
      continue;
    }
    scheduler.abort(request.id);
    next = aborts.erase(next);
  }
}

}  // namespace

ReplayResult replay(const SchedulerConfig& config, std::vector<ReplayRequest> requests,
                    const ReplayOptions& options) {
  for (const ReplayRequest& next : requests) Scheduler::check(config, next.request);
  ReplayResult result;
  result.token_times_s.resize(requests.size());
  std::stable_sort(requests.begin(), requests.end(), [](const auto& a, const auto& b) {
    return a.request.arrival_s < b.request.arrival_s;
  });
  Aborts aborts;
  for (const ReplayRequest& request : requests)
    if (std::isfinite(request.abort_s)) aborts.emplace(request.abort_s, &request);

  EngineLoop loop(config, options.batch_time.value_or(BatchTime{}));
  const bool timed = options.batch_time.has_value();
  std::deque<std::size_t> steps_in_flight;
  std::vector<Token> tokens;
  double now_s = 0.0;
  double pass = 0.0;
  double& clock = timed ? now_s : pass;
  auto next = requests.begin();

  for (;; pass += 1.0) {
    if (!loop.busy()) {
      if (next == requests.end()) return result;
      const double arrival = next->request.arrival_s;
      clock = std::max(clock, timed ? arrival : std::ceil(arrival));
    }
    if (static_cast<std::int64_t>(result.steps.size()) >= options.max_steps)
      throw std::runtime_error("replay: the workload is unfinished after " +
                               std::to_string(options.max_steps) + " steps");
    const double taken = clock;
    for (; next != requests.end() && next->request.arrival_s <= taken; ++next)
      loop.scheduler.add(next->request, std::move(next->keys));
    take_aborts(aborts, loop.scheduler, clock, taken);

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
      if (timed) now_s = std::max(now_s, loop.oldest().end_s);
      take_aborts(aborts, loop.scheduler, timed ? now_s : pass + 0.5, taken);
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
    if (timed && !done.executed && loop.scheduler.has_requests()) now_s += options.idle_sleep_s;
  }
}

}  // namespace sfs
