#include "kv_observer.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "arrays.h"
#include "integer.h"

namespace py = pybind11;

namespace sfs {
namespace {

constexpr std::uint64_t nobody = 0;  // owns the blocks of a cache that is reset

py::str checked_id(py::handle object) {
  if (!py::isinstance<py::str>(object))
    throw py::type_error("a request id must be a str, not a " +
                         std::string(Py_TYPE(object.ptr())->tp_name));
  return py::reinterpret_borrow<py::str>(object);
}

py::object attribute(py::handle object, py::handle name) {
  PyObject* value = PyObject_GetAttr(object.ptr(), name.ptr());
  if (value == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(value);
}

// Borrowed; throws IndexError.
py::handle item(py::handle list, std::size_t index) {
  PyObject* found = PyList_GetItem(list.ptr(), static_cast<Py_ssize_t>(index));
  if (found == nullptr) throw py::error_already_set();
  return found;
}

}  // namespace

std::size_t KvObserver::Hash::operator()(const py::str& request_id) const {
  return static_cast<std::size_t>(py::hash(request_id));
}

bool KvObserver::Equal::operator()(const py::str& one, const py::str& other) const {
  return one.is(other) || PyUnicode_Compare(one.ptr(), other.ptr()) == 0;
}

void KvObserver::arrived(const py::str& request_id, std::uint64_t owner,
                         std::optional<py::list> token_ids, py::list hashes,
                         std::int32_t prompt_tokens) {
  if (failure_ || requests_.contains(request_id)) return;
  Content content{owner, std::move(token_ids), std::move(hashes), {}};
  try {
    extend(content, static_cast<std::size_t>(prompt_tokens / block_size_));
  } catch (const std::exception& failure) {
    return fail(failure.what());
  }
  events_.push_back({owner, 0, KvEventKind::want});
  for (const BlockKey key : content.keys) events_.push_back({key, 0, KvEventKind::key});
  requests_.emplace(request_id, std::move(content));
}

void KvObserver::ended(const py::str& request_id) {
  if (failure_) return;
  const auto request = requests_.find(request_id);
  if (request == requests_.end()) return;
  events_.push_back({request->second.owner, 0, KvEventKind::forget});
  requests_.erase(request);
}

void KvObserver::reset(const std::vector<std::int32_t>& hashed) {
  if (failure_) return;
  events_.push_back({nobody, 0, KvEventKind::want});
  for (const std::int32_t block : hashed) events_.push_back({nobody, block, KvEventKind::take});
  events_.push_back({nobody, 0, KvEventKind::release});
  events_.push_back({nobody, 0, KvEventKind::forget});
}

py::object KvObserver::following(const py::object& callable, Kind kind,
                                 std::vector<Parameter> wanted) {
  constexpr std::size_t parameters[] = {2, 1, 4};
  if (wanted.size() != parameters[static_cast<std::size_t>(kind)])
    throw std::invalid_argument("KV observer: a call to follow with " +
                                std::to_string(wanted.size()) + " parameters");
  return follow(callable, std::move(wanted), [this, kind](const Call& call) { tell(kind, call); });
}

// A failure costs the router its view, and must not cost the engine.
void KvObserver::tell(Kind kind, const Call& call) {
  if (failure_) return;
  try {
    switch (kind) {
      case Kind::hit:
        return note_hit(call);
      case Kind::released:
        return note_released(call);
      case Kind::filled:
        return note_filled(call);
    }
  } catch (const std::exception& failure) {
    fail(failure.what());
  }
}

void KvObserver::fail(std::string why) {
  failure_ = std::move(why);
  events_.clear();
  requests_.clear();
}

void KvObserver::holds(py::handle request_id, py::handle blocks) {
  if (failure_) return;
  try {
    note_held(content(request_id), blocks);
  } catch (const std::exception& failure) {
    fail(failure.what());
  }
}

void KvObserver::note_held(Content& content, py::handle blocks) {
  const std::size_t count = py::len(blocks);
  if (count < content.held)
    throw std::runtime_error("a request holds " + std::to_string(count) + " blocks after " +
                             std::to_string(content.held) + ", and gave none back");
  for (; content.held < count; ++content.held) {
    const py::object block_id = attribute(item(blocks, content.held), block_id_);
    events_.push_back({content.owner, integer(block_id), KvEventKind::take});
  }
}

void KvObserver::note_hit(const Call& call) {
  Content& content = this->content(call[0]);
  for (const py::handle block : py::iter(call[1])) {
    events_.push_back({content.owner, integer(attribute(block, block_id_)), KvEventKind::touch});
    ++content.held;
  }
}

void KvObserver::note_released(const Call& call) {
  const auto request = requests_.find(checked_id(call[0]));
  if (request == requests_.end()) {
    if (py::len(call.result()) > 0) content(call[0]);  // which says that it is unknown
    return;
  }
  note_held(request->second, call.result());
  events_.push_back({request->second.owner, 0, KvEventKind::release});
  request->second.held = 0;
  released_ = true;
}

void KvObserver::note_filled(const Call& call) {
  const auto before = static_cast<std::size_t>(integer(call[2]));
  const auto full = static_cast<std::size_t>(integer(call[3]));
  Content& content = this->content(attribute(call[0], request_id_));
  note_held(content, call[1]);
  extend(content, full);
  for (std::size_t i = before; i < full; ++i)
    events_.push_back(
        {content.keys[i], integer(attribute(item(call[1], i), block_id_)), KvEventKind::hash});
}

KvObserver::Content& KvObserver::content(py::handle request_id) {
  const py::str name = checked_id(request_id);
  const auto found = requests_.find(name);
  if (found == requests_.end())
    throw std::out_of_range("request " + py::repr(name).cast<std::string>() +
                            " is unknown to the KV journal");
  return found->second;
}

void KvObserver::extend(Content& content, std::size_t blocks) const {
  const std::size_t known = content.keys.size();
  if (blocks <= known) return;
  if (!content.token_ids) {
    for (std::size_t i = known; i < blocks; ++i) {
      const std::string_view hash = item(content.hashes, i).cast<py::bytes>();
      BlockKey key = 0;
      std::memcpy(&key, hash.data(), std::min(sizeof key, hash.size()));
      content.keys.push_back(key);
    }
    return;
  }
  const auto size = static_cast<std::size_t>(block_size_);
  BlockKeyChain chain(block_size_, known > 0 ? content.keys.back() : no_block);
  for (std::size_t i = known * size; i < blocks * size; ++i)
    if (const auto key = chain.add(integer(item(*content.token_ids, i))))
      content.keys.push_back(*key);
}

}  // namespace sfs

void bind_kv_observer(py::module_& m) {
  using sfs::KvObserver;
  py::class_<KvObserver>(m, "KvObserver",
                         "Notes what a KV cache written in Python does with its blocks.")
      .def(py::init<std::int32_t>(), py::arg("block_size"))
      .def("arrived", &KvObserver::arrived, py::arg("request_id"), py::arg("owner"),
           py::arg("token_ids"), py::arg("hashes"), py::arg("prompt_tokens"),
           "A request, named by `owner` in events. Its full blocks' keys are made of token_ids, or "
           "where that is None, of block hashes, bytes. Both lists grow in place.")
      .def("ended", &KvObserver::ended, py::arg("request_id"))
      .def("reset", &KvObserver::reset, py::arg("hashed"),
           "The cache is emptied. hashed: the blocks with content, of which all are free.")
      .def(
          "following",
          [](KvObserver& observer, const py::object& callable, const std::string& kind,
             const std::vector<std::pair<std::size_t, py::str>>& wanted) {
            constexpr const char* names[] = {"hit", "released", "filled"};
            const auto* const found = std::find(std::begin(names), std::end(names), kind);
            if (found == std::end(names))
              throw std::invalid_argument("KV observer: a call cannot mean " + kind);
            std::vector<sfs::Parameter> parameters;
            for (const auto& [place, name] : wanted) parameters.push_back({place, name});
            return observer.following(callable,
                                      static_cast<KvObserver::Kind>(found - std::begin(names)),
                                      std::move(parameters));
          },
          py::keep_alive<0, 1>(), py::arg("callable"), py::arg("kind"), py::arg("wanted"),
          "A stand-in for a callable, which notes its calls. wanted: place and name of parameters. "
          "kind: hit (request id, blocks), released (request id; all its blocks are the result), "
          "filled (request, all its blocks, full ones before, full ones now).")
      .def("holds", &KvObserver::holds, py::arg("request_id"), py::arg("blocks"),
           "All the blocks of a request, in order, before events are taken.")
      .def_property_readonly("failure", &KvObserver::failure,
                             "What ended the journal, if anything did.")
      .def(
          "take_events",
          [](KvObserver& observer) {
            auto array = sfs::array_of(observer.events());
            observer.clear();
            return array;
          },
          "kv_event_dtype, since the last call.");
}
