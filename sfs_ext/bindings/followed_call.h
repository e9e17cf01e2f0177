// A stand-in for a Python callable, which calls it and tells of the call. Followed calls come many
// times a step, so it is a C function: one written in Python takes several times as long.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

namespace sfs {

// A parameter of a callable: callers give it by its place or by its name.
struct Parameter {
  std::size_t place;
  pybind11::str name;
};

class Call {
 public:
  Call(const std::vector<Parameter>& wanted, PyObject* const* arguments, std::size_t positional,
       pybind11::handle names, pybind11::handle result)
      : wanted_(wanted),
        arguments_(arguments),
        positional_(positional),
        names_(names),
        result_(result) {}

  pybind11::handle operator[](std::size_t wanted) const;  // throws TypeError if it was not given
  pybind11::handle result() const { return result_; }

 private:
  const std::vector<Parameter>& wanted_;
  PyObject* const* arguments_;  // positional, then named ones
  std::size_t positional_;
  pybind11::handle names_;  // a tuple, or null
  pybind11::handle result_;
};

// `tell` gets each call that did not raise, with its `wanted` arguments, and must not throw.
pybind11::object follow(const pybind11::object& callable, std::vector<Parameter> wanted,
                        std::function<void(const Call&)> tell);

}  // namespace sfs
