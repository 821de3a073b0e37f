// MLA kernels over quantized latent rows: the CPU kernels' results, and the bits of dequantized
// plain pages. Include an emulation first.
#pragma once

#include "cuda/attention_cuda_cases.h"
#include "part.h"

namespace jax_attn {
namespace {

// The quantized values' numbers in bf16, which represents them exactly.
std::vector<uint16_t> ValuesOfCodes(int64_t format) {
  std::vector<uint16_t> values(256);
  for (u32 code = 0; code < 256; ++code) {
    const u32 f16 =
        format == kE4m3Format ? E4m3ToF16x2(static_cast<u16>(code)) & 0xffff : code << 8;
    values[code] = static_cast<uint16_t>(FloatToBf16(F16ToFloat(static_cast<u16>(f16))));
  }
  return values;
}

// RunCase, and without scales the bits of plain pages on the same plan.
template <class Kernel, class Shape, int kFormat>
void RunCodesInPart(Case c, unsigned seed) {
  using Coded = CodesOf<Shape, kFormat>;
  const std::string name = std::string(FormatOf(kFormat).name) + ", " + c.name;
  c.name = name.c_str();
  RunCase<Kernel, Coded>(c, seed);
  std::mt19937 random(seed);
  const AttentionProblem problem = MakeProblem<typename Kernel::template Traits<Coded>>(c);
  Batch b = MakeBatch<typename Kernel::template Traits<Coded>>(c, problem.spec, random);
  b.k_scale.clear();
  b.v_scale.clear();
  const std::vector<int32_t> plan = MakePlan(c, problem, b);
  if (plan.empty()) return;
  const std::vector<uint16_t> values = ValuesOfCodes(kFormat);
  Batch decoded = b;
  const auto* codes = reinterpret_cast<const unsigned char*>(b.k.data());
  decoded.k.resize(2 * b.k.size());
  for (size_t i = 0; i < decoded.k.size(); ++i) decoded.k[i] = values[codes[i]];
  const Outputs got = RunOnPlan<typename Kernel::template Body<Coded>>(c, problem, b, plan);
  if (!SameBits(got, RunOnPlan<typename Kernel::template Body<Shape>>(c, problem, decoded, plan))) {
    std::printf("FAILED %s: not the bits of plain pages\n", c.name);
    ++g_failures;
  }
}

template <class Kernel, class Shape, int kFormat>
void RunCodes(Case c, unsigned seed) {
  g_part.has_asked = true;
  if constexpr (InPart<Kernel, Shape, std::integral_constant<int, kFormat>>()) {
    if (TakesCase<Kernel, Shape, std::integral_constant<int, kFormat>>())
      RunCodesInPart<Kernel, Shape, kFormat>(c, seed);
  }
}

// Cases with 5 heads, for every main loop.
const Case kCodesOfFewHeads = {
    .name = "5 heads, NaN, sinks",
    .requests = {{1, 130}, {1, 1}, {0, 9}, {1, 0}, {2, 200}, {9, 40}},
    .sinks = true,
    .nan_values = true,
    .kv_heads = 1,
    .qo_heads = 5,
};
const Case kCodesOfPrefixes = {
    .name = "5 heads, shared prefixes",
    .requests = {{1, 300}, {1, 290}, {2, 330}, {1, 257}, {1, 400}, {1, 310}},
    .num_ctas = 2,
    .kv_heads = 1,
    .qo_heads = 5,
    .prefix = 256,
};

}  // namespace
}  // namespace jax_attn
