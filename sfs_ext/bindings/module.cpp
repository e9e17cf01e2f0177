// Marshals between numpy and the core, and nothing else.
#include <pybind11/native_enum.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

#include "arrays.h"
#include "ensemble.h"
#include "forest.h"
#include "kv_observer.h"
#include "sfs/block_keys.h"
#include "sfs/emulated_engine.h"
#include "sfs/engine_state.h"
#include "sfs/fleet.h"
#include "sfs/kv_mirror.h"
#include "sfs/replay.h"
#include "sfs/scheduler.h"
#include "sfs/segment.h"
#include "sfs/snapshot.h"
#include "state_writer.h"
#include "virtual_engine.h"

namespace py = pybind11;
using namespace sfs;

namespace {

std::span<const std::byte> bytes_of(const py::bytes& data) {
  const std::string_view view = data;
  return std::as_bytes(std::span(view.data(), view.size()));
}

Policy policy_of(const std::string& name) {
  if (name == "fcfs") return Policy::fcfs;
  if (name == "priority") return Policy::priority;
  throw std::invalid_argument("scheduler config: policy must be 'fcfs' or 'priority', not '" +
                              name + "'");
}

std::string policy_name(Policy policy) { return policy == Policy::fcfs ? "fcfs" : "priority"; }

auto flag(std::uint8_t SchedulerConfig::* member) {
  return [member](const SchedulerConfig& config) { return config.*member != 0; };
}

void bind_dtypes(py::module_& m) {
  PYBIND11_NUMPY_DTYPE(Resident, id, arrival_s, prompt_tokens, output_tokens, computed_tokens,
                       placeholders, max_tokens, predicted_output_tokens, priority, blocks,
                       stale_tokens, in_flight_tokens, in_flight_emits, status);
  PYBIND11_NUMPY_DTYPE(BatchInFlight, started_s, tokens, decode_context_tokens, prefill_attention);
  PYBIND11_NUMPY_DTYPE(SnapshotHeader, sequence, published_s, free_blocks, running, waiting,
                       omitted, in_flight_batches, kv_journaled, kv_position, in_flight);
  PYBIND11_NUMPY_DTYPE(StepRecord, sequence, scheduled_s, started_s, done_s, prefill_tokens,
                       prefill_requests, decode_requests, preempted, decode_context_tokens,
                       prefill_attention, running, waiting, free_blocks);
  PYBIND11_NUMPY_DTYPE(CandidateQuery, instance, prompt_tokens, predicted_output_tokens, max_tokens,
                       priority, arrival_s, prompt);
  PYBIND11_NUMPY_DTYPE(CandidateForecast, instance, status, ttft_s, waiting_s, prefill_s, age_s,
                       batches, running, waiting, booked, queued_prefill_tokens, cached_tokens);
  PYBIND11_NUMPY_DTYPE(CandidateLoad, ttft_s, least_ttft_s, age_s, running, waiting);
  PYBIND11_NUMPY_DTYPE(EngineEvent, id, tokens, finish, at_s);
  PYBIND11_NUMPY_DTYPE(KvEvent, value, block, kind);
  m.attr("HEARTBEAT_S") = heartbeat_s;
  m.attr("resident_dtype") = py::dtype::of<Resident>();
  m.attr("batch_dtype") = py::dtype::of<BatchInFlight>();
  m.attr("snapshot_dtype") = py::dtype::of<SnapshotHeader>();
  m.attr("step_dtype") = py::dtype::of<StepRecord>();
  m.attr("query_dtype") = py::dtype::of<CandidateQuery>();
  m.attr("forecast_dtype") = py::dtype::of<CandidateForecast>();
  m.attr("load_dtype") = py::dtype::of<CandidateLoad>();
  m.attr("event_dtype") = py::dtype::of<EngineEvent>();
  m.attr("kv_event_dtype") = py::dtype::of<KvEvent>();
}

void bind_config(py::module_& m) {
  py::class_<SchedulerConfig>(m, "SchedulerConfig",
                              "An engine's scheduling limits, under vLLM's own names.")
      .def(py::init([](int max_num_batched_tokens, int max_num_seqs, int block_size, int num_blocks,
                       int max_model_len, const std::string& policy, bool enable_chunked_prefill,
                       bool enable_prefix_caching, bool async_scheduling,
                       int long_prefill_token_threshold, bool long_prefill_token_threshold_adaptive,
                       double watermark, bool scheduler_reserve_full_isl, int max_num_active_seqs) {
             SchedulerConfig config;
             config.max_num_batched_tokens = max_num_batched_tokens;
             config.max_num_seqs = max_num_seqs;
             config.max_num_active_seqs = max_num_active_seqs;
             config.block_size = block_size;
             config.num_blocks = num_blocks;
             config.max_model_len = max_model_len;
             config.long_prefill_token_threshold = long_prefill_token_threshold;
             config.policy = policy_of(policy);
             config.enable_chunked_prefill = enable_chunked_prefill;
             config.enable_prefix_caching = enable_prefix_caching;
             config.async_scheduling = async_scheduling;
             config.long_prefill_token_threshold_adaptive = long_prefill_token_threshold_adaptive;
             config.scheduler_reserve_full_isl = scheduler_reserve_full_isl;
             config.watermark = watermark;
             config.validate();
             return config;
           }),
           py::kw_only(), py::arg("max_num_batched_tokens"), py::arg("max_num_seqs"),
           py::arg("block_size"), py::arg("num_blocks"), py::arg("max_model_len"),
           py::arg("policy") = "fcfs", py::arg("enable_chunked_prefill") = true,
           py::arg("enable_prefix_caching") = true, py::arg("async_scheduling") = false,
           py::arg("long_prefill_token_threshold") = 0,
           py::arg("long_prefill_token_threshold_adaptive") = false, py::arg("watermark") = 0.0,
           py::arg("scheduler_reserve_full_isl") = true, py::arg("max_num_active_seqs") = 0)
      .def_readonly("max_num_batched_tokens", &SchedulerConfig::max_num_batched_tokens)
      .def_readonly("max_num_seqs", &SchedulerConfig::max_num_seqs)
      .def_readonly("max_num_active_seqs", &SchedulerConfig::max_num_active_seqs)
      .def_readonly("block_size", &SchedulerConfig::block_size)
      .def_readonly("num_blocks", &SchedulerConfig::num_blocks)
      .def_readonly("max_model_len", &SchedulerConfig::max_model_len)
      .def_readonly("long_prefill_token_threshold", &SchedulerConfig::long_prefill_token_threshold)
      .def_property_readonly("policy",
                             [](const SchedulerConfig& c) { return policy_name(c.policy); })
      .def_property_readonly("enable_chunked_prefill",
                             flag(&SchedulerConfig::enable_chunked_prefill))
      .def_property_readonly("enable_prefix_caching", flag(&SchedulerConfig::enable_prefix_caching))
      .def_property_readonly("async_scheduling", flag(&SchedulerConfig::async_scheduling))
      .def_property_readonly("long_prefill_token_threshold_adaptive",
                             flag(&SchedulerConfig::long_prefill_token_threshold_adaptive))
      .def_property_readonly("scheduler_reserve_full_isl",
                             flag(&SchedulerConfig::scheduler_reserve_full_isl))
      .def_readonly("watermark", &SchedulerConfig::watermark)
      .def_property_readonly("kv_capacity_tokens", &SchedulerConfig::kv_capacity_tokens)
      .def("__eq__", [](const SchedulerConfig& a, const SchedulerConfig& b) { return a == b; })
      .def("__repr__",
           [](const SchedulerConfig& c) {
             return "SchedulerConfig(max_num_batched_tokens=" +
                    std::to_string(c.max_num_batched_tokens) +
                    ", max_num_seqs=" + std::to_string(c.max_num_seqs) +
                    ", block_size=" + std::to_string(c.block_size) +
                    ", num_blocks=" + std::to_string(c.num_blocks) +
                    ", max_model_len=" + std::to_string(c.max_model_len) + ", policy='" +
                    policy_name(c.policy) + "')";
           })
      .def(py::pickle(
          [](const SchedulerConfig& c) {
            return py::bytes(reinterpret_cast<const char*>(&c), sizeof c);
          },
          [](const py::bytes& state) {
            const auto data = bytes_of(state);
            SchedulerConfig config;
            if (data.size() != sizeof config)
              throw std::invalid_argument("scheduler config: pickled by another version");
            std::memcpy(&config, data.data(), sizeof config);
            config.validate();
            return config;
          }));

  py::class_<BatchTime>(m, "BatchTime", "Eq. 9: seconds a batch takes; coefficients in seconds.")
      .def(py::init([](double b0_s, double b1_s, double b2_s, double b3_s) {
             for (const double b : {b0_s, b1_s, b2_s, b3_s})
               if (!(b >= 0.0) || std::isinf(b))
                 throw std::invalid_argument(
                     "batch time: coefficients must be finite and >= 0, not " + std::to_string(b));
             return BatchTime{b0_s, b1_s, b2_s, b3_s};
           }),
           py::arg("b0_s"), py::arg("b1_s"), py::arg("b2_s"), py::arg("b3_s"))
      .def_readonly("b0_s", &BatchTime::b0_s)
      .def_readonly("b1_s", &BatchTime::b1_s)
      .def_readonly("b2_s", &BatchTime::b2_s)
      .def_readonly("b3_s", &BatchTime::b3_s)
      .def(
          "seconds",
          [](const BatchTime& b, std::int64_t tokens, std::int64_t decode_context_tokens,
             std::int64_t prefill_attention) {
            return b.seconds({tokens, decode_context_tokens, prefill_attention});
          },
          py::arg("tokens"), py::arg("decode_context_tokens"), py::arg("prefill_attention"))
      .def("__eq__",
           [](const BatchTime& a, const BatchTime& b) {
             return a.b0_s == b.b0_s && a.b1_s == b.b1_s && a.b2_s == b.b2_s && a.b3_s == b.b3_s;
           })
      .def("__repr__",
           [](const BatchTime& b) {
             return py::str("BatchTime(b0_s={:.4g}, b1_s={:.4g}, b2_s={:.4g}, b3_s={:.4g})")
                 .format(b.b0_s, b.b1_s, b.b2_s, b.b3_s);
           })
      .def(py::pickle(
          [](const BatchTime& b) { return py::make_tuple(b.b0_s, b.b1_s, b.b2_s, b.b3_s); },
          [](const py::tuple& t) {
            return BatchTime{t[0].cast<double>(), t[1].cast<double>(), t[2].cast<double>(),
                             t[3].cast<double>()};
          }));
}

void bind_kv_journal(py::module_& m) {
  py::native_enum<KvEventKind>(m, "KvEventKind", "enum.IntEnum")
      .value("WANT", KvEventKind::want)
      .value("KEY", KvEventKind::key)
      .value("TAKE", KvEventKind::take)
      .value("TOUCH", KvEventKind::touch)
      .value("HASH", KvEventKind::hash)
      .value("RELEASE", KvEventKind::release)
      .value("FORGET", KvEventKind::forget)
      .value("CACHED", KvEventKind::cached)
      .finalize();

  py::class_<KvJournalMessage>(
      m, "KvJournalMessage",
      "A stretch of an engine's KV journal: the events after from_position "
      "up to to_position, or from 0 those that rebuild the state there.")
      .def_readonly("num_blocks", &KvJournalMessage::num_blocks)
      .def_readonly("from_position", &KvJournalMessage::from)
      .def_readonly("to_position", &KvJournalMessage::to)
      .def_property_readonly(
          "events",
          [](const KvJournalMessage& message) {
            return array_of(std::span<const KvEvent>(message.events));
          },
          "kv_event_dtype.")
      .def("to_bytes",
           [](const KvJournalMessage& message) {
             const auto data = message.to_bytes();
             return py::bytes(reinterpret_cast<const char*>(data.data()), data.size());
           })
      .def_static(
          "from_bytes",
          [](const py::bytes& data) { return KvJournalMessage::from_bytes(bytes_of(data)); },
          py::arg("data"),
          "ValueError on anything truncated, corrupt or of another layout version.");

  py::class_<KvMirror>(m, "KvMirror", "An engine's KV cache, rebuilt from its journal.")
      .def(py::init([](std::int32_t num_blocks) {
             if (num_blocks < 2)
               throw std::invalid_argument("KV mirror: num_blocks must be at least 2, not " +
                                           std::to_string(num_blocks));
             return KvMirror(num_blocks);
           }),
           py::arg("num_blocks"))
      .def(
          "apply",
          [](KvMirror& mirror, const Array<KvEvent>& events) { mirror.apply(span_of(events)); },
          py::arg("events"), "kv_event_dtype; ValueError for the first that contradicts the state.")
      .def(
          "advance",
          [](KvMirror& mirror, const py::bytes& message) {
            return mirror.advance(KvJournalMessage::from_bytes(bytes_of(message)));
          },
          py::arg("message"), "A KvJournalMessage's bytes; False if it begins ahead of position.")
      .def(
          "compact",
          [](const KvMirror& mirror) {
            const auto events = mirror.compact();
            return array_of(std::span<const KvEvent>(events));
          },
          "kv_event_dtype events that rebuild this state from nothing.")
      .def(
          "cached_tokens",
          [](const KvMirror& mirror, const Array<BlockKey>& keys, std::int32_t block_size) {
            const auto wanted = span_of(keys);
            const auto missing = std::find_if(wanted.begin(), wanted.end(), [&](BlockKey key) {
              return mirror.find(key) == KvBlocks::none;
            });
            return (missing - wanted.begin()) * block_size;
          },
          py::arg("keys"), py::arg("block_size"), "Of the prefix with these keys (uint64).")
      .def_property_readonly("position", &KvMirror::position, "Events it stands for.")
      .def_property_readonly("requests", &KvMirror::tables, "Live ones.")
      .def_property_readonly(
          "free_blocks",
          [](const KvMirror& mirror) { return mirror.plain_free() + mirror.cached_free(); })
      .def_property_readonly("cached_free_blocks", &KvMirror::cached_free,
                             "Free ones that hold known content.");
}

void bind_snapshots(py::module_& m) {
  py::class_<Snapshot>(m, "Snapshot", "One consistent state of an engine.")
      .def_readonly("config", &Snapshot::config)
      .def_property_readonly(
          "header",
          [](const Snapshot& s) {
            return py::object(array_of(std::span(&s.header, 1)))[py::int_(0)].cast<py::object>();
          },
          "A scalar of snapshot_dtype.")
      .def_property_readonly(
          "residents",
          [](const Snapshot& s) { return array_of(std::span<const Resident>(s.residents)); },
          "resident_dtype, in running order and then in queue order.")
      .def("to_bytes",
           [](const Snapshot& s) {
             const auto data = s.to_bytes();
             return py::bytes(reinterpret_cast<const char*>(data.data()), data.size());
           })
      .def_static(
          "from_bytes", [](const py::bytes& data) { return Snapshot::from_bytes(bytes_of(data)); },
          py::arg("data"),
          "ValueError on anything truncated, corrupt or of another layout version.");

  py::class_<SnapshotWriter>(
      m, "SnapshotWriter",
      "Publishes an engine's snapshots and step records through a file of shared memory.")
      .def(py::init<std::string, const SchedulerConfig&, std::uint32_t, std::uint32_t, bool>(),
           py::arg("path"), py::arg("config"), py::arg("max_residents") = 4096,
           py::arg("max_steps") = 8192, py::arg("kv_journaled") = false)
      .def(
          "append",
          [](SnapshotWriter& writer, const Array<KvEvent>& events) {
            writer.append(span_of(events));
          },
          py::arg("events"),
          "kv_event_dtype: what happened to the KV blocks since the last call, before the publish "
          "that shows it.")
      .def(
          "publish",
          [](SnapshotWriter& writer, double published_s, int free_blocks,
             const Array<BatchInFlight>& in_flight, const Array<Resident>& residents) {
            if (in_flight.size() > static_cast<py::ssize_t>(max_in_flight))
              throw std::invalid_argument("snapshot writer: more than 2 batches in flight");
            SnapshotHeader header{};
            header.published_s = published_s;
            header.free_blocks = free_blocks;
            header.in_flight_batches = static_cast<std::int32_t>(in_flight.size());
            std::copy_n(in_flight.data(), in_flight.size(), header.in_flight);
            const auto all = span_of(residents);
            for (const Resident& r : all)
              ++(r.status == static_cast<std::uint8_t>(Status::running) ? header.running
                                                                        : header.waiting);
            writer.publish(header, all.data(), all.size());
          },
          py::arg("published_s"), py::arg("free_blocks"), py::arg("in_flight"),
          py::arg("residents"),
          "in_flight: batch_dtype, oldest first; residents: resident_dtype, running first.")
      .def(
          "record_step",
          [](SnapshotWriter& writer, const Array<StepRecord>& step) {
            if (step.size() != 1)
              throw std::invalid_argument("snapshot writer: record_step takes one step");
            writer.record_step(*step.data());
          },
          py::arg("step"), "One step_dtype record; its sequence is filled in.")
      .def("close", &SnapshotWriter::close, "Unlinks the file.");

  py::class_<SnapshotReader>(m, "SnapshotReader")
      .def(py::init<const std::string&>(), py::arg("path"))
      .def_property_readonly("sequence", &SnapshotReader::sequence,
                             "Number of the newest snapshot; 0 before the first.")
      .def_property_readonly("config", &SnapshotReader::config)
      .def_property_readonly("writer_pid", &SnapshotReader::writer_pid)
      .def_property_readonly("kv_journaled", &SnapshotReader::kv_journaled)
      .def_property_readonly("kv_position", &SnapshotReader::kv_position,
                             "Events in the KV journal; 0 without one.")
      .def(
          "read_journal",
          [](const SnapshotReader& reader, KvMirror& mirror, std::uint64_t up_to) {
            const py::gil_scoped_release release;
            return reader.read_journal(mirror, up_to);
          },
          py::arg("mirror"), py::arg("up_to"),
          "Brings the mirror to a snapshot's kv_position; False where that cannot be had.")
      .def(
          "read_journal_message",
          [](const SnapshotReader& reader, std::uint64_t after,
             const std::optional<std::uint64_t>& up_to) {
            const py::gil_scoped_release release;
            return reader.read_journal_message(after, up_to.value_or(reader.kv_position()));
          },
          py::arg("after"), py::arg("up_to") = py::none(),
          "Events after `after`, or from 0 where that is too long ago; None where neither is "
          "there.")
      .def(
          "read",
          [](const SnapshotReader& reader) -> std::optional<Snapshot> {
            Snapshot snapshot;
            const py::gil_scoped_release release;
            if (!reader.read(snapshot)) return std::nullopt;
            return snapshot;
          },
          "The newest complete snapshot; None before the first.")
      .def(
          "read_steps",
          [](const SnapshotReader& reader, std::uint64_t after) {
            const auto steps = reader.read_steps(after);
            return array_of(std::span<const StepRecord>(steps));
          },
          py::arg("after") = 0,
          "step_dtype records with sequence > after that the ring still holds.");
}

void bind_fleet(py::module_& m) {
  py::native_enum<ForecastStatus>(m, "ForecastStatus", "enum.IntEnum")
      .value("OK", ForecastStatus::ok)
      .value("NO_SNAPSHOT", ForecastStatus::no_snapshot)
      .value("NEVER", ForecastStatus::never)
      .value("BOUND", ForecastStatus::bound)
      .finalize();

  py::class_<Fleet>(m, "Fleet", "The router's picture of every instance. Thread-safe.")
      .def(py::init([](bool plain_stepping) {
             return std::make_unique<Fleet>(plain_stepping ? Stepping::plain : Stepping::grouped);
           }),
           py::kw_only(), py::arg("plain_stepping") = false,
           "plain_stepping: one request at a time in every batch, to compare with.")
      .def("add", &Fleet::add, py::arg("config"), py::arg("batch_time"),
           py::arg("length_sigma") = 0.0, "Returns the instance's number.")
      .def("remove", &Fleet::remove, py::arg("instance"))
      .def("attach", &Fleet::attach, py::arg("instance"), py::arg("path"))
      .def(
          "update",
          [](Fleet& fleet, std::int32_t instance, const py::bytes& snapshot) {
            const auto data = bytes_of(snapshot);
            const py::gil_scoped_release release;
            return fleet.update(instance, Snapshot::from_bytes(data));
          },
          py::arg("instance"), py::arg("snapshot"),
          "False if it is not newer than the one held; ValueError if it is not a snapshot.")
      .def(
          "update_journal",
          [](Fleet& fleet, std::int32_t instance, const py::bytes& message) {
            const auto data = bytes_of(message);
            const py::gil_scoped_release release;
            return fleet.update_journal(instance, KvJournalMessage::from_bytes(data));
          },
          py::arg("instance"), py::arg("message"),
          "False if a message before it is missing; ValueError if it is not a journal message.")
      .def("calibrate", &Fleet::calibrate, py::arg("instance"), py::arg("batch_time"))
      .def("set_length_sigma", &Fleet::set_length_sigma, py::arg("instance"),
           py::arg("length_sigma"), py::call_guard<py::gil_scoped_release>(),
           "As add() takes it; forecasts do from the next snapshot on.")
      .def(
          "book",
          [](Fleet& fleet, std::int32_t instance, std::uint64_t request_id, double arrival_s,
             int prompt_tokens, double predicted_output_tokens, int max_tokens, int priority,
             const std::optional<Array<std::int32_t>>& prompt) {
            fleet.book(instance,
                       {.id = request_id,
                        .arrival_s = arrival_s,
                        .prompt_tokens = prompt_tokens,
                        .predicted_output_tokens = predicted_output_tokens,
                        .max_tokens = max_tokens,
                        .priority = priority},
                       prompt ? span_of(*prompt) : Prompt{});
          },
          py::arg("instance"), py::arg("request_id"), py::arg("arrival_s"),
          py::arg("prompt_tokens"), py::arg("predicted_output_tokens"), py::arg("max_tokens"),
          py::arg("priority") = 0, py::arg("prompt") = py::none(), "prompt: its token ids.")
      .def("unbook", &Fleet::unbook, py::arg("instance"), py::arg("request_id"))
      .def("snapshot", &Fleet::snapshot, py::arg("instance"))
      .def(
          "forecast",
          [](Fleet& fleet, double now_s, const Array<CandidateQuery>& queries,
             const std::vector<Array<std::int32_t>>& prompts) {
            Array<CandidateForecast> forecasts(queries.size());
            const auto from = span_of(queries);
            const std::span<CandidateForecast> into(forecasts.mutable_data(), from.size());
            const auto token_ids = spans_of(prompts);
            {
              const py::gil_scoped_release release;
              fleet.forecast(now_s, from, token_ids, into);
            }
            return forecasts;
          },
          py::arg("now_s"), py::arg("queries"), py::arg("prompts") = py::list(),
          "query_dtype[n] to forecast_dtype[n]; prompts: token ids that `prompt` of a query points "
          "to. IndexError for an unknown instance.")
      .def(
          "loads",
          [](Fleet& fleet, double now_s, const Array<CandidateQuery>& queries,
             const std::vector<Array<std::int32_t>>& prompts) {
            Array<CandidateLoad> loads(queries.size());
            const auto from = span_of(queries);
            const auto token_ids = spans_of(prompts);
            const std::span<CandidateLoad> into(loads.mutable_data(), from.size());
            const py::gil_scoped_release release;
            fleet.loads(now_s, from, token_ids, into);
            return loads;
          },
          py::arg("now_s"), py::arg("queries"), py::arg("prompts") = py::list(),
          "query_dtype[n] to load_dtype[n], as forecast, but from sums in place of a simulation.");
}

void bind_engine(py::module_& m) {
  py::class_<EmulatedEngine>(m, "EmulatedEngine",
                             "The scheduler in real time, batch times from a model.")
      .def(py::init<const SchedulerConfig&, const BatchTime&, const std::string&>(),
           py::arg("config"), py::arg("batch_time"), py::arg("snapshot_path"))
      .def(
          "submit",
          [](EmulatedEngine& engine, std::uint64_t request_id,
             const Array<std::int32_t>& prompt_token_ids, int output_tokens, int max_tokens,
             double predicted_output_tokens, int priority, double arrival_s) {
            engine.submit(requested(request_id, arrival_s, output_tokens, max_tokens,
                                    predicted_output_tokens, priority),
                          span_of(prompt_token_ids));
          },
          py::arg("request_id"), py::arg("prompt_token_ids"), py::arg("output_tokens"),
          py::arg("max_tokens"), py::arg("predicted_output_tokens"), py::arg("priority"),
          py::arg("arrival_s"), "Ends by EOS after output_tokens where that is below max_tokens.")
      .def("abort", &EmulatedEngine::abort, py::arg("request_id"))
      .def("fileno", &EmulatedEngine::event_descriptor, "Readable while events wait.")
      .def(
          "poll",
          [](EmulatedEngine& engine) {
            const auto events = engine.take_events();
            return array_of(std::span<const EngineEvent>(events));
          },
          "event_dtype, one for each token since the last call.")
      .def("error", &EmulatedEngine::error)
      .def("stop", &EmulatedEngine::stop, py::call_guard<py::gil_scoped_release>());
}

py::dict step_dict(const ReplayStep& step) {
  py::dict out;
  out["batch"] = step.batch;
  out["preempted"] = step.preempted;
  out["finished"] = step.finished;
  out["free_blocks"] = step.free_blocks;
  out["free_blocks_after"] = step.free_blocks_after;
  out["time_s"] = step.time_s;
  return out;
}

void bind_replay(py::module_& m) {
  m.def(
      "replay",
      [](const SchedulerConfig& config, const py::list& requests,
         const std::optional<BatchTime>& batch_time, double idle_sleep_s, std::int64_t max_steps) {
        std::vector<ReplayRequest> workload;
        for (const auto& item : requests) {
          const auto given = item.cast<py::dict>();
          ReplayRequest next;
          next.request.id = workload.size();
          next.request.arrival_s = given["arrival_s"].cast<double>();
          next.request.rank = given["rank"].cast<std::uint32_t>();
          next.request.prompt_tokens = given["prompt_tokens"].cast<std::int32_t>();
          next.request.output_tokens = given["output_tokens"].cast<std::int32_t>();
          next.request.max_tokens = given["max_tokens"].cast<std::int32_t>();
          next.request.priority = given["priority"].cast<std::int32_t>();
          next.abort_s = given["abort_s"].cast<double>();
          next.keys = given["block_keys"].cast<std::vector<BlockKey>>();
          workload.push_back(std::move(next));
        }
        ReplayResult result;
        {
          const py::gil_scoped_release release;
          result = replay(
              config, std::move(workload),
              {.batch_time = batch_time, .idle_sleep_s = idle_sleep_s, .max_steps = max_steps});
        }
        py::list steps;
        for (const ReplayStep& step : result.steps) steps.append(step_dict(step));
        return py::make_tuple(steps, result.token_times_s);
      },
      py::arg("config"), py::arg("requests"), py::arg("batch_time") = py::none(),
      py::arg("idle_sleep_s") = 0.0, py::arg("max_steps") = 200000,
      "Steps and, by request, token times; RuntimeError if max_steps do not finish it.");

  m.def(
      "block_keys",
      [](const Array<std::int32_t>& token_ids, std::int32_t block_size, BlockKey after) {
        if (block_size < 1) throw std::invalid_argument("block_size must be >= 1");
        const auto keys = block_keys(span_of(token_ids), block_size, after);
        return array_of(std::span<const BlockKey>(keys));
      },
      py::arg("token_ids"), py::arg("block_size"), py::arg("after") = no_block,
      "uint64 keys of the full blocks, each for its content and all before it. after: the key of "
      "the block before them.");
  m.def("likely_output_tokens", &likely_output_tokens, py::arg("predicted"), py::arg("sigma"),
        py::arg("outputs"), py::arg("chance"),
        "Total length that an answer with `outputs` tokens already exceeds with this chance.");
}

}  // namespace

// A missing file is FileNotFoundError, a full disk OSError with its errno.
void translate_system_errors() {
  py::register_local_exception_translator([](std::exception_ptr failure) {
    try {
      if (failure) std::rethrow_exception(failure);
    } catch (const std::system_error& error) {
      const auto arguments = py::make_tuple(error.code().value(), error.what());
      py::set_error(PyExc_OSError, arguments);
    }
  });
}

PYBIND11_MODULE(_core, m) {
  m.doc() = "The scheduler core: vLLM's batching rules, forecasts, snapshots.";
  translate_system_errors();
  bind_dtypes(m);
  bind_config(m);
  bind_kv_journal(m);
  bind_snapshots(m);
  bind_kv_observer(m);
  bind_state_writer(m);
  bind_fleet(m);
  bind_engine(m);
  bind_virtual_engine(m);
  bind_forest(m);
  bind_ensemble(m);
  bind_replay(m);
}
