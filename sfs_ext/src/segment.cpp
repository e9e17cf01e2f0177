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

namespace sfs {

struct SegmentLayout {
  char magic[8];
  std::uint32_t layout;
  std::int32_t writer_pid;
  std::uint32_t max_residents;
  std::uint32_t max_steps;
  SchedulerConfig config;
  alignas(64) std::uint64_t newest_snapshot;
  std::uint64_t newest_step;
};

namespace {

constexpr char segment_magic[8] = {'F', 'O', 'R', 'E', 'S', 'E', 'G', 'M'};
constexpr std::size_t snapshot_slots = 4;
constexpr int read_attempts = 64;

using Word = std::uint64_t;
static_assert(std::atomic_ref<Word>::is_always_lock_free);
static_assert(sizeof(SegmentLayout) % sizeof(Word) == 0);
static_assert(sizeof(SnapshotHeader) % sizeof(Word) == 0);
static_assert(sizeof(Resident) % sizeof(Word) == 0);
static_assert(sizeof(StepRecord) % sizeof(Word) == 0);

std::size_t snapshot_slot_bytes(std::uint32_t max_residents) {
  return sizeof(Word) + sizeof(SnapshotHeader) + std::size_t{max_residents} * sizeof(Resident);
}
constexpr std::size_t step_slot_bytes = sizeof(Word) + sizeof(StepRecord);

std::size_t segment_bytes(std::uint32_t max_residents, std::uint32_t max_steps) {
  return sizeof(SegmentLayout) + snapshot_slots * snapshot_slot_bytes(max_residents) +
         max_steps * step_slot_bytes;
}

SegmentLayout& layout_of(const Mapping& mapping) {
  return *reinterpret_cast<SegmentLayout*>(mapping.data());
}
std::byte* snapshot_slot(const Mapping& mapping, std::uint64_t sequence) {
  return mapping.data() + sizeof(SegmentLayout) +
         (sequence % snapshot_slots) * snapshot_slot_bytes(layout_of(mapping).max_residents);
}
std::byte* step_slot(const Mapping& mapping, std::uint64_t sequence) {
  const SegmentLayout& layout = layout_of(mapping);
  return mapping.data() + sizeof(SegmentLayout) +
         snapshot_slots * snapshot_slot_bytes(layout.max_residents) +
         (sequence % layout.max_steps) * step_slot_bytes;
}

std::atomic_ref<Word> word(std::byte* at) {
  return std::atomic_ref<Word>(*reinterpret_cast<Word*>(at));
}

// Word by word, ordered: a word read early cannot hide a version read late. On x86 these are
// plain moves.
void store_words(std::byte* to, const void* from, std::size_t bytes) {
  const auto* source = static_cast<const std::byte*>(from);
  for (std::size_t i = 0; i < bytes; i += sizeof(Word)) {
    Word value;
    std::memcpy(&value, source + i, sizeof value);
    word(to + i).store(value, std::memory_order_release);
  }
}
void load_words(void* to, std::byte* from, std::size_t bytes) {
  auto* target = static_cast<std::byte*>(to);
  for (std::size_t i = 0; i < bytes; i += sizeof(Word)) {
    const Word value = word(from + i).load(std::memory_order_acquire);
    std::memcpy(target + i, &value, sizeof value);
  }
}

// The first word of a slot is its version: odd while the slot is being written.
class SlotWrite {
 public:
  explicit SlotWrite(std::byte* slot) : version_(word(slot)), even_(version_.load() & ~Word{1}) {
    version_.store(even_ + 1, std::memory_order_relaxed);
  }
  ~SlotWrite() { version_.store(even_ + 2, std::memory_order_release); }

