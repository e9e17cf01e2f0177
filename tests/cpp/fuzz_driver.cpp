// A small libFuzzer: mutates valid inputs round by round, each from a seed of its own, and says
// which one the target did not survive.
//
//   fuzz_snapshot_test [ROUNDS [FIRST]]   rounds FIRST to FIRST + ROUNDS - 1
#include <sys/resource.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <string>

#include "fuzz_target.h"
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace {

constexpr int max_cpu_s = 20;              // of one input: more is an endless loop
constexpr long max_resident_kb = 1 << 20;  // of all: the inputs have some kilobytes

std::atomic<std::uint32_t> current_round = 0;
bool done = false;

void name_round() {
  if (done) return;
  std::fprintf(stderr, "in round %u: run with arguments 1 %u\n", current_round.load(),
               current_round.load());
}
void aborted(int) {
  name_round();
  ::_exit(1);
}
void out_of_time(int) {
  std::fprintf(stderr, "more than %d s of CPU time\n", max_cpu_s);
  name_round();
  ::_exit(1);
}

void change_bytes(Bytes& input, Dice& dice) {
  if (input.empty()) return;
  const auto at = static_cast<std::size_t>(dice.bits() % input.size());
  switch (dice.from(0, 3)) {
    case 0:
      input.resize(at);
      break;
    case 1:
      input.insert(input.begin() + static_cast<std::ptrdiff_t>(at),
                   static_cast<std::uint8_t>(dice.bits()));
      break;
    default:
      input[at] ^= static_cast<std::uint8_t>(1U << dice.from(0, 7));
  }
}

Bytes input_of(std::uint32_t round) {
  constexpr std::uint32_t rounds_per_seed = 64;
  static std::uint32_t seed = ~0U;
  static Bytes valid;
  if (const std::uint32_t wanted = round / rounds_per_seed; wanted != seed) {
    Dice dice(seed = wanted);
    valid = seed_input(dice);
  }
  Bytes input = valid;
  Dice dice(round);
  for (int changes = dice.from(0, 6); changes > 0; --changes) {
    if (dice.from(0, 7) == 0)
      change_bytes(input, dice);
    else
      mutate(input, dice);
  }
  return input;
}

}  // namespace

// By a signal, so that the round is named.
extern "C" const char* __ubsan_default_options() { return "abort_on_error=1:print_stacktrace=1"; }

// One allocation beyond all bounds is a failure, not a machine without memory.
extern "C" const char* __asan_default_options() {
  return "max_allocation_size_mb=1024:hard_rss_limit_mb=2048";
}

int main(int count, char** arguments) {
  const std::uint32_t rounds = count > 1 ? std::stoul(arguments[1]) : 3000;
  const std::uint32_t first = count > 2 ? std::stoul(arguments[2]) : 0;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_set_death_callback(name_round);
#endif
  std::atexit(name_round);
  std::signal(SIGVTALRM, out_of_time);
  std::signal(SIGABRT, aborted);
  double slowest_s = 0.0;
  std::uint32_t slowest = 0;
  for (std::uint32_t round = first; round != first + rounds; ++round) {
    current_round = round;
    const Bytes input = input_of(round);
    const itimerval timer{{0, 0}, {max_cpu_s, 0}};
    ::setitimer(ITIMER_VIRTUAL, &timer, nullptr);
    const std::clock_t begun = std::clock();
    LLVMFuzzerTestOneInput(input.data(), input.size());
    const double took_s = static_cast<double>(std::clock() - begun) / CLOCKS_PER_SEC;
    if (took_s > slowest_s) {
      slowest_s = took_s;
      slowest = round;
    }
    rusage usage{};
    ::getrusage(RUSAGE_SELF, &usage);
    if (usage.ru_maxrss > max_resident_kb) {
      std::fprintf(stderr, "%ld kB of memory\n", usage.ru_maxrss);
      return 1;
    }
  }
  done = true;
  std::printf("%u rounds; the slowest, %u, took %.3f s\n", rounds, slowest, slowest_s);
}
