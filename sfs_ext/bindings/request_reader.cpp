#include "request_reader.h"

#include <memory>
#include <string>

#include "integer.h"

namespace py = pybind11;

namespace sfs {
namespace {

constexpr const char* record_capsule = "sfs_ext.RequestRecord";

void destroy_record(PyObject* capsule) {
  delete static_cast<RequestRecord*>(PyCapsule_GetPointer(capsule, record_capsule));
}

}  // namespace

Attribute::Attribute(const char* field, const py::dict& names)
    : field_(field), name_(py::object(names[field])) {
  PyUnicode_InternInPlace(&name_.ptr());
}

void Attribute::refuse() const {
  const std::string message =
      "a request's " + name_.cast<std::string>() + " cannot be read, which gives its " + field_;
  py::raise_from(PyErr_Occurred(), message.c_str());
  throw py::error_already_set();
}

py::object Attribute::find(py::handle request) const {
  auto value = py::reinterpret_steal<py::object>(PyObject_GetAttr(request.ptr(), name_.ptr()));
  if (value) return value;
  if (PyErr_ExceptionMatches(PyExc_AttributeError) == 0) throw py::error_already_set();
  PyErr_Clear();
  return value;
}

py::object Attribute::of(py::handle request) const {
  auto value = py::reinterpret_steal<py::object>(PyObject_GetAttr(request.ptr(), name_.ptr()));
  if (!value) refuse();
  return value;
}

std::int32_t Attribute::integer(py::handle request) const {
  const py::object value = of(request);
  const auto number = try_integer(value);
  if (!number) refuse();
  return *number;
}

double Attribute::real(py::handle request) const {
  const double number = PyFloat_AsDouble(of(request).ptr());
  if (number == -1.0 && PyErr_Occurred() != nullptr) refuse();
  return number;
}

bool Attribute::truth(py::handle request) const {
  const int truth = PyObject_IsTrue(of(request).ptr());
  if (truth < 0) refuse();
  return truth != 0;
}

py::object Attribute::of(py::handle request, PyTypeObject& kind) const {
  py::object value = of(request);
  if (!PyObject_TypeCheck(value.ptr(), &kind)) {
    PyErr_Format(PyExc_TypeError, "it is a %s, not a %s", Py_TYPE(value.ptr())->tp_name,
                 kind.tp_name);
    refuse();
  }
  return value;
}

RequestReader::RequestReader(const py::dict& attributes, py::dict blocks, py::object preempted,
                             py::function identity, KvObserver* observer)
    : record_("record", attributes),
      request_id_("request_id", attributes),
      arrival_s_("arrival_s", attributes),
      prompt_tokens_("prompt_tokens", attributes),
      output_token_ids_("output_token_ids", attributes),
      max_tokens_("max_tokens", attributes),
      priority_("priority", attributes),
      resumable_("resumable", attributes),
      computed_tokens_("computed_tokens", attributes),
      placeholders_("placeholders", attributes),
      stale_tokens_("stale_tokens", attributes),
      status_("status", attributes),
      prefills_("prefills", attributes),
      blocks_(std::move(blocks)),
      preempted_(std::move(preempted)),
      identity_(std::move(identity)),
      observer_(observer) {}

RequestRecord& RequestReader::record(py::handle request) const {
  if (const py::object capsule = record_.find(request)) {
    void* record = PyCapsule_GetPointer(capsule.ptr(), record_capsule);
    if (record == nullptr) throw py::error_already_set();
    auto& known = *static_cast<RequestRecord*>(record);
    if (known.resumable) read_constants(request, known);
    return known;
  }
  auto record = std::make_unique<RequestRecord>();
  record->request_id = request_id_.of(request, PyUnicode_Type);
  record->output_token_ids = output_token_ids_.of(request, PyList_Type);
  record->resumable = resumable_.truth(request);
  read_constants(request, *record);
  const py::capsule capsule(record.get(), record_capsule, destroy_record);
  RequestRecord& kept = *record.release();
  py::setattr(request, record_.name(), capsule);
  return kept;
}

void RequestReader::read_constants(py::handle request, RequestRecord& record) const {
  const auto identity = identity_(request).cast<std::pair<std::uint64_t, double>>();
  record.constants.id = identity.first;
  record.constants.predicted_output_tokens = static_cast<float>(identity.second);
  record.constants.arrival_s = arrival_s_.real(request);
  record.constants.prompt_tokens = prompt_tokens_.integer(request);
  record.constants.max_tokens = max_tokens_.integer(request);
  record.constants.priority = priority_.integer(request);
}

void RequestReader::read(py::handle request, const RequestRecord& record,
                         std::span<const std::uint64_t> batches, Resident& row) const {
  row.output_tokens = static_cast<std::int32_t>(PyList_GET_SIZE(record.output_token_ids.ptr()));
  row.computed_tokens = computed_tokens_.integer(request);
  row.placeholders = placeholders_.integer(request);
  row.stale_tokens = stale_tokens_.integer(request);
  row.blocks = blocks(record, row.blocks);
  for (std::size_t i = 0; i < max_in_flight; ++i) {
    const BatchShare share = i < batches.size() ? record.share_of(batches[i]) : BatchShare{};
    row.in_flight_tokens[i] = share.tokens;
    row.in_flight_emits[i] = share.emits;
  }
}

Status RequestReader::status_in_queue(py::handle request) const {
  return status_.of(request).is(preempted_) ? Status::preempted : Status::waiting;
}

std::int32_t RequestReader::blocks(const RequestRecord& record, std::int32_t known) const {
  PyObject* held = PyDict_GetItemWithError(blocks_.ptr(), record.request_id.ptr());
  if (held == nullptr) {
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    return 0;
  }
  const Py_ssize_t count = PyObject_Size(held);
  if (count < 0) throw py::error_already_set();
  if (observer_ != nullptr && (count != known || observer_->released()))
    observer_->holds(record.request_id, held);
  return static_cast<std::int32_t>(count);
}

}  // namespace sfs
