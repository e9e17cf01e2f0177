// The newest stretch of a KV journal in shared memory, and two checkpoints that are written in
// turn: who comes late or falls behind starts from the newest one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "sfs/kv_journal.h"
#include "sfs/kv_mirror.h"

namespace sfs {

// A view of the memory; whoever made it keeps that mapped.
class KvRing {
 public:
  // Events that the ring holds: two checkpoints of a pool all of whose blocks are hashed and in
  // tables, and as much again for keys of requests that wait. A power of two.
  static std::uint64_t events_for(std::int32_t num_blocks);
  static std::size_t bytes_for(std::uint64_t events);

  KvRing() = default;
  KvRing(std::byte* memory, std::uint64_t events) : memory_(memory), events_(events) {}

  bool exists() const { return events_ > 0; }
  std::uint64_t events() const { return events_; }
  std::uint64_t checkpoint_events() const { return events_ / 2; }

  // Events appended so far.
  std::uint64_t position() const;

  // Behind the `from` events so far; at most events() at a time.
  void append(std::uint64_t from, std::span<const KvEvent> events);
  // False, and the one before stays, if it has more than checkpoint_events().
  bool write_checkpoint(std::uint64_t position, std::span<const KvEvent> events);

  // Appends events `from` to `to` of the journal to `into`; false, and nothing added, where they
  // are not there yet or no longer.
  bool read(std::uint64_t from, std::uint64_t to, std::vector<KvEvent>& into) const;

  // The newest checkpoint up to a position; that of position 0, before the first, is empty.
  struct Checkpoint {
    std::uint64_t position = 0;
    std::vector<KvEvent> events;
  };
  bool read_checkpoint(std::uint64_t up_to, Checkpoint& into) const;

 private:
  std::byte* checkpoint(std::uint64_t index) const;

  std::byte* memory_ = nullptr;
  std::uint64_t events_ = 0;
  std::uint64_t checkpoints_ = 0;
};

// The engine's end of it: what is appended is checked, and kept in a mirror for the checkpoints.
class KvJournalWriter {
 public:
  KvJournalWriter(KvRing ring, std::int32_t num_blocks)
      : ring_(ring), mirror_(num_blocks), next_checkpoint_(ring.events() / 2) {}

  // Throws std::invalid_argument as KvMirror::apply does, for these events or some before them; it
  // cannot go on then.
  void append(std::span<const KvEvent> events);

  std::uint64_t position() const { return position_; }

 private:
  KvRing ring_;
  std::uint64_t position_ = 0;  // as the ring has it, which has left the processor's caches
  KvMirror mirror_;
  std::vector<KvEvent> unmirrored_;  // appended, and not yet applied to the mirror
  std::uint64_t next_checkpoint_;
};

}  // namespace sfs
