// What happens to an engine's KV blocks, event by event: whoever replays it knows which content is
// cached and what is evicted next, without a look into the engine.
#pragma once

#include <cstdint>
#include <type_traits>

namespace sfs {

// Identifies the content of a full block and of all before it (vLLM's chained block hash).
using BlockKey = std::uint64_t;

// An owner is a request's id. Its table holds its blocks in order, its keys name the content of
// its full blocks in order: a prompt's from the start, outputs' as they are hashed.
enum class KvEventKind : std::uint32_t {
  want,     // value: owner. A request has come, or has more to say: its `key` events follow.
  key,      // value: the next key of the owner that `want` named last
  take,     // value: owner. `block` is free, loses what it held and is the next of its table.
  touch,    // value: owner. A hit: `block` keeps its content and is the next of its table.
  hash,     // value: key. `block`, first of its table without content known, is full of it now.
  release,  // value: owner. Its blocks are given back, tail first (rule 21).
  forget,   // value: owner. It has ended and holds nothing.
  cached,   // value: key. `block` is free, holds this, was used last. In checkpoints alone.
};
inline constexpr std::uint32_t kv_event_kinds = 8;

// Blocks are numbered from 1 to num_blocks - 1, for 0 is the null block (rule 2).
struct KvEvent {
  std::uint64_t value;
  std::int32_t block;  // 0 where the kind has none
  KvEventKind kind;
};
static_assert(sizeof(KvEvent) == 16 && std::is_trivially_copyable_v<KvEvent>);

}  // namespace sfs
