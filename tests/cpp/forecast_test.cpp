// A forecast from a snapshot has to equal the engine run on: same waiting, same
// prefill.
#include "sfs/forecast.h"

#include <algorithm>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "check.h"
#include "dice.h"
#include "sfs/engine_loop.h"
#include "sfs/engine_state.h"
#include "sfs/fleet.h"
#include "sfs/kv_mirror.h"

using namespace sfs;

namespace {

SchedulerConfig random_config(Dice& dice) {
  SchedulerConfig config;
  config.block_size = dice.coin() ? 16 : 4;
  config.max_num_batched_tokens = dice.from(16, 400);
  config.max_num_seqs = dice.from(1, 24);
  config.max_model_len = 512;
  config.num_blocks = dice.from(512 / config.block_size + 2, 3 * 512 / config.block_size);
  config.policy = dice.coin() ? Policy::fcfs : Policy::priority;
  config.async_scheduling = dice.coin();
  config.enable_chunked_prefill = dice.from(0, 3) > 0;
  config.enable_prefix_caching = dice.from(0, 3) > 0;
  config.long_prefill_token_threshold = dice.from(0, 2) == 0 ? dice.from(8, 64) : 0;
  config.watermark = dice.from(0, 2) == 0 ? 0.05 : 0.0;
  if (!config.enable_chunked_prefill) config.max_num_batched_tokens = 512;
  return config;
}

Request random_request(Dice& dice, std::uint64_t id, double arrival_s) {
  Request request;
  request.id = id;
  request.rank = static_cast<std::uint32_t>(id);
  request.arrival_s = arrival_s;
  request.prompt_tokens = dice.from(1, 200);
  request.output_tokens = dice.from(1, 80);
  request.max_tokens = request.output_tokens + (dice.coin() ? 0 : dice.from(1, 40));
  request.priority = dice.from(0, 3);
  request.predicted_output_tokens = static_cast<float>(request.output_tokens);
  return request;
}

// A request with the content of its blocks: some begin alike, some go on from
// an earlier answer.
struct Asked {
  Request request;
  std::vector<BlockKey> keys;
};

class Conversations {
 public:
  Conversations(Dice& dice, std::int32_t block_size) : dice_(dice), block_size_(block_size) {}

  Asked next(std::uint64_t id, double arrival_s) {
    Asked asked{random_request(dice_, id, arrival_s), {}};
    Request& request = asked.request;
    const int kind = dice_.from(0, 3);
    std::vector<BlockKey> begins;
    if (kind == 0 && !answered_.empty()) {  // a further turn
      const Asked& before = answered_[static_cast<std::size_t>(
          dice_.from(0, static_cast<int>(answered_.size()) - 1))];
      const std::int32_t said = before.request.prompt_tokens + before.request.output_tokens;
      request.prompt_tokens = std::min(said + dice_.from(1, 30), 400);
      begins = before.keys;
      begins.resize(
          std::min<std::size_t>(begins.size(), static_cast<std::size_t>(said / block_size_)));
    } else if (kind < 3) {  // a prompt that others have, too
      const auto group = static_cast<BlockKey>(dice_.from(1, 3));
      const int shared = dice_.from(0, request.prompt_tokens / block_size_);
      for (int i = 0; i < shared; ++i) begins.push_back(group << 32 | static_cast<BlockKey>(i + 1));
    }
    const auto blocks =
        static_cast<std::size_t>((request.prompt_tokens + request.max_tokens) / block_size_);
    begins.resize(std::min(begins.size(), blocks));
    while (begins.size() < blocks) begins.push_back(id << 40 | (begins.size() + 1));
    asked.keys = begins;
    return asked;
  }
  void answered(const Asked& asked) { answered_.push_back(asked); }

