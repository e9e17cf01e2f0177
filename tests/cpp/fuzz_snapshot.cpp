// Snapshots that no engine published: refused, or forecast from within the bound, believably.
//
// What validate() lets pass is restored, stepped plainly and in groups, alone and beside a mirror
// of its KV blocks that may contradict it.
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <stdexcept>

#include "check.h"
#include "fuzz_engine.h"
#include "fuzz_target.h"
#include "sfs/engine_state.h"
#include "sfs/fleet.h"
#include "sfs/forecast.h"
#include "sfs/kv_mirror.h"

using namespace sfs;

namespace {

constexpr std::int64_t max_requests = 20'000;  // of one simulation: the rounds have to be many
constexpr std::int32_t max_mirrored_blocks = 1 << 14;
constexpr std::int32_t max_prompt_tokens = 1 << 12;

// The query and what is told beside the snapshot; times are relative to the snapshot's.
struct Ask {
  double arrival_s;
  double now_s;
  double predicted_output_tokens;
  double length_sigma;
  std::int32_t prompt_tokens;
  std::int32_t max_tokens;
  std::int32_t priority;
  std::uint32_t bookings;
  std::uint32_t prompt;  // a seed
  std::uint32_t snapshot_bytes;
  std::uint64_t journal_from;
  std::uint64_t journal_to;
};

struct Input {
  Ask ask{};
  Bytes snapshot;  // as Snapshot::to_bytes
  std::vector<KvEvent> journal;

