#include "select/linear_chunks.h"

#include <algorithm>
#include <cmath>

namespace jax_attn {
namespace {

// Shorter requests are recurrences: a chunk of few tokens costs as much as a whole one.
constexpr int64_t kFewestChunkTokens = 17;
// S^T of more rows of k does not fit the registers.
constexpr int64_t kMostDimK = 128;
// Times of a chunk in kLinearMaps and kLinearOutputs together over that of a map in kLinearStarts:
// 5.1 us over 2.2 on an H200 with decays so slow that all maps count, before the latter was made
// faster.
constexpr double kChunkOverMap = 3.5;
// With half as many columns a chunk takes 0.8 of the time, but half as many segments fill the
// device. Measured on an H200, 8 heads: 43 us instead of 50 for 2,048 tokens, where they are 0.75
// of the cheapest number; 77 instead of 84 for 8,192 (0.38). 32 heads and 8,192 tokens would have
// 0.1 of it.
constexpr double kLeastNarrowSegments = 0.33;
// Columns of v of a CTA; wgmma has 64 of them.
constexpr int64_t kNarrowColumns = 64, kWideColumns = 128;
// Columns of v of an item of kLinearStarts.
constexpr int64_t kStartColumns = 16;

// CTAs that a segment keeps busy.
int64_t ItemsOfSegment(const LinearAttentionProblem& problem, int64_t tile_columns) {
  return problem.num_v_heads * CeilDiv(problem.kernel.head_dim_v, tile_columns);
}

int64_t ChunksOf(const LinearAttentionProblem& problem) {
  return CeilDiv(problem.max_tokens, kLinearTokens);
}

// n segments take chunks / n chunks in two launches, and n - 1 maps in one.
double CheapestSegments(const LinearAttentionProblem& problem) {
  return std::sqrt(kChunkOverMap * static_cast<double>(ChunksOf(problem)));
}

// Chunks of a segment; 0: requests are not split. The capacities alone decide, so a request has the
// same bits in every batch.
int64_t SegmentChunks(const LinearAttentionProblem& problem, const LinearAttentionKernel& kernel) {
  if (kernel.decay == kChannelDecay) return 0;  // there are no maps for it
  const int64_t segments =
      std::min<int64_t>(Processors(problem) / ItemsOfSegment(problem, kernel.tile_columns),
                        std::llround(CheapestSegments(problem)));
  const int64_t length = segments <= 1 ? 0 : CeilDiv(ChunksOf(problem), segments);
  return problem.max_qo_len <= length * kLinearTokens ? 0 : length;
}

// CTAs of kLinearTerms for a chunk: one for each q and k head, or where these do not fill the
// device one for each v head.
int64_t PartsOfChunk(const LinearAttentionProblem& problem, int64_t num_processors) {
  constexpr int64_t kCtasOfProcessor = 3;
  return ChunksOf(problem) * problem.num_qk_heads < kCtasOfProcessor * num_processors
             ? problem.num_v_heads
             : problem.num_qk_heads;
}

// v heads of a CTA of kLinearTerms with a decay a channel, which first finds out whether a chunk of
// 64 tokens begins with its chunk of 16.
int64_t ChannelHeads(const LinearAttentionProblem& problem) {
  return problem.num_v_heads % 4 == 0 ? 4 : problem.num_v_heads % 2 == 0 ? 2 : 1;
}

// Chunks of the plan that a CTA of kLinearGradients has. With a decay a channel most plans have
// chunks of kChannelTokens, of which so many are computed together; those of sequences without a
// plan have kLinearTokens.
int64_t ChunksTogether(const LinearAttentionProblem& problem) {
  const bool has_small_chunks = problem.kernel.decay == kChannelDecay &&
                                problem.max_chunks * 2 * kChannelTokens > problem.max_tokens;
  return has_small_chunks ? kLinearTokens / kChannelTokens : 1;
}

// Columns of v of one CTA where requests are not split, so that the longest is a chain of chunks.
// Half as many columns make a chunk shorter where twice as many CTAs still are on the device at
// once.
int64_t ChainTileColumns(const LinearAttentionProblem& problem) {
  const int64_t requests = CeilDiv(problem.max_tokens, std::max<int64_t>(problem.max_qo_len, 1));
  const bool is_narrow = problem.kernel.head_dim_v <= kNarrowColumns ||
                         requests * ItemsOfSegment(problem, kNarrowColumns) <= Processors(problem);
  return is_narrow ? kNarrowColumns : kWideColumns;
}

}  // namespace

bool HasLinearChunks(const LinearAttentionProblem& problem) {
  const LinearAttentionKernel& kernel = problem.kernel;
  // More chunks than tokens: a token or so a request, or chunks of one token, whose results no cut
  // of a prompt may change (chunk_tokens=1).
  if (problem.max_chunks > problem.max_tokens) return false;
  // States are operands of products, which in f16 end at 65,504. With the delta rule and normalized
  // keys they stay near sqrt(head_dim_k) of v; without, they grow with the tokens.
  const bool has_type =
      kernel.dtype == kBF16 || (kernel.dtype == kF16 && kernel.delta_rule && kernel.l2_norm);
  return kernel.arch >= 80 && has_type && kernel.head_dim_k <= kMostDimK &&
         problem.max_qo_len >= kFewestChunkTokens;
}

int64_t ChunkTileColumns(const LinearAttentionProblem& problem) {
  if (problem.kernel.decay == kChannelDecay) return ChainTileColumns(problem);
  if (problem.kernel.head_dim_v <= kNarrowColumns) return kNarrowColumns;
  const double segments =
      static_cast<double>(Processors(problem) / ItemsOfSegment(problem, kNarrowColumns));
  return segments > 1 && segments >= kLeastNarrowSegments * CheapestSegments(problem)
             ? kNarrowColumns
             : kWideColumns;
}

LinearAttentionLaunch SizeLinearChunks(const LinearAttentionProblem& problem,
                                       const LinearAttentionKernel& kernel) {
  LinearAttentionLaunch launch;
  launch.segment_chunks = SegmentChunks(problem, kernel);
  const int64_t dim_k = RoundUp(kernel.head_dim_k, 64);
  const int64_t dim_v = RoundUp(kernel.head_dim_v, kernel.tile_columns);
  const int64_t bytes =
      kernel.decay == kChannelDecay
          ? LinearChannelWorkspace(problem.max_chunks, problem.max_tokens, problem.num_v_heads,
                                   dim_k, dim_v, kernel.head_dim_k)
                .size
          : LinearWorkspace(problem.max_chunks, problem.num_v_heads, dim_k, dim_v,
                            launch.segment_chunks)
                .size;
  launch.workspace_words = bytes / 4;
  return launch;
}

LinearAttentionKernel SelectLinearGradient(const LinearAttentionProblem& problem) {
  LinearAttentionKernel kernel = problem.kernel;
  kernel.main_loop = SelectLinearLoop(problem);
  kernel.tile_columns = ChainTileColumns(problem);
  kernel.phase = kLinearGradientTerms;
  return kernel;
}

int64_t LinearChunkCtas(const LinearAttentionProblem& problem, const LinearAttentionKernel& kernel,
                        int64_t num_processors) {
  const int64_t chunks = std::max<int64_t>(problem.max_chunks, 1);
  // One CTA of the terms lists segments.
  if (kernel.phase == kLinearTerms || kernel.phase == kLinearGradientTerms) {
    return chunks * (kernel.decay == kChannelDecay ? problem.num_v_heads / ChannelHeads(problem)
                                                   : PartsOfChunk(problem, num_processors)) +
           1;
  }
  if (kernel.phase == kLinearGradients) {
    return CeilDiv(chunks, ChunksTogether(problem)) * problem.num_qk_heads;
  }
  // One CTA on each multiprocessor takes items in turn.
  int64_t items = chunks * ItemsOfSegment(problem, kernel.tile_columns);
  if (kernel.phase == kLinearStarts) items *= kernel.tile_columns / kStartColumns;
  return std::min(num_processors, items);
}

}  // namespace jax_attn
