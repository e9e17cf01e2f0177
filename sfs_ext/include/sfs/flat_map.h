// A map from 64-bit names to small numbers that copies as one block of memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace sfs {

// Open addressing. Names are not UINT64_MAX; nothing is ever erased.
class FlatMap {
 public:
  static constexpr std::int32_t none = -1;

  std::int32_t find(std::uint64_t name) const {
    if (entries_.empty()) return none;
    for (std::size_t i = place(name);; i = (i + 1) & (entries_.size() - 1)) {
      if (entries_[i].name == name) return entries_[i].value;
      if (entries_[i].name == no_name) return none;
    }
  }

  // `name` is not in it yet.
  void insert(std::uint64_t name, std::int32_t value) {
    if (2 * (size_ + 1) > entries_.size()) grow();
    put({name, value});
    ++size_;
  }

 private:
  static constexpr std::uint64_t no_name = ~std::uint64_t{0};
  struct Entry {
    std::uint64_t name = no_name;
    std::int32_t value = none;
  };

  std::size_t place(std::uint64_t name) const {
    return static_cast<std::size_t>((name * 0x9e3779b97f4a7c15ULL) >> 32) & (entries_.size() - 1);
  }
  void put(const Entry& entry) {
    std::size_t i = place(entry.name);
    while (entries_[i].name != no_name) i = (i + 1) & (entries_.size() - 1);
    entries_[i] = entry;
  }
  void grow() {
    std::vector<Entry> old(entries_.empty() ? 16 : 2 * entries_.size());
    old.swap(entries_);
    for (const Entry& entry : old)
      if (entry.name != no_name) put(entry);
  }

  std::vector<Entry> entries_;
  std::size_t size_ = 0;
};

}  // namespace sfs
