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

std::uint32_t table_of(Slot slot) { return slot + 1; }

}  // namespace

KvCache::KvCache(const SchedulerConfig& config)
    : block_size_(config.block_size),
      max_model_len_(config.max_model_len),
      usable_blocks_(config.usable_blocks()),
      caching_(config.enable_prefix_caching),
      counted_free_(caching_ ? 0 : config.usable_blocks()),
      blocks_(caching_ ? config.num_blocks : 0) {}

KvCache::KvCache(const SchedulerConfig& config, const KvMirror& mirror)
    : block_size_(config.block_size),
      max_model_len_(config.max_model_len),
      usable_blocks_(config.usable_blocks()),
      outlook_(std::in_place, mirror, config.block_size) {}

void KvCache::add(const Request& request, Slot slot, std::span<const BlockKey> keys) {
  if (outlook_) outlook_->add(slot, keys);
  if (!caching_) return;
  record_(KvEventKind::want, request.id);
  for (const BlockKey key : keys) record_(KvEventKind::key, key);
  blocks_.open(table_of(slot)).keys.assign(keys.begin(), keys.end());
}

void KvCache::withdraw_newest() {
  if (outlook_) outlook_->withdraw_newest();
}

void KvCache::take(std::int64_t blocks) {
  counted_free_ -= static_cast<std::int32_t>(blocks);
  if (outlook_) outlook_->take(blocks);
}

void KvCache::remove(Request& request, Slot slot) {
  release(request, slot);
  if (caching_) record_(KvEventKind::forget, request.id);
}

BlockKey KvCache::key_of(const Request& request, const KvBlocks::Table& table,
                         std::int32_t index) const {
  const auto i = static_cast<std::size_t>(index);
  return i < table.keys.size() ? table.keys[i] : private_key(request.id, index);
}

std::int32_t KvCache::find_hits(const Request& request, Slot slot) {
  if (outlook_) {
    const KvOutlook::Hits hits = outlook_->find_hits(request, slot);
    unheld_hits_ = hits.unheld;
    return hits.blocks;
  }
  hits_.clear();
  unheld_hits_ = 0;
  if (!caching_) return 0;
  const KvBlocks::Table& own = blocks_.open(table_of(slot));
  const std::int32_t full_blocks = (request.known_tokens() - 1) / block_size_;
  for (std::int32_t i = 0; i < full_blocks; ++i) {
    const std::int32_t block = blocks_.find(key_of(request, own, i));
    if (block == KvBlocks::none) break;
    hits_.push_back(block);
    unheld_hits_ += blocks_.block(block).references == 0;
  }
  return static_cast<std::int32_t>(hits_.size());
}

KvCache::Need KvCache::need(const Request& request, std::int32_t tokens,
                            const Admission& admission) const {
  const auto blocks_for = [this](std::int32_t n) {
    return (std::min(n, max_model_len_) + block_size_ - 1) / block_size_;
  };
  const std::int32_t unheld = admission.hit_blocks > 0 ? unheld_hits_ : 0;
  const std::int64_t reserve = std::int64_t{unheld} + admission.watermark;
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
    if (outlook_ && request.status != Status::running) outlook_->admit(slot);
    if (admission.hit_blocks > 0) counted_free_ -= unheld_hits_;
    take(need.blocks);
    publish(request, slot, std::min(need.computed + tokens, request.known_tokens()));
    return true;
  }
  const std::uint32_t own = table_of(slot);
  blocks_.open(own);
  for (std::int32_t i = 0; i < admission.hit_blocks; ++i) {
    const std::int32_t block = hits_[static_cast<std::size_t>(i)];
    blocks_.touch(own, block);
    record_(KvEventKind::touch, request.id, block);
  }
  for (std::int32_t i = 0; i < need.blocks; ++i) {
    const std::int32_t block = blocks_.next_free();
    blocks_.take(own, block);
    record_(KvEventKind::take, request.id, block);
  }
  publish(request, slot, std::min(need.computed + tokens, request.known_tokens()));
  return true;
}

void KvCache::publish(const Request& request, Slot slot, std::int32_t tokens) {
  if (outlook_) outlook_->publish(slot, tokens / block_size_);
  if (!caching_) return;
  const KvBlocks::Table& own = blocks_.open(table_of(slot));
  while (own.hashed < tokens / block_size_) {
    const std::int32_t block = own.blocks[static_cast<std::size_t>(own.hashed)];
    const BlockKey key = key_of(request, own, own.hashed);
    blocks_.hash(table_of(slot), key);
    record_(KvEventKind::hash, key, block);
  }
}

void KvCache::release(Request& request, Slot slot) {
  if (caching_) {
    if (request.blocks > 0) record_(KvEventKind::release, request.id);
    blocks_.open(table_of(slot));
    blocks_.release(table_of(slot));
  } else {
    // Requests that shared blocks in the snapshot give them back once each.
    const std::int64_t freed = outlook_ ? outlook_->release(slot, request.blocks) : request.blocks;
    counted_free_ =
        static_cast<std::int32_t>(std::min<std::int64_t>(counted_free_ + freed, usable_blocks_));
  }
  request.blocks = 0;
}

}  // namespace sfs
