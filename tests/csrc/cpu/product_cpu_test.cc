// Matmuls with weights in panels: every instruction set of this machine and emulated AMX, against
// sums in f64; biases and activations; a row has the same bits beside other rows; threads.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "cpu/amx_emulation.h"
#include "cpu/dispatch.h"
#include "cpu/product.h"
#include "cpu/thread_pool.h"
#include "spec.h"

namespace jax_attn {
namespace {

int g_failures = 0;

struct Random {
  uint32_t state = 1;
  float operator()() {
    state = state * 1664525u + 1013904223u;
    return static_cast<float>(static_cast<int32_t>(state)) * 0x1p-31f;
  }
};

template <typename T>
T To(float x) {
  if constexpr (sizeof(T) == 4) {
    return x;
  } else if constexpr (IsBf16<T>) {
    return ToBf16(x);
  } else {
    return ToF16(x);
  }
}

// w: [depth, columns] -> panels, with zeros beyond.
template <typename T>
std::vector<T> Panels(const std::vector<T>& w, i64 depth, i64 columns) {
  const i64 steps = WeightSteps(IsBf16<T>, depth), pair = IsBf16<T> ? 2 : 1;
  std::vector<T> panels(CeilDiv(columns, kWeightColumns) * steps * kWeightColumns * pair, To<T>(0));
  for (i64 k = 0; k < depth; ++k) {
    for (i64 n = 0; n < columns; ++n) {
      const i64 step = n / kWeightColumns * steps + k / pair;
      panels[(step * kWeightColumns + n % kWeightColumns) * pair + k % pair] = w[k * columns + n];
    }
  }
  return panels;
}

// What a product ends with. bias: [columns]; empty: none.
template <typename T>
struct End {
  std::vector<T> bias;
  Activation activation = Activation::kNone;
};

template <typename T>
std::vector<float> Multiply(DType dtype, const std::vector<T>& x, const std::vector<T>& panels,
                            i64 rows, i64 depth, i64 columns, TaskPool& pool,
                            const End<T>& end = {}) {
  std::vector<float> y(rows * columns + 1, NAN);
  const T* bias = end.bias.empty() ? nullptr : end.bias.data();
  ProductCpu(dtype,
             {x.data(), panels.data(), y.data(), rows, depth, columns, true, bias, end.activation},
             pool);
  return y;
}

double Activated(Activation activation, double x) {
  switch (activation) {
    case Activation::kNone:
      return x;
    case Activation::kGelu:
      return 0.5 * x * (1 + std::erf(x * std::sqrt(0.5)));
    case Activation::kGeluTanh:
      return 0.5 * x * (1 + std::tanh(std::sqrt(2 / std::acos(-1)) * (x + 0.044715 * x * x * x)));
    case Activation::kRelu:
      return std::max(x, 0.0);
  }
  return NAN;
}

template <typename T>
void TestType(const std::string& isa, DType dtype, i64 max_rows, i64 depth, i64 columns,
              TaskPool& threads) {
  Random random;
  std::vector<T> x(max_rows * depth), w(depth * columns);
  for (T& value : x) value = To<T>(random());
  for (T& value : w) value = To<T>(random());
  const std::vector<T> panels = Panels(w, depth, columns);
  const auto fail = [&](const char* what, i64 rows, i64 at) {
    std::printf("FAILED %s dtype %d depth %lld columns %lld rows %lld at %lld: %s\n", isa.c_str(),
                static_cast<int>(dtype), static_cast<long long>(depth),
                static_cast<long long>(columns), static_cast<long long>(rows),
                static_cast<long long>(at), what);
    ++g_failures;
  };
  const std::vector<float> all = Multiply(dtype, x, panels, max_rows, depth, columns, threads);
  for (i64 i = 0; i < max_rows * columns; ++i) {
    double sum = 0;
    for (i64 k = 0; k < depth; ++k) {
      sum += double{ToF32(x[i / columns * depth + k])} * ToF32(w[k * columns + i % columns]);
    }
    if (!(std::fabs(all[i] - sum) < 1e-5 * (1 + std::sqrt(depth)))) {
      return fail("is not the sum", max_rows, i);
    }
  }
  std::vector<T> bias(columns);
  for (T& value : bias) value = To<T>(random());
  for (i64 number = 0; number < kNumActivations; ++number) {
    const Activation activation = static_cast<Activation>(number);
    for (const End<T>& end : {End<T>{{}, activation}, End<T>{bias, activation}}) {
      const std::vector<float> y =
          Multiply(dtype, x, panels, max_rows, depth, columns, threads, end);
      for (i64 i = 0; i < max_rows * columns; ++i) {
        const double sum = all[i] + (end.bias.empty() ? 0.0 : double{ToF32(bias[i % columns])});
        const double want = Activated(activation, sum);
        if (!(std::fabs(y[i] - want) < 1e-6 * (1 + std::fabs(sum)))) {
          return fail(("activation " + std::to_string(number)).c_str(), max_rows, i);
        }
      }
    }
  }
  InlinePool alone;
  for (i64 rows : {0, 1, 2, 5, 12, 13, 16, 17, 32, 33, 70, 193}) {
    if (rows > max_rows) break;
    const std::vector<float> some = Multiply(dtype, x, panels, rows, depth, columns, alone);
    if (std::memcmp(some.data(), all.data(), rows * columns * sizeof(float)) != 0) {
      return fail("other bits beside other rows", rows, 0);
    }
    if (!std::isnan(some[rows * columns])) return fail("wrote behind the last row", rows, 0);
  }
}

void TestIsa(const std::string& isa, TaskPool& threads) {
  struct Case {
    i64 max_rows, depth, columns;
  };
  // 96 columns are three panels, so a wide block and one that is not; 35 steps end with a part of a
  // group. 200 rows of 1,400 are two parts.
  for (const auto& [rows, depth, columns] : {Case{70, 1, 1},
                                             {70, 33, 40},
                                             {70, 35, 96},
                                             {70, 64, 32},
                                             {70, 300, 257},
                                             {200, 1400, 33}}) {
    TestType<Bf16>(isa, kBF16, rows, depth, columns, threads);
    TestType<F16>(isa, kF16, rows, depth, columns, threads);
    TestType<float>(isa, kF32, rows, depth, columns, threads);
  }
}

}  // namespace
}  // namespace jax_attn

int main() {
  using namespace jax_attn;
  ThreadPool threads(3);
  for (const std::string& isa : SupportedCpuIsas()) {
    SetCpuIsa(isa);
    TestIsa(isa, threads);
  }
  SetActiveKernels(kKernelsAmxEmulated);
  TestIsa(kKernelsAmxEmulated.name, threads);
  std::printf("product_cpu_test: %s\n", g_failures ? "FAILED" : "ok");
  return g_failures ? 1 : 0;
}
