// Names for the content of KV blocks, which router and engine make alike.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sfs/kv_journal.h"

namespace sfs {

inline constexpr BlockKey no_block = 0xcbf29ce484222325ULL;  // before a prompt's first

// Keys of the full blocks of `token_ids`, each standing for its content and all before it. `after`:
// the key of the block before them.
std::vector<BlockKey> block_keys(std::span<const std::int32_t> token_ids, std::int32_t block_size,
                                 BlockKey after = no_block);

}  // namespace sfs
