// The scheduler in virtual time, run by whoever keeps that time: an engine
// whose whole life passes as fast as it can be computed. What it does is what
// `replay` does with the same workload, but requests may come while it runs,
// and depend on what it has answered so far.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "sfs/batch_time.h"
#include "sfs/emulated_engine.h"
#include "sfs/engine_loop.h"
#include "sfs/kv_journal.h"
#include "sfs/kv_mirror.h"
#include "sfs/snapshot.h"

namespace sfs {

class VirtualEngine {
 public:
  // Time starts at 0. A copy goes its own way: what would happen if.
  VirtualEngine(const SchedulerConfig& config, const BatchTime& batch_time);

  // For the first pass of the loop that begins at its arrival or later.
  // `answer_token_ids`: later prompts that continue the answer hit its blocks;
  // without them its content is its own. Throws std::invalid_argument for a
  // request that could never run.
  void submit(Request request, std::span<const std::int32_t> prompt_token_ids,
              std::span<const std::int32_t> answer_token_ids = {});

  // Heard of where a pass begins, after the arrivals, or before the results it
  // waits for are taken.
  void abort(std::uint64_t request_id, double at_s);

  // When a pass begins or results come next, unless something arrives before;
  // inf: never.
  double next_event_s() const;

  // That, alone; results and the pass that follows at once are one event.
  // Appends to `events`.
  void step(std::vector<EngineEvent>& events);

  // All that happens before `until_s`: who arrives then is still in time for a
  // pass that begins then. Time never runs backwards: a request that comes late
  // is taken by the next pass.
  void run_until(double until_s, std::vector<EngineEvent>& events);

  // As published last: by the newest pass, or stamped again where that was long
  // ago.
  const Snapshot& snapshot();

  // The KV journal after `after` up to that snapshot, or from 0 where that is too long ago. Throws
  // std::logic_error without prefix caching.
  KvJournalMessage journal_message(std::uint64_t after);

  // Over first admissions (rule 11).
  std::int64_t admitted_prompt_tokens() const { return admitted_prompt_tokens_; }
  std::int64_t prefix_hit_tokens() const { return prefix_hit_tokens_; }

 private:
  struct Submission {
    Request request;
    std::vector<BlockKey> keys;
  };

  void begin_pass(std::vector<EngineEvent>& events);
  void take_arrivals();
  void take_aborts(std::vector<EngineEvent>& events);
  void take_results(std::vector<EngineEvent>& events);
  void sleep_if_idle();
  void count_admissions(std::size_t running_before);
  void forget_old_journal();
  std::uint64_t restamps() const;

  EngineLoop loop_;
  EngineLoop::Pass pass_;          // the newest
  bool awaits_results_ = false;    // of the oldest batch, before the next pass
  double now_s_ = 0.0;             // of the loop: its last event, or when its next pass begins
  double clock_s_ = 0.0;           // of whoever runs it
  std::deque<Submission> coming_;  // by arrival
  std::multimap<double, std::uint64_t> aborts_;
  std::uint32_t next_rank_ = 0;
  std::vector<Token> tokens_;

  double published_s_ = 0.0;    // by a pass
  std::uint64_t sequence_ = 1;  // of that publication; stamps since then count on
  Snapshot snapshot_;
  std::vector<KvEvent> journal_;       // of the KV cache, what came after `forgotten_`
  std::optional<KvMirror> forgotten_;  // none without prefix caching
  std::vector<bool> never_ran_;        // by slot
  std::int64_t admitted_prompt_tokens_ = 0;
  std::int64_t prefix_hit_tokens_ = 0;
};

}  // namespace sfs
