#include "sfs/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "kv_ring.h"
#include "sequence_lock.h"

namespace sfs {

struct SegmentLayout {
  char magic[8];
  std::uint32_t layout;
  std::int32_t writer_pid;
  std::uint32_t max_residents;
  std::uint32_t max_steps;
  std::uint64_t journal_events;  // room in the ring of KV events; 0: no journal is kept
  SchedulerConfig config;
  alignas(64) std::uint64_t newest_snapshot;
  std::uint64_t newest_step;
};

namespace {

constexpr char segment_magic[8] = {'F', 'O', 'R', 'E', 'S', 'E', 'G', 'M'};
constexpr std::size_t snapshot_slots = 4;
constexpr int read_attempts = 64;
constexpr int journal_attempts = 4;
constexpr std::size_t line_bytes = 64;
constexpr std::size_t most_fetched_bytes = 4096;  // the processor foresees the rest

static_assert(sizeof(SegmentLayout) % sizeof(Word) == 0);
static_assert(sizeof(SnapshotHeader) % sizeof(Word) == 0);
static_assert(sizeof(Resident) % sizeof(Word) == 0);
static_assert(sizeof(StepRecord) % sizeof(Word) == 0);

std::size_t snapshot_slot_bytes(std::uint32_t max_residents) {
  return sizeof(Word) + sizeof(SnapshotHeader) + std::size_t{max_residents} * sizeof(Resident);
}
constexpr std::size_t step_slot_bytes = sizeof(Word) + sizeof(StepRecord);

// Snapshots, steps, journal: where the last begins, and with a journal where it all ends.
std::size_t journal_offset(std::uint32_t max_residents, std::uint32_t max_steps) {
  const std::size_t end = sizeof(SegmentLayout) +
                          snapshot_slots * snapshot_slot_bytes(max_residents) +
                          max_steps * step_slot_bytes;
  return (end + line_bytes - 1) / line_bytes * line_bytes;
}

// What a file may claim at most: a reader makes room for it.
constexpr std::uint32_t largest_room = 1U << 20;

SegmentLayout& layout_of(const Mapping& mapping) {
  return *reinterpret_cast<SegmentLayout*>(mapping.data());
}
KvRing journal_of(const Mapping& mapping, const SegmentRoom& room) {
  return {mapping.data() + journal_offset(room.residents, room.steps), room.journal_events};
}
std::byte* snapshot_slot(const Mapping& mapping, const SegmentRoom& room, std::uint64_t sequence) {
  return mapping.data() + sizeof(SegmentLayout) +
         (sequence % snapshot_slots) * snapshot_slot_bytes(room.residents);
}
std::byte* step_slot(const Mapping& mapping, const SegmentRoom& room, std::uint64_t sequence) {
  return mapping.data() + sizeof(SegmentLayout) +
         snapshot_slots * snapshot_slot_bytes(room.residents) +
         (sequence % room.steps) * step_slot_bytes;
}

[[noreturn]] void fail(const std::string& what, const std::string& path) {
  throw std::system_error(errno, std::generic_category(), what + " " + path);
}

class File {
 public:
  File(const std::string& path, int flags) : descriptor_(::open(path.c_str(), flags, 0600)) {
    if (descriptor_ < 0) fail("cannot open", path);
  }
  ~File() { ::close(descriptor_); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int descriptor() const { return descriptor_; }

 private:
  int descriptor_;
};

// Removes what was begun, unless it was finished.
class Unfinished {
 public:
  explicit Unfinished(std::string path) : path_(std::move(path)) {}
  ~Unfinished() {
    const int error = errno;
    if (!path_.empty()) ::unlink(path_.c_str());
    errno = error;
  }
  Unfinished(const Unfinished&) = delete;
  Unfinished& operator=(const Unfinished&) = delete;
  void finished() { path_.clear(); }

