// Linear attention token by token, with the states in registers: decode, drafts, and whatever has
// no chunked loop. Memory bound for a few tokens a request: each state is read once and written
// once.
//
// A CTA has kTileColumns columns of the state of one v head of a request, from its first token to
// its last. With the decay D of a token, k' = D k and q' = D q:
//   change = beta (v - S^T k'),   o = S^T q' + (q . k) change,   S <- D S + k change^T
// so one pass over S gives both products and a second one updates it. Every sum has one order,
// whatever else is in the batch.
#pragma once

#include "cuda/common/budget.cuh"
#include "cuda/common/state_plan.cuh"

namespace jax_attn {

template <class Traits>
struct LinearRecurrenceBody {
  using Params = LinearAttentionParams;
  static constexpr int kDtype = Traits::kDtype;
  static constexpr int kDimK = Traits::kHeadDimK, kDimV = Traits::kHeadDimV;
  static constexpr bool kHasDeltaRule = Traits::kHasDeltaRule;
  static constexpr bool kHasBf16States = Traits::kHasBf16States;

  static constexpr RecurrenceTile kTile =
      RecurrenceTileOf(kDimK, kDimV, kHasBf16States, Traits::kTileColumns);
  static constexpr int kVector = kTile.vector;
  static constexpr int kColumnLanes = kRecurrenceColumnLanes, kRowLanes = kRecurrenceRowLanes;
  static constexpr int kWarpColumns = kColumnLanes * kVector;
  static constexpr int kColumnWarps = kTile.column_warps, kRowWarps = kTile.row_warps;
  static constexpr int kColumns = kColumnWarps * kWarpColumns;  // the last ones may be behind kDimV
  static constexpr int kRows = kTile.rows;                      // of a lane
  static constexpr int kPaddedDimK = kRowWarps * kRows * kRowLanes;
  static constexpr int kNumWarps = kColumnWarps * kRowWarps;
  static constexpr int kNumThreads = kTile.num_threads();
  // With more rows 128 registers are not enough for what q and k of a token take.
  static constexpr int kMinCtasPerSm =
      kDimK > 128 ? 1 : Max(1, kRecurrenceResidentThreads / kNumThreads);
  static constexpr int kTiles = CeilDiv(kDimV, Traits::kTileColumns);
  static_assert(Traits::kTileColumns % kWarpColumns == 0 || kTiles == 1, "tiles are whole warps");

  static constexpr int kTokens = kDimK > 128 ? 4 : 8;  // that are prepared together

  // A channel of a token: decay * k, decay * q, k, decay. q has the scale; both are normalized.
  struct Tokens {
    float4 channels[kTokens][kPaddedDimK];
    float4 v[kTokens][kColumns / 4];
    float beta[kTokens], qk[kTokens];
    // S^T k' and S^T q' of the rows of each warp, for every other token, so that one barrier a
    // token is enough.
    float4 sums[2][kRowWarps][2][kColumns / 4];
  };
  // States of units to come. A thread copies what it will read itself, so nobody waits for others.
  using Stage = uint4[kRows][kNumThreads];
  static constexpr bool kHasTwoStages = static_cast<int>(sizeof(Tokens) + 2 * sizeof(Stage)) <=
                                        CtaSmemBudget(Traits::kArch, kMinCtasPerSm);
  static constexpr int kStages = kHasTwoStages ? 2 : 1;
  struct Smem : Tokens {
    Stage states[kStages];
  };
  static constexpr int kSmemBytes = static_cast<int>(sizeof(Smem));

  __device__ __forceinline__ static void Run(const Params& p) {
    extern __shared__ __align__(128) unsigned char smem[];
    LinearRecurrenceBody(p, *reinterpret_cast<Smem*>(smem)).RunUnits();
  }

 private:
  __device__ __forceinline__ LinearRecurrenceBody(const Params& p, Smem& s)
      : p_(p), s_(s), plan_(p.plan) {}

  // A unit is a tile of columns of a head of the request that begins at a chunk; most chunks of
  // long requests begin none.
  struct Unit {
    int chunk, head, first_column;
    // round: of this CTA.
    __device__ __forceinline__ Unit(u32 round, int num_v_heads) {
      const u32 unit = static_cast<u32>(blockIdx.x) + round * static_cast<u32>(gridDim.x);
      const u32 of_chunk = static_cast<u32>(num_v_heads * kTiles);
      const int rest = static_cast<int>(unit % of_chunk);
      chunk = static_cast<int>(unit / of_chunk);
      head = rest / kTiles;
      first_column = kTiles == 1 ? 0 : rest % kTiles * Traits::kTileColumns;
    }
  };

