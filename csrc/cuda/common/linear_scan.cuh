// Chunked linear attention from chunk to chunk, for products by mma.sync or wgmma.
//
// Everything is transposed. A warp has 16 columns of v, and its part of the state, S^T [16, dim_k],
// in registers; with x (.) columns for factors of tokens, a chunk is
//   V'^T = (V^T - (S^T K^T) (.) since_k) solve^T
//   o^T  = (S^T Q^T) (.) since_q + V'^T qk^T
//   S^T <- decay S^T + (V'^T (.) until_k) K
// Results of one product are operand a of the next without leaving their registers, and warps never
// wait for each other but for tiles. Operands are rounded to 16 bits; sums, and S from chunk to
// chunk, are f32.
//
// Requests of more than segment_chunks chunks are split. A segment maps the state before it to
// M S + B; both are found from its last chunk to its first, with M = I and B = 0 behind the last:
//   Y = (M (K (.) until_k)^T) solve,  B += Y V,  M <- decay M - (Y (.) since_k) K
// Without the delta rule V' is beta V, and M is the product of the decays:
//   B += M (K (.) until_k)^T V',  M <- decay M
// sm80/linear_starts.cuh then goes from segment to segment. Where M has become 0, which decays do
// soon, nothing before matters: neither chunks of the segment nor earlier segments.
#pragma once

#include "cuda/common/budget.cuh"
#include "cuda/common/linear_places.cuh"
#include "cuda/common/linear_tiles.cuh"

namespace jax_attn {

// Shapes of both phases. kTheRows: rows that the warps have in registers. kHasQueries: not for
// maps.
template <class Traits, int kTheRows, bool kHasQueries = true>
struct LinearScanShape : LinearDims<Traits> {
  using LinearDims<Traits>::kK;
  static constexpr int kColumns = Traits::kTileColumns;  // of v
  static constexpr int kNumThreads = kTheRows / 16 * kWarpSize;
  static constexpr bool kIsGradient = IsGradientPhase(Traits::kPhase);
  static constexpr bool kHasChannels = Traits::kDecay == kChannelDecay;
  // Factors, of which beta is for gradients.
  static constexpr int kTermsVectors =
      static_cast<int>(sizeof(LinearTerms) - 4 * kLowerElements) / 16 +
      (kIsGradient ? kLinearTokens / 4 : 0);

  struct Stage {
    alignas(1024) unsigned char k[kK / 64 * kPartBytes];
    alignas(1024) unsigned char v[kColumns / 64 * kPartBytes];
    alignas(1024) unsigned char solve[kPartBytes];
    alignas(kHasQueries ? 1024 : 16) unsigned char q[kHasQueries ? kK / 64 * kPartBytes : 16];
    alignas(kHasQueries ? 1024 : 16) unsigned char qk[kHasQueries ? kPartBytes : 16];
    alignas(kHasChannels ? 1024
                         : 16) unsigned char k_until[kHasChannels ? kK / 64 * kPartBytes : 16];
    alignas(128) float since_k[kLinearTokens];
    float since_q[kLinearTokens];
    float until_k[kLinearTokens];
    float decay[32];
    float beta[kIsGradient ? kLinearTokens : 4];
    float channels[kHasChannels ? kK : 4];  // decays
  };
  static constexpr int kStages =
      2 * static_cast<int>(sizeof(Stage)) <= CtaSmemBudget(Traits::kArch, 1) ? 2 : 1;
};

// What the phases share: items of a segment, a v head and a tile of columns, and their tiles.
template <class Traits, class Shape>
class LinearScan : protected LinearPlaces<Traits> {
  using Places = LinearPlaces<Traits>;

 protected:
  using Params = LinearAttentionParams;
  using Stage = typename Shape::Stage;
  using Places::p_, Places::plan_;
  using typename Places::Terms;
  static constexpr int kDtype = Traits::kDtype;

  __device__ __forceinline__ LinearScan(const Params& p, Stage* stages)
      : Places(p), stages_(stages), warp_(Uniform(static_cast<int>(threadIdx.x) / kWarpSize)) {}

  __device__ __forceinline__ static int Lane() {
    return Opaque(static_cast<int>(threadIdx.x)) % kWarpSize;
  }

  struct Item {
    LinearSegment segment;
    int head, column;
  };
  __device__ __forceinline__ int NumItems() const {
    return this->NumSegments() * p_.num_v_heads * Shape::kColumnTiles;
  }
  // Heads of one segment, and with them those that share K, are neighbours.
  __device__ __forceinline__ Item GetItem(int index) const {
    const int of_segment = p_.num_v_heads * Shape::kColumnTiles;
    const int rest = index % of_segment;
    return {this->Segment(index / of_segment), rest / Shape::kColumnTiles,
            rest % Shape::kColumnTiles * Shape::kColumns};
  }

