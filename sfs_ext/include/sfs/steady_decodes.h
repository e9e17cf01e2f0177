// Requests that decode one token in every batch until shortly before their end. They are kept as
// sums, so that a step costs the same however many they are, and many steps no more than one.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "sfs/request.h"

namespace sfs {

class SteadyDecodes {
 public:
  SteadyDecodes() = default;
  explicit SteadyDecodes(std::int32_t block_size)
      : block_size_(block_size), phases_(static_cast<std::size_t>(block_size)) {}

  bool empty() const { return members_.empty(); }
  std::int32_t size() const { return static_cast<std::int32_t>(members_.size()); }

  // Batches that hold the members: scheduled, and of those the ones whose results are back.
  std::int64_t scheduled() const { return scheduled_; }
  std::int64_t updated() const { return updated_; }

  struct Member {
    Slot slot = 0;
    std::int64_t after = 0;  // takes part in the batches after this one...
    std::int64_t until = 0;  // ...up to this one
  };

  // `computed`: tokens after all batches scheduled so far.
  void join(const Member& member, std::int32_t computed);

  // A member whose last batch has been scheduled leaves; `computed` as for `join`.
  std::optional<Member> due() const {
    if (members_.empty() || members_.front().until > scheduled_) return std::nullopt;
    return members_.front();
  }
  void leave_due(std::int32_t computed);

  // All leave at once; the members as they were.
  std::vector<Member> dissolve();

  // Ahead: batches until a member has to leave, blocks that so many batches take, and how many
  // batches `blocks` are enough for.
  std::int64_t batches_left() const {
    return members_.empty() ? std::numeric_limits<std::int64_t>::max()
                            : members_.front().until - scheduled_;
  }
  std::int64_t blocks_for(std::int64_t batches) const;
  std::int64_t batches_within(std::int64_t blocks) const;

  // Sum of the members' contexts in the next batch.
  std::int64_t context_tokens() const { return context_tokens_; }

  void schedule(std::int64_t batches) {
    scheduled_ += batches;
    context_tokens_ += batches * size();
  }
  void update(std::int64_t batches) { updated_ += batches; }

  // As restored: batches in flight that held members.
  void begin_with(std::int64_t in_flight) { scheduled_ = in_flight; }

 private:
  // Members of one phase need their next block in the same batches.
  std::size_t phase(std::int64_t computed) const {
    return static_cast<std::size_t>(((computed - scheduled_) % block_size_ + block_size_) %
                                    block_size_);
  }
  // The phase that needs a block in the batch `ahead` batches from the next one.
  std::size_t phase_in(std::int64_t ahead) const {
    return static_cast<std::size_t>((block_size_ - (scheduled_ + ahead) % block_size_) %
                                    block_size_);
  }

  std::int64_t block_size_ = 1;
  std::int64_t scheduled_ = 0;
  std::int64_t updated_ = 0;
  std::int64_t context_tokens_ = 0;
  std::vector<std::int32_t> phases_;
  std::vector<Member> members_;  // a heap, the next to leave first
};

}  // namespace sfs
