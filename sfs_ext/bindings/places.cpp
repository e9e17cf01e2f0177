#include "places.h"

#include <algorithm>
#include <utility>

namespace py = pybind11;

namespace sfs {

void Places::restart() {
  std::swap(now_, before_);
  now_.clear();
  next_ = 0;
}

void Places::clear() {
  now_.clear();
  before_.clear();
}

std::optional<std::size_t> Places::add(py::handle request, RequestRecord* record) {
  const auto found =
      std::find_if(before_.begin() + static_cast<std::ptrdiff_t>(next_), before_.end(),
                   [request](const Place& old) { return old.request.is(request); });
  if (found == before_.end()) {
    now_.push_back({py::reinterpret_borrow<py::object>(request), record});
    return std::nullopt;
  }
  now_.push_back(std::move(*found));
  next_ = static_cast<std::size_t>(found - before_.begin()) + 1;
  return next_ - 1;
}

RequestRecord& Places::record(std::size_t place, const Instance& request,
                              const RequestReader& reader) {
  RequestRecord*& record = now_[place].record;
  if (record == nullptr || record->resumable) record = &reader.record(request);
  return *record;
}

}  // namespace sfs
