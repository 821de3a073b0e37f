// Gradients of linear attention from chunk to chunk: the states before chunks, then the gradients
// of the states behind them. As common/linear_scan.cuh, whose loops these are without splits:
// everything is transposed, and a warp has 16 columns of v.
//
// The states are computed again, from the first chunk to the last. Kept are, in 16 bits, the state
// before each chunk, and its V' = T R with R = beta (V - since_k (K S)). With dS the gradient of
// the state behind a chunk, which is kept, too, from the last chunk to the first:
//   dV'^T = (dS^T K^T) (.) until_k + dO^T qk,  dR^T = dV'^T T
//   dS^T <- decay dS^T - (dR^T (.) (beta since_k)) K + (dO^T (.) since_q) Q
// With a decay a channel K and Q have since_k and since_q already, K (.) until_k is a tile of its
// own, and decays are those of columns of S^T.
// Without the delta rule R is beta V, T is I, and dS has no middle term.
#pragma once

#include "cuda/common/linear_scan.cuh"

namespace jax_attn {

// S^T of a chunk and a v head in the workspace, as tiles of 64 columns of v.
template <class Shape>
struct LinearImage {
  static constexpr int kTileBytes = Shape::kK / 64 * kPartBytes;
  static constexpr i64 kBytes = static_cast<i64>(Shape::kV) / 64 * kTileBytes;
};

template <class Traits, class Products>
class LinearGradientScan : protected LinearColumnScan<Traits, Products> {
  using Base = LinearColumnScan<Traits, Products>;

 protected:
  using Base::kDtype, Base::kK;
  using Base::stages_, Base::warp_;
  using typename Base::Item;
  using typename Base::Shape;
  using typename Base::Stage;
  using E = Element<kDtype>;
  using Image = LinearImage<Shape>;

  __device__ __forceinline__ LinearGradientScan(const LinearGradientParams& params, Stage* stages)
      : Base(params.forward, stages), params_(params) {}

  // Writes the warp's columns of S^T as operands of products have them.
  __device__ __forceinline__ void KeepState(const Item& item, i64 array, int chunk,
                                            const u32 (&s)[kK / 16][4]) const {
    const int lane = Base::Lane();
    const i64 number = static_cast<i64>(chunk) * this->p_.num_v_heads + item.head;
    const int column = item.column + 16 * warp_;
    unsigned char* const to = this->template At<unsigned char>(array) + number * Image::kBytes +
                              column / 64 * Image::kTileBytes;
#pragma unroll
    for (int i = 0; i < kK / 8; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = SwizzledByte(column % 64 + lane / 4 + 8 * half, 8 * i + lane % 4 * 2);
        *reinterpret_cast<u32*>(to + at) = s[i / 2][i % 2 * 2 + half];
      }
    }
  }

  __device__ __forceinline__ void DecayState(const Stage& stage, float (&s)[kK / 8][4]) const {
    if constexpr (Shape::kHasChannels) {
      this->ScaleChannels(s, stage.channels);
    } else {
      this->Scale(s, stage.decay[0]);
    }
  }
  // The tile of K that has until_k, if there is one.
  __device__ __forceinline__ static u32 KeysUntilEnd(const Stage& stage) {
    return SharedAddress(Shape::kHasChannels ? stage.k_until : stage.k);
  }

  const LinearGradientParams& params_;
};

// The states before chunks, and V'.
template <class Traits, class Products>
class LinearStatesPhase : LinearGradientScan<Traits, Products> {
  using Base = LinearGradientScan<Traits, Products>;
  using Base::kDtype, Base::kK;
  using Base::plan_, Base::stages_, Base::warp_;
  using typename Base::Item;
  using typename Base::Shape;
  using typename Base::Stage;

 public:
  using Params = LinearGradientParams;
  static constexpr int kNumThreads = Shape::kNumThreads;
  static constexpr int kSmemBytes = Shape::kStages * static_cast<int>(sizeof(Stage));
  static constexpr int kMinCtasPerSm = 1;

