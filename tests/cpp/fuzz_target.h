// What a fuzz target is made of. libFuzzer drives it where the compiler brings one, fuzz_driver.cpp
// where not.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "dice.h"

using Bytes = std::vector<std::uint8_t>;

// Valid input of the target.
Bytes seed_input(Dice& dice);

// Changes the input in a way that bytes alone would hardly hit on.
void mutate(Bytes& input, Dice& dice);

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

// One of the numbers that arithmetic goes wrong with, or a neighbour of what is there.
template <class Number>
Number hostile(Number old, Dice& dice) {
  using Limits = std::numeric_limits<Number>;
  if constexpr (std::is_floating_point_v<Number>) {
    const Number values[] = {0,
                             -1,
                             1,
                             Limits::quiet_NaN(),
                             Limits::infinity(),
                             -Limits::infinity(),
                             Limits::max(),
                             Limits::lowest(),
                             Limits::denorm_min(),
                             old + static_cast<Number>(dice.real(-1.0, 1.0)),
                             old + static_cast<Number>(dice.real(-1e4, 1e4)),
                             -old};
    return dice.one_of(values);
  } else {
    const auto shifted = [old](std::int64_t by) {
      return static_cast<Number>(static_cast<std::uint64_t>(old) + static_cast<std::uint64_t>(by));
    };
    const Number values[] = {0,
                             1,
                             2,
                             3,
                             Limits::max(),
                             Limits::min(),
                             static_cast<Number>(Limits::max() - 1),
                             static_cast<Number>(std::uint64_t{1} << dice.from(0, 63)),
                             shifted(1),
                             shifted(-1),
                             shifted(dice.from(-64, 64)),
                             shifted(dice.from(-100000, 100000)),
                             static_cast<Number>(dice.from(0, 64)),
                             static_cast<Number>(dice.bits())};
    return dice.one_of(values);
  }
}

// A number inside a struct of plain data, by its offset.
struct Field {
  std::size_t offset;
  void (*change)(std::uint8_t* at, Dice& dice);
};

template <class Number>
void change_number(std::uint8_t* at, Dice& dice) {
  Number number;
  std::memcpy(&number, at, sizeof number);
  number = hostile(number, dice);
  std::memcpy(at, &number, sizeof number);
}

#define FIELD(Struct, member) \
  Field { offsetof(Struct, member), change_number<decltype(Struct::member)> }

// Reads plain data from the front of what is left of an input; zeros beyond its end.
class InputReader {
 public:
  InputReader(const std::uint8_t* data, std::size_t size) : data_(data), left_(size) {}

  template <class T>
  T take() {
    T value{};
    const std::size_t bytes = std::min(sizeof value, left_);
    if (bytes > 0) std::memcpy(static_cast<void*>(&value), data_, bytes);
    skip(bytes);
    return value;
  }
  template <class T>
  std::vector<T> take_many(std::size_t count) {
    std::vector<T> values(std::min(count, left_ / sizeof(T)));
    const std::size_t bytes = values.size() * sizeof(T);
    if (bytes > 0) std::memcpy(static_cast<void*>(values.data()), data_, bytes);
    skip(bytes);
    return values;
  }
  std::size_t left() const { return left_; }

 private:
  void skip(std::size_t bytes) {
    data_ += bytes;
    left_ -= bytes;
  }
  const std::uint8_t* data_;
  std::size_t left_;
};

template <class T>
void append(Bytes& to, const T* values, std::size_t count) {
  const auto* from = reinterpret_cast<const std::uint8_t*>(values);
  to.insert(to.end(), from, from + count * sizeof(T));
}
