#include "sfs/projection.h"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>

namespace sfs {

Projection::Projection(std::span<const double> mean, std::span<const double> components)
    : buckets_(mean.size()) {
  if (mean.empty()) throw std::invalid_argument("projection: mean must not be empty");
  if (components.size() % buckets_ != 0)
    throw std::invalid_argument("projection: " + std::to_string(components.size()) +
                                " values of components are no whole number of axes of " +
                                std::to_string(buckets_) + " buckets");
  const std::size_t count = components.size() / buckets_;
  weights_.resize((count + lane - 1) / lane * lane * buckets_);
  for (std::size_t component = 0; component < count; ++component) {
    double offset = 0.0;
    for (std::size_t bucket = 0; bucket < buckets_; ++bucket) {
      const double weight = components[component * buckets_ + bucket];
      weights_[(component / lane * buckets_ + bucket) * lane + component % lane] = weight;
      offset += weight * mean[bucket];
    }
    offsets_.push_back(offset);
  }
}

void Projection::project(std::span<const std::int32_t> buckets, std::span<const double> description,
                         std::span<double> row) const {
  if (buckets.size() != buckets_)
    throw std::invalid_argument("projection: " + std::to_string(buckets.size()) +
                                " buckets; they must be " + std::to_string(buckets_));
  if (description.empty() || row.size() != components() + description.size())
    throw std::invalid_argument("projection: " + std::to_string(components()) + " components and " +
                                std::to_string(description.size()) +
                                " values of description do not make a row of " +
                                std::to_string(row.size()));
  // Most prompts leave most buckets empty. Written before it is decided: nothing to mispredict.
  std::vector<std::uint32_t> used(buckets_);
  std::size_t count = 0;
  for (std::uint32_t bucket = 0; bucket < buckets_; ++bucket) {
    used[count] = bucket;
    count += buckets[bucket] != 0 ? 1 : 0;
  }
  used.resize(count);

  const double tokens = std::max(1.0, description.front());
  for (std::size_t first = 0; first < components(); first += lane) {
    const double* const weights = weights_.data() + first * buckets_;
    std::array<double, lane> sums{};
    for (const std::uint32_t bucket : used) {
      const double sign = buckets[bucket];
      for (std::size_t i = 0; i < lane; ++i) sums[i] += sign * weights[bucket * lane + i];
    }
    const std::size_t end = std::min(lane, components() - first);
    for (std::size_t i = 0; i < end; ++i) row[first + i] = sums[i] / tokens - offsets_[first + i];
  }
  std::copy(description.begin(), description.end(),
            row.begin() + static_cast<std::ptrdiff_t>(components()));
}

}  // namespace sfs
