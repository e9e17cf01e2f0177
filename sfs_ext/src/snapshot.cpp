#include "sfs/snapshot.h"

#include <cmath>
#include <cstring>
#include <stdexcept>

namespace sfs {
namespace {

struct MessageHeader {
  char magic[8] = {'F', 'O', 'R', 'E', 'S', 'N', 'A', 'P'};
  std::uint32_t layout = layout_version;
  std::uint32_t residents = 0;
  SchedulerConfig config;
  SnapshotHeader header{};
};
static_assert(std::is_trivially_copyable_v<MessageHeader>);

[[noreturn]] void refuse(const std::string& why) {
  throw std::invalid_argument("snapshot: " + why);
}

struct JournalMessageHeader {
  char magic[8] = {'F', 'O', 'R', 'E', 'J', 'R', 'N', 'L'};
  std::uint32_t layout = layout_version;
  std::int32_t num_blocks = 0;
  std::uint64_t from = 0;
  std::uint64_t to = 0;
  std::uint64_t events = 0;
};
static_assert(std::is_trivially_copyable_v<JournalMessageHeader>);

[[noreturn]] void refuse_journal(const std::string& why) {
  throw std::invalid_argument("KV journal message: " + why);
}

bool names_a_block(KvEventKind kind) {
  return kind == KvEventKind::take || kind == KvEventKind::touch || kind == KvEventKind::hash ||
         kind == KvEventKind::cached;
}

void check_resident(const Resident& r, std::size_t index, bool in_running_part,
                    std::int32_t in_flight_batches, const SchedulerConfig& config) {
  const auto refuse_field = [index](const char* field) {
    refuse("resident " + std::to_string(index) + ": " + field + " is out of range");
  };
  const auto limit = 1 << 28;
  if (r.status > static_cast<std::uint8_t>(Status::preempted)) refuse_field("status");
  if ((r.status == static_cast<std::uint8_t>(Status::running)) != in_running_part)
    refuse("resident " + std::to_string(index) + ": status contradicts its place");
  if (!is_time(r.arrival_s)) refuse_field("arrival_s");
  if (r.prompt_tokens < 1 || r.prompt_tokens > limit) refuse_field("prompt_tokens");
  if (r.output_tokens < 0 || r.output_tokens > limit) refuse_field("output_tokens");
  if (r.max_tokens < 1 || r.max_tokens > limit) refuse_field("max_tokens");
  if (r.placeholders < 0 || r.placeholders > static_cast<int>(max_in_flight))
    refuse_field("placeholders");
  if (r.computed_tokens < 0 ||
      r.computed_tokens > r.prompt_tokens + r.output_tokens + r.placeholders)
    refuse_field("computed_tokens");
  if (r.blocks < 0 || r.blocks > config.usable_blocks()) refuse_field("blocks");
  if (!std::isfinite(r.predicted_output_tokens) || r.predicted_output_tokens < 0)
    refuse_field("predicted_output_tokens");
  for (std::size_t i = 0; i < max_in_flight; ++i) {
    if (r.in_flight_tokens[i] < 0 || r.in_flight_tokens[i] > config.max_num_batched_tokens)
      refuse_field("in_flight_tokens");
    if (r.in_flight_emits[i] > 1) refuse_field("in_flight_emits");
  }
  std::int64_t in_flight_tokens = 0;
  for (std::int32_t i = 0; i < in_flight_batches; ++i) in_flight_tokens += r.in_flight_tokens[i];
  if (r.stale_tokens < 0 || r.stale_tokens > in_flight_tokens) refuse_field("stale_tokens");
}

}  // namespace

void Snapshot::validate() const {
  config.validate();
  if (!is_time(header.published_s)) refuse("published_s is no time");
  if (header.running < 0 || header.waiting < 0 || header.omitted < 0)
    refuse("a count of residents is negative");
  if (header.free_blocks < 0 || header.free_blocks > config.usable_blocks())
    refuse("free_blocks is not within 0 and num_blocks - 1");
  if (header.in_flight_batches < 0 || header.in_flight_batches > config.pipeline_depth())
    refuse("in_flight_batches exceeds the pipeline's depth");
  if (header.kv_journaled != 0 && header.kv_journaled != 1) refuse("kv_journaled is not 0 or 1");
  if (header.kv_journaled == 0 && header.kv_position != 0)
    refuse("a position in a KV journal that is not kept");
  if (static_cast<std::size_t>(header.running) + static_cast<std::size_t>(header.waiting) !=
      residents.size())
    refuse("running + waiting is not the number of residents");
  for (int i = 0; i < header.in_flight_batches; ++i) {
    const BatchInFlight& batch = header.in_flight[i];
    constexpr std::int64_t limit = std::int64_t{1} << 56;
    if (batch.tokens < 0 || batch.tokens > config.max_num_batched_tokens ||
        batch.decode_context_tokens < 0 || batch.decode_context_tokens > limit ||
        batch.prefill_attention < 0 || batch.prefill_attention > limit ||
        !(std::isnan(batch.started_s) || is_time(batch.started_s)))
      refuse("batch in flight " + std::to_string(i) + " is out of range");
  }
  for (std::size_t i = 0; i < residents.size(); ++i)
    check_resident(residents[i], i, i < static_cast<std::size_t>(header.running),
                   header.in_flight_batches, config);
}

std::vector<std::byte> Snapshot::to_bytes() const {
  MessageHeader message;
  message.residents = static_cast<std::uint32_t>(residents.size());
  message.config = config;
  message.header = header;
  const std::size_t body = residents.size() * sizeof(Resident);
  std::vector<std::byte> data(sizeof message + body);
  std::memcpy(data.data(), &message, sizeof message);
  if (body > 0) std::memcpy(data.data() + sizeof message, residents.data(), body);
  return data;
}

Snapshot Snapshot::from_bytes(std::span<const std::byte> data) {
  MessageHeader message;
  const MessageHeader expected;
  if (data.size() < sizeof message) refuse("truncated: shorter than its header");
  std::memcpy(&message, data.data(), sizeof message);
  if (std::memcmp(message.magic, expected.magic, sizeof message.magic) != 0)
    refuse("these bytes are not one");
  if (message.layout != layout_version)
    refuse("layout version " + std::to_string(message.layout) + ", expected " +
           std::to_string(layout_version));
  const std::size_t body = std::size_t{message.residents} * sizeof(Resident);
  if (data.size() - sizeof message != body)
    refuse("truncated or overlong: " + std::to_string(data.size() - sizeof message) +
           " bytes of residents, expected " + std::to_string(body));
  Snapshot snapshot;
  snapshot.config = message.config;
  snapshot.header = message.header;
  snapshot.residents.resize(message.residents);
  if (body > 0) std::memcpy(snapshot.residents.data(), data.data() + sizeof message, body);
  snapshot.validate();
  return snapshot;
}

void KvJournalMessage::validate() const {
  if (num_blocks < 2) refuse_journal("num_blocks is not at least 2");
  if (to < from) refuse_journal("it ends before it begins");
  if (from > 0 && to - from != events.size())
    refuse_journal(std::to_string(events.size()) + " events from " + std::to_string(from) + " to " +
                   std::to_string(to));
  for (std::size_t i = 0; i < events.size(); ++i) {
    const KvEvent& event = events[i];
    const auto refuse_event = [i](const char* why) {
      refuse_journal("event " + std::to_string(i) + ": " + why);
    };
    if (static_cast<std::uint32_t>(event.kind) >= kv_event_kinds) refuse_event("unknown kind");
    if (from > 0 && event.kind == KvEventKind::cached)
      refuse_event("of a checkpoint, which starts from 0");
    if (names_a_block(event.kind) ? event.block < 1 || event.block >= num_blocks : event.block != 0)
      refuse_event("block is out of range");
  }
}

std::vector<std::byte> KvJournalMessage::to_bytes() const {
  JournalMessageHeader head;
  head.num_blocks = num_blocks;
  head.from = from;
  head.to = to;
  head.events = events.size();
  const std::size_t body = events.size() * sizeof(KvEvent);
  std::vector<std::byte> data(sizeof head + body);
  std::memcpy(data.data(), &head, sizeof head);
  if (body > 0) std::memcpy(data.data() + sizeof head, events.data(), body);
  return data;
}

KvJournalMessage KvJournalMessage::from_bytes(std::span<const std::byte> data) {
  JournalMessageHeader head;
  const JournalMessageHeader expected;
  if (data.size() < sizeof head) refuse_journal("truncated: shorter than its header");
  std::memcpy(&head, data.data(), sizeof head);
  if (std::memcmp(head.magic, expected.magic, sizeof head.magic) != 0)
    refuse_journal("these bytes are not one");
  if (head.layout != layout_version)
    refuse_journal("layout version " + std::to_string(head.layout) + ", expected " +
                   std::to_string(layout_version));
  const std::size_t body = data.size() - sizeof head;
  if (body % sizeof(KvEvent) != 0 || body / sizeof(KvEvent) != head.events)
    refuse_journal("truncated or overlong: " + std::to_string(body) + " bytes of events, for " +
                   std::to_string(head.events));
  KvJournalMessage message{
      .num_blocks = head.num_blocks, .from = head.from, .to = head.to, .events = {}};
  message.events.resize(head.events);
  if (body > 0) std::memcpy(message.events.data(), data.data() + sizeof head, body);
  message.validate();
  return message;
}

}  // namespace sfs
