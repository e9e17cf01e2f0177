#include "resident_rows.h"

#include <algorithm>
#include <utility>

namespace py = pybind11;

namespace sfs {
namespace {

// A queue's items seldom change while they wait: those that were preempted with a batch under way
// still hear of it, and one that holds blocks may be under way otherwise.
bool changes(const Resident& row) { return row.stale_tokens > 0 || row.computed_tokens > 0; }

}  // namespace

ResidentRows::ResidentRows(const py::sequence& queues, const py::object& heap) {
  for (const py::handle queue : queues)
    queues_.emplace_back(py::reinterpret_borrow<py::object>(queue), heap);
}

void ResidentRows::restart_running(std::size_t count) {
  if (count > running_end_) {
    rows_.insert(rows_.begin(), count - running_end_, Resident{});
    running_begin_ += count - running_end_;
    running_end_ = count;
  }
  former_begin_ = std::exchange(running_begin_, running_end_ - count);
  running_.restart();
}

std::pair<RequestRecord&, Resident&> ResidentRows::add_running(py::handle request,
                                                               const RequestReader& reader) {
  const std::size_t place = running_.size();
  const auto former = running_.add(request, nullptr);
  RequestRecord& record = running_.record(place, request, reader);
  Resident& row = rows_[running_begin_ + place];
  if (!former || former_begin_ + *former != running_begin_ + place || record.resumable)
    row = record.constants;
  row.status = static_cast<std::uint8_t>(Status::running);
  return {record, row};
}

void ResidentRows::refresh_waiting(const RequestReader& reader,
                                   std::span<const std::uint64_t> batches) {
  if (!order_known_ ||
      !std::ranges::all_of(queues_, [](const RequestQueue& queue) { return queue.unchanged(); }))
    reorder_waiting(reader);
  std::vector<std::size_t> still_changing;
  for (const std::size_t i : changing_) {
    const py::handle request = waiting_.request(i);
    RequestRecord& record = waiting_.record(i, request, reader);
    Resident& row = rows_[running_end_ + i];
    row = record.constants;
    reader.read(request, record, batches, row);
    row.status = static_cast<std::uint8_t>(reader.status_in_queue(request));
    if (changes(row)) still_changing.push_back(i);
  }
  changing_ = std::move(still_changing);
}

// Who waited before keeps its row.
void ResidentRows::reorder_waiting(const RequestReader& reader) {
  order_known_ = false;
  waiting_.restart();
  changing_.clear();
  std::vector<Resident> rows(rows_.begin(),
                             rows_.begin() + static_cast<std::ptrdiff_t>(running_end_));
  for (RequestQueue& queue : queues_)
    queue.take(reader, [&](py::handle request, RequestRecord* record) {
      const auto former = waiting_.add(request, record);
      rows.push_back(former ? rows_[running_end_ + *former] : Resident{});
      if (!former || changes(rows.back())) changing_.push_back(waiting_.size() - 1);
    });
  rows_ = std::move(rows);
  order_known_ = true;
}

bool ResidentRows::nobody_waits() const {
  return std::ranges::all_of(queues_, [](const RequestQueue& queue) { return queue.empty(); });
}

void ResidentRows::forget() {
  order_known_ = false;
  for (RequestQueue& queue : queues_) queue.forget();
  running_.clear();
  waiting_.clear();
  changing_.clear();
  rows_.resize(running_end_);
  running_begin_ = running_end_;
}

}  // namespace sfs
