// Forests against a plain walk of the nodes as given, and arrays that are none.
#include "sfs/forest.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "dice.h"

using namespace sfs;

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

struct Arrays {
  std::int32_t features = 1;
  std::vector<ForestNode> nodes;
  std::vector<std::int32_t> roots;
  std::vector<std::uint32_t> words;
  std::vector<std::int32_t> output_trees;  // none: all make one output

  Forest forest() const {
    const std::vector<std::int32_t> all{static_cast<std::int32_t>(roots.size())};
    return Forest(features, nodes, roots, output_trees.empty() ? all : output_trees, words);
  }
};

ForestNode leaf(double output) {
  ForestNode node{};
  node.value = output;
  return node;
}

ForestNode split(double threshold, std::int32_t left, std::int32_t right,
                 ForestMissing missing = ForestMissing::none, bool default_left = false) {
  ForestNode node{};
  node.kind = ForestNodeKind::numerical;
  node.value = threshold;
  node.left = left;
  node.right = right;
  node.missing = missing;
  node.default_left = default_left;
  return node;
}

ForestNode category_split(std::int32_t first_word, std::int32_t words) {
  ForestNode node = split(0.0, 1, 2);
  node.kind = ForestNodeKind::categorical;
  node.first_word = first_word;
  node.words = words;
  return node;
}

// Features of random trees, and thresholds: few, so that they often meet.
constexpr double values[] = {-infinity, -70.0, -1.0,  -0.5,  -1e-35,  -1e-36, 0.0,
                             1e-36,     1e-35, 1e-34, 0.5,   1.0,     2.0,    31.9,
                             32.0,      63.0,  64.0,  1e300, infinity};

double some_value(Dice& dice) {
  return dice.from(0, 4) == 0 ? dice.real(-3.0, 3.0) : dice.one_of(values);
}

void add_tree(Dice& dice, Arrays& arrays, int splits) {
  // Children of a node are put anywhere behind it, and some nodes belong to nobody.
  std::vector<std::size_t> open{arrays.nodes.size()};
  arrays.roots.push_back(static_cast<std::int32_t>(arrays.nodes.size()));
  arrays.nodes.push_back(leaf(dice.real(-1.0, 1.0)));
  for (; splits > 0; --splits) {
    const auto which = open.begin() + dice.from(0, static_cast<int>(open.size()) - 1);
    const std::size_t place = *which;
    open.erase(which);
    if (dice.from(0, 9) == 0) arrays.nodes.push_back(leaf(nan));
    const auto first = static_cast<std::int32_t>(arrays.nodes.size());
    const bool swapped = dice.coin();
    ForestNode node =
        split(some_value(dice), first + swapped, first + !swapped,
              static_cast<ForestMissing>(dice.from(0, forest_missings - 1)), dice.coin());
    node.feature = dice.from(0, arrays.features - 1);
    if (dice.from(0, 2) == 0) {
      node.kind = ForestNodeKind::categorical;
      node.words = dice.from(0, 3);
      node.first_word = dice.from(0, static_cast<int>(arrays.words.size()) - node.words);
    }
    arrays.nodes[place] = node;
    for (int i = 0; i < 2; ++i) {
      open.push_back(arrays.nodes.size());
      arrays.nodes.push_back(leaf(dice.real(-1.0, 1.0)));
    }
  }
}

Arrays random_arrays(Dice& dice, std::int32_t features) {
  Arrays arrays;
  arrays.features = features;
  for (int i = dice.from(3, 6); i > 0; --i)
    arrays.words.push_back(static_cast<std::uint32_t>(dice.bits()));
  for (int trees = dice.from(0, 20); trees > 0; --trees)
    add_tree(dice, arrays, dice.coin() ? dice.from(0, 3) : dice.from(0, 63));
  return arrays;
}

// LightGBM's decisions, as its documentation and its code tell them.
bool goes_left(const Arrays& arrays, const ForestNode& node, double value) {
  const bool zero = std::abs(value) <= static_cast<double>(1e-35F);
  if (zero) value = 0.0;
  if (node.kind == ForestNodeKind::categorical) {
    if (std::isnan(value) || std::abs(value) > 1e9) return false;
    const int category = static_cast<int>(value);
    if (category < 0 || category >= 32 * node.words) return false;
    const std::uint32_t word =
        arrays.words[static_cast<std::size_t>(node.first_word + category / 32)];
    return (word >> (category % 32) & 1) != 0;
  }
  if (node.missing == ForestMissing::nan && std::isnan(value)) return node.default_left != 0;
  if (node.missing == ForestMissing::zero && (zero || std::isnan(value)))
    return node.default_left != 0;
  return (std::isnan(value) ? 0.0 : value) <= node.value;
}