  using State = typename Conditional<Traits::kHasBf16States, u16, float>::Type;
  // [kDimK, kDimV] of a head, in a pool.
  __device__ __forceinline__ State* StateIn(void* pool, int slot, int head) const {
    const i64 number = (plan_.layer * plan_.num_slots + slot) * p_.num_v_heads + head;
    return static_cast<State*>(pool) + number * (Shape::kDimK * Shape::kDimV);
  }
  __device__ __forceinline__ State* StateOf(int slot, int head) const {
    return StateIn(p_.states, slot, head);
  }
  __device__ __forceinline__ static float ToFloat(State x) {
    if constexpr (Traits::kHasBf16States) return HalfOf<kElementBf16>(x, 0);
    return x;
  }
  __device__ __forceinline__ static void Store(State& to, float x) {
    if constexpr (Traits::kHasBf16States) {
      to = static_cast<u16>(PackBf16(x, 0.0f));
    } else {
      to = x;
    }
  }

  // Starts the copies of a chunk, which the caller commits. values: an array like v.
  template <bool kHasQueries, int kNumThreads = Shape::kNumThreads>
  __device__ __forceinline__ void LoadChunk(Stage& to, int chunk, const StateChunk& rows, int head,
                                            int column, const void* values) const {
    Terms& terms = this->TermsOf(chunk, head);
    LoadTile<Shape::kColumns, kNumThreads>(SharedAddress(to.v), values, rows.begin, rows.length,
                                           static_cast<i64>(p_.num_v_heads) * Shape::kDimV,
                                           static_cast<i64>(head) * Shape::kDimV + column,
                                           Shape::kDimV - column);
    if constexpr (Traits::kHasDeltaRule) {
      LoadLowerTile<kNumThreads>(SharedAddress(to.solve), terms.solve);
    }
    if constexpr (kHasQueries) LoadLowerTile<kNumThreads>(SharedAddress(to.qk), terms.qk);
    const auto load = [&](unsigned char* tile, const void* array, int num_heads, int of_head) {
      LoadTile<Shape::kK, kNumThreads>(SharedAddress(tile), array, rows.begin, rows.length,
                                       static_cast<i64>(num_heads) * Shape::kDimK,
                                       of_head * Shape::kDimK, Shape::kDimK);
    };
    if constexpr (Shape::kHasChannels) {
      const auto at = this->ChannelArrays();
      load(to.k, this->template At<u16>(at.k_since), p_.num_v_heads, head);
      if constexpr (kHasQueries)
        load(to.q, this->template At<u16>(at.q_since), p_.num_v_heads, head);
      load(to.k_until, this->template At<u16>(at.k_until), p_.num_v_heads, head);
      const int channel = static_cast<int>(threadIdx.x) % kNumThreads * 4;
      if (channel < Shape::kK) {
        CopyAsync16(SharedAddress(to.channels + channel), this->ChannelDecays(terms) + channel,
                    true);
      }
    } else {
      const int qk_head = head / (p_.num_v_heads / p_.num_qk_heads);
      load(to.k, p_.k, p_.num_qk_heads, qk_head);
      if constexpr (kHasQueries) load(to.q, p_.q, p_.num_qk_heads, qk_head);
    }
    const int vector = static_cast<int>(threadIdx.x) % kNumThreads;
    if (vector < Shape::kTermsVectors) {
      CopyAsync16(SharedAddress(to.since_k) + vector * 16,
                  reinterpret_cast<const char*>(terms.since_k) + vector * 16, true);
    }
  }

  // x[:, token] *= factors[token]
  __device__ __forceinline__ void ScaleTokens(float (&x)[8][4], const float* factors) const {
    const int lane = Lane();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 f = *reinterpret_cast<const float2*>(&factors[8 * j + lane % 4 * 2]);
      x[j][0] *= f.x;
      x[j][1] *= f.y;
      x[j][2] *= f.x;
      x[j][3] *= f.y;
    }
  }

  template <int kTiles>
  __device__ __forceinline__ static void Scale(float (&x)[kTiles][4], float factor) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) x[j][c] *= factor;
    }
  }

  Stage* const stages_;
  const int warp_;
};

