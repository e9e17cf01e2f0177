// Marshals between numpy and the engine in virtual time.
#include "virtual_engine.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "arrays.h"
#include "sfs/virtual_engine.h"

namespace py = pybind11;
using namespace sfs;

namespace {

using TokenIds = Array<std::int32_t>;

}  // namespace

Request requested(std::uint64_t request_id, double arrival_s, int output_tokens, int max_tokens,
                  double predicted_output_tokens, int priority) {
  Request request;
  request.id = request_id;
  request.arrival_s = arrival_s;
  request.output_tokens = output_tokens;
  request.max_tokens = max_tokens;
  request.predicted_output_tokens = static_cast<float>(predicted_output_tokens);
  request.priority = priority;
  return request;
}

void bind_virtual_engine(py::module_& m) {
  py::class_<VirtualEngine>(m, "VirtualEngine",
                            "The scheduler in virtual time, from 0 s on. Not thread-safe.")
      .def(py::init<const SchedulerConfig&, const BatchTime&>(), py::arg("config"),
           py::arg("batch_time"))
      .def(
          "submit",
          [](VirtualEngine& engine, std::uint64_t request_id, double arrival_s,
             const TokenIds& prompt_token_ids, int output_tokens, int max_tokens,
             double predicted_output_tokens, int priority,
             const std::optional<TokenIds>& answer_token_ids) {
            engine.submit(
                requested(request_id, arrival_s, output_tokens, max_tokens, predicted_output_tokens,
                          priority),
                span_of(prompt_token_ids),
                answer_token_ids ? span_of(*answer_token_ids) : std::span<const std::int32_t>());
          },
          py::arg("request_id"), py::arg("arrival_s"), py::arg("prompt_token_ids"),
          py::arg("output_tokens"), py::arg("max_tokens"), py::arg("predicted_output_tokens"),
          py::arg("priority") = 0, py::arg("answer_token_ids") = py::none(),
          "For the first pass that begins at arrival_s or later. Ends by EOS after output_tokens "
          "where that is below max_tokens.")
      .def("abort", &VirtualEngine::abort, py::arg("request_id"), py::arg("at_s"))
      .def_property_readonly("next_event_s", &VirtualEngine::next_event_s,
                             "When a pass begins or results come next; inf: never.")
      .def(
          "step",
          [](VirtualEngine& engine) {
            std::vector<EngineEvent> events;
            engine.step(events);
            return array_of(std::span<const EngineEvent>(events));
          },
          "The next event alone; event_dtype, one for each token that came with it.")
      .def(
          "run_until",
          [](VirtualEngine& engine, double until_s) {
            std::vector<EngineEvent> events;
            {
              const py::gil_scoped_release release;
              engine.run_until(until_s, events);
            }
            return array_of(std::span<const EngineEvent>(events));
          },
          py::arg("until_s"), "All that happens before until_s; event_dtype, one for each token.")
      .def("snapshot", &VirtualEngine::snapshot, py::return_value_policy::copy,
           "As published last.")
      .def(
          "journal_message",
          [](VirtualEngine& engine, std::uint64_t after) {
            const auto data = engine.journal_message(after).to_bytes();
            return py::bytes(reinterpret_cast<const char*>(data.data()), data.size());
          },
          py::arg("after"),
          "A KvJournalMessage's bytes: after `after` up to the snapshot's kv_position, or from 0.")
      .def(
          "__copy__",
          [](const VirtualEngine& engine) { return std::make_unique<VirtualEngine>(engine); },
          "Goes its own way from here: what would happen if.")
      .def_property_readonly("admitted_prompt_tokens", &VirtualEngine::admitted_prompt_tokens,
                             "Of all requests that have run, each counted once.")
      .def_property_readonly("prefix_hit_tokens", &VirtualEngine::prefix_hit_tokens,
                             "Of these, those found in the prefix cache.");
}
