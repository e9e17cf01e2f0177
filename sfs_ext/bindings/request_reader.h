// Reads the requests of a scheduler written in Python: attributes, by names that the caller gives.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <span>

#include "kv_observer.h"
#include "sfs/snapshot.h"

namespace sfs {

// A request's part of one batch.
struct BatchShare {
  std::uint64_t batch = 0;  // its number; 0: none
  std::int32_t tokens = 0;
  bool emits = false;
};

// What is kept of a request. An attribute of the request owns it, so neither outlives the other and
// a request id that is used again starts anew. What each step needs fills one cache line.
struct alignas(64) RequestRecord {
  pybind11::object request_id;
  pybind11::object output_token_ids;  // a list, which grows in place
  std::array<BatchShare, max_in_flight> shares;
  bool resumable = false;  // its constants can change after all
  Resident constants{};    // what never changes; zero elsewhere

  void join(const BatchShare& share) { shares[share.batch % max_in_flight] = share; }
  BatchShare share_of(std::uint64_t batch) const {
    const BatchShare& share = shares[batch % max_in_flight];
    return share.batch == batch ? share : BatchShare{};
  }
};

// Read as Python reads it: asking for an object's dictionary would have one made, and every later
// read by anybody would be slower for it.
class Attribute {
 public:
  // `names` maps `field` to the attribute's name. Throws KeyError.
  Attribute(const char* field, const pybind11::dict& names);

  pybind11::object find(pybind11::handle request) const;  // null if missing

  // All throw a Python exception that says what is missing or of the wrong kind.
  pybind11::object of(pybind11::handle request) const;
  pybind11::object of(pybind11::handle request, PyTypeObject& kind) const;
  std::int32_t integer(pybind11::handle request) const;
  double real(pybind11::handle request) const;
  bool truth(pybind11::handle request) const;

  pybind11::handle name() const { return name_; }

 private:
  [[noreturn]] void refuse() const;  // with a Python exception set

  const char* field_;
  pybind11::str name_;
};

class RequestReader {
 public:
  // `blocks`: list of KV blocks by request id. `preempted`: the status of a preempted request.
  // `identity`: maps a request to its key and predicted output tokens. `observer`: is told of the
  // blocks that requests hold; null without one.
  RequestReader(const pybind11::dict& attributes, pybind11::dict blocks, pybind11::object preempted,
                pybind11::function identity, KvObserver* observer);

  RequestRecord& record(pybind11::handle request) const;  // made at the first sight of it

  // Fills in what changes. `row` has the constants, and blocks as read last or 0; `batches`:
  // numbers of those in flight, oldest first.
  void read(pybind11::handle request, const RequestRecord& record,
            std::span<const std::uint64_t> batches, Resident& row) const;

  Status status_in_queue(pybind11::handle request) const;
  bool prefills(pybind11::handle request) const { return prefills_.truth(request); }

 private:
  void read_constants(pybind11::handle request, RequestRecord& record) const;
  std::int32_t blocks(const RequestRecord& record, std::int32_t known) const;

  Attribute record_, request_id_, arrival_s_, prompt_tokens_, output_token_ids_, max_tokens_,
      priority_, resumable_, computed_tokens_, placeholders_, stale_tokens_, status_, prefills_;
  pybind11::dict blocks_;
  pybind11::object preempted_;
  pybind11::function identity_;
  KvObserver* observer_;
};

}  // namespace sfs
