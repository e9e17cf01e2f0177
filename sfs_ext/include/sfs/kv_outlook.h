// What becomes of an engine's KV cache while a simulation runs on from its mirror: which content
// is cached, and which is evicted by then. The mirror itself is only read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "sfs/flat_map.h"
#include "sfs/kv_mirror.h"
#include "sfs/request.h"

namespace sfs {

// Rules 11, 20 and 21, as KvBlocks has them, but a block costs something only once it matters by
// itself: when somebody else hits it. Until then a request's blocks are a run, from the first to
// the last with known content, that is held, freed and evicted as one.
class KvOutlook {
 public:
  // `mirror` has to stay as it is while this or a copy of it lives.
  KvOutlook(const KvMirror& mirror, std::int32_t block_size);

  // A request of the snapshot, in running and then in queue order: its table as the mirror has it.
  void restore(const Request& request, Slot slot);

  // A request that comes later; `keys`, of its full blocks, have to live as long as this.
  void add(Slot slot, std::span<const BlockKey> keys);
  void withdraw_newest();  // undoes `add`

  // Rule 11: the longest run of cached full blocks, which `admit` will take; and how many of them
  // nobody holds.
  struct Hits {
    std::int32_t blocks = 0;
    std::int32_t unheld = 0;
  };
  Hits find_hits(const Request& request, Slot slot);

  void admit(Slot slot);
  void take(std::int64_t blocks);  // for content of its own
  void publish(Slot slot, std::int32_t full_blocks);
  std::int32_t release(Slot slot, std::int32_t blocks);  // how many are free now

 private:
  static constexpr std::int32_t none = -1;
  using TableId = std::int32_t;

  // A request's blocks by depth: hits first, or what the mirror shows; then its own.
  struct Table {
    const KvMirror::Table* shown = nullptr;  // in the mirror
    std::span<const BlockKey> keys;
    std::int32_t shown_blocks = 0;  // held as in the mirror; none once released
    std::int32_t hits_from = 0;     // in hits_
    std::int32_t hits = 0;
    std::int32_t hashed = 0;
    std::int32_t singles_to = 0;  // depths from here on nobody else has hit
    std::int32_t life = 0;        // counts releases
    std::int32_t newest_run = none;
    std::int32_t newest_published = none;
    bool held = false;
  };

  // A block that matters by itself.
  struct Single {
    std::int32_t references = 0;
    std::int32_t freed = none;  // its place in the queue, if nobody holds it; none: evicted
  };

  // Of the free queue, oldest first. Of a run the deepest block is the oldest.
  struct Freed {
    std::int32_t single = none;  // else a run
    TableId table = none;
    std::int32_t life = 0;
    std::int32_t from = 0, to = 0;  // depths of the run
    std::int32_t older = none, newer = none;
    std::int32_t next_run = none;  // an older one of the same table
  };

  // Depths of a table whose content became known at one time; in order of time.
  struct Published {
    std::int32_t life = 0;
    std::int32_t from = 0, to = 0;
    std::int32_t next = none;  // an earlier one of the same table
  };

  // Where a block is found: one of the mirror's, or one of a table's own at some depth.
  struct Place {
    std::int32_t block = none;
    TableId table = none;
    std::int32_t life = 0;
    std::int32_t depth = 0;
    std::int32_t single = none;
    std::int32_t run = none;  // in which it is free
    bool held = false;
  };

  static std::uint64_t name(const Place& place) {
    if (place.block != none) return static_cast<std::uint64_t>(place.block);
    // A simulation's bound on requests leaves fewer lives than that, a mirror's on blocks less
    // depth.
    return 1ULL << 63 | static_cast<std::uint64_t>(place.table) << 43 |
           static_cast<std::uint64_t>(place.life) << 24 | static_cast<std::uint64_t>(place.depth);
  }

  Table& table(Slot slot) { return tables_[static_cast<std::size_t>(table_of_[slot])]; }
  void open(Slot slot, Table table);
  bool held_by_newest(const Table& asking, std::int32_t depth, Place& place) const;
  bool locate(TableId own, std::int32_t depth, Place& place) const;
  bool locate_in_mirror(BlockKey key, Place& place) const;
  bool locate_block(std::int32_t block, Place& place) const;
  bool locate_in_table(TableId id, std::int32_t depth, Place& place) const;
  bool locate_single(Place& place) const;
  std::int32_t published_at(const Place& place) const;
  bool locate_in_runs(TableId id, std::int32_t life, std::int32_t depth, Place& place) const;
  bool evicted(const KvMirror::Block& block) const;
  std::int32_t single_of(const Place& place, std::int32_t references);
  void hit(const Place& place);
  std::int32_t singles_to(const Table& table) const;
  std::int32_t single_at(TableId id, std::int32_t depth);
  void evict(std::int64_t blocks);
  void push(Freed freed);
  void unlink(std::int32_t freed);
  void carve(std::int32_t run, std::int32_t depth);

  const KvMirror* mirror_;
  std::int32_t block_size_;

  // The free queue: blocks without known content, then what was free in the mirror, then what has
  // been freed since.
  std::int64_t plain_free_ = 0;
  std::int64_t shown_free_ = 0;
  std::int64_t shown_evicted_ = 0;
  mutable std::int64_t walked_ = 0;    // of the evicted ones
  mutable std::int32_t next_evicted_;  // the mirror's block after those walked
  std::vector<Freed> freed_;
  std::int32_t oldest_ = none, newest_ = none;

  std::vector<Table> tables_;            // never reused: content outlives its request
  std::vector<BlockKey> first_keys_;     // of tables_, for finding those that begin alike
  std::vector<TableId> table_of_;        // by slot
  std::vector<TableId> table_numbered_;  // by number in the mirror
  std::vector<Single> singles_;
  FlatMap single_named_;
  std::vector<std::int32_t> hits_;  // singles, table by table
  std::vector<Place> found_;        // by find_hits
  TableId newest_hits_ = none;      // whose hits are the newest
  std::vector<Published> published_;
};

}  // namespace sfs
