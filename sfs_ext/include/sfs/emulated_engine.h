// The scheduler in real time, on a thread of its own: an engine without a GPU or weights whose
// batches last as long as a batch-time model says.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "sfs/batch_time.h"
#include "sfs/engine_loop.h"
#include "sfs/segment.h"

namespace sfs {

// One output token (or the end of an aborted request) that the host has seen.
struct EngineEvent {
  std::uint64_t id;
  std::int32_t tokens;  // outputs so far
  std::int32_t finish;  // Finish
  double at_s;          // Unix time
};

class EmulatedEngine {
 public:
  EmulatedEngine(const SchedulerConfig& config, const BatchTime& batch_time,
                 const std::string& snapshot_path);
  ~EmulatedEngine();
  EmulatedEngine(const EmulatedEngine&) = delete;
  EmulatedEngine& operator=(const EmulatedEngine&) = delete;

  // Throws std::invalid_argument for a request that could never run.
  void submit(Request request, std::span<const std::int32_t> prompt_token_ids);
  void abort(std::uint64_t request_id);

  int event_descriptor() const { return event_.descriptor; }  // readable while events wait
  std::vector<EngineEvent> take_events();

  std::optional<std::string> error() const;  // what ended the thread, if anything did
  void stop();

 private:
  struct Submission {
    Request request;
    std::vector<BlockKey> keys;
  };

  struct EventDescriptor {
    EventDescriptor();
    ~EventDescriptor();
    EventDescriptor(const EventDescriptor&) = delete;
    EventDescriptor& operator=(const EventDescriptor&) = delete;
    int descriptor;
  };

  void run();
  void loop_until_stopped();
  bool take_submissions();       // false: stop
  void take_aborts();            // of requests it knows; mutex_ is held
  bool wait_until(double at_s);  // restamps meanwhile; false: stop
  void complete_oldest();
  void publish();
  void notify(std::span<const EngineEvent> events);
  void signal();

  EventDescriptor event_;
  EngineLoop loop_;
  SnapshotWriter writer_;
  std::vector<KvEvent> journal_;  // since the last publication
  Snapshot scratch_;
  std::vector<Token> tokens_;
  std::vector<EngineEvent> outgoing_;
  double previous_done_s_ = 0.0;

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<Submission> submissions_;
  std::vector<std::uint64_t> aborts_;
  std::vector<EngineEvent> events_;
  std::optional<std::string> error_;
  bool stopping_ = false;
  std::uint32_t next_rank_ = 0;
  std::thread thread_;
};

}  // namespace sfs
