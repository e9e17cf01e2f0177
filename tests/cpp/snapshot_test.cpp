// Bytes that are not a whole, consistent snapshot or journal message are refused, whatever they
// are.
#include "sfs/snapshot.h"

#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>

#include "check.h"

using namespace sfs;

namespace {

Snapshot sample() {
  Snapshot snapshot;
  snapshot.config.max_num_batched_tokens = 2048;
  snapshot.config.max_num_seqs = 128;
  snapshot.config.block_size = 16;
  snapshot.config.num_blocks = 1000;
  snapshot.config.max_model_len = 8192;
  snapshot.header.sequence = 7;
  snapshot.header.published_s = 1.7e9;
  snapshot.header.free_blocks = 900;
  snapshot.header.running = 1;
  snapshot.header.waiting = 1;
  Resident resident{};
  resident.id = 42;
  resident.prompt_tokens = 100;
  resident.max_tokens = 50;
  resident.blocks = 7;
  resident.computed_tokens = 100;
  snapshot.residents.push_back(resident);
  resident.id = 43;
  resident.computed_tokens = 0;
  resident.blocks = 0;
  resident.status = static_cast<std::uint8_t>(Status::waiting);
  snapshot.residents.push_back(resident);
  return snapshot;
}

bool is_refused(std::span<const std::byte> data) {
  return throws<std::invalid_argument>([&] { Snapshot::from_bytes(data); });
}

void bytes_come_back() {
  const auto data = sample().to_bytes();
  const Snapshot back = Snapshot::from_bytes(data);
  CHECK(back.config == sample().config);
  CHECK(back.header.sequence == 7);
  CHECK(back.residents.size() == 2);
  CHECK(back.residents[1].id == 43);
}

void every_truncation_is_refused() {
  auto data = sample().to_bytes();
  for (std::size_t length = 0; length < data.size(); ++length)
    CHECK(is_refused(std::span(data).first(length)));
  data.push_back(std::byte{0});
  CHECK(is_refused(data));
}

void contradictions_are_refused() {
  const auto refused = [](auto change) {
    Snapshot snapshot = sample();
    change(snapshot);
    return is_refused(snapshot.to_bytes());
  };
  CHECK(refused([](Snapshot& s) { s.header.running = 2; }));
  CHECK(refused([](Snapshot& s) { s.header.running = -1; }));
  CHECK(refused([](Snapshot& s) { s.header.free_blocks = 1000; }));
  CHECK(refused([](Snapshot& s) { s.header.in_flight_batches = 2; }));
  CHECK(
      refused([](Snapshot& s) { s.header.published_s = std::numeric_limits<double>::infinity(); }));
  CHECK(refused([](Snapshot& s) { s.header.kv_journaled = 2; }));
  CHECK(refused([](Snapshot& s) { s.header.kv_position = 1; }));
  CHECK(refused([](Snapshot& s) { s.config.block_size = 0; }));
  CHECK(refused([](Snapshot& s) { s.residents[0].status = 3; }));
  CHECK(refused([](Snapshot& s) { s.residents[0].computed_tokens = 101; }));
  CHECK(refused([](Snapshot& s) { s.residents[1].prompt_tokens = 0; }));
  CHECK(refused([](Snapshot& s) { std::swap(s.residents[0], s.residents[1]); }));
}

// Any flipped bits: parsed to something that holds together, or refused; never a crash.
void random_corruption_is_survived() {
  std::mt19937 random(1);
  const auto original = sample().to_bytes();
  for (int i = 0; i < 20000; ++i) {
    auto data = original;
    for (int flips = 0; flips < 4; ++flips)
      data[random() % data.size()] ^= static_cast<std::byte>(1U << random() % 8);
    try {
      Snapshot::from_bytes(data).validate();
    } catch (const std::invalid_argument&) {
    }
  }
}

KvJournalMessage sample_message() {
  using enum KvEventKind;
  return {.num_blocks = 10,
          .from = 100,
          .to = 104,
          .events = {{7, 0, want}, {7, 3, take}, {99, 3, hash}, {7, 0, release}}};
}

bool is_refused_message(std::span<const std::byte> data) {
  return throws<std::invalid_argument>([&] { KvJournalMessage::from_bytes(data); });
}

void messages_come_back() {
  const KvJournalMessage back = KvJournalMessage::from_bytes(sample_message().to_bytes());
  CHECK(back.num_blocks == 10 && back.from == 100 && back.to == 104);
  CHECK(back.events.size() == 4);
  CHECK(back.events[1].block == 3 && back.events[2].value == 99);
  CHECK(back.events[3].kind == KvEventKind::release);
}

void every_truncated_message_is_refused() {
  auto data = sample_message().to_bytes();
  for (std::size_t length = 0; length < data.size(); ++length)
    CHECK(is_refused_message(std::span(data).first(length)));
  data.resize(data.size() + sizeof(KvEvent));
  CHECK(is_refused_message(data));
}

void contradictory_messages_are_refused() {
  const auto refused = [](auto change) {
    KvJournalMessage message = sample_message();
    change(message);
    return is_refused_message(message.to_bytes());
  };
  CHECK(refused([](KvJournalMessage& m) { m.num_blocks = 1; }));
  CHECK(refused([](KvJournalMessage& m) { m.num_blocks = 3; }));
  CHECK(refused([](KvJournalMessage& m) { m.to = 99; }));
  CHECK(refused([](KvJournalMessage& m) { m.to = 105; }));
  CHECK(refused([](KvJournalMessage& m) { m.events[0].block = 1; }));
  CHECK(refused([](KvJournalMessage& m) { m.events[1].block = 0; }));
  CHECK(refused([](KvJournalMessage& m) { m.events[1].block = -1; }));
  CHECK(refused([](KvJournalMessage& m) { m.events[1].kind = static_cast<KvEventKind>(8); }));
  CHECK(refused([](KvJournalMessage& m) { m.events[1].kind = KvEventKind::cached; }));
  CHECK(!refused([](KvJournalMessage& m) {
    m.events[1].kind = KvEventKind::cached;
    m.from = 0;
  }));
}

void random_corruption_of_messages_is_survived() {
  std::mt19937 random(1);
  const auto original = sample_message().to_bytes();
  for (int i = 0; i < 20000; ++i) {
    auto data = original;
    for (int flips = 0; flips < 4; ++flips)
      data[random() % data.size()] ^= static_cast<std::byte>(1U << random() % 8);
    try {
      KvJournalMessage::from_bytes(data).validate();
    } catch (const std::invalid_argument&) {
    }
  }
}

}  // namespace

int main() {
  bytes_come_back();
  every_truncation_is_refused();
  contradictions_are_refused();
  random_corruption_is_survived();
  messages_come_back();
  every_truncated_message_is_refused();
  contradictory_messages_are_refused();
  random_corruption_of_messages_is_survived();
}
