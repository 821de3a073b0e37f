// Chooses the kernel of linear attention on devices, and the size of its launch.
#pragma once

#include <cstdint>
#include <vector>

#include "jit/kernel_source.h"
#include "status.h"

namespace jax_attn {

// What selects a kernel, and the capacities of a call.
struct LinearAttentionProblem {
  // tile_columns, main_loop and phase are chosen; the caller sets the others.
  LinearAttentionKernel kernel;
  int64_t num_processors = 0;  // multiprocessors of the target; 0: those of the most common part
  int64_t num_qk_heads = 0, num_v_heads = 0;
  int64_t max_tokens = 0;  // of the call
  int64_t max_qo_len = 0;  // most tokens of a request
  int64_t max_chunks = 0;  // rows of the plan's chunks
};

// Multiprocessors of the device; where the target does not say them, those of the most common part.
int64_t Processors(const LinearAttentionProblem& problem);

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t RoundUp(int64_t x, int64_t to) { return CeilDiv(x, to) * to; }

// Words of a problem, in the order of the attribute "problem" of calls (jax_attn/_xla/ffi.py).
inline constexpr int64_t kLinearProblemWords = 14;

// Decodes and checks them.
Status ReadLinearProblem(const int64_t* words, int64_t num_words, LinearAttentionProblem* problem);

// The loop for a call: the recurrence for a few tokens a request, else chunks where there is a
// kernel for them.
LinearLoop SelectLinearLoop(const LinearAttentionProblem& problem);

// The kernel of a call, the first one of a chunked loop.
LinearAttentionKernel SelectLinearAttention(const LinearAttentionProblem& problem);
// All kernels of a call in the order of their launches.
std::vector<LinearAttentionKernel> LinearAttentionKernels(const LinearAttentionProblem& problem);

struct LinearAttentionLaunch {
  int64_t num_ctas = 0;        // of the recurrence; for others see LinearChunkCtas
  int64_t segment_chunks = 0;  // see LinearAttentionParams
  int64_t workspace_words = 0;
};
LinearAttentionLaunch SizeLinearAttention(const LinearAttentionProblem& problem);

// The kernels of the gradients of a call in the order of their launches. None: they are jax.numpy
// code.
std::vector<LinearAttentionKernel> LinearGradientKernels(const LinearAttentionProblem& problem);
// Where there are some.
LinearAttentionLaunch SizeLinearGradient(const LinearAttentionProblem& problem);

}  // namespace jax_attn
