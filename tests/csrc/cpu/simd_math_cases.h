// Exp2, Weights, Tanh and Erf of cpu/simd/simd_math.h against double precision, for one instruction
// set. A simd_math_<isa>_test.cc is compiled with the flags of its set, as the kernels are.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <vector>

#include "checks.h"
#include "cpu/simd/simd_math.h"

namespace jax_attn {
namespace {

template <class Isa, class Function>
float ValueOf(Function function, float x) {
  alignas(64) float lanes[64];
  std::fill(lanes, lanes + Isa::kWidth, x);
  Isa::Store(lanes, function(Isa::Load(lanes)));
  for (int i = 1; i < Isa::kWidth; ++i) {
    CHECK(std::memcmp(lanes, lanes + i, 4) == 0, "lanes of %g differ", double{x});
  }
  return lanes[0];
}

// `low` to `high` in steps that are not round numbers, and numbers next to the integers.
std::vector<float> Numbers(float low, float high) {
  std::vector<float> numbers = {low, high};
  for (double x = low; x < high; x += 0.00310559) numbers.push_back(static_cast<float>(x));
  for (float n = std::ceil(low); n <= high; n += 0.5f) {
    for (float x : {std::nextafter(n, low), n, std::nextafter(n, high)}) {
      if (x >= low && x <= high) numbers.push_back(x);
    }
  }
  return numbers;
}

// Checks the common contract of Exp2 and Weights: exactly 0 below -125, where 2^x could be
// subnormal, 1 at 0, and 2^x between them with relative error `error`.
template <class Isa, class Function>
void CheckPowers(const char* name, Function function, float highest, double error) {
  const float inf = std::numeric_limits<float>::infinity();
  for (float x : {-inf, -std::numeric_limits<float>::max(), -1e9f, -300.0f, -150.0f, -149.0f,
                  -130.0f, -126.5f, -126.0f, std::nextafter(-125.0f, -inf)}) {
    const float y = ValueOf<Isa>(function, x);
    CHECK(y == 0 && !std::signbit(y), "%s(%g): got %g, want 0", name, double{x}, double{y});
  }
  CHECK(ValueOf<Isa>(function, 0) == 1, "%s(0) is not 1", name);
  CHECK(std::isnan(ValueOf<Isa>(function, NAN)), "%s(NaN) is a number", name);
  for (float x : Numbers(-125, highest)) {
    const double y = ValueOf<Isa>(function, x), want = std::exp2(double{x});
    CHECK(std::fabs(y - want) <= error * want, "%s(%.9g): got %.9g, want %.9g", name, double{x}, y,
          want);
  }
}

template <class Isa>
void CheckMath() {
  using Vec = typename Isa::Vec;
  // 1 ulp is at most 2^-23 of a number.
  CheckPowers<Isa>("Exp2", [](Vec x) { return Exp2<Isa>(x); }, 0, 0x1p-23);
  // With kFloorExp2 logits may exceed the running max by 2^8 and more (softmax.h).
  CheckPowers<Isa>(
      "Weights", [](Vec x) { return Weights<Isa>(x); }, Isa::kFloorExp2 ? 120 : 0,
      Isa::kFloorExp2 ? 0x1p-22 : 0x1p-23);
  const auto tanh = [](Vec x) { return Tanh<Isa>(x); };
  for (float x : Numbers(-30, 30)) {
    const double y = ValueOf<Isa>(tanh, x), want = std::tanh(double{x});
    CHECK(std::fabs(y - want) <= 0x1p-21 * std::fabs(want), "Tanh(%.9g): got %.9g, want %.9g",
          double{x}, y, want);
  }
  CHECK(std::isnan(ValueOf<Isa>(tanh, NAN)), "Tanh(NaN) is a number");
  CHECK(ValueOf<Isa>(tanh, 1e30f) == 1 && ValueOf<Isa>(tanh, -1e30f) == -1,
        "Tanh of large numbers");
  const auto erf = [](Vec x) { return Erf<Isa>(x); };
  for (float x : Numbers(-6, 6)) {
    const double y = ValueOf<Isa>(erf, x), want = std::erf(double{x});
    CHECK(std::fabs(y - want) <= 0x1p-21 * std::fabs(want) + 0x1p-149,
          "Erf(%.9g): got %.9g, want %.9g", double{x}, y, want);
  }
  CHECK(std::isnan(ValueOf<Isa>(erf, NAN)), "Erf(NaN) is a number");
}

// The exit status. If the processor lacks the instruction set, nothing is computed.
[[maybe_unused]] int Report(const char* isa, bool runs_here, void (*check)()) {
  if (runs_here) check();
  if (g_failures == 0)
    std::printf("simd_math %s: %s\n", isa, runs_here ? "ok" : "not on this processor");
  return g_failures > 0;
}

}  // namespace
}  // namespace jax_attn