  __device__ __forceinline__ void RunUnits() {
    plan_.template FillOtherRows<kDtype, 4>(p_.o, p_.plan.max_tokens,
                                            static_cast<i64>(p_.num_v_heads) * kDimV);
#pragma unroll
    for (u32 i = 0; i < kStages; ++i) Copy(i);
#pragma unroll 1
    for (u32 round = 0;; ++round) {
      const Unit unit(round, p_.num_v_heads);
      if (unit.chunk >= plan_.num_chunks) break;
      head_ = unit.head;
      first_column_ = unit.first_column;
      RunUnit(unit.chunk, round);
    }
    WaitCopies<0>();
  }

  __device__ __forceinline__ void RunUnit(int index, u32 round) {
    StateChunk chunk = plan_.Chunk(index);
    const bool begins = index == 0 || chunk.is_first == 1;
    bool has_state = false;
#pragma unroll 1
    while (true) {
      int done = 0;
#pragma unroll 1
      do {
        const int num = begins ? Min(kTokens, chunk.length - done) : 0;
        if (num > 0) Prepare(chunk.begin + done, num);  // the first ones while the state arrives
        if (!has_state) {
          has_state = true;
          WaitCopies<kStages - 1>();
          Widen(round % kStages);
          Copy(round + kStages);
        }
        if (num == 0) break;
        __syncthreads();
#pragma unroll 1
        for (int t = 0; t < num; ++t) Token(chunk.begin + done + t, t);
        __syncthreads();  // the tokens have been used
        done += kTokens;
        // Read again, since the state leaves no registers to keep it.
        chunk = plan_.Chunk(index);
      } while (done < chunk.length);
      if (!begins) return;
      if (chunk.write_slot >= 0) Write(chunk.write_slot);
      ++index;
      if (index >= plan_.num_chunks || plan_.IsFirst(index)) return;
      chunk = plan_.Chunk(index);
    }
  }

  // The part of a tile that a thread has. It is computed where it is used: the state leaves no
  // registers to keep it.
  struct Part {
    int row_lane, row_warp;
    int column;  // of the tile: the lane's first
    __device__ __forceinline__ Part() {
      const u32 thread = static_cast<u32>(Opaque(static_cast<int>(threadIdx.x)));
      const u32 lane = thread % kWarpSize, warp = thread / kWarpSize;
      row_lane = static_cast<int>(lane / kColumnLanes);
      row_warp = static_cast<int>(warp / kColumnWarps);
      column = static_cast<int>(warp % kColumnWarps * kWarpColumns + lane % kColumnLanes * kVector);
    }
    __device__ __forceinline__ int Row(int i) const {
      return (row_warp * kRows + i) * kRowLanes + row_lane;
    }
    __device__ __forceinline__ bool HasRow(int i) const {
      return kPaddedDimK == kDimK || Row(i) < kDimK;
    }
  };

  // --- the state ---

  // The lane's first vector in the pool.
  __device__ __forceinline__ char* Place(const Part& part, int slot, int head,
                                         int first_column) const {
    const i64 state = (plan_.layer * plan_.num_slots + slot) * p_.num_v_heads + head;
    const i64 element = (state * kDimK + part.Row(0)) * kDimV + first_column + part.column;
    return static_cast<char*>(p_.states) + element * (kHasBf16States ? 2 : 4);
  }
  static constexpr int kStepBytes = kRowLanes * kDimV * (kHasBf16States ? 2 : 4);

  // Copies the state that a round's unit reads, if there is one; zeros for slot -1 and behind the
  // last column.
  __device__ __forceinline__ void Copy(u32 round) {
    const Unit unit(round, p_.num_v_heads);
    if (unit.chunk < plan_.num_chunks && plan_.IsFirst(unit.chunk)) {
      const Part part;
      const int slot = plan_.Chunk(unit.chunk).read_slot;
      const bool loads = slot >= 0 && unit.first_column + part.column < kDimV;
      const char* from = Place(part, Max(slot, 0), unit.head, unit.first_column);
      uint4* const to = &s_.states[round % kStages][0][threadIdx.x];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const bool valid = loads && part.HasRow(i);
        CopyAsync16(SharedAddress(to + i * kNumThreads), valid ? from + i * kStepBytes : from,
                    valid);
      }
    }
    CommitCopies();
  }

