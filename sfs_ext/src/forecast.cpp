#include "sfs/forecast.h"

#include <algorithm>
#include <limits>

namespace sfs {
namespace {

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

}  // namespace

FirstToken forecast_first_token(EngineLoop& loop, std::span<const Arrival> ahead,
                                const Arrival& query, std::int64_t max_requests) {
  FirstToken result;
  if (!loop.scheduler.config().can_admit(query.prompt_tokens)) {
    result.status = ForecastStatus::never;
    result.waiting_s = never_s;
    return result;
  }
  constexpr Slot not_added = std::numeric_limits<Slot>::max();
  Slot query_slot = not_added;
  bool prefill_begun = false;
  double prefill_start_s = 0.0;
  double now_s = 0.0;
  auto next = ahead.begin();
  static thread_local std::vector<Token> tokens;

  // The snapshot was taken right after a pass had scheduled, so the first one begins there.
  EngineLoop::Pass pass;
  pass.scheduled = loop.in_flight() > 0;
  pass.executed = pass.scheduled && loop.newest().batch.shape.tokens > 0;
  pass.waits = loop.waits(pass.scheduled, pass.executed);
  for (std::int64_t looked_at = 0; looked_at < max_requests;
       looked_at += 1 + static_cast<std::int64_t>(loop.scheduler.running().size())) {
    if (pass.waits) {
      now_s = std::max(now_s, loop.oldest().end_s);
      tokens.clear();
      loop.complete_oldest(tokens);
      for (const Token& token : tokens) {
        if (token.slot != query_slot) continue;
        result.waiting_s = prefill_start_s - query.arrival_s;
        result.prefill_s = now_s - prefill_start_s;
        return result;
      }
    }
    if (!pass.executed && loop.scheduler.has_requests()) now_s += idle_sleep_s;

    if (!loop.busy()) {
      const double next_s = next == ahead.end() ? query.arrival_s : next->arrival_s;
      now_s = std::max(now_s, std::min(next_s, query.arrival_s));
    }
    for (; next != ahead.end() && next->arrival_s <= now_s; ++next)
      loop.scheduler.add(request_of(*next));
    if (query_slot == not_added && query.arrival_s <= now_s)
      query_slot = loop.scheduler.add(request_of(query));

    if (!prefill_begun) {  // from then on the end is near, and a stride could pass over it
      const double next_arrival_s = std::min(next == ahead.end() ? never_s : next->arrival_s,
                                             query_slot == not_added ? query.arrival_s : never_s);
      if (const auto batches = loop.advance_decode_run(now_s, next_arrival_s); batches > 0) {
        result.batches += batches;
        pass = {.scheduled = true, .executed = true, .waits = false};
        continue;
      }
    }

    pass = loop.schedule(now_s);
    result.batches += pass.executed;
    if (!prefill_begun && query_slot != not_added &&
        loop.scheduler.request(query_slot).status == Status::running) {
      prefill_begun = true;
      prefill_start_s = loop.newest().start_s;
    }
  }
  result.status = ForecastStatus::bound;
  result.waiting_s = never_s;
  return result;
}

}  // namespace sfs
