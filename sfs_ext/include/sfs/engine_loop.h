// The engine's loop around its scheduler, apart from time: wall-clock and virtual-time drivers
// say what time it is and wait (rules 22 to 24).
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <vector>

#include "sfs/batch_time.h"
#include "sfs/scheduler.h"

namespace sfs {

inline constexpr double idle_sleep_s = 1e-3;  // rule 24

struct InFlight {
  Batch batch;
  double scheduled_s = 0.0;
  double start_s = 0.0;
  double end_s = 0.0;
};

class EngineLoop {
 public:
  EngineLoop() = default;
  EngineLoop(const SchedulerConfig& config, const BatchTime& batch_time)
      : scheduler(config), batch_time(batch_time) {}

  // One pass schedules what there is, then tells whether to wait for the oldest batch.
  struct Pass {
    bool scheduled = false;  // a batch was pushed, maybe an empty one
    bool executed = false;   // it holds work
    bool waits = false;      // complete the oldest batch at `oldest().end_s` before the next pass
  };

  Pass schedule(double now_s) {
    Pass pass;
    if (scheduler.has_requests()) {
      InFlight& next = push();
      scheduler.schedule(next.batch);
      pass.scheduled = true;
      pass.executed = next.batch.shape.tokens > 0;
      next.scheduled_s = now_s;
      next.start_s = pass.executed ? std::max(now_s, device_free_s) : now_s;
      next.end_s = next.start_s + batch_time.seconds(next.batch.shape);
      if (pass.executed) device_free_s = next.end_s;
    }
    pass.waits = waits(pass.scheduled, pass.executed);
    return pass;
  }

  bool waits(bool scheduled, bool executed) const {
    const bool fills_pipeline = scheduled && scheduler.config().async_scheduling && count_ < 2 &&
                                (executed || scheduler.has_requests());
    return count_ > 0 && !fills_pipeline;
  }

  // The oldest batch has run; appends its output tokens to `tokens`.
  void complete_oldest(std::vector<Token>& tokens) {
    scheduler.update(oldest().batch, tokens);
    first_ = (first_ + 1) % in_flight_.size();
    --count_;
  }

  // Takes as many passes of a decode run as begin before the next arrival in one stride and moves
  // the time on; the number of passes, 0 where the next one has to be stepped.
  std::int64_t advance_decode_run(double& now_s, double next_arrival_s);

  bool busy() const { return scheduler.has_requests() || count_ > 0; }
  std::size_t in_flight() const { return count_; }
  InFlight& oldest() { return in_flight_[first_]; }
  const InFlight& oldest() const { return in_flight_[first_]; }
  InFlight& newest() { return in_flight_[(first_ + count_ - 1) % in_flight_.size()]; }
  InFlight& in_flight(std::size_t i) { return in_flight_[(first_ + i) % in_flight_.size()]; }
  const InFlight& in_flight(std::size_t i) const {
    return in_flight_[(first_ + i) % in_flight_.size()];
  }
  InFlight& push() {
    ++count_;
    newest().batch.clear();
    return newest();
  }

  Scheduler scheduler;
  BatchTime batch_time;
  double device_free_s = 0.0;

 private:
  std::array<InFlight, 2> in_flight_;
  std::size_t first_ = 0;
  std::size_t count_ = 0;
};

}  // namespace sfs
