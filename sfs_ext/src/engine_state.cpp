#include "sfs/engine_state.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <unordered_set>

namespace sfs {
namespace {

constexpr double not_started = std::numeric_limits<double>::quiet_NaN();

double upper_tail(double z) { return 0.5 * std::erfc(z / std::sqrt(2.0)); }

// The z that a standard normal exceeds with probability `q`: Wichura's AS 241, to seven digits.
double upper_quantile(double q) {
  const double p = 0.5 - q;  // of the lower tail, from the middle
  if (std::abs(p) <= 0.425) {
    const double r = 0.180625 - p * p;
    return p * (((59.109374720 * r + 159.29113202) * r + 50.434271938) * r + 3.3871327179) /
           (((67.187563600 * r + 78.757757664) * r + 17.895169469) * r + 1.0);
  }
  double r = std::sqrt(-std::log(std::min(q, 1.0 - q)));
  double z = 0.0;
  if (r <= 5.0) {
    r -= 1.6;
    z = (((0.17023821103 * r + 1.3067284816) * r + 2.7568153900) * r + 1.4234372777) /
        ((0.12021132975 * r + 0.73700164250) * r + 1.0);
  } else {
    r -= 5.0;
    z = (((0.017337203997 * r + 0.42868294337) * r + 3.0812263860) * r + 6.6579051150) /
        ((0.012258202635 * r + 0.24197894225) * r + 1.0);
  }
  return p < 0.0 ? -z : z;
}

// In how many of the batches in flight, from the newest back, the resident decodes.
std::int32_t newest_decodes(const Resident& resident, std::size_t depth) {
  std::int32_t decodes = 0;
  for (std::size_t i = depth; i-- > 0; ++decodes)
    if (resident.in_flight_tokens[i] != 1 || resident.in_flight_emits[i] == 0 ||
        resident.computed_tokens - decodes - 1 < resident.prompt_tokens)
      break;
  return decodes;
}

// Whether just these requests hold blocks, as many as the mirror shows, and as many are free.
bool shows_blocks_of(const Snapshot& snapshot, const KvMirror& mirror) {
  if (mirror.num_blocks() != snapshot.config.num_blocks ||
      mirror.plain_free() + mirror.cached_free() != snapshot.header.free_blocks)
    return false;
  std::unordered_set<std::uint64_t> named;
  std::size_t holders = 0;
  for (const Resident& resident : snapshot.residents) {
    const KvMirror::Table* table = mirror.table(resident.id);
    const std::size_t shown = table == nullptr ? 0 : table->blocks.size();
    const bool runs = resident.status == static_cast<std::uint8_t>(Status::running);
    if (shown != static_cast<std::size_t>(resident.blocks) || (shown > 0 && !runs) ||
        !named.insert(resident.id).second)
      return false;
    holders += shown > 0;
  }
  return holders == mirror.holders();
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

std::int32_t likely_output_tokens(double predicted, double sigma, std::int32_t outputs,
                                  double chance) {
  double length = predicted;
  if (sigma > 0.0) {
    const double log_mean = std::log(predicted) - sigma * sigma / 2.0;
    const double longer =
        outputs > 0 ? upper_tail((std::log(static_cast<double>(outputs)) - log_mean) / sigma) : 1.0;
    length = std::exp(log_mean + sigma * upper_quantile(std::max(longer * chance, 1e-300)));
  }
  const double limit = std::numeric_limits<std::int32_t>::max() / 2;
  // A sigma beyond all measure makes it no number.
  return std::max(static_cast<std::int32_t>(length < limit ? std::ceil(length) : limit),
                  outputs + 1);
}

double chance_of(std::uint64_t request_id) {
  std::uint64_t x = request_id + 0x9e3779b97f4a7c15ULL;  // splitmix64
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  x ^= x >> 31;
  return (static_cast<double>(x >> 11) + 0.5) * 0x1.0p-53;
}

void restore(const Snapshot& snapshot, const BatchTime& batch_time, double length_sigma,
             EngineLoop& into, Stepping stepping, const KvMirror* mirror) {
  if (mirror != nullptr && !shows_blocks_of(snapshot, *mirror))
    throw std::invalid_argument(
        "snapshot: the KV mirror shows other blocks than its requests hold");
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
    request.output_tokens =
        resident.predicted_output_tokens > 0.0F
            ? likely_output_tokens(resident.predicted_output_tokens, length_sigma,
                                   resident.output_tokens, chance_of(resident.id))
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
