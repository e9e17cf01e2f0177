#include "sfs/ensemble.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>

namespace sfs {

namespace {

[[noreturn]] void refuse(const std::string& flaw) {
  throw std::invalid_argument("ensemble: " + flaw);
}

}  // namespace

Ensemble::Ensemble(Projection projection, Forest forest, std::size_t models,
                   std::span<const double> model_columns,
                   std::optional<QualityCalibration> calibration,
                   std::span<const double> length_factors)
    : projection_(std::move(projection)),
      forest_(std::move(forest)),
      models_(models),
      calibration_(std::move(calibration)),
      length_factors_(length_factors.begin(), length_factors.end()) {
  if (models == 0 || model_columns.size() % models != 0)
    refuse(std::to_string(model_columns.size()) + " values are no rows of " +
           std::to_string(models) + " models");
  const std::size_t own = model_columns.size() / models;
  const std::size_t features = forest_.features();
  if (projection_.components() + own >= features)
    refuse(std::to_string(projection_.components()) + " components, a description and " +
           std::to_string(own) + " columns of models do not make " + std::to_string(features) +
           " features");
  description_ = features - own - projection_.components();
  rows_.resize(models * features);
  for (std::size_t model = 0; model < models; ++model)
    std::copy_n(model_columns.begin() + static_cast<std::ptrdiff_t>(model * own), own,
                rows_.begin() + static_cast<std::ptrdiff_t>((model + 1) * features - own));
  check();
}

void Ensemble::check() const {
  const std::size_t first_length = calibration_ ? 1 : 0;
  if (calibration_ && calibration_->models() != models_)
    refuse("a calibration of " + std::to_string(calibration_->models()) + " models beside " +
           std::to_string(models_));
  if (forest_.outputs() != first_length + length_factors_.size() || forest_.outputs() == 0)
    refuse("a forest of " + std::to_string(forest_.outputs()) + " outputs; there is " +
           (calibration_ ? "a" : "no") + " calibration and " +
           std::to_string(length_factors_.size()) + " length factors");
  if (calibration_ && forest_.largest(0) > QualityCalibration::largest_prediction)
    refuse("the forest's qualities may be beyond 1e100");
  for (std::size_t i = 0; i < length_factors_.size(); ++i)
    if (!std::isfinite(forest_.largest(first_length + i) * length_factors_[i]))
      refuse("length factor " + std::to_string(i) + ", " + std::to_string(length_factors_[i]) +
             ": lengths may be infinite");
}

void Ensemble::predict(std::span<const std::int32_t> buckets, std::span<const double> description,
                       std::span<double> predictions) const {
  if (description.size() != description_)
    refuse(std::to_string(description.size()) + " values of description; they must be " +
           std::to_string(description_));
  if (predictions.size() != models_ * outputs())
    refuse("no " + std::to_string(models_) + " × " + std::to_string(outputs()) +
           " predictions, but " + std::to_string(predictions.size()));
  std::vector<double> rows = rows_;
  const auto prompt = std::span(rows).first(projection_.components() + description_);
  projection_.project(buckets, description, prompt);
  for (std::size_t model = 1; model < models_; ++model)
    std::ranges::copy(prompt, &rows[model * forest_.features()]);
  forest_.evaluate(rows, predictions);

  if (calibration_) {
    std::vector<double> qualities(models_);
    for (std::size_t model = 0; model < models_; ++model)
      qualities[model] = predictions[model * outputs()];
    calibration_->apply(qualities);
    for (std::size_t model = 0; model < models_; ++model)
      predictions[model * outputs()] = qualities[model];
  }
  if (length_factors_.empty()) return;
  for (std::size_t model = 0; model < models_; ++model) {
    const auto lengths = predictions.subspan((model + 1) * outputs() - length_factors_.size(),
                                             length_factors_.size());
    for (std::size_t i = 0; i < lengths.size(); ++i)
      lengths[i] = std::max(1.0, lengths[i] * length_factors_[i]);
    std::sort(lengths.begin() + 1, lengths.end());
  }
}

}  // namespace sfs
