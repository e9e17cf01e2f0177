// KV journals that no engine wrote: whatever a mirror does not refuse, a checkpoint can carry.
#include <algorithm>
#include <limits>
#include <stdexcept>

#include "check.h"
#include "fuzz_engine.h"
#include "fuzz_target.h"
#include "sfs/kv_mirror.h"

using namespace sfs;

namespace {

constexpr int max_blocks = 1024;

struct Input {
  std::uint32_t num_blocks = 0;
  std::uint32_t split = 0;  // events that come as a checkpoint
  std::vector<KvEvent> journal;

  static Input from(const std::uint8_t* data, std::size_t size) {
    InputReader reader(data, size);
    Input input;
    input.num_blocks = reader.take<std::uint32_t>();
    input.split = reader.take<std::uint32_t>();
    input.journal = reader.take_many<KvEvent>(reader.left() / sizeof(KvEvent));
    return input;
  }
  Bytes bytes() const {
    Bytes all;
    append(all, &num_blocks, 1);
    append(all, &split, 1);
    append(all, journal.data(), journal.size());
    return all;
  }
};

void check_equal(const KvMirror& a, const KvMirror& b) {
  CHECK(a.plain_free() == b.plain_free() && a.cached_free() == b.cached_free());
  CHECK(a.tables() == b.tables() && a.position() == b.position());
  for (std::int32_t id = 1; id < a.num_blocks(); ++id) {
    const KvMirror::Block &x = a.block(id), &y = b.block(id);
    CHECK(x.references == y.references && x.hashed == y.hashed);
    if (x.hashed) CHECK(x.key == y.key && x.before == y.before && x.behind == y.behind);
    if (x.hashed && x.references == 0) CHECK(x.older == y.older && x.newer == y.newer);
  }
}

// What holds of any mirror, whatever it was told.
void check_sound(const KvMirror& mirror) {
  std::int32_t free = 0;
  for (std::int32_t id = 1; id < mirror.num_blocks(); ++id)
    free += mirror.block(id).references == 0;
  CHECK(mirror.plain_free() + mirror.cached_free() == free);
  std::int32_t cached = 0;
  for (std::int32_t id = mirror.oldest_free(); id != -1; id = mirror.block(id).newer) {
    CHECK(++cached <= free);
    CHECK(mirror.block(id).hashed && mirror.block(id).references == 0);
    const std::int32_t newer = mirror.block(id).newer;
    CHECK(newer == -1 || mirror.block(newer).freed > mirror.block(id).freed);
  }
  CHECK(cached == mirror.cached_free());
}

}  // namespace

Bytes seed_input(Dice& dice) {
  RandomEngine engine(dice, /*prefix_caching=*/true);
  Input input;
  std::vector<KvEvent> journal;
  engine.loop.scheduler.record_to(&journal);
  engine.run(dice, dice.from(1, 60));
  input.num_blocks = static_cast<std::uint32_t>(engine.config.num_blocks);
  if (dice.coin()) {
    KvMirror mirror(engine.config.num_blocks);
    mirror.apply(journal);
    input.journal = mirror.compact();
    input.split = static_cast<std::uint32_t>(input.journal.size());
    journal.clear();
    engine.run(dice, dice.from(1, 20));
  }
  input.journal.insert(input.journal.end(), journal.begin(), journal.end());
  return input.bytes();
}

void mutate(Bytes& bytes, Dice& dice) {
  Input input = Input::from(bytes.data(), bytes.size());
  if (input.journal.empty()) return;
  if (dice.from(0, 15) == 0)
    input.num_blocks = hostile(input.num_blocks, dice);
  else if (dice.from(0, 15) == 0)
    input.split = hostile(input.split, dice);
  else
    mutate_journal(input.journal, dice);
  bytes = input.bytes();
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const Input input = Input::from(data, size);
  const auto num_blocks = static_cast<std::int32_t>(input.num_blocks % max_blocks) + 1;
  const std::size_t split = std::min<std::size_t>(input.split, input.journal.size());
  const auto journal = std::span(input.journal);
  KvMirror mirror(num_blocks);
  try {
    mirror = KvMirror::rebuild(num_blocks, 1000, journal.first(split));
  } catch (const std::invalid_argument&) {
  }
  const std::uint64_t begun = mirror.position();
  try {
    mirror.apply(journal.subspan(split));
    CHECK(mirror.position() == begun + journal.size() - split);
  } catch (const std::invalid_argument&) {
    CHECK(mirror.position() < begun + journal.size() - split);
  }
  check_sound(mirror);
  const auto checkpoint = mirror.compact();
  const KvMirror late = KvMirror::rebuild(num_blocks, mirror.position(), checkpoint);
  check_equal(late, mirror);
  return 0;
}