// The maps of segments that others follow; warps have rows of M and B.
template <class Traits, class Products>
class LinearMapsPhase : LinearScan<Traits, LinearScanShape<Traits, LinearDims<Traits>::kK, false>> {
  using Shape = LinearScanShape<Traits, LinearDims<Traits>::kK, false>;
  using Base = LinearScan<Traits, Shape>;
  using Base::kDtype;
  using Base::p_, Base::plan_, Base::stages_, Base::warp_;
  using typename Base::Item;
  using typename Base::Stage;
  using E = Element<kDtype>;

 public:
  using Params = LinearAttentionParams;
  static constexpr int kNumThreads = Shape::kNumThreads;
  // All chunks of a short prompt's segments are on their way at once.
  static constexpr int kStages =
      Min(4, CtaSmemBudget(Traits::kArch, 1) / static_cast<int>(sizeof(Stage)));
  static_assert(kStages >= 2, "copies while products run");
  static constexpr int kSmemBytes = kStages * static_cast<int>(sizeof(Stage));
  static constexpr int kMinCtasPerSm = 1;

  __device__ __forceinline__ static void Run(const Params& p) {
    extern __shared__ __align__(1024) unsigned char smem[];
    LinearMapsPhase(p, reinterpret_cast<Stage*>(smem)).Run();
  }

 private:
  static constexpr int kK = Shape::kK, kColumns = Shape::kColumns;

  __device__ __forceinline__ LinearMapsPhase(const Params& p, Stage* stages) : Base(p, stages) {}

  __device__ __forceinline__ void Run() {
    const int num_items = this->NumItems();
    for (int i = static_cast<int>(blockIdx.x); i < num_items; i += static_cast<int>(gridDim.x)) {
      const Item item = this->GetItem(i);
      if (item.segment.is_followed) {
        RunItem(item);
      } else if (item.segment.begin != item.segment.first) {
        CopyState(item);  // here, where there is no map to compute
      }
    }
  }

  // Columns of the state before a request that is split.
  __device__ __forceinline__ void CopyState(const Item& item) {
    const int slot = plan_.Chunk(item.segment.first).read_slot;
    float* const to = this->MapState(this->Map(item.segment.first, item.head)) + item.column;
    constexpr int kVectors = kColumns / 4;  // of a row
#pragma unroll 8
    for (int i = static_cast<int>(threadIdx.x); i < Shape::kDimK * kVectors; i += kNumThreads) {
      const int k = i / kVectors, v = i % kVectors * 4;
      if (item.column + v >= Shape::kDimV) continue;
      float4 x = make_float4(0, 0, 0, 0);
      if (slot >= 0) {
        const auto* from = this->StateOf(slot, item.head) + k * Shape::kDimV + item.column + v;
        if constexpr (Traits::kHasBf16States) {
          const uint2 pairs = *reinterpret_cast<const uint2*>(from);
          x = make_float4(HalfOf<kElementBf16>(pairs.x, 0), HalfOf<kElementBf16>(pairs.x, 1),
                          HalfOf<kElementBf16>(pairs.y, 0), HalfOf<kElementBf16>(pairs.y, 1));
        } else {
          x = *reinterpret_cast<const float4*>(from);
        }
      }
      *reinterpret_cast<float4*>(to + static_cast<i64>(k) * Shape::kV + v) = x;
    }
  }

  __device__ __forceinline__ void RunItem(const Item& item) {
    constexpr int kAhead = kStages - 1;  // chunks on their way before the first one is computed
    const int last = item.segment.begin + p_.segment_chunks - 1;
    // The chunk of a step, and its row of the plan.
    const auto chunk_at = [&](int step) { return last - step; };
    const auto row_at = [&](int step) {
      return plan_.Chunk(Max(chunk_at(step), item.segment.begin));
    };
    const auto load = [&](int step, const StateChunk& rows) {
      if (step < p_.segment_chunks) {
        this->template LoadChunk<false>(stages_[step % kStages], chunk_at(step), rows, item.head,
                                        item.column, p_.v);
      }
      CommitCopies();
    };
    {
      StateChunk rows[kAhead];  // asked for at once
#pragma unroll
      for (int step = 0; step < kAhead; ++step) rows[step] = row_at(step);
#pragma unroll
      for (int step = 0; step < kAhead; ++step) load(step, rows[step]);
    }
    StateChunk next = row_at(kAhead);
    M m;
    float b[kColumns / 8][4];
    m.SetIdentity(16 * warp_);
    SetZero(b);
    bool is_zero = false;
    for (int step = 0; step < p_.segment_chunks; ++step) {
      WaitCopies<kAhead - 1>();
      Products::FenceTiles();
      // All threads that wait here have computed the step before.
      is_zero = step > 0 && !__syncthreads_or(!is_zero);
      if (step == 0) __syncthreads();
      if (is_zero) break;
      const Stage& stage = stages_[step % kStages];
      const auto ahead = [&] {
        load(step + kAhead, next);
        next = row_at(step + kStages);
      };
      if constexpr (Traits::kHasDeltaRule) {
        Step(stage, ahead, m.x, b);
      } else {
        ahead();
        StepOfSums(stage, m.x[0], b);
      }
      is_zero = m.Flush();
    }
    WaitCopies<0>();
    is_zero = !__syncthreads_or(!is_zero);
    WriteMap(item, is_zero, m, b);
  }

