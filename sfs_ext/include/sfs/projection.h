// A prompt as a row of numbers: its signed token hash on a few axes, and its description.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace sfs {

class Projection {
 public:
  // mean: of each bucket's share of the tokens; components: axes × buckets. Throws
  // std::invalid_argument for no buckets, or components that are no whole number of axes.
  Projection(std::span<const double> mean, std::span<const double> components);

  std::size_t buckets() const noexcept { return buckets_; }
  std::size_t components() const noexcept { return offsets_.size(); }

  // buckets: sums of the tokens' signs. description: as it shall stand behind the components, the
  // token count first. row: components() + description.size() values. Throws std::invalid_argument
  // for spans of other sizes.
  void project(std::span<const std::int32_t> buckets, std::span<const double> description,
               std::span<double> row) const;

 private:
  // Components that are summed up at once: a line of the cache.
  static constexpr std::size_t lane = 8;

  std::size_t buckets_;
  std::vector<double> weights_;  // lanes × buckets × lane, zeros behind the last component
  std::vector<double> offsets_;  // of each component: where the mean lies on it
};

}  // namespace sfs