  static Input from(const std::uint8_t* data, std::size_t size) {
    InputReader reader(data, size);
    Input input;
    input.ask = reader.take<Ask>();
    input.snapshot = reader.take_many<std::uint8_t>(input.ask.snapshot_bytes);
    input.journal = reader.take_many<KvEvent>(reader.left() / sizeof(KvEvent));
    return input;
  }
  Bytes bytes() {
    ask.snapshot_bytes = static_cast<std::uint32_t>(snapshot.size());
    Bytes all;
    append(all, &ask, 1);
    append(all, snapshot.data(), snapshot.size());
    append(all, journal.data(), journal.size());
    return all;
  }
};

// A message as it lies: magic and layout, the number of residents, config, header, residents.
constexpr std::size_t count_at = 12;
constexpr std::size_t config_at = 16;
constexpr std::size_t header_at = config_at + sizeof(SchedulerConfig);
constexpr std::size_t residents_at = header_at + sizeof(SnapshotHeader);

constexpr std::array config_fields{
    FIELD(SchedulerConfig, max_num_batched_tokens),
    FIELD(SchedulerConfig, max_num_seqs),
    FIELD(SchedulerConfig, max_num_active_seqs),
    FIELD(SchedulerConfig, block_size),
    FIELD(SchedulerConfig, num_blocks),
    FIELD(SchedulerConfig, max_model_len),
    FIELD(SchedulerConfig, long_prefill_token_threshold),
    FIELD(SchedulerConfig, enable_chunked_prefill),
    FIELD(SchedulerConfig, enable_prefix_caching),
    FIELD(SchedulerConfig, async_scheduling),
    FIELD(SchedulerConfig, long_prefill_token_threshold_adaptive),
    FIELD(SchedulerConfig, scheduler_reserve_full_isl),
    FIELD(SchedulerConfig, watermark),
    Field{offsetof(SchedulerConfig, policy), change_number<std::uint8_t>}};

constexpr std::size_t batch_at = offsetof(SnapshotHeader, in_flight);
constexpr std::size_t second_at = batch_at + sizeof(BatchInFlight);
constexpr std::array header_fields{
    FIELD(SnapshotHeader, sequence),
    FIELD(SnapshotHeader, published_s),
    FIELD(SnapshotHeader, free_blocks),
    FIELD(SnapshotHeader, running),
    FIELD(SnapshotHeader, waiting),
    FIELD(SnapshotHeader, omitted),
    FIELD(SnapshotHeader, in_flight_batches),
    FIELD(SnapshotHeader, kv_journaled),
    FIELD(SnapshotHeader, kv_position),
    Field{batch_at + offsetof(BatchInFlight, started_s), change_number<double>},
    Field{batch_at + offsetof(BatchInFlight, tokens), change_number<std::int64_t>},
    Field{batch_at + offsetof(BatchInFlight, decode_context_tokens), change_number<std::int64_t>},
    Field{batch_at + offsetof(BatchInFlight, prefill_attention), change_number<std::int64_t>},
    Field{second_at + offsetof(BatchInFlight, started_s), change_number<double>},
    Field{second_at + offsetof(BatchInFlight, tokens), change_number<std::int64_t>}};

constexpr std::size_t in_flight_at = offsetof(Resident, in_flight_tokens);
constexpr std::size_t emits_at = offsetof(Resident, in_flight_emits);
constexpr std::array resident_fields{
    FIELD(Resident, id),
    FIELD(Resident, arrival_s),
    FIELD(Resident, prompt_tokens),
    FIELD(Resident, output_tokens),
    FIELD(Resident, computed_tokens),
    FIELD(Resident, placeholders),
    FIELD(Resident, max_tokens),
    FIELD(Resident, predicted_output_tokens),
    FIELD(Resident, priority),
    FIELD(Resident, blocks),
    FIELD(Resident, stale_tokens),
    FIELD(Resident, status),
    Field{in_flight_at, change_number<std::int32_t>},
    Field{in_flight_at + sizeof(std::int32_t), change_number<std::int32_t>},
    Field{emits_at, change_number<std::uint8_t>},
    Field{emits_at + 1, change_number<std::uint8_t>}};

constexpr std::array ask_fields{
    FIELD(Ask, arrival_s),    FIELD(Ask, now_s),         FIELD(Ask, predicted_output_tokens),
    FIELD(Ask, length_sigma), FIELD(Ask, prompt_tokens), FIELD(Ask, max_tokens),
    FIELD(Ask, priority),     FIELD(Ask, bookings),      FIELD(Ask, prompt),
    FIELD(Ask, journal_from), FIELD(Ask, journal_to)};

std::size_t residents_of(const Bytes& message) {
  return (message.size() - residents_at) / sizeof(Resident);
}

// Counts as the residents are, running ones first, so that a change of them is not all refused.
void make_consistent(Bytes& message) {
  InputReader reader(message.data() + residents_at, message.size() - residents_at);
  auto residents = reader.take_many<Resident>(residents_of(message));
  const auto runs = [](const Resident& resident) {
    return resident.status == static_cast<std::uint8_t>(Status::running);
  };
  const auto waiting = std::stable_partition(residents.begin(), residents.end(), runs);
  const auto total = static_cast<std::uint32_t>(residents.size());
  SnapshotHeader header;
  std::memcpy(&header, message.data() + header_at, sizeof header);
  header.running = static_cast<std::int32_t>(waiting - residents.begin());
  header.waiting = static_cast<std::int32_t>(total) - header.running;
  message.resize(residents_at);
  std::memcpy(message.data() + count_at, &total, sizeof total);
  std::memcpy(message.data() + header_at, &header, sizeof header);
  append(message, residents.data(), residents.size());
}

void mutate_residents(Bytes& message, Dice& dice) {
  const std::size_t count = residents_of(message);
  if (count == 0) return;
  const auto place = [&] {
    return message.begin() +
           static_cast<std::ptrdiff_t>(residents_at + dice.bits() % count * sizeof(Resident));
  };
  const auto one = place(), other = place();
  const Bytes copy(one, one + sizeof(Resident));
  switch (dice.from(0, 5)) {
    case 0:
      std::swap_ranges(one, one + sizeof(Resident), other);
      break;
    case 1:
      message.erase(one, one + sizeof(Resident));
      break;
    case 2:
      for (int copies = dice.from(1, 40); copies > 0; --copies)
        message.insert(message.end(), copy.begin(), copy.end());
      break;
    default:
      dice.one_of(resident_fields).change(&*one + 0, dice);
  }
}

void check_believable(ForecastStatus status, double waiting_s, double prefill_s,
                      std::int64_t batches) {
  CHECK(batches >= 0);
  if (status == ForecastStatus::ok) {
    CHECK(std::isfinite(waiting_s) && std::isfinite(prefill_s));
    CHECK(prefill_s >= 0.0);
  } else {
    CHECK(std::isinf(waiting_s) && waiting_s > 0.0);
  }
}

// Nothing but a clean refusal may stop it.
template <class Call>
bool refused(Call call) {
  return throws<std::invalid_argument>(call);
}

class Target {
 public:
  Target(const Input& input, const Snapshot& snapshot)
      : ask_(input.ask), journal_(input.journal), snapshot_(snapshot) {
    if (ask_.prompt_tokens > 0 && ask_.prompt_tokens <= max_prompt_tokens) {
      Dice dice(ask_.prompt);
      prompt_ = RandomEngine::random_prompt(dice, 0, ask_.prompt_tokens);
      keys_ = block_keys(prompt_, snapshot.config.block_size);
    }
    query_ = {.arrival_s = ask_.arrival_s,
              .prompt_tokens = ask_.prompt_tokens,
              .predicted_output_tokens = ask_.predicted_output_tokens,
              .max_tokens = ask_.max_tokens,
              .priority = ask_.priority,
              .keys = keys_};
    if (!snapshot.config.can_admit(ask_.prompt_tokens) || ask_.max_tokens < 1) return;
    booked_.resize(ask_.bookings % 4, query_);
    for (std::size_t i = 0; i < booked_.size(); ++i) booked_[i].id = 1'000'000 + i;
  }

