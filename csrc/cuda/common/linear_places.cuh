// Where the phases of chunked linear attention have what they hand to each other.
#pragma once

#include "cuda/common/math.cuh"
#include "cuda/common/state_plan.cuh"

namespace jax_attn {

// Dims with the padding of tiles.
template <class Traits>
struct LinearDims {
  static constexpr int kDimK = Traits::kHeadDimK, kDimV = Traits::kHeadDimV;
  static constexpr int kK = CeilDiv(kDimK, 64) * 64;
  static constexpr int kColumnTiles = CeilDiv(kDimV, Traits::kTileColumns);
  static constexpr int kV = kColumnTiles * Traits::kTileColumns;
};

constexpr __host__ __device__ bool IsGradientPhase(int phase) { return phase > kLinearOutputs; }

template <class Traits>
class LinearPlaces {
 protected:
  using Dims = LinearDims<Traits>;
  static constexpr bool kIsGradient = IsGradientPhase(Traits::kPhase);
  static constexpr bool kHasChannels = Traits::kDecay == kChannelDecay;
  static constexpr i64 kTermsBytes =
      kHasChannels
          ? (kIsGradient ? LinearGradientTerms::ChannelBytes(Dims::kK)
                         : LinearChannelTerms::Bytes(Dims::kK))
          : static_cast<i64>(kIsGradient ? sizeof(LinearGradientTerms) : sizeof(LinearTerms));
  using Terms = typename Conditional<kIsGradient, LinearGradientTerms, LinearTerms>::Type;

  // The plan is older than all launches of a call, so the words of its header are on their way
  // while a CTA waits. All CTAs wait, so that a launch ends behind all launches before it. Launches
  // may begin while the workspace is written: it is never read as constant memory.
  __device__ __forceinline__ explicit LinearPlaces(const LinearAttentionParams& p)
      : p_(p), plan_(p.plan) {
    if constexpr (OverlapsLaunchBefore(Traits::kArch, Traits::kPhase)) WaitForLaunchBefore();
    if constexpr (Traits::kArch >= 90) LetNextLaunchBegin();
  }

  // Places are computed where they are used: sums leave no registers to keep them.
  __device__ __forceinline__ LinearWorkspace Offsets() const {
    return LinearWorkspace(Opaque(p_.plan.max_chunks), p_.num_v_heads, Dims::kK, Dims::kV,
                           p_.segment_chunks, kTermsBytes);
  }
  __device__ __forceinline__ LinearGradientWorkspace Arrays() const {
    return LinearGradientWorkspace(Opaque(p_.plan.max_chunks), p_.plan.max_tokens, p_.num_v_heads,
                                   Dims::kK, Dims::kV, Dims::kDimV, kTermsBytes);
  }
  template <class T>
  __device__ __forceinline__ T* At(i64 offset) const {
    return reinterpret_cast<T*>(static_cast<char*>(p_.workspace) + offset);
  }

  __device__ __forceinline__ Terms& TermsOf(int chunk, int head) const {
    const i64 number = static_cast<i64>(chunk) * p_.num_v_heads + head;
    const i64 begin = LinearWorkspace::TermsBegin(p_.plan.max_chunks);
    if constexpr (kHasChannels) {
      return *At<Terms>(begin + number * kTermsBytes);
    } else {
      return At<Terms>(begin)[number];
    }
  }
  // Behind the terms with a decay a channel.
  __device__ __forceinline__ static float* ChannelDecays(Terms& terms) {
    return reinterpret_cast<float*>(&terms + 1);
  }
  __device__ __forceinline__ auto ChannelArrays() const {
    if constexpr (kIsGradient) {
      return LinearChannelGradientWorkspace(Traits::kArch, Opaque(p_.plan.max_chunks),
                                            p_.plan.max_tokens, p_.num_qk_heads, p_.num_v_heads,
                                            Dims::kK, Dims::kV, Dims::kDimK, Dims::kDimV);
    } else {
      return LinearChannelWorkspace(Opaque(p_.plan.max_chunks), p_.plan.max_tokens, p_.num_v_heads,
                                    Dims::kK, Dims::kV, Dims::kDimK);
    }
  }
  // See LinearChannelGradientWorkspace.
  __device__ __forceinline__ i32& PreviousChunk(int number) const {
    return At<i32>(ChannelArrays().previous)[number];
  }

