#include "sfs/block_keys.h"

#include <cstddef>

namespace sfs {

std::vector<BlockKey> block_keys(std::span<const std::int32_t> token_ids, std::int32_t block_size,
                                 BlockKey after) {
  std::vector<BlockKey> keys;
  keys.reserve(token_ids.size() / static_cast<std::size_t>(block_size));
  BlockKeyChain chain(block_size, after);
  for (const std::int32_t token_id : token_ids)
    if (const auto key = chain.add(token_id)) keys.push_back(*key);
  return keys;
}

}  // namespace sfs
