// The portable attention kernel of csrc/cuda, without a GPU.
#include "emulation/cuda_emulation.h"
// The header above stands in for CUDA and must come first.
#include "emulation/sm80_kernels.h"

namespace jax_attn {
namespace {

void RunFixedSplit() {
  RunCase<OneHeightKernel, ShapeOf<64, 64, 4, 16, false, true, false>>(
      {.name = "shared prefixes, fixed split",
       .requests = kForest,
       .kv_split = 64,
       .prefix = 256,
       .half_prefix = 64},
      11);
}

// --- e4m3 ---

void Expect(bool ok, const char* what, unsigned at) {
  if (ok) return;
  std::printf("FAILED %s, %#x\n", what, at);
  ++g_failures;
}

template <int kElement, int kTarget>
struct Conversion {
  static constexpr int kDtype = kElement, kArch = kTarget;
};

// Every e4m3 value, at every position of a word, beside every kind of value.
template <class Traits>
void TestUnpack() {
  const auto same = [](u32 pair, u32 first, u32 second) {
    const auto value = [](u32 bits) {
      return Traits::kDtype == kElementF16 ? F16ToFloat(static_cast<u16>(bits))
                                           : Bf16ToFloat(bits & 0xffff);
    };
    const auto equal = [](float got, float want) {
      return std::isnan(want) ? std::isnan(got)
                              : got == want && std::signbit(got) == std::signbit(want);
    };
    return equal(value(pair), E4m3ToFloat(first)) && equal(value(pair >> 16), E4m3ToFloat(second));
  };
  for (u32 code = 0; code < 256; ++code) {
    for (u32 other : {0x00u, 0x01u, 0x80u, 0x7eu, 0x7fu, 0xffu}) {
      for (int place = 0; place < 4; ++place) {
        u32 codes[4] = {other, other, other, other};
        codes[place] = code;
        const u32 word = codes[0] | codes[1] << 8 | codes[2] << 16 | codes[3] << 24;
        u32 low, high;
        UnpackE4m3<Traits>(word, low, high);
        Expect(same(low, codes[0], codes[1]) && same(high, codes[2], codes[3]), "UnpackE4m3", word);
        UnpackE4m3Alternate<Traits>(word, low, high);
        Expect(same(low, codes[0], codes[2]) && same(high, codes[1], codes[3]),
               "UnpackE4m3Alternate", word);
        bool any_nan = false;
        for (u32 c : codes) any_nan |= std::isnan(E4m3ToFloat(c));
        Expect((E4m3NanBits(word) != 0) == any_nan, "E4m3NanBits", word);
      }
    }
  }
}

// Every bf16 number, and the f32 numbers next to a tie.
void TestToE4m3() {
  for (u32 bits = 0; bits < 1u << 16; ++bits) {
    for (u32 low : {0u, 1u, 0xffffu}) {
      const float x = __uint_as_float(bits << 16 | low);
      const u32 got = ToFloat8<kE4m3Format>(x), want = FloatToE4m3(x);
      Expect(std::isnan(x) ? (got & 0x7f) == 0x7f : got == want, "ToFloat8, e4m3",
             bits << 16 | low);
    }
  }
}

template <int kDimQk, int kDimVo, int kGroup, int kPage, bool kLeft, bool kCap, bool kQ = false>
using E4m3Shape = E4m3Of<ShapeOf<kDimQk, kDimVo, kGroup, kPage, kLeft, true, kCap>, kQ>;

void RunE4m3Cases() {
  TestUnpack<Conversion<kElementBf16, 80>>();
  TestUnpack<Conversion<kElementF16, 80>>();
  TestUnpack<Conversion<kElementBf16, 90>>();
  TestUnpack<Conversion<kElementF16, 90>>();
  TestToE4m3();
  const std::vector<Request> decode = {{1, 130}, {1, 1}, {0, 9}, {1, 0}, {1, 65}, {2, 300}};
  const std::vector<Request> mixed = {{45, 70}, {3, 5}, {1, 200}, {5, 2}};
  RunCase<Sm80Kernel, E4m3Shape<128, 128, 4, 16, false, false>>(
      {.name = "e4m3, decode", .requests = decode, .sinks = true, .kv_split = 64}, 1);
  RunCase<Sm80Kernel, E4m3Shape<64, 64, 4, 16, false, false, true>>(
      {.name = "e4m3, q too, mixed", .requests = mixed}, 2);
  RunCase<Sm80Kernel, E4m3Shape<48, 80, 5, 5, true, true, true>>(
      {.name = "e4m3, window, soft cap, odd sizes",
       .requests = mixed,
       .window_left = 30,
       .soft_cap = 3.0,
       .sinks = true,
       .kv_split = 64},
      3);
  RunCase<Sm80Kernel, E4m3Shape<48, 48, 5, 5, true, false>>(
      {.name = "e4m3, NaN values", .requests = mixed, .window_left = 50, .nan_values = true}, 4);
  RunCase<Sm80Kernel, E4m3Shape<192, 128, 2, 0, false, false>>(
      {.name = "e4m3, long chunk, ragged", .requests = {{100, 300}, {64, 70}}, .kv_heads = 1}, 5);
  RunCase<Sm80Kernel, E4m3Shape<256, 256, 3, 1, false, false>>(
      {.name = "e4m3, head_dim 256, page 1", .requests = {{1, 300}, {50, 130}}, .num_ctas = 2}, 6);
  RunFarCase<Sm80Kernel, E4m3Shape<128, 128, 4, 16, false, false>>(
      {.name = "e4m3, far logits", .requests = decode}, 8);
  RunCase<OneHeightKernel, E4m3Shape<64, 64, 4, 16, false, false>>(
      {.name = "e4m3, shared prefixes, fixed split",
       .requests = kForest,
       .kv_split = 64,
       .prefix = 256,
       .half_prefix = 64},
      7);
}

}  // namespace
}  // namespace jax_attn

int main() {
  jax_attn::RunE4m3Cases();
  jax_attn::RunFixedSplit();
  return jax_attn::RunAllCases<jax_attn::Sm80Kernel>();
}
