// vLLM's V1 scheduler: "there is no prefill phase nor decode phase", only requests whose computed
// tokens have to catch up with their known ones, within one token budget a step.
//
// The rule numbers in comments are those of docs/scheduler_rules.md.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sfs/batch_time.h"
#include "sfs/kv_cache.h"
#include "sfs/request.h"
#include "sfs/scheduler_config.h"
#include "sfs/steady_decodes.h"
#include "sfs/waiting_queue.h"

namespace sfs {

struct Scheduled {
  Slot slot = 0;
  std::int32_t tokens = 0;
  bool emits = false;   // completes the request's known tokens, so one output token follows
  bool decode = false;  // one token behind a whole prompt; everything else is prefill
};

struct Batch {
  std::vector<Scheduled> entries;  // running order, then admissions
  std::vector<Slot> preempted;
  BatchShape shape;
  bool steady = false;  // it holds the steady decodes, too, which `entries` does not name

  void clear() {
    entries.clear();
    preempted.clear();
    shape = BatchShape{};
    steady = false;
  }
};

// One output token that reached the host, in batch order.
struct Token {
  Slot slot = 0;
  std::uint64_t request_id = 0;
  std::int32_t outputs = 0;
  Finish finish = Finish::none;
};

class Scheduler {
 public:
  Scheduler() = default;
  explicit Scheduler(const SchedulerConfig& config);

  // To be restored to what another scheduler was, whose KV blocks `mirror` shows; it has to stay as
  // it is.
  Scheduler(const SchedulerConfig& config, const KvMirror& mirror);

  // Throws std::invalid_argument for a request that could never run.
  static void check(const SchedulerConfig& config, const Request& request);

  // Queues a request that `check` would pass; `keys` name the content of its full blocks (see
  // KvCache::add).
  Slot add(const Request& request, std::span<const BlockKey> keys = {});

  // KV events are appended to `journal` from now on; see KvCache::record_to.
  void record_to(std::vector<KvEvent>* journal) { kv_.record_to(journal); }

  // Rebuilds a state observed elsewhere: requests are appended in running, then in queue order.
  // `steady_in_flight`: the newest batches in flight in which it decodes; where it turns out a
  // steady one these do not have to name it.
  struct Restored {
    Slot slot = 0;
    bool steady = false;
  };
  Restored restore(const Request& request, std::int32_t steady_in_flight = 0);
  void restore_free_blocks(std::int32_t free_blocks) { kv_.restore_free_blocks(free_blocks); }

  // Rules 3 to 15: fills `batch` with the next step's work.
  void schedule(Batch& batch);

  // Rules 16 to 18: the batch has run; appends its output tokens to `tokens`.
  void update(const Batch& batch, std::vector<Token>& tokens);

  // From now on requests that only decode are stepped together: the same schedule, but batches no
  // longer name them, nor does `running`. `in_flight`: batches under way.
  void group_decodes(std::size_t in_flight);

  // A decode run: steps in a row that hold the steady decodes and nothing else, so that the batches
  // differ by their contexts alone. How many such steps are ahead at least (0: step normally), and
  // doing that many at once. Under async scheduling the batch before the run has to be in flight.
  std::int64_t decode_run_steps();
  const SteadyDecodes& steady() const { return steady_; }
  void advance_decode_run(std::int64_t steps);

  // Undoes the newest `add`, of a request that still waits.
  void withdraw(Slot slot);

  // Takes a live request out, between steps or while a batch is in flight; false if unknown.
  bool abort(std::uint64_t request_id);

  // Rule 19: finished ids keep the engine busy for one more step.
  bool has_requests() const { return running_count() > 0 || !waiting_.empty() || finished_; }

  const SchedulerConfig& config() const { return config_; }
  const Request& request(Slot slot) const { return requests_[slot]; }
  const std::vector<Slot>& running() const { return running_; }
  const WaitingQueue& waiting() const { return waiting_; }
  std::size_t running_count() const {
    return running_.size() + static_cast<std::size_t>(steady_.size());
  }
  std::size_t slots() const { return requests_.size(); }
  std::int32_t free_blocks() const { return kv_.free_blocks(); }

 private:
  struct Admission {
    std::int32_t tokens = 0;  // 0: not in this step
    KvCache::Admission blocks;
  };

  std::int32_t long_prefill_threshold() const;
  Admission admission_of(const Request& request, std::int32_t hit_blocks, std::int32_t budget,
                         std::int32_t threshold) const;
  bool admits_nothing();
  std::int32_t wanted_tokens(const Request& request, std::int32_t threshold) const;
  void regroup();
  void ungroup();
  bool decodes_steadily(const Request& request) const;
  std::int32_t emits_in_flight(const Request& request) const;
  std::int32_t steady_batches(const Request& request) const;
  void join_steady(Slot slot, std::int64_t in_flight);
  void leave_steady(SteadyDecodes::Member member);
  void add_steady_batches(Request& request, std::int32_t scheduled, std::int32_t updated) const;
  bool leaves_steady_alone(std::int32_t budget, std::int32_t threshold) const;
  void schedule_steady(Batch& batch, std::int32_t& budget);
  void take_result(const Scheduled& entry, std::vector<Token>& tokens, bool& running_finished);
  void schedule_running(Batch& batch, std::int32_t& budget, std::int32_t threshold);
  void schedule_waiting(Batch& batch, std::int32_t& budget, std::int32_t threshold);
  bool preempt_for(std::size_t& position, Batch& batch, std::int32_t& budget);
  void finish_step(Batch& batch);
  void enqueue(Slot slot, bool at_front);
  Slot store(const Request& request);
  void retire(Slot slot);
  void drop_finished_from_running();

  SchedulerConfig config_;
  KvCache kv_;
  std::vector<Request> requests_;
  std::vector<Slot> free_slots_;
  std::vector<Slot> running_;
  WaitingQueue waiting_;
  std::vector<Slot> skipped_;
  std::uint32_t admissions_ = 0;
  bool finished_ = false;

  bool groups_decodes_ = false;
  SteadyDecodes steady_;
  std::uint32_t steady_admitted_ = 0;            // at most this, of any member
  std::vector<SteadyDecodes::Member> departed_;  // members whose last batches are in flight
};

}  // namespace sfs
