#include "sfs/kv_blocks.h"

namespace sfs {

KvBlocks::KvBlocks(std::int32_t num_blocks) : blocks_(static_cast<std::size_t>(num_blocks)) {
  for (std::int32_t block = num_blocks - 1; block >= 1; --block) enqueue(block);
}

KvBlocks::Table& KvBlocks::open(std::uint32_t number) {
  if (tables_.size() <= number) tables_.resize(std::size_t{number} + 1);
  return tables_[number];
}

void KvBlocks::take(std::uint32_t number, std::int32_t block) {
  dequeue(block);
  if (at(block).hashed) unindex(block);
  hold(number, block);
}

void KvBlocks::touch(std::uint32_t number, std::int32_t block) {
  Block& b = at(block);
  if (b.references == 0) dequeue(block);
  if (b.references == 1) ++tables_[b.owners].shared;
  Table& table = tables_[number];
  if (b.references > 0) ++table.shared;
  if (table.keys.size() == table.blocks.size()) table.keys.push_back(b.key);
  hold(number, block);
  table.hashed = static_cast<std::int32_t>(table.blocks.size());
}

void KvBlocks::hold(std::uint32_t number, std::int32_t block) {
  Block& b = at(block);
  Table& table = tables_[number];
  ++b.references;
  b.owners ^= number;
  b.depth = static_cast<std::int32_t>(table.blocks.size());
  holders_ += table.blocks.empty();
  table.blocks.push_back(block);
}

void KvBlocks::hash(std::uint32_t number, BlockKey key) {
  Table& table = tables_[number];
  const auto next = static_cast<std::size_t>(table.hashed++);
  if (table.keys.size() == next) table.keys.push_back(key);
  index(table.blocks[next], key);
}

void KvBlocks::release(std::uint32_t number) {
  Table& table = tables_[number];
  holders_ -= !table.blocks.empty();
  for (auto it = table.blocks.rbegin(); it != table.blocks.rend(); ++it) {
    Block& b = at(*it);
    b.owners ^= number;
    if (--b.references == 0) enqueue(*it);
    if (b.references == 1) --tables_[b.owners].shared;
  }
  table.blocks.clear();
  table.hashed = 0;
  table.shared = 0;
}

void KvBlocks::cache(std::int32_t block, BlockKey key) {
  dequeue(block);
  if (!at(block).hashed) index(block, key);
  enqueue(block);
}

// Rule 21: with known content to the back, without it to the front of those alike.
void KvBlocks::enqueue(std::int32_t block) {
  Block& b = at(block);
  if (b.hashed) {
    b.freed = ++frees_;
    b.older = cached_.last;
    b.newer = none;
    (b.older == none ? cached_.first : at(b.older).newer) = block;
    cached_.last = block;
    ++cached_free_;
  } else {
    b.older = none;
    b.newer = plain_.first;
    (b.newer == none ? plain_.last : at(b.newer).older) = block;
    plain_.first = block;
    ++plain_free_;
  }
}

void KvBlocks::dequeue(std::int32_t block) {
  Block& b = at(block);
  Ends& queue = b.hashed ? cached_ : plain_;
  (b.older == none ? queue.first : at(b.older).newer) = b.newer;
  (b.newer == none ? queue.last : at(b.newer).older) = b.older;
  b.older = b.newer = none;
  --(b.hashed ? cached_free_ : plain_free_);
}

void KvBlocks::index(std::int32_t block, BlockKey key) {
  Block& b = at(block);
  Ends& equal = by_key_[key];
  b.key = key;
  b.hashed = true;
  b.before = equal.last;
  b.behind = none;
  (b.before == none ? equal.first : at(b.before).behind) = block;
  equal.last = block;
}

void KvBlocks::unindex(std::int32_t block) {
  Block& b = at(block);
  const auto found = by_key_.find(b.key);
  Ends& equal = found->second;
  (b.before == none ? equal.first : at(b.before).behind) = b.behind;
  (b.behind == none ? equal.last : at(b.behind).before) = b.before;
  if (equal.first == none) by_key_.erase(found);
  b.before = b.behind = none;
  b.hashed = false;
}

}  // namespace sfs
