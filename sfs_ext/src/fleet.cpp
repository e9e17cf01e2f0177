#include "sfs/fleet.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <unordered_set>
#include <utility>

#include "sfs/block_keys.h"

namespace sfs {
namespace {

// A queued request's whole known sequence, a running one's uncomputed prompt.
std::int64_t remaining_prefill_tokens(const Resident& resident) {
  if (resident.status != static_cast<std::uint8_t>(Status::running))
    return resident.prompt_tokens + resident.output_tokens;
  return std::max(resident.prompt_tokens - resident.computed_tokens, 0);
}

// Shared memory shows a step as soon as it is scheduled. None newer to be seen means that the
// batch at hand still runs, however long it was thought to take.
bool is_overdue(const EngineLoop& loop, double now_s) {
  return loop.in_flight() > 0 && loop.oldest().end_s < now_s;
}
void hold_until(EngineLoop& loop, double now_s) {
  loop.oldest().end_s = now_s;
  loop.device_free_s = now_s;
  if (loop.in_flight() < 2) return;
  InFlight& queued = loop.newest();
  queued.start_s = now_s;
  queued.end_s = now_s + loop.batch_time.seconds(queued.batch.shape);
  loop.device_free_s = queued.end_s;
}

// Rule 11, as things are: the query may come to something else.
std::int32_t cached_tokens(const KvMirror& mirror, std::span<const BlockKey> keys,
                           std::int32_t prompt_tokens, std::int32_t block_size) {
  if (prompt_tokens < 1) return 0;
  const auto full_blocks = static_cast<std::size_t>((prompt_tokens - 1) / block_size);
  std::size_t hits = 0;
  while (hits < std::min(full_blocks, keys.size()) && mirror.find(keys[hits]) >= 0) ++hits;
  return static_cast<std::int32_t>(hits) * block_size;
}

// Of a query's own tokenizer; none where no prompts are given.
Prompt prompt_of(const CandidateQuery& query, std::span<const Prompt> prompts) {
  if (prompts.empty()) return {};
  if (query.prompt < 0 || static_cast<std::size_t>(query.prompt) >= prompts.size())
    throw std::invalid_argument("fleet: the query for instance " + std::to_string(query.instance) +
                                " has prompt " + std::to_string(query.prompt) + " of " +
                                std::to_string(prompts.size()));
  return prompts[static_cast<std::size_t>(query.prompt)];
}

// Of one instance, waiting for the snapshots that they lead up to.
constexpr std::size_t max_journal_messages = 4096;

void check_length_sigma(double sigma) {
  if (!(sigma >= 0.0) || std::isinf(sigma))
    throw std::invalid_argument("fleet: length_sigma must be finite and >= 0");
}

}  // namespace

std::int32_t Fleet::add(const SchedulerConfig& config, const BatchTime& batch_time,
                        double length_sigma) {
  config.validate();
  check_length_sigma(length_sigma);
  auto instance = std::make_shared<Instance>();
  instance->batch_time = batch_time;
  instance->length_sigma = length_sigma;
  instance->stepping = stepping_;
  instance->snapshot.config = config;
  const std::unique_lock lock(mutex_);
  instances_.push_back(std::move(instance));
  return static_cast<std::int32_t>(instances_.size() - 1);
}

void Fleet::remove(std::int32_t instance) {
  at(instance);
  const std::unique_lock lock(mutex_);
  instances_[static_cast<std::size_t>(instance)].reset();
}

std::shared_ptr<Fleet::Instance> Fleet::at(std::int32_t instance) const {
  const std::shared_lock lock(mutex_);
  const auto index = static_cast<std::size_t>(instance);
  if (instance < 0 || index >= instances_.size() || !instances_[index])
    throw std::out_of_range("fleet: no instance " + std::to_string(instance));
  return instances_[index];
}

void Fleet::attach(std::int32_t number, const std::string& path) {
  SnapshotReader reader(path);
  const auto instance = at(number);
  const std::unique_lock lock(instance->mutex);
  instance->reader.emplace(std::move(reader));
}

bool Fleet::update(std::int32_t number, Snapshot snapshot) {
  const auto instance = at(number);
  const std::unique_lock lock(instance->mutex);
  if (snapshot.header.sequence <= instance->snapshot.header.sequence) return false;
  std::swap(instance->incoming, snapshot);
  instance->accept();
  return true;
}

bool Fleet::update_journal(std::int32_t number, KvJournalMessage message) {
  const auto instance = at(number);
  const std::unique_lock lock(instance->mutex);
  auto& journal = instance->journal;
  const std::uint64_t known = !journal.empty()   ? journal.back().to
                              : instance->mirror ? instance->mirror->position()
                                                 : 0;
  if (message.to <= known) return true;
  if (message.from > known || journal.size() == max_journal_messages) {
    journal.clear();
    instance->mirror.reset();
    if (instance->mirrored) instance->restart();  // its simulation looks at the mirror
    return false;
  }
  if (message.from == 0) journal.clear();
  const bool leads_up_to_snapshot = message.to == instance->snapshot.header.kv_position;
  journal.push_back(std::move(message));
  if (leads_up_to_snapshot) instance->restart();
  return true;
}

void Fleet::calibrate(std::int32_t number, const BatchTime& batch_time) {
  const auto instance = at(number);
  const std::unique_lock lock(instance->mutex);
  instance->batch_time = batch_time;
  if (instance->snapshot.header.sequence > 0) instance->restart();
}

void Fleet::set_length_sigma(std::int32_t number, double sigma) {
  check_length_sigma(sigma);
  const auto instance = at(number);
  const std::unique_lock lock(instance->mutex);
  instance->length_sigma = sigma;
}

void Fleet::book(std::int32_t number, const Arrival& arrival, Prompt prompt) {
  const auto instance = at(number);
  if (!is_time(arrival.arrival_s))
    throw std::invalid_argument("fleet: a booking's arrival_s is no time");
  const std::unique_lock lock(instance->mutex);
  if (!instance->snapshot.config.can_admit(arrival.prompt_tokens) || arrival.max_tokens < 1)
    throw std::invalid_argument("fleet: a query with " + std::to_string(arrival.prompt_tokens) +
                                " prompt tokens and max_tokens " +
                                std::to_string(arrival.max_tokens) + " can never run on instance " +
                                std::to_string(number));
  auto& bookings = instance->bookings;
  const auto later = std::upper_bound(
      bookings.begin(), bookings.end(), arrival.arrival_s,
      [](double arrival_s, const Booking& other) { return arrival_s < other.arrival.arrival_s; });
  // Whoever comes last changes nothing for those before; anybody else does.
  const double kept_from_s =
      instance->snapshot.header.published_s + instance->kept.earliest_arrival_s;
  if (later != bookings.end() || arrival.arrival_s < kept_from_s) instance->kept.valid = false;
  Booking booking{arrival, {}};
  if (instance->snapshot.config.enable_prefix_caching)
    booking.keys = block_keys(prompt, instance->snapshot.config.block_size);
  bookings.insert(later, std::move(booking));
  instance->sum_bookings();
}

bool Fleet::unbook(std::int32_t number, std::uint64_t request_id) {
  const auto instance = at(number);
  const std::unique_lock lock(instance->mutex);
  const bool was_booked = std::erase_if(instance->bookings, [=](const Booking& booked) {
                            return booked.arrival.id == request_id;
                          }) > 0;
  if (was_booked) {
    instance->kept.valid = false;
    instance->sum_bookings();
  }
  return was_booked;
}

std::optional<Snapshot> Fleet::snapshot(std::int32_t number) {
  const auto instance = at(number);
  const std::unique_lock lock(instance->mutex);
  instance->refresh();
  if (instance->snapshot.header.sequence == 0) return std::nullopt;
  return instance->snapshot;
}

void Fleet::Instance::refresh() {
  if (!behind()) return;
  try {
    if (reader->read(incoming) && incoming.header.sequence > snapshot.header.sequence) accept();
  } catch (const std::invalid_argument&) {
    // One engine's contradiction must not fail decisions about others: its snapshot ages instead.
  }
}

void Fleet::Instance::accept() {
  std::swap(snapshot, incoming);
  queued_prefill_tokens = 0;
  for (const Resident& resident : snapshot.residents)
    queued_prefill_tokens += remaining_prefill_tokens(resident);
  restart();
  if (bookings.empty()) return;
  std::unordered_set<std::uint64_t> named;
  for (const Resident& resident : snapshot.residents) named.insert(resident.id);
  std::erase_if(bookings, [&](const Booking& booked) { return named.contains(booked.arrival.id); });
  sum_bookings();
}

void Fleet::Instance::sum_bookings() {
  booked = PromptsAhead{};
  for (const Booking& booking : bookings)
    booked.add(snapshot.config, booking.arrival.prompt_tokens, 0);
  if (!bookings.empty()) booked.first_s = bookings.front().arrival.arrival_s;
}

// Brings the mirror to the snapshot. A journal that contradicts itself, or the snapshot, is not
// believed: forecasts then know counts alone, until it begins anew.
bool Fleet::Instance::follow_journal() {
  const SnapshotHeader& header = snapshot.header;
  if (!header.kv_journaled) return false;
  if (!reader && !mirror && journal.empty()) return false;
  try {
    if (!mirror) mirror.emplace(snapshot.config.num_blocks);
    if (reader && !reader->read_journal(*mirror, header.kv_position)) return false;
    for (; !journal.empty() && journal.front().to <= header.kv_position; journal.pop_front())
      if (!mirror->advance(journal.front())) return false;
  } catch (const std::invalid_argument&) {
    mirror.reset();
    journal.clear();
    return false;
  }
  return mirror->position() == header.kv_position;
}

void Fleet::Instance::restart() {
  mirrored = follow_journal();
  try {
    restore(snapshot, batch_time, length_sigma, simulation.loop, stepping,
            mirrored ? &*mirror : nullptr);
  } catch (const std::invalid_argument&) {
    mirrored = false;
    if (!reader) {  // then update_journal asks for a checkpoint
      mirror.reset();
      journal.clear();
    }
    restore(snapshot, batch_time, length_sigma, simulation.loop, stepping);
  }
  simulation.begin();
  kept.valid = false;
  load = Load(simulation.loop);
}

std::shared_lock<std::shared_mutex> Fleet::Instance::read() {
  std::shared_lock lock(mutex);
  if (behind()) {
    lock.unlock();
    {
      const std::unique_lock writing(mutex);
      refresh();
    }
    lock.lock();
  }
  return lock;
}

bool Fleet::Instance::take_kept(double arrival_s, Simulation& into) {
  std::shared_ptr<const Simulation> simulation;
  {
    const std::lock_guard lock(kept_mutex);
    if (!kept.valid || arrival_s < kept.earliest_arrival_s) return false;
    simulation = kept.simulation;
  }
  into = *simulation;
  const std::lock_guard lock(kept_mutex);
  simulation.reset();  // locked, so that whoever finds nobody holding it comes after this copy
  return true;
}

void Fleet::Instance::keep(const Simulation& simulation, double arrival_s) {
  std::shared_ptr<Simulation> copy;
  {
    const std::lock_guard lock(kept_mutex);
    if (kept.spare.use_count() == 1) copy = std::move(kept.spare);
  }
  if (copy == nullptr) copy = std::make_shared<Simulation>();
  *copy = simulation;
  const std::lock_guard lock(kept_mutex);
  kept.spare = std::exchange(kept.simulation, std::move(copy));
  kept.earliest_arrival_s = arrival_s;
  kept.valid = true;
}

// The keys of a decision's prompts, each made once for all instances with blocks of one size.
class Fleet::PromptKeys {
 public:
  std::span<const BlockKey> of(Prompt prompt, std::int32_t block_size) {
    const auto same = [&](const Entry& entry) {
      return entry.token_ids == prompt.data() && entry.tokens == prompt.size() &&
             entry.block_size == block_size;
    };
    auto found = std::find_if(entries_.begin(), entries_.end(), same);
    if (found == entries_.end())
      found = entries_.insert(
          found, {prompt.data(), prompt.size(), block_size, block_keys(prompt, block_size)});
    return found->keys;
  }

