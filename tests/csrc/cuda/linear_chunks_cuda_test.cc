// The portable chunked loop of linear attention, without a GPU.
#include "emulation/cuda_emulation.h"
// The header above stands in for CUDA and must come first.
#include "cuda/linear_chunks_cases.h"
#include "cuda/sm80/linear_attention.cuh"

namespace jax_attn {
namespace {

// Lists the segments of a plan, with one warp.
struct ListOfSegments : LinearPlaces<LinearPhaseTraits<Narrow, kLinearTerms>> {
  explicit ListOfSegments(const LinearAttentionParams& p) : LinearPlaces(p) { ListSegments(); }
};

// Segments of requests of so many chunks, in the order of chunks.
void TestSegments(const std::vector<int>& requests, int segment_chunks) {
  std::vector<int> tokens;
  for (const int chunks : requests) tokens.push_back(64 * chunks);
  const PlanWords plan = MakeStatePlan(InPlace(tokens), 64, 2);
  LinearAttentionParams p = {};
  p.plan = ParamsOf(plan, plan.words[kStatePlanTokens], static_cast<int>(requests.size()), 1);
  p.num_v_heads = 1;
  p.segment_chunks = segment_chunks;
  const LinearWorkspace at(p.plan.max_chunks, 1, 64, 64, segment_chunks);
  std::vector<uint4> workspace = MakeWorkspace(at.size);
  p.workspace = workspace.data();
  emulation::machine.Launch(1, kWarpSize, 1, [&] { ListOfSegments list(p); });

  std::vector<LinearSegment> want;
  int first = 0;
  for (const int chunks : requests) {
    const int length = segment_chunks > 0 ? segment_chunks : chunks;
    for (int begin = 0; begin < chunks; begin += length) {
      want.push_back({first + begin, first, begin + length < chunks});
    }
    first += chunks;
  }
  const char* const got = reinterpret_cast<const char*>(workspace.data());
  const auto num_segments = *reinterpret_cast<const i32*>(got + at.num_segments);
  if (num_segments == static_cast<i32>(want.size()) &&
      std::memcmp(got + at.segments, want.data(), sizeof(LinearSegment) * want.size()) == 0) {
    return;
  }
  ++g_failures;
  std::printf("FAILED: segments of %d chunks of %zu requests: %d of %zu, or others\n",
              segment_chunks, requests.size(), num_segments, want.size());
}

void TestSegments() {
  for (const int segment_chunks : {0, 1, 3, 32, 100}) {
    TestSegments({1}, segment_chunks);
    TestSegments({3, 1, 7, 32, 64}, segment_chunks);
    TestSegments({700, 1, 30}, segment_chunks);  // over more than one trip to memory
    TestSegments({255, 257, 100}, segment_chunks);
    TestSegments(std::vector<int>(300, 1), segment_chunks);
  }
}

}  // namespace
}  // namespace jax_attn

int main() {
  using namespace jax_attn;
  TestSegments();
  RunLinearCases<LinearChunksBody>();
  RunLinearF16Cases<LinearChunksBody>();
  if (g_failures == 0) std::printf("linear_chunks_cuda_test: ok\n");
  return g_failures != 0;
}
