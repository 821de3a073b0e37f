// Products of the rows of groups on Hopper, without a GPU: cuda/sm90/grouped_product.cuh runs in
// emulation, beside float64. Operands are small integers, so all sums are exact.
#include "emulation/cuda_emulation.h"
#include "emulation/cuda_emulation_sm90.h"
// The headers above stand in for CUDA and must come first.
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>

#include "cuda/sm90/grouped_product.cuh"

namespace jax_attn {
namespace {

int g_failures = 0;

template <int kOfDtype, bool kIsTransposed, int kRows, int kColumns>
struct TraitsOf {
  static constexpr int kArch = 90, kDtype = kOfDtype;
  static constexpr bool kTransposed = kIsTransposed;
  static constexpr int kTileRows = kRows, kTileColumns = kColumns;
};

struct Case {
  int num_rows, depth, columns;
  std::vector<i32> sizes;
};

TensorMap MapOf(const std::vector<u16>& array, u64 layers, u64 rows, u64 columns, u64 tile_rows) {
  const emulation::TmaArray words = {
      const_cast<u16*>(array.data()), layers, rows, 1, columns, tile_rows, 1};
  TensorMap map = {};
  std::memcpy(&map, &words, sizeof(words));
  return map;
}

template <class Traits>
void RunCase(const Case& c) {
  constexpr bool kIsBf16 = Traits::kDtype == kElementBf16;
  const auto bits_of = [](float x) {
    return static_cast<u16>(kIsBf16 ? FloatToBf16(x) : FloatToF16(x));
  };
  const auto value_of = [](u16 x) { return kIsBf16 ? Bf16ToFloat(x) : F16ToFloat(x); };
  const int groups = static_cast<int>(c.sizes.size());
  std::mt19937 rng(static_cast<unsigned>(c.num_rows * 7919 + c.depth * 31 + c.columns));
  const auto integers = [&](size_t count) {
    std::vector<u16> bits(count);
    for (u16& x : bits) x = bits_of(static_cast<float>(static_cast<int>(rng() % 5) - 2));
    return bits;
  };
  std::vector<u16> x = integers(c.num_rows * c.depth);
  const std::vector<u16> weights = integers(groups * c.depth * c.columns);

  std::vector<int> begins;  // of each group, and of the rows behind all
  int row = 0;
  for (const i32 size : c.sizes) {
    begins.push_back(row);
    row = std::min(row + std::clamp(size, 0, c.num_rows), c.num_rows);
  }
  begins.push_back(row);
  // Every third group, and the rows of none, have NaN in x: it stays in their rows.
  std::vector<bool> is_nan(c.num_rows);
  for (int g = 0; g <= groups; ++g) {
    if (g != groups && g % 3 != 2) continue;
    const int end = g == groups ? c.num_rows : begins[g + 1];
    for (int r = begins[g]; r < end; ++r) {
      is_nan[r] = g < groups;
      x[r * c.depth + r % c.depth] = bits_of(std::numeric_limits<float>::quiet_NaN());
    }
  }

  // One more row, which the kernel must not write.
  std::vector<u16> y((c.num_rows + 1) * c.columns, 0x7b7b);
  const bool transposed = Traits::kTransposed;
  GroupedProductParams p = {};
  p.x_map = MapOf(x, 1, c.num_rows, c.depth, Traits::kTileRows);
  p.weights_map = transposed ? MapOf(weights, groups, c.columns, c.depth, Traits::kTileColumns)
                             : MapOf(weights, groups, c.depth, c.columns, 64);
  p.x = x.data();
  p.weights = weights.data();
  p.group_sizes = c.sizes.data();
  p.y = y.data();
  p.num_rows = c.num_rows;
  p.depth = c.depth;
  p.columns = c.columns;
  p.num_groups = groups;
  using Body = GroupedProductBody<Traits>;
  for (const int num_ctas : {1, 5}) {
    std::fill(y.begin(), y.end(), u16{0x7b7b});
    emulation::machine.Launch(num_ctas, Body::kNumThreads, 1, [&] { Body::Run(p); });
    int wrong = 0;
    for (int r = 0; r < c.num_rows; ++r) {
      const int g =
          static_cast<int>(std::upper_bound(begins.begin(), begins.end(), r) - begins.begin()) - 1;
      for (int column = 0; column < c.columns; ++column) {
        double sum = 0;
        for (int k = 0; g < groups && k < c.depth; ++k) {
          const size_t at = transposed ? (size_t{1} * g * c.columns + column) * c.depth + k
                                       : (size_t{1} * g * c.depth + k) * c.columns + column;
          sum += static_cast<double>(value_of(x[r * c.depth + k])) * value_of(weights[at]);
        }
        const float got = value_of(y[r * c.columns + column]);
        const float want = value_of(bits_of(static_cast<float>(sum)));
        wrong += is_nan[r] ? !std::isnan(got) : !(got == want);
      }
    }
    for (int i = 0; i < c.columns; ++i) wrong += y[c.num_rows * c.columns + i] != 0x7b7b;
    if (wrong == 0) continue;
    ++g_failures;
    std::printf("FAILED tile %d x %d, %s%s, [%d, %d] x [%d, .., %d], %d CTAs: %d values differ\n",
                Traits::kTileRows, Traits::kTileColumns, kIsBf16 ? "bf16" : "f16",
                transposed ? ", transposed" : "", c.num_rows, c.depth, groups, c.columns, num_ctas,
                wrong);
  }
}

template <bool kTransposed>
void RunCases() {
  // Fewer rows, depth and columns than a tile; empty groups at all places; rows behind all groups.
  const std::vector<Case> few = {
      {1, 8, 8, {1}},
      {5, 72, 24, {0, 2, 0, 0, 3, 0}},
      {40, 136, 72, {7, 0, 11, 1, 4}},
      {9, 64, 64, {0, 0, 0}},
      {70, 200, 144, {65, 0, 2}},
      {30, 64, 40, {3, -5, 4, 1 << 30, 6}},  // damaged sizes: all rows but the first belong to one
  };
  for (const Case& c : few) {
    RunCase<TraitsOf<kElementBf16, kTransposed, 64, 64>>(c);
    RunCase<TraitsOf<kElementF16, kTransposed, 64, 128>>(c);
    RunCase<TraitsOf<kElementBf16, kTransposed, 128, 128>>(c);
  }
  // More groups than a warp has lanes.
  std::vector<i32> many(100);
  for (size_t g = 0; g < many.size(); ++g) many[g] = g % 7 == 3 ? 2 : g == 41 ? 9 : 0;
  RunCase<TraitsOf<kElementBf16, kTransposed, 64, 64>>({40, 64, 16, many});
  // Several bands of rows, the last one lower, of several columns.
  RunCase<TraitsOf<kElementBf16, kTransposed, 64, 64>>({64 * 10 + 3, 16, 136, {1, 64 * 9 + 5, 9}});
  // The tiles on GPUs; more steps than the ring has places.
  RunCase<TraitsOf<kElementBf16, kTransposed, 128, 256>>({200, 456, 264, {70, 0, 129}});
  RunCase<TraitsOf<kElementF16, kTransposed, 64, 256>>({65, 456, 256, {1, 63}});
}

}  // namespace
}  // namespace jax_attn

int main() {
  using namespace jax_attn;
  RunCases<false>();
  RunCases<true>();
  if (g_failures == 0) std::printf("grouped_product_sm90_test: ok\n");
  return g_failures != 0;
}
