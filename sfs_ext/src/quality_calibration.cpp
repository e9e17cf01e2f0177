#include "sfs/quality_calibration.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace sfs {

namespace {

bool is_share(double value) { return value >= 0.0 && value <= 1.0; }

}  // namespace

QualityCalibration::QualityCalibration(std::span<const double> mean_score,
                                       std::span<const double> mean_prediction, double common,
                                       double own)
    : mean_score_(mean_score.begin(), mean_score.end()),
      mean_prediction_(mean_prediction.begin(), mean_prediction.end()),
      common_(common),
      own_(own) {
  if (mean_score.empty() || mean_score.size() != mean_prediction.size())
    throw std::invalid_argument("quality calibration: means of " +
                                std::to_string(mean_score.size()) + " models' scores and of " +
                                std::to_string(mean_prediction.size()) +
                                " models' predictions; there must be as many, and one at least");
  for (const double share : {common, own})
    if (!is_share(share))
      throw std::invalid_argument("quality calibration: " + std::to_string(share) +
                                  " is believed; it must be in [0, 1]");
  for (std::size_t i = 0; i < models(); ++i)
    if (!is_share(mean_score[i]) || !(std::abs(mean_prediction[i]) <= largest_prediction))
      throw std::invalid_argument("quality calibration: model " + std::to_string(i) +
                                  " has a mean score of " + std::to_string(mean_score[i]) +
                                  " and a mean prediction of " +
                                  std::to_string(mean_prediction[i]) +
                                  "; scores are in [0, 1], predictions within 1e100 of 0");
}

void QualityCalibration::apply(std::span<double> predictions) const {
  if (predictions.size() != models())
    throw std::invalid_argument("quality calibration: " + std::to_string(predictions.size()) +
                                " predictions of " + std::to_string(models()) + " models");
  double common = 0.0;
  for (std::size_t i = 0; i < models(); ++i) {
    predictions[i] -= mean_prediction_[i];
    common += predictions[i];
  }
  common /= static_cast<double>(models());
  for (std::size_t i = 0; i < models(); ++i)
    predictions[i] =
        std::clamp(mean_score_[i] + common_ * common + own_ * (predictions[i] - common), 0.0, 1.0);
}

}  // namespace sfs
