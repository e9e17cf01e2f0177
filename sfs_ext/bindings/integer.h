// Python's integers as the core's: of 32 bits, never cut short.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <limits>
#include <optional>

namespace sfs {

// Nothing, and a Python exception set, if it is none or needs more bits.
inline std::optional<std::int32_t> try_integer(pybind11::handle number) {
  const long value = PyLong_AsLong(number.ptr());
  if (value == -1 && PyErr_Occurred() != nullptr) return std::nullopt;
  using Limits = std::numeric_limits<std::int32_t>;
  if (value < Limits::min() || value > Limits::max()) {
    PyErr_SetString(PyExc_OverflowError, "it needs more than 32 bits");
    return std::nullopt;
  }
  return static_cast<std::int32_t>(value);
}

inline std::int32_t integer(pybind11::handle number) {
  const auto value = try_integer(number);
  if (!value) throw pybind11::error_already_set();
  return *value;
}

}  // namespace sfs
