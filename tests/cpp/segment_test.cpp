// A writer at full speed and its readers: no torn snapshot, no stalled reader.
#include "sfs/segment.h"

#include <unistd.h>

#include <atomic>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>

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

}  // namespace

int main() {
  readers_never_see_a_torn_snapshot();
  the_ring_keeps_the_newest_steps();
  waiting_beyond_the_room_is_counted();
  files_of_another_kind_are_refused();
  closing_unlinks();
}
