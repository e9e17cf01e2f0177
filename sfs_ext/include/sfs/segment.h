// A file of shared memory through which one engine publishes snapshots and step records to any
// number of readers on its node. The engine never waits: each slot is under a sequence lock, and
// there are several, so that a slow reader still finds one at rest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

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

struct SegmentLayout;

class SnapshotWriter {
 public:
  // The file appears under `path` whole, replacing an older one. Throws std::system_error.
  SnapshotWriter(std::string path, const SchedulerConfig& config, std::uint32_t max_residents,
                 std::uint32_t max_steps);
  ~SnapshotWriter();
  SnapshotWriter(const SnapshotWriter&) = delete;
  SnapshotWriter& operator=(const SnapshotWriter&) = delete;

  // Fills in the sequence number; waiting residents beyond the segment's room are counted only.
  void publish(SnapshotHeader header, const Resident* residents, std::size_t count);
  void record_step(StepRecord step);
  void close();  // unlinks the file

 private:
  std::string path_;
  Mapping mapping_;
  std::uint64_t published_ = 0;
  std::uint64_t steps_ = 0;
};

class SnapshotReader {
 public:
  // Throws std::system_error, or std::invalid_argument for a file of another kind or version.
  explicit SnapshotReader(const std::string& path);

  std::uint64_t sequence() const;  // newest published; 0: none yet
  std::int32_t writer_pid() const;
  SchedulerConfig config() const;

  // The newest complete snapshot, or false before the first and where the writer outran
  // every attempt. Throws std::invalid_argument if what was read contradicts itself.
  bool read(Snapshot& into) const;

  // Steps with sequence > `after`, as far as the ring still holds them.
  std::vector<StepRecord> read_steps(std::uint64_t after) const;

 private:
  Mapping mapping_;
};

}  // namespace sfs
