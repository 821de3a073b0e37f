// Chunked linear attention and its gradients without a GPU: launches in emulation. Include the
// emulation first.
#pragma once

#include "cuda/linear_attention_cuda_cases.h"

namespace jax_attn {
namespace {

// A workspace of NaN.
inline std::vector<uint4> MakeWorkspace(i64 bytes) {
  return std::vector<uint4>(bytes / 16 + 1, {~0u, ~0u, ~0u, ~0u});
}

// BodyOf<Traits>: of a phase. All threads of a launch that may overlap the one before wait for it.
template <class Shape, template <class> class BodyOf, int kPhase, class Params>
void LaunchLinear(int num_ctas, const Params& p, unsigned seed) {
  using Body = BodyOf<LinearPhaseTraits<Shape, kPhase>>;
  if (Body::kSmemBytes > static_cast<int>(sizeof(smem))) emulation::Fail("no room");
  emulation::num_launch_waits = 0;
  emulation::machine.Launch(num_ctas, Body::kNumThreads, seed, [&] { Body::Run(p); });
  const i64 waits = OverlapsLaunchBefore(Shape::kArch, kPhase) ? num_ctas * Body::kNumThreads : 0;
  if (emulation::num_launch_waits != waits) emulation::Fail("threads that do not wait");
}

template <class Shape>
constexpr int kPaddedK = CeilDiv(Shape::kHeadDimK, 64) * 64;
template <class Shape>
constexpr int kPaddedV = CeilDiv(Shape::kHeadDimV, Shape::kTileColumns) * Shape::kTileColumns;

// 16-bit products: elements of 1 are some 1e-2 off.
inline constexpr Tolerance kChunkTolerance = {5e-2, 6e-3}, kGradientTolerance = {5e-2, 1.2e-2};

// BodyOf<Traits>: of a phase. parts: CTAs for each chunk; 0: one for each q and k head.
template <class Shape, template <class> class BodyOf>
void RunChunksCase(const LinearCase& c, int parts = 0) {
  constexpr bool kHasChannels = Shape::kDecay == kChannelDecay;
  RunLinearCase<Shape>(c, kChunkTolerance, [&](LinearAttentionParams p) {
    const i64 chunks = p.plan.max_chunks, heads = p.num_v_heads;
    std::vector<uint4> workspace = MakeWorkspace(
        kHasChannels
            ? LinearChannelWorkspace(chunks, p.plan.max_tokens, heads, kPaddedK<Shape>,
                                     kPaddedV<Shape>, Shape::kHeadDimK)
                  .size
            : LinearWorkspace(chunks, heads, kPaddedK<Shape>, kPaddedV<Shape>, c.segment_chunks)
                  .size);
    p.workspace = workspace.data();
    const int parts_of_chunk = parts ? parts : c.num_qk_heads;
    LaunchLinear<Shape, BodyOf, kLinearTerms>(p.plan.max_chunks * parts_of_chunk + 1, p, 1);
    if (c.segment_chunks > 0) {
      LaunchLinear<Shape, BodyOf, kLinearMaps>(3, p, 2);
      LaunchLinear<Shape, BodyOf, kLinearStarts>(3, p, 4);
    }
    LaunchLinear<Shape, BodyOf, kLinearOutputs>(3, p, 3);
  });
}

// chunks_of_cta: of the plan, in the last launch.
template <class Shape, template <class> class BodyOf>
void RunGradientCase(const LinearCase& c, int chunks_of_cta = 1) {
  RunLinearGradientCase<Shape>(c, kGradientTolerance, [&](LinearGradientParams p) {
    const i64 chunks = p.forward.plan.max_chunks, tokens = p.forward.plan.max_tokens;
    const i64 heads = p.forward.num_v_heads;
    std::vector<uint4> workspace = MakeWorkspace(
        Shape::kDecay == kChannelDecay
            ? LinearChannelGradientWorkspace(Shape::kArch, chunks, tokens, c.num_qk_heads, heads,
                                             kPaddedK<Shape>, kPaddedV<Shape>, Shape::kHeadDimK,
                                             Shape::kHeadDimV)
                  .size
            : LinearGradientWorkspace(chunks, tokens, heads, kPaddedK<Shape>, kPaddedV<Shape>,
                                      Shape::kHeadDimV)
                  .size);
    p.forward.workspace = workspace.data();
    LaunchLinear<Shape, BodyOf, kLinearGradientTerms>(static_cast<int>(chunks) * c.num_qk_heads + 1,
                                                      p.forward, 1);
    const int ctas =
        static_cast<int>((chunks + chunks_of_cta - 1) / chunks_of_cta) * c.num_qk_heads;
    LaunchLinear<Shape, BodyOf, kLinearStates>(3, p, 2);
    LaunchLinear<Shape, BodyOf, kLinearStateGradients>(3, p, 3);
    LaunchLinear<Shape, BodyOf, kLinearGradients>(ctas, p, 4);
  });
}

// A request that reads and writes the slot of its number.
inline std::vector<LinearRequest> InPlace(std::vector<int> lengths) {
  std::vector<LinearRequest> requests;
  for (const int length : lengths) {
    const int slot = static_cast<int>(requests.size());
    requests.push_back({length, slot, slot});
  }
  return requests;
}
// Requests in place; further fields by name.
inline LinearCase CaseOf(std::vector<int> lengths, int qk_heads, int v_heads, int segment_chunks,
                         float lowest_g) {
  LinearCase c = {InPlace(lengths), qk_heads, v_heads, static_cast<int>(lengths.size()) + 2};
  c.segment_chunks = segment_chunks;
  c.lowest_g = lowest_g;
  return c;
}
// The same; the state of request 0 after so many tokens is kept.
inline LinearCase WithCheckpoint(LinearCase c, int position = 5) {
  c.requests[0].checkpoints = {{position, c.num_slots - 1}};
  return c;
}

// Type, dims, decay, delta rule, norm, bf16 states, columns of a CTA.
using Gdn = LinearTraits<kElementBf16, 128, 128, kHeadDecay, true, true, false, 128>;
using Bf16 = LinearTraits<kElementBf16, 64, 72, kHeadDecay, true, false, true, 128>;
using Narrow = LinearTraits<kElementBf16, 40, 24, kNoDecay, true, true, false, 64>;
using Wide = LinearTraits<kElementBf16, 96, 256, kHeadDecay, true, true, false, 128>;
using Ssd = LinearTraits<kElementBf16, 128, 64, kHeadDecay, false, false, false, 64>;
using Kda = LinearTraits<kElementBf16, 128, 128, kChannelDecay, true, true, false, 128>;
using GdnF16 = LinearTraits<kElementF16, 64, 64, kHeadDecay, true, true, false, 64>;
using KdaF16 = LinearTraits<kElementF16, 64, 40, kChannelDecay, true, true, true, 64>;
// Its sums of q and k over v heads are in the workspace.
using Kda80 =
    LinearTraits<kElementBf16, 96, 64, kChannelDecay, true, false, false, 64, kPortableChunks, 80>;
using SmallKda = LinearTraits<kElementBf16, 40, 24, kChannelDecay, true, true, true, 64>;
using Gla = LinearTraits<kElementBf16, 40, 72, kChannelDecay, false, false, true, 64>;

template <template <class> class BodyOf>
void RunLinearCases() {
  // Two or more segments before the last one, whose maps are not 0.
  RunChunksCase<Gdn, BodyOf>(CaseOf({330}, 1, 1, 2, -0.01f));
  RunChunksCase<Gdn, BodyOf>(WithCheckpoint(CaseOf({257, 7}, 1, 2, 1, -3.0f)));
  LinearCase zeros = CaseOf({400}, 1, 1, 1, -0.01f);  // a map of zeros among others
  zeros.fast_tokens = 2;
  RunChunksCase<Gdn, BodyOf>(zeros);
  LinearCase repeated = CaseOf({130}, 1, 1, 0, 0);
  repeated.repeats_keys = true;
  RunChunksCase<Gdn, BodyOf>(repeated);
  RunChunksCase<Bf16, BodyOf>(WithCheckpoint(CaseOf({65, 0, 64, 1, 193}, 2, 4, 2, -0.1f)));
  RunChunksCase<Bf16, BodyOf>(CaseOf({70}, 1, 2, 0, -0.1f), 2);
  for (const LinearCase& c : LinearBatches(70)) RunChunksCase<Bf16, BodyOf>(c);
  RunChunksCase<Narrow, BodyOf>(WithCheckpoint(CaseOf({140, 5}, 1, 1, 1, 0)));
  // Maps of more chunks than their copies have room for, and maps that are 0 before all arrive.
  RunChunksCase<Narrow, BodyOf>(CaseOf({520}, 1, 1, 6, 0));
  RunChunksCase<Bf16, BodyOf>(CaseOf({390}, 1, 4, 5, -4.0f));
  RunChunksCase<Wide, BodyOf>(CaseOf({140}, 1, 1, 1, -0.02f));
  RunChunksCase<Ssd, BodyOf>(WithCheckpoint(CaseOf({100, 0, 3}, 1, 2, 0, -0.2f)));
  RunChunksCase<Ssd, BodyOf>(CaseOf({290}, 1, 2, 2, -0.01f));
  RunChunksCase<Ssd, BodyOf>(CaseOf({290}, 1, 2, 1, -3.0f));
  RunChunksCase<Kda, BodyOf>(WithCheckpoint(CaseOf({150, 3}, 1, 2, 0, -0.1f)));
  // A checkpoint at the end of one of the plan's chunks of 16 tokens.
  RunChunksCase<Kda, BodyOf>(WithCheckpoint(CaseOf({100}, 1, 1, 0, -0.1f), 32));
  RunChunksCase<Kda, BodyOf>(CaseOf({70, 1}, 1, 2, 0, -60.0f), 2);
  repeated.requests = InPlace({80});
  RunChunksCase<Kda, BodyOf>(repeated);
  for (const LinearCase& c : LinearBatches(70)) RunChunksCase<Gla, BodyOf>(c);
}

// wgmma has no f16 in emulation.
template <template <class> class BodyOf>
void RunLinearF16Cases() {
  RunChunksCase<GdnF16, BodyOf>(WithCheckpoint(CaseOf({150, 3}, 1, 2, 1, -0.1f)));
  RunChunksCase<KdaF16, BodyOf>(WithCheckpoint(CaseOf({100}, 1, 2, 0, -0.1f)));
}

template <template <class> class BodyOf>
void RunLinearGradientCases() {
  RunGradientCase<Gdn, BodyOf>(WithCheckpoint(CaseOf({150, 7}, 1, 2, 0, -0.1f)));
  LinearCase repeated = CaseOf({130}, 1, 1, 0, 0);
  repeated.repeats_keys = true;
  RunGradientCase<Gdn, BodyOf>(repeated);
  RunGradientCase<Bf16, BodyOf>(WithCheckpoint(CaseOf({65, 0, 64, 1, 130}, 2, 4, 0, -0.1f)));
  for (const LinearCase& c : LinearBatches(70)) RunGradientCase<Bf16, BodyOf>(c);
  // Requests that read the same slot.
  LinearCase shared = CaseOf({70, 3, 20, 5}, 1, 1, 0, -0.1f);
  shared.requests[0].write_slot = -1;
  shared.requests[2].read_slot = shared.requests[3].read_slot = 0;
  RunGradientCase<Narrow, BodyOf>(shared);
  RunGradientCase<Wide, BodyOf>(CaseOf({100}, 1, 1, 0, -0.02f));
  RunGradientCase<Ssd, BodyOf>(WithCheckpoint(CaseOf({100, 0, 3}, 1, 3, 0, -0.2f)));
  RunGradientCase<Ssd, BodyOf>(CaseOf({70}, 1, 1, 0, -20.0f));
  RunGradientCase<Kda, BodyOf>(WithCheckpoint(CaseOf({150, 3}, 1, 2, 0, -0.1f)), 4);
  // A checkpoint at the end of one of the plan's chunks of 16 tokens.
  RunGradientCase<Kda, BodyOf>(WithCheckpoint(CaseOf({100}, 1, 1, 0, -0.1f), 32));
  RunGradientCase<Kda, BodyOf>(CaseOf({70, 1}, 1, 1, 0, -60.0f), 4);
  repeated.requests = InPlace({80});
  RunGradientCase<Kda, BodyOf>(repeated);
  RunGradientCase<SmallKda, BodyOf>(shared);
  LinearCase sequences = CaseOf({130, 130}, 1, 1, 0, -0.1f);  // without a plan of their own
  sequences.chunk_tokens = kLinearTokens;
  RunGradientCase<SmallKda, BodyOf>(sequences);
  RunGradientCase<Kda80, BodyOf>(CaseOf({70}, 1, 2, 0, -0.1f));
  for (const LinearCase& c : LinearBatches(70)) RunGradientCase<Gla, BodyOf>(c, 3);
}

}  // namespace
}  // namespace jax_attn