  // The warp's rows of M, or the number that it is a multiple of I by.
  struct Matrix {
    float x[kK / 8][4];
    __device__ __forceinline__ void SetIdentity(int first_row) {
      const int lane = Base::Lane();
#pragma unroll
      for (int j = 0; j < kK / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int row = first_row + lane / 4 + c / 2 * 8, column = 8 * j + lane % 4 * 2 + c % 2;
          x[j][c] = row == column ? 1.0f : 0.0f;
        }
      }
    }
    // Subnormal numbers count as 0, so that a product of decays becomes 0. NaN does not. Returns
    // whether all of the lane's are 0.
    __device__ __forceinline__ bool Flush() {
      bool is_zero = true;
#pragma unroll
      for (int j = 0; j < kK / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          if (fabsf(x[j][c]) < kSmallestNormal) x[j][c] = 0.0f;
          is_zero = is_zero && x[j][c] == 0.0f;
        }
      }
      return is_zero;
    }
  };
  struct Multiple {
    float x[1];
    __device__ __forceinline__ void SetIdentity(int) { x[0] = 1.0f; }
    __device__ __forceinline__ bool Flush() {
      if (fabsf(x[0]) < kSmallestNormal) x[0] = 0.0f;
      return x[0] == 0.0f;
    }
  };
  using M = typename Conditional<Traits::kHasDeltaRule, Matrix, Multiple>::Type;

  // Goes back over a chunk. ahead: starts the copies of the next one.
  template <class Ahead>
  __device__ __forceinline__ void Step(const Stage& stage, const Ahead& ahead,
                                       float (&m)[kK / 8][4], float (&b)[kColumns / 8][4]) {
    float x[8][4], y[8][4];
    u32 of_x[4][4], of_y[4][4];
    {
      u32 of_m[kK / 16][4];
      ToFragments<kDtype, kK / 16>(m, of_m);
      Products::Pin(of_m);
      Products::Start();
      Products::template Rows<false, false>(x, of_m, SharedAddress(stage.k));
      Products::Commit();
      this->Scale(m, stage.decay[0]);
      Products::template Wait<0>();
      Products::Pin(x);
    }
    this->ScaleTokens(x, stage.until_k);
    ToFragments<kDtype, 4>(x, of_x);
    Products::Pin(of_x);
    Products::Start();
    Products::template Columns<false, true>(y, of_x, SharedAddress(stage.solve));
    Products::Commit();
    ahead();
    Products::template Wait<0>();
    Products::Pin(y);
    ToFragments<kDtype, 4>(y, of_y);
    Products::Pin(of_y);
    Products::Pin(b);
    Products::Start();
    Products::template Columns<true, false>(b, of_y, SharedAddress(stage.v));
    Products::Commit();
    this->ScaleTokens(y, stage.since_k);
    this->Scale(y, -1.0f);
    ToFragments<kDtype, 4>(y, of_x);
    Products::Pin(of_x);
    Products::Pin(m);
    Products::Start();
    Products::template Columns<true, false>(m, of_x, SharedAddress(stage.k));
    Products::Commit();
    Products::template Wait<0>();
    Products::Pin(m);
    Products::Pin(b);
  }

  // The same without the delta rule.
  __device__ __forceinline__ void StepOfSums(const Stage& stage, float& m,
                                             float (&b)[kColumns / 8][4]) {
    const int lane = Base::Lane();
    u32 k[4][4];
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      LoadTransposedA(k[step], SharedAddress(stage.k), 16 * step, 16 * warp_);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = 16 * step + i / 2 * 8 + lane % 4 * 2;
        const float2 until = *reinterpret_cast<const float2*>(&stage.until_k[token]);
        const float2 beta = *reinterpret_cast<const float2*>(&stage.since_k[token]);
        k[step][i] = E::Pack(HalfOf<kDtype>(k[step][i], 0) * (m * until.x * beta.x),
                             HalfOf<kDtype>(k[step][i], 1) * (m * until.y * beta.y));
      }
    }
    Products::Pin(k);
    Products::Pin(b);
    Products::Start();
    Products::template Columns<true, false>(b, k, SharedAddress(stage.v));
    Products::Commit();
    Products::template Wait<0>();
    Products::Pin(b);
    m *= stage.decay[0];
  }

  __device__ __forceinline__ void WriteMap(const Item& item, bool is_zero, const M& m,
                                           const float (&b)[kColumns / 8][4]) {
    const int lane = Base::Lane();
    const i64 map = this->Map(item.segment.begin, item.head);
    const int row = 16 * warp_ + lane / 4;
    float* const to_b = this->MapB(map) + item.column;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float* const to =
            to_b + static_cast<i64>(row + 8 * half) * Shape::kV + 8 * j + lane % 4 * 2;
        *reinterpret_cast<float2*>(to) = make_float2(b[j][2 * half], b[j][2 * half + 1]);
      }
    }
    const bool is_one = item.column == 0 && threadIdx.x == 0;
    if (is_one) this->MapIsZero(map) = is_zero;
    if (is_zero) return;
    unsigned char* const to_m = this->MapM(map);
    if constexpr (!Traits::kHasDeltaRule) {
      if (is_one) *reinterpret_cast<float*>(to_m) = m.x[0];
      return;
    } else {
      WriteM(item.column / kColumns, m.x, to_m);
    }
  }

  // As pairs of bf16, in tiles. CTAs of other columns of v have the same M, and each writes a part.
  __device__ __forceinline__ void WriteM(int part, const float (&m)[kK / 8][4],
                                         unsigned char* to_m) {
    constexpr int kOfPart = CeilDiv(kK / 8, Shape::kColumnTiles);
    const int lane = Base::Lane(), row = 16 * warp_ + lane / 4;
#pragma unroll
    for (int j = 0; j < kK / 8; ++j) {
      if (j / kOfPart != part) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = row + 8 * half;
        const int at = r / 64 * (kK / 64 * kPartBytes) + SwizzledByte(r % 64, 8 * j + lane % 4 * 2);
        const u32 high = PackBf16(m[j][2 * half], m[j][2 * half + 1]);
        *reinterpret_cast<u32*>(to_m + at) = high;
        *reinterpret_cast<u32*>(to_m + kK * kK * 2 + at) =
            PackBf16(m[j][2 * half] - HalfOf<kElementBf16>(high, 0),
                     m[j][2 * half + 1] - HalfOf<kElementBf16>(high, 1));
      }
    }
  }

  static constexpr float kSmallestNormal = 1.17549435e-38f;
};

