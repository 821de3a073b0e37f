// CHECK, of tests that go on after a failure and say at their end how many there were.
#pragma once

#include <cstdio>
#include <cstdlib>

namespace jax_attn {
namespace {

int g_failures = 0;

// Prints what is behind the condition, a format and its arguments, where that does not hold. The
// 21st time ends the process.
#define CHECK(condition, ...)                                           \
  do {                                                                  \
    if (!(condition)) {                                                 \
      std::printf("FAILED %s:%d %s: ", __FILE__, __LINE__, #condition); \
      std::printf(__VA_ARGS__);                                         \
      std::printf("\n");                                                \
      if (++g_failures > 20) std::exit(1);                              \
    }                                                                   \
  } while (0)

}  // namespace
}  // namespace jax_attn