  __device__ __forceinline__ static void Run(const Params& p) {
    extern __shared__ __align__(1024) unsigned char smem[];
    LinearStatesPhase(p, reinterpret_cast<Stage*>(smem)).Run();
  }

 private:
  __device__ __forceinline__ LinearStatesPhase(const Params& p, Stage* stages) : Base(p, stages) {}

  __device__ __forceinline__ void Run() {
    const int num_items = this->NumItems();
    for (int i = static_cast<int>(blockIdx.x); i < num_items; i += static_cast<int>(gridDim.x)) {
      RunItem(this->GetItem(i));
      __syncthreads();
    }
  }

  __device__ __forceinline__ void RunItem(const Item& item) {
    float s[kK / 8][4];
    this->BeginState(item, plan_.Chunk(item.segment.begin), s);
    int last = -1;
    this->template ForChunks<false>(
        item, [&](const typename Base::Chunk& chunk, Stage& stage, const auto& ahead) {
          if constexpr (Shape::kHasChannels) Link(item, chunk, &last);
          Step(item, chunk.number, chunk.rows, stage, ahead, s);
        });
    if constexpr (Shape::kHasChannels) {
      if (Links(item)) this->PreviousChunk(item.segment.begin) = last;
    }
  }

  // One thread for all that have the same chunks.
  __device__ __forceinline__ static bool Links(const Item& item) {
    return item.head == 0 && item.column == 0 && threadIdx.x == 0;
  }
  // last: the chunk before, which becomes this one.
  __device__ __forceinline__ void Link(const Item& item, const typename Base::Chunk& chunk,
                                       int* last) const {
    if (Links(item)) {
      this->PreviousChunk(chunk.number) = *last;
      for (int i = chunk.number + 1; i < chunk.next; ++i) this->PreviousChunk(i) = -1;
    }
    *last = chunk.number;
  }

  template <class Ahead>
  __device__ __forceinline__ void Step(const Item& item, int chunk, const StateChunk& rows,
                                       Stage& stage, const Ahead& ahead, float (&s)[kK / 8][4]) {
    float x[8][4];
    u32 fragments[4][4];
    {
      u32 of_s[kK / 16][4];
      ToFragments<kDtype, kK / 16>(s, of_s);
      if constexpr (Traits::kHasDeltaRule) {
        Products::Pin(of_s);
        Products::Start();
        Products::template Rows<false, false>(x, of_s, SharedAddress(stage.k));
        Products::Commit();
      }
      ahead();
      this->KeepState(item, this->Arrays().states, chunk, of_s);
      if constexpr (Traits::kHasDeltaRule) {
        Products::template Wait<0>();
        Products::Pin(x);
      }
    }
    this->TakeValues(stage, x);
    if constexpr (Traits::kHasDeltaRule) {
      this->ScaleTokens(x, stage.beta);
      ToFragments<kDtype, 4>(x, fragments);
      Products::Pin(fragments);
      Products::Start();
      Products::template Rows<false, true>(x, fragments, SharedAddress(stage.solve));
      Products::Commit();
      Products::template Wait<0>();
      Products::Pin(x);
    }
    this->WriteTokens(item, rows, stage, this->template At<u16>(this->Arrays().fresh), x);
    if constexpr (!Shape::kHasChannels) this->ScaleTokens(x, stage.until_k);
    this->DecayState(stage, s);
    ToFragments<kDtype, 4>(x, fragments);
    Products::Pin(fragments);
    Products::Pin(s);
    Products::Start();
    Products::template Columns<true, false>(s, fragments, this->KeysUntilEnd(stage));
    Products::Commit();
    Products::template Wait<0>();
    Products::Pin(s);
  }
};

// The gradients of the states behind chunks, and dR. Gradients of slots become those of the states
// before the call.
template <class Traits, class Products>
class LinearStateGradientsPhase : LinearGradientScan<Traits, Products> {
  using Base = LinearGradientScan<Traits, Products>;
  using Base::kDtype, Base::kK;
  using Base::p_, Base::params_, Base::plan_, Base::stages_, Base::warp_;
  using typename Base::Item;
  using typename Base::Shape;
  using typename Base::Stage;
  using typename Base::State;
  using E = Element<kDtype>;