// What phases share whose warps have columns of v, and a state.
template <class Traits, class Products>
class LinearColumnScan
    : protected LinearScan<Traits, LinearScanShape<Traits, Traits::kTileColumns>> {
 protected:
  using Shape = LinearScanShape<Traits, Traits::kTileColumns>;
  using Base = LinearScan<Traits, Shape>;
  using Base::kDtype;
  using Base::p_, Base::plan_, Base::stages_, Base::warp_;
  using typename Base::Item;
  using typename Base::Stage;
  using typename Base::State;
  using E = Element<kDtype>;
  static constexpr int kK = Shape::kK, kStages = Shape::kStages;

  __device__ __forceinline__ LinearColumnScan(const LinearAttentionParams& p, Stage* stages)
      : Base(p, stages) {}

  // The chunk behind the last one that an item may have.
  __device__ __forceinline__ int EndOf(const Item& item) const {
    const int length = p_.segment_chunks;
    return length > 0 ? Min(plan_.num_chunks, item.segment.begin + length) : plan_.num_chunks;
  }

  // Calls fn(chunk, its tiles, ahead) for the item's chunks, in their order.
  // fn calls ahead() once to start the copies of the next chunk.
  template <bool kHasQueries, class Fn>
  __device__ __forceinline__ void ForChunks(const Item& item, const Fn& fn) {
    const int end = EndOf(item), begin = item.segment.begin;
    typename Base::Chunk loaded = this->ChunkAt(begin), next = loaded;
    bool has_next = true;  // a chunk of the item, whose copies have not started
    const auto load = [&](int stage) {
      if (has_next) {
        this->template LoadChunk<kHasQueries>(stages_[stage], next.number, next.rows, item.head,
                                              item.column, p_.v);
      }
      CommitCopies();
    };
    load(0);
    for (int step = 0; has_next; ++step) {
      loaded = next;
      next = this->ChunkAt(Min(loaded.next, plan_.num_chunks - 1));
      has_next = loaded.next < end && next.rows.is_first != 1;
      WaitCopies<0>();
      Products::FenceTiles();
      __syncthreads();  // all have computed the step before
      const auto ahead = [&] {
        if constexpr (kStages == 2) load((step + 1) % 2);
      };
      fn(loaded, stages_[kStages == 2 ? step % 2 : 0], ahead);
      if constexpr (kStages == 1) {
        __syncthreads();
        load(0);
      }
    }
    WaitCopies<0>();
  }

  // --- states ---

  // Calls fn(x, element) for the lane's elements x of S^T and where they are in an array [kDimK or
  // more, kPitch] of this head, from the item's columns on.
  template <int kPitch, class T, class Fn>
  __device__ __forceinline__ void ForState(const Item& item, T* array, float (&s)[kK / 8][4],
                                           const Fn& fn) {
    const int lane = Base::Lane(), row = lane % 4 * 2, column = 16 * warp_ + lane / 4;
    T* const first = array + row * kPitch + item.column + column;
#pragma unroll
    for (int j = 0; j < kK / 8; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int k = 8 * j + c % 2, v = c / 2 * 8;
        const bool is_element =
            (Shape::kDimK == kK || row + k < Shape::kDimK) &&
            (Shape::kDimV == Shape::kV || item.column + column + v < Shape::kDimV);
        if (is_element) fn(s[j][c], first[k * kPitch + v]);
      }
    }
  }

  // The state before the first chunk of a segment.
  __device__ __forceinline__ void BeginState(const Item& item, const StateChunk& rows,
                                             float (&s)[kK / 8][4]) {
    const LinearSegment segment = item.segment;
    SetZero(s);
    if (segment.begin == segment.first && !segment.is_followed) {
      if (rows.read_slot < 0) return;
      return ForState<Shape::kDimV>(item, this->StateOf(rows.read_slot, item.head), s,
                                    [&](float& x, const State& from) { x = this->ToFloat(from); });
    }
    Add(item,
        segment.begin == segment.first
            ? this->MapState(this->Map(segment.first, item.head))
            : this->MapB(this->Map(segment.begin - p_.segment_chunks, item.head)),
        s);
  }

  __device__ __forceinline__ void Add(const Item& item, const float* b, float (&s)[kK / 8][4]) {
    ForState<Shape::kV>(item, b, s, [&](float& x, const float& from) { x += from; });
  }

  __device__ __forceinline__ void WriteState(const Item& item, int slot, float (&s)[kK / 8][4]) {
    ForState<Shape::kDimV>(item, this->StateOf(slot, item.head), s,
                           [&](float& x, State& to) { this->Store(to, x); });
  }

  // Columns of S^T times the decays of their channels.
  __device__ __forceinline__ static void ScaleChannels(float (&s)[kK / 8][4], const float* decays) {
    const int lane = Base::Lane();
#pragma unroll
    for (int j = 0; j < kK / 8; ++j) {
      const float2 f = *reinterpret_cast<const float2*>(&decays[8 * j + lane % 4 * 2]);
      s[j][0] *= f.x;
      s[j][1] *= f.y;
      s[j][2] *= f.x;
      s[j][3] *= f.y;
    }
  }

  // x <- V^T - x (.) since_k, or V^T (.) beta.
  __device__ __forceinline__ void TakeValues(const Stage& stage, float (&x)[8][4]) {
    const int lane = Base::Lane();
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      // Two blocks of 8 tokens, each with 8 and 8 columns.
      u32 v[4];
      LoadTransposedA(v, SharedAddress(stage.v), 8 * j, 16 * warp_);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int tile = j + i / 2, half = i % 2;
        const float2 f = *reinterpret_cast<const float2*>(&stage.since_k[8 * tile + lane % 4 * 2]);
        float (&to)[4] = x[tile];
        const float v0 = HalfOf<kDtype>(v[i], 0), v1 = HalfOf<kDtype>(v[i], 1);
        if constexpr (Traits::kHasDeltaRule) {
          to[2 * half] = fmaf(-f.x, to[2 * half], v0);
          to[2 * half + 1] = fmaf(-f.y, to[2 * half + 1], v1);
        } else {
          to[2 * half] = f.x * v0;
          to[2 * half + 1] = f.y * v1;
        }
      }
    }
  }

  // Writes the chunk's rows of an array like v, from transposed rows of the warp. Through the tile
  // of V, of which the warp alone reads and writes its columns.
  __device__ __forceinline__ void WriteTokens(const Item& item, const StateChunk& rows,
                                              Stage& stage, u16* array, const float (&o)[8][4]) {
    const int lane = Base::Lane();
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      Products::StoreTransposed(stage.v, 8 * j, 16 * warp_, E::Pack(o[j][0], o[j][1]),
                                E::Pack(o[j][2], o[j][3]));
    }
    __syncwarp();
    const int vector = 2 * warp_ + lane % 2, column = item.column + vector * 8;
    u16* const to = array + static_cast<i64>(item.head) * Shape::kDimV + column;
    const i64 pitch = static_cast<i64>(p_.num_v_heads) * Shape::kDimV;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = 16 * i + lane / 2;
      if (token >= rows.length || column >= Shape::kDimV) continue;
      StoreVector(to + (rows.begin + token) * pitch,
                  *reinterpret_cast<const uint4*>(stage.v + SwizzledByte(token, vector * 8)));
    }
  }
};

