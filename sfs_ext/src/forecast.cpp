#include "sfs/forecast.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace sfs {
namespace {

constexpr std::int64_t pass_cost = 8;  // of one without requests, in requests
constexpr double never_s = std::numeric_limits<double>::infinity();

Request request_of(const Arrival& arrival) {
  Request request;
  request.id = arrival.id;
  request.arrival_s = arrival.arrival_s;
  request.rank = std::numeric_limits<std::uint32_t>::max();
  request.prompt_tokens = arrival.prompt_tokens;
  request.max_tokens = arrival.max_tokens;
  request.output_tokens =
      arrival.predicted_output_tokens > 0.0
          ? std::max(1, static_cast<std::int32_t>(
                            std::min<double>(arrival.predicted_output_tokens, arrival.max_tokens)))
          : arrival.max_tokens;
  request.priority = arrival.priority;
  return request;
}

// Whether the last in the queue makes no difference to those before it (rules 3 and 9).
bool tail_is_inert(const SchedulerConfig& config) {
  return config.policy == Policy::fcfs && config.long_prefill_token_threshold == 0;
}

// The query on its way through a simulation.
class Query {
 public:
  Query(const Arrival& arrival, const KeepSimulation& keep) : arrival_(arrival), keep_(keep) {}

  double next_arrival_s() const { return arrived() ? never_s : arrival_.arrival_s; }
  bool arrived() const { return slot_ != not_added; }

  void arrive(Simulation& simulation, bool is_last) {
    slot_ = simulation.loop.scheduler.add(request_of(arrival_), arrival_.keys);
    queue_ahead_ = simulation.loop.scheduler.waiting().size();
    stands_behind_ = keep_ && is_last && tail_is_inert(simulation.loop.scheduler.config());
  }

  void scheduled(Simulation& simulation) {
    if (!arrived()) return;
    Scheduler& scheduler = simulation.loop.scheduler;
    if (!begun_ && scheduler.request(slot_).status == Status::running) {
      begun_ = true;
      begun_s_ = simulation.loop.newest().start_s;
    }
    stands_behind_ = stands_behind_ && !begun_ && scheduler.waiting().size() > 1;
    if (stands_behind_ && 8 * (scheduler.waiting().size() - 1) <= queue_ahead_) {
      queue_ahead_ = scheduler.waiting().size() - 1;
      scheduler.withdraw(slot_);
      keep_(simulation);
      slot_ = scheduler.add(request_of(arrival_), arrival_.keys);
    }
  }

  bool first_token_in(std::span<const Token> tokens) const {
    return std::any_of(tokens.begin(), tokens.end(),
                       [this](const Token& token) { return token.slot == slot_; });
  }
  double waiting_s() const { return begun_s_ - arrival_.arrival_s; }
  double prefill_s(double now_s) const { return now_s - begun_s_; }

 private:
  static constexpr Slot not_added = std::numeric_limits<Slot>::max();

  const Arrival& arrival_;
  const KeepSimulation& keep_;
  Slot slot_ = not_added;
  bool begun_ = false;
  double begun_s_ = 0.0;
  bool stands_behind_ = false;
  std::size_t queue_ahead_ = 0;
};

}  // namespace

void Simulation::begin() {
  pass = {};
  pass.scheduled = loop.in_flight() > 0;
  pass.executed = pass.scheduled && loop.newest().batch.shape.tokens > 0;
  pass.waits = loop.waits(pass.scheduled, pass.executed);
  now_s = 0.0;
  arrived = 0;
  batches = 0;
  looked_at = 0;
}

FirstToken forecast_first_token(Simulation& simulation, std::span<const Arrival> ahead,
                                const Arrival& arrival, const KeepSimulation& keep,
                                std::int64_t max_requests) {
  auto& [loop, pass, now_s, arrived, batches, looked_at] = simulation;
  if (!loop.scheduler.config().can_admit(arrival.prompt_tokens))
    return {.status = ForecastStatus::never, .waiting_s = never_s};
  if (!is_time(arrival.arrival_s))
    throw std::invalid_argument("forecast: the query's arrival_s is no time");
  static thread_local std::vector<Token> tokens;
  Query query(arrival, keep);
  const auto counted = [&batches = batches] {
    constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();
    return static_cast<std::int32_t>(std::min(batches, most));
  };

  while (looked_at < max_requests) {
    if (pass.waits) {
      now_s = std::max(now_s, loop.oldest().end_s);
      tokens.clear();
      loop.complete_oldest(tokens);
      if (query.first_token_in(tokens))
        return {.waiting_s = query.waiting_s(),
                .prefill_s = query.prefill_s(now_s),
                .batches = counted()};
    }
    if (!pass.executed && loop.scheduler.has_requests()) now_s += idle_sleep_s;

    const auto next_ahead_s = [&] {
      return arrived < ahead.size() ? ahead[arrived].arrival_s : never_s;
    };
    if (!loop.busy()) now_s = std::max(now_s, std::min(next_ahead_s(), arrival.arrival_s));
    for (; arrived < ahead.size() && ahead[arrived].arrival_s <= now_s; ++arrived) {
      if (!query.arrived() && arrival.arrival_s < ahead[arrived].arrival_s)
        query.arrive(simulation, /*is_last=*/false);
      loop.scheduler.add(request_of(ahead[arrived]), ahead[arrived].keys);
    }
    if (!query.arrived() && arrival.arrival_s <= now_s)
      query.arrive(simulation, arrived == ahead.size());

    const double next_arrival_s = std::min(next_ahead_s(), query.next_arrival_s());
    if (const auto run = loop.advance_decode_run(now_s, next_arrival_s); run > 0) {
      batches += run;
      looked_at += pass_cost;
      pass = {.scheduled = true, .executed = true, .waits = false};
      continue;
    }
    pass = loop.schedule(now_s);
    batches += pass.executed;
    looked_at += pass_cost + static_cast<std::int64_t>(loop.scheduler.running().size());
    query.scheduled(simulation);
  }
  return {.status = ForecastStatus::bound, .waiting_s = never_s, .batches = counted()};
}

}  // namespace sfs
