// A writer at full speed and its readers: no torn snapshot or journal, no stalled reader.
#include "sfs/segment.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "check.h"

using namespace sfs;

namespace {

SchedulerConfig config() {
  SchedulerConfig config;
  config.max_num_batched_tokens = 2048;
  config.max_num_seqs = 128;
  config.block_size = 16;
  config.num_blocks = 100000;
  config.max_model_len = 1 << 20;
  return config;
}

std::string path(const char* name) {
  return "/dev/shm/foretoken-test-" + std::to_string(::getpid()) + "-" + name;
}

// Every field of snapshot n says n, so a mixture of two shows.
void write_numbered(SnapshotWriter& writer, std::uint64_t n) {
  std::vector<Resident> residents(1 + n % 200);
  for (Resident& resident : residents) {
    resident.id = n;
    resident.prompt_tokens = 1 + static_cast<std::int32_t>(n % 1000000);
    resident.max_tokens = 1;
  }
  SnapshotHeader header{};
  header.published_s = static_cast<double>(n);
  header.running = static_cast<std::int32_t>(residents.size());
  writer.publish(header, residents.data(), residents.size());
  StepRecord step{};
  step.scheduled_s = step.done_s = static_cast<double>(n);
  writer.record_step(step);
}

void readers_never_see_a_torn_snapshot() {
  SnapshotWriter writer(path("torn"), config(), 256, 64);
  std::atomic<bool> done = false;
  std::thread writing([&] {
    for (std::uint64_t n = 1; n <= 100000 && !done; ++n) write_numbered(writer, n);
    done = true;
  });
  const SnapshotReader reader(path("torn"));
  Snapshot snapshot;
  std::uint64_t reads = 0, last = 0;
  while (!done || reads < 100) {
    if (!reader.read(snapshot)) continue;
    const std::uint64_t n = snapshot.header.sequence;
    CHECK(n >= last);
    last = n;
    CHECK(snapshot.header.published_s == static_cast<double>(n));
    CHECK(snapshot.residents.size() == 1 + n % 200);
    for (const Resident& resident : snapshot.residents) CHECK(resident.id == n);
    for (const StepRecord& step : reader.read_steps(n > 8 ? n - 8 : 0))
      CHECK(step.done_s == static_cast<double>(step.sequence));
    ++reads;
    if (reads >= 20000) done = true;
  }
  writing.join();
  CHECK(reads >= 100);
}

void the_ring_keeps_the_newest_steps() {
  SnapshotWriter writer(path("ring"), config(), 16, 8);
  const SnapshotReader reader(path("ring"));
  CHECK(reader.sequence() == 0);
  for (std::uint64_t n = 1; n <= 20; ++n) write_numbered(writer, n % 16);
  const auto steps = reader.read_steps(0);
  CHECK(steps.size() == 8);
  CHECK(steps.front().sequence == 13 && steps.back().sequence == 20);
  CHECK(reader.read_steps(18).size() == 2);
  CHECK(reader.writer_pid() == ::getpid());
}

void waiting_beyond_the_room_is_counted() {
  SnapshotWriter writer(path("room"), config(), 4, 8);
  std::vector<Resident> residents(10);
  for (Resident& resident : residents) {
    resident.prompt_tokens = resident.max_tokens = 1;
    resident.status = static_cast<std::uint8_t>(Status::waiting);
  }
  SnapshotHeader header{};
  header.waiting = 10;
  writer.publish(header, residents.data(), residents.size());
  Snapshot snapshot;
  CHECK(SnapshotReader(path("room")).read(snapshot));
  CHECK(snapshot.header.waiting == 4 && snapshot.header.omitted == 6);
}

void files_of_another_kind_are_refused() {
  const std::string file = path("other");
  {
    std::FILE* out = std::fopen(file.c_str(), "w");
    std::fputs("not a segment", out);
    std::fclose(out);
  }
  CHECK(throws<std::invalid_argument>([&] { SnapshotReader reader(file); }));
  ::unlink(file.c_str());
  CHECK(throws<std::system_error>([&] { SnapshotReader reader(file); }));
}

void closing_unlinks() {
  SnapshotWriter writer(path("closed"), config(), 4, 8);
  CHECK(::access(path("closed").c_str(), F_OK) == 0);
  writer.close();
  CHECK(::access(path("closed").c_str(), F_OK) != 0);
}

constexpr std::int32_t kv_blocks = 100;
constexpr std::uint64_t events_per_request = 6;

// Request n computes content n in the block least recently used, and ends.
std::vector<KvEvent> requests_computed(std::uint64_t first, std::uint64_t last) {
  using enum KvEventKind;
  std::vector<KvEvent> events;
  for (std::uint64_t n = first; n <= last; ++n) {
    const auto block = static_cast<std::int32_t>(1 + (n - 1) % (kv_blocks - 1));
    for (const KvEvent& event :
         {KvEvent{n, 0, want}, KvEvent{n, 0, key}, KvEvent{n, block, take}, KvEvent{n, block, hash},
          KvEvent{n, 0, release}, KvEvent{n, 0, forget}})
      events.push_back(event);
  }
  return events;
}

// The newest contents are cached, the oldest of them next to go.
void check_computed(const KvMirror& mirror, std::uint64_t requests) {
  const std::uint64_t usable = kv_blocks - 1;
  const std::uint64_t oldest = requests > usable ? requests - usable + 1 : 1;
  CHECK(mirror.position() == requests * events_per_request);
  CHECK(mirror.tables() == 0);
  CHECK(static_cast<std::uint64_t>(mirror.cached_free()) == requests - oldest + 1);
  std::int32_t block = mirror.oldest_free();
  for (std::uint64_t n = oldest; n <= requests; ++n) {
    CHECK(mirror.find(n) == block && mirror.block(block).key == n);
    block = mirror.block(block).newer;
  }
  CHECK(block == -1);
}

SchedulerConfig kv_config() {
  SchedulerConfig kv = config();
  kv.num_blocks = kv_blocks;
  return kv;
}

void publish(SnapshotWriter& writer) {
  SnapshotHeader header{};
  header.published_s = 1.0;
  writer.publish(header, nullptr, 0);
}

void readers_follow_the_journal() {
  SnapshotWriter writer(path("journal"), kv_config(), 16, 8, /*kv_journaled=*/true);
  const SnapshotReader reader(path("journal"));
  CHECK(reader.kv_journaled() && reader.kv_position() == 0);
  constexpr std::uint64_t at_least = 40000;  // seven times round the ring
  std::atomic<bool> seen_enough = false, done = false;
  std::thread writing([&] {
    for (std::uint64_t n = 0; n < at_least || !seen_enough;) {
      const std::uint64_t last = n + 1 + n % 50;
      writer.append(requests_computed(n + 1, last));
      publish(writer);
      n = last;
    }
    done = true;
  });
  KvMirror follower(kv_blocks);
  KvMirror remote(kv_blocks);
  int followed = 0, joined = 0, sent = 0;
  Snapshot snapshot;
  for (bool last = false; !last;) {
    last = done;
    if (!reader.read(snapshot)) continue;
    CHECK(snapshot.header.kv_journaled == 1);
    const std::uint64_t position = snapshot.header.kv_position;
    const std::uint64_t computed = position / events_per_request;
    const bool follows = reader.read_journal(follower, position);
    if (follows) check_computed(follower, computed);
    followed += follows;
    KvMirror late(kv_blocks);
    const bool joins = reader.read_journal(late, position);
    if (joins) check_computed(late, computed);
    joined += joins;
    const auto message = reader.read_journal_message(remote.position(), position);
    if (message) {
      CHECK(remote.advance(KvJournalMessage::from_bytes(message->to_bytes())));
      check_computed(remote, computed);
    }
    sent += message.has_value();
    if (last) CHECK(follows && joins && message);
    seen_enough = followed > 40 && joined > 40 && sent > 40;
  }
  writing.join();
  std::printf("journal: %d times followed, %d joined late, %d sent\n", followed, joined, sent);
}

// Whatever the writer was at when it died, an append or a checkpoint, what it had published before
// can be followed and joined.
void a_killed_writer_leaves_a_readable_past() {
  const std::string file = path("killed");
  for (std::uint64_t round = 1; round <= 8; ++round) {
    const pid_t child = ::fork();
    CHECK(child >= 0);
    if (child == 0) {
      SnapshotWriter writer(file, kv_config(), 16, 8, true);
      for (std::uint64_t n = 0;; n += 50) {
        writer.append(requests_computed(n + 1, n + 50));
        publish(writer);
      }
    }
    std::optional<SnapshotReader> reader;
    while (!reader) try {
        reader.emplace(file);
      } catch (const std::system_error&) {
        std::this_thread::yield();
      }
    while (reader->kv_position() < 20000 * round) std::this_thread::yield();
    ::kill(child, SIGKILL);
    CHECK(::waitpid(child, nullptr, 0) == child);
    Snapshot snapshot;
    CHECK(reader->read(snapshot));
    KvMirror late(kv_blocks);
    CHECK(reader->read_journal(late, snapshot.header.kv_position));
    check_computed(late, snapshot.header.kv_position / events_per_request);
    ::unlink(file.c_str());
  }
}

void an_overrun_reader_starts_from_a_checkpoint() {
  SnapshotWriter writer(path("overrun"), kv_config(), 16, 8, true);
  const SnapshotReader reader(path("overrun"));
  KvMirror mirror(kv_blocks);
  writer.append(requests_computed(1, 10));
  CHECK(reader.read_journal(mirror, 10 * events_per_request));
  check_computed(mirror, 10);
  CHECK(!reader.read_journal(mirror, 11 * events_per_request));  // not there yet
  writer.append(requests_computed(11, 50000));                   // longer than the whole ring
  CHECK(reader.kv_position() == 50000 * events_per_request);
  CHECK(reader.read_journal(mirror, 50000 * events_per_request));
  check_computed(mirror, 50000);
  CHECK(reader.read_journal(mirror, 49000 * events_per_request));  // the older of the checkpoints
  check_computed(mirror, 49000);
  CHECK(!reader.read_journal(mirror, 1000 * events_per_request));  // too long ago
  CHECK(!reader.read_journal_message(0, 1000 * events_per_request));
}

void messages_carry_increments_and_what_a_gap_needs() {
  SnapshotWriter writer(path("messages"), kv_config(), 16, 8, true);
  const SnapshotReader reader(path("messages"));
  writer.append(requests_computed(1, 10));
  const auto whole = reader.read_journal_message(0, 10 * events_per_request);
  CHECK(whole && whole->from == 0);
  KvMirror mirror(kv_blocks);
  CHECK(mirror.advance(*whole));
  check_computed(mirror, 10);
  writer.append(requests_computed(11, 12));
  const auto increment =
      reader.read_journal_message(10 * events_per_request, 12 * events_per_request);
  CHECK(increment && increment->from == 10 * events_per_request);
  CHECK(increment->events.size() == 2 * events_per_request);
  CHECK(mirror.advance(*increment));
  check_computed(mirror, 12);
  CHECK(mirror.advance(*increment));  // again: nothing in it is new
  check_computed(mirror, 12);
  KvMirror behind(kv_blocks);
  CHECK(!behind.advance(*increment));
  CHECK(behind.position() == 0);
  writer.append(requests_computed(13, 50000));
  const auto rebuilds =
      reader.read_journal_message(12 * events_per_request, 50000 * events_per_request);
  CHECK(rebuilds && rebuilds->from == 0 && rebuilds->events.size() < 20000);
  CHECK(mirror.advance(*rebuilds));
  check_computed(mirror, 50000);
  KvMirror another(kv_blocks + 1);
  CHECK(throws<std::invalid_argument>([&] { another.advance(*rebuilds); }));
  CHECK(throws<std::invalid_argument>([&] { reader.read_journal(another, 0); }));
}

// More keys of waiting requests than a checkpoint has room for: those who keep up do not need it.
void a_checkpoint_without_room_costs_late_readers_alone() {
  SnapshotWriter writer(path("no-room"), kv_config(), 16, 8, true);
  const SnapshotReader reader(path("no-room"));
  KvMirror follower(kv_blocks);
  for (std::uint64_t n = 1; n <= 2000; ++n) {
    std::vector<KvEvent> waits(60, {n, 0, KvEventKind::key});
    waits[0] = {n, 0, KvEventKind::want};
    writer.append(waits);
    CHECK(reader.read_journal(follower, 60 * n));
  }
  KvMirror late(kv_blocks);
  CHECK(!reader.read_journal(late, reader.kv_position()));
  for (std::uint64_t n = 1; n <= 2000; ++n)
    writer.append(std::vector<KvEvent>{{n, 0, KvEventKind::forget}});
  writer.append(requests_computed(10001, 20000));
  CHECK(reader.read_journal(late, reader.kv_position()));
  CHECK(reader.read_journal(follower, reader.kv_position()));
  CHECK(late.find(20000) == follower.find(20000) && late.find(20000) != -1);
}

void a_contradiction_ends_the_journal() {
  SnapshotWriter writer(path("contradiction"), kv_config(), 16, 8, true);
  const SnapshotReader reader(path("contradiction"));
  const auto journaled = [&] {
    publish(writer);
    Snapshot snapshot;
    CHECK(reader.read(snapshot));
    return snapshot.header.kv_journaled == 1;
  };
  writer.append(requests_computed(1, 10));
  CHECK(journaled());
  CHECK(throws<std::invalid_argument>([&] {
    writer.append(std::vector<KvEvent>{{99, 1, KvEventKind::take}});
    writer.append(std::vector<KvEvent>(128, {98, 0, KvEventKind::want}));
  }));
  CHECK(!journaled());
  writer.append(requests_computed(11, 12));
  CHECK(!journaled());
  KvMirror mirror(kv_blocks);
  CHECK(reader.read_journal(mirror, 10 * events_per_request));  // what was said stays
}

void a_journal_is_kept_where_asked_for() {
  SnapshotWriter writer(path("none"), kv_config(), 16, 8);
  const SnapshotReader reader(path("none"));
  publish(writer);
  Snapshot snapshot;
  CHECK(reader.read(snapshot) && snapshot.header.kv_journaled == 0);
  KvMirror mirror(kv_blocks);
  CHECK(!reader.kv_journaled() && !reader.read_journal(mirror, 0));
  CHECK(!reader.read_journal_message(0, 0));
  CHECK(throws<std::logic_error>([&] { writer.append(requests_computed(1, 1)); }));
  SchedulerConfig uncached = kv_config();
  uncached.enable_prefix_caching = false;
  CHECK(throws<std::invalid_argument>(
      [&] { SnapshotWriter journaled(path("uncached"), uncached, 16, 8, true); }));
}

}  // namespace

int main() {
  readers_never_see_a_torn_snapshot();
  the_ring_keeps_the_newest_steps();
  waiting_beyond_the_room_is_counted();
  files_of_another_kind_are_refused();
  closing_unlinks();
  readers_follow_the_journal();
  a_killed_writer_leaves_a_readable_past();
  an_overrun_reader_starts_from_a_checkpoint();
  messages_carry_increments_and_what_a_gap_needs();
  a_checkpoint_without_room_costs_late_readers_alone();
  a_contradiction_ends_the_journal();
  a_journal_is_kept_where_asked_for();
}