// Outputs, and the states behind chunks; warps have columns of v.
template <class Traits, class Products>
class LinearOutputsPhase : LinearColumnScan<Traits, Products> {
  using Base = LinearColumnScan<Traits, Products>;
  using Base::kDtype, Base::kK;
  using Base::p_, Base::plan_, Base::stages_;
  using typename Base::Item;
  using typename Base::Shape;
  using typename Base::Stage;

 public:
  using Params = LinearAttentionParams;
  static constexpr bool kHasProducer = Products::kHasProducer && !Shape::kHasChannels;
  static constexpr int kConsumerThreads = Shape::kNumThreads, kProducerThreads = 128;
  static constexpr int kNumThreads = kConsumerThreads + (kHasProducer ? kProducerThreads : 0);
  static constexpr int kStages =
      kHasProducer && 3 * static_cast<int>(sizeof(Stage)) + 1024 <= CtaSmemBudget(Traits::kArch, 1)
          ? 3
          : Shape::kStages;
  // With 384 threads, a thread begins with 168 registers.
  static constexpr bool kMovesRegisters = kNumThreads > 256;
  struct Shared {
    Stage stages[kStages];
    typename Products::template Ring<kStages> ring;
  };
  static constexpr int kSmemBytes = sizeof(Shared);
  static constexpr int kMinCtasPerSm = 1;
  static_assert(kStages == Shape::kStages || kHasProducer, "stages of ForChunks");

