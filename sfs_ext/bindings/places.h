// Requests in an order that mostly stays, and where each stood in the order before it.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <optional>
#include <vector>

#include "request_reader.h"

namespace sfs {

class Places {
 public:
  void restart();  // what is added from here on is the new order
  void clear();

  // Its former place, if it had one: then it has the record it had there. Orders mostly agree, so a
  // walk along the old one finds it. `record` may be null: it is looked up when asked for.
  std::optional<std::size_t> add(pybind11::handle request, RequestRecord* record);

  pybind11::handle request(std::size_t place) const { return now_[place].request; }
  RequestRecord& record(std::size_t place, pybind11::handle request, const RequestReader& reader);
  std::size_t size() const { return now_.size(); }

 private:
  void fetch(std::size_t former) const;

  struct Place {
    pybind11::object request;
    RequestRecord* record = nullptr;  // the request's own
  };

  std::vector<Place> now_, before_;
  std::size_t next_ = 0;  // walked so far
};

}  // namespace sfs
