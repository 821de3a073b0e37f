#include "select/linear.h"

#include <algorithm>

#include "select/select.h"

namespace jax_attn {
namespace {

// The recurrence's columns of one CTA. Eight warps have the states of 64 x 64 elements; a wider
// tile shares the preparation of q and k among more columns.
constexpr int64_t kMostTileColumns = 128, kFewestTileColumns = 32;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

LinearLoop SelectLinearLoop(const LinearAttentionProblem& problem) { return kRecurrence; }

LinearAttentionKernel SelectLinearAttention(const LinearAttentionProblem& problem) {
  LinearAttentionKernel kernel = problem.kernel;
  kernel.main_loop = SelectLinearLoop(problem);
  kernel.tile_columns = kMostTileColumns;
  return kernel;
}

LinearAttentionLaunch SizeLinearAttention(const LinearAttentionProblem& problem) {
  const LinearAttentionKernel kernel = SelectLinearAttention(problem);
  LinearAttentionLaunch launch;
  // A CTA for each chunk, which leaves at once unless its chunk begins a request. CTAs behind the
  // plan's chunks zero rows behind its tokens.
  launch.num_ctas = std::max<int64_t>(problem.max_chunks, 1) * problem.num_v_heads *
                    CeilDiv(problem.kernel.head_dim_v, kernel.tile_columns);
  return launch;
}

}  // namespace jax_attn
