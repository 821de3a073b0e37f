// Keys and values as e5m2, int8, mxfp4, nvfp4 and int4 in the portable attention kernel, without a
// GPU: the bits of dequantized plain pages, and the CPU kernels' results.
#include "emulation/cuda_emulation.h"
// The header above stands in for CUDA and must come first.
#include "emulation/sm80_kernels.h"
#include "part.h"

namespace jax_attn {
namespace {

void Expect(bool ok, const char* what, unsigned at) {
  if (ok || ++g_failures > 20) return;
  std::printf("FAILED %s, %#x\n", what, at);
}

// Dequantizes a row.
std::vector<float> ValuesOf(int format, const char* row, i64 head_dim) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(row);
  std::vector<float> x(head_dim);
  float scale = 1;
  if (format == kInt8Format) std::memcpy(&scale, row + head_dim, 4);
  for (i64 d = 0; d < head_dim; ++d) {
    if (format == kE5m2Format) {
      x[d] = F16ToFloat(static_cast<u16>(bytes[d] << 8));
    } else if (format == kInt8Format) {
      x[d] = static_cast<float>(static_cast<signed char>(row[d])) * scale;
    } else {
      static const float kValues[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
      const i64 span = format == kMxfp4Format ? 32 : 64;
      const i64 begin = d / span * span, half = std::min<i64>(span, head_dim - begin) / 2;
      const u32 pair = bytes[begin / 2 + (d - begin) % half];
      const u32 code = (d - begin < half ? pair : pair >> 4) & 15;
      const float value = code & 8 ? -kValues[code & 7] : kValues[code];
      const unsigned char* scales = bytes + head_dim / 2;
      if (format == kMxfp4Format) {
        const u32 exponent = scales[d / 32];
        // append never writes exponent 0; it is 0 here.
        x[d] = exponent == 255 ? NAN
               : exponent == 0 ? value * 0
                               : std::ldexp(value, static_cast<int>(exponent) - 127);
      } else if (format == kNvfp4Format) {
        x[d] = value * E4m3ToFloat(scales[d / 16]);
      } else {
        const auto half_scale = static_cast<u16>(scales[d / 32 * 2] | scales[d / 32 * 2 + 1] << 8);
        x[d] = static_cast<float>(static_cast<int>(code ^ 8) - 8) * F16ToFloat(half_scale);
      }
    }
  }
  return x;
}

// --- conversions ---

// A row's elements as a kernel's warp dequantizes them.
template <int kFormat, int kElement, int kHeadDim>
struct Decoding {
  static constexpr int kKvFormat = kFormat, kDtype = kElement;
  using Layout = QuantizedRowLayout<kFormat, kHeadDim>;