double walked(const Arrays& arrays, std::int32_t at, const double* row) {
  const ForestNode& node = arrays.nodes[static_cast<std::size_t>(at)];
  if (node.kind == ForestNodeKind::leaf) return node.value;
  const bool left = goes_left(arrays, node, row[node.feature]);
  return walked(arrays, left ? node.left : node.right, row);
}

// All rows, or all but the last.
void agree(std::vector<double>& rows, int features, int feature) {
  const auto stride = static_cast<std::size_t>(features);
  for (auto at = static_cast<std::size_t>(feature) + stride; at < rows.size(); at += stride)
    if (at + stride < rows.size() || rows.size() % 2 == 0) rows[at] = rows[at - stride];
}

void random_forests_agree_with_walks(Dice& dice) {
  const int features = dice.from(1, 5);
  Arrays arrays = random_arrays(dice, features);
  for (int left = static_cast<int>(arrays.roots.size()); left > 0;) {
    arrays.output_trees.push_back(dice.from(0, left));
    left -= arrays.output_trees.back();
  }
  const Forest forest = arrays.forest();
  std::vector<double> rows(static_cast<std::size_t>(features * dice.from(0, 20)));
  for (double& value : rows) value = dice.from(0, 5) == 0 ? nan : some_value(dice);
  for (int feature = 0; feature < features; ++feature)
    if (dice.coin()) agree(rows, features, feature);
  const std::size_t count = rows.size() / static_cast<std::size_t>(features);
  std::vector<double> predictions(count * forest.outputs(), nan);
  forest.evaluate(rows, predictions);
  for (std::size_t row = 0; row < count; ++row) {
    auto root = arrays.roots.begin();
    for (std::size_t output = 0; output < forest.outputs(); ++output) {
      double sum = 0.0;
      for (int i = arrays.output_trees.empty() ? 0 : arrays.output_trees[output]; i > 0; --i)
        sum += walked(arrays, *root++, rows.data() + row * static_cast<std::size_t>(features));
      CHECK(predictions[row * forest.outputs() + output] == sum);
      CHECK(std::abs(sum) <= forest.largest(output));
    }
  }
}

double prediction(const Forest& forest, double value) {
  double predicted = nan;
  forest.evaluate({&value, 1}, {&predicted, 1});
  return predicted;
}

Arrays chain(int leaves, bool to_the_left) {
  Arrays arrays;
  for (int i = 0; i + 1 < leaves; ++i) {
    arrays.nodes.push_back(to_the_left ? split(-i, 2 * i + 2, 2 * i + 1)
                                       : split(i, 2 * i + 1, 2 * i + 2));
    arrays.nodes.push_back(leaf(i));
  }
  arrays.nodes.push_back(leaf(-1.0));
  arrays.roots = {0};
  return arrays;
}

void a_chain_is_as_deep_as_it_is() {
  constexpr auto most = static_cast<int>(Forest::max_leaves);
  const Forest right = chain(most, false).forest(), left = chain(most, true).forest();
  CHECK(right.features() == 1);
  CHECK(prediction(right, -5.0) == 0.0);
  CHECK(prediction(right, 30.0) == 30.0);
  CHECK(prediction(right, 62.0) == 62.0);
  CHECK(prediction(right, infinity) == -1.0);
  CHECK(prediction(left, 5.0) == 0.0);
  CHECK(prediction(left, -29.5) == 30.0);
  CHECK(prediction(left, -61.5) == 62.0);
  CHECK(prediction(left, -infinity) == -1.0);
}

// As many blocks, and the last not full.
void trees_are_as_many_as_they_are() {
  Dice dice(1);
  Arrays arrays;
  arrays.features = 3;
  arrays.words = {5, 6, 7};
  while (arrays.roots.size() < 2500) add_tree(dice, arrays, dice.from(0, 4));
  arrays.output_trees = {1000, 0, 1500};
  const Forest forest = arrays.forest();
  for (int i = 0; i < 100; ++i) {
    const double row[] = {some_value(dice), some_value(dice), some_value(dice)};
    double predicted[] = {nan, nan, nan}, sums[] = {0.0, 0.0, 0.0};
    forest.evaluate(row, predicted);
    for (std::size_t tree = 0; tree < arrays.roots.size(); ++tree)
      sums[tree < 1000 ? 0 : 2] += walked(arrays, arrays.roots[tree], row);
    CHECK(std::ranges::equal(predicted, sums));
  }
}

Arrays stump() {
  Arrays arrays;
  arrays.nodes = {split(0.5, 1, 2), leaf(1.0), leaf(2.0)};
  arrays.roots = {0};
  arrays.words = {1, 2, 3};
  return arrays;
}

