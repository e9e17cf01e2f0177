#include "state_writer.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "integer.h"

namespace py = pybind11;

namespace sfs {
namespace {

// Adds a request's part to eq. 9's terms.
void add(StepRecord& step, const Resident& row, std::int64_t tokens) {
  const std::int64_t context = row.computed_tokens - tokens;
  if (tokens == 1 && context >= row.prompt_tokens) {
    step.decode_requests += 1;
    step.decode_context_tokens += context;
  } else {
    step.prefill_requests += 1;
    step.prefill_tokens += static_cast<std::int32_t>(tokens);
    step.prefill_attention += tokens * context + tokens * (tokens + 1) / 2;
  }
}

std::int32_t tokens_of(const py::dict& tokens, const RequestRecord& record) {
  PyObject* value = PyDict_GetItemWithError(tokens.ptr(), record.request_id.ptr());
  if (value == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return value != nullptr ? integer(value) : 0;
}

}  // namespace

double StateWriter::now_s() const {
  const auto now = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(clock_.ptr()));
  if (!now) throw py::error_already_set();
  return now.cast<double>();
}

void StateWriter::scheduled(py::object output, const py::dict& tokens, const py::list& running,
                            double scheduled_s, std::int32_t preempted, std::int32_t free_blocks) {
  current_ = false;
  if (std::exchange(missed_, false)) rows_.forget();
  Batch batch{.output = std::move(output), .number = ++batches_};
  numbers_.clear();
  for (const Batch& before : in_flight_) numbers_.push_back(before.number);
  numbers_.push_back(batch.number);

  const std::size_t count = running.size();
  writer_.fetch(count);
  rows_.restart_running(count);
  std::size_t found = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const py::object request = running[i];
    auto [record, row] = rows_.add_running(request, reader_);
    const std::int32_t share = tokens_of(tokens, record);
    if (share > 0) record.join({batch.number, share, !reader_.prefills(request)});
    reader_.read(request, record, numbers_, row);
    if (share == 0) continue;
    add(batch.step, row, share);
    ++found;
  }
  if (found != tokens.size())
    throw std::invalid_argument("of " + std::to_string(tokens.size()) + " scheduled requests " +
                                std::to_string(found) + " are running");
  rows_.refresh_waiting(reader_, numbers_);

  if (tokens.empty() && in_flight_.empty()) busy_since_s_.reset();
  batch.step.scheduled_s = scheduled_s;
  batch.step.started_s = start_s(scheduled_s);
  batch.step.preempted = preempted;
  batch.step.running = static_cast<std::int32_t>(count);
  batch.step.waiting = static_cast<std::int32_t>(rows_.waiting());
  batch.step.free_blocks = free_blocks;
  in_flight_.push_back(std::move(batch));
  publish(free_blocks);
}

double StateWriter::start_s(double scheduled_s) const {
  if (!in_flight_.empty())
    return std::numeric_limits<double>::quiet_NaN();  // starts when the one before it is done
  // The host's work between two steps of a busy engine counts for the later one: a forecast adds
  // up steps back to back, and an engine that schedules synchronously pays for both.
  return busy_since_s_.value_or(scheduled_s);
}

bool StateWriter::done(py::handle output, double done_s, const py::list& running) {
  const auto found = std::ranges::find_if(
      in_flight_, [output](const Batch& batch) { return batch.output.is(output); });
  if (found == in_flight_.end()) return false;
  StepRecord step = found->step;
  in_flight_.erase(in_flight_.begin(), found + 1);
  if (!in_flight_.empty()) in_flight_.front().step.started_s = done_s;
  const bool busy = !running.empty() || !rows_.nobody_waits();
  if (step.prefill_requests + step.decode_requests > 0) {
    busy_since_s_ = busy ? std::optional(done_s) : std::nullopt;
    step.done_s = done_s;
    writer_.record_step(step);
  }
  return !busy && in_flight_.empty();
}

void StateWriter::publish_idle(std::int32_t free_blocks) {
  rows_.forget();
  publish(free_blocks);
}

