#include "followed_call.h"

#include <algorithm>
#include <array>
#include <memory>
#include <utility>

namespace py = pybind11;

namespace sfs {
namespace {

struct Followed {
  py::object function;
  py::object self;  // a weak reference, of a method: it keeps the stand-in; else null
  std::vector<Parameter> wanted;
  std::function<void(const Call&)> tell;

  PyObject* make(PyObject* const* arguments, std::size_t positional, PyObject* names) const;
};

// What calling the method as such comes to, less one copy of its arguments by the interpreter.
PyObject* Followed::make(PyObject* const* arguments, std::size_t positional,
                         PyObject* names) const {
  if (!self) return PyObject_Vectorcall(function.ptr(), arguments, positional, names);
  std::array<PyObject*, 16> room;
  const std::size_t count =
      positional + (names != nullptr ? static_cast<std::size_t>(PyTuple_GET_SIZE(names)) : 0);
  if (count >= room.size()) {
    PyErr_SetString(PyExc_TypeError, "a followed method with more than 15 arguments");
    return nullptr;
  }
  const auto alive = py::reinterpret_borrow<py::object>(PyWeakref_GetObject(self.ptr()));
  if (alive.is_none()) {
    PyErr_SetString(PyExc_ReferenceError, "a followed method of an object that is gone");
    return nullptr;
  }
  room[0] = alive.ptr();
  std::copy_n(arguments, count, room.begin() + 1);
  return PyObject_Vectorcall(function.ptr(), room.data(), positional + 1, names);
}

constexpr const char* capsule_name = "sfs_ext.Followed";

PyObject* call(PyObject* self, PyObject* const* arguments, Py_ssize_t positional, PyObject* names) {
  const auto& followed = *static_cast<Followed*>(PyCapsule_GetPointer(self, capsule_name));
  const auto given = static_cast<std::size_t>(positional);
  PyObject* result = followed.make(arguments, given, names);
  if (result != nullptr) followed.tell({followed.wanted, arguments, given, names, result});
  return result;
}

PyMethodDef definition = {"followed",
                          reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call)),
                          METH_FASTCALL | METH_KEYWORDS, nullptr};

void destroy(PyObject* capsule) {
  delete static_cast<Followed*>(PyCapsule_GetPointer(capsule, capsule_name));
}

}  // namespace

py::handle Call::operator[](std::size_t wanted) const {
  const auto& [place, name] = wanted_[wanted];
  if (place < positional_) return arguments_[place];
  const Py_ssize_t named = names_ ? PyTuple_GET_SIZE(names_.ptr()) : 0;
  for (Py_ssize_t i = 0; i < named; ++i)
    if (const py::handle given = PyTuple_GET_ITEM(names_.ptr(), i);
        given.is(name) || PyUnicode_Compare(given.ptr(), name.ptr()) == 0)
      return arguments_[positional_ + static_cast<std::size_t>(i)];
  throw py::type_error("a call without " + name.cast<std::string>());
}

py::object follow(const py::object& callable, std::vector<Parameter> wanted,
                  std::function<void(const Call&)> tell) {
  const bool is_method = PyMethod_Check(callable.ptr()) != 0;
  auto followed = std::make_unique<Followed>(Followed{
      is_method ? py::reinterpret_borrow<py::object>(PyMethod_GET_FUNCTION(callable.ptr()))
                : callable,
      is_method ? py::object(py::weakref(PyMethod_GET_SELF(callable.ptr()))) : py::object(),
      std::move(wanted), std::move(tell)});
  const py::capsule capsule(followed.get(), capsule_name, destroy);
  followed.release();
  auto function = py::reinterpret_steal<py::object>(PyCFunction_New(&definition, capsule.ptr()));
  if (!function) throw py::error_already_set();
  return function;
}

}  // namespace sfs
