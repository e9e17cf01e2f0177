// A mirror fed by an engine's journal says of its KV cache what the engine finds there.
#include "sfs/kv_mirror.h"

#include <algorithm>
#include <deque>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "dice.h"
#include "sfs/engine_loop.h"

using namespace sfs;

namespace {

// vLLM's rules written down the slow way: one queue, searched from end to end.
class SlowCache {
 public:
  explicit SlowCache(std::int32_t num_blocks) {
    for (std::int32_t block = 1; block < num_blocks; ++block) queue_.push_back(block);
  }

  void apply(const KvEvent& event) {
    switch (event.kind) {
      case KvEventKind::want:
        wanting_ = event.value;
        wants_[wanting_];
        break;
      case KvEventKind::key:
        wants_[wanting_].push_back(event.value);
        break;
      case KvEventKind::take:
        // Rule 21: the engine itself takes the head of the queue; blocks alike are all the same.
        CHECK(contents_.count(event.block) == contents_.count(queue_.front()));
        CHECK(!contents_.count(event.block) || event.block == queue_.front());
        remove(event.block);
        if (const auto held = contents_.find(event.block); held != contents_.end()) {
          std::erase(by_key_[held->second], event.block);
          contents_.erase(held);
        }
        hold(event.value, event.block);
        break;
      case KvEventKind::touch:
        if (references_[event.block] == 0) remove(event.block);
        hold(event.value, event.block);
        break;
      case KvEventKind::hash:
        contents_[event.block] = event.value;
        by_key_[event.value].push_back(event.block);
        break;
      case KvEventKind::release:
        release(event.value);
        break;
      case KvEventKind::forget:
        tables_.erase(event.value);
        wants_.erase(event.value);
        break;
      case KvEventKind::cached:
        CHECK(false);
    }
  }

  void check(const KvMirror& mirror) const {
    const auto free = static_cast<std::size_t>(mirror.plain_free() + mirror.cached_free());
    CHECK(queue_.size() == free);
    const auto plain = static_cast<std::size_t>(mirror.plain_free());
    for (std::size_t i = 0; i < plain; ++i) CHECK(!mirror.block(queue_[i]).hashed);
    std::int32_t next = mirror.oldest_free();
    std::uint64_t freed = 0;
    for (std::size_t i = plain; i < free; ++i) {
      CHECK(next == queue_[i]);
      CHECK(mirror.block(next).freed > freed);
      freed = mirror.block(next).freed;
      next = mirror.block(next).newer;
    }
    CHECK(next == -1);

    for (std::int32_t id = 1; id < mirror.num_blocks(); ++id) {
      const auto references = references_.find(id);
      CHECK(mirror.block(id).references ==
            (references == references_.end() ? 0 : references->second));
      CHECK(mirror.block(id).hashed == contents_.contains(id));
    }
    for (const auto& [key, blocks] : by_key_) {
      std::int32_t found = mirror.find(key);
      for (const std::int32_t block : blocks) {
        CHECK(found == block && mirror.block(found).key == key);
        found = mirror.block(found).behind;
      }
      CHECK(found == -1);
    }
    CHECK(mirror.tables() == wants_.size());
    for (const auto& [owner, wanted] : wants_) check_table(mirror, owner, wanted);
  }

 private:
  void check_table(const KvMirror& mirror, std::uint64_t owner,
                   const std::vector<BlockKey>& wanted) const {
    const KvMirror::Table* table = mirror.table(owner);
    CHECK(table != nullptr && table->owner == owner);
    const std::uint32_t number = mirror.number_of(*table);
    CHECK(number > 0 && &mirror.table_at(number) == table);
    CHECK(table->keys.size() >= wanted.size());
    CHECK(std::equal(wanted.begin(), wanted.end(), table->keys.begin()));
    const auto held = tables_.find(owner);
    const std::vector<std::int32_t> blocks =
        held == tables_.end() ? std::vector<std::int32_t>{} : held->second;
    CHECK(table->blocks == blocks);
    std::int32_t hashed = 0, shared = 0;
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      const KvMirror::Block& block = mirror.block(blocks[i]);
      CHECK(block.depth == static_cast<std::int32_t>(i));
      if (block.hashed) CHECK(hashed++ == block.depth && table->keys[i] == block.key);
      shared += block.references > 1;
      if (block.references == 1) CHECK(block.owners == number);
    }
    CHECK(table->hashed == hashed && table->shared == shared);
  }

