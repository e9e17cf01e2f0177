// The rows of a snapshot: running requests, then waiting ones. Both mostly stay where they are from
// step to step, and a queue can be long: only what changes is read again.
#pragma once

#include <pybind11/pybind11.h>

#include <span>
#include <utility>
#include <vector>

#include "places.h"
#include "request_queue.h"
#include "request_reader.h"

namespace sfs {

class ResidentRows {
 public:
  // Throws TypeError for a queue of another kind.
  ResidentRows(const pybind11::sequence& queues, const pybind11::object& heap);

  // Room for the rows of that many running requests, which are then added, each with its constants.
  void restart_running(std::size_t count);
  std::pair<RequestRecord&, Resident&> add_running(pybind11::handle request,
                                                   const RequestReader& reader);

  // Brings the waiting ones up to date. `batches`: numbers of those in flight, oldest first.
  void refresh_waiting(const RequestReader& reader, std::span<const std::uint64_t> batches);

  bool nobody_waits() const;

  // A step was missed: what was read before may no longer hold.
  void forget();

  std::span<const Resident> all() const { return std::span(rows_).subspan(running_begin_); }
  std::size_t waiting() const { return waiting_.size(); }

 private:
  void reorder_waiting(const RequestReader& reader);

  std::vector<RequestQueue> queues_;
  Places running_, waiting_;
  std::vector<Resident> rows_;  // spare room, running rows up to running_end_, waiting rows
  std::size_t running_begin_ = 0, running_end_ = 0;
  std::size_t former_begin_ = 0;  // where running rows began in the step before
  bool order_known_ = false;
  std::vector<std::size_t> changing_;  // waiting ones that are to be read at each step
};

}  // namespace sfs
