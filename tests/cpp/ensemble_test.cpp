// Ensembles against their formulas, and parts that do not fit together.
#include "sfs/ensemble.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "dice.h"

using namespace sfs;

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

std::vector<double> reals(Dice& dice, int count) {
  std::vector<double> values;
  for (; count > 0; --count) values.push_back(dice.real(-1.0, 1.0));
  return values;
}

void rows_are_components_and_description(Dice& dice) {
  const int buckets = dice.from(1, 40), components = dice.from(0, 20);
  const std::vector<double> mean = reals(dice, buckets);
  const std::vector<double> axes = reals(dice, components * buckets);
  const Projection projection(mean, axes);
  std::vector<std::int32_t> signs;
  for (int i = 0; i < buckets; ++i) signs.push_back(dice.coin() ? 0 : dice.from(-3, 3));
  const std::vector<double> description{static_cast<double>(dice.from(0, 30)), nan, -7.0};
  std::vector<double> row(static_cast<std::size_t>(components) + description.size(), nan);
  projection.project(signs, description, row);
  for (int component = 0; component < components; ++component) {
    double sum = 0.0;
    for (int bucket = 0; bucket < buckets; ++bucket) {
      const auto at = static_cast<std::size_t>(bucket);
      const double share = signs[at] / std::max(1.0, description[0]);
      sum += axes[static_cast<std::size_t>(component * buckets) + at] * (share - mean[at]);
    }
    CHECK(std::abs(row[static_cast<std::size_t>(component)] - sum) < 1e-12);
  }
  CHECK(row[row.size() - 3] == description[0] && std::isnan(row[row.size() - 2]) &&
        row.back() == -7.0);
}

ForestNode leaf(double output) {
  ForestNode node{};
  node.value = output;
  return node;
}

// One component, two values of description, one column of models. Each output is a tree: its first
// value for the model of -1, its second for that of 1.
struct Parts {
  std::vector<double> outputs{0.4, 0.8, 30.0, 20.0, 9.0, 9.0, 5.0, 0.1, 7.0, 50.0};
  std::int32_t features = 4;
  std::vector<double> model_columns{-1.0, 1.0};
  std::size_t models = 2;
  std::optional<QualityCalibration> calibration =
      QualityCalibration(std::vector<double>{0.3, 0.9}, std::vector<double>{0.5, 0.5}, 0.5, 0.25);
  std::vector<double> length_factors{1.0, 2.0, 1.0, 1.0};

  Ensemble ensemble() const {
    std::vector<ForestNode> nodes;
    std::vector<std::int32_t> roots, output_trees;
    for (std::size_t i = 0; i < outputs.size(); i += 2) {
      const auto root = static_cast<std::int32_t>(nodes.size());
      ForestNode split{};
      split.kind = ForestNodeKind::numerical;
      split.feature = 3;
      split.left = root + 1;
      split.right = root + 2;
      nodes.insert(nodes.end(), {split, leaf(outputs[i]), leaf(outputs[i + 1])});
      roots.push_back(root);
      output_trees.push_back(1);
    }
    const std::vector<double> mean{0.0, 0.0}, components{1.0, 0.0};
    return Ensemble(Projection(mean, components), Forest(features, nodes, roots, output_trees, {}),
                    models, model_columns, calibration, length_factors);
  }
};

std::vector<double> predicted(const Ensemble& ensemble) {
  std::vector<double> predictions(ensemble.models() * ensemble.outputs(), nan);
  ensemble.predict(std::vector<std::int32_t>{1, 0}, std::vector<double>{1.0, 0.0}, predictions);
  return predictions;
}