  // Tokens that are computed together: a chunk of the plan, or with a decay a channel, whose chunks
  // have 16 tokens, up to four of them. They begin where the state is known: at a request's first
  // chunk and behind each that writes its state.
  struct Chunk {
    StateChunk rows;
    int number, next;  // of the plan's first chunk of these, and of that behind them
  };
  __device__ __forceinline__ Chunk ChunkAt(int number) const {
    Chunk c = {plan_.Chunk(number), number, number + 1};
    if constexpr (kHasChannels) {
      // All rows are asked for at once.
      constexpr int kMost = kLinearTokens / kChannelTokens;
      StateChunk rows[kMost];
#pragma unroll
      for (int i = 0; i < kMost; ++i) rows[i] = plan_.Chunk(Min(number + i, plan_.num_chunks - 1));
      bool goes_on = true;
#pragma unroll
      for (int i = 1; i < kMost; ++i) {
        goes_on = goes_on && c.next < plan_.num_chunks && !AreApart(rows[i - 1], rows[i]);
        if (!goes_on) continue;
        c.rows.length += rows[i].length;
        c.rows.write_slot = rows[i].write_slot;
        ++c.next;
      }
    }
    return c;
  }
  // Whether two chunks of a plan are not computed together, whatever their numbers are.
  __device__ __forceinline__ static bool AreApart(const StateChunk& before, const StateChunk& own) {
    return own.is_first == 1 || before.write_slot >= 0 || before.length != kChannelTokens ||
           own.length > kChannelTokens || own.begin != before.begin + before.length;
  }
  __device__ __forceinline__ bool IsBorder(int i) const {
    return i == 0 || AreApart(plan_.Chunk(i - 1), plan_.Chunk(i));
  }

  __device__ __forceinline__ int NumSegments() const {
    return plan_.num_chunks == 0 ? 0 : *At<i32>(Offsets().num_segments);
  }
  __device__ __forceinline__ LinearSegment Segment(int number) const {
    return At<LinearSegment>(Offsets().segments)[number];
  }
  // Lists the segments, with the first warp of a CTA.
  __device__ __forceinline__ void ListSegments() const {
    if (threadIdx.x >= kWarpSize || plan_.num_chunks == 0) return;
    constexpr int kAhead = 8;  // chunks that a lane looks at in one trip to memory
    const int lane = static_cast<int>(threadIdx.x);
    const u32 before = (1u << lane) - 1;  // lanes
    const LinearWorkspace at = Offsets();
    LinearSegment* const segments = At<LinearSegment>(at.segments);
    const int length = p_.segment_chunks;
    int number = 0, request = 0;  // segments so far, and the first chunk of the last request
#pragma unroll 1
    for (int begin = 0; begin < plan_.num_chunks; begin += kAhead * kWarpSize) {
      bool is_first[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int chunk = begin + i * kWarpSize + lane;
        is_first[i] = chunk < plan_.num_chunks && plan_.IsFirst(chunk);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int of_lane_0 = begin + i * kWarpSize, chunk = of_lane_0 + lane;
        const u32 firsts = __ballot_sync(kFullWarp, is_first[i]);
        const u32 up_to_here = firsts & (before | 1u << lane);
        const int first = up_to_here != 0 ? of_lane_0 + Highest(up_to_here) : request;
        const bool begins = chunk < plan_.num_chunks &&
                            (length > 0 ? (chunk - first) % length == 0 : chunk == first);
        const u32 found = __ballot_sync(kFullWarp, begins);
        if (begins) {
          const int own = number + __popc(found & before);
          segments[own].begin = chunk;
          segments[own].first = first;
          if (own > 0) segments[own - 1].is_followed = chunk != first;
        }
        number += __popc(found);
        if (firsts != 0) request = of_lane_0 + Highest(firsts);
      }
    }
    if (lane != 0) return;
    segments[number - 1].is_followed = 0;
    *At<i32>(at.num_segments) = number;
  }

  // The position of the highest set bit.
  __device__ __forceinline__ static int Highest(u32 bits) {
    return 31 - __clz(static_cast<int>(bits));
  }

  // Number of the map of a segment for a head.
  __device__ __forceinline__ i64 Map(int begin, int head) const {
    return static_cast<i64>(begin / p_.segment_chunks) * p_.num_v_heads + head;
  }
  __device__ __forceinline__ i32& MapIsZero(i64 map) const {
    return At<i32>(Offsets().is_zero)[map];
  }
  __device__ __forceinline__ unsigned char* MapM(i64 map) const {
    return At<unsigned char>(Offsets().m) + map * 4 * Dims::kK * Dims::kK;
  }
  __device__ __forceinline__ float* MapB(i64 map) const {
    return At<float>(Offsets().b) + map * Dims::kK * Dims::kV;
  }
  // The state before a request that is split.
  __device__ __forceinline__ float* MapState(i64 map) const {
    return At<float>(Offsets().states) + map * Dims::kK * Dims::kV;
  }

  const LinearAttentionParams& p_;
  const StatePlanView plan_;
};

}  // namespace jax_attn
