#include "request_queue.h"

#include <algorithm>
#include <string>
#include <utility>

namespace py = pybind11;

namespace sfs {

RequestQueue::RequestQueue(py::object queue, py::object heap)
    : queue_(std::move(queue)), heap_(std::move(heap)) {
  const py::object items = this->items();
  const py::object deque = py::module_::import("collections").attr("deque");
  if (heap_.is_none() ? !py::isinstance(items, deque) : !py::isinstance<py::list>(items))
    throw py::type_error("a queue must be a deque or keep a heap in a list, not " +
                         py::repr(py::type::of(items)).cast<std::string>());
}

py::object RequestQueue::items() const { return heap_.is_none() ? queue_ : queue_.attr(heap_); }

bool RequestQueue::empty() const { return py::len(items()) == 0; }

bool RequestQueue::unchanged() const {
  if (!heap_.is_none()) {
    const py::object heap = items();
    PyObject** first = PySequence_Fast_ITEMS(heap.ptr());
    return heap.is(taken_) &&
           std::equal(first, first + PySequence_Fast_GET_SIZE(heap.ptr()), lay_.begin(), lay_.end(),
                      [](auto* item, auto& ranked) { return ranked.request.is(py::handle(item)); });
  }
  // The iterator of a deque fails once the deque has changed, even behind its last item.
  const auto beyond = py::reinterpret_steal<py::object>(PyIter_Next(taken_.ptr()));
  const bool failed = PyErr_Occurred() != nullptr;
  PyErr_Clear();
  return !beyond && !failed;
}

void RequestQueue::take(const RequestReader& reader, const Visit& visit) {
  if (!heap_.is_none()) return take_heap(reader, visit);
  taken_ = py::iter(queue_);
  while (const auto request = py::reinterpret_steal<py::object>(PyIter_Next(taken_.ptr())))
    visit(request, nullptr);
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
}

// A push or a pop moves few items of a heap. Where one lies as it lay, the request itself, which
// has left the processor's caches long ago, need not be looked at.
void RequestQueue::take_heap(const RequestReader& reader, const Visit& visit) {
  const py::list heap = items();
  std::vector<Ranked> lies;
  for (const py::handle item : heap) {
    const std::size_t place = lies.size();
    if (place < lay_.size() && lay_[place].request.is(item) && !lay_[place].record->resumable) {
      lies.push_back(std::move(lay_[place]));
      continue;
    }
    auto request = py::reinterpret_borrow<py::object>(item);
    RequestRecord& record = reader.record(request);
    lies.push_back({record.constants.priority, record.constants.arrival_s, request, &record});
  }
  lay_ = std::move(lies);
  taken_ = heap;
  std::vector<const Ranked*> order;
  for (const Ranked& ranked : lay_) order.push_back(&ranked);
  std::ranges::sort(order, [](auto* a, auto* b) { return *a < *b; });
  for (const Ranked* ranked : order) visit(ranked->request, ranked->record);
}

bool RequestQueue::Ranked::operator<(const Ranked& other) const {
  if (priority != other.priority) return priority < other.priority;
  if (arrival_s != other.arrival_s) return arrival_s < other.arrival_s;
  return PyUnicode_Compare(record->request_id.ptr(), other.record->request_id.ptr()) < 0;
}

}  // namespace sfs
