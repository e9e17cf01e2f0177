// A file of shared memory through which one engine publishes snapshots, step records and its KV
// journal to any number of readers on its node. The engine never waits: each slot is under a
// sequence lock, and there are several, so that a slow reader still finds one at rest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "sfs/kv_journal.h"
#include "sfs/kv_mirror.h"
#include "sfs/snapshot.h"

namespace sfs {

// A mapped file; unmapped with the object.
class Mapping {
 public:
  Mapping() = default;
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();

  static Mapping create(const std::string& path, std::size_t bytes);
  static Mapping open(const std::string& path);

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

class KvJournalWriter;

// What a file has room for. Kept beside the mapping: a file may change under its reader's eyes.
struct SegmentRoom {
  std::uint32_t residents = 0;
  std::uint32_t steps = 0;
  std::uint64_t journal_events = 0;
};

// With a KV journal another 16.8 MB for 60,000 blocks, 2.1 MB for 5,000 (and 1 MB at least): a
// ring of 8 to 16 events a block, and two checkpoints of half its size each.
class SnapshotWriter {
 public:
  // The file appears under `path` whole, replacing an older one. Throws std::system_error.
  SnapshotWriter(std::string path, const SchedulerConfig& config, std::uint32_t max_residents,
                 std::uint32_t max_steps, bool kv_journaled = false);
  ~SnapshotWriter();
  SnapshotWriter(const SnapshotWriter&) = delete;
  SnapshotWriter& operator=(const SnapshotWriter&) = delete;

  // What happened to the KV blocks since the last call, for the snapshot to be published next.
  // Throws std::logic_error where no journal is kept, std::invalid_argument for events that
  // contradict each other, these or some before them: the journal ends there, later calls do
  // nothing, snapshots say so.
  void append(std::span<const KvEvent> events);
  void end_journal();

  // A snapshot of so many running residents is about to be published: an engine's step has pushed
  // its place out of the processor's caches.
  void fetch(std::size_t count) const;

  // Fills in the sequence number and the journal's position; waiting residents beyond the
  // segment's room are counted only.
  void publish(SnapshotHeader header, const Resident* residents, std::size_t count);
  void record_step(StepRecord step);
  void close();  // unlinks the file

 private:
  std::string path_;
  Mapping mapping_;
  SegmentRoom room_;
  std::unique_ptr<KvJournalWriter> journal_;  // null: none is kept, or it has ended
  std::uint64_t published_ = 0;
  std::uint64_t steps_ = 0;
};

class SnapshotReader {
 public:
  // Throws std::system_error, or std::invalid_argument for a file of another kind or version.
  explicit SnapshotReader(const std::string& path);

  std::uint64_t sequence() const;  // newest published; 0: none yet
  std::int32_t writer_pid() const;
  const SchedulerConfig& config() const { return config_; }

  // The newest complete snapshot, or false before the first and where the writer outran
  // every attempt. Throws std::invalid_argument if what was read contradicts itself.
  bool read(Snapshot& into) const;

  // Steps with sequence > `after`, as far as the ring still holds them.
  std::vector<StepRecord> read_steps(std::uint64_t after) const;

  bool kv_journaled() const;
  std::uint64_t kv_position() const;  // events appended so far; 0 without a journal

  // Brings `mirror` to exactly `up_to`, the kv_position of a snapshot: from where it stands, or
  // from a checkpoint where the ring has moved past that. False if it cannot: no journal, a
  // position too long ago, a checkpoint that found no room; the mirror is then of use to later
  // calls alone. Throws std::invalid_argument for another engine's mirror, or for a journal that
  // contradicts itself.
  bool read_journal(KvMirror& mirror, std::uint64_t up_to) const;

  // The events after `after` up to `up_to`, or all it takes to rebuild the state at `up_to` where
  // `after` is 0 or too long ago; nothing where that cannot be had either.
  std::optional<KvJournalMessage> read_journal_message(std::uint64_t after,
                                                       std::uint64_t up_to) const;

 private:
  Mapping mapping_;
  SegmentRoom room_;
  SchedulerConfig config_;
};

}  // namespace sfs
