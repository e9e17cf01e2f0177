// The targets' seeds and mutations, as libFuzzer calls for them.
#include <algorithm>

#include "fuzz_target.h"

extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t max_size);

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size,
                                               std::size_t max_size, unsigned int seed) {
  Dice dice(seed);
  if (size > 1 && dice.from(0, 7) == 0) return LLVMFuzzerMutate(data, size, max_size);
  Bytes input(data, data + size);
  if (size <= 1 || dice.from(0, 255) == 0)
    input = seed_input(dice);
  else
    mutate(input, dice);
  input.resize(std::min(input.size(), max_size));
  std::copy(input.begin(), input.end(), data);
  return input.size();
}
