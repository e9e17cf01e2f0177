// Marshals between numpy and forests.
#include "forest.h"

#include <pybind11/native_enum.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "arrays.h"
#include "sfs/forest.h"

namespace py = pybind11;
using namespace sfs;

namespace {

Array<double> evaluate(const Forest& forest, const Array<double>& rows) {
  if (rows.ndim() != 2 || static_cast<std::size_t>(rows.shape(1)) != forest.features())
    throw std::invalid_argument("forest: rows must have shape (rows, " +
                                std::to_string(forest.features()) + "), not " + shape_of(rows));
  Array<double> predictions({rows.shape(0), static_cast<py::ssize_t>(forest.outputs())});
  const auto from = span_of(rows);
  const auto into = span_into(predictions);
  {
    const py::gil_scoped_release release;
    forest.evaluate(from, into);
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

  py::class_<Forest>(m, "Forest",
                     "Sums of what decision trees say of a row of features, as LightGBM says it.")
      .def(py::init([](const Array<ForestNode>& nodes, const Array<std::int32_t>& roots,
                       std::int32_t features, const Array<std::int32_t>& output_trees,
                       const Array<std::uint32_t>& category_words) {
             check_flat(nodes, "forest: nodes");
             check_flat(roots, "forest: roots");
             check_flat(output_trees, "forest: output_trees");
             check_flat(category_words, "forest: category_words");
             return Forest(features, span_of(nodes), span_of(roots), span_of(output_trees),
                           span_of(category_words));
           }),
           py::arg("nodes"), py::arg("roots"), py::arg("features"), py::arg("output_trees"),
           py::arg("category_words") = Array<std::uint32_t>(0),
           "nodes: forest_node_dtype, children behind parents; roots: numbers of nodes, one a "
           "tree; output_trees: how many make each output; category_words: uint32, bit j of a "
           "set's word i the category 32 i + j. ValueError naming the tree and the node that is "
           "not sound, or the tree of more than 64 leaves.")
      .def_property_readonly("features", &Forest::features, "Values in a row.")
      .def_property_readonly("outputs", &Forest::outputs, "Predictions for a row.")
      .def("evaluate", &evaluate, py::arg("rows"),
           "float64 (rows, features) to float64 (rows, outputs). ValueError for rows of another "
           "shape.");
}
