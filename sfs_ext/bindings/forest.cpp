// Marshals between numpy and forests.
#include "forest.h"

#include <pybind11/native_enum.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "arrays.h"
#include "sfs/forest.h"

namespace py = pybind11;
using namespace sfs;

namespace {

// Owned for as long as the lock is not held: whoever holds it then may empty the caller's list.
using Forests = std::vector<std::shared_ptr<Forest>>;

void check_flat(const py::array& array, const char* name) {
  if (array.ndim() != 1)
    throw std::invalid_argument("forest: " + std::string(name) + " must have 1 dimension, not " +
                                std::to_string(array.ndim()));
}

std::string shape_of(const py::array& array) {
  return py::str(py::tuple(array.attr("shape"))).cast<std::string>();
}

Array<double> evaluate(const Forests& forests, const Array<double>& rows) {
  std::vector<const Forest*> all;
  for (const auto& forest : forests) {
    if (!forest) throw std::invalid_argument("forest: None is not one");
    all.push_back(forest.get());
  }
  if (all.empty()) throw std::invalid_argument("forest: none to evaluate");
  const std::size_t features = all.front()->features();
  if (rows.ndim() != 2 || static_cast<std::size_t>(rows.shape(1)) != features)
    throw std::invalid_argument("forest: rows must have shape (rows, " + std::to_string(features) +
                                "), not " + shape_of(rows));
  Array<double> predictions({rows.shape(0), static_cast<py::ssize_t>(all.size())});
  const std::span<double> into(predictions.mutable_data(),
                               static_cast<std::size_t>(predictions.size()));
  const auto from = span_of(rows);
  {
    const py::gil_scoped_release release;
    Forest::evaluate(all, from, into);
  }
  return predictions;
}

}  // namespace

void bind_forest(py::module_& m) {
  PYBIND11_NUMPY_DTYPE(ForestNode, value, left, right, feature, first_word, words, kind, missing,
                       default_left);
  m.attr("forest_node_dtype") = py::dtype::of<ForestNode>();

  py::native_enum<ForestNodeKind>(m, "ForestNodeKind", "enum.IntEnum")
      .value("LEAF", ForestNodeKind::leaf)
      .value("NUMERICAL", ForestNodeKind::numerical)
      .value("CATEGORICAL", ForestNodeKind::categorical)
      .finalize();
  py::native_enum<ForestMissing>(m, "ForestMissing", "enum.IntEnum")
      .value("NONE", ForestMissing::none)
      .value("ZERO", ForestMissing::zero)
      .value("NAN", ForestMissing::nan)
      .finalize();

  py::class_<Forest, std::shared_ptr<Forest>>(
      m, "Forest", "The sum of what decision trees say of a row of features, as LightGBM says it.")
      .def(
          py::init([](const Array<ForestNode>& nodes, const Array<std::int32_t>& roots,
                      std::int32_t features, const Array<std::uint32_t>& category_words) {
            check_flat(nodes, "nodes");
            check_flat(roots, "roots");
            check_flat(category_words, "category_words");
            return std::make_shared<Forest>(features, span_of(nodes), span_of(roots),
                                            span_of(category_words));
          }),
          py::arg("nodes"), py::arg("roots"), py::arg("features"),
          py::arg("category_words") = Array<std::uint32_t>(0),
          "nodes: forest_node_dtype, children behind parents; roots: numbers of nodes, one a tree; "
          "category_words: uint32, bit j of a set's word i the category 32 i + j. ValueError "
          "naming the tree and the node that is not sound, or the tree of more than 64 leaves.")
      .def_property_readonly("features", &Forest::features, "Values in a row.")
      .def_static("evaluate", &evaluate, py::arg("forests"), py::arg("rows"),
                  "float64 (rows, features) to float64 (rows, forests). ValueError for rows of "
                  "another shape, no forests, or forests of unequal features.");
}