  __device__ __forceinline__ static void Run(const Params& p) {
    extern __shared__ __align__(1024) unsigned char smem[];
    LinearOutputsPhase(p, *reinterpret_cast<Shared*>(smem)).Run();
  }

 private:
  __device__ __forceinline__ LinearOutputsPhase(const Params& p, Shared& shared)
      : Base(p, shared.stages), shared_(shared) {}

  __device__ __forceinline__ void Run() {
    plan_.template FillOtherRows<kDtype, 8>(p_.o, p_.plan.max_tokens,
                                            static_cast<i64>(p_.num_v_heads) * Shape::kDimV);
    if constexpr (kHasProducer) {
      if (threadIdx.x == 0) shared_.ring.Init(kProducerThreads, kConsumerThreads / kWarpSize);
      __syncthreads();
      if (threadIdx.x >= kConsumerThreads) {
        if constexpr (kMovesRegisters) Products::BecomeProducer();
        ForItems([&](const Item& item, int* turn) { Produce(item, turn); });
      } else {
        if constexpr (kMovesRegisters) Products::BecomeConsumer();
        ForItems([&](const Item& item, int* turn) { Consume(item, turn); });
      }
    } else {
      ForItems([&](const Item& item, int*) {
        RunItem(item);
        __syncthreads();
      });
    }
  }

  template <class Fn>
  __device__ __forceinline__ void ForItems(const Fn& fn) const {
    const int num_items = this->NumItems();
    int turn = 0;
    for (int i = static_cast<int>(blockIdx.x); i < num_items; i += static_cast<int>(gridDim.x)) {
      fn(this->GetItem(i), &turn);
    }
  }

  // --- a warpgroup copies, others compute ---

