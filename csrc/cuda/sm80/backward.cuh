// The backward pass, for every architecture from sm_80 on: mma.sync, or FFMA for f32.
//
// With P = exp(logits - lse) and dS = P * (d_o v^T - d), where d = sum(d_o * o) - d_lse,
//   dv = P^T d_o        dk = scale dS^T q        dq = scale dS k.
// A unit of work is a block of keys, for which it writes dk and dv, or a block of query rows, for
// which it writes dq. It owns these rows, and the other operands stream by:
//   keys:     owns k, v     streams q, d_o     S^T = k q^T, dP^T = v d_o^T
//   queries:  owns q, d_o   streams k, v       S = q k^T,   dP = d_o v^T
// so both kinds share their code. S and dP are computed twice, 7 products instead of 5. In return
// every sum stays in the registers of one warp, from the first key or row to the last: its order
// does not depend on which CTA takes the unit, memory holds no sums, and results are written once,
// in their type.
//
// Rows of an item are those of attention: row = token * group_size + g. So dk and dv are sums over
// the group without extra work.
//
// Pages that several page table entries name belong to the first entry (BackwardIndex). Its unit
// goes through the other requests one by one.
//
// A value that is not finite makes a result that is not finite, if only as 0 * NaN. Then the unit
// runs again with care: such rows become zeros, and NaN is written only to the rows that see them.
//
// With a variant, both kinds of unit ask for each logit of a step: whether the row sees the key,
// the logit, and its derivative s' by the score; the factor is then scale s'. Without softmax P is
// the logit itself, and dS = d_o v^T.
//
// Gradients of a variant's operands have launches of their own: backward_operands.cuh.
#pragma once

#include "cuda/sm80/backward_operands.cuh"

namespace jax_attn {

// --- all units ---

template <class Traits>
struct BackwardBody {
  using Shapes = BackwardShapes<Traits>;
  using KeysPass = BackwardPass<Traits, true>;
  using QueriesPass = BackwardPass<Traits, false>;
  static constexpr bool kHasElements = Shapes::kHasElements;
  using TermsPass = typename Conditional<kHasElements, OperandsPass<Traits>, QueriesPass>::Type;
  static constexpr int kNumThreads = Shapes::kWarps * kWarpSize;
  static constexpr int kMinCtasPerSm = Shapes::kCtas;
  static constexpr int kSmemBytes =
      sizeof(BackwardState) +
      Max(Max(sizeof(typename KeysPass::Shared), sizeof(typename QueriesPass::Shared)),
          sizeof(typename TermsPass::Shared));

  __device__ __forceinline__ static void Run(const BackwardCudaParams& p) {
    extern __shared__ __align__(128) unsigned char smem[];
    const AttentionParams& f = p.forward;
    const HeaderCounts plan(f.header, f);
    const int thread = blockIdx.x * kNumThreads + threadIdx.x;
    const int num_threads = gridDim.x * kNumThreads;
    if (!plan.is_plan) {
      // All bits set are NaN in every type.
      if (p.phase == kBackwardRows) {
        Fill(p.d_q, p.num_elements[0], thread, num_threads);
        Fill(p.d_k, p.num_elements[1], thread, num_threads);
        Fill(p.d_v, p.num_elements[2], thread, num_threads);
      }
      if constexpr (kHasElements) {
        if (p.phase == kBackwardToOperands) LeaveOperands<Traits>(p, false, thread, num_threads);
      }
      return;
    }
    if constexpr (kHasElements) {
      if (p.phase == kBackwardToOperands) {
        return LeaveOperands<Traits>(p, true, thread, num_threads);
      }
    }
    const BackwardIndex<Traits> index(p, plan.batch_size);
    if (p.phase == kBackwardReadPlan) return index.ReadPlan(plan.num_items, thread, num_threads);
    if (p.phase == kBackwardLinkPages) return index.LinkPages(thread, num_threads);
    if (p.needs_portable != nullptr && LoadConstant(p.needs_portable) == 0) return;
    BackwardState& state = *reinterpret_cast<BackwardState*>(smem);
    if (threadIdx.x == 0) {
      state.batch_size = plan.batch_size;
      state.pools = FindPools<Traits, Element<Traits::kDtype>::kBytes>(f);
      state.search = {0, 0};
    }
#pragma unroll 1
    for (;;) {
      __syncthreads();
      if (threadIdx.x < kWarpSize) Take(p, state);
      __syncthreads();
      if (state.is_done) break;
      if (state.unit.of_keys) {
        KeysPass(p, state, smem + sizeof(BackwardState)).Run();
      } else if (kHasElements && p.phase != kBackwardRows) {
        TermsPass(p, state, smem + sizeof(BackwardState)).Run();
      } else {
        QueriesPass(p, state, smem + sizeof(BackwardState)).Run();
      }
    }
  }

