// Marshals between numpy and ensembles, with what they are made of.
#include "ensemble.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "arrays.h"
#include "sfs/ensemble.h"
#include "sfs/projection.h"
#include "sfs/quality_calibration.h"

namespace py = pybind11;
using namespace sfs;

namespace {

Projection projection_of(const Array<double>& mean, const Array<double>& components) {
  check_flat(mean, "projection: mean");
  if (components.ndim() != 2 || components.shape(1) != mean.shape(0))
    throw std::invalid_argument("projection: components must have shape (components, " +
                                std::to_string(mean.size()) + "), not " + shape_of(components));
  return Projection(span_of(mean), span_of(components));
}

Array<double> row(const Projection& projection, const Array<std::int32_t>& buckets,
                  const Array<double>& description) {
  Array<double> row(static_cast<py::ssize_t>(projection.components()) + description.size());
  projection.project(span_of(buckets), span_of(description), span_into(row));
  return row;
}

Ensemble ensemble_of(const Projection& projection, const Forest& forest,
                     const Array<double>& model_columns,
                     const std::optional<QualityCalibration>& calibration,
                     const std::vector<double>& length_factors) {
  if (model_columns.ndim() != 2)
    throw std::invalid_argument("ensemble: model_columns must have shape (models, columns), not " +
                                shape_of(model_columns));
  return Ensemble(projection, forest, static_cast<std::size_t>(model_columns.shape(0)),
                  span_of(model_columns), calibration, length_factors);
}

// With the interpreter's lock: to get it back could take longer than this does.
Array<double> predict(const Ensemble& ensemble, const Array<std::int32_t>& buckets,
                      const Array<double>& description) {
  Array<double> predictions({ensemble.models(), ensemble.outputs()});
  ensemble.predict(span_of(buckets), span_of(description), span_into(predictions));
  return predictions;
}

}  // namespace

void bind_ensemble(py::module_& m) {
  py::class_<Projection>(m, "Projection", "A prompt as a row of numbers.")
      .def(py::init(&projection_of), py::arg("mean"), py::arg("components"),
           "mean: float64 (buckets,); components: float64 (components, buckets). ValueError for "
           "other shapes.")
      .def("row", &row, py::arg("buckets"), py::arg("description"),
           "int32 (buckets,) and float64 (n,), the token count first, to float64 (components + "
           "n,). ValueError for other buckets, or no description.");

  py::class_<QualityCalibration>(m, "QualityCalibration",
                                 "How much is believed of what is predicted of quality.")
      .def(py::init([](const std::vector<double>& mean_score,
                       const std::vector<double>& mean_prediction, double common, double own) {
             return QualityCalibration(mean_score, mean_prediction, common, own);
           }),
           py::arg("mean_score"), py::arg("mean_prediction"), py::arg("common"), py::arg("own"),
           "Means by model; shares in [0, 1]. ValueError for anything else.")
      .def(
          "apply",
          [](const QualityCalibration& calibration, std::vector<double> predictions) {
            calibration.apply(predictions);
            return predictions;
          },
          py::arg("predictions"),
          "Of one prompt, by model, to the same in [0, 1]. ValueError for other models.");

  py::class_<Ensemble>(m, "Ensemble",
                       "From a prompt's features to each model's quality and output length.")
      .def(py::init(&ensemble_of), py::arg("projection"), py::arg("forest"),
           py::arg("model_columns"), py::arg("calibration"), py::arg("length_factors"),
           "model_columns: float64 (models, n), the last columns of a model's row. The forest's "
           "outputs: quality if there is a calibration, then the mean and ascending quantiles of "
           "length if there are length factors. ValueError for what does not fit together, or "
           "might predict anything but finite numbers.")
      .def("predict", &predict, py::arg("buckets"), py::arg("description"),
           "int32 (buckets,) and float64 (n,), the token count first, to float64 (models, "
           "outputs): quality in [0, 1]; lengths in tokens, at least 1, quantiles in order. "
           "ValueError for other shapes.");
}