void StateWriter::publish(std::int32_t free_blocks) {
  if (in_flight_.size() > max_in_flight)
    throw std::invalid_argument("more than " + std::to_string(max_in_flight) +
                                " batches in flight");
  current_ = false;
  const double published_s = now_s();
  const auto rows = rows_.all();
  published_ = {};
  published_.published_s = published_s;
  published_.free_blocks = free_blocks;
  published_.waiting = static_cast<std::int32_t>(rows_.waiting());
  published_.running = static_cast<std::int32_t>(rows.size()) - published_.waiting;
  published_.in_flight_batches = static_cast<std::int32_t>(in_flight_.size());
  std::ranges::transform(in_flight_, published_.in_flight, [](const Batch& batch) {
    const StepRecord& step = batch.step;
    return BatchInFlight{step.started_s, step.prefill_tokens + step.decode_requests,
                         step.decode_context_tokens, step.prefill_attention};
  });
  append_kv_events();
  writer_.publish(published_, rows.data(), rows.size());
  current_ = true;
}

void StateWriter::append_kv_events() {
  if (observer_ == nullptr) return;
  try {
    if (observer_->failure()) throw std::runtime_error(*observer_->failure());
    if (!observer_->events().empty()) writer_.append(observer_->events());
    observer_->clear();
  } catch (const std::exception& failure) {
    writer_.end_journal();
    std::exchange(observer_, nullptr)->fail(failure.what());
    throw std::runtime_error(std::string("the KV journal ends here: ") + failure.what());
  }
}

void StateWriter::restamp(double hang_s) {
  const double restamped_s = now_s();
  if (!current_) return;
  SnapshotHeader header = published_;
  header.published_s = restamped_s;
  const auto rows = rows_.all();
  const double age_s = header.published_s - published_.published_s;
  if (age_s < heartbeat_s || (!rows.empty() && age_s > hang_s)) return;
  writer_.publish(header, rows.data(), rows.size());
}

void StateWriter::forget() {
  current_ = false;
  missed_ = true;
}

void StateWriter::close() {
  current_ = false;
  writer_.close();
}

}  // namespace sfs

void bind_state_writer(py::module_& m) {
  using sfs::StateWriter;
  py::class_<StateWriter>(
      m, "StateWriter",
      "Publishes the state of a scheduler written in Python, read off its objects after each step.")
      .def(py::init([](sfs::SnapshotWriter& writer, const py::dict& request_attributes,
                       py::dict blocks, const py::sequence& queues, const py::object& heap,
                       py::object preempted, py::function identity, py::function clock,
                       sfs::KvObserver* observer) {
             return std::make_unique<StateWriter>(
                 writer,
                 sfs::RequestReader(request_attributes, std::move(blocks), std::move(preempted),
                                    std::move(identity), observer),
                 sfs::ResidentRows(queues, heap), std::move(clock), observer);
           }),
           py::keep_alive<1, 2>(), py::keep_alive<1, 10>(), py::arg("writer"), py::kw_only(),
           py::arg("request_attributes"), py::arg("blocks"), py::arg("queues"), py::arg("heap"),
           py::arg("preempted"), py::arg("identity"), py::arg("clock"), py::arg("observer"),
           "request_attributes: field to attribute. blocks: list by request id. queues: of waiting "
           "requests, deques, or keeping a heap in the list that is their attribute `heap`. "
           "preempted: that status. identity: request to its key and predicted output tokens. "
           "clock: Unix time in seconds. observer: of the KV journal, or None.")
      .def(
          "scheduled",
          [](StateWriter& writer, py::object output, const py::dict& tokens,
             const py::list& running, double scheduled_s, std::int32_t preempted,
             std::int32_t free_blocks) {
            writer.scheduled(std::move(output), tokens, running, scheduled_s, preempted,
                             free_blocks);
          },
          py::arg("output"), py::arg("tokens"), py::arg("running"), py::arg("scheduled_s"),
          py::arg("preempted"), py::arg("free_blocks"),
          "Publishes what a step leaves. tokens: by request id; output: names the step to done().")
      .def("done", &StateWriter::done, py::arg("output"), py::arg("done_s"), py::arg("running"),
           "Records the step; whether the engine is idle now. Nothing for a step without tokens.")
      .def("publish_idle", &StateWriter::publish_idle, py::arg("free_blocks"))
      .def(
          "restamp", &StateWriter::restamp, py::arg("hang_s"),
          "Publishes a state again that no step has changed for HEARTBEAT_S, unless that is longer "
          "than hang_s ago and it has residents: then the engine hangs.")
      .def("forget", &StateWriter::forget,
           "A step could not be published: nothing read before is taken to hold.")
      .def("close", &StateWriter::close);
}
