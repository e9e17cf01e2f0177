// Snapshot files that no engine wrote, or that change under their reader's eyes.
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <limits>
#include <stdexcept>
#include <string>
#include <system_error>

#include "check.h"
#include "fuzz_engine.h"
#include "fuzz_target.h"
#include "sfs/engine_state.h"
#include "sfs/segment.h"

using namespace sfs;

namespace {

struct Change {
  std::uint64_t at;
  std::uint64_t word;
};

struct Input {
  std::uint64_t size = 0;  // of the file, zeros behind its bytes
  std::uint64_t steps_after = 0;
  std::vector<Change> changes;  // once the reader has opened it
  Bytes file;

  static Input from(const std::uint8_t* data, std::size_t bytes) {
    InputReader reader(data, bytes);
    Input input;
    input.size = reader.take<std::uint64_t>();
    input.steps_after = reader.take<std::uint64_t>();
    input.changes = reader.take_many<Change>(reader.take<std::uint64_t>());
    input.file = reader.take_many<std::uint8_t>(reader.left());
    return input;
  }
  Bytes bytes() const {
    const std::uint64_t count = changes.size();
    Bytes all;
    append(all, &size, 1);
    append(all, &steps_after, 1);
    append(all, &count, 1);
    append(all, changes.data(), changes.size());
    append(all, file.data(), file.size());
    return all;
  }
};

// The file's head: magic, layout and process, its sizes, the config, and on the next cache line the
// numbers of the newest snapshot and step.
constexpr std::size_t max_residents_at = 16;
constexpr std::size_t max_steps_at = 20;
constexpr std::size_t journal_events_at = 24;
constexpr std::size_t newest_at = 128;
constexpr std::size_t head_bytes = 192;
constexpr std::size_t snapshot_slots = 4;
constexpr std::int32_t max_mirrored_blocks = 1 << 14;
constexpr std::uint64_t largest_file = std::uint64_t{1} << 40;

class MemoryFile {
 public:
  MemoryFile() : descriptor_(::memfd_create("segment", MFD_CLOEXEC)) { CHECK(descriptor_ >= 0); }
  ~MemoryFile() { ::close(descriptor_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  std::string path() const { return "/proc/self/fd/" + std::to_string(descriptor_); }
  void resize(std::uint64_t size) const {
    CHECK(::ftruncate(descriptor_, static_cast<off_t>(size)) == 0);
  }
  void write(const void* from, std::size_t bytes, std::uint64_t at) const {
    CHECK(::pwrite(descriptor_, from, bytes, static_cast<off_t>(at)) ==
          static_cast<ssize_t>(bytes));
  }

 private:
  int descriptor_;
};

void read_all(const SnapshotReader& reader, const Input& input) {
  Snapshot snapshot;
  try {
    if (reader.read(snapshot)) snapshot.validate();
  } catch (const std::invalid_argument&) {
  }
  for (const StepRecord& step : reader.read_steps(input.steps_after))
    CHECK(step.sequence > input.steps_after);
  const std::uint64_t position = reader.kv_position();
  for (const std::uint64_t up_to : {position, input.steps_after}) {
    try {
      KvMirror mirror(std::min(reader.config().num_blocks, max_mirrored_blocks));
      reader.read_journal(mirror, up_to);
    } catch (const std::invalid_argument&) {
    }
    if (const auto message = reader.read_journal_message(input.steps_after, up_to))
      CHECK(message->to == up_to);
  }
  reader.sequence();
  reader.writer_pid();
  reader.config();
}

}  // namespace

Bytes seed_input(Dice& dice) {
  const std::string path = "/dev/shm/foretoken-test-" + std::to_string(::getpid()) + "-fuzz";
  RandomEngine engine(dice, /*prefix_caching=*/dice.coin());
  const bool journaled = engine.config.enable_prefix_caching && dice.coin();
  std::vector<KvEvent> journal;
  if (journaled) engine.loop.scheduler.record_to(&journal);
  SnapshotWriter writer(path, engine.config, 64, static_cast<std::uint32_t>(dice.from(1, 8)),
                        journaled);
  Snapshot snapshot;
  for (int snapshots = dice.from(0, 6); snapshots > 0; --snapshots) {
    engine.run(dice, dice.from(1, 30));
    if (journaled) writer.append(journal);
    journal.clear();
    capture(engine.loop, engine.now_s, snapshot);
    writer.publish(snapshot.header, snapshot.residents.data(), snapshot.residents.size());
    StepRecord step{};
    step.done_s = engine.now_s;
    writer.record_step(step);
  }
  const Mapping mapping = Mapping::open(path);
  Input input;
  input.size = mapping.size();
  append(input.file, mapping.data(), mapping.size());
  while (input.file.size() > head_bytes && input.file.back() == 0) input.file.pop_back();
  return input.bytes();
}

void mutate(Bytes& bytes, Dice& dice) {
  Input input = Input::from(bytes.data(), bytes.size());
  if (input.file.size() < head_bytes) return;
  // Where a wrong word hurts: the head, the version and header of a slot, anywhere.
  std::uint32_t room;
  std::memcpy(&room, input.file.data() + max_residents_at, sizeof room);
  const std::size_t slot_bytes = 8 + sizeof(SnapshotHeader) + room * sizeof(Resident);
  const std::array places{
      dice.bits() % head_bytes,
      head_bytes + dice.bits() % snapshot_slots * slot_bytes + dice.bits() % 128,
      newest_at + 8 * static_cast<std::size_t>(dice.from(0, 1)),
      max_residents_at,
      max_steps_at,
      journal_events_at,
      dice.bits() % input.file.size()};
  const std::size_t at = std::min(dice.one_of(places) / 4 * 4, input.file.size() - 8);
  Bytes word(input.file.begin() + static_cast<std::ptrdiff_t>(at),
             input.file.begin() + static_cast<std::ptrdiff_t>(at) + 8);
  if (dice.coin())
    change_number<std::int32_t>(word.data(), dice);
  else
    change_number<std::uint64_t>(word.data(), dice);
  switch (dice.from(0, 5)) {
    case 0:
      input.steps_after = hostile(input.steps_after, dice);
      break;
    case 1: {  // sizes that agree with each other, however large
      room = hostile(room, dice);
      std::memcpy(input.file.data() + max_residents_at, &room, sizeof room);
      input.size +=
          snapshot_slots * (8 + sizeof(SnapshotHeader) + room * sizeof(Resident) - slot_bytes);
      break;
    }
    case 2:
    case 3: {
      Change change{.at = at, .word = 0};
      std::memcpy(&change.word, word.data(), sizeof change.word);
      input.changes.push_back(change);
      break;
    }
    default:
      std::copy(word.begin(), word.end(), input.file.begin() + static_cast<std::ptrdiff_t>(at));
  }
  bytes = input.bytes();
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const Input input = Input::from(data, size);
  if (input.size > largest_file) return 0;
  const MemoryFile file;
  file.write(input.file.data(), input.file.size(), 0);
  file.resize(input.size);
  try {
    const SnapshotReader reader(file.path());
    read_all(reader, input);
    for (const Change& change : input.changes) {
      if (change.at > input.size || input.size - change.at < sizeof change.word) continue;
      file.write(&change.word, sizeof change.word, change.at);
      read_all(reader, input);
    }
  } catch (const std::invalid_argument&) {
  } catch (const std::system_error&) {
  }
  return 0;
}
