// The least a test needs: a failed check names itself and ends the program.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                      \
    }                                                                                    \
  } while (false)

#define CHECK_CLOSE(a, b, relative)                                                              \
  do {                                                                                           \
    const double x = (a), y = (b);                                                               \
    if (!(std::abs(x - y) <= (relative) * std::abs(y))) {                                        \
      std::fprintf(stderr, "%s:%d: %s = %.17g, %s = %.17g\n", __FILE__, __LINE__, #a, x, #b, y); \
      std::exit(1);                                                                              \
    }                                                                                            \
  } while (false)

template <class Exception, class Call>
bool throws(Call call) {
  try {
    call();
  } catch (const Exception&) {
    return true;
  }
  return false;
}