  void remove(std::int32_t block) { queue_.erase(std::find(queue_.begin(), queue_.end(), block)); }
  void hold(std::uint64_t owner, std::int32_t block) {
    ++references_[block];
    tables_[owner].push_back(block);
  }
  void release(std::uint64_t owner) {
    auto& blocks = tables_[owner];
    for (auto it = blocks.rbegin(); it != blocks.rend(); ++it) {
      if (--references_[*it] > 0) continue;
      if (contents_.contains(*it))
        queue_.push_back(*it);
      else
        queue_.push_front(*it);
    }
    blocks.clear();
  }

  std::deque<std::int32_t> queue_;
  std::map<std::int32_t, int> references_;
  std::map<std::int32_t, BlockKey> contents_;
  std::map<BlockKey, std::vector<std::int32_t>> by_key_;
  std::map<std::uint64_t, std::vector<std::int32_t>> tables_;
  std::map<std::uint64_t, std::vector<BlockKey>> wants_;
  std::uint64_t wanting_ = 0;
};

SchedulerConfig random_config(Dice& dice) {
  SchedulerConfig config;
  config.block_size = 4;
  config.max_num_batched_tokens = dice.from(16, 300);
  config.max_num_seqs = dice.from(2, 24);
  config.max_model_len = 256;
  config.num_blocks = dice.from(256 / 4 + 2, 3 * 256 / 4);
  config.policy = dice.coin() ? Policy::fcfs : Policy::priority;
  config.async_scheduling = dice.coin();
  config.enable_chunked_prefill = dice.from(0, 3) > 0;
  if (!config.enable_chunked_prefill) config.max_num_batched_tokens = 256;
  return config;
}

// Few prompts and few lengths of them: prefixes are shared, whole ones are computed twice.
Request random_request(Dice& dice, std::uint64_t id, std::vector<BlockKey>& keys) {
  Request request;
  request.id = id;
  request.rank = static_cast<std::uint32_t>(id);
  request.prompt_tokens = dice.coin() ? 4 * dice.from(1, 25) : dice.from(1, 100);
  request.output_tokens = dice.from(1, 60);
  request.max_tokens = request.output_tokens + dice.from(0, 1);
  request.priority = dice.from(0, 3);
  const auto prompt = static_cast<BlockKey>(dice.from(1, 3));
  for (int i = 1; i <= request.prompt_tokens / 4; ++i)
    keys.push_back(1000 * prompt + static_cast<BlockKey>(i));
  return request;
}

struct Seen {
  int events = 0, preempted = 0, shared = 0, twins = 0;
  std::vector<KvEvent> journal;
};

