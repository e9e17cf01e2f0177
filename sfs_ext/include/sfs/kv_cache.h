// The KV cache as the scheduler sees it: blocks held, blocks free, and which hold known content.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "sfs/request.h"
#include "sfs/scheduler_config.h"

namespace sfs {

// Identifies the content of a full block and of all before it (vLLM's chained block hash).
using BlockKey = std::uint64_t;

// Rules 2, 6, 11, 13, 20 and 21. Without prefix caching only counts are kept.
class KvCache {
 public:
  KvCache() = default;
  explicit KvCache(const SchedulerConfig& config);

  std::int32_t free_blocks() const { return plain_free_ + cached_free_; }

  // Starts from a free count observed elsewhere; needs prefix caching off.
  void restore_free_blocks(std::int32_t free_blocks) { plain_free_ = free_blocks; }

  // Keys of the request's full blocks, prompt first, then outputs; beyond them content is its own.
  void set_keys(Slot slot, std::vector<BlockKey> keys);

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

  // Blocks for content that nobody else will ask for, known to be free.
  void take(std::int64_t blocks) { plain_free_ -= static_cast<std::int32_t>(blocks); }

  // Rule 20: the first `tokens` tokens are final, so their full blocks can be hit by others.
  void publish(const Request& request, Slot slot, std::int32_t tokens);

  // Rule 21: tail first; hashed blocks go to the back of the free queue.
  void release(Request& request, Slot slot);

 private:
  static constexpr std::int32_t none = -1;

  struct Block {
    BlockKey key = 0;
    std::int32_t references = 0;
    std::int32_t older = none, newer = none;    // free queue of hashed blocks
    std::int32_t before = none, behind = none;  // blocks of equal key, oldest first
    bool hashed = false;
  };
  struct Table {
    std::vector<std::int32_t> blocks;
    std::vector<BlockKey> keys;
    std::int32_t hashed = 0;
  };
  struct Ends {
    std::int32_t first = none, last = none;
  };

  struct Need {
    std::int32_t computed = 0;  // tokens, hits included
    std::int32_t held = 0;      // blocks, hits included
    std::int32_t blocks = 0;    // new ones
    bool fits = false;
  };
  Need need(const Request& request, std::int32_t tokens, const Admission& admission) const;
  Table& table(Slot slot);
  BlockKey key_of(const Request& request, const Table& table, std::int32_t index) const;
  std::int32_t take();
  void enqueue(std::int32_t block);
  void dequeue(std::int32_t block);
  void index(std::int32_t block, BlockKey key);
  void unindex(std::int32_t block);

  std::int32_t block_size_ = 1;
  std::int32_t max_model_len_ = 0;
  bool caching_ = false;
  std::int32_t plain_free_ = 0;   // free, no known content: always taken first
  std::int32_t cached_free_ = 0;  // free, still holding content
  std::vector<std::int32_t> plain_;
  std::vector<Block> blocks_;
  Ends free_queue_;
  std::unordered_map<BlockKey, Ends> by_key_;
  std::vector<Table> tables_;
  std::vector<std::int32_t> hits_;
};

}  // namespace sfs
