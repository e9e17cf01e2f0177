// How much is believed of what is predicted of the quality of models' answers to a prompt.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace sfs {

class QualityCalibration {
 public:
  // From 0: whatever is made of predictions within it is finite.
  static constexpr double largest_prediction = 1e100;

  // mean_score, mean_prediction: of each model. common, own: the shares that are believed of what
  // is said alike of all models, and of each beside the others. Throws std::invalid_argument for
  // no models, means of unequally many, or anything that is no score, prediction or share.
  QualityCalibration(std::span<const double> mean_score, std::span<const double> mean_prediction,
                     double common, double own);

  std::size_t models() const noexcept { return mean_score_.size(); }

  // Of one prompt, by model, in place, to the same in [0, 1]. Throws std::invalid_argument for
  // more or fewer than models(). Predictions are within largest_prediction of 0.
  void apply(std::span<double> predictions) const;

 private:
  std::vector<double> mean_score_, mean_prediction_;
  double common_, own_;
};

}  // namespace sfs
