// numpy's arrays as the core's spans and vectors, and back.
#pragma once

#include <pybind11/numpy.h>

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

namespace sfs {

template <class T>
using Array = pybind11::array_t<T, pybind11::array::c_style>;

template <class T>
std::span<const T> span_of(const Array<T>& array) {
  return {array.data(), static_cast<std::size_t>(array.size())};
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

}  // namespace sfs
