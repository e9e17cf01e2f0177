// KV blocks with an identity: who holds them, what they hold, and in which order they are evicted.
// The engine's cache and the mirrors of it elsewhere share this one mechanism.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "sfs/kv_journal.h"

namespace sfs {

// Rules 20 and 21. What may be called when is the caller's to know: nothing is checked here.
class KvBlocks {
 public:
  static constexpr std::int32_t none = -1;

  struct Block {
    BlockKey key = 0;
    std::uint64_t freed = 0;                    // ascends in the order of eviction, among cached
    std::int32_t references = 0;                // tables that hold it
    std::int32_t older = none, newer = none;    // free queue
    std::int32_t before = none, behind = none;  // blocks of equal key, oldest first
    std::uint32_t owners = 0;  // XOR of the tables that hold it: the one, where it is one
    std::int32_t depth = 0;    // its index in the tables that hold it
    bool hashed = false;
  };
  static_assert(sizeof(Block) == 48);

  struct Table {
    std::uint64_t owner = 0;
    std::vector<std::int32_t> blocks;
    std::vector<BlockKey> keys;  // of its full blocks, as far as known; at least the hashed ones'
    std::int32_t hashed = 0;     // leading blocks with a hash
    std::int32_t shared = 0;     // blocks with 2 references or more
  };

  KvBlocks() = default;
  explicit KvBlocks(std::int32_t num_blocks);  // the null block included

  std::int32_t num_blocks() const noexcept { return static_cast<std::int32_t>(blocks_.size()); }
  const Block& block(std::int32_t id) const noexcept {
    return blocks_[static_cast<std::size_t>(id)];
  }
  std::int32_t plain_free() const noexcept { return plain_free_; }    // without known content
  std::int32_t cached_free() const noexcept { return cached_free_; }  // with it
  std::int32_t oldest_cached() const noexcept { return cached_.first; }
  std::int32_t next_free() const noexcept { return plain_free_ > 0 ? plain_.first : cached_.first; }

  // The oldest block of that content, or none.
  std::int32_t find(BlockKey key) const noexcept {
    const auto found = by_key_.find(key);
    return found == by_key_.end() ? none : found->second.first;
  }

  // Tables are numbered from 1, so that `Block::owners` can tell one from none.
  std::size_t tables() const noexcept { return tables_.size(); }
  std::size_t holders() const noexcept { return holders_; }  // tables with blocks
  const Table& table(std::uint32_t number) const noexcept { return tables_[number]; }
  Table& open(std::uint32_t number);

  void take(std::uint32_t number, std::int32_t block);
  void touch(std::uint32_t number, std::int32_t block);
  void hash(std::uint32_t number, BlockKey key);  // the table's first block without a hash
  void release(std::uint32_t number);
  void cache(std::int32_t block, BlockKey key);  // a free block: as if just freed with that content

 private:
  struct Ends {
    std::int32_t first = none, last = none;
  };

  Block& at(std::int32_t id) { return blocks_[static_cast<std::size_t>(id)]; }
  void hold(std::uint32_t number, std::int32_t block);
  void enqueue(std::int32_t block);
  void dequeue(std::int32_t block);
  void index(std::int32_t block, BlockKey key);
  void unindex(std::int32_t block);

  std::vector<Block> blocks_;
  std::vector<Table> tables_;
  std::unordered_map<BlockKey, Ends> by_key_;
  Ends plain_;   // free, taken first
  Ends cached_;  // free and hashed, least recently used first
  std::int32_t plain_free_ = 0;
  std::int32_t cached_free_ = 0;
  std::size_t holders_ = 0;
  std::uint64_t frees_ = 0;
};

}  // namespace sfs
