#include "sfs/kv_cache.h"

#include <algorithm>

namespace sfs {
namespace {

// Content no other request can share: mixes id and block index (splitmix64's finaliser).
BlockKey private_key(std::uint64_t id, std::int32_t index) {
  std::uint64_t x = id + 0x9e3779b97f4a7c15ULL * (static_cast<std::uint64_t>(index) + 1);
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

}  // namespace

KvCache::KvCache(const SchedulerConfig& config)
    : block_size_(config.block_size),
      max_model_len_(config.max_model_len),
      caching_(config.enable_prefix_caching),
      plain_free_(config.usable_blocks()) {
  if (!caching_) return;
  blocks_.resize(static_cast<std::size_t>(config.usable_blocks()));
  plain_.resize(blocks_.size());
  for (std::size_t i = 0; i < plain_.size(); ++i) plain_[i] = static_cast<std::int32_t>(i);
}

KvCache::Table& KvCache::table(Slot slot) {
  if (tables_.size() <= slot) tables_.resize(slot + 1);
  return tables_[slot];
}

void KvCache::set_keys(Slot slot, std::vector<BlockKey> keys) {
  if (caching_) table(slot).keys = std::move(keys);
}

BlockKey KvCache::key_of(const Request& request, const Table& table, std::int32_t index) const {
  const auto i = static_cast<std::size_t>(index);
  return i < table.keys.size() ? table.keys[i] : private_key(request.id, index);
}

std::int32_t KvCache::find_hits(const Request& request, Slot slot) {
  hits_.clear();
  if (!caching_) return 0;
  const Table& own = table(slot);
  const std::int32_t full_blocks = (request.known_tokens() - 1) / block_size_;
  for (std::int32_t i = 0; i < full_blocks; ++i) {
    const auto found = by_key_.find(key_of(request, own, i));
    if (found == by_key_.end()) break;
    hits_.push_back(found->second.first);
  }
  return static_cast<std::int32_t>(hits_.size());
}

KvCache::Need KvCache::need(const Request& request, std::int32_t tokens,
                            const Admission& admission) const {
  const auto blocks_for = [this](std::int32_t n) {
    return (std::min(n, max_model_len_) + block_size_ - 1) / block_size_;
  };
  std::int32_t revived = 0;  // hit blocks that nobody holds leave the free queue, too
  for (std::int32_t i = 0; i < admission.hit_blocks; ++i)
    revived +=
        blocks_[static_cast<std::size_t>(hits_[static_cast<std::size_t>(i)])].references == 0;
  const std::int32_t reserve = revived + admission.watermark;
  Need need;
  need.computed = request.computed + admission.hit_blocks * block_size_;
  need.held = request.blocks + admission.hit_blocks;
  need.blocks = std::max(blocks_for(need.computed + tokens) - need.held, 0);
  const std::int32_t whole = std::max(blocks_for(request.known_tokens()) - need.held, 0);
  need.fits = need.blocks + reserve <= free_blocks() &&
              (!admission.full_sequence || whole + reserve <= free_blocks());
  return need;
}

bool KvCache::fits(const Request& request, std::int32_t tokens, const Admission& admission) const {
  return need(request, tokens, admission).fits;
}

bool KvCache::allocate(Request& request, Slot slot, std::int32_t tokens,
                       const Admission& admission) {
  const Need need = this->need(request, tokens, admission);
  if (!need.fits) return false;
  request.blocks = need.held + need.blocks;
  if (!caching_) {
    plain_free_ -= need.blocks;
    return true;
  }
  Table& own = table(slot);
  for (std::int32_t i = 0; i < admission.hit_blocks; ++i) {
    const std::int32_t block = hits_[static_cast<std::size_t>(i)];
    if (blocks_[static_cast<std::size_t>(block)].references++ == 0) dequeue(block);
    own.blocks.push_back(block);
  }
  if (admission.hit_blocks > 0) own.hashed = admission.hit_blocks;
  for (std::int32_t i = 0; i < need.blocks; ++i) own.blocks.push_back(take());
  publish(request, slot, std::min(need.computed + tokens, request.known_tokens()));
  return true;
}

void KvCache::publish(const Request& request, Slot slot, std::int32_t tokens) {
  if (!caching_) return;
  Table& own = table(slot);
  for (; own.hashed < tokens / block_size_; ++own.hashed)
    index(own.blocks[static_cast<std::size_t>(own.hashed)], key_of(request, own, own.hashed));
}

void KvCache::release(Request& request, Slot slot) {
  if (!caching_) {
    plain_free_ += request.blocks;
    request.blocks = 0;
    return;
  }
  Table& own = table(slot);
  for (auto it = own.blocks.rbegin(); it != own.blocks.rend(); ++it) {
    Block& block = blocks_[static_cast<std::size_t>(*it)];
    if (--block.references > 0) continue;
    if (block.hashed) {
      enqueue(*it);
    } else {
      plain_.push_back(*it);
      ++plain_free_;
    }
  }
  own.blocks.clear();
  own.hashed = 0;
  request.blocks = 0;
}

std::int32_t KvCache::take() {
  std::int32_t block;
  if (plain_free_ > 0) {
    block = plain_.back();
    plain_.pop_back();
    --plain_free_;
  } else {
    block = free_queue_.first;
    dequeue(block);
    unindex(block);
  }
  blocks_[static_cast<std::size_t>(block)].references = 1;
  return block;
}

void KvCache::enqueue(std::int32_t block) {
  Block& b = blocks_[static_cast<std::size_t>(block)];
  b.older = free_queue_.last;
  b.newer = none;
  if (b.older == none)
    free_queue_.first = block;
  else
    blocks_[static_cast<std::size_t>(b.older)].newer = block;
  free_queue_.last = block;
  ++cached_free_;
}

void KvCache::dequeue(std::int32_t block) {
  Block& b = blocks_[static_cast<std::size_t>(block)];
  if (b.older == none)
    free_queue_.first = b.newer;
  else
    blocks_[static_cast<std::size_t>(b.older)].newer = b.newer;
  if (b.newer == none)
    free_queue_.last = b.older;
  else
    blocks_[static_cast<std::size_t>(b.newer)].older = b.older;
  --cached_free_;
}

void KvCache::index(std::int32_t block, BlockKey key) {
  Block& b = blocks_[static_cast<std::size_t>(block)];
  Ends& ends = by_key_[key];
  b.key = key;
  b.hashed = true;
  b.before = ends.last;
  b.behind = none;
  if (ends.last == none)
    ends.first = block;
  else
    blocks_[static_cast<std::size_t>(ends.last)].behind = block;
  ends.last = block;
}

void KvCache::unindex(std::int32_t block) {
  Block& b = blocks_[static_cast<std::size_t>(block)];
  const auto found = by_key_.find(b.key);
  Ends& ends = found->second;
  if (b.before == none)
    ends.first = b.behind;
  else
    blocks_[static_cast<std::size_t>(b.before)].behind = b.behind;
  if (b.behind == none)
    ends.last = b.before;
  else
    blocks_[static_cast<std::size_t>(b.behind)].before = b.before;
  if (ends.first == none) by_key_.erase(found);
  b.hashed = false;
}

}  // namespace sfs