 public:
  using Params = LinearGradientParams;
  static constexpr int kNumThreads = Shape::kNumThreads;
  static constexpr int kWarps = kNumThreads / kWarpSize;
  struct Shared {
    Stage stages[Shape::kStages];
    int maxima[kWarps];
  };
  static constexpr int kSmemBytes = sizeof(Shared);
  static constexpr int kMinCtasPerSm = 1;

  __device__ __forceinline__ static void Run(const Params& p) {
    extern __shared__ __align__(1024) unsigned char smem[];
    LinearStateGradientsPhase(p, *reinterpret_cast<Shared*>(smem)).Run();
  }

 private:
  __device__ __forceinline__ LinearStateGradientsPhase(const Params& p, Shared& shared)
      : Base(p, shared.stages), maxima_(shared.maxima) {}

  __device__ __forceinline__ void Run() {
    const int num_items = this->NumItems();
    for (int i = static_cast<int>(blockIdx.x); i < num_items; i += static_cast<int>(gridDim.x)) {
      Item item = this->GetItem(i);
      const int slot = plan_.Chunk(item.segment.begin).read_slot;
      // Requests that read the same slot add to the same gradient: the CTA of the first one has
      // them, in their order.
      if (slot >= 0 && Reader(slot, 0) != item.segment.begin) continue;
      do {
        RunItem(item);
        item.segment.begin = slot < 0 ? plan_.num_chunks : Reader(slot, item.segment.begin + 1);
      } while (item.segment.begin < plan_.num_chunks);
    }
  }

  // The first chunk from `chunk` on of a request that reads a slot.
  __device__ __forceinline__ int Reader(int slot, int chunk) const {
    return plan_.template FirstRequest<kWarps>(
        chunk, maxima_, [&](int at) { return plan_.Chunk(at).read_slot == slot; });
  }

  __device__ __forceinline__ void RunItem(const Item& item) {
    const int begin = item.segment.begin;
    int chunk = LastChunk(begin);
    constexpr int kStages = Shape::kStages;
    float s[kK / 8][4];
    SetZero(s);
    StateChunk rows = this->ChunkAt(chunk).rows, next = rows;
    int to_load = chunk;  // `next` is its row of the plan
    const auto load = [&](int stage) {
      if (to_load >= begin) {
        this->template LoadChunk<true>(stages_[stage], to_load, next, item.head, item.column,
                                       params_.d_o);
        to_load = Before(to_load, begin);
        next = this->ChunkAt(Max(to_load, begin)).rows;
      }
      CommitCopies();
    };
    load(0);
    for (int step = 0; chunk >= begin; ++step) {
      WaitCopies<0>();
      Products::FenceTiles();
      __syncthreads();  // all have computed the step before
      if (rows.write_slot >= 0) TakeGradient(item, rows.write_slot, s);
      const int before = Before(chunk, begin);
      const StateChunk of_before = this->ChunkAt(Max(before, begin)).rows;
      const auto ahead = [&] {
        if constexpr (kStages == 2) load((step + 1) % 2);
      };
      Step(item, chunk, rows, stages_[kStages == 2 ? step % 2 : 0], ahead, s);
      rows = of_before;
      chunk = before;
      if constexpr (kStages == 1) {
        __syncthreads();
        load(0);
      }
    }
    WaitCopies<0>();
    __syncthreads();
    const int slot = plan_.Chunk(begin).read_slot;
    if (slot < 0) return;
    ForGradients(item, slot, s,
                 [&](float& x, State& pool) { this->Store(pool, this->ToFloat(pool) + x); });
  }

  // The first of the chunks that are computed together, the last ones of the request that begins
  // with `begin`, and those before `chunk`; less than begin before the first one.
  __device__ __forceinline__ int LastChunk(int begin) const {
    if constexpr (Shape::kHasChannels) return this->PreviousChunk(begin);
    return plan_.template FirstRequest<kWarps>(begin + 1, maxima_, [](int) { return true; }) - 1;
  }
  __device__ __forceinline__ int Before(int chunk, int begin) const {
    if constexpr (Shape::kHasChannels) {
      if (chunk != begin) return this->PreviousChunk(chunk);
    }
    return chunk == begin ? begin - 1 : chunk - 1;
  }

