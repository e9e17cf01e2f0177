// Shared memory with one writer that never waits: words, and slots of them under a version.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace sfs {

using Word = std::uint64_t;
static_assert(std::atomic_ref<Word>::is_always_lock_free);

inline std::atomic_ref<Word> word(std::byte* at) {
  return std::atomic_ref<Word>(*reinterpret_cast<Word*>(at));
}

// Word by word, ordered: a word read early cannot hide a version read late. On x86 these are
// plain moves.
inline void store_words(std::byte* to, const void* from, std::size_t bytes) {
  const auto* source = static_cast<const std::byte*>(from);
  for (std::size_t i = 0; i < bytes; i += sizeof(Word)) {
    Word value;
    std::memcpy(&value, source + i, sizeof value);
    word(to + i).store(value, std::memory_order_release);
  }
}
inline void load_words(void* to, std::byte* from, std::size_t bytes) {
  auto* target = static_cast<std::byte*>(to);
  for (std::size_t i = 0; i < bytes; i += sizeof(Word)) {
    const Word value = word(from + i).load(std::memory_order_acquire);
    std::memcpy(target + i, &value, sizeof value);
  }
}

// The first word of a slot is its version: odd while the slot is being written.
class SlotWrite {
 public:
  // `number`: greater than that of any write before. The slot itself, which has left the writer's
  // caches, is not read.
  SlotWrite(std::byte* slot, Word number) : version_(word(slot)), complete_(2 * number) {
    version_.store(complete_ - 1, std::memory_order_relaxed);
  }
  ~SlotWrite() { version_.store(complete_, std::memory_order_release); }
  SlotWrite(const SlotWrite&) = delete;
  SlotWrite& operator=(const SlotWrite&) = delete;

 private:
  std::atomic_ref<Word> version_;
  Word complete_;
};

template <class Read>
bool read_slot(std::byte* slot, Read read) {
  const auto version = word(slot);
  const Word before = version.load(std::memory_order_acquire);
  if (before % 2 != 0 || !read(slot + sizeof(Word))) return false;
  return version.load(std::memory_order_acquire) == before;
}

}  // namespace sfs
