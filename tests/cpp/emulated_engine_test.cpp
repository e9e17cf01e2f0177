// The real-time driver: every token counted, batches as long as the model says, aborts free slots.
#include "sfs/emulated_engine.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "sfs/block_keys.h"

using namespace sfs;

namespace {

constexpr BatchTime batch_time{4e-3, 1e-5, 1e-8, 1e-10};

SchedulerConfig config(bool async_scheduling) {
  SchedulerConfig config;
  config.max_num_batched_tokens = 512;
  config.max_num_seqs = 64;
  config.block_size = 16;
  config.num_blocks = 2000;
  config.max_model_len = 4096;
  config.async_scheduling = async_scheduling;
  return config;
}

std::string path() { return "/dev/shm/foretoken-test-" + std::to_string(::getpid()) + "-engine"; }

void submit(EmulatedEngine& engine, std::uint64_t id, int prompt_tokens, int output_tokens) {
  std::vector<std::int32_t> prompt(static_cast<std::size_t>(prompt_tokens));
  std::iota(prompt.begin(), prompt.end(), static_cast<std::int32_t>(1000 * id));
  Request request;
  request.id = id;
  request.output_tokens = output_tokens;
  request.max_tokens = output_tokens + 1;
  engine.submit(request, prompt);
}

std::vector<EngineEvent> await_events(EmulatedEngine& engine) {
  pollfd ready{engine.event_descriptor(), POLLIN, 0};
  CHECK(::poll(&ready, 1, 5000) == 1);
  return engine.take_events();
}

void every_token_arrives(bool async_scheduling) {
  EmulatedEngine engine(config(async_scheduling), batch_time, path());
  constexpr int requests = 20;
  for (int id = 1; id <= requests; ++id)
    submit(engine, static_cast<std::uint64_t>(id), 50 + id, id);
  std::map<std::uint64_t, int> tokens;
  for (int finished = 0; finished < requests;) {
    for (const EngineEvent& event : await_events(engine)) {
      CHECK(event.tokens == ++tokens[event.id]);
      finished += event.finish == static_cast<int>(Finish::stop);
    }
  }
  for (int id = 1; id <= requests; ++id) CHECK(tokens[static_cast<std::uint64_t>(id)] == id);
  CHECK(!engine.error());
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// How late this machine wakes a sleeper just now, whatever the program.
class Lateness {
 public:
  Lateness() : thread_([this] { measure(); }) {}
  double stop() {
    done_ = true;
    thread_.join();
    return median(late_s_);
  }

 private:
  void measure() {
    using Clock = std::chrono::steady_clock;
    while (!done_ || late_s_.empty()) {
      const auto due = Clock::now() + std::chrono::milliseconds(4);
      std::this_thread::sleep_until(due);
      late_s_.push_back(std::chrono::duration<double>(Clock::now() - due).count());
    }
  }
  std::atomic<bool> done_ = false;
  std::vector<double> late_s_;
  std::thread thread_;
};

void batches_last_as_the_model_says() {
  Lateness lateness;
  EmulatedEngine engine(config(true), batch_time, path());
  for (std::uint64_t id = 1; id <= 8; ++id) submit(engine, id, 200, 60);
  for (int finished = 0; finished < 8;)
    for (const EngineEvent& event : await_events(engine)) finished += event.finish != 0;
  std::vector<double> errors;
  for (const StepRecord& step : SnapshotReader(path()).read_steps(0)) {
    const BatchShape shape{step.prefill_tokens + step.decode_requests, step.decode_context_tokens,
                           step.prefill_attention};
    errors.push_back(std::abs(step.done_s - step.started_s - batch_time.seconds(shape)));
  }
  CHECK(errors.size() > 50);
  const double late_s = lateness.stop();
  std::printf("median batch time error %.1f us, this machine wakes %.1f us late\n",
              1e6 * median(errors), 1e6 * late_s);
  CHECK(median(errors) < 1e-3 + late_s);
}

void an_abort_frees_the_slot() {
  EmulatedEngine engine(config(true), batch_time, path());
  submit(engine, 7, 100, 3000);
  await_events(engine);
  engine.abort(7);
  engine.abort(99);
  for (bool aborted = false; !aborted;)
    for (const EngineEvent& event : await_events(engine))
      aborted |= event.id == 7 && event.finish == static_cast<int>(Finish::abort);
  submit(engine, 8, 10, 1);
  for (bool answered = false; !answered;)
    for (const EngineEvent& event : await_events(engine)) answered |= event.id == 8;
  Snapshot snapshot;
  CHECK(SnapshotReader(path()).read(snapshot));
  for (const Resident& resident : snapshot.residents) CHECK(resident.id != 7);
}

// Rule 25: heard before the results of the batch under way, whose token nobody gets.
void an_abort_drops_the_token_under_way(bool asynchronous) {
  EmulatedEngine engine(config(asynchronous), {0.3, 0, 0, 0}, path());
  submit(engine, 7, 100, 3000);
  std::int32_t outputs = 0;
  while (outputs == 0)
    for (const EngineEvent& event : await_events(engine)) outputs = event.tokens;
  engine.abort(7);
  for (bool aborted = false; !aborted;)
    for (const EngineEvent& event : await_events(engine)) {
      CHECK(event.id == 7 && event.finish == static_cast<int>(Finish::abort));
      aborted = true;
    }
}

double now_s() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// A batch of 3 s: its engine is busy, not silent, and need not run it out to stop.
void a_long_batch_is_no_silence() {
  EmulatedEngine engine(config(true), {3.0, 0, 0, 0}, path());
  const SnapshotReader reader(path());
  Snapshot snapshot;
  submit(engine, 7, 100, 10);
  const double began_s = now_s();
  do {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    CHECK(reader.read(snapshot));
  } while (snapshot.residents.empty() || snapshot.header.published_s < began_s + 0.5);
  CHECK(now_s() < began_s + 2.5);
  CHECK(snapshot.residents[0].id == 7 && snapshot.header.in_flight_batches > 0);
  engine.stop();
  CHECK(now_s() < began_s + 2.9);
}

void impossible_requests_are_refused() {
  EmulatedEngine engine(config(true), batch_time, path());
  CHECK(throws<std::invalid_argument>([&] { submit(engine, 1, 4096, 10); }));
  CHECK(throws<std::invalid_argument>([&] { submit(engine, 1, 0, 10); }));
  CHECK(throws<std::invalid_argument>([&] { submit(engine, 1, 10, 0); }));
}

// Each snapshot's part of the journal says of the KV cache what the snapshot says, and in the end
// what the prompts left in it.
void the_journal_agrees_with_the_snapshots(bool async_scheduling) {
  SchedulerConfig small = config(async_scheduling);
  small.num_blocks = 200;
  small.max_model_len = 2048;
  EmulatedEngine engine(small, {2e-4, 1e-6, 0, 0}, path());
  const SnapshotReader reader(path());
  KvMirror mirror(small.num_blocks);
  Snapshot snapshot;
  int compared = 0, hits = 0;
  const auto compare = [&] {
    CHECK(reader.read(snapshot) && snapshot.header.kv_journaled == 1);
    CHECK(reader.read_journal(mirror, snapshot.header.kv_position));
    CHECK(mirror.plain_free() + mirror.cached_free() == snapshot.header.free_blocks);
    CHECK(mirror.tables() == snapshot.residents.size());
    for (const Resident& resident : snapshot.residents) {
      const KvMirror::Table* table = mirror.table(resident.id);
      CHECK(table != nullptr);
      CHECK(table->blocks.size() == static_cast<std::size_t>(resident.blocks));
      CHECK(table->keys.size() >= static_cast<std::size_t>(resident.prompt_tokens / 16));
      hits += table->shared > 0;
    }
    ++compared;
  };
  std::vector<std::int32_t> prompt(400);
  constexpr int requests = 60;
  for (int id = 1; id <= requests; ++id) {
    std::iota(prompt.begin(), prompt.end(), 0);
    std::fill(prompt.begin() + 160, prompt.end(), id);  // 10 blocks in common
    Request request;
    request.id = static_cast<std::uint64_t>(id);
    request.output_tokens = request.max_tokens = 20 + id;
    engine.submit(request, prompt);
  }
  for (int finished = 0; finished < requests; compare())
    for (const EngineEvent& event : await_events(engine)) finished += event.finish != 0;
  do compare();
  while (!snapshot.residents.empty());
  CHECK(mirror.cached_free() > 0 && mirror.tables() == 0);
  const auto keys = block_keys(prompt, small.block_size);
  for (const BlockKey key : keys) CHECK(mirror.find(key) != -1);
  CHECK(keys.size() == 25 && compared > 20 && hits > 20);
}

}  // namespace

int main() {
  every_token_arrives(false);
  every_token_arrives(true);
  batches_last_as_the_model_says();
  an_abort_frees_the_slot();
  an_abort_drops_the_token_under_way(false);
  an_abort_drops_the_token_under_way(true);
  a_long_batch_is_no_silence();
  impossible_requests_are_refused();
  the_journal_agrees_with_the_snapshots(false);
  the_journal_agrees_with_the_snapshots(true);
}
