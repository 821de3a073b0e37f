// The merge kernel without a GPU: cuda/any/merge.cuh runs in emulation and must match the CPU's
// kernel, up to the last bit or two of sums in another order.
#include "emulation/cuda_emulation.h"
// The header above stands in for CUDA and must come first.
#include <cstring>
#include <random>

#include "cpu/merge.h"
#include "cuda/any/merge.cuh"
#include "spec.h"

namespace jax_attn {
namespace {

int g_failures = 0;

template <int kElement>
struct TraitsOf {
  static constexpr int kArch = 90, kDtype = kElement;
};

template <int kElement>
void RunCase(int num_states, int num_rows, int head_dim, int num_ctas) {
  constexpr int kBytes = Element<kElement>::kBytes;
  std::mt19937 rng(static_cast<unsigned>(num_states * 1000 + num_rows + head_dim));
  std::normal_distribution<float> normal;
  const auto bits_of = [](float x) {
    u32 bits;
    std::memcpy(&bits, &x, 4);
    if constexpr (kBytes == 2) bits = Element<kElement>::Pack(x, 0) & 0xffff;
    return bits;
  };
  const auto float_of = [](const char* from) {
    u32 bits = 0;
    std::memcpy(&bits, from, kBytes);
    if constexpr (kBytes == 2) return Element<kElement>::ToFloat(static_cast<u16>(bits));
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
  };
  std::vector<float> lse_parts;
  std::vector<char> o_parts;
  for (int i = 0; i < num_states * num_rows; ++i) {
    const bool is_identity = rng() % 5 == 0;  // then o is ignored
    lse_parts.push_back(is_identity ? -INFINITY : 3 * normal(rng));
    for (int c = 0; c < head_dim; ++c) {
      const u32 bits = bits_of(is_identity ? NAN : normal(rng));
      o_parts.insert(o_parts.end(), reinterpret_cast<const char*>(&bits),
                     reinterpret_cast<const char*>(&bits) + kBytes);
    }
  }
  // One more row, which the kernel must not write.
  std::vector<char> want((num_rows + 1) * head_dim * kBytes, 0x7b), got = want;
  std::vector<float> want_lse(num_rows + 1, 7.0f), got_lse = want_lse;
  MergeParams p = {};
  p.o_parts = o_parts.data();
  p.lse_parts = lse_parts.data();
  p.num_rows = num_rows;
  p.num_states = num_states;
  p.head_dim_vo = head_dim;
  InlinePool pool;
  p.o = want.data();
  p.lse = want_lse.data();
  MergeCpu(kElement, p, pool);
  p.o = got.data();
  p.lse = got_lse.data();
  using Body = MergeBody<TraitsOf<kElement>>;
  emulation::machine.Launch(num_ctas, Body::kNumThreads, 1, [&] { Body::Run(p); });

  const float tolerance = kElement == kElementF32   ? 3e-6f
                          : kElement == kElementF16 ? 2e-3f
                                                    : 1.6e-2f;
  const auto differs = [](float a, float b, float tolerance) {
    return !(a == b || std::abs(a - b) <= tolerance * (1 + std::abs(a)));
  };
  int wrong = 0;
  for (int r = 0; r <= num_rows; ++r) {
    wrong += differs(want_lse[r], got_lse[r], 3e-6f);
    for (int c = 0; c < head_dim; ++c) {
      const i64 at = (i64{r} * head_dim + c) * kBytes;
      wrong += r == num_rows ? std::memcmp(&want[at], &got[at], kBytes) != 0
                             : differs(float_of(&want[at]), float_of(&got[at]), tolerance);
    }
  }
  if (wrong == 0) return;
  ++g_failures;
  std::printf("FAILED type %d, %d states, %d rows, head_dim %d, %d CTAs: %d values differ\n",
              kElement, num_states, num_rows, head_dim, num_ctas, wrong);
}

template <int kElement>
void RunCases() {
  for (int num_states : {1, 2, 3, 4, 5, 9}) {
    for (int head_dim : {128, 64, 20, 3, 2056}) {
      RunCase<kElement>(num_states, 71, head_dim, 1);
      RunCase<kElement>(num_states, 6, head_dim, 2);
    }
  }
}

}  // namespace
}  // namespace jax_attn

int main() {
  using namespace jax_attn;
  RunCases<kElementBf16>();
  RunCases<kElementF16>();
  RunCases<kElementF32>();
  if (g_failures == 0) std::printf("merge_cuda_test: ok\n");
  return g_failures != 0;
}
