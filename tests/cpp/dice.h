// Random choices, the same for the same seed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <random>

class Dice {
 public:
  explicit Dice(std::uint32_t seed) : engine_(seed) {}
  int from(int low, int high) { return std::uniform_int_distribution(low, high)(engine_); }
  bool coin() { return from(0, 1) == 1; }
  double real(double low, double high) {
    return std::uniform_real_distribution(low, high)(engine_);
  }
  std::uint64_t bits() { return engine_(); }

  template <class Values>
  auto& one_of(Values& values) {
    return values[static_cast<std::size_t>(from(0, static_cast<int>(std::size(values)) - 1))];
  }

 private:
  std::mt19937_64 engine_;
};
