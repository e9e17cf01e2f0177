// The KV cache as the scheduler sees it: blocks held, blocks free, and which hold known content.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "sfs/kv_blocks.h"
#include "sfs/kv_journal.h"
#include "sfs/kv_outlook.h"
#include "sfs/request.h"
#include "sfs/scheduler_config.h"

namespace sfs {

// Where a cache tells what it does, if anywhere. A copy of the cache is another one: it tells
// nobody.
class KvRecorder {
 public:
  KvRecorder() = default;
  KvRecorder(const KvRecorder&) {}
  KvRecorder& operator=(const KvRecorder&) {
    to_ = nullptr;
    return *this;
  }
  void to(std::vector<KvEvent>* journal) { to_ = journal; }
  void operator()(KvEventKind kind, std::uint64_t value, std::int32_t block = 0) {
    if (to_ != nullptr) to_->push_back({value, block, kind});
  }

 private:
  std::vector<KvEvent>* to_ = nullptr;
};

// Rules 2, 6, 11, 13, 20 and 21. Without prefix caching only counts are kept; in a simulation that
// has a mirror to go on from, counts and an outlook.
class KvCache {
 public:
  KvCache() = default;
  explicit KvCache(const SchedulerConfig& config);
  KvCache(const SchedulerConfig& config, const KvMirror& mirror);

  std::int32_t free_blocks() const {
    return counted_free_ + blocks_.plain_free() + blocks_.cached_free();
  }

  // Starts from a free count and requests observed elsewhere; not for an engine's own cache with
  // prefix caching.
  void restore_free_blocks(std::int32_t free_blocks) { counted_free_ = free_blocks; }
  void restore(const Request& request, Slot slot) {
    if (outlook_) outlook_->restore(request, slot);
  }

  // Events are appended to `journal`, from the first request on; needs prefix caching.
  void record_to(std::vector<KvEvent>* journal) { record_.to(journal); }

  // A request has come. Keys of its full blocks, prompt first, then outputs; beyond them content
  // is its own. In a simulation they are not copied.
  void add(const Request& request, Slot slot, std::span<const BlockKey> keys);
  void withdraw_newest();  // undoes the newest `add`, in a simulation

  // It has ended: gives back its blocks.
  void remove(Request& request, Slot slot);

  // Rule 11: finds the longest run of cached full blocks and remembers it for `allocate`.
  std::int32_t find_hits(const Request& request, Slot slot);

  struct Admission {
    bool full_sequence = false;   // rule 13: the whole known sequence has to fit
    std::int32_t watermark = 0;   // blocks to leave free
    std::int32_t hit_blocks = 0;  // as `find_hits` returned
  };

  // Whether `allocate` would succeed.
  bool fits(const Request& request, std::int32_t tokens, const Admission& admission) const;

  // Rules 6 and 13: blocks for `tokens` more; false, and nothing changed, if they are not free.
  bool allocate(Request& request, Slot slot, std::int32_t tokens, const Admission& admission);
  bool allocate(Request& request, Slot slot, std::int32_t tokens) {
    return allocate(request, slot, tokens, Admission{});
  }

  // Blocks for content that nobody else will ask for, known to be free; in a simulation.
  void take(std::int64_t blocks);

  // Rule 20: the first `tokens` tokens are final, so their full blocks can be hit by others.
  void publish(const Request& request, Slot slot, std::int32_t tokens);

  // Rule 21: tail first; hashed blocks go to the back of the free queue.
  void release(Request& request, Slot slot);

 private:
  struct Need {
    std::int32_t computed = 0;  // tokens, hits included
    std::int32_t held = 0;      // blocks, hits included
    std::int32_t blocks = 0;    // new ones
    bool fits = false;
  };
  Need need(const Request& request, std::int32_t tokens, const Admission& admission) const;
  BlockKey key_of(const Request& request, const KvBlocks::Table& table, std::int32_t index) const;

  std::int32_t block_size_ = 1;
  std::int32_t max_model_len_ = 0;
  std::int32_t usable_blocks_ = 0;
  bool caching_ = false;
  std::int32_t counted_free_ = 0;  // but for an engine's own cache with prefix caching
  KvBlocks blocks_;                // with it; empty without
  std::optional<KvOutlook> outlook_;
  std::vector<std::int32_t> hits_;
  std::int32_t unheld_hits_ = 0;  // they leave the free queue, too
  KvRecorder record_;
};

}  // namespace sfs
