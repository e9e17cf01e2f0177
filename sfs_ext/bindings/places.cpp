#include "places.h"

#include <algorithm>
#include <utility>

namespace py = pybind11;

namespace sfs {

constexpr std::size_t fetch_distance = 8;

// Records lie scattered and have left the processor's caches since the step before.
void Places::fetch(std::size_t former) const {
  if (former < before_.size()) __builtin_prefetch(before_[former].record, 1);
}

void Places::restart() {
  std::swap(now_, before_);
  now_.clear();
  next_ = 0;
  for (std::size_t former = 0; former < fetch_distance; ++former) fetch(former);
}

void Places::clear() {
  now_.clear();
  before_.clear();
}

std::optional<std::size_t> Places::add(py::handle request, RequestRecord* record) {
  fetch(next_ + fetch_distance);
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

RequestRecord& Places::record(std::size_t place, py::handle request, const RequestReader& reader) {
  RequestRecord*& record = now_[place].record;
  if (record == nullptr || record->resumable) record = &reader.record(request);
  return *record;
}

}  // namespace sfs
