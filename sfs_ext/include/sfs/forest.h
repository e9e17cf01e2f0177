// Decision trees for a few rows at a time: what LightGBM's boosters predict, in microseconds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

namespace sfs {

enum class ForestNodeKind : std::uint8_t {
  leaf,
  numerical,    // left where the feature is at most the threshold
  categorical,  // left where the feature is in the set
};
inline constexpr int forest_node_kinds = 3;

// Which values of a feature go the default way. NaN is 0 to the first two.
enum class ForestMissing : std::uint8_t { none, zero, nan };
inline constexpr int forest_missings = 3;

// As whoever builds a forest gives it; what is evaluated has another form.
struct ForestNode {
  double value;              // a leaf's output, or a threshold
  std::int32_t left, right;  // of a split: numbers of nodes behind this one
  std::int32_t feature;      // of a split
  // Of a categorical split: its set is a stretch of the forest's words, with a bit a category.
  std::int32_t first_word, words;
  ForestNodeKind kind;
  ForestMissing missing;      // of a numerical split
  std::uint8_t default_left;  // of a numerical split
};
static_assert(sizeof(ForestNode) == 32 && std::is_trivially_copyable_v<ForestNode>);

// What trees say of a row of features, summed up: the first so many make the first output, and so
// on. Immutable, so that threads may share it.
//
// Decisions are LightGBM's: values within 1e-35 of 0 are 0, a category is a value without its
// fraction, and what is negative, NaN or not in the set goes right.
//
// Trees are not walked, which would wait for memory and for comparisons at every step. A split that
// sends a row right rules out the leaves on its left, and of those that no split rules out, a
// tree's leftmost is where a walk ends. Splits on a feature lie by threshold, so that those that
// send a value right are one stretch of memory. (QuickScorer: Lucchese et al., SIGIR 2015.)
class Forest {
 public:
  static constexpr std::size_t max_leaves = 64;  // of a tree: a bit each

  // roots: the number of each tree's first node. output_trees: how many trees make each output.
  // Throws std::invalid_argument, naming tree and node, unless every node that a tree reaches is
  // sound, and reached once; naming the tree that has more than max_leaves; and for outputs of more
  // or fewer trees than there are.
  Forest(std::int32_t features, std::span<const ForestNode> nodes,
         std::span<const std::int32_t> roots, std::span<const std::int32_t> output_trees,
         std::span<const std::uint32_t> category_words);

  std::size_t features() const noexcept { return features_; }
  std::size_t outputs() const noexcept { return trees_behind_.size(); }

  // No row gets an output further from 0. May be infinite.
  double largest(std::size_t output) const;

  // Of rows × features values, rows × outputs predictions. Throws std::invalid_argument for spans
  // of other sizes. What all rows agree on is looked at once.
  void evaluate(std::span<const double> rows, std::span<double> predictions) const;

 private:
  // How a feature reads for a split, so that `reading <= threshold` alone decides: -inf where the
  // default way is left, NaN where it is right.
  enum class Reading : std::uint8_t { nan_as_zero, zero_left, zero_right, nan_left, nan_right };

  // Of a split: the leaves on its left.
  struct Cut {
    std::uint16_t tree;  // within its block
    std::uint8_t first, leaves;
  };
  static_assert(sizeof(Cut) == 4);

  // Cuts that one reading of a feature decides on, by threshold, or one set of its categories.
  struct Column {
    std::uint32_t feature;
    std::uint32_t first_cut, cuts;
    std::uint32_t first_word, words;  // of the set
    bool categorical;
    Reading reading;
  };

  // Trees whose leaves, as bits, stay in the nearest cache.
  static constexpr std::size_t trees_per_block = 1024;
  struct Block {
    std::uint32_t first_column = 0, columns = 0;
    std::uint32_t first_tree = 0, trees = 0;
  };

  struct Split;

  static double read(double value, Reading reading);
  void check_tree(std::size_t tree, std::span<const ForestNode> nodes, std::int32_t root,
                  std::vector<bool>& reached) const;
  std::uint32_t add_node(std::span<const ForestNode> nodes, std::int32_t number,
                         std::uint32_t first_leaf, std::vector<Split>& splits);
  void add_block(std::vector<Split>& splits, std::size_t first_tree, std::size_t trees);
  std::size_t cuts_of(const Column& column, double value) const;
  void cut(const Column& column, double value, std::uint64_t* leaves) const;
  void prefetch_leaves(const Block& block) const;
  void add(const Block& block, std::span<const double> rows, std::span<const char> differ,
           double* predictions) const;

  std::size_t features_;
  std::vector<std::size_t> trees_behind_;  // of each output: where its trees end
  std::vector<Block> blocks_;
  std::vector<Column> columns_;
  std::vector<double> thresholds_;  // of each cut; nothing to a categorical one
  std::vector<Cut> cuts_;
  std::vector<std::uint32_t> first_leaves_;  // of each tree
  std::vector<double> leaves_;               // of each: its value
  std::vector<std::uint32_t> words_;
};

}  // namespace sfs
