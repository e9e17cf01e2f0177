// A queue of a scheduler written in Python, in its order, which mostly holds from step to step.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "request_reader.h"

namespace sfs {

class RequestQueue {
 public:
  // A deque, or an object that keeps a heap in a list, the attribute `heap`. Throws TypeError.
  RequestQueue(pybind11::object queue, pybind11::object heap);

  bool empty() const;
  bool unchanged() const;  // since it was taken

  // Its requests in order; those of a heap by (priority, arrival, id), lowest first. A deque's have
  // no record yet.
  using Visit = std::function<void(pybind11::handle request, RequestRecord* record)>;
  void take(const RequestReader& reader, const Visit& visit);

  void forget() { lay_.clear(); }

 private:
  struct Ranked {
    std::int32_t priority = 0;
    double arrival_s = 0.0;
    pybind11::object request;
    RequestRecord* record = nullptr;

    bool operator<(const Ranked& other) const;
  };

  pybind11::object items() const;
  void take_heap(const RequestReader& reader, const Visit& visit);

  pybind11::object queue_, heap_;
  pybind11::object taken_;   // the list, or a deque's iterator at its end
  std::vector<Ranked> lay_;  // the heap, as it lay
};

}  // namespace sfs
