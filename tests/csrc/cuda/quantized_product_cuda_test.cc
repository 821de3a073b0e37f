// Matmuls with quantized matrices, without a GPU: cuda/sm80/quantized_product.cuh runs in
// emulation.
#include "emulation/cuda_emulation.h"
// The header above stands in for CUDA and must come first.
#include "cuda/quantized_product_cases.h"

namespace jax_attn {
namespace {

template <class Traits>
using PortableBody = QuantizedProductBody<Traits>;

template <class Traits>
void RunCase(const Case& c) {
  RunCase<Traits, PortableBody>(c);
}

// Every quantized value with some scales and zeros: the nearest weight, or its neighbour if the
// exact product is nearly between both.
template <int kFormat, int kDtype>
void CheckDecoding() {
  using Codes = WeightBits<kFormat, kDtype>;
  using E = Element<kDtype>;
  int wrong = 0, inexact = 0, total = 0;
  std::mt19937 rng(1);
  for (int i = 0; i < 300; ++i) {
    const int exponent = i < 241 ? i : 100 + i % 40;  // e2m1: all that files may have
    float scale = kFormat == kE2m1Weights
                      ? std::ldexp(1.0f, exponent - 127)
                      : std::ldexp(1 + static_cast<float>(rng() % 8192) / 8192.0f, -i % 17);
    if (kFormat == kE4m3Weights && i == 5) scale = 0;
    const u32 zero = kFormat == kInt4Weights ? rng() % 256 : 0;
    WeightFactors<kFormat, kDtype> factors;
    factors.Set(kFormat == kE2m1Weights ? static_cast<u32>(exponent) : __float_as_uint(scale),
                zero);
    for (u32 code = 0; code < (kFormat == kE4m3Weights ? 256 : 16); ++code) {
      if (kFormat == kE4m3Weights && (code & 0x7f) == 0x7f) continue;
      const u32 other = 5;
      for (int column = 0; column < 4; ++column) {
        u32 halves;
        if constexpr (kFormat == kE4m3Weights) {
          const u32 rest = ~(0xffu << 8 * column) & static_cast<u32>(rng());
          halves = ColumnOf(code << 8 * column | rest, other << 8 * column | rest, column);
        } else {
          const u32 rest = ~(0xffu << 8 * column) & static_cast<u32>(rng());
          halves = Codes::Column((code | other << 4) << 8 * column | rest, column);
        }
        const u32 pair = factors.Dequantize(halves);
        for (int half = 0; half < 2; ++half) {
          const u32 of = half == 0 ? code : other;
          const double value = ValueOf(kFormat, of);
          const double want = (value - zero) * static_cast<double>(scale);
          const u16 bits = static_cast<u16>(pair >> 16 * half);
          const double got = E::ToFloat(bits);
          ++total;
          const u16 nearest = static_cast<u16>(E::Pack(static_cast<float>(want), 0));
          if (E::ToFloat(nearest) == E::ToFloat(bits)) continue;
          ++inexact;
          // Half of a distance, plus the error of the product.
          wrong += !(std::abs(got - want) <= std::abs(want) * (0x1p-8 + 0x1p-14));
        }
      }
    }
  }
  if (wrong == 0 && inexact <= (kDtype == kElementBf16 ? total / 1000 : 0)) return;
  ++g_failures;
  std::printf("FAILED decoding of %s to type %d: of %d weights %d are wrong, %d not the nearest\n",
              Name(kFormat), kDtype, total, wrong, inexact);
}

template <int kFormat>
void RunFormat() {
  CheckDecoding<kFormat, kElementBf16>();
  CheckDecoding<kFormat, kElementF16>();
  constexpr bool kIsInt4 = kFormat == kInt4Weights;
  for (const bool is_exact : {true, false}) {
    // Fewer rows, columns and depth than a tile; whole tiles; partial tiles.
    RunCase<TraitsOf<kFormat, 8, 64, 1>>({1, 64, 16, 64, 1, kIsInt4, true, is_exact});
    RunCase<TraitsOf<kFormat, 8, 64, 1>>({8, 200, 80, 128, 2, kIsInt4, true, is_exact});
    RunCase<TraitsOf<kFormat, 16, 64, 1>>({9, 448, 96, 128, 3, kIsInt4, true, is_exact});
    RunCase<TraitsOf<kFormat, 8, 64, 1>>({5, 168, 64, 168, 1, false, false, is_exact});
    RunCase<TraitsOf<kFormat, 16, 96, 2>>({13, 712, 112, 32, 3, kIsInt4, false, is_exact});
    RunCase<TraitsOf<kFormat, 32, 64, 2>>({40, 136, 48, 32, 5, kIsInt4, true, is_exact});
    RunCase<TraitsOf<kFormat, 64, 64, 1, 80>>({65, 256, 128, 128, 2, kIsInt4, true, is_exact});
  }
  // The tiles on GPUs.
  RunCase<TraitsOf<kFormat, 64, 256, 1>>({64, 1024, 272, 128, 1, kIsInt4, false, true});
  RunCase<TraitsOf<kFormat, 8, 224, 2, 120>>({3, 1056, 448, 32, 2, kIsInt4, true, true});
}

}  // namespace
}  // namespace jax_attn

int main() {
  using namespace jax_attn;
  RunFormat<kInt4Weights>();
  RunFormat<kE2m1Weights>();
  RunFormat<kE4m3Weights>();
  if (g_failures == 0) std::printf("quantized_product_cuda_test: ok\n");
  return g_failures != 0;
}
