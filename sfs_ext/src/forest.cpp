#include "sfs/forest.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

namespace sfs {

namespace {

// LightGBM's, a float.
constexpr double zero_threshold = 1e-35F;

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

// A fraction of -1 is category 0, as it is to a conversion to int.
bool in_set(std::span<const std::uint32_t> set, double value) {
  if (!(value > -1.0 && value < 0x1p31)) return false;
  const auto number = static_cast<std::size_t>(value);
  return number / 32 < set.size() && (set[number / 32] >> number % 32 & 1U) != 0;
}

// Empty where the node is sound.
std::string flaw_of(const ForestNode& node, std::int32_t number, std::size_t features,
                    std::size_t nodes, std::size_t words) {
  if (static_cast<int>(node.kind) >= forest_node_kinds)
    return "kind " + std::to_string(static_cast<int>(node.kind)) + " is unknown";
  if (node.kind == ForestNodeKind::leaf)
    return std::isfinite(node.value) ? "" : "its output is not finite";
  if (node.feature < 0 || static_cast<std::size_t>(node.feature) >= features)
    return "feature " + std::to_string(node.feature) + " is not one of " + std::to_string(features);
  for (const std::int32_t child : {node.left, node.right})
    if (child <= number || static_cast<std::size_t>(child) >= nodes)
      return "child " + std::to_string(child) + " is not behind it among " + std::to_string(nodes) +
             " nodes";
  if (node.kind == ForestNodeKind::numerical) {
    if (static_cast<int>(node.missing) >= forest_missings)
      return "missing type " + std::to_string(static_cast<int>(node.missing)) + " is unknown";
    return std::isnan(node.value) ? "its threshold is NaN" : "";
  }
  if (node.first_word < 0 || node.words < 0 ||
      static_cast<std::size_t>(node.first_word) + static_cast<std::size_t>(node.words) > words)
    return "its set of " + std::to_string(node.words) + " words from " +
           std::to_string(node.first_word) + " is not within the " + std::to_string(words) +
           " there are";
  return "";
}

[[noreturn]] void refuse(std::size_t tree, const std::string& flaw) {
  throw std::invalid_argument("forest: tree " + std::to_string(tree) + flaw);
}

[[noreturn]] void refuse(std::size_t tree, std::int32_t node, const std::string& flaw) {
  refuse(tree, ", node " + std::to_string(node) + ": " + flaw);
}

}  // namespace

struct Forest::Split {
  Column column;
  double threshold;
  Cut cut;

  // Sets are alike where they are the same words: to compare contents could take for ever.
  auto key() const {
    return std::tuple(column.feature, column.categorical, column.reading, column.first_word,
                      column.words);
  }

