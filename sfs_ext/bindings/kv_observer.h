// Watches what a KV cache written in Python does with its blocks, and notes it as events of a
// journal.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "followed_call.h"
#include "sfs/block_keys.h"
#include "sfs/kv_journal.h"

namespace sfs {

class KvObserver {
 public:
  explicit KvObserver(std::int32_t block_size) : block_size_(block_size) {}

  // A request, which events name by `owner`, with its full blocks' keys: of its token ids, as
  // routers make them, or where it has none to go by, of vLLM's own hashes. Both lists grow in
  // place. Nothing for one that is there.
  void arrived(const pybind11::str& request_id, std::uint64_t owner,
               std::optional<pybind11::list> token_ids, pybind11::list hashes,
               std::int32_t prompt_tokens);
  void ended(const pybind11::str& request_id);
  void reset(const std::vector<std::int32_t>& hashed);  // the blocks with content; all are free

  enum class Kind { hit, released, filled };
  // Stands in for `callable`. What it wants: hit: request id, blocks; released: request id, and all
  // its blocks are the result; filled: request, all its blocks, how many were full before, and are
  // now. The observer must outlive it.
  pybind11::object following(const pybind11::object& callable, Kind kind,
                             std::vector<Parameter> wanted);

  // All the blocks of a request, in order: those that are new to the observer have been taken. To
  // be told of them late does no harm, if it is before the events are used: whoever has them is
  // told of before they are filled or given back.
  void holds(pybind11::handle request_id, pybind11::handle blocks);

  // Since `clear`, somebody gave blocks back: as many as were known of may be others.
  bool released() const { return released_; }

  // What went wrong, if anything did: nothing is noted from then on.
  const std::optional<std::string>& failure() const { return failure_; }
  void fail(std::string why);

  std::span<const KvEvent> events() const { return events_; }
  void clear() {
    events_.clear();
    released_ = false;
  }

 private:
  struct Content {
    std::uint64_t owner;
    std::optional<pybind11::list> token_ids;
    pybind11::list hashes;
    std::vector<BlockKey> keys;
    std::size_t held = 0;  // blocks
  };
  // A string keeps its hash, and who asks mostly has the very string: no byte of it is looked at.
  struct Hash {
    std::size_t operator()(const pybind11::str& request_id) const;
  };
  struct Equal {
    bool operator()(const pybind11::str& one, const pybind11::str& other) const;
  };

  void tell(Kind kind, const Call& call);
  void note_held(Content& content, pybind11::handle blocks);
  void note_hit(const Call& call);
  void note_released(const Call& call);
  void note_filled(const Call& call);
  Content& content(pybind11::handle request_id);
  void extend(Content& content, std::size_t blocks) const;

  std::int32_t block_size_;
  pybind11::str request_id_ = "request_id", block_id_ = "block_id";
  std::unordered_map<pybind11::str, Content, Hash, Equal> requests_;
  std::vector<KvEvent> events_;
  bool released_ = false;
  std::optional<std::string> failure_;
};

}  // namespace sfs

void bind_kv_observer(pybind11::module_& m);
