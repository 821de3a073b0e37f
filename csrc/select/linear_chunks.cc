#include "select/linear_chunks.h"

#include <algorithm>
#include <cmath>

namespace jax_attn {
namespace {

// Shorter requests are recurrences: a chunk of few tokens costs as much as a whole one.
constexpr int64_t kFewestChunkTokens = 17;
// S^T of more rows of k does not fit the registers.
constexpr int64_t kMostDimK = 128;
// Of the device on which most will run, where the target does not say it.
constexpr int64_t kUsualProcessors = 132;
// Times, predicted, of a chunk in kLinearMaps and kLinearOutputs together over that of a map in
// kLinearStarts.
constexpr double kChunkOverMap = 3.5;
// Columns of v of an item of kLinearStarts.
constexpr int64_t kStartColumns = 16;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t RoundUp(int64_t x, int64_t to) { return CeilDiv(x, to) * to; }

// CTAs that a segment keeps busy.
int64_t ItemsOfSegment(const LinearAttentionProblem& problem, const LinearAttentionKernel& kernel) {
  return problem.num_v_heads * CeilDiv(kernel.head_dim_v, kernel.tile_columns);
}

// Chunks of a segment; 0: requests are not split. The capacities alone decide, so a request has the
// same bits in every batch.
int64_t SegmentChunks(const LinearAttentionProblem& problem, const LinearAttentionKernel& kernel) {
  const int64_t processors = problem.num_processors > 0 ? problem.num_processors : kUsualProcessors;
  const int64_t chunks = CeilDiv(problem.max_tokens, kLinearTokens);
  // n segments take chunks / n chunks in two launches, and n - 1 maps in one.
  const int64_t cheapest = std::llround(std::sqrt(kChunkOverMap * static_cast<double>(chunks)));
  const int64_t segments = std::min(processors / ItemsOfSegment(problem, kernel), cheapest);
  const int64_t length = segments <= 1 ? 0 : CeilDiv(chunks, segments);
  return problem.max_qo_len <= length * kLinearTokens ? 0 : length;
}

// CTAs of kLinearTerms for a chunk: one for each q and k head, or where these do not fill the
// device one for each v head.
int64_t PartsOfChunk(const LinearAttentionProblem& problem, int64_t num_processors) {
  const int64_t chunks = CeilDiv(problem.max_tokens, kLinearTokens);
  constexpr int64_t kCtasOfProcessor = 3;
  return chunks * problem.num_qk_heads < kCtasOfProcessor * num_processors ? problem.num_v_heads
                                                                           : problem.num_qk_heads;
}

}  // namespace

bool HasLinearChunks(const LinearAttentionProblem& problem) {
  const LinearAttentionKernel& kernel = problem.kernel;
  return kernel.arch >= 80 && kernel.dtype == kBF16 && kernel.decay != kChannelDecay &&
         kernel.head_dim_k <= kMostDimK && problem.max_qo_len >= kFewestChunkTokens;
}

int64_t ChunkTileColumns(const LinearAttentionKernel& kernel) {
  return kernel.head_dim_v > 64 ? 128 : 64;  // wgmma has 64 of them
}

LinearAttentionLaunch SizeLinearChunks(const LinearAttentionProblem& problem,
                                       const LinearAttentionKernel& kernel) {
  LinearAttentionLaunch launch;
  launch.segment_chunks = SegmentChunks(problem, kernel);
  launch.num_zero_words = 1;
  const LinearWorkspace workspace(
      problem.max_chunks, problem.num_v_heads, RoundUp(kernel.head_dim_k, 64),
      RoundUp(kernel.head_dim_v, kernel.tile_columns), launch.segment_chunks);
  launch.workspace_words = workspace.size / 4;
  return launch;
}

int64_t LinearChunkCtas(const LinearAttentionProblem& problem, const LinearAttentionKernel& kernel,
                        int64_t num_processors) {
  const int64_t chunks = std::max<int64_t>(problem.max_chunks, 1);
  if (kernel.phase == kLinearTerms) return chunks * PartsOfChunk(problem, num_processors);
  // One CTA on each multiprocessor takes items in turn.
  int64_t items = chunks * ItemsOfSegment(problem, kernel);
  if (kernel.phase == kLinearStarts) items *= kernel.tile_columns / kStartColumns;
  return std::min(num_processors, items);
}

}  // namespace jax_attn