  // The gradient of a slot that is written moves to the state that is written there.
  __device__ __forceinline__ void TakeGradient(const Item& item, int slot, float (&s)[kK / 8][4]) {
    ForGradients(item, slot, s, [&](float& x, State& pool) {
      x += this->ToFloat(pool);
      this->Store(pool, 0.0f);
    });
  }
  template <class Fn>
  __device__ __forceinline__ void ForGradients(const Item& item, int slot, float (&s)[kK / 8][4],
                                               const Fn& fn) {
    State* const pool = this->StateIn(params_.d_states, slot, item.head);
    this->template ForState<Shape::kDimV>(item, pool, s, fn);
  }

  // ahead: starts the copies of the chunk before.
  template <class Ahead>
  __device__ __forceinline__ void Step(const Item& item, int chunk, const StateChunk& rows,
                                       Stage& stage, const Ahead& ahead, float (&s)[kK / 8][4]) {
    float x[8][4];
    u32 d_o[4][4], fragments[4][4];
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      LoadTransposedA(d_o[step], SharedAddress(stage.v), 16 * step, 16 * warp_);
    }
    {
      u32 of_s[kK / 16][4];
      ToFragments<kDtype, kK / 16>(s, of_s);
      Products::Pin(of_s);
      Products::Start();
      Products::template Rows<false, false>(x, of_s, this->KeysUntilEnd(stage));
      Products::Commit();
      ahead();
      this->KeepState(item, this->Arrays().d_states, chunk, of_s);
      Products::template Wait<0>();
      Products::Pin(x);
    }
    if constexpr (!Shape::kHasChannels) this->ScaleTokens(x, stage.until_k);
    Products::Pin(d_o);
    Products::Pin(x);
    Products::Start();
    Products::template Columns<true, true>(x, d_o, SharedAddress(stage.qk));
    Products::Commit();
    this->DecayState(stage, s);
    Products::template Wait<0>();
    Products::Pin(x);
    if constexpr (Traits::kHasDeltaRule) {
      float y[8][4];
      ToFragments<kDtype, 4>(x, fragments);
      Products::Pin(fragments);
      Products::Start();
      Products::template Columns<false, true>(y, fragments, SharedAddress(stage.solve));
      Products::Commit();
      Products::template Wait<0>();
      Products::Pin(y);
      this->WriteTokens(item, rows, stage, this->template At<u16>(this->Arrays().d_r), y);
      if constexpr (!Shape::kHasChannels) this->ScaleTokens(y, stage.since_k);
      this->ScaleTokens(y, stage.beta);
      this->Scale(y, -1.0f);
      ToFragments<kDtype, 4>(y, fragments);
      Products::Pin(fragments);
    } else {
      this->WriteTokens(item, rows, stage, this->template At<u16>(this->Arrays().d_r), x);
    }
    if constexpr (!Shape::kHasChannels) ScaleFragments(d_o, stage.since_q);
    Products::Pin(d_o);
    Products::Pin(s);
    Products::Start();
    if constexpr (Traits::kHasDeltaRule) {
      Products::template Columns<true, false>(s, fragments, SharedAddress(stage.k));
    }
    Products::template Columns<true, false>(s, d_o, SharedAddress(stage.q));
    Products::Commit();
    Products::template Wait<0>();
    Products::Pin(s);
  }

  // Columns of fragments, which are tokens, times factors.
  __device__ __forceinline__ static void ScaleFragments(u32 (&x)[4][4], const float* factors) {
    const int lane = Base::Lane();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = 16 * step + i / 2 * 8 + lane % 4 * 2;
        const float2 f = *reinterpret_cast<const float2*>(&factors[token]);
        x[step][i] =
            E::Pack(HalfOf<kDtype>(x[step][i], 0) * f.x, HalfOf<kDtype>(x[step][i], 1) * f.y);
      }
    }
  }

  int* const maxima_;
};

}  // namespace jax_attn
