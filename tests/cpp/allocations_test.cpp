// A forecast takes its memory from the one before it: how long a queue is costs no allocation.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <vector>

#include "check.h"
#include "sfs/engine_state.h"
#include "sfs/fleet.h"

using namespace sfs;

namespace {

thread_local std::uint64_t allocations = 0;

}  // namespace

void* operator new(std::size_t size) {
  ++allocations;
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace {

constexpr BatchTime batch_time{2e-3, 1e-5, 3e-8, 1e-9};
constexpr double published_s = 1.7e9;

SchedulerConfig config() {
  SchedulerConfig config;
  config.max_num_batched_tokens = 2048;
  config.max_num_seqs = 256;
  config.block_size = 16;
  config.num_blocks = 40'000;
  config.max_model_len = 4096;
  config.async_scheduling = true;
  config.enable_prefix_caching = false;
  return config;
}

// `running` requests decode, `waiting` have just come.
Snapshot state(std::uint64_t running, std::uint64_t waiting) {
  EngineLoop loop(config(), batch_time);
  std::vector<Token> tokens;
  double now_s = 0.0;
  for (std::uint64_t id = 1; id <= running + waiting; ++id) {
    Request request;
    request.id = id;
    request.prompt_tokens = 100 + static_cast<std::int32_t>(id % 300);
    request.output_tokens = request.max_tokens = 600;
    request.predicted_output_tokens = 300.0 + static_cast<double>(id);
    loop.scheduler.add(request);
    if (id != running) continue;
    for (int pass = 0; pass < 60; ++pass)
      if (loop.schedule(now_s).waits) {
        now_s = loop.oldest().end_s;
        loop.complete_oldest(tokens);
      }
  }
  Snapshot snapshot;
  capture(loop, now_s, snapshot);
  for (Resident& resident : snapshot.residents) resident.arrival_s += published_s - now_s;
  for (BatchInFlight& batch : snapshot.header.in_flight) batch.started_s += published_s - now_s;
  snapshot.header.published_s = published_s;
  snapshot.header.sequence = 1;
  CHECK(snapshot.header.running == static_cast<std::int32_t>(running));
  CHECK(snapshot.header.waiting == static_cast<std::int32_t>(waiting));
  return snapshot;
}

std::uint64_t allocations_of_a_forecast(std::uint64_t running, std::uint64_t waiting, bool kept) {
  Fleet fleet;
  fleet.add(config(), batch_time, 0.0);
  CHECK(fleet.update(0, state(running, waiting)));
  const CandidateQuery query{.instance = 0,
                             .prompt_tokens = 500,
                             .predicted_output_tokens = 100.0,
                             .max_tokens = 200,
                             .priority = 0,
                             .arrival_s = published_s + 1e-3,
                             .prompt = -1};
  CandidateForecast forecast{};
  const auto ask = [&] { fleet.forecast(published_s + 1e-3, {&query, 1}, {}, {&forecast, 1}); };
  for (int warm_up = 0; warm_up < 3; ++warm_up) {
    fleet.calibrate(0, batch_time);
    ask();
  }
  if (!kept) fleet.calibrate(0, batch_time);
  const std::uint64_t before = allocations;
  CHECK(before > 0);
  ask();
  const std::uint64_t taken = allocations - before;
  CHECK(forecast.status == static_cast<std::int32_t>(ForecastStatus::ok));
  std::printf("%d running, %d waiting, %s: %d allocations\n", static_cast<int>(running),
              static_cast<int>(waiting), kept ? "again" : "anew", static_cast<int>(taken));
  return taken;
}

}  // namespace

int main() {
  for (const bool kept : {false, true}) {
    const std::uint64_t least = allocations_of_a_forecast(8, 0, kept);
    CHECK(least <= 8);
    CHECK(allocations_of_a_forecast(64, 16, kept) <= least);
    CHECK(allocations_of_a_forecast(256, 1000, kept) <= least);
  }
}
