#include "sfs/kv_outlook.h"

#include <algorithm>
#include <utility>

namespace sfs {

KvOutlook::KvOutlook(const KvMirror& mirror, std::int32_t block_size)
    : mirror_(&mirror),
      block_size_(block_size),
      plain_free_(mirror.plain_free()),
      shown_free_(mirror.cached_free()),
      next_evicted_(mirror.oldest_free()) {}

void KvOutlook::open(Slot slot, Table table) {
  if (table_of_.size() <= slot) table_of_.resize(slot + 1, none);
  table_of_[slot] = static_cast<TableId>(tables_.size());
  first_keys_.push_back(table.keys.empty() ? 0 : table.keys.front());
  tables_.push_back(table);
}

void KvOutlook::restore(const Request& request, Slot slot) {
  Table restored;
  if (const KvMirror::Table* shown = mirror_->table(request.id)) {
    restored.shown = shown;
    restored.keys = shown->keys;
    restored.shown_blocks = static_cast<std::int32_t>(shown->blocks.size());
    restored.hashed = shown->hashed;
    const std::uint32_t number = mirror_->number_of(*shown);
    if (table_numbered_.size() <= number) table_numbered_.resize(number + 1, none);
    table_numbered_[number] = static_cast<TableId>(tables_.size());
  }
  restored.held = request.status == Status::running;
  open(slot, restored);
}

void KvOutlook::add(Slot slot, std::span<const BlockKey> keys) {
  Table added;
  added.keys = keys;
  open(slot, added);
}

void KvOutlook::withdraw_newest() {
  tables_.pop_back();
  first_keys_.pop_back();
}

KvOutlook::Hits KvOutlook::find_hits(const Request& request, Slot slot) {
  found_.clear();
  Hits hits;
  const std::int32_t full_blocks = (request.known_tokens() - 1) / block_size_;
  const TableId own = table_of_[slot];
  bool alike = newest_hits_ != none;
  for (Place place; hits.blocks < full_blocks; place = {}) {
    alike = alike && held_by_newest(tables_[static_cast<std::size_t>(own)], hits.blocks, place);
    if (!alike && !locate(own, hits.blocks, place)) break;
    found_.push_back(place);
    ++hits.blocks;
    hits.unheld += !place.held;
  }
  return hits;
}

// Many begin alike. What was the oldest block of its content and has been held since still is.
bool KvOutlook::held_by_newest(const Table& asking, std::int32_t depth, Place& place) const {
  const Table& newest = tables_[static_cast<std::size_t>(newest_hits_)];
  const auto index = static_cast<std::size_t>(depth);
  if (!newest.held || depth >= newest.hits || index >= asking.keys.size() ||
      index >= newest.keys.size() || asking.keys[index] != newest.keys[index])
    return false;
  place.single = hits_[static_cast<std::size_t>(newest.hits_from + depth)];
  place.held = true;
  return true;
}

// Of blocks with equal content the oldest: the mirror's before those of the simulation.
bool KvOutlook::locate(TableId own, std::int32_t depth, Place& place) const {
  const Table& asking = tables_[static_cast<std::size_t>(own)];
  const auto index = static_cast<std::size_t>(depth);
  if (index >= asking.keys.size()) return locate_in_table(own, depth, place);  // known to it alone
  const BlockKey key = asking.keys[index];
  if (locate_in_mirror(key, place)) return true;
  std::int32_t oldest = none;
  for (std::size_t i = 0; i < first_keys_.size(); ++i) {
    if (first_keys_[i] != asking.keys.front()) continue;
    const Table& other = tables_[i];
    Place there;
    if (index >= other.keys.size() || other.keys[index] != key ||
        !locate_in_table(static_cast<TableId>(i), depth, there))
      continue;
    const std::int32_t published = published_at(there);
    if (oldest != none && oldest < published) continue;
    oldest = published;
    place = there;
  }
  return oldest != none;
}

std::int32_t KvOutlook::published_at(const Place& place) const {
  std::int32_t at = tables_[static_cast<std::size_t>(place.table)].newest_published;
  while (at != none) {
    const Published& there = published_[static_cast<std::size_t>(at)];
    if (there.life == place.life && there.from <= place.depth && place.depth < there.to) break;
    at = there.next;
  }
  return at;
}

bool KvOutlook::locate_in_mirror(BlockKey key, Place& place) const {
  for (std::int32_t id = mirror_->find(key); id != none; id = mirror_->block(id).behind)
    if (locate_block(id, place)) return true;
  return false;
}

bool KvOutlook::locate_block(std::int32_t id, Place& place) const {
  place = {};
  place.block = id;
  if ((place.single = single_named_.find(name(place))) != none) return locate_single(place);
  const KvMirror::Block& block = mirror_->block(id);
  place.depth = block.depth;
  if (block.references == 0) return !evicted(block);
  place.held = true;
  if (block.references > 1 || block.owners >= table_numbered_.size()) return true;
  const TableId owner = table_numbered_[block.owners];
  if (owner == none || tables_[static_cast<std::size_t>(owner)].life == 0) return true;
  place.held = false;
  return locate_in_runs(owner, 0, block.depth, place);
}

// What the table itself holds or has held: hits are found where they come from, and what the
// mirror knows the content of, there.
bool KvOutlook::locate_in_table(TableId id, std::int32_t depth, Place& place) const {
  const Table& table = tables_[static_cast<std::size_t>(id)];
  for (std::int32_t life = 0; life <= table.life; ++life) {
    place = {};
    place.table = id;
    place.life = life;
    place.depth = depth;
    if ((place.single = single_named_.find(name(place))) != none) {
      if (locate_single(place)) return true;
    } else if (life == table.life) {
      const bool known_to_mirror =
          life == 0 && table.shown != nullptr && depth < table.shown->hashed;
      place.held = table.held && depth >= table.hits && depth < table.hashed && !known_to_mirror;
      if (place.held) return true;
    } else if (locate_in_runs(id, life, depth, place)) {
      return true;
    }
  }
  return false;
}

bool KvOutlook::locate_single(Place& place) const {
  const Single& single = singles_[static_cast<std::size_t>(place.single)];
  place.held = single.references > 0;
  return place.held || single.freed != none;
}

bool KvOutlook::locate_in_runs(TableId id, std::int32_t life, std::int32_t depth,
                               Place& place) const {
  for (std::int32_t run = tables_[static_cast<std::size_t>(id)].newest_run; run != none;
       run = freed_[static_cast<std::size_t>(run)].next_run) {
    const Freed& freed = freed_[static_cast<std::size_t>(run)];
    if (freed.life != life || depth < freed.from || depth >= freed.to) continue;
    place.table = id;
    place.life = life;
    place.run = run;
    return true;
  }
  return false;
}

// Blocks that have left the mirror's queue otherwise, by a hit, have a name by then.
bool KvOutlook::evicted(const KvMirror::Block& block) const {
  for (; walked_ < shown_evicted_; next_evicted_ = mirror_->block(next_evicted_).newer)
    walked_ += single_named_.find(static_cast<std::uint64_t>(next_evicted_)) == none;
  return next_evicted_ == none || block.freed < mirror_->block(next_evicted_).freed;
}

std::int32_t KvOutlook::single_of(const Place& place, std::int32_t references) {
  const auto single = static_cast<std::int32_t>(singles_.size());
  singles_.push_back({.references = references});
  single_named_.insert(name(place), single);
  return single;
}

void KvOutlook::hit(const Place& place) {
  if (place.single != none) {
    Single& single = singles_[static_cast<std::size_t>(place.single)];
    if (single.references++ == 0) unlink(std::exchange(single.freed, none));
    hits_.push_back(place.single);
    return;
  }
  std::int32_t references = 1;
  if (place.held) {
    ++references;
    TableId holder = place.table;
    if (place.block != none) {
      const KvMirror::Block& block = mirror_->block(place.block);
      references = block.references + 1;
      const bool one = block.references == 1 && block.owners < table_numbered_.size();
      holder = one ? table_numbered_[block.owners] : none;
    }
    if (holder != none) {
      Table& table = tables_[static_cast<std::size_t>(holder)];
      table.singles_to = std::max(table.singles_to, place.depth + 1);
    }
  } else if (place.run != none) {
    Place now = place;  // hits before may have split the run
    locate_in_runs(place.table, place.life, place.depth, now);
    carve(now.run, now.depth);
  } else {
    --shown_free_;
  }
  hits_.push_back(single_of(place, references));
}

void KvOutlook::admit(Slot slot) {
  Table& admitted = table(slot);
  admitted.hits_from = static_cast<std::int32_t>(hits_.size());
  admitted.hits = admitted.hashed = static_cast<std::int32_t>(found_.size());
  admitted.singles_to = 0;
  admitted.held = true;
  for (const Place& place : found_) hit(place);
  if (!found_.empty()) newest_hits_ = table_of_[slot];
  found_.clear();
}

void KvOutlook::publish(Slot slot, std::int32_t full_blocks) {
  Table& own = table(slot);
  if (full_blocks <= own.hashed) return;
  if (static_cast<std::size_t>(own.hashed) < own.keys.size()) {  // others may look for it
    published_.push_back({own.life, own.hashed, full_blocks, own.newest_published});
    own.newest_published = static_cast<std::int32_t>(published_.size()) - 1;
  }
  own.hashed = full_blocks;
}

void KvOutlook::take(std::int64_t blocks) {
  const std::int64_t plain = std::min(blocks, plain_free_);
  plain_free_ -= plain;
  evict(blocks - plain);
}

void KvOutlook::evict(std::int64_t blocks) {
  const std::int64_t shown = std::min(blocks, shown_free_);
  shown_free_ -= shown;
  shown_evicted_ += shown;
  blocks -= shown;
  while (blocks > 0) {
    Freed& oldest = freed_[static_cast<std::size_t>(oldest_)];
    if (oldest.single != none) {
      singles_[static_cast<std::size_t>(oldest.single)].freed = none;
      unlink(oldest_);
      --blocks;
      continue;
    }
    const auto evicted =
        static_cast<std::int32_t>(std::min<std::int64_t>(blocks, oldest.to - oldest.from));
    oldest.to -= evicted;
    blocks -= evicted;
    if (oldest.from == oldest.to) unlink(oldest_);
  }
}

// Depths from here on are the table's alone.
std::int32_t KvOutlook::singles_to(const Table& table) const {
  std::int32_t depth = 0;
  if (table.shown_blocks > 0)
    for (std::int32_t left = table.shown->shared; left > 0; ++depth)
      left -= mirror_->block(table.shown->blocks[static_cast<std::size_t>(depth)]).references > 1;
  return std::max({depth, table.hits, table.singles_to});
}

// The single at `depth` of a table that is being released, if there is one.
std::int32_t KvOutlook::single_at(TableId id, std::int32_t depth) {
  const Table& table = tables_[static_cast<std::size_t>(id)];
  if (depth < table.hits) return hits_[static_cast<std::size_t>(table.hits_from + depth)];
  Place place;
  place.depth = depth;
  if (table.shown_blocks > 0 && depth < table.shown->hashed) {
    place.block = table.shown->blocks[static_cast<std::size_t>(depth)];
    const std::int32_t single = single_named_.find(name(place));
    const std::int32_t references = mirror_->block(place.block).references;
    return single == none && references > 1 ? single_of(place, references) : single;
  }
  place.table = id;
  place.life = table.life;
  return single_named_.find(name(place));
}

std::int32_t KvOutlook::release(Slot slot, std::int32_t blocks) {
  const TableId id = table_of_[slot];
  Table& released = tables_[static_cast<std::size_t>(id)];
  const std::int32_t hashed = std::min(released.hashed, blocks);
  plain_free_ += blocks - hashed;
  std::int32_t freed = blocks - hashed;
  // Tail first.
  std::int32_t run_to = hashed;
  const auto free_run = [&](std::int32_t from) {
    if (from == run_to) return;
    freed += run_to - from;
    push({.table = id, .life = released.life, .from = from, .to = run_to});
  };
  for (std::int32_t depth = std::min(singles_to(released), hashed); depth-- > 0;) {
    const std::int32_t single = single_at(id, depth);
    if (single == none) continue;
    free_run(depth + 1);
    run_to = depth;
    if (--singles_[static_cast<std::size_t>(single)].references > 0) continue;
    ++freed;
    singles_[static_cast<std::size_t>(single)].freed = static_cast<std::int32_t>(freed_.size());
    push({.single = single});
  }
  free_run(0);
  released.held = false;
  released.shown_blocks = 0;
  released.hits = 0;
  released.hashed = 0;
  released.singles_to = 0;
  ++released.life;
  return freed;
}

void KvOutlook::push(Freed freed) {
  const auto place = static_cast<std::int32_t>(freed_.size());
  freed.older = newest_;
  if (newest_ == none)
    oldest_ = place;
  else
    freed_[static_cast<std::size_t>(newest_)].newer = place;
  newest_ = place;
  if (freed.single == none)
    freed.next_run =
        std::exchange(tables_[static_cast<std::size_t>(freed.table)].newest_run, place);
  freed_.push_back(freed);
}

void KvOutlook::unlink(std::int32_t place) {
  const Freed& gone = freed_[static_cast<std::size_t>(place)];
  (gone.older == none ? oldest_ : freed_[static_cast<std::size_t>(gone.older)].newer) = gone.newer;
  (gone.newer == none ? newest_ : freed_[static_cast<std::size_t>(gone.newer)].older) = gone.older;
}

// Takes a block out of a run: the deeper rest of it stays the older.
void KvOutlook::carve(std::int32_t place, std::int32_t depth) {
  Freed& run = freed_[static_cast<std::size_t>(place)];
  if (depth == run.from) {
    if (++run.from == run.to) unlink(place);
    return;
  }
  Freed deeper = run;
  run.to = depth;
  deeper.from = depth + 1;
  if (deeper.from == deeper.to) return;
  const auto split = static_cast<std::int32_t>(freed_.size());
  deeper.newer = place;
  deeper.next_run = run.next_run;
  run.next_run = split;
  (run.older == none ? oldest_ : freed_[static_cast<std::size_t>(run.older)].newer) = split;
  run.older = split;
  freed_.push_back(deeper);
}

}  // namespace sfs