  // turn: of the ring.
  __device__ __forceinline__ void Produce(const Item& item, int* turn) const {
    const int end = this->EndOf(item);
    int chunk = item.segment.begin;
    StateChunk rows = plan_.Chunk(chunk);
    do {
      const StateChunk next = plan_.Chunk(Min(chunk + 1, plan_.num_chunks - 1));
      shared_.ring.WaitEmpty(*turn);
      this->template LoadChunk<true, kProducerThreads>(shared_.stages[*turn % kStages], chunk, rows,
                                                       item.head, item.column, p_.v);
      shared_.ring.ArriveFull(*turn);
      ++*turn;
      ++chunk;
      rows = next;
    } while (chunk < end && rows.is_first != 1);
  }

  __device__ __forceinline__ void Consume(const Item& item, int* turn) {
    const int end = this->EndOf(item);
    int chunk = item.segment.begin;
    float s[kK / 8][4];
    StateChunk next = plan_.Chunk(chunk);
    this->BeginState(item, next, s);
    do {
      const StateChunk rows = next;
      next = plan_.Chunk(Min(chunk + 1, plan_.num_chunks - 1));
      shared_.ring.WaitFull(*turn);
      Products::FenceTiles();
      Step(item, rows, shared_.stages[*turn % kStages], [] {}, s);
      shared_.ring.ArriveEmpty(*turn);
      if (rows.write_slot >= 0) this->WriteState(item, rows.write_slot, s);
      ++*turn;
      ++chunk;
    } while (chunk < end && next.is_first != 1);
  }

  // --- every warp does both ---

  __device__ __forceinline__ void RunItem(const Item& item) {
    float s[kK / 8][4];
    this->BeginState(item, plan_.Chunk(item.segment.begin), s);
    this->template ForChunks<true>(
        item, [&](const typename Base::Chunk& chunk, Stage& stage, const auto& ahead) {
          Step(item, chunk.rows, stage, ahead, s);
          if (chunk.rows.write_slot >= 0) this->WriteState(item, chunk.rows.write_slot, s);
        });
  }

  // --- one chunk ---

  // ahead: starts the copies of the next chunk.
  template <class Ahead>
  __device__ __forceinline__ void Step(const Item& item, const StateChunk& rows, Stage& stage,
                                       const Ahead& ahead, float (&s)[kK / 8][4]) {
    float x[8][4], o[8][4];
    u32 fragments[4][4];
    {
      u32 of_s[kK / 16][4];
      ToFragments<kDtype, kK / 16>(s, of_s);
      Products::Pin(of_s);
      Products::Start();
      if constexpr (Traits::kHasDeltaRule) {
        Products::template Rows<false, false>(x, of_s, SharedAddress(stage.k));
        Products::Commit();
      }
      Products::template Rows<false, false>(o, of_s, SharedAddress(stage.q));
      Products::Commit();
      ahead();
      if constexpr (Traits::kHasDeltaRule) {
        Products::template Wait<1>();
        Products::Pin(x);
      }
      this->TakeValues(stage, x);
      if constexpr (Traits::kHasDeltaRule) {
        ToFragments<kDtype, 4>(x, fragments);
        Products::Pin(fragments);
        Products::Start();
        Products::template Rows<false, true>(x, fragments, SharedAddress(stage.solve));
        Products::Commit();
      }
      Products::template Wait<Traits::kHasDeltaRule ? 1 : 0>();
      Products::Pin(o);
    }
    if constexpr (Shape::kHasChannels) {
      this->ScaleChannels(s, stage.channels);
    } else {
      this->ScaleTokens(o, stage.since_q);
      this->Scale(s, stage.decay[0]);
    }
    if constexpr (Traits::kHasDeltaRule) {
      Products::template Wait<0>();
      Products::Pin(x);
    }
    // x is V'^T.
    u32 kept[4][4];
    ToFragments<kDtype, 4>(x, fragments);
    Products::Pin(fragments);
    Products::Pin(o);
    Products::Start();
    Products::template Rows<true, true>(o, fragments, SharedAddress(stage.qk));
    Products::Commit();
    if constexpr (!Shape::kHasChannels) this->ScaleTokens(x, stage.until_k);
    ToFragments<kDtype, 4>(x, kept);
    Products::Pin(kept);
    Products::Pin(s);
    Products::Start();
    Products::template Columns<true, false>(
        s, kept, SharedAddress(Shape::kHasChannels ? stage.k_until : stage.k));
    Products::Commit();
    Products::template Wait<1>();
    Products::Pin(o);
    this->WriteTokens(item, rows, stage, static_cast<u16*>(p_.o), o);
    Products::template Wait<0>();
    Products::Pin(s);
  }

  Shared& shared_;
};

}  // namespace jax_attn