 private:
  Dice& dice_;
  std::int32_t block_size_;
  std::vector<Asked> answered_;
};

// What an engine can tell of its requests' content when they come: nobody knows
// the answers yet.
std::vector<KvEvent> without_answers(const std::vector<KvEvent>& journal,
                                     const std::map<std::uint64_t, Asked>& live,
                                     std::int32_t block_size) {
  std::vector<KvEvent> told;
  std::int32_t keys = 0;
  for (const KvEvent& event : journal) {
    if (event.kind == KvEventKind::want)
      keys = live.at(event.value).request.prompt_tokens / block_size;
    if (event.kind != KvEventKind::key || --keys >= 0) told.push_back(event);
  }
  return told;
}

struct Times {
  double waiting_s = 0.0;
  double ttft_s = 0.0;
};

// The truth: the live loop itself, driven on with the query's arrival.
Times run_on(EngineLoop loop, EngineLoop::Pass pass, double now_s, const Asked& query,
             const std::vector<Asked>& ahead) {
  std::vector<Token> tokens;
  bool begun = false;
  double begun_s = 0.0;
  Slot slot = 0;
  bool added = false;
  auto next = ahead.begin();
  for (;;) {
    if (pass.waits) {
      now_s = std::max(now_s, loop.oldest().end_s);
      tokens.clear();
      loop.complete_oldest(tokens);
      for (const Token& token : tokens)
        if (token.request_id == query.request.id)
          return {begun_s - query.request.arrival_s, now_s - query.request.arrival_s};
    }
    if (!pass.executed && loop.scheduler.has_requests()) now_s += 1e-3;
    const double arrival_s = query.request.arrival_s;
    if (!loop.busy())
      now_s = std::max(now_s, next == ahead.end() ? arrival_s : next->request.arrival_s);
    for (; next != ahead.end() && next->request.arrival_s <= now_s; ++next)
      loop.scheduler.add(next->request, next->keys);
    if (!added && arrival_s <= now_s) {
      slot = loop.scheduler.add(query.request, query.keys);
      added = true;
    }
    pass = loop.schedule(now_s);
    if (added && !begun && loop.scheduler.request(slot).status == Status::running) {
      begun = true;
      begun_s = loop.newest().start_s;
    }
  }
}

int resumed = 0;

int forecasts_equal_the_engine(std::uint32_t seed) {
  Dice dice(seed);
  const SchedulerConfig config = random_config(dice);
  const BatchTime batch_time{2e-3, 1e-5, 3e-8, 1e-9};
  EngineLoop loop(config, batch_time);
  Conversations conversations(dice, config.block_size);
  std::vector<double> arrivals_s;
  double at_s = 0.0;
  for (int i = 0; i < 40; ++i) arrivals_s.push_back(at_s += dice.real(0.0, 0.02));
  std::map<std::uint64_t, Asked> live;
  std::vector<KvEvent> journal;
  KvMirror mirror(config.num_blocks);
  if (config.enable_prefix_caching) loop.scheduler.record_to(&journal);
  auto next = arrivals_s.begin();
  std::uint64_t id = 0;
  std::vector<Token> tokens;
  double now_s = 0.0;
  int compared = 0;
  while (loop.busy() || next != arrivals_s.end()) {
    if (!loop.busy()) now_s = std::max(now_s, *next);
    for (; next != arrivals_s.end() && *next <= now_s; ++next) {
      const Asked asked = conversations.next(++id, *next);
      loop.scheduler.add(asked.request, asked.keys);
      live.emplace(id, asked);
    }
    const EngineLoop::Pass pass = loop.schedule(now_s);

    if (pass.scheduled && dice.from(0, 9) == 0) {
      Snapshot snapshot;
      capture(loop, now_s, snapshot);
      snapshot.validate();
      mirror.apply(without_answers(journal, live, config.block_size));
      journal.clear();
      Asked query = conversations.next(1000, now_s + dice.real(0.0, 0.01));
      query.request.rank = 1000;
      query.request.output_tokens = query.request.max_tokens;
      std::vector<Asked> ahead;
      std::vector<Arrival> booked;
      const auto arrival_of = [now_s](const Asked& asked) {
        const Request& request = asked.request;
        return Arrival{.id = request.id,
                       .arrival_s = request.arrival_s - now_s,
                       .prompt_tokens = request.prompt_tokens,
                       .predicted_output_tokens = static_cast<double>(request.output_tokens),
                       .max_tokens = request.max_tokens,
                       .priority = request.priority,
                       .keys = asked.keys};
      };
      if (dice.coin()) {
        ahead.push_back(conversations.next(999, query.request.arrival_s - dice.real(0.0, 0.01)));
        ahead.back().request.rank = 999;
        booked.push_back(arrival_of(ahead.back()));
      }
      const Arrival asked = arrival_of(query);
      const auto simulation = [&](Stepping stepping) {
        Simulation restored;
        restore(snapshot, batch_time, 0.0, restored.loop, stepping,
                config.enable_prefix_caching ? &mirror : nullptr);
        restored.begin();
        return restored;
      };
      Simulation stepped = simulation(Stepping::plain), grouped = simulation(Stepping::grouped);
      std::optional<Simulation> kept;
      const FirstToken forecast = forecast_first_token(
          grouped, booked, asked, [&](const Simulation& reached) { kept = reached; });
      const FirstToken plain = forecast_first_token(stepped, booked, asked);
      CHECK(forecast.batches == plain.batches);
      CHECK_CLOSE(forecast.waiting_s + forecast.prefill_s, plain.waiting_s + plain.prefill_s, 1e-9);
      if (kept) {
        ++resumed;
        Arrival later = asked;
        later.arrival_s += dice.real(0.0, 0.5);
        const Asked other = conversations.next(1001, 0.0);
        later.prompt_tokens = other.request.prompt_tokens;
        later.keys = other.keys;
        Simulation anew = simulation(Stepping::grouped);
        const FirstToken fresh = forecast_first_token(anew, booked, later);
        const FirstToken taken_up = forecast_first_token(*kept, booked, later);
        CHECK(taken_up.status == fresh.status && taken_up.batches == fresh.batches);
        CHECK(std::abs(taken_up.waiting_s - fresh.waiting_s) <= 1e-9);
        CHECK(std::abs(taken_up.prefill_s - fresh.prefill_s) <= 1e-9);
      }
      const Times truth = run_on(loop, pass, now_s, query, ahead);
      CHECK(forecast.status == ForecastStatus::ok);
      if (std::abs(forecast.waiting_s + forecast.prefill_s - truth.ttft_s) > 1e-9 * truth.ttft_s)
        std::fprintf(stderr, "seed %u, at %.6f s\n", seed, now_s);
      CHECK_CLOSE(forecast.waiting_s + forecast.prefill_s, truth.ttft_s, 1e-9);
      CHECK(std::abs(forecast.waiting_s - truth.waiting_s) <= 1e-9);
      ++compared;
    }
    if (pass.waits) {
      now_s = std::max(now_s, loop.oldest().end_s);
      tokens.clear();
      loop.complete_oldest(tokens);
      for (const Token& token : tokens)
        if (token.finish != Finish::none) conversations.answered(live.at(token.request_id));
    }
    if (!pass.executed && loop.scheduler.has_requests()) now_s += 1e-3;
  }
  return compared;
}

void impossible_prompts_are_never_served() {
  Dice dice(1);
  SchedulerConfig config = random_config(dice);
  Simulation idle;
  idle.loop = EngineLoop(config, BatchTime{1e-3, 0, 0, 0});
  const FirstToken first =
      forecast_first_token(idle, {}, {.prompt_tokens = config.max_model_len, .max_tokens = 1});
  CHECK(first.status == ForecastStatus::never);
  CHECK(std::isinf(first.waiting_s));
}

void every_simulation_is_bounded() {
  Dice dice(2);
  SchedulerConfig config = random_config(dice);
  Simulation idle;
  idle.loop = EngineLoop(config, BatchTime{1e-3, 0, 0, 0});
  const FirstToken first =
      forecast_first_token(idle, {}, {.arrival_s = 0.0, .prompt_tokens = 400, .max_tokens = 1}, {},
                           /*max_requests=*/0);
  CHECK(first.status == ForecastStatus::bound);
  CHECK(std::isinf(first.waiting_s));
}

void outlived_predictions_get_a_conditional_length() {
  CHECK(likely_output_tokens(100.0, 0.0, 0, 0.5) == 100);
  CHECK(likely_output_tokens(100.0, 0.0, 100, 0.5) == 101);
  // The median of a lognormal of mean 100, sigma 0.5: 100 exp(-1/8) = 88.2.
  CHECK(likely_output_tokens(100.0, 0.5, 0, 0.5) == 89);
  // One in a hundred is longer than 100 exp(-1/8 + 2.3263/2) = 282.4, and than 27.6 in 99.
  CHECK(likely_output_tokens(100.0, 0.5, 0, 0.01) == 283);
  CHECK(likely_output_tokens(100.0, 0.5, 0, 0.99) == 28);
  // Beyond 100 tokens, which Q(0.25) = 0.401294 exceed, half exceed the z with Q(z) = 0.200647,
  // 0.839306: 100 exp(-1/8 + 0.419653) = 134.3.
  CHECK(likely_output_tokens(100.0, 0.5, 100, 0.5) == 135);
  for (const double chance : {0.001, 0.3, 0.5, 0.7, 0.999}) {
    int previous = 0;
    for (const int outputs : {0, 1, 10, 50, 100, 200, 1000, 100000, 100000000}) {
      const int likely = likely_output_tokens(100.0, 0.5, outputs, chance);
      CHECK(likely > outputs && likely >= previous);
      previous = likely;
    }
  }
}

void chances_are_spread_evenly() {
  int below[4] = {};
  for (std::uint64_t id = 0; id < 4000; ++id)
    for (int i = 0; i < 4; ++i) below[i] += chance_of(id) < 0.2 * (i + 1);
  for (int i = 0; i < 4; ++i) CHECK(std::abs(below[i] - 800 * (i + 1)) < 120);
}

// Heads that wait for a token under way are stepped over (rule 10), so the query can run while they
// wait: it is not behind them any more.
void a_query_overtakes_stale_heads() {
  constexpr double published_s = 1.7e9;
  constexpr BatchTime batch_time{2e-3, 1e-5, 3e-8, 1e-9};
  Snapshot snapshot;
  snapshot.config.max_num_batched_tokens = 2048;
  snapshot.config.max_num_seqs = 64;
  snapshot.config.block_size = 16;
  snapshot.config.num_blocks = 1000;
  snapshot.config.max_model_len = 2048;
  snapshot.config.enable_prefix_caching = false;
  snapshot.config.async_scheduling = true;
  for (std::uint64_t id = 1; id <= 12; ++id) {
    Resident resident{};
    resident.id = id;
    resident.arrival_s = published_s - 1.0;
    resident.prompt_tokens = 20;
    resident.max_tokens = 100;
    resident.predicted_output_tokens = 50.0F;
    resident.status = static_cast<std::uint8_t>(Status::waiting);
    if (id <= 2) {
      resident.status = static_cast<std::uint8_t>(Status::preempted);
      resident.output_tokens = 5;
      resident.stale_tokens = 1;
      resident.in_flight_tokens[1] = 1;
      resident.in_flight_emits[1] = 1;
    }
    snapshot.residents.push_back(resident);
  }
  snapshot.header.sequence = 1;
  snapshot.header.published_s = published_s;
  snapshot.header.waiting = 12;
  snapshot.header.free_blocks = 999;
  snapshot.header.in_flight_batches = 2;
  snapshot.header.in_flight[0] = {published_s, 2, 50, 0};
  snapshot.header.in_flight[1] = {std::numeric_limits<double>::quiet_NaN(), 2, 50, 0};
  Fleet fleet;
  fleet.add(snapshot.config, batch_time, 0.0);
  CHECK(fleet.update(0, snapshot));
  const CandidateQuery query{.instance = 0,
                             .prompt_tokens = 30,
                             .predicted_output_tokens = 10.0,
                             .max_tokens = 20,
                             .priority = 0,
                             .arrival_s = published_s,
                             .prompt = -1};
  CandidateForecast first{}, again{}, plainly{};
  fleet.forecast(published_s, {&query, 1}, {}, {&first, 1});
  fleet.forecast(published_s, {&query, 1}, {}, {&again, 1});
  CHECK(first.status == static_cast<std::int32_t>(ForecastStatus::ok));
  CHECK(first.batches == 2);  // the one that runs on, then the query's own
  CHECK(again.ttft_s == first.ttft_s);
  Fleet plain(Stepping::plain);
  plain.add(snapshot.config, batch_time, 0.0);
  CHECK(plain.update(0, snapshot));
  plain.forecast(published_s, {&query, 1}, {}, {&plainly, 1});
  CHECK(plainly.ttft_s == first.ttft_s);
}

}  // namespace

int main(int count, char** arguments) {
  int compared = 0;
  const std::uint32_t seeds = count > 1 ? std::stoul(arguments[1]) : 300;
  for (std::uint32_t seed = 1; seed <= seeds; ++seed) compared += forecasts_equal_the_engine(seed);
  std::printf("%d forecasts equal to the engine\n", compared);
  CHECK(compared > 1000);
  std::printf("%d taken up from a kept simulation\n", resumed);
  CHECK(resumed > 100);
  a_query_overtakes_stale_heads();
  impossible_prompts_are_never_served();
  every_simulation_is_bounded();
  outlived_predictions_get_a_conditional_length();
  chances_are_spread_evenly();
}