  __device__ __forceinline__ void Widen(u32 stage) {
    const uint4* const from = &s_.states[stage][0][threadIdx.x];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const uint4 raw = from[i * kNumThreads];
      const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
      for (int c = 0; c < kVector; ++c) {
        if constexpr (kHasBf16States) {
          const u32 word = words[c / 2];
          state_[i][c] = __uint_as_float(c % 2 == 0 ? word << 16 : word & 0xffff0000u);
        } else {
          state_[i][c] = __uint_as_float(words[c]);
        }
      }
    }
  }

  __device__ __forceinline__ void Write(int slot) const {
    const Part part;
    char* to = Place(part, slot, head_, first_column_);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (first_column_ + part.column >= kDimV || !part.HasRow(i)) continue;
      const float (&x)[kVector] = state_[i];
      uint4 words;
      if constexpr (kHasBf16States) {
        words = make_uint4(PackBf16(x[0], x[1]), PackBf16(x[2], x[3]), PackBf16(x[4], x[5]),
                           PackBf16(x[6], x[7]));
      } else {
        words = make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
                           __float_as_uint(x[3]));
      }
      StoreVector(to + i * kStepBytes, words);
    }
  }

  // --- tokens ---

  // q, k, v, g and beta of `num` tokens: a warp has the channels of a token, or its columns.
  __device__ __forceinline__ void Prepare(int first, int num) {
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
#pragma unroll 1
    for (int i = warp; i < 2 * num; i += kNumWarps) {
      const i64 token = first + i / 2;
      if (i % 2 == 0) {
        PrepareChannels(token, i / 2);
      } else {
        PrepareColumns(token * p_.num_v_heads + head_, i / 2);
      }
    }
  }

  __device__ __forceinline__ void PrepareChannels(i64 token, int t) {
    constexpr int kChannels = CeilDiv(kPaddedDimK, kWarpSize);  // of a lane
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int qk_head = head_ * p_.num_qk_heads / p_.num_v_heads;
    const i64 at = (token * p_.num_qk_heads + qk_head) * kDimK;
    const i64 of_head = token * p_.num_v_heads + head_;
    float q[kChannels], k[kChannels], decay[kChannels];
    float of_channels = 1.0f;
    if constexpr (Traits::kDecay == kHeadDecay) of_channels = Decay(p_.g + of_head);
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      const int d = i * kWarpSize + lane;
      const bool is_channel = d < kDimK;
      q[i] = is_channel ? LoadElement<kDtype>(p_.q, at + d) : 0.0f;
      k[i] = is_channel ? LoadElement<kDtype>(p_.k, at + d) : 0.0f;
      decay[i] = of_channels;
      if constexpr (Traits::kDecay == kChannelDecay) {
        decay[i] = is_channel ? Decay(p_.g + of_head * kDimK + d) : 1.0f;
      }
    }
    float q_factor = p_.scale, k_factor = 1.0f;
    if constexpr (Traits::kHasL2Norm) {
      float q_squares = 0.0f, k_squares = 0.0f;
#pragma unroll
      for (int i = 0; i < kChannels; ++i) {
        q_squares = fmaf(q[i], q[i], q_squares);
        k_squares = fmaf(k[i], k[i], k_squares);
      }
      q_factor *= ReciprocalRoot(WarpSumOf(q_squares) + kL2NormEpsilon);
      k_factor = ReciprocalRoot(WarpSumOf(k_squares) + kL2NormEpsilon);
    }
    float qk = 0.0f;
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      q[i] *= q_factor;
      k[i] *= k_factor;
      qk = fmaf(q[i], k[i], qk);
      const int d = i * kWarpSize + lane;
      if (d < kPaddedDimK) {
        s_.channels[t][d] = make_float4(decay[i] * k[i], decay[i] * q[i], k[i], decay[i]);
      }
    }
    qk = WarpSumOf(qk);
    if (lane == 0) s_.qk[t] = qk;
  }

  // of_head: the token's number times heads, and the head.
  __device__ __forceinline__ void PrepareColumns(i64 of_head, int t) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const float beta =
        p_.beta != nullptr ? __uint_as_float(LoadOperand32(p_.beta + of_head)) : 1.0f;
    float v[kColumns / kWarpSize];
#pragma unroll
    for (int i = 0; i < kColumns / kWarpSize; ++i) {
      const int column = first_column_ + i * kWarpSize + lane;
      v[i] = column < kDimV ? LoadElement<kDtype>(p_.v, of_head * kDimV + column) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kColumns / kWarpSize; ++i) {
      reinterpret_cast<float*>(s_.v[t])[i * kWarpSize + lane] = v[i];
    }
    if (lane == 0) s_.beta[t] = beta;
  }

  // exp(g); NaN stays NaN.
  __device__ __forceinline__ static float Decay(const float* g) {
    const float log = __uint_as_float(LoadOperand32(g));
    return Exp2((log < kLowestDecayLog ? kLowestDecayLog : log) * kLog2E);
  }

  // Prepared token t, row `token` of o.
  __device__ __forceinline__ void Token(int token, int t) {
    const int parity = t % 2;
    const Part part;
    const float4* channels = &s_.channels[t][part.Row(0)];
    float of_k[kVector] = {}, of_q[kVector] = {};
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float4 channel = channels[i * kRowLanes];
#pragma unroll
      for (int c = 0; c < kVector; ++c) {
        if (kHasDeltaRule) of_k[c] = fmaf(channel.x, state_[i][c], of_k[c]);
        of_q[c] = fmaf(channel.y, state_[i][c], of_q[c]);
      }
    }
    Share(part, of_k, of_q, parity);
    __syncthreads();

    float change[kVector];
    const bool has_o =
        part.row_warp == 0 && part.row_lane == 0 && first_column_ + part.column < kDimV;
    const float beta = s_.beta[t];