 private:
  __device__ __forceinline__ static u32 KeyBlocks(const BackwardCudaParams& p, int request) {
    if (kHasElements && p.phase != kBackwardRows) return 0;
    int rows = LoadConstant(p.forward.kv_lens + request);
    if constexpr (Traits::kPageSize > 0) {  // whole pages: another request may have more tokens in
                                            // the last one
      rows = CeilDiv(rows, Traits::kPageSize) * Traits::kPageSize;
    }
    return CeilDiv(rows, KeysPass::kOwned);
  }
  __device__ __forceinline__ static u32 QueryBlocks(const BackwardCudaParams& p, int request) {
    const int tokens = LoadConstant(p.forward.qo_indptr + request + 1) -
                       LoadConstant(p.forward.qo_indptr + request);
    if (kHasElements && p.phase != kBackwardRows) {
      return CeilDiv(tokens * Traits::kGroupSize, TermsPass::kOwned);
    }
    return CeilDiv(tokens * Traits::kGroupSize, QueriesPass::kOwned);
  }

  // Takes a unit, by one warp. Requests come one after the other. In a causal one the first keys
  // are seen by the most rows, and the last rows see the most keys: longest first.
  __device__ __forceinline__ static void Take(const BackwardCudaParams& p, BackwardState& state) {
    const auto heads = static_cast<u32>(p.forward.num_kv_heads);
    UnitSearch search = state.search;
    u32 unit_index = 0;
    i32* num_taken = p.num_taken;
    if (kHasElements && p.phase != kBackwardRows) {
      num_taken = p.num_operand_units + (p.phase - kBackwardBounds);
    }
    const int request =
        search.Find(TakeNumber(num_taken), state.batch_size, unit_index,
                    [&](int r) { return (KeyBlocks(p, r) + QueryBlocks(p, r)) * heads; });
    __syncwarp();  // all lanes have read it
    if (threadIdx.x % kWarpSize != 0) return;
    state.search = search;
    state.is_done = request < 0;
    if (request < 0) return;
    const u32 key_blocks = KeyBlocks(p, request), block = unit_index / heads;
    state.unit.of_keys = block < key_blocks;
    state.unit.request = request;
    state.unit.kv_head = static_cast<int>(unit_index % heads);
    state.unit.block = static_cast<int>(
        state.unit.of_keys ? block : QueryBlocks(p, request) - 1 - (block - key_blocks));
    state.own = BackwardSource(p, request);
  }

  __device__ __forceinline__ static void Fill(void* array, i64 num_elements, int thread,
                                              int num_threads) {
    // Head dims are multiples of 8.
    const i64 num_vectors = num_elements * Element<Traits::kDtype>::kBytes / 16;
    for (i64 i = thread; i < num_vectors; i += num_threads) {
      static_cast<uint4*>(array)[i] = make_uint4(kFullWarp, kFullWarp, kFullWarp, kFullWarp);
    }
  }
};

}  // namespace jax_attn
