#include "sfs/kv_mirror.h"

#include <stdexcept>
#include <string>

namespace sfs {
namespace {

// More than any engine's requests come to; keeps a journal gone wild from taking all memory.
constexpr std::size_t max_entries = std::size_t{1} << 25;
constexpr std::size_t table_entries = 16;  // what a table weighs before it holds anything
constexpr std::int32_t max_blocks = 1 << 24;

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument(why); }

std::int32_t checked_size(std::int32_t num_blocks) {
  if (num_blocks < 1 || num_blocks > max_blocks)
    refuse("KV mirror: " + std::to_string(num_blocks) + " blocks, not within 1 and " +
           std::to_string(max_blocks));
  return num_blocks;
}

}  // namespace

KvMirror::KvMirror(std::int32_t num_blocks) : blocks_(checked_size(num_blocks)) { blocks_.open(0); }

KvMirror KvMirror::rebuild(std::int32_t num_blocks, std::uint64_t position,
                           std::span<const KvEvent> checkpoint) {
  KvMirror mirror(num_blocks);
  mirror.apply(checkpoint);
  mirror.position_ = position;
  return mirror;
}

bool KvMirror::advance(const KvJournalMessage& message) {
  if (message.num_blocks != num_blocks())
    refuse("KV journal: a message of an engine with " + std::to_string(message.num_blocks) +
           " blocks, not " + std::to_string(num_blocks()));
  if (message.to <= position_) return true;
  if (message.from > position_) return false;
  if (message.from > 0)
    apply(std::span(message.events).subspan(position_ - message.from));
  else
    *this = rebuild(num_blocks(), message.to, message.events);
  return true;
}

void KvMirror::apply(std::span<const KvEvent> events) {
  for (const KvEvent& event : events) {
    try {
      apply(event);
    } catch (const std::invalid_argument& contradiction) {
      refuse("KV journal: event " + std::to_string(position_) + ": " + contradiction.what());
    }
    ++position_;
  }
}

void KvMirror::apply(const KvEvent& event) {
  switch (event.kind) {
    case KvEventKind::want:
      return want(event.value);
    case KvEventKind::key:
      return add_key(event.value);
    case KvEventKind::take: {
      const std::uint32_t table = number(event.value);
      if (checked(event.block).references > 0)
        refuse("block " + std::to_string(event.block) + " is taken and not free");
      count(1);
      return blocks_.take(table, event.block);
    }
    case KvEventKind::touch: {
      const std::uint32_t number = this->number(event.value);
      const Table& table = blocks_.table(number);
      const Block& block = checked(event.block);
      const auto depth = static_cast<std::int32_t>(table.blocks.size());
      if (!block.hashed)
        refuse("block " + std::to_string(event.block) + " is hit and holds nothing known");
      if (table.hashed != depth) refuse("a hit behind a block without known content");
      if (block.references > 0 && block.depth != depth)
        refuse("block " + std::to_string(event.block) + " is hit at index " +
               std::to_string(depth) + " and held at " + std::to_string(block.depth));
      check_key(table, depth, block.key);
      count(table.keys.size() == table.blocks.size() ? 2 : 1);
      return blocks_.touch(number, event.block);
    }
    case KvEventKind::hash: {
      const Block& block = checked(event.block);
      if (block.references == 0)
        refuse("block " + std::to_string(event.block) + " is hashed and free");
      if (block.hashed) refuse("block " + std::to_string(event.block) + " is hashed twice");
      const Table& table = blocks_.table(block.owners);
      if (block.depth != table.hashed)
        refuse("block " + std::to_string(event.block) + " is hashed before the one before it");
      check_key(table, block.depth, event.value);
      count(table.keys.size() == static_cast<std::size_t>(block.depth) ? 1 : 0);
      return blocks_.hash(block.owners, event.value);
    }
    case KvEventKind::release: {
      const std::uint32_t table = number(event.value);
      entries_ -= blocks_.table(table).blocks.size();
      return blocks_.release(table);
    }
    case KvEventKind::forget:
      return forget(event.value);
    case KvEventKind::cached: {
      const Block& block = checked(event.block);
      if (block.references > 0 || (block.hashed && block.key != event.value))
        refuse("block " + std::to_string(event.block) +
               " is to be cached and holds something else");
      return blocks_.cache(event.block, event.value);
    }
  }
  refuse("kind " + std::to_string(static_cast<std::uint32_t>(event.kind)) + " is unknown");
}