  void forecast(Stepping stepping, const KvMirror* mirror) const {
    Simulation simulation;
    restore(snapshot_, batch_time, sigma(), simulation.loop, stepping, mirror);
    simulation.begin();
    const KeepSimulation keep = [this](const Simulation& reached) {
      Simulation later = reached;
      check(forecast_first_token(later, booked_, query_, {}, max_requests));
    };
    check(forecast_first_token(simulation, booked_, query_, keep, max_requests));
  }

  void forecast_of_fleet() const {
    Fleet fleet;
    fleet.add(snapshot_.config, batch_time, sigma());
    const KvJournalMessage message{.num_blocks = snapshot_.config.num_blocks,
                                   .from = ask_.journal_from,
                                   .to = ask_.journal_to,
                                   .events = journal_};
    refused([&] { KvJournalMessage::from_bytes(message.to_bytes()); });
    const bool sound = !refused([&] { message.validate(); });
    if (sound && ask_.bookings % 2 == 0) fleet.update_journal(0, message);
    if (!fleet.update(0, snapshot_)) return;
    for (Arrival booked : booked_) {
      booked.arrival_s += snapshot_.header.published_s;
      fleet.book(0, booked, prompt_);
    }
    ask_fleet(fleet);
    if (!sound) return;
    fleet.update_journal(0, message);
    ask_fleet(fleet);
    fleet.update_journal(0, {.num_blocks = message.num_blocks,
                             .from = ask_.journal_to + 1,
                             .to = ask_.journal_to + 1,
                             .events = {}});
    ask_fleet(fleet);
  }

 private:
  static constexpr BatchTime batch_time{2e-3, 1e-5, 3e-8, 1e-9};

  // Twice: a kept simulation answers as the one that it was kept from.
  void ask_fleet(Fleet& fleet) const {
    const double published_s = snapshot_.header.published_s;
    const CandidateQuery query{.instance = 0,
                               .prompt_tokens = ask_.prompt_tokens,
                               .predicted_output_tokens = ask_.predicted_output_tokens,
                               .max_tokens = ask_.max_tokens,
                               .priority = ask_.priority,
                               .arrival_s = published_s + ask_.arrival_s,
                               .prompt = 0};
    const Prompt prompt = prompt_;
    CandidateForecast first, second;
    for (CandidateForecast* into : {&first, &second})
      fleet.forecast(published_s + ask_.now_s, {&query, 1}, {&prompt, 1}, {into, 1});
    const auto status = static_cast<ForecastStatus>(first.status);
    check_believable(status, first.waiting_s, first.prefill_s, first.batches);
    CHECK(first.status == second.status && first.batches == second.batches);
    if (status == ForecastStatus::ok) CHECK(first.ttft_s == second.ttft_s);
    CHECK(first.cached_tokens >= 0 && first.cached_tokens <= std::max(ask_.prompt_tokens, 0));
  }