Seen mirrors_equal_the_engine(std::uint32_t seed) {
  Dice dice(seed);
  const SchedulerConfig config = random_config(dice);
  EngineLoop loop(config, BatchTime{1e-3, 0, 0, 0});
  std::vector<KvEvent> journal;
  loop.scheduler.record_to(&journal);
  KvMirror mirror(config.num_blocks);
  SlowCache slow(config.num_blocks);
  Seen seen;
  const auto compare = [&] {
    mirror.apply(journal);
    for (const KvEvent& event : journal) slow.apply(event);
    seen.journal.insert(seen.journal.end(), journal.begin(), journal.end());
    journal.clear();
    CHECK(mirror.position() == seen.journal.size());
    CHECK(mirror.plain_free() + mirror.cached_free() == loop.scheduler.free_blocks());
    slow.check(mirror);
    for (const Slot slot : loop.scheduler.running()) {
      const Request& request = loop.scheduler.request(slot);
      const KvMirror::Table* table = mirror.table(request.id);
      CHECK(table != nullptr);
      CHECK(table->blocks.size() == static_cast<std::size_t>(request.blocks));
      seen.shared += table->shared;
    }
    for (std::int32_t id = 1; id < config.num_blocks; ++id)
      seen.twins += mirror.block(id).before != -1;
  };

  constexpr std::uint64_t requests = 60;
  std::uint64_t next_id = 1;
  std::vector<Token> tokens;
  for (double now_s = 0.0; loop.busy() || next_id <= requests; now_s += 1e-3) {
    for (int i = dice.from(-2, 2); i > 0 && next_id <= requests; --i) {
      std::vector<BlockKey> keys;
      const Request request = random_request(dice, next_id++, keys);
      loop.scheduler.add(request, keys);
    }
    if (dice.from(0, 20) == 0 && next_id > 1)
      loop.scheduler.abort(static_cast<std::uint64_t>(dice.from(1, static_cast<int>(next_id) - 1)));
    compare();
    const EngineLoop::Pass pass = loop.schedule(now_s);
    if (pass.scheduled) seen.preempted += static_cast<int>(loop.newest().batch.preempted.size());
    compare();
    if (dice.from(0, 5) == 0) {
      const auto checkpoint = mirror.compact();
      const KvMirror late = KvMirror::rebuild(config.num_blocks, mirror.position(), checkpoint);
      CHECK(late.position() == mirror.position());
      slow.check(late);
      if (dice.coin()) mirror = late;  // and goes on from there
    }
    if (!pass.waits) continue;
    tokens.clear();
    loop.complete_oldest(tokens);
    compare();
  }
  CHECK(mirror.tables() == 0);
  CHECK(mirror.plain_free() + mirror.cached_free() == config.usable_blocks());
  return seen;
}

// Nobody's journal: whatever is not refused leaves a state that a checkpoint can carry.
void survives(Dice& dice, std::vector<KvEvent> journal, std::int32_t num_blocks) {
  for (int changes = dice.from(1, 6); changes > 0; --changes) {
    const auto at = static_cast<std::size_t>(dice.from(0, static_cast<int>(journal.size()) - 1));
    const auto other = static_cast<std::size_t>(dice.from(0, static_cast<int>(journal.size()) - 1));
    switch (dice.from(0, 5)) {
      case 0:
        journal[at].kind = static_cast<KvEventKind>(dice.from(0, kv_event_kinds));
        break;
      case 1:
        journal[at].block = dice.from(-2, num_blocks + 1);
        break;
      case 2:
        journal[at].value = journal[other].value;
        break;
      case 3:
        std::swap(journal[at], journal[other]);
        break;
      case 4:
        journal.erase(journal.begin() + static_cast<std::ptrdiff_t>(at));
        break;
      default:
        reinterpret_cast<unsigned char*>(&journal[at])[dice.from(0, 15)] ^=
            static_cast<unsigned char>(1U << dice.from(0, 7));
    }
  }
  KvMirror mirror(num_blocks);
  try {
    mirror.apply(journal);
  } catch (const std::invalid_argument&) {
    CHECK(mirror.position() < journal.size());
  }
  const auto checkpoint = mirror.compact();
  const KvMirror late = KvMirror::rebuild(num_blocks, mirror.position(), checkpoint);
  CHECK(late.plain_free() == mirror.plain_free() && late.cached_free() == mirror.cached_free());
  CHECK(late.tables() == mirror.tables());
  for (std::int32_t a = mirror.oldest_free(), b = late.oldest_free(); a != b || a != -1;
       a = mirror.block(a).newer, b = late.block(b).newer)
    CHECK(a == b);
}

