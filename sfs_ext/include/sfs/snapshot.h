// The layout of an engine's published state, defined here once: shared memory, messages between
// nodes and numpy all use these structs.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "sfs/batch_time.h"
#include "sfs/kv_journal.h"
#include "sfs/request.h"
#include "sfs/scheduler_config.h"

namespace sfs {

inline constexpr std::uint32_t layout_version = 2;
inline constexpr std::size_t max_in_flight = 2;

// An engine whose state no step has changed says so again this often: silence means trouble.
inline constexpr double heartbeat_s = 0.25;

// One request the engine holds, right after a step was scheduled.
struct Resident {
  std::uint64_t id;
  double arrival_s;  // Unix time
  std::int32_t prompt_tokens;
  std::int32_t output_tokens;    // known on the host
  std::int32_t computed_tokens;  // batches in flight included
  std::int32_t placeholders;
  std::int32_t max_tokens;
  float predicted_output_tokens;  // 0: unknown
  std::int32_t priority;
  std::int32_t blocks;
  std::int32_t stale_tokens;
  std::int32_t in_flight_tokens[max_in_flight];  // oldest batch first
  std::uint8_t in_flight_emits[max_in_flight];
  std::uint8_t status;  // Status: running, waiting or preempted
  std::uint8_t padding;
};
static_assert(sizeof(Resident) == 64 && std::is_trivially_copyable_v<Resident>);

struct BatchInFlight {
  double started_s;  // Unix time; nan where it waited for the one before it
  std::int64_t tokens;
  std::int64_t decode_context_tokens;
  std::int64_t prefill_attention;

  BatchShape shape() const { return {tokens, decode_context_tokens, prefill_attention}; }
};

struct SnapshotHeader {
  std::uint64_t sequence;  // counts publications from 1
  double published_s;      // Unix time
  std::int32_t free_blocks;
  std::int32_t running;
  std::int32_t waiting;  // preempted ones included
  std::int32_t omitted;  // waiting requests beyond the segment's room
  std::int32_t in_flight_batches;
  std::int32_t kv_journaled;               // 1: a KV journal is kept
  std::uint64_t kv_position;               // events of it that belong to this state
  BatchInFlight in_flight[max_in_flight];  // oldest first
};
static_assert(std::is_trivially_copyable_v<SnapshotHeader>);

// What one batch held and how long it took: the raw material of calibration.
struct StepRecord {
  std::uint64_t sequence;  // counts steps from 1
  double scheduled_s;
  double started_s;  // the previous done_s where the engine stayed busy, else scheduled_s
  double done_s;
  std::int32_t prefill_tokens;
  std::int32_t prefill_requests;
  std::int32_t decode_requests;
  std::int32_t preempted;
  std::int64_t decode_context_tokens;
  std::int64_t prefill_attention;
  std::int32_t running;
  std::int32_t waiting;
  std::int32_t free_blocks;
  std::int32_t padding;
};
static_assert(std::is_trivially_copyable_v<StepRecord>);

// One consistent state. Residents: running order, then queue order.
struct Snapshot {
  SchedulerConfig config;
  SnapshotHeader header{};
  std::vector<Resident> residents;

  // Throws std::invalid_argument naming the first contradiction.
  void validate() const;

  std::vector<std::byte> to_bytes() const;

  // Throws std::invalid_argument on anything truncated, corrupt or of another layout version.
  static Snapshot from_bytes(std::span<const std::byte> data);
};

// A stretch of an engine's KV journal: the events after `from` up to `to`. From 0 they are any that
// rebuild the state at `to` from nothing (KvMirror::compact).
struct KvJournalMessage {
  std::int32_t num_blocks = 0;
  std::uint64_t from = 0;
  std::uint64_t to = 0;
  std::vector<KvEvent> events;

  // Throws std::invalid_argument naming what is wrong. Whether the events agree with each other
  // and with a mirror, KvMirror::advance finds out.
  void validate() const;

  std::vector<std::byte> to_bytes() const;

  // Throws std::invalid_argument on anything truncated, corrupt or of another layout version.
  static KvJournalMessage from_bytes(std::span<const std::byte> data);
};

}  // namespace sfs