  static void Test(const std::vector<char>& row, int position) {
    const std::vector<float> values = ValuesOf(kFormat, row.data(), kHeadDim);
    AttentionParams p = {};
    p.num_kv_heads = 3;
    const QuantizedRowOffsets<Layout> offsets(p, 1);
    emulation::machine.Launch(1, kWarpSize, 1, [&] {
      if (threadIdx.x == 0) std::memcpy(smem + offsets.At(position), row.data(), row.size());
      __syncwarp();
      DequantizeRows<Decoding, kHeadDim, 1>(smem, offsets, position, threadIdx.x, smem + 1024);
    });
    const u16* got = reinterpret_cast<const u16*>(smem + 1024);
    for (int d = 0; d < kHeadDim; ++d) {
      const u32 want = Element<kElement>::Pack(values[d], 0) & 0xffff;
      const u32 infinity = kElement == kElementBf16 ? 0x7f80 : 0x7c00;
      Expect(std::isnan(values[d]) ? (got[d] & 0x7fffu) > infinity : got[d] == want,
             "a decoded element", kFormat << 24 | (kElement << 20) | d);
    }
  }
};

// Every quantized value with both scales in turns.
template <int kFormat, int kElement, int kDim>
void TestNibbles(u32 scale, u32 other) {
  for (int first = 0; first < 256; first += kDim / 2) {
    std::vector<char> row(QuantizedRowBytes(kFormat, kDim));
    for (int i = 0; i < kDim / 2; ++i) row[i] = static_cast<char>((first + i) * 17);
    const i64 num = NumRowScales(kFormat, kDim), bytes = FormatOf(kFormat).scale_bytes;
    for (i64 i = 0; i < num; ++i) {
      const u32 bits = i % 2 == 0 ? scale : other;
      std::memcpy(&row[kDim / 2 + i * bytes], &bits, bytes);
    }
    Decoding<kFormat, kElement, kDim>::Test(row, static_cast<int>(scale % 7));
  }
}

template <int kElement>
void TestConversions() {
  constexpr int kDim = 128;
  for (int first = 0; first < 256; first += kDim) {
    std::vector<char> row(kDim);
    for (int i = 0; i < kDim; ++i) row[i] = static_cast<char>(first + i);
    Decoding<kE5m2Format, kElement, kDim>::Test(row, 1);
    row.resize(kDim + 4);
    for (float scale : {1.0f, 0.003f, 0x1p-126f, 1.7e36f, -0.0f, NAN}) {
      std::memcpy(&row[kDim], &scale, 4);
      Decoding<kInt8Format, kElement, kDim>::Test(row, first / 64 + 1);
    }
  }
  // Every pair of quantized values with every scale; blocks of 32 and 16; rows that begin at any
  // byte. CPU threads flush f32 below 2^-126 to zero.
  for (int scale = 0; scale < 256; ++scale) {
    if (scale == 1 || scale == 2) continue;
    for (int first = 0; first < 256; first += 64) {
      std::vector<char> row(64 + 4, static_cast<char>(scale));
      for (int i = 0; i < 64; ++i) row[i] = static_cast<char>(first + i);
      Decoding<kMxfp4Format, kElement, 128>::Test(row, 3);
    }
    std::vector<char> row(40 + 3, static_cast<char>(scale));
    for (int i = 0; i < 40; ++i) row[i] = static_cast<char>(scale + 6 * i);
    Decoding<kMxfp4Format, kElement, 80>::Test(row, scale % 16);
  }
  for (u32 scale = 0; scale < 256; ++scale) {
    TestNibbles<kNvfp4Format, kElement, 128>(scale, 0x7f - scale);
    TestNibbles<kNvfp4Format, kElement, 80>(scale, 0x35);
  }
  // Every 64th scale and its neighbour, and all subnormals, infinities and NaNs.
  for (u32 scale = 0; scale < 1u << 16; ++scale) {
    if (scale % 64 > 1 && (scale & 0x7c00) != 0 && (scale & 0x7fff) != 0x7c00) continue;
    TestNibbles<kInt4Format, kElement, 128>(scale, scale * 5);
    TestNibbles<kInt4Format, kElement, 80>(scale, 0x3c01);
  }
}

// Every bf16 number, and the f32 numbers next to a tie, against a search.
void TestToE5m2() {
  std::vector<float> values(124);
  for (u32 code = 0; code < values.size(); ++code)
    values[code] = F16ToFloat(static_cast<u16>(code << 8));
  for (u32 bits = 0; bits < 1u << 16; ++bits) {
    for (u32 low : {0u, 1u, 0xffffu}) {
      const float x = __uint_as_float(bits << 16 | low),
                  size = std::min(std::abs(x), values.back());
      const u32 got = ToFloat8<kE5m2Format>(x);
      u32 want = 0;
      for (u32 code = 1; code < values.size() && !std::isnan(x); ++code) {
        const float above = std::abs(values[code] - size), below = std::abs(values[want] - size);
        if (above < below || (above == below && code % 2 == 0)) want = code;
      }
      if (std::signbit(x)) want |= 0x80;
      Expect(std::isnan(x) ? (got & 0x7f) == 0x7f : got == want, "ToFloat8, e5m2",
             bits << 16 | low);
    }
  }
}

// --- attention ---

// RunCase, and the same bits as dequantized plain pages on the same plan.
template <class Kernel, class Shape, int kFormat>
void RunCodesInPart(const Case& c, unsigned seed) {
  using Traits = typename Kernel::template Traits<CodesOf<Shape, kFormat>>;
  using PlainTraits = typename Kernel::template Traits<Shape>;
  RunCase<Kernel, CodesOf<Shape, kFormat>>(c, seed);
  std::mt19937 random(seed);
  AttentionProblem problem = MakeProblem<Traits>(c);
  Batch b = MakeBatch<Traits>(c, problem.spec, random);
  b.k_scale.clear();
  b.v_scale.clear();
  const std::vector<int32_t> plan = MakePlan(c, problem, b);
  if (plan.empty()) return;
  const Outputs got = RunOnPlan<AttentionBody<Traits>>(c, problem, b, plan);
  const i64 rows = b.num_pages * problem.spec.page_size * problem.spec.num_kv_heads;
  const auto decode = [&](const std::vector<uint16_t>& codes, i64 head_dim) {
    std::vector<uint16_t> plain(rows * head_dim);
    for (i64 i = 0; i < rows; ++i) {
      const std::vector<float> x = ValuesOf(
          kFormat,
          reinterpret_cast<const char*>(codes.data()) + i * QuantizedRowBytes(kFormat, head_dim),
          head_dim);
      for (i64 d = 0; d < head_dim; ++d) {
        plain[i * head_dim + d] = static_cast<uint16_t>(FloatToBf16(x[d]));
      }
    }
    return plain;
  };
  Batch decoded = b;
  decoded.k = decode(b.k, Shape::kHeadDimQk);
  decoded.v = decode(b.v, Shape::kHeadDimVo);
  if (!SameBits(got, RunOnPlan<AttentionBody<PlainTraits>>(c, problem, decoded, plan))) {
    std::printf("FAILED %s: not the bits of plain pages\n", c.name);
    ++g_failures;
  }
}

template <class Kernel, class Shape, int kFormat>
void RunCodes(const Case& c, unsigned seed) {
  g_part.has_asked = true;
  if constexpr (InPart<Kernel, Shape, std::integral_constant<int, kFormat>>()) {
    if (TakesCase<Kernel, Shape, std::integral_constant<int, kFormat>>())
      RunCodesInPart<Kernel, Shape, kFormat>(c, seed);
  }
}

template <int kFormat>
void RunFormat(std::string format) {
  const auto run = [&](auto shape, Case c, const char* name, unsigned seed) {
    const std::string full = format + ", " + name;
    c.name = full.c_str();
    RunCodes<Sm80Kernel, decltype(shape), kFormat>(c, seed);
  };
  const std::vector<Request> decode = {{1, 130}, {1, 1}, {0, 9}, {1, 0}, {1, 65}, {2, 300}};
  const std::vector<Request> mixed = {{45, 70}, {3, 5}, {1, 200}, {5, 2}};
  run(ShapeOf<128, 128, 4, 16, false, true, false>(),
      {.requests = decode, .sinks = true, .kv_split = 64}, "decode", 1);
  run(ShapeOf<64, 64, 4, 16, false, true, false>(), {.requests = mixed, .kv_heads = 3},
      "mixed, three heads", 2);
  // Rows of 84, 52, 43, 26 and other bytes, blocks of 16; pages shorter than a warp's slice.
  run(ShapeOf<80, 48, 5, 8, true, true, true>(),
      {.requests = mixed, .window_left = 30, .soft_cap = 3.0, .sinks = true, .kv_split = 64},
      "window, soft cap, odd sizes", 3);
  run(ShapeOf<48, 48, 5, 16, true, true, false>(),
      {.requests = mixed, .window_left = 50, .nan_values = true}, "NaN values", 4);
  if (kFormat != kE5m2Format) {  // it makes infinity the largest number
    run(ShapeOf<64, 64, 4, 16, false, true, false>(),
        {.requests = mixed, .infinite_values = true, .kv_split = 64}, "infinite values", 7);
  }
  run(ShapeOf<192, 128, 2, 4, false, true, false>(),
      {.requests = {{100, 300}, {64, 70}}, .kv_heads = 4}, "long chunk, pages of 4", 5);
  run(ShapeOf<256, 256, 3, 64, false, true, false>(),
      {.requests = {{1, 300}, {50, 130}}, .num_ctas = 2}, "head_dim 256", 6);
  run(ShapeOf<128, 64, 2, 1, false, true, false>(),
      {.requests = {{1, 300}, {50, 130}}, .kv_heads = 16}, "pages of 1", 8);
  const std::string shared = format + ", shared prefixes, fixed split";
  RunCodes<OneHeightKernel, ShapeOf<64, 64, 4, 16, false, true, false>, kFormat>(
      {.name = shared.c_str(),
       .requests = kForest,
       .kv_split = 64,
       .prefix = 256,
       .half_prefix = 64},
      10);
}

}  // namespace
}  // namespace jax_attn

int main() {
  using namespace jax_attn;
  TestConversions<kElementBf16>();
  TestConversions<kElementF16>();
  TestToE5m2();
  RunFormat<kE5m2Format>("e5m2");
  RunFormat<kInt8Format>("int8");
  RunFormat<kMxfp4Format>("mxfp4");
  RunFormat<kNvfp4Format>("nvfp4");
  RunFormat<kInt4Format>("int4");
  if (g_failures == 0) std::printf("formats_cuda_test: ok\n");
  return g_failures > 0;
}