void qualities_are_calibrated_and_lengths_in_order() {
  const std::vector<double> all = predicted(Parts().ensemble());
  // -0.1 and 0.3 are left: 0.1 of the prompt, and -0.2 and 0.2 of the models.
  const double expected[] = {0.3 + 0.05 - 0.05, 30.0, 5.0, 7.0, 18.0, 1.0, 20.0, 1.0, 18.0, 50.0};
  CHECK(all.size() == std::size(expected));
  for (std::size_t i = 0; i < all.size(); ++i) CHECK(std::abs(all[i] - expected[i]) < 1e-12);

  Parts lengths;
  lengths.calibration.reset();
  lengths.outputs.erase(lengths.outputs.begin(), lengths.outputs.begin() + 2);
  CHECK(predicted(lengths.ensemble())[0] == 30.0 && predicted(lengths.ensemble())[4] == 20.0);
  Parts qualities;
  qualities.length_factors.clear();
  qualities.outputs.resize(2);
  CHECK(predicted(qualities.ensemble()) == (std::vector<double>{all[0], all[5]}));
}

template <class Change>
void refused(const std::string& why, Change change) {
  Parts parts;
  change(parts);
  std::string said;
  try {
    parts.ensemble();
  } catch (const std::invalid_argument& error) {
    said = error.what();
  }
  if (said.find(why) == std::string::npos) std::fprintf(stderr, "said: %s\n", said.c_str());
  CHECK(said.find(why) != std::string::npos);
}

void what_does_not_fit_is_refused() {
  refused("no rows of 0 models", [](Parts& p) { p.models = 0; });
  refused("2 values are no rows of 3 models", [](Parts& p) { p.models = 3; });
  refused("do not make 4 features", [](Parts& p) { p.model_columns.resize(6); });
  refused("a calibration of 2 models beside 1", [](Parts& p) { p.models = 1; });
  refused("a forest of 5 outputs; there is no", [](Parts& p) { p.calibration.reset(); });
  refused("and 3 length factors", [](Parts& p) { p.length_factors.pop_back(); });
  refused("a forest of 0 outputs", [](Parts& p) {
    p.calibration.reset();
    p.length_factors.clear();
    p.outputs.clear();
  });
  refused("may be beyond 1e100", [](Parts& p) { p.outputs[1] = -1e101; });
  for (const double factor : {nan, infinity, 1e308})
    refused("length factor 1", [=](Parts& p) { p.length_factors[1] = factor; });

  const std::vector<double> two{0.5, 0.5}, three{0.5, 0.5, 0.5}, odd{0.5, nan}, vast{0.5, 1e101};
  const auto no_calibration = [](const auto& score, const auto& prediction, double share) {
    return throws<std::invalid_argument>(
        [&] { QualityCalibration(score, prediction, 0.5, share); });
  };
  CHECK(!no_calibration(two, two, 1.0));
  CHECK(no_calibration(two, three, 0.5) && no_calibration(std::vector<double>{}, two, 0.5));
  for (const auto& means : {odd, vast})
    CHECK(no_calibration(means, two, 0.5) && no_calibration(two, means, 0.5));
  for (const double share : {-0.1, 1.1, nan, infinity}) CHECK(no_calibration(two, two, share));
  CHECK(throws<std::invalid_argument>([&] { Projection({}, two); }));
  CHECK(throws<std::invalid_argument>([&] { Projection(two, three); }));
}

void spans_that_do_not_fit_are_refused() {
  const Ensemble ensemble = Parts().ensemble();
  const auto refuses = [&](std::size_t buckets, std::size_t description, std::size_t outputs) {
    return throws<std::invalid_argument>([&] {
      std::vector<double> predictions(outputs);
      ensemble.predict(std::vector<std::int32_t>(buckets), std::vector<double>(description),
                       predictions);
    });
  };
  CHECK(!refuses(2, 2, 10));
  CHECK(refuses(1, 2, 10) && refuses(3, 2, 10) && refuses(0, 2, 10));
  CHECK(refuses(2, 1, 10) && refuses(2, 3, 10) && refuses(2, 0, 10));
  CHECK(refuses(2, 2, 9) && refuses(2, 2, 0));
}

}  // namespace

int main() {
  for (std::uint32_t seed = 0; seed < 300; ++seed) {
    Dice dice(seed);
    rows_are_components_and_description(dice);
  }
  qualities_are_calibrated_and_lengths_in_order();
  what_does_not_fit_is_refused();
  spans_that_do_not_fit_are_refused();
}
