#include "select/linear.h"

#include <algorithm>
#include <string>

#include "select/linear_chunks.h"
#include "select/select.h"

namespace jax_attn {
namespace {

constexpr int64_t kMostLinearHeadDim = 256;
// The recurrence's columns of one CTA, which has four warps for states of 128 rows. All columns
// share what is computed from q and k; with fewer of them more CTAs wait for memory independently.
constexpr int64_t kTileColumns = 64;
// A decode or drafts: up to so many tokens a request.
constexpr int64_t kFewTokens = 8;

}  // namespace

int64_t Processors(const LinearAttentionProblem& problem) {
  if (problem.num_processors > 0) return problem.num_processors;
  return DefaultProcessors(problem.kernel.arch > 0 ? problem.kernel.arch : 90);
}

Status ReadLinearProblem(const int64_t* words, int64_t num_words, LinearAttentionProblem* problem) {
  const auto refuse = [](const char* what, const std::string& expected, int64_t got) {
    return Status::Error(std::string("linear_attention: ") + what + ": expected " + expected +
                         ", got " + std::to_string(got) + ".");
  };
  if (num_words != kLinearProblemWords) {
    return refuse("attribute problem", std::to_string(kLinearProblemWords) + " words", num_words);
  }
  LinearAttentionProblem& p = *problem;
  LinearAttentionKernel& k = p.kernel;
  int64_t flags[3];
  int64_t* const fields[kLinearProblemWords] = {
      &k.arch,       &p.num_processors, &k.dtype,      &p.num_qk_heads, &p.num_v_heads,
      &k.head_dim_k, &k.head_dim_v,     &k.decay,      &flags[0],       &flags[1],
      &flags[2],     &p.max_tokens,     &p.max_qo_len, &p.max_chunks};
  for (int64_t i = 0; i < kLinearProblemWords; ++i) {
    if (words[i] < 0 || words[i] >= int64_t{1} << 31) {
      return refuse("attribute problem", "words of 0 to 2^31 - 1", words[i]);
    }
    *fields[i] = words[i];
  }
  k.delta_rule = flags[0] != 0;
  k.l2_norm = flags[1] != 0;
  k.bf16_states = flags[2] != 0;
  if (k.dtype > kF32) return refuse("dtype", "0 to 2", k.dtype);
  if (k.decay > kChannelDecay) return refuse("decay", "0 to 2", k.decay);
  for (const int64_t dim : {k.head_dim_k, k.head_dim_v}) {
    if (dim < 8 || dim > kMostLinearHeadDim || dim % 8 != 0) {
      return refuse("head_dim", "multiples of 8 up to 256", dim);
    }
  }
  if (p.num_qk_heads < 1 || p.num_v_heads < 1 || p.num_v_heads % p.num_qk_heads != 0) {
    return refuse("v", "a multiple of q's " + std::to_string(p.num_qk_heads) + " heads",
                  p.num_v_heads);
  }
  return Status::Ok();
}

LinearLoop SelectLinearLoop(const LinearAttentionProblem& problem) {
  if (!HasLinearChunks(problem)) return kRecurrence;
  return problem.kernel.arch == 90 ? kHopperChunks : kPortableChunks;
}

LinearAttentionKernel SelectLinearAttention(const LinearAttentionProblem& problem) {
  LinearAttentionKernel kernel = problem.kernel;
  kernel.main_loop = SelectLinearLoop(problem);
  kernel.tile_columns = kernel.main_loop != kRecurrence ? ChunkTileColumns(problem) : kTileColumns;
  return kernel;
}

std::vector<LinearAttentionKernel> LinearAttentionKernels(const LinearAttentionProblem& problem) {
  std::vector<LinearAttentionKernel> kernels = {SelectLinearAttention(problem)};
  if (kernels[0].main_loop == kRecurrence) return kernels;
  const bool has_segments = SizeLinearChunks(problem, kernels[0]).segment_chunks > 0;
  for (const LinearPhase phase : {kLinearMaps, kLinearStarts, kLinearOutputs}) {
    if (phase != kLinearOutputs && !has_segments) continue;
    kernels.push_back(kernels[0]);
    kernels.back().phase = phase;
  }
  return kernels;
}

LinearAttentionLaunch SizeLinearAttention(const LinearAttentionProblem& problem) {
  const LinearAttentionKernel kernel = SelectLinearAttention(problem);
  if (kernel.main_loop != kRecurrence) return SizeLinearChunks(problem, kernel);
  LinearAttentionLaunch launch;
  // The CTA of a chunk that begins no request, or is behind the plan's, leaves at once.
  launch.num_ctas = std::max<int64_t>(problem.max_chunks, 1) * problem.num_v_heads *
                    CeilDiv(problem.kernel.head_dim_v, kernel.tile_columns);
  if (problem.max_qo_len <= kFewTokens) {
    // Units take about the same time. Half of a decode's chunks are spare, and CTAs for them would
    // be a fifth of its time (64 requests, 32 heads of 128 x 128, predicted).
    const RecurrenceTile tile = RecurrenceTileOf(kernel.head_dim_k, kernel.head_dim_v,
                                                 kernel.bf16_states, kernel.tile_columns);
    const int64_t resident = std::max(1, kRecurrenceResidentThreads / tile.num_threads());
    launch.num_ctas = std::min(launch.num_ctas, resident * Processors(problem));
  }
  return launch;
}

std::vector<LinearAttentionKernel> LinearGradientKernels(const LinearAttentionProblem& problem) {
  std::vector<LinearAttentionKernel> kernels;
  const int64_t arch = problem.kernel.arch;
  // kLinearGradients needs 130 KB of shared memory, or 155 with a decay a channel.
  const bool has_room = arch == 80 || arch == 87 || (arch >= 90 && arch < 120);
  if (!has_room || !HasLinearChunks(problem)) return kernels;
  // Gradients of states are operands, too, and are as large as the loss is scaled: no f16.
  if (problem.kernel.dtype != kBF16) return kernels;
  for (const LinearPhase phase :
       {kLinearGradientTerms, kLinearStates, kLinearStateGradients, kLinearGradients}) {
    kernels.push_back(SelectLinearGradient(problem));
    kernels.back().phase = phase;
  }
  return kernels;
}

LinearAttentionLaunch SizeLinearGradient(const LinearAttentionProblem& problem) {
  const LinearAttentionKernel kernel = SelectLinearGradient(problem);
  const int64_t dim_k = RoundUp(kernel.head_dim_k, 64);
  const int64_t dim_v = RoundUp(kernel.head_dim_v, kernel.tile_columns);
  const int64_t bytes =
      kernel.decay == kChannelDecay
          ? LinearChannelGradientWorkspace(kernel.arch, problem.max_chunks, problem.max_tokens,
                                           problem.num_qk_heads, problem.num_v_heads, dim_k, dim_v,
                                           kernel.head_dim_k, kernel.head_dim_v)
                .size
          : LinearGradientWorkspace(problem.max_chunks, problem.max_tokens, problem.num_v_heads,
                                    dim_k, dim_v, kernel.head_dim_v)
                .size;
  LinearAttentionLaunch launch;
  launch.workspace_words = bytes / 4;
  return launch;
}

}  // namespace jax_attn