 private:
  struct Entry {
    const std::int32_t* token_ids;
    std::size_t tokens;
    std::int32_t block_size;
    std::vector<BlockKey> keys;
  };
  std::vector<Entry> entries_;
};

void Fleet::forecast(double now_s, std::span<const CandidateQuery> queries,
                     std::span<const Prompt> prompts, std::span<CandidateForecast> into) {
  if (!is_time(now_s)) throw std::invalid_argument("fleet: now_s is no time");
  PromptKeys keys;
  for (std::size_t i = 0; i < queries.size(); ++i)
    into[i] = forecast_one(*at(queries[i].instance), now_s, queries[i],
                           prompt_of(queries[i], prompts), keys);
}

void Fleet::loads(double now_s, std::span<const CandidateQuery> queries,
                  std::span<const Prompt> prompts, std::span<CandidateLoad> into) {
  if (!is_time(now_s)) throw std::invalid_argument("fleet: now_s is no time");
  PromptKeys keys;
  for (std::size_t i = 0; i < queries.size(); ++i) {
    if (!is_time(queries[i].arrival_s))
      throw std::invalid_argument("fleet: a query's arrival_s is no time");
    into[i] =
        load_one(*at(queries[i].instance), now_s, queries[i], prompt_of(queries[i], prompts), keys);
  }
}

CandidateLoad Fleet::load_one(Instance& instance, double now_s, const CandidateQuery& query,
                              Prompt prompt, PromptKeys& prompt_keys) {
  const auto lock = instance.read();
  const SchedulerConfig& config = instance.snapshot.config;
  const SnapshotHeader& header = instance.snapshot.header;
  const bool known = header.sequence > 0;
  const double published_s = known ? header.published_s : now_s;
  const std::int32_t cached =
      instance.mirrored ? cached_tokens(*instance.mirror, prompt_keys.of(prompt, config.block_size),
                                        query.prompt_tokens, config.block_size)
                        : 0;
  PromptsAhead booked = instance.booked;
  booked.first_s -= published_s;
  const Load::Ttft ttft = instance.load.ttft(
      config, instance.batch_time, query.arrival_s - published_s, query.prompt_tokens, cached,
      booked, instance.reader ? now_s - published_s : 0.0);
  return {.ttft_s = ttft.likely_s,
          .least_ttft_s = ttft.least_s,
          .age_s = known ? now_s - published_s : std::numeric_limits<double>::quiet_NaN(),
          .running = header.running,
          .waiting = header.waiting + header.omitted +
                     static_cast<std::int32_t>(instance.bookings.size())};
}

CandidateForecast Fleet::forecast_one(Instance& instance, double now_s, const CandidateQuery& query,
                                      Prompt prompt, PromptKeys& prompt_keys) {
  static thread_local Simulation simulation;
  static thread_local std::vector<Arrival> ahead;
  const auto lock = instance.read();
  const SnapshotHeader& header = instance.snapshot.header;
  CandidateForecast forecast{};
  forecast.instance = query.instance;
  forecast.booked = static_cast<std::int32_t>(instance.bookings.size());
  forecast.running = header.running;
  forecast.waiting = header.waiting + header.omitted + forecast.booked;
  forecast.queued_prefill_tokens = instance.queued_prefill_tokens;
  for (const Booking& booked : instance.bookings)
    forecast.queued_prefill_tokens += booked.arrival.prompt_tokens;
  if (header.sequence == 0) {
    forecast.status = static_cast<std::int32_t>(
        instance.snapshot.config.can_admit(query.prompt_tokens) ? ForecastStatus::no_snapshot
                                                                : ForecastStatus::never);
    forecast.ttft_s = forecast.waiting_s = std::numeric_limits<double>::infinity();
    forecast.age_s = std::numeric_limits<double>::quiet_NaN();
    return forecast;
  }
  forecast.age_s = now_s - header.published_s;
  std::span<const BlockKey> keys;
  if (instance.mirrored && instance.snapshot.config.can_admit(query.prompt_tokens)) {
    keys = prompt_keys.of(prompt, instance.snapshot.config.block_size);
    forecast.cached_tokens = cached_tokens(*instance.mirror, keys, query.prompt_tokens,
                                           instance.snapshot.config.block_size);
  }
  const Arrival arrival{.id = 0,
                        .arrival_s = query.arrival_s - header.published_s,
                        .prompt_tokens = query.prompt_tokens,
                        .predicted_output_tokens = query.predicted_output_tokens,
                        .max_tokens = query.max_tokens,
                        .priority = query.priority,
                        .keys = keys};
  ahead.clear();
  for (const Booking& booked : instance.bookings) {
    ahead.push_back(booked.arrival);
    ahead.back().arrival_s -= header.published_s;
    ahead.back().keys = booked.keys;
  }

  // What is held depends on the time of asking, so it is nothing to keep.
  const bool held =
      instance.reader && is_overdue(instance.simulation.loop, now_s - header.published_s);
  if (held || !instance.take_kept(arrival.arrival_s, simulation)) simulation = instance.simulation;
  if (held) hold_until(simulation.loop, now_s - header.published_s);
  const KeepSimulation keep = [&](const Simulation& reached) {
    instance.keep(reached, arrival.arrival_s);
  };
  const FirstToken first =
      forecast_first_token(simulation, ahead, arrival, held ? KeepSimulation{} : keep);
  forecast.status = static_cast<std::int32_t>(first.status);
  forecast.waiting_s = first.waiting_s;
  forecast.prefill_s = first.prefill_s;
  forecast.ttft_s = first.waiting_s + first.prefill_s;
  forecast.batches = first.batches;
  return forecast;
}

}  // namespace sfs