void KvMirror::want(std::uint64_t owner) {
  const auto known = numbers_.find(owner);
  if (known != numbers_.end()) {
    wanting_ = known->second;
    return;
  }
  count(table_entries);
  if (free_numbers_.empty()) {
    wanting_ = static_cast<std::uint32_t>(blocks_.tables());
  } else {
    wanting_ = free_numbers_.back();
    free_numbers_.pop_back();
  }
  blocks_.open(wanting_).owner = owner;
  numbers_.emplace(owner, wanting_);
}

void KvMirror::add_key(BlockKey key) {
  if (wanting_ == 0) refuse("a key of no owner");
  Table& table = blocks_.open(wanting_);
  if (table.keys.size() + 1 >= static_cast<std::size_t>(num_blocks()))
    refuse("owner " + std::to_string(table.owner) + " wants more blocks than there are");
  count(1);
  table.keys.push_back(key);
}

void KvMirror::forget(std::uint64_t owner) {
  const std::uint32_t number = this->number(owner);
  const Table& table = blocks_.table(number);
  if (!table.blocks.empty())
    refuse("owner " + std::to_string(owner) + " is forgotten and holds blocks");
  entries_ -= table_entries + table.keys.size();
  blocks_.open(number) = Table{};
  numbers_.erase(owner);
  free_numbers_.push_back(number);
  if (wanting_ == number) wanting_ = 0;
}

std::uint32_t KvMirror::number(std::uint64_t owner) const {
  const auto found = numbers_.find(owner);
  if (found == numbers_.end()) refuse("owner " + std::to_string(owner) + " is unknown");
  return found->second;
}

const KvMirror::Block& KvMirror::checked(std::int32_t block) const {
  if (block < 1 || block >= num_blocks())
    refuse("block " + std::to_string(block) + " is not within 1 and num_blocks - 1");
  return blocks_.block(block);
}

void KvMirror::check_key(const Table& table, std::int32_t index, BlockKey key) const {
  const auto i = static_cast<std::size_t>(index);
  if (i < table.keys.size() && table.keys[i] != key)
    refuse("block " + std::to_string(index) + " of owner " + std::to_string(table.owner) +
           " holds something else than it wants");
}

void KvMirror::count(std::size_t entries) {
  if (entries_ + entries > max_entries)
    refuse("its requests come to more than " + std::to_string(max_entries) + " blocks and keys");
  entries_ += entries;
}

std::vector<KvEvent> KvMirror::compact() const {
  std::vector<KvEvent> events;
  events.reserve(2 * static_cast<std::size_t>(cached_free()) + entries_);
  const auto add = [&events](KvEventKind kind, std::uint64_t value, std::int32_t block = 0) {
    events.push_back({value, block, kind});
  };
  const auto add_cached = [&](std::int32_t id) { add(KvEventKind::cached, block(id).key, id); };

  // Content first, in the order of eviction as far as the order of equal keys lets it.
  std::vector<bool> added(static_cast<std::size_t>(num_blocks()));
  const auto is_added = [&added](std::int32_t id) { return added[static_cast<std::size_t>(id)]; };
  bool in_order = true;
  const auto add_up_to = [&](std::int32_t id) {
    std::int32_t from = id;
    while (block(from).before != KvBlocks::none && !is_added(block(from).before))
      from = block(from).before;
    for (;; from = block(from).behind) {
      add_cached(from);
      added[static_cast<std::size_t>(from)] = true;
      if (from == id) return;
      in_order &= block(from).references > 0;
    }
  };
  const auto each_cached_free = [this](auto visit) {
    for (std::int32_t id = oldest_free(); id != KvBlocks::none; id = block(id).newer) visit(id);
  };
  each_cached_free([&](std::int32_t id) {
    if (!is_added(id)) add_up_to(id);
  });
  for (std::int32_t id = 1; id < num_blocks(); ++id)
    if (block(id).hashed && !is_added(id)) add_up_to(id);
  if (!in_order) each_cached_free(add_cached);

  for (const auto& [owner, number] : numbers_) {
    const Table& table = table_at(number);
    const auto hashed = static_cast<std::size_t>(table.hashed);
    add(KvEventKind::want, owner);
    for (std::size_t i = 0; i < table.blocks.size(); ++i)
      add(i < hashed ? KvEventKind::touch : KvEventKind::take, owner, table.blocks[i]);
    for (std::size_t i = hashed; i < table.keys.size(); ++i) add(KvEventKind::key, table.keys[i]);
  }
  if (wanting_ != 0) add(KvEventKind::want, table_at(wanting_).owner);
  return events;
}

}  // namespace sfs
