// numpy's arrays as the core's spans and vectors, and back.
#pragma once

#include <pybind11/numpy.h>

#include <algorithm>
#include <cstddef>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace sfs {

template <class T>
using Array = pybind11::array_t<T, pybind11::array::c_style>;

template <class T>
std::span<const T> span_of(const Array<T>& array) {
  return {array.data(), static_cast<std::size_t>(array.size())};
}

template <class T>
std::span<T> span_into(Array<T>& array) {
  return {array.mutable_data(), static_cast<std::size_t>(array.size())};
}

template <class T>
std::vector<std::span<const T>> spans_of(const std::vector<Array<T>>& arrays) {
  std::vector<std::span<const T>> spans;
  for (const auto& array : arrays) spans.push_back(span_of(array));
  return spans;
}

template <class T>
Array<T> array_of(std::span<const T> values) {
  Array<T> array(static_cast<pybind11::ssize_t>(values.size()));
  std::copy(values.begin(), values.end(), array.mutable_data());
  return array;
}

inline std::string shape_of(const pybind11::array& array) {
  return pybind11::str(pybind11::tuple(array.attr("shape"))).cast<std::string>();
}

// what: whose array it is, and its name.
inline void check_flat(const pybind11::array& array, const char* what) {
  if (array.ndim() != 1)
    throw std::invalid_argument(std::string(what) + " must have 1 dimension, not " +
                                std::to_string(array.ndim()));
}

}  // namespace sfs
