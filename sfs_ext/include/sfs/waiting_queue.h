// Requests waiting for admission: a deque (FCFS) or an order by (priority, arrival, id).
#pragma once

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <vector>

#include "sfs/request.h"

namespace sfs {

// Items lie in queue order from `head_` on, so that popping the head moves nothing.
class WaitingQueue {
 public:
  bool empty() const { return head_ == items_.size(); }
  std::size_t size() const { return items_.size() - head_; }
  Slot front() const { return items_[head_]; }
  const Slot* begin() const { return items_.data() + head_; }
  const Slot* end() const { return items_.data() + items_.size(); }

  void push_back(Slot slot) { items_.push_back(slot); }

  void push_front(Slot slot) {
    if (head_ > 0)
      items_[--head_] = slot;
    else
      items_.insert(items_.begin(), slot);
  }

  template <class Before>
  void insert_ordered(Slot slot, Before before) {
    const auto from = items_.begin() + static_cast<std::ptrdiff_t>(head_);
    items_.insert(std::upper_bound(from, items_.end(), slot, before), slot);
  }

  void pop_front() {
    if (++head_ == items_.size()) clear();
  }

  void remove(Slot slot) {
    const auto from = items_.begin() + static_cast<std::ptrdiff_t>(head_);
    const auto at = std::find(from, items_.end(), slot);
    if (at == items_.end()) throw std::logic_error("waiting queue: a request that does not wait");
    items_.erase(at);
    if (head_ == items_.size()) clear();
  }

  void clear() {
    items_.clear();
    head_ = 0;
  }

 private:
  std::vector<Slot> items_;
  std::size_t head_ = 0;
};

}  // namespace sfs
