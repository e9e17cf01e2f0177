// An engine publishes, two threads forecast, a third books and takes back: every answer is the one
// that a single thread would have given for that snapshot and those bookings.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "check.h"
#include "fuzz_engine.h"
#include "sfs/engine_state.h"
#include "sfs/fleet.h"
#include "sfs/segment.h"

using namespace sfs;

namespace {

constexpr int states = 24;
constexpr int asked_per_state = 12;
constexpr std::uint64_t first_booking = 1'000'000;

// What an engine publishes after a pass.
struct State {
  std::vector<KvEvent> journal;
  Snapshot snapshot;
};

struct Recording {
  SchedulerConfig config;
  BatchTime batch_time;
  std::vector<State> states;
};

Recording record(std::uint32_t seed) {
  Dice dice(seed);
  RandomEngine engine(dice, /*prefix_caching=*/true);
  Recording recording{engine.config, engine.batch_time, {}};
  std::vector<KvEvent> journal;
  engine.loop.scheduler.record_to(&journal);
  for (int i = 0; i < states; ++i) {
    engine.run(dice, dice.from(1, 6));
    State& state = recording.states.emplace_back();
    state.journal.swap(journal);
    capture(engine.loop, engine.now_s, state.snapshot);
  }
  return recording;
}

class Publisher {
 public:
  Publisher(const Recording& recording, const std::string& name)
      : recording_(recording),
        path_("/dev/shm/foretoken-test-" + std::to_string(::getpid()) + "-" + name),
        writer_(path_, recording.config, 4096, 8, /*kv_journaled=*/true) {}

  void publish(std::size_t i) {
    const State& state = recording_.states[i];
    writer_.append(state.journal);
    writer_.publish(state.snapshot.header, state.snapshot.residents.data(),
                    state.snapshot.residents.size());
  }
  void attach_to(Fleet& fleet) const {
    fleet.add(recording_.config, recording_.batch_time, 0.0);
    fleet.attach(0, path_);
  }

 private:
  const Recording& recording_;
  std::string path_;
  SnapshotWriter writer_;
};

// Queries that come while the engine runs, and one that is booked again and again, before them.
class Workload {
 public:
  explicit Workload(const Recording& recording) : booked_{} {
    Dice dice(1);
    const double last_s = recording.states.back().snapshot.header.published_s;
    for (std::int32_t i = 0; i < 8; ++i) {
      prompts_.push_back(RandomEngine::random_prompt(dice, 0, dice.from(1, 200)));
      queries_.push_back({.instance = 0,
                          .prompt_tokens = static_cast<std::int32_t>(prompts_.back().size()),
                          .predicted_output_tokens = dice.real(1.0, 80.0),
                          .max_tokens = 100,
                          .priority = dice.from(0, 3),
                          .arrival_s = dice.real(some_unix_time_s, last_s + 0.1),
                          .prompt = i});
    }
    booked_ = {.arrival_s = some_unix_time_s,
               .prompt_tokens = queries_[0].prompt_tokens,
               .predicted_output_tokens = 20.0,
               .max_tokens = 100,
               .priority = 1};
  }

  std::size_t size() const { return queries_.size(); }
  void book(Fleet& fleet, std::uint64_t number) const {
    Arrival arrival = booked_;
    arrival.id = first_booking + number;
    fleet.book(0, arrival, prompts_[0]);
  }
  CandidateForecast ask(Fleet& fleet, std::size_t query) const {
    const std::vector<Prompt> prompts(prompts_.begin(), prompts_.end());
    CandidateForecast forecast;
    fleet.forecast(some_unix_time_s, {&queries_[query], 1}, prompts, {&forecast, 1});
    return forecast;
  }

 private:
  std::vector<std::vector<std::int32_t>> prompts_;
  std::vector<CandidateQuery> queries_;
  Arrival booked_;
};

// The age tells the snapshot, since all ask at one time.
using Question = std::tuple<double, std::int32_t, std::size_t>;  // age, bookings, query
using Answers = std::vector<std::pair<Question, CandidateForecast>>;

Answers answers_under_way(const Recording& recording, const Workload& workload) {
  Publisher publisher(recording, "threads");
  Fleet fleet;
  publisher.attach_to(fleet);
  publisher.publish(0);
  fleet.snapshot(0);  // what is booked before the first snapshot has no keys
  std::atomic<int> asked = 0;
  std::atomic<bool> done = false;

  const auto ask = [&](std::uint32_t seed, Answers& answers) {
    Dice dice(seed);
    for (; !done; ++asked) {
      const auto query = static_cast<std::size_t>(dice.bits() % workload.size());
      const CandidateForecast forecast = workload.ask(fleet, query);
      answers.push_back({{forecast.age_s, forecast.booked, query}, forecast});
    }
  };
  Answers first, second;
  std::thread asking([&] { ask(1, first); });
  std::thread asking_too([&] { ask(2, second); });
  std::thread booking([&] {
    for (std::uint64_t number = 0; !done; ++number) {
      workload.book(fleet, number);
      if (number >= 3) CHECK(fleet.unbook(0, first_booking + number - 3));
      std::this_thread::yield();
    }
  });
  for (int i = 1; i <= states; ++i) {
    while (asked < i * asked_per_state) std::this_thread::yield();
    if (i < states) publisher.publish(static_cast<std::size_t>(i));
  }
  done = true;
  asking.join();
  asking_too.join();
  booking.join();
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

void answers_are_those_of_one_thread(std::uint32_t seed) {
  const Recording recording = record(seed);
  const Workload workload(recording);
  std::map<double, std::vector<std::pair<Question, CandidateForecast>>> by_age;
  for (const auto& answer : answers_under_way(recording, workload))
    by_age[std::get<0>(answer.first)].push_back(answer);

  Publisher publisher(recording, "one");
  for (std::size_t i = 0; i < recording.states.size(); ++i) {
    publisher.publish(i);
    const double age_s = some_unix_time_s - recording.states[i].snapshot.header.published_s;
    std::map<Question, CandidateForecast> known;
    for (const auto& [question, given] : by_age[age_s]) {
      const auto& [age, bookings, query] = question;
      auto truth = known.find(question);
      if (truth == known.end()) {
        Fleet alone;  // nothing kept from others' questions
        publisher.attach_to(alone);
        alone.snapshot(0);
        for (std::int32_t number = 0; number < bookings; ++number)
          workload.book(alone, static_cast<std::uint64_t>(number));
        truth = known.emplace(question, workload.ask(alone, query)).first;
      }
      const CandidateForecast& forecast = truth->second;
      CHECK(given.status == forecast.status && given.batches == forecast.batches);
      CHECK(given.running == forecast.running && given.waiting == forecast.waiting);
      CHECK(given.queued_prefill_tokens == forecast.queued_prefill_tokens);
      CHECK(given.cached_tokens == forecast.cached_tokens);
      CHECK_CLOSE(given.ttft_s, forecast.ttft_s, 1e-9);
    }
    by_age.erase(age_s);
  }
  CHECK(by_age.empty());
}

}  // namespace

int main() {
  for (std::uint32_t seed = 1; seed <= 2; ++seed) answers_are_those_of_one_thread(seed);
}
