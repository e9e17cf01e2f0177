#include "sfs/steady_decodes.h"

#include <algorithm>
#include <utility>

namespace sfs {
namespace {

bool leaves_later(const SteadyDecodes::Member& a, const SteadyDecodes::Member& b) {
  return a.until > b.until;
}

}  // namespace

void SteadyDecodes::join(const Member& member, std::int32_t computed) {
  ++phases_[phase(computed)];
  context_tokens_ += computed;
  members_.push_back(member);
  std::push_heap(members_.begin(), members_.end(), leaves_later);
}

void SteadyDecodes::leave_due(std::int32_t computed) {
  --phases_[phase(computed)];
  context_tokens_ -= computed;
  std::pop_heap(members_.begin(), members_.end(), leaves_later);
  members_.pop_back();
}

std::vector<SteadyDecodes::Member> SteadyDecodes::dissolve() {
  std::fill(phases_.begin(), phases_.end(), 0);
  context_tokens_ = 0;
  return std::exchange(members_, {});
}

std::int64_t SteadyDecodes::blocks_for(std::int64_t batches) const {
  std::int64_t blocks = batches / block_size_ * size();
  for (std::int64_t i = 0; i < batches % block_size_; ++i) blocks += phases_[phase_in(i)];
  return blocks;
}

std::int64_t SteadyDecodes::batches_within(std::int64_t blocks) const {
  const std::int64_t rounds = blocks / size();
  std::int64_t batches = rounds * block_size_;
  blocks -= rounds * size();
  for (std::int64_t i = 0; i < block_size_; ++i, ++batches) {
    blocks -= phases_[phase_in(i)];
    if (blocks < 0) break;
  }
  return batches;
}

}  // namespace sfs
