#include "sfs/engine_state.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace sfs {
namespace {

constexpr double not_started = std::numeric_limits<double>::quiet_NaN();

// In how many of the batches in flight, from the newest back, the resident decodes.
std::int32_t newest_decodes(const Resident& resident, std::size_t depth) {
  std::int32_t decodes = 0;
  for (std::size_t i = depth; i-- > 0; ++decodes)
    if (resident.in_flight_tokens[i] != 1 || resident.in_flight_emits[i] == 0 ||
        resident.computed_tokens - decodes - 1 < resident.prompt_tokens)
      break;
  return decodes;
}

}  // namespace

void capture(const EngineLoop& loop, double published_s, Snapshot& into) {
  const Scheduler& scheduler = loop.scheduler;
  into.config = scheduler.config();
  into.header = SnapshotHeader{};
  into.header.published_s = published_s;
  into.header.free_blocks = scheduler.free_blocks();
  into.header.running = static_cast<std::int32_t>(scheduler.running().size());
  into.header.waiting = static_cast<std::int32_t>(scheduler.waiting().size());
  into.header.in_flight_batches = static_cast<std::int32_t>(loop.in_flight());
  into.residents.clear();
  into.residents.reserve(scheduler.running().size() + scheduler.waiting().size());

  const auto add = [&](Slot slot) {
    const Request& request = scheduler.request(slot);
    Resident resident{};
    resident.id = request.id;
    resident.arrival_s = request.arrival_s;
    resident.prompt_tokens = request.prompt_tokens;
    resident.output_tokens = request.outputs;
    resident.computed_tokens = request.computed;
    resident.placeholders = request.placeholders;
    resident.max_tokens = request.max_tokens;
    resident.predicted_output_tokens = request.predicted_output_tokens;
    resident.priority = request.priority;
    resident.blocks = request.blocks;
    resident.stale_tokens = request.stale_tokens;
    resident.status = static_cast<std::uint8_t>(request.status);
    into.residents.push_back(resident);
  };
  for (const Slot slot : scheduler.running()) add(slot);
  for (const Slot slot : scheduler.waiting()) add(slot);

  // A request's place among the residents, for the few that a batch in flight names.
  static thread_local std::vector<std::size_t> place;
  constexpr std::size_t gone = std::numeric_limits<std::size_t>::max();
  place.assign(scheduler.slots(), gone);
  std::size_t next = 0;
  for (const Slot slot : scheduler.running()) place[slot] = next++;
  for (const Slot slot : scheduler.waiting()) place[slot] = next++;
  for (std::size_t i = 0; i < loop.in_flight(); ++i) {
    const InFlight& batch = loop.in_flight(i);
    const BatchShape& shape = batch.batch.shape;
    into.header.in_flight[i] = {batch.start_s <= published_s ? batch.start_s : not_started,
                                shape.tokens, shape.decode_context_tokens, shape.prefill_attention};
    for (const Scheduled& entry : batch.batch.entries) {
      if (place[entry.slot] == gone) continue;  // ended while in flight
      Resident& resident = into.residents[place[entry.slot]];
      resident.in_flight_tokens[i] = entry.tokens;
      resident.in_flight_emits[i] = entry.emits;
    }
  }
}

std::int32_t expected_output_tokens(double predicted, double sigma, std::int32_t outputs) {
  double expected = predicted;
  if (sigma > 0.0 && outputs > 0) {
    const double log_mean = std::log(predicted) - sigma * sigma / 2.0;
    const double z = (std::log(static_cast<double>(outputs)) - log_mean) / sigma;
    const auto upper_tail = [](double x) { return 0.5 * std::erfc(x / std::sqrt(2.0)); };
    // Far out in the tail both probabilities vanish; their ratio tends to 1 + sigma/z there.
    expected =
        z < 8.0 ? predicted * upper_tail(z - sigma) / upper_tail(z) : outputs * (1.0 + sigma / z);
  }
  const double limit = std::numeric_limits<std::int32_t>::max() / 2;
  return std::max(static_cast<std::int32_t>(std::min(std::ceil(expected), limit)), outputs + 1);
}

void restore(const Snapshot& snapshot, const BatchTime& batch_time, double length_sigma,
             EngineLoop& into, Stepping stepping, const KvMirror* mirror) {
  SchedulerConfig config = snapshot.config;
  config.enable_prefix_caching = false;
  into = EngineLoop(config, batch_time);
  if (mirror != nullptr) into.scheduler = Scheduler(config, *mirror);
  into.scheduler.restore_free_blocks(snapshot.header.free_blocks);

  const auto depth = static_cast<std::size_t>(snapshot.header.in_flight_batches);
  if (stepping == Stepping::grouped) into.scheduler.group_decodes(depth);
  for (std::size_t i = 0; i < depth; ++i) {
    const BatchInFlight& from = snapshot.header.in_flight[i];
    InFlight& batch = into.push();
    batch.batch.shape = from.shape();
    batch.batch.steady = stepping == Stepping::grouped;
    batch.start_s = std::isnan(from.started_s) ? std::max(into.device_free_s, 0.0)
                                               : from.started_s - snapshot.header.published_s;
    batch.end_s = batch.start_s + batch_time.seconds(batch.batch.shape);
    into.device_free_s = std::max(into.device_free_s, batch.end_s);
  }

  std::uint32_t rank = 0;
  for (const Resident& resident : snapshot.residents) {
    Request request;
    request.id = resident.id;
    request.arrival_s = resident.arrival_s - snapshot.header.published_s;
    request.rank = rank++;
    request.prompt_tokens = resident.prompt_tokens;
    request.max_tokens = resident.max_tokens;
    request.predicted_output_tokens = resident.predicted_output_tokens;
    request.output_tokens = resident.predicted_output_tokens > 0.0F
                                ? expected_output_tokens(resident.predicted_output_tokens,
                                                         length_sigma, resident.output_tokens)
                                : resident.max_tokens;
    request.priority = resident.priority;
    request.outputs = resident.output_tokens;
    request.computed = resident.computed_tokens;
    request.placeholders = resident.placeholders;
    request.stale_tokens = resident.stale_tokens;
    request.blocks = resident.blocks;
    request.status = static_cast<Status>(resident.status);
    for (std::size_t i = 0; i < depth; ++i) {
      request.in_flight_tokens += resident.in_flight_tokens[i];
      request.batches_in_flight += resident.in_flight_tokens[i] > 0;
    }
    const std::int32_t decodes = newest_decodes(resident, depth);
    const auto [slot, steady] = into.scheduler.restore(request, decodes);
    const std::size_t named = depth - static_cast<std::size_t>(steady ? decodes : 0);
    for (std::size_t i = 0; i < named; ++i)
      if (resident.in_flight_tokens[i] > 0)
        into.in_flight(i).batch.entries.push_back({.slot = slot,
                                                   .tokens = resident.in_flight_tokens[i],
                                                   .emits = resident.in_flight_emits[i] != 0});
  }
}

}  // namespace sfs
