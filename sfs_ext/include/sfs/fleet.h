// The router's picture of every instance: newest snapshot, what it has sent there since, and
// forecasts from both.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <span>
#include <string>
#include <vector>

#include "sfs/batch_time.h"
#include "sfs/engine_state.h"
#include "sfs/forecast.h"
#include "sfs/segment.h"
#include "sfs/snapshot.h"

namespace sfs {

// One candidate of a decision: a query under this instance's tokenizer and predictions.
struct CandidateQuery {
  std::int32_t instance;
  std::int32_t prompt_tokens;
  double predicted_output_tokens;  // 0: unknown
  std::int32_t max_tokens;
  std::int32_t priority;
  double arrival_s;  // Unix time at which the engine will get it; may lie ahead
};

struct CandidateForecast {
  std::int32_t instance;
  std::int32_t status;  // ForecastStatus
  double ttft_s;        // from arrival_s; inf unless status is ok
  double waiting_s;
  double prefill_s;
  double age_s;  // of the snapshot; nan without one
  std::int32_t batches;
  std::int32_t running;
  std::int32_t waiting;  // bookings included
  std::int32_t booked;
  std::int64_t queued_prefill_tokens;  // residents and bookings, eq. 6
};

// Thread-safe. Instances are numbered in the order in which they were added; numbers are not
// reused. An unknown or removed number throws std::out_of_range.
class Fleet {
 public:
  // Plain stepping is there to be compared with.
  explicit Fleet(Stepping stepping = Stepping::grouped) : stepping_(stepping) {}

  std::int32_t add(const SchedulerConfig& config, const BatchTime& batch_time, double length_sigma);
  void remove(std::int32_t instance);

  // Shared memory on this node: read whenever a forecast finds it newer.
  void attach(std::int32_t instance, const std::string& path);

  // A snapshot from elsewhere; false if it is not newer than the one held.
  bool update(std::int32_t instance, Snapshot snapshot);
  void calibrate(std::int32_t instance, const BatchTime& batch_time);

  // A dispatched request counts as waiting there until a snapshot names it.
  void book(std::int32_t instance, const Arrival& arrival);
  bool unbook(std::int32_t instance, std::uint64_t request_id);

  std::optional<Snapshot> snapshot(std::int32_t instance);

  void forecast(double now_s, std::span<const CandidateQuery> queries,
                std::span<CandidateForecast> into);

 private:
  // A simulation good for any query that comes no earlier than the one it was kept from, as long
  // as snapshot and bookings stay what they were but for later ones.
  struct Kept {
    bool valid = false;
    double earliest_arrival_s = 0.0;  // since the snapshot
    Simulation simulation;
  };

  struct Instance {
    BatchTime batch_time;
    double length_sigma = 0.0;
    Stepping stepping = Stepping::grouped;
    std::optional<SnapshotReader> reader;
    Snapshot snapshot;
    Snapshot incoming;
    Simulation simulation;  // at the snapshot's time
    std::int64_t queued_prefill_tokens = 0;
    std::vector<Arrival> bookings;  // by arrival, in Unix time

    std::shared_mutex mutex;  // all above: forecasts only read it
    Kept kept;
    std::mutex kept_mutex;

    bool behind() const { return reader && reader->sequence() > snapshot.header.sequence; }
    void refresh();
    void accept();
    void restart();
    bool take_kept(double arrival_s, Simulation& into);
  };

  std::shared_ptr<Instance> at(std::int32_t instance) const;
  static CandidateForecast forecast_one(Instance& instance, double now_s,
                                        const CandidateQuery& query);

  Stepping stepping_;
  mutable std::shared_mutex mutex_;
  std::vector<std::shared_ptr<Instance>> instances_;
};

}  // namespace sfs
