#include "cpu/short_convolution.h"

#include <algorithm>

#include "cpu/simd/simd_types.h"

namespace jax_attn {
namespace {

constexpr i64 kTasksPerThread = 4;
// Outputs that are not worth waking a thread for.
constexpr i64 kAloneOutputs = 64 << 10;

}  // namespace

void ShortConvolutionCpu(int64_t dtype, const ConvolutionParams& p, TaskPool& pool) {
  i64 tokens = 0;
  for (i64 i = 0; i < p.num_chunks; ++i) tokens += p.chunks[i].length + 1;
  const i64 share = CeilDiv(p.num_channels, kTasksPerThread * pool.num_threads());
  const i64 channels = std::min(kTaskChannels, RoundUp(share, 64));
  InlinePool alone;
  ParallelFor(tokens * p.num_channels < kAloneOutputs ? alone : pool,
              CeilDiv(p.num_channels, channels), [&](int64_t i) {
                const i64 begin = i * channels, end = std::min(begin + channels, p.num_channels);
                ActiveLinearKernels().convolve[dtype](p, begin, end);
              });
}

}  // namespace jax_attn
