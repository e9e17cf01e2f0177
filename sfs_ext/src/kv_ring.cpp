#include "kv_ring.h"

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

#include "sequence_lock.h"

namespace sfs {
namespace {

// The writer says `begun` before it overwrites and `done` when what it wrote is whole, so a reader
// that finds `begun` less than the ring's length ahead of where it read from has read no mixture.
struct Positions {
  alignas(64) Word begun;
  Word done;
};
static_assert(sizeof(Positions) % sizeof(Word) == 0);

struct CheckpointHeader {
  Word version;
  Word position;
  Word count;
};
static_assert(sizeof(KvEvent) % sizeof(Word) == 0);

constexpr std::uint64_t least_events = std::uint64_t{1} << 15;
constexpr std::size_t checkpoints = 2;

// A mirror lies scattered in memory that engines keep pushing out of the processor's caches: some
// events at once cost it little more than one.
constexpr std::size_t mirrored_at_once = 128;

std::size_t checkpoint_bytes(std::uint64_t ring_events) {
  return sizeof(CheckpointHeader) + ring_events / 2 * sizeof(KvEvent);
}

Positions& positions(std::byte* memory) { return *reinterpret_cast<Positions*>(memory); }
std::byte* ring(std::byte* memory) { return memory + sizeof(Positions); }

}  // namespace

std::uint64_t KvRing::events_for(std::int32_t num_blocks) {
  return std::max(least_events, std::bit_ceil(8 * static_cast<std::uint64_t>(num_blocks)));
}

std::size_t KvRing::bytes_for(std::uint64_t events) {
  return events == 0 ? 0
                     : sizeof(Positions) + events * sizeof(KvEvent) +
                           checkpoints * checkpoint_bytes(events);
}

std::byte* KvRing::checkpoint(std::uint64_t index) const {
  return ring(memory_) + events_ * sizeof(KvEvent) + index * checkpoint_bytes(events_);
}

std::uint64_t KvRing::position() const {
  return std::atomic_ref(positions(memory_).done).load(std::memory_order_acquire);
}

void KvRing::append(std::uint64_t from, std::span<const KvEvent> events) {
  const std::uint64_t to = from + events.size();
  std::atomic_ref(positions(memory_).begun).store(to, std::memory_order_relaxed);
  const std::uint64_t start = from % events_;
  const std::uint64_t before_end = std::min<std::uint64_t>(events.size(), events_ - start);
  store_words(ring(memory_) + start * sizeof(KvEvent), events.data(), before_end * sizeof(KvEvent));
  store_words(ring(memory_), events.data() + before_end,
              (events.size() - before_end) * sizeof(KvEvent));
  std::atomic_ref(positions(memory_).done).store(to, std::memory_order_release);
}

bool KvRing::read(std::uint64_t from, std::uint64_t to, std::vector<KvEvent>& into) const {
  const auto overwritten = [&] {
    return std::atomic_ref(positions(memory_).begun).load(std::memory_order_acquire) - from >
           events_;
  };
  if (from > to || to > position() || to - from > events_ || overwritten()) return false;
  const std::size_t kept = into.size();
  into.resize(kept + (to - from));
  const std::uint64_t start = from % events_;
  const std::uint64_t before_end = std::min(to - from, events_ - start);
  load_words(into.data() + kept, ring(memory_) + start * sizeof(KvEvent),
             before_end * sizeof(KvEvent));
  load_words(into.data() + kept + before_end, ring(memory_),
             (to - from - before_end) * sizeof(KvEvent));
  if (!overwritten()) return true;
  into.resize(kept);
  return false;
}

bool KvRing::write_checkpoint(std::uint64_t position, std::span<const KvEvent> events) {
  if (events.size() > checkpoint_events()) return false;
  std::byte* slot = checkpoint(++checkpoints_ % checkpoints);
  const SlotWrite write(slot, checkpoints_);
  const std::array<Word, 2> head{position, events.size()};
  store_words(slot + sizeof(Word), head.data(), sizeof head);
  store_words(slot + sizeof(CheckpointHeader), events.data(), events.size() * sizeof(KvEvent));
  return true;
}

bool KvRing::read_checkpoint(std::uint64_t up_to, Checkpoint& into) const {
  // The newest first; it is overwritten a ring's length from now at the earliest.
  std::array<std::uint64_t, checkpoints> position{};
  for (std::size_t i = 0; i < checkpoints; ++i)
    position[i] = word(checkpoint(i) + sizeof(Word)).load(std::memory_order_acquire);
  std::array<std::size_t, checkpoints> newest_first{0, 1};
  if (position[1] > position[0]) std::swap(newest_first[0], newest_first[1]);
  for (const std::size_t i : newest_first) {
    std::byte* slot = checkpoint(i);
    const bool complete = read_slot(slot, [&](std::byte* data) {
      std::array<Word, 2> head;
      load_words(head.data(), data, sizeof head);
      const auto [at, count] = head;
      if (at > up_to || count > checkpoint_events()) return false;
      into.position = at;
      into.events.resize(count);
      load_words(into.events.data(), slot + sizeof(CheckpointHeader), count * sizeof(KvEvent));
      return true;
    });
    if (complete) return true;
  }
  return false;
}

// A checkpoint costs as much as some events a block, and comes once in half a ring: O(events).
void KvJournalWriter::append(std::span<const KvEvent> events) {
  const std::uint64_t stretch = ring_.events() / 8;
  while (!events.empty()) {
    const auto next = events.first(std::min<std::size_t>(events.size(), stretch));
    ring_.append(position_, next);
    position_ += next.size();
    unmirrored_.insert(unmirrored_.end(), next.begin(), next.end());
    events = events.subspan(next.size());
    const bool is_due = position_ >= next_checkpoint_;
    if (is_due || unmirrored_.size() >= mirrored_at_once) {
      mirror_.apply(unmirrored_);
      unmirrored_.clear();
    }
    if (!is_due) continue;
    const bool fits = ring_.write_checkpoint(position_, mirror_.compact());
    next_checkpoint_ = position_ + (fits ? ring_.events() / 2 : stretch);
  }
}

}  // namespace sfs
