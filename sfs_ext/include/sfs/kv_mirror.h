// The KV cache of an engine elsewhere, rebuilt from its journal: what is cached, what is free, who
// holds what, and what is evicted next.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "sfs/kv_blocks.h"
#include "sfs/kv_journal.h"
#include "sfs/snapshot.h"

namespace sfs {

// At most 100 bytes a block (48 of its own, 40 of the index by key, 12 in a table), 12 more for
// each further holder of a shared block, and 8 for each key of a request that waits.
class KvMirror {
 public:
  using Block = KvBlocks::Block;
  using Table = KvBlocks::Table;

  // The null block included. Throws std::invalid_argument for more blocks than any engine has.
  explicit KvMirror(std::int32_t num_blocks);

  // Throws std::invalid_argument naming the first contradiction. It and what follows it is not
  // applied: position() says where it stands.
  void apply(std::span<const KvEvent> events);

  // A journal that rebuilds this state from nothing: orders of eviction, of equal keys, of tables.
  std::vector<KvEvent> compact() const;

  // The state that `checkpoint`, made by compact(), stands for. Throws as apply() does.
  static KvMirror rebuild(std::int32_t num_blocks, std::uint64_t position,
                          std::span<const KvEvent> checkpoint);

  // Applies what of the message lies ahead; nothing where none does. False on a gap: the message
  // begins further ahead, and one from 0 is needed. Throws as apply() does, and for a message of
  // another engine; a rebuild that throws changes nothing.
  bool advance(const KvJournalMessage& message);

  // Events of the engine's journal that this state stands for.
  std::uint64_t position() const noexcept { return position_; }

  // All that follows is O(1). References hold until the next change.
  std::int32_t num_blocks() const noexcept { return blocks_.num_blocks(); }
  const Block& block(std::int32_t id) const noexcept { return blocks_.block(id); }
  std::int32_t plain_free() const noexcept { return blocks_.plain_free(); }
  std::int32_t cached_free() const noexcept { return blocks_.cached_free(); }
  std::int32_t oldest_free() const noexcept { return blocks_.oldest_cached(); }

  // Oldest block of that content, or -1; younger ones `behind` it.
  std::int32_t find(BlockKey key) const noexcept { return blocks_.find(key); }

  // nullptr for an owner unknown.
  const Table* table(std::uint64_t owner) const noexcept {
    const auto found = numbers_.find(owner);
    return found == numbers_.end() ? nullptr : &blocks_.table(found->second);
  }
  // Numbers start from 1 and are used again after `forget`.
  const Table& table_at(std::uint32_t number) const noexcept { return blocks_.table(number); }
  std::uint32_t number_of(const Table& table) const noexcept {
    return static_cast<std::uint32_t>(&table - &blocks_.table(0));
  }
  std::size_t tables() const noexcept { return numbers_.size(); }
  std::size_t holders() const noexcept { return blocks_.holders(); }  // tables with blocks

 private:
  void apply(const KvEvent& event);
  void want(std::uint64_t owner);
  void add_key(BlockKey key);
  void forget(std::uint64_t owner);
  std::uint32_t number(std::uint64_t owner) const;
  const Block& checked(std::int32_t block) const;
  void check_key(const Table& table, std::int32_t index, BlockKey key) const;
  void count(std::size_t entries);

  KvBlocks blocks_;
  std::unordered_map<std::uint64_t, std::uint32_t> numbers_;
  std::vector<std::uint32_t> free_numbers_;
  std::uint32_t wanting_ = 0;  // table of the last `want`, while it lives
  std::size_t entries_ = 0;    // blocks and keys of tables, and what a table weighs
  std::uint64_t position_ = 0;
};

}  // namespace sfs