 private:
  std::atomic_ref<Word> version_;
  Word even_;
};

template <class Read>
bool read_slot(std::byte* slot, Read read) {
  const auto version = word(slot);
  const Word before = version.load(std::memory_order_acquire);
  if (before % 2 != 0 || !read(slot + sizeof(Word))) return false;
  return version.load(std::memory_order_acquire) == before;
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

std::byte* map(const File& file, std::size_t bytes, const std::string& path) {
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.descriptor(), 0);
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
  // Reserved now: a full /dev/shm is an error here, not a SIGBUS at the first write.
  if (const int error = ::posix_fallocate(file.descriptor(), 0, static_cast<off_t>(bytes))) {
    ::unlink(path.c_str());
    errno = error;
    fail("cannot reserve " + std::to_string(bytes) + " bytes for", path);
  }
  Mapping mapping;
  mapping.data_ = map(file, bytes, path);
  mapping.size_ = bytes;
  return mapping;
}

Mapping Mapping::open(const std::string& path) {
  const File file(path, O_RDWR | O_CLOEXEC);
  struct stat status{};
  if (::fstat(file.descriptor(), &status) != 0) fail("cannot stat", path);
  Mapping mapping;
  if (status.st_size == 0) return mapping;
  mapping.data_ = map(file, static_cast<std::size_t>(status.st_size), path);
  mapping.size_ = static_cast<std::size_t>(status.st_size);
  return mapping;
}

SnapshotWriter::SnapshotWriter(std::string path, const SchedulerConfig& config,
                               std::uint32_t max_residents, std::uint32_t max_steps)
    : path_(std::move(path)) {
  config.validate();
  if (max_residents < 1 || max_steps < 1)
    throw std::invalid_argument("snapshot writer: max_residents and max_steps must be >= 1");
  const std::string temporary = path_ + ".new-" + std::to_string(::getpid());
  mapping_ = Mapping::create(temporary, segment_bytes(max_residents, max_steps));
  SegmentLayout& layout = layout_of(mapping_);
  std::memcpy(layout.magic, segment_magic, sizeof layout.magic);
  layout.layout = layout_version;
  layout.writer_pid = static_cast<std::int32_t>(::getpid());
  layout.max_residents = max_residents;
  layout.max_steps = max_steps;
  layout.config = config;
  if (::rename(temporary.c_str(), path_.c_str()) != 0) {
    const int error = errno;
    ::unlink(temporary.c_str());
    errno = error;
    fail("cannot create", path_);
  }
}

SnapshotWriter::~SnapshotWriter() { close(); }

void SnapshotWriter::close() {
  if (mapping_.data() == nullptr) return;
  ::unlink(path_.c_str());
  mapping_ = Mapping();
}

void SnapshotWriter::publish(SnapshotHeader header, const Resident* residents, std::size_t count) {
  if (mapping_.data() == nullptr) throw std::logic_error("snapshot writer: closed");
  SegmentLayout& layout = layout_of(mapping_);
  const std::size_t kept = std::min<std::size_t>(count, layout.max_residents);
  const auto omitted = static_cast<std::int32_t>(count - kept);
  if (omitted > header.waiting)
    throw std::invalid_argument("snapshot writer: more running requests than max_residents");
  header.omitted += omitted;
  header.waiting -= omitted;
  header.sequence = ++published_;
  {
    std::byte* slot = snapshot_slot(mapping_, header.sequence);
    const SlotWrite write(slot);
    store_words(slot + sizeof(Word), &header, sizeof header);
    store_words(slot + sizeof(Word) + sizeof header, residents, kept * sizeof(Resident));
  }
  std::atomic_ref(layout.newest_snapshot).store(header.sequence, std::memory_order_release);
}

void SnapshotWriter::record_step(StepRecord step) {
  if (mapping_.data() == nullptr) throw std::logic_error("snapshot writer: closed");
  step.sequence = ++steps_;
  {
    std::byte* slot = step_slot(mapping_, step.sequence);
    const SlotWrite write(slot);
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
  if (layout.max_residents < 1 || layout.max_steps < 1 ||
      segment_bytes(layout.max_residents, layout.max_steps) != mapping_.size())
    refuse("its size contradicts its header");
  layout.config.validate();
}

std::uint64_t SnapshotReader::sequence() const {
  return std::atomic_ref(layout_of(mapping_).newest_snapshot).load(std::memory_order_acquire);
}

std::int32_t SnapshotReader::writer_pid() const { return layout_of(mapping_).writer_pid; }

SchedulerConfig SnapshotReader::config() const { return layout_of(mapping_).config; }

bool SnapshotReader::read(Snapshot& into) const {
  const std::uint32_t room = layout_of(mapping_).max_residents;
  for (int attempt = 0; attempt < read_attempts; ++attempt) {
    const std::uint64_t newest = sequence();
    if (newest == 0) return false;
    const bool complete = read_slot(snapshot_slot(mapping_, newest), [&](std::byte* data) {
      load_words(&into.header, data, sizeof into.header);
      const auto running = into.header.running, waiting = into.header.waiting;
      if (running < 0 || waiting < 0 ||
          static_cast<std::uint64_t>(running) + static_cast<std::uint64_t>(waiting) > room)
        return false;
      into.residents.resize(static_cast<std::size_t>(running + waiting));
      load_words(into.residents.data(), data + sizeof into.header,
                 into.residents.size() * sizeof(Resident));
      return true;
    });
    if (!complete) continue;
    into.config = config();
    into.validate();
    return true;
  }
  return false;
}

std::vector<StepRecord> SnapshotReader::read_steps(std::uint64_t after) const {
  SegmentLayout& layout = layout_of(mapping_);
  const std::uint64_t newest = std::atomic_ref(layout.newest_step).load(std::memory_order_acquire);
  const std::uint64_t oldest = newest > layout.max_steps ? newest - layout.max_steps + 1 : 1;
  std::vector<StepRecord> steps;
  for (std::uint64_t i = std::max(after + 1, oldest); i <= newest; ++i) {
    StepRecord step;
    const bool complete = read_slot(step_slot(mapping_, i), [&](std::byte* data) {
      load_words(&step, data, sizeof step);
      return true;
    });
    if (complete && step.sequence == i) steps.push_back(step);
  }
  return steps;
}

}  // namespace sfs
