// Publishes the state of a scheduler written in Python, after each of its steps.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "kv_observer.h"
#include "request_reader.h"
#include "resident_rows.h"
#include "sfs/segment.h"

namespace sfs {

// Every call holds the interpreter's lock, and once the clock is read nothing that publishes runs
// Python: a snapshot is whole whichever thread publishes it.
class StateWriter {
 public:
  // `clock` gives Unix time in seconds.
  // `observer`: of the KV journal; null without one.
  StateWriter(SnapshotWriter& writer, RequestReader reader, ResidentRows rows,
              pybind11::function clock, KvObserver* observer)
      : writer_(writer),
        reader_(std::move(reader)),
        rows_(std::move(rows)),
        clock_(std::move(clock)),
        observer_(observer) {}

  // A step was scheduled: `tokens` by request id, of requests in `running`. `output` is what names
  // the step to `done`; an empty one takes its place in the pipeline, too. Throws, with nothing
  // published, if anything cannot be read.
  void scheduled(pybind11::object output, const pybind11::dict& tokens,
                 const pybind11::list& running, double scheduled_s, std::int32_t preempted,
                 std::int32_t free_blocks);

  // Records the step, unless it was empty; nothing if it was not seen when scheduled. Whether the
  // engine is idle now: nobody is left and nothing under way.
  bool done(pybind11::handle output, double done_s, const pybind11::list& running);

  void publish_idle(std::int32_t free_blocks);

  // A state that no step has changed for a heartbeat is still the state, up to `hang_s`.
  void restamp(double hang_s);

  // A step was missed: nothing that was read before is taken to hold.
  void forget();

  void close();

 private:
  struct Batch {
    pybind11::object output;
    std::uint64_t number = 0;
    StepRecord step{};  // completed when the batch is done
  };

  double now_s() const;
  double start_s(double scheduled_s) const;
  void publish(std::int32_t free_blocks);
  void append_kv_events();

  SnapshotWriter& writer_;
  RequestReader reader_;
  ResidentRows rows_;
  pybind11::function clock_;
  KvObserver* observer_;
  std::deque<Batch> in_flight_;
  std::uint64_t batches_ = 0;
  std::vector<std::uint64_t> numbers_;  // of those in flight, oldest first
  std::optional<double> busy_since_s_;
  SnapshotHeader published_{};
  bool current_ = false;  // the rows are those of the newest snapshot
  bool missed_ = false;   // a step, since the newest snapshot
};

}  // namespace sfs

void bind_state_writer(pybind11::module_& m);