std::string refusal(std::vector<KvEvent> events) {
  KvMirror mirror(10);
  try {
    mirror.apply(events);
  } catch (const std::invalid_argument& contradiction) {
    CHECK(mirror.position() + 1 == events.size());
    return contradiction.what();
  }
  return "none";
}

void contradictions_are_named() {
  using enum KvEventKind;
  const KvEvent a{7, 0, want}, b{8, 0, want};
  CHECK(refusal({a, {7, 1, take}, {99, 1, hash}, {7, 0, release}, b, {8, 1, touch}}) == "none");
  CHECK(refusal({{7, 1, take}}).ends_with("owner 7 is unknown"));
  CHECK(refusal({a, {7, 0, take}}).ends_with("block 0 is not within 1 and num_blocks - 1"));
  CHECK(refusal({a, {7, 10, take}}).ends_with("block 10 is not within 1 and num_blocks - 1"));
  CHECK(refusal({a, {7, 1, take}, {7, 1, take}}).ends_with("block 1 is taken and not free"));
  CHECK(refusal({a, {7, 1, touch}}).ends_with("block 1 is hit and holds nothing known"));
  CHECK(refusal({a, {5, 1, hash}}).ends_with("block 1 is hashed and free"));
  CHECK(refusal({a, {7, 1, take}, {5, 1, hash}, {5, 1, hash}}).ends_with("is hashed twice"));
  CHECK(refusal({a, {7, 1, take}, {7, 2, take}, {5, 2, hash}})
            .ends_with("block 2 is hashed before the one before it"));
  CHECK(refusal({a, {3, 0, key}, {7, 1, take}, {5, 1, hash}})
            .ends_with("block 0 of owner 7 holds something else than it wants"));
  CHECK(refusal({a, {7, 1, take}, {5, 1, hash}, {7, 1, touch}})
            .ends_with("block 1 is hit at index 1 and held at 0"));
  CHECK(refusal({a, {7, 1, take}, {7, 0, forget}}).ends_with("is forgotten and holds blocks"));
  CHECK(refusal({{1, 0, key}}).ends_with("a key of no owner"));
  CHECK(refusal({a, {7, 0, forget}, {1, 0, key}}).ends_with("a key of no owner"));
  CHECK(refusal({a, {7, 1, take}, {5, 1, cached}}).ends_with("and holds something else"));
  CHECK(refusal({{0, 0, static_cast<KvEventKind>(8)}}).ends_with("kind 8 is unknown"));
  std::vector<KvEvent> greedy(11, {1, 0, key});
  greedy[0] = a;
  CHECK(refusal(greedy).ends_with("owner 7 wants more blocks than there are"));
}

void what_it_takes_is_bounded() {
  KvMirror mirror(10);
  std::vector<KvEvent> owners(1 << 16);
  CHECK(throws<std::invalid_argument>([&] {
    for (std::uint64_t owner = 0;;) {
      for (KvEvent& event : owners) event = {owner++, 0, KvEventKind::want};
      mirror.apply(owners);
    }
  }));
}

}  // namespace

int main() {
  Seen all;
  Dice dice(1);
  for (std::uint32_t seed = 1; seed <= 40; ++seed) {
    const Seen seen = mirrors_equal_the_engine(seed);
    all.preempted += seen.preempted;
    all.shared += seen.shared;
    all.twins += seen.twins;
    all.events += static_cast<int>(seen.journal.size());
    for (int i = 0; i < 50; ++i) survives(dice, seen.journal, 3 * 256 / 4);
  }
  std::printf("%d events; %d preemptions, shared blocks %d and equal ones %d times\n", all.events,
              all.preempted, all.shared, all.twins);
  CHECK(all.preempted > 100 && all.shared > 1000 && all.twins > 1000);
  contradictions_are_named();
  what_it_takes_is_bounded();
}