  bool operator<(const Split& other) const {
    if (key() != other.key()) return key() < other.key();
    return std::pair(threshold, cut.tree) < std::pair(other.threshold, other.cut.tree);
  }
};

Forest::Forest(std::int32_t features, std::span<const ForestNode> nodes,
               std::span<const std::int32_t> roots, std::span<const std::int32_t> output_trees,
               std::span<const std::uint32_t> category_words)
    : features_(static_cast<std::size_t>(features)),
      words_(category_words.begin(), category_words.end()) {
  if (features < 1)
    throw std::invalid_argument("forest: features must be positive, not " +
                                std::to_string(features));
  std::size_t behind = 0;
  for (const std::int32_t trees : output_trees) {
    if (trees < 0 || static_cast<std::size_t>(trees) > roots.size() - behind)
      throw std::invalid_argument("forest: output " + std::to_string(trees_behind_.size()) +
                                  " of " + std::to_string(trees) + " trees; " +
                                  std::to_string(roots.size() - behind) + " are left");
    behind += static_cast<std::size_t>(trees);
    trees_behind_.push_back(behind);
  }
  if (behind != roots.size())
    throw std::invalid_argument("forest: no output has the last " +
                                std::to_string(roots.size() - behind) + " trees");
  // Reached twice, a node would be copied twice, and so for its children.
  std::vector<bool> reached(nodes.size());
  std::vector<Split> splits;
  for (std::size_t tree = 0; tree < roots.size(); ++tree) {
    check_tree(tree, nodes, roots[tree], reached);
    first_leaves_.push_back(static_cast<std::uint32_t>(leaves_.size()));
    add_node(nodes, roots[tree], 0, splits);
    const std::size_t trees = tree % trees_per_block + 1;
    if (trees == trees_per_block || tree + 1 == roots.size())
      add_block(splits, tree + 1 - trees, trees);
  }
}

void Forest::check_tree(std::size_t tree, std::span<const ForestNode> nodes, std::int32_t root,
                        std::vector<bool>& reached) const {
  if (root < 0 || static_cast<std::size_t>(root) >= nodes.size())
    refuse(tree, root, "the root is not one of " + std::to_string(nodes.size()) + " nodes");
  std::size_t leaves = 0;
  for (std::vector<std::int32_t> pending{root}; !pending.empty();) {
    const std::int32_t number = pending.back();
    pending.pop_back();
    const auto index = static_cast<std::size_t>(number);
    const ForestNode& node = nodes[index];
    const std::string flaw = flaw_of(node, number, features_, nodes.size(), words_.size());
    if (!flaw.empty()) refuse(tree, number, flaw);
    if (reached[index]) refuse(tree, number, "it is reached twice");
    reached[index] = true;
    if (node.kind == ForestNodeKind::leaf)
      ++leaves;
    else
      pending.insert(pending.end(), {node.left, node.right});
  }
  if (leaves > max_leaves)
    refuse(tree,
           " has " + std::to_string(leaves) + " leaves, more than " + std::to_string(max_leaves));
}

// The number of the leaf behind the node's last, counted within the tree from the left.
std::uint32_t Forest::add_node(std::span<const ForestNode> nodes, std::int32_t number,
                               std::uint32_t first_leaf, std::vector<Split>& splits) {
  const ForestNode& node = nodes[static_cast<std::size_t>(number)];
  if (node.kind == ForestNodeKind::leaf) {
    leaves_.push_back(node.value);
    return first_leaf + 1;
  }
  const std::uint32_t middle = add_node(nodes, node.left, first_leaf, splits);
  const std::size_t tree = (first_leaves_.size() - 1) % trees_per_block;
  Split split{};
  split.cut = {static_cast<std::uint16_t>(tree), static_cast<std::uint8_t>(first_leaf),
               static_cast<std::uint8_t>(middle - first_leaf)};
  split.column.feature = static_cast<std::uint32_t>(node.feature);
  if (node.kind == ForestNodeKind::categorical) {
    split.column.categorical = true;
    split.column.first_word = static_cast<std::uint32_t>(node.first_word);
    split.column.words = static_cast<std::uint32_t>(node.words);
  } else {
    const bool left = node.default_left != 0;
    if (node.missing == ForestMissing::zero)
      split.column.reading = left ? Reading::zero_left : Reading::zero_right;
    if (node.missing == ForestMissing::nan)
      split.column.reading = left ? Reading::nan_left : Reading::nan_right;
    split.threshold = node.value;
  }
  splits.push_back(split);
  return add_node(nodes, node.right, middle, splits);
}

void Forest::add_block(std::vector<Split>& splits, std::size_t first_tree, std::size_t trees) {
  std::sort(splits.begin(), splits.end());
  Block block{static_cast<std::uint32_t>(columns_.size()), 0,
              static_cast<std::uint32_t>(first_tree), static_cast<std::uint32_t>(trees)};
  const Split* before = nullptr;
  for (const Split& split : splits) {
    if (before == nullptr || split.key() != before->key()) {
      columns_.push_back(split.column);
      columns_.back().first_cut = static_cast<std::uint32_t>(cuts_.size());
      ++block.columns;
    }
    ++columns_.back().cuts;
    thresholds_.push_back(split.threshold);
    cuts_.push_back(split.cut);
    before = &split;
  }
  blocks_.push_back(block);
  splits.clear();
}

inline double Forest::read(double value, Reading reading) {
  const bool zero = std::abs(value) <= zero_threshold;
  if (zero) value = 0.0;
  switch (reading) {
    case Reading::nan_as_zero:
      return std::isnan(value) ? 0.0 : value;
    case Reading::zero_left:
      return zero || std::isnan(value) ? -infinity : value;
    case Reading::zero_right:
      return zero ? nan : value;
    case Reading::nan_left:
      return std::isnan(value) ? -infinity : value;
    case Reading::nan_right:
      break;
  }
  return value;
}

// Those that the value cuts off are the column's first.
inline std::size_t Forest::cuts_of(const Column& column, double value) const {
  if (column.categorical) {
    const bool left = in_set({words_.data() + column.first_word, column.words}, value);
    return left ? 0 : column.cuts;
  }
  const double reading = read(value, column.reading);
  if (std::isnan(reading)) return column.cuts;
  // Counted, not searched: without a branch to mispredict, and from memory in order.
  const double* const first = thresholds_.data() + column.first_cut;
  std::size_t count = 0;
  for (std::size_t i = 0; i < column.cuts; ++i) count += first[i] < reading ? 1 : 0;
  return count;
}

inline void Forest::cut(const Column& column, double value, std::uint64_t* leaves) const {
  const Cut* const first = cuts_.data() + column.first_cut;
  for (const Cut& cut : std::span(first, cuts_of(column, value)))
    leaves[cut.tree] &= std::rotl(~std::uint64_t{0} << cut.leaves, cut.first);
}

// Between two decisions the caches forget; these are on their way while splits are compared.
inline void Forest::prefetch_leaves(const Block& block) const {
  constexpr std::size_t leaves_per_line = 64 / sizeof(double);
  const std::size_t behind = block.first_tree + block.trees;
  const std::size_t end = behind < first_leaves_.size() ? first_leaves_[behind] : leaves_.size();
  for (std::size_t i = first_leaves_[block.first_tree]; i < end; i += leaves_per_line)
    __builtin_prefetch(&leaves_[i]);
}

void Forest::add(const Block& block, std::span<const double> rows, std::span<const char> differ,
                 double* predictions) const {
  using Leaves = std::array<std::uint64_t, trees_per_block>;
  prefetch_leaves(block);
  const auto columns = std::span(columns_).subspan(block.first_column, block.columns);
  Leaves shared;  // by what the rows agree on
  std::fill_n(shared.begin(), block.trees, ~std::uint64_t{0});
  for (const Column& column : columns)
    if (differ[column.feature] == 0) cut(column, rows[column.feature], shared.data());

  for (; !rows.empty(); rows = rows.subspan(features_), predictions += outputs()) {
    Leaves own;
    std::copy_n(shared.begin(), block.trees, own.begin());
    for (const Column& column : columns)
      if (differ[column.feature] != 0) cut(column, rows[column.feature], own.data());

    std::size_t tree = 0;
    for (std::size_t output = 0; output < outputs(); ++output) {
      // One by one, as LightGBM does: equal to the last bit.
      double sum = predictions[output];
      for (; tree < block.trees && block.first_tree + tree < trees_behind_[output]; ++tree)
        sum += leaves_[first_leaves_[block.first_tree + tree] +
                       static_cast<std::uint32_t>(std::countr_zero(own[tree]))];
      predictions[output] = sum;
    }
  }
}

double Forest::largest(std::size_t output) const {
  double sum = 0.0;
  for (std::size_t tree = output == 0 ? 0 : trees_behind_[output - 1]; tree < trees_behind_[output];
       ++tree) {
    const auto first = leaves_.begin() + first_leaves_[tree];
    const auto end =
        tree + 1 < first_leaves_.size() ? leaves_.begin() + first_leaves_[tree + 1] : leaves_.end();
    sum += std::abs(*std::max_element(
        first, end, [](double one, double other) { return std::abs(one) < std::abs(other); }));
  }
  return sum;
}

void Forest::evaluate(std::span<const double> rows, std::span<double> predictions) const {
  const std::size_t count = rows.size() / features_;
  if (rows.size() != count * features_ || predictions.size() != count * outputs())
    throw std::invalid_argument("forest: " + std::to_string(rows.size()) + " values in rows of " +
                                std::to_string(features_) + " do not make " +
                                std::to_string(predictions.size()) + " predictions of " +
                                std::to_string(outputs()) + " outputs");
  std::vector<char> differ(features_);
  for (std::size_t i = features_; i < rows.size(); ++i) {
    const std::size_t feature = i % features_;
    const auto bits = [&](std::size_t place) { return std::bit_cast<std::uint64_t>(rows[place]); };
    if (bits(i) != bits(feature)) differ[feature] = 1;
  }
  if (rows.empty()) return;
  std::fill(predictions.begin(), predictions.end(), 0.0);
  for (const Block& block : blocks_) add(block, rows, differ, predictions.data());
}

}  // namespace sfs
