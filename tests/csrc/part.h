// A part of a program's cases, for `make test`: with JAX_ATTN_TESTS_PART=N only one in N of the
// shapes that kernels are tested with is compiled, and of each shape's cases one in three is run.
// Kernels of a test are templates on their shape, and to compile them takes most of its time.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace jax_attn {
namespace {

#ifdef JAX_ATTN_TESTS_PART
constexpr uint32_t kTestsPart = JAX_ATTN_TESTS_PART;
#else
constexpr uint32_t kTestsPart = 1;
#endif

// Ends the process with an error where a program has asked for parts and ran none of its cases.
struct PartCheck {
  bool has_asked = false, has_run = false;
  ~PartCheck() {
    if (!has_asked || has_run) return;
    std::printf("no case is in the part: make JAX_ATTN_TESTS_PART smaller for this program\n");
    std::_Exit(1);
  }
};
PartCheck g_part;

// Whether cases of these types are in the part: by a hash of their names, so that each build by one
// compiler selects the same ones.
template <class... Types>
constexpr bool InPart() {
  uint32_t hash = 2166136261u;  // FNV-1a
  for (const char* at = __PRETTY_FUNCTION__; *at != 0; ++at) {
    hash = (hash ^ static_cast<unsigned char>(*at)) * 16777619u;
  }
  return (hash >> 8) % kTestsPart == 0;
}

// Whether the next case of these types, which are in the part, is run.
template <class... Types>
bool TakesCase() {
  static uint32_t num_cases = 0;
  g_part.has_run = true;
  return num_cases++ % (kTestsPart == 1 ? 1 : 3) == 0;
}

}  // namespace
}  // namespace jax_attn