#pragma unroll
    for (int c = 0; c < kVector; c += 4) Spread(s_.v[t][(part.column + c) / 4], &change[c]);
    if constexpr (kHasDeltaRule) {
      Sum(part, parity, 0, of_k);
#pragma unroll
      for (int c = 0; c < kVector; ++c) change[c] -= of_k[c];
    }
#pragma unroll
    for (int c = 0; c < kVector; ++c) change[c] *= beta;
    if (has_o) {
      Sum(part, parity, 1, of_q);
      const float qk = s_.qk[t];
      const i64 at = (static_cast<i64>(token) * p_.num_v_heads + head_) * kDimV + first_column_;
#pragma unroll
      for (int c = 0; c < kVector; c += 4) {
        const float4 o =
            make_float4(fmaf(qk, change[c], of_q[c]), fmaf(qk, change[c + 1], of_q[c + 1]),
                        fmaf(qk, change[c + 2], of_q[c + 2]), fmaf(qk, change[c + 3], of_q[c + 3]));
        Store4<kDtype>(p_.o, at + part.column + c, o);
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float4 channel = channels[i * kRowLanes];
#pragma unroll
      for (int c = 0; c < kVector; ++c) {
        float& x = state_[i][c];
        if constexpr (Traits::kDecay != kNoDecay) x *= channel.w;
        x = fmaf(channel.z, change[c], x);
      }
    }
  }

  // Sums over the row lanes of a warp, for the other warps. Each lane keeps half of what it has
  // twice: first sums of k or of q, then half of the columns.
  __device__ __forceinline__ void Share(const Part& part, const float (&of_k)[kVector],
                                        const float (&of_q)[kVector], int parity) {
    const bool keeps_q = (part.row_lane & 1) != 0, keeps_high = (part.row_lane & 2) != 0;
    float sums[kVector];
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
      const float gives = keeps_q ? of_k[c] : of_q[c], keeps = keeps_q ? of_q[c] : of_k[c];
      sums[c] = keeps + __shfl_xor_sync(kFullWarp, gives, kColumnLanes);
    }
    float halves[kVector / 2];
#pragma unroll
    for (int c = 0; c < kVector / 2; ++c) {
      const float high = sums[kVector / 2 + c], low = sums[c];
      const float gives = keeps_high ? low : high, keeps = keeps_high ? high : low;
      halves[c] = keeps + __shfl_xor_sync(kFullWarp, gives, 2 * kColumnLanes);
    }
    float* to = reinterpret_cast<float*>(s_.sums[parity][part.row_warp][keeps_q]) + part.column +
                (keeps_high ? kVector / 2 : 0);
    if constexpr (kVector == 8) {
      *reinterpret_cast<float4*>(to) = make_float4(halves[0], halves[1], halves[2], halves[3]);
    } else {
      *reinterpret_cast<float2*>(to) = make_float2(halves[0], halves[1]);
    }
  }
  // Sums over the row warps, for the lane's columns. which: 0 of k, 1 of q.
  __device__ __forceinline__ void Sum(const Part& part, int parity, int which,
                                      float (&sums)[kVector]) const {
#pragma unroll
    for (int c = 0; c < kVector; ++c) sums[c] = 0.0f;
#pragma unroll(kVector == 8 ? 1 : 2)
    for (int w = 0; w < kRowWarps; ++w) {
#pragma unroll
      for (int c = 0; c < kVector; c += 4) {
        float x[4];
        Spread(s_.sums[parity][w][which][(part.column + c) / 4], x);
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[c + i] += x[i];
      }
    }
  }

  __device__ __forceinline__ static void Spread(float4 from, float* to) {
    to[0] = from.x;
    to[1] = from.y;
    to[2] = from.z;
    to[3] = from.w;
  }

  const Params& p_;
  Smem& s_;
  const StatePlanView plan_;
  int head_, first_column_;  // of the unit
  float state_[kRows][kVector];
};

}  // namespace jax_attn
