// The chunked loops of linear attention: when they serve, and the sizes of their launches.
#pragma once

#include "select/linear.h"

namespace jax_attn {

// Whether a chunked loop serves a call.
bool HasLinearChunks(const LinearAttentionProblem& problem);

// Columns of v of one CTA.
int64_t ChunkTileColumns(const LinearAttentionProblem& problem);

// kernel: chosen, but for its phase.
LinearAttentionLaunch SizeLinearChunks(const LinearAttentionProblem& problem,
                                       const LinearAttentionKernel& kernel);

// The first kernel of gradients, for a call that a chunked loop serves.
LinearAttentionKernel SelectLinearGradient(const LinearAttentionProblem& problem);

// CTAs of the launch of kernel.phase. num_processors: of the device.
int64_t LinearChunkCtas(const LinearAttentionProblem& problem, const LinearAttentionKernel& kernel,
                        int64_t num_processors);

}  // namespace jax_attn
