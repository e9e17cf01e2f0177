// The router's picture of every instance: newest snapshot, what it has sent there since, and
// forecasts from both.
#pragma once

#include <cstdint>
#include <deque>
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
#include "sfs/kv_mirror.h"
#include "sfs/load.h"
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
  double arrival_s;     // Unix time at which the engine will get it; may lie ahead
  std::int32_t prompt;  // its tokens' place among the prompts
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
  std::int32_t cached_tokens;          // of the prompt, in the instance's prefix cache now
};

using Prompt = std::span<const std::int32_t>;  // token ids

// What an instance's load says of a query without a forecast: see Load.
struct CandidateLoad {
  double ttft_s;        // likely, from arrival_s; inf where the query can never be served
  double least_ttft_s;  // see Load::Ttft
  double age_s;         // of the snapshot; nan without one
  std::int32_t running;
  std::int32_t waiting;  // bookings included
};

// Thread-safe. Instances are numbered in the order in which they were added; numbers are not
// reused. An unknown or removed number throws std::out_of_range.
class Fleet {
 public:
  // Plain stepping is there to be compared with.
  explicit Fleet(Stepping stepping = Stepping::grouped) : stepping_(stepping) {}

  // `length_sigma`: how far answers stray from their predicted lengths, as likely_output_tokens
  // takes it.
  std::int32_t add(const SchedulerConfig& config, const BatchTime& batch_time, double length_sigma);
  void remove(std::int32_t instance);

  // Shared memory on this node: read whenever a forecast finds it newer.
  void attach(std::int32_t instance, const std::string& path);

  // A snapshot from elsewhere; false if it is not newer than the one held.
  bool update(std::int32_t instance, Snapshot snapshot);
  // A stretch of its KV journal, before or after the snapshot that it leads up to; false if one
  // before it is missing: then a message that begins anew is wanted. Instances in shared memory
  // need none.
  bool update_journal(std::int32_t instance, KvJournalMessage message);
  void calibrate(std::int32_t instance, const BatchTime& batch_time);
  // From the next snapshot on: to simulate many instances anew at once would hold up all else.
  void set_length_sigma(std::int32_t instance, double sigma);

  // A dispatched request counts as waiting there until a snapshot names it.
  void book(std::int32_t instance, const Arrival& arrival, Prompt prompt = {});
  bool unbook(std::int32_t instance, std::uint64_t request_id);

  std::optional<Snapshot> snapshot(std::int32_t instance);

  // Without `prompts`, or where an instance keeps no KV journal, nothing is known to be cached.
  void forecast(double now_s, std::span<const CandidateQuery> queries,
                std::span<const Prompt> prompts, std::span<CandidateForecast> into);
  void loads(double now_s, std::span<const CandidateQuery> queries, std::span<const Prompt> prompts,
             std::span<CandidateLoad> into);

 private:
  // A simulation good for any query that comes no earlier than the one it was kept from, as long
  // as snapshot and bookings stay what they were but for later ones.
  struct Kept {
    bool valid = false;
    double earliest_arrival_s = 0.0;  // since the snapshot
    std::shared_ptr<Simulation> simulation;
    std::shared_ptr<Simulation> spare;  // the one before, whose memory the next one takes
  };

  struct Booking {
    Arrival arrival;  // in Unix time
    std::vector<BlockKey> keys;
  };

  struct Instance {
    BatchTime batch_time;
    double length_sigma = 0.0;
    Stepping stepping = Stepping::grouped;
    std::optional<SnapshotReader> reader;
    Snapshot snapshot;
    Snapshot incoming;
    std::optional<KvMirror> mirror;
    std::deque<KvJournalMessage> journal;  // ahead of the mirror
    bool mirrored = false;                 // the mirror is at the snapshot's position
    Simulation simulation;                 // at the snapshot's time
    std::int64_t queued_prefill_tokens = 0;
    std::vector<Booking> bookings;  // by arrival
    Load load;                      // of the simulation
    PromptsAhead booked;            // the bookings, summed

    std::shared_mutex mutex;  // all above: forecasts only read it
    Kept kept;
    std::mutex kept_mutex;

    // Locks it for reading, at its newest.
    std::shared_lock<std::shared_mutex> read();
    bool behind() const { return reader && reader->sequence() > snapshot.header.sequence; }
    void refresh();
    void accept();
    bool follow_journal();
    void restart();
    void sum_bookings();
    // Both copy outside the lock, for many threads may forecast at once.
    bool take_kept(double arrival_s, Simulation& into);
    void keep(const Simulation& simulation, double arrival_s);
  };

  std::shared_ptr<Instance> at(std::int32_t instance) const;
  class PromptKeys;
  static CandidateForecast forecast_one(Instance& instance, double now_s,
                                        const CandidateQuery& query, Prompt prompt,
                                        PromptKeys& prompt_keys);
  static CandidateLoad load_one(Instance& instance, double now_s, const CandidateQuery& query,
                                Prompt prompt, PromptKeys& prompt_keys);

  Stepping stepping_;
  mutable std::shared_mutex mutex_;
  std::vector<std::shared_ptr<Instance>> instances_;
};

}  // namespace sfs