 private:
  std::string path_;
};

std::byte* map(const File& file, std::size_t bytes, const std::string& path, int flags) {
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, file.descriptor(), 0);
  if (data == MAP_FAILED) fail("cannot map", path);
  return static_cast<std::byte*>(data);
}

}  // namespace

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

Mapping::~Mapping() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

Mapping Mapping::create(const std::string& path, std::size_t bytes) {
  const File file(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC);
  Unfinished unfinished(path);
  // Reserved now: a full /dev/shm is an error here, not a SIGBUS at the first write.
  errno = ::posix_fallocate(file.descriptor(), 0, static_cast<off_t>(bytes));
  if (errno != 0) fail("cannot reserve " + std::to_string(bytes) + " bytes for", path);
  Mapping mapping;
  // The engine pays for its pages now, not step by step.
  mapping.data_ = map(file, bytes, path, MAP_SHARED | MAP_POPULATE);
  mapping.size_ = bytes;
  unfinished.finished();
  return mapping;
}

Mapping Mapping::open(const std::string& path) {
  const File file(path, O_RDWR | O_CLOEXEC);
  struct stat status{};
  if (::fstat(file.descriptor(), &status) != 0) fail("cannot stat", path);
  Mapping mapping;
  if (status.st_size == 0) return mapping;
  mapping.data_ = map(file, static_cast<std::size_t>(status.st_size), path, MAP_SHARED);
  mapping.size_ = static_cast<std::size_t>(status.st_size);
  return mapping;
}

SnapshotWriter::SnapshotWriter(std::string path, const SchedulerConfig& config,
                               std::uint32_t max_residents, std::uint32_t max_steps,
                               bool kv_journaled)
    : path_(std::move(path)) {
  config.validate();
  if (max_residents < 1 || max_residents > largest_room || max_steps < 1)
    throw std::invalid_argument("snapshot writer: max_residents must be within 1 and " +
                                std::to_string(largest_room) + ", max_steps >= 1");
  if (kv_journaled && !config.enable_prefix_caching)
    throw std::invalid_argument("snapshot writer: a KV journal needs enable_prefix_caching");
  const std::uint64_t journal_events = kv_journaled ? KvRing::events_for(config.num_blocks) : 0;
  room_ = {.residents = max_residents, .steps = max_steps, .journal_events = journal_events};
  const std::string temporary = path_ + ".new-" + std::to_string(::getpid());
  mapping_ = Mapping::create(
      temporary, journal_offset(max_residents, max_steps) + KvRing::bytes_for(journal_events));
  Unfinished unfinished(temporary);
  SegmentLayout& layout = layout_of(mapping_);
  std::memcpy(layout.magic, segment_magic, sizeof layout.magic);
  layout.layout = layout_version;
  layout.writer_pid = static_cast<std::int32_t>(::getpid());
  layout.max_residents = max_residents;
  layout.max_steps = max_steps;
  layout.journal_events = journal_events;
  layout.config = config;
  if (kv_journaled)
    journal_ = std::make_unique<KvJournalWriter>(journal_of(mapping_, room_), config.num_blocks);
  if (::rename(temporary.c_str(), path_.c_str()) != 0) fail("cannot create", path_);
  unfinished.finished();
}

SnapshotWriter::~SnapshotWriter() { close(); }

void SnapshotWriter::close() {
  if (mapping_.data() == nullptr) return;
  ::unlink(path_.c_str());
  mapping_ = Mapping();
}

void SnapshotWriter::append(std::span<const KvEvent> events) {
  if (mapping_.data() == nullptr) throw std::logic_error("snapshot writer: closed");
  if (room_.journal_events == 0)
    throw std::logic_error("snapshot writer: made without a KV journal");
  if (!journal_) return;
  try {
    journal_->append(events);
  } catch (const std::invalid_argument&) {
    journal_.reset();
    throw;
  }
}

void SnapshotWriter::end_journal() { journal_.reset(); }

void SnapshotWriter::publish(SnapshotHeader header, const Resident* residents, std::size_t count) {
  if (mapping_.data() == nullptr) throw std::logic_error("snapshot writer: closed");
  SegmentLayout& layout = layout_of(mapping_);
  const std::size_t kept = std::min<std::size_t>(count, room_.residents);
  const auto omitted = static_cast<std::int32_t>(count - kept);
  if (omitted > header.waiting)
    throw std::invalid_argument("snapshot writer: more running requests than max_residents");
  header.omitted += omitted;
  header.waiting -= omitted;
  header.sequence = ++published_;
  header.kv_journaled = journal_ != nullptr;
  header.kv_position = journal_ ? journal_->position() : 0;
  {
    std::byte* slot = snapshot_slot(mapping_, room_, header.sequence);
    const SlotWrite write(slot, header.sequence);
    store_words(slot + sizeof(Word), &header, sizeof header);
    store_words(slot + sizeof(Word) + sizeof header, residents, kept * sizeof(Resident));
  }
  std::atomic_ref(layout.newest_snapshot).store(header.sequence, std::memory_order_release);
}

void SnapshotWriter::fetch(std::size_t count) const {
  if (mapping_.data() == nullptr) return;
  const std::byte* slot = snapshot_slot(mapping_, room_, published_ + 1);
  const std::size_t bytes = sizeof(Word) + sizeof(SnapshotHeader) +
                            std::min<std::size_t>(count, room_.residents) * sizeof(Resident);
  for (std::size_t i = 0; i < std::min(bytes, most_fetched_bytes); i += line_bytes)
    __builtin_prefetch(slot + i, 1);
}

void SnapshotWriter::record_step(StepRecord step) {
  if (mapping_.data() == nullptr) throw std::logic_error("snapshot writer: closed");
  step.sequence = ++steps_;
  {
    std::byte* slot = step_slot(mapping_, room_, step.sequence);
    const SlotWrite write(slot, step.sequence);
    store_words(slot + sizeof(Word), &step, sizeof step);
  }
  std::atomic_ref(layout_of(mapping_).newest_step).store(step.sequence, std::memory_order_release);
}

SnapshotReader::SnapshotReader(const std::string& path) : mapping_(Mapping::open(path)) {
  const auto refuse = [&path](const char* why) {
    throw std::invalid_argument("snapshot file " + path + ": " + why);
  };
  if (mapping_.size() < sizeof(SegmentLayout)) refuse("too short to be one");
  const SegmentLayout& layout = layout_of(mapping_);
  if (std::memcmp(layout.magic, segment_magic, sizeof segment_magic) != 0) refuse("not one");
  if (layout.layout != layout_version) refuse("another layout version");
  config_ = layout.config;
  config_.validate();
  room_ = {.residents = layout.max_residents,
           .steps = layout.max_steps,
           .journal_events = layout.journal_events};
  const std::uint64_t events = room_.journal_events;
  if (room_.residents < 1 || room_.residents > largest_room || room_.steps < 1 ||
      (events != 0 && events != KvRing::events_for(config_.num_blocks)) ||
      journal_offset(room_.residents, room_.steps) + KvRing::bytes_for(events) != mapping_.size())
    refuse("its size contradicts its header");
}

std::uint64_t SnapshotReader::sequence() const {
  return std::atomic_ref(layout_of(mapping_).newest_snapshot).load(std::memory_order_acquire);
}

std::int32_t SnapshotReader::writer_pid() const { return layout_of(mapping_).writer_pid; }

bool SnapshotReader::read(Snapshot& into) const {
  for (int attempt = 0; attempt < read_attempts; ++attempt) {
    const std::uint64_t newest = sequence();
    if (newest == 0) return false;
    const bool complete = read_slot(snapshot_slot(mapping_, room_, newest), [&](std::byte* data) {
      load_words(&into.header, data, sizeof into.header);
      const auto running = into.header.running, waiting = into.header.waiting;
      if (running < 0 || waiting < 0 ||
          static_cast<std::uint64_t>(running) + static_cast<std::uint64_t>(waiting) >
              room_.residents)
        return false;
      into.residents.resize(static_cast<std::size_t>(running + waiting));
      load_words(into.residents.data(), data + sizeof into.header,
                 into.residents.size() * sizeof(Resident));
      return true;
    });
    if (!complete) continue;
    into.config = config_;
    into.validate();
    return true;
  }
  return false;
}

std::vector<StepRecord> SnapshotReader::read_steps(std::uint64_t after) const {
  const std::uint64_t newest =
      std::atomic_ref(layout_of(mapping_).newest_step).load(std::memory_order_acquire);
  const std::uint64_t before_oldest = newest > room_.steps ? newest - room_.steps : 0;
  std::vector<StepRecord> steps;
  for (std::uint64_t i = std::max(after, before_oldest); i < newest;) {
    ++i;
    StepRecord step;
    const bool complete = read_slot(step_slot(mapping_, room_, i), [&](std::byte* data) {
      load_words(&step, data, sizeof step);
      return true;
    });
    if (complete && step.sequence == i) steps.push_back(step);
  }
  return steps;
}

bool SnapshotReader::kv_journaled() const { return room_.journal_events > 0; }

std::uint64_t SnapshotReader::kv_position() const {
  return kv_journaled() ? journal_of(mapping_, room_).position() : 0;
}

bool SnapshotReader::read_journal(KvMirror& mirror, std::uint64_t up_to) const {
  static thread_local std::vector<KvEvent> events;
  static thread_local KvRing::Checkpoint checkpoint;
  if (mirror.num_blocks() != config_.num_blocks)
    throw std::invalid_argument("KV journal: a mirror of " + std::to_string(mirror.num_blocks()) +
                                " blocks, not of the engine's " +
                                std::to_string(config_.num_blocks));
  if (!kv_journaled()) return false;
  const KvRing journal = journal_of(mapping_, room_);
  for (int attempt = 0; attempt < journal_attempts; ++attempt) {
    events.clear();
    if (journal.read(mirror.position(), up_to, events)) {
      mirror.apply(events);
      return true;
    }
    if (!journal.read_checkpoint(up_to, checkpoint)) continue;
    if (checkpoint.position == mirror.position()) return false;
    mirror = KvMirror::rebuild(mirror.num_blocks(), checkpoint.position, checkpoint.events);
  }
  return false;
}

std::optional<KvJournalMessage> SnapshotReader::read_journal_message(std::uint64_t after,
                                                                     std::uint64_t up_to) const {
  if (!kv_journaled()) return std::nullopt;
  const KvRing journal = journal_of(mapping_, room_);
  KvJournalMessage message{
      .num_blocks = config_.num_blocks, .from = after, .to = up_to, .events = {}};
  if (after > 0 && journal.read(after, up_to, message.events)) return message;
  message.from = 0;
  KvRing::Checkpoint checkpoint;
  for (int attempt = 0; attempt < journal_attempts; ++attempt) {
    if (!journal.read_checkpoint(up_to, checkpoint)) continue;
    message.events = std::move(checkpoint.events);
    if (journal.read(checkpoint.position, up_to, message.events)) return message;
  }
  return std::nullopt;
}

}  // namespace sfs