  double sigma() const {
    return ask_.length_sigma >= 0.0 && !std::isinf(ask_.length_sigma) ? ask_.length_sigma : 0.0;
  }
  static void check(const FirstToken& first) {
    check_believable(first.status, first.waiting_s, first.prefill_s, first.batches);
  }

  const Ask& ask_;
  const std::vector<KvEvent>& journal_;
  const Snapshot& snapshot_;
  std::vector<std::int32_t> prompt_;
  std::vector<BlockKey> keys_;
  Arrival query_;
  std::vector<Arrival> booked_;
};

}  // namespace

Bytes seed_input(Dice& dice) {
  RandomEngine engine(dice, /*prefix_caching=*/dice.coin());
  std::vector<KvEvent> journal;
  if (engine.config.enable_prefix_caching) engine.loop.scheduler.record_to(&journal);
  engine.run(dice, dice.from(1, 150));
  Snapshot snapshot;
  capture(engine.loop, engine.now_s, snapshot);
  snapshot.header.sequence = 1;
  snapshot.header.kv_journaled = engine.config.enable_prefix_caching;
  snapshot.header.kv_position = journal.size();
  const auto message = snapshot.to_bytes();

  Input input;
  append(input.snapshot, message.data(), message.size());
  KvMirror mirror(engine.config.num_blocks);
  mirror.apply(journal);
  input.journal = mirror.compact();
  input.ask = {.arrival_s = dice.real(-0.01, 0.05),
               .now_s = dice.real(0.0, 0.1),
               .predicted_output_tokens = dice.real(0.0, 100.0),
               .length_sigma = dice.real(0.0, 1.0),
               .prompt_tokens = dice.from(1, 400),
               .max_tokens = dice.from(1, 100),
               .priority = dice.from(0, 3),
               .bookings = static_cast<std::uint32_t>(dice.from(0, 3)),
               .prompt = static_cast<std::uint32_t>(dice.bits()),
               .snapshot_bytes = 0,
               .journal_from = 0,
               .journal_to = journal.size()};
  return input.bytes();
}

void mutate(Bytes& bytes, Dice& dice) {
  Input input = Input::from(bytes.data(), bytes.size());
  Bytes& message = input.snapshot;
  if (message.size() < residents_at) return;
  switch (dice.from(0, 9)) {
    case 0:
      dice.one_of(ask_fields).change(reinterpret_cast<std::uint8_t*>(&input.ask), dice);
      break;
    case 1:
      mutate_journal(input.journal, dice);
      break;
    case 2:
      dice.one_of(config_fields).change(message.data() + config_at, dice);
      break;
    case 3:
      dice.one_of(header_fields).change(message.data() + header_at, dice);
      break;
    default:
      mutate_residents(message, dice);
      if (dice.from(0, 7) > 0) make_consistent(message);
  }
  bytes = input.bytes();
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const Input input = Input::from(data, size);
  const auto message = std::as_bytes(std::span(input.snapshot));
  Snapshot snapshot;
  if (refused([&] { snapshot = Snapshot::from_bytes(message); })) return 0;
  const auto again = snapshot.to_bytes();
  CHECK(std::equal(again.begin(), again.end(), message.begin(), message.end()));

  const Target target(input, snapshot);
  refused([&] { target.forecast(Stepping::plain, nullptr); });
  refused([&] { target.forecast(Stepping::grouped, nullptr); });
  if (input.ask.prompt % 8 == 0) refused([&] { target.forecast_of_fleet(); });
  if (snapshot.config.num_blocks > max_mirrored_blocks) return 0;
  KvMirror mirror(snapshot.config.num_blocks);
  refused([&] { mirror.apply(input.journal); });
  refused([&] { target.forecast(Stepping::plain, &mirror); });
  refused([&] { target.forecast(Stepping::grouped, &mirror); });
  return 0;
}