std::string refusal(const Arrays& arrays) {
  try {
    arrays.forest();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

template <class Change>
void refused(const std::string& why, Change change) {
  Arrays arrays = stump();
  change(arrays);
  const std::string said = refusal(arrays);
  if (said.find(why) == std::string::npos) std::fprintf(stderr, "said: %s\n", said.c_str());
  CHECK(said.find(why) != std::string::npos);
}

void what_is_no_forest_is_refused() {
  CHECK(refusal(stump()).empty());
  constexpr auto lowest = std::numeric_limits<std::int32_t>::min();
  constexpr auto highest = std::numeric_limits<std::int32_t>::max();
  for (const std::int32_t features : {lowest, -1, 0})
    refused("features must be", [=](Arrays& a) { a.features = features; });
  for (const std::int32_t root : {lowest, -1, 3, highest})
    refused("tree 1, node " + std::to_string(root), [=](Arrays& a) { a.roots.push_back(root); });
  refused("output 1 of 1 trees; 0 are left", [](Arrays& a) { a.output_trees = {1, 1}; });
  refused("no output has the last 1 trees", [](Arrays& a) { a.output_trees = {0, 0}; });
  for (const std::int32_t trees : {lowest, -1, 2, highest})
    refused("output 0 of " + std::to_string(trees), [=](Arrays& a) { a.output_trees = {trees}; });
  for (const std::int32_t child : {lowest, -1, 0, 3, highest}) {
    refused("tree 0, node 0: child", [=](Arrays& a) { a.nodes[0].left = child; });
    refused("tree 0, node 0: child", [=](Arrays& a) { a.nodes[0].right = child; });
  }
  refused("tree 0, node 1: it is reached twice", [](Arrays& a) { a.nodes[0].right = 1; });
  refused("tree 1, node 0: it is reached twice", [](Arrays& a) { a.roots.push_back(0); });
  for (const std::int32_t feature : {lowest, -1, 1, highest})
    refused("tree 0, node 0: feature", [=](Arrays& a) { a.nodes[0].feature = feature; });
  for (const double output : {nan, infinity, -infinity})
    refused("tree 0, node 2: its output", [=](Arrays& a) { a.nodes[2].value = output; });
  refused("tree 0, node 0: its threshold", [](Arrays& a) { a.nodes[0].value = nan; });
  refused("tree 0, node 1: kind 3",
          [](Arrays& a) { a.nodes[1].kind = static_cast<ForestNodeKind>(3); });
  refused("tree 0, node 0: missing type 255",
          [](Arrays& a) { a.nodes[0].missing = static_cast<ForestMissing>(255); });
  for (const auto& [first_word, words] : {std::pair{-1, 2},
                                          {0, -1},
                                          {0, 4},
                                          {3, 1},
                                          {4, 0},
                                          {highest, highest},
                                          {lowest, lowest},
                                          {1, highest}})
    refused("tree 0, node 0: its set",
            [=](Arrays& a) { a.nodes[0] = category_split(first_word, words); });
  for (const bool to_the_left : {false, true})
    for (const int leaves : {65, 100'000})
      refused("tree 1 has " + std::to_string(leaves) + " leaves, more than 64", [=](Arrays& a) {
        a = chain(leaves, to_the_left);
        a.nodes.push_back(leaf(1.0));
        a.roots.insert(a.roots.begin(), static_cast<std::int32_t>(a.nodes.size()) - 1);
      });
}

void the_largest_output_is_told() {
  Arrays arrays = stump();
  arrays.nodes.push_back(leaf(-5.0));
  arrays.roots.push_back(3);
  CHECK(arrays.forest().largest(0) == 7.0);
  arrays.output_trees = {1, 0, 1};
  const Forest forest = arrays.forest();
  CHECK(forest.largest(0) == 2.0 && forest.largest(1) == 0.0 && forest.largest(2) == 5.0);
  arrays.output_trees.clear();
  for (const std::size_t node : {2, 3}) arrays.nodes[node].value = 1e308;
  CHECK(arrays.forest().largest(0) == infinity);
}

void spans_that_do_not_fit_are_refused() {
  Arrays arrays = stump();
  arrays.features = 2;
  const Forest forest = arrays.forest();
  std::vector<double> rows(4), predictions(4);
  const auto refuses = [&](std::size_t values, std::size_t outputs) {
    return throws<std::invalid_argument>([&] {
      forest.evaluate(std::span(rows).first(values), std::span(predictions).first(outputs));
    });
  };
  CHECK(refuses(3, 1) && refuses(3, 2) && refuses(4, 1) && refuses(4, 4));
  CHECK(!refuses(4, 2) && !refuses(0, 0));
}

}  // namespace

int main() {
  for (std::uint32_t seed = 0; seed < 2000; ++seed) {
    Dice dice(seed);
    random_forests_agree_with_walks(dice);
  }
  a_chain_is_as_deep_as_it_is();
  trees_are_as_many_as_they_are();
  what_is_no_forest_is_refused();
  the_largest_output_is_told();
  spans_that_do_not_fit_are_refused();
}
