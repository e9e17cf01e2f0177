#include "sfs/block_keys.h"

#include <cstddef>

namespace sfs {

std::vector<BlockKey> block_keys(std::span<const std::int32_t> token_ids, std::int32_t block_size,
                                 BlockKey after) {
  std::vector<BlockKey> keys;
  const auto size = static_cast<std::size_t>(block_size);
  keys.reserve(token_ids.size() / size);
  BlockKey hash = after;
  for (std::size_t i = 0; i < token_ids.size(); ++i) {
    hash = (hash ^ static_cast<std::uint32_t>(token_ids[i])) * 0x9e3779b97f4a7c15ULL;
    hash ^= hash >> 29;
    if ((i + 1) % size == 0) keys.push_back(hash);
  }
  return keys;
}

}  // namespace sfs
