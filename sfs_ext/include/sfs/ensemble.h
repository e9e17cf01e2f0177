// All that a decision asks of trained predictors: from a prompt's features to the quality and the
// output length of each model's answer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "sfs/forest.h"
#include "sfs/projection.h"
#include "sfs/quality_calibration.h"

namespace sfs {

// Immutable, so that threads may share it.
class Ensemble {
 public:
  // model_columns: models × whatever a row says of a model, behind what it says of the prompt.
  // The forest's outputs are quality where there is a calibration, then the mean and ascending
  // quantiles of length, one for each of length_factors, which they are multiplied by.
  //
  // Throws std::invalid_argument for what does not fit together, and for what might predict
  // anything but finite numbers.
  Ensemble(Projection projection, Forest forest, std::size_t models,
           std::span<const double> model_columns, std::optional<QualityCalibration> calibration,
           std::span<const double> length_factors);

  std::size_t models() const noexcept { return models_; }
  std::size_t outputs() const noexcept { return forest_.outputs(); }

  // models × outputs: quality in [0, 1]; lengths in tokens, at least 1, quantiles in order.
  // buckets, description: as Projection::project takes them. Throws std::invalid_argument for
  // spans of other sizes.
  void predict(std::span<const std::int32_t> buckets, std::span<const double> description,
               std::span<double> predictions) const;

 private:
  void check() const;

  Projection projection_;
  Forest forest_;
  std::size_t models_;
  std::size_t description_;   // values
  std::vector<double> rows_;  // models × features, without the prompt's part
  std::optional<QualityCalibration> calibration_;
  std::vector<double> length_factors_;
};

}  // namespace sfs
