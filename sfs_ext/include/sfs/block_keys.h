// Names for the content of KV blocks, which router and engine make alike.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "sfs/kv_journal.h"

namespace sfs {

inline constexpr BlockKey no_block = 0xcbf29ce484222325ULL;  // before a prompt's first

// Token by token, from a block's first on.
class BlockKeyChain {
 public:
  // `after`: the key of the block before.
  explicit BlockKeyChain(std::int32_t block_size, BlockKey after = no_block)
      : block_size_(block_size), key_(after) {}

  // Of the block that `token_id` fills, if it does: stands for its content and all before it.
  std::optional<BlockKey> add(std::int32_t token_id) {
    key_ = (key_ ^ static_cast<std::uint32_t>(token_id)) * 0x9e3779b97f4a7c15ULL;
    key_ ^= key_ >> 29;
    if (++tokens_ < block_size_) return std::nullopt;
    tokens_ = 0;
    return key_;
  }

 private:
  std::int32_t block_size_;
  std::int32_t tokens_ = 0;  // of the block that is not full
  BlockKey key_;
};

// Of all full blocks of `token_ids`.
std::vector<BlockKey> block_keys(std::span<const std::int32_t> token_ids, std::int32_t block_size,
                                 BlockKey after = no_block);

}  // namespace sfs
