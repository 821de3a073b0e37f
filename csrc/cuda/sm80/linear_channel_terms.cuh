// kLinearTerms and kLinearGradientTerms with a decay a channel (LinearChannelTerms): what chunks
// compute without their states, all chunks at once.
//
// A CTA has a chunk and some v heads, one after the other. Each of its four warps has 16 of the
// chunk's 64 rows, a row of blocks of A and of Q K^T. Nothing is a quotient of exponentials, which
// overflow. Left of the diagonal, block I has the decays from the first row of I to its rows i, and
// from earlier rows j to the first row of I, both at most 1:
//   A[i, j] = sum over channels of (k_i exp(G_i - G_first)) (k_j exp(G_first - G_j))
// as mma; on the diagonal pairs of rows have exp(G_i - G_j) channel by channel, in f32.
#pragma once

#include "cuda/common/budget.cuh"
#include "cuda/common/linear_places.cuh"
#include "cuda/common/linear_tiles.cuh"
#include "cuda/sm80/linear_inverse.cuh"

namespace jax_attn {

template <class Traits>
class LinearChannelTermsPhase : LinearPlaces<Traits> {
  using Places = LinearPlaces<Traits>;
  using Places::p_, Places::plan_, Places::kIsGradient;
  using typename Places::Terms;

 public:
  using Params = LinearAttentionParams;
  static constexpr int kDtype = Traits::kDtype;
  using E = Element<kDtype>;
  static constexpr bool kHasDeltaRule = Traits::kHasDeltaRule;
  static constexpr int kDimK = Places::Dims::kDimK, kK = Places::Dims::kK;
  static constexpr int kNumThreads = 128, kWarps = kNumThreads / kWarpSize;
  // Words between rows of G: lanes of eight rows read other banks.
  static constexpr int kPitch = kK + 8;

  struct Shared {
    alignas(1024) unsigned char k[kK / 64 * kPartBytes];
    alignas(1024) unsigned char q[kK / 64 * kPartBytes];
    LinearPairs pairs;
    alignas(16) float sums[kLinearTokens][kPitch];  // G in units of log2
    alignas(16) float diagonal[kWarps][16][16];     // of A
    float norms[2][kLinearTokens];                  // of k and q, the latter times scale
    float beta[kLinearTokens];
    int maxima[kWarps];
  };
  static constexpr int kSmemBytes = sizeof(Shared);
  static constexpr int kMinCtasPerSm = CtaSmemBudget(Traits::kArch, 2) >= kSmemBytes ? 2 : 1;

  __device__ __forceinline__ static void Run(const Params& p) {
    extern __shared__ __align__(1024) unsigned char smem[];
    LinearChannelTermsPhase(p, *reinterpret_cast<Shared*>(smem)).Run();
  }

 private:
  __device__ __forceinline__ LinearChannelTermsPhase(const Params& p, Shared& shared)
      : Places(p), shared_(shared), warp_(Uniform(static_cast<int>(threadIdx.x) / kWarpSize)) {}

  __device__ __forceinline__ static int Lane() {
    return Opaque(static_cast<int>(threadIdx.x)) % kWarpSize;
  }

  __device__ __forceinline__ void Run() {
    if (blockIdx.x == 0) return this->ListSegments();
    // Behind the first CTA the grid has so many for each chunk of the plan.
    const int cta = static_cast<int>(blockIdx.x) - 1;
    const int parts = (static_cast<int>(gridDim.x) - 1) / Max(p_.plan.max_chunks, 1);
    const int number = cta / parts, part = cta % parts;
    if (number >= plan_.num_chunks || !BeginsChunk(number)) return;
    const StateChunk rows = this->ChunkAt(number).rows;
    const int num_heads = p_.num_v_heads / parts;
#pragma unroll 1
    for (int h = 0; h < num_heads; ++h) RunHead(rows, number, part * num_heads + h);
  }

  __device__ __forceinline__ void RunHead(const StateChunk& rows, int number, int head) {
    const i64 pitch = static_cast<i64>(p_.num_qk_heads) * kDimK;
    const i64 first = head / (p_.num_v_heads / p_.num_qk_heads) * kDimK;
    __syncthreads();  // the head before is done
    LoadTile<kK, kNumThreads>(SharedAddress(shared_.k), p_.k, rows.begin, rows.length, pitch, first,
                              kDimK);
    LoadTile<kK, kNumThreads>(SharedAddress(shared_.q), p_.q, rows.begin, rows.length, pitch, first,
                              kDimK);
    CommitCopies();
    SumDecays(rows, head);
    WaitCopies<0>();
    __syncthreads();
    FindNorms();
    __syncthreads();
    Terms& terms = this->TermsOf(number, head);
    WriteRows(terms, rows, head);
    MultiplyBlocks(terms);
    MultiplyDiagonal(terms);
    if constexpr (kHasDeltaRule) {
      LinearInverse<kDtype> inverse(shared_.pairs, shared_.diagonal, warp_);
      inverse.InvertDiagonal();
      __syncthreads();
      inverse.template Substitute<!kIsGradient>(shared_.beta, terms.solve);
    }
  }

  // Whether tokens that are computed together begin with this chunk: their number from the last
  // border on is a multiple of four.
  __device__ __forceinline__ bool BeginsChunk(int number) const {
    constexpr int kAhead = 8;  // so many chunks a thread looks at, in one trip to memory
    int border = -1;
    for (int end = number; border < 0; end -= kAhead * kNumThreads) {
      int found = 0;
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int at = end - i * kNumThreads - static_cast<int>(threadIdx.x);
        if (at >= 0 && this->IsBorder(at)) found = Max(found, at + 1);
      }
      border = BlockMax<kWarps>(found, shared_.maxima) - 1;
    }
    return (number - border) % (kLinearTokens / kChannelTokens) == 0;
  }

  // A thread sums a channel.
  __device__ __forceinline__ void SumDecays(const StateChunk& rows, int head) {
    for (int d = static_cast<int>(threadIdx.x); d < kK; d += kNumThreads) {
      const float* g = p_.g + (static_cast<i64>(rows.begin) * p_.num_v_heads + head) * kDimK + d;
      const i64 pitch = static_cast<i64>(p_.num_v_heads) * kDimK;
      float sum = 0.0f;
#pragma unroll 8
      for (int token = 0; token < kLinearTokens; ++token) {
        float log = 0.0f;
        if (d < kDimK && token < rows.length) log = g[token * pitch];
        sum += (log < kLowestDecayLog ? kLowestDecayLog : log) * kLog2E;
        shared_.sums[token][d] = sum;
      }
    }
    if (static_cast<int>(threadIdx.x) >= kLinearTokens) return;
    const int token = static_cast<int>(threadIdx.x);
    float beta = 0.0f;
    if (token < rows.length) {
      const i64 at = static_cast<i64>(rows.begin + token) * p_.num_v_heads + head;
      beta = p_.beta ? p_.beta[at] : 1.0f;
    }
    shared_.beta[token] = beta;
  }

  __device__ __forceinline__ void FindNorms() {
    const int row = static_cast<int>(threadIdx.x) % kLinearTokens;
    const int which = static_cast<int>(threadIdx.x) / kLinearTokens;
    shared_.norms[which][row] = NormFactor<Traits, kK>(which == 0 ? shared_.k : shared_.q, row) *
                                (which == 0 ? 1.0f : p_.scale);
  }

  // 0 where the decay is, whatever x is.
  __device__ __forceinline__ static float Decayed(float x, float decay) {
    return decay == 0.0f ? 0.0f : x * decay;
  }

  // Rows with the decays since the chunk began and until it ends.
  __device__ __forceinline__ void WriteRows(Terms& terms, const StateChunk& rows, int head) const {
    constexpr int kVectors = kDimK / 8;  // of a row
    const auto arrays = this->ChannelArrays();
    const float* const last = shared_.sums[kLinearTokens - 1];
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < rows.length * kVectors; i += kNumThreads) {
      const int row = i / kVectors, channel = i % kVectors * 8, at = SwizzledByte(row, channel);
      const uint4 k = *reinterpret_cast<const uint4*>(shared_.k + at);
      const uint4 q = *reinterpret_cast<const uint4*>(shared_.q + at);
      const u32 of_k[4] = {k.x, k.y, k.z, k.w}, of_q[4] = {q.x, q.y, q.z, q.w};
      const float k_norm = shared_.norms[0][row], q_norm = shared_.norms[1][row];
      u32 tiles[3][4];
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        float x[3][2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float sum = shared_.sums[row][channel + 2 * pair + c];
          const float since = Exp2(sum), until = Exp2(last[channel + 2 * pair + c] - sum);
          const float key = HalfOf<kDtype>(of_k[pair], c) * k_norm;
          x[0][c] = Decayed(key, since);
          x[1][c] = Decayed(HalfOf<kDtype>(of_q[pair], c) * q_norm, since);
          x[2][c] = Decayed(key, until);
        }
#pragma unroll
        for (int tile = 0; tile < 3; ++tile) tiles[tile][pair] = E::Pack(x[tile][0], x[tile][1]);
      }
      const i64 to = (static_cast<i64>(rows.begin + row) * p_.num_v_heads + head) * kDimK + channel;
      const i64 offsets[3] = {arrays.k_since, arrays.q_since, arrays.k_until};
#pragma unroll
      for (int tile = 0; tile < 3; ++tile) {
        StoreVector(this->template At<u16>(offsets[tile]) + to,
                    make_uint4(tiles[tile][0], tiles[tile][1], tiles[tile][2], tiles[tile][3]));
      }
    }
    for (int d = static_cast<int>(threadIdx.x); d < kK; d += kNumThreads) {
      this->ChannelDecays(terms)[d] = Exp2(last[d]);
    }
    if (static_cast<int>(threadIdx.x) < kLinearTokens) {
      const int token = static_cast<int>(threadIdx.x);
      terms.since_k[token] = kHasDeltaRule ? 1.0f : shared_.beta[token];
      if constexpr (kIsGradient) terms.beta[token] = shared_.beta[token];
    }
  }

  // Fragments of 16 x 16 elements of k or q, times exp2(from - G) or exp2(G - from) and norms.
  // Element e of register i is of row (row of i) and channel (channel of i) + e.
  template <bool kIsLater>
  __device__ __forceinline__ void Decay(u32 (&x)[4], const float (&norms)[kLinearTokens],
                                        const float* from, const int (&rows)[4],
                                        const int (&channels)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 sum = *reinterpret_cast<const float2*>(&shared_.sums[rows[i]][channels[i]]);
      const float2 base = *reinterpret_cast<const float2*>(&from[channels[i]]);
      const float a = kIsLater ? sum.x - base.x : base.x - sum.x;
      const float b = kIsLater ? sum.y - base.y : base.y - sum.y;
      const float norm = norms[rows[i]];
      x[i] = E::Pack(Decayed(HalfOf<kDtype>(x[i], 0) * norm, Exp2(a)),
                     Decayed(HalfOf<kDtype>(x[i], 1) * norm, Exp2(b)));
    }
  }

  // The warp's blocks left of the diagonal.
  __device__ __forceinline__ void MultiplyBlocks(Terms& terms) {
    const int lane = Lane();
    const float* const from = shared_.sums[16 * warp_];
    float kk[6][4], qk[6][4];
    SetZero(kk);
    SetZero(qk);
#pragma unroll 1
    for (int step = 0; step < kK / 16; ++step) {
      const int channel = 16 * step + lane % 4 * 2, row = lane / 4;
      u32 k[4], q[4];
      LoadA(q, SharedAddress(shared_.q), 16 * warp_, 16 * step);
      {
        // Operand a has rows +0, +8, +0, +8, channels +0, +0, +8, +8.
        const int first = 16 * warp_ + row;
        const int rows[4] = {first, first + 8, first, first + 8};
        const int channels[4] = {channel, channel, channel + 8, channel + 8};
        Decay<true>(q, shared_.norms[1], from, rows, channels);
        if constexpr (kHasDeltaRule) {
          LoadA(k, SharedAddress(shared_.k), 16 * warp_, 16 * step);
          Decay<true>(k, shared_.norms[0], from, rows, channels);
        }
      }
#pragma unroll
      for (int j = 0; j < 3; ++j) {
        if (j >= warp_) break;
        u32 b[4];
        LoadRowsB(b, SharedAddress(shared_.k), 16 * j, 16 * step);
        // Operand b has rows +0, +0, +8, +8, channels +0, +8, +0, +8.
        const int first = 16 * j + row;
        const int rows[4] = {first, first, first + 8, first + 8};
        const int channels[4] = {channel, channel + 8, channel, channel + 8};
        Decay<false>(b, shared_.norms[0], from, rows, channels);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          E::Mma(qk[2 * j + i], q, b[2 * i], b[2 * i + 1]);
          if constexpr (kHasDeltaRule) E::Mma(kk[2 * j + i], k, b[2 * i], b[2 * i + 1]);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < 6; ++j) {
      if (j / 2 >= warp_) break;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = 16 * warp_ + lane / 4 + 8 * half, column = 8 * j + lane % 4 * 2;
        *reinterpret_cast<u32*>(terms.qk + LowerIndex(row, column)) =
            E::Pack(qk[j][2 * half], qk[j][2 * half + 1]);
        if constexpr (kHasDeltaRule) {
          const float beta = shared_.beta[row];
          shared_.pairs.Set(row, column, beta * kk[j][2 * half], beta * kk[j][2 * half + 1]);
        }
      }
    }
  }

  // The warp's block on the diagonal. A lane has a row and half of the channels.
  __device__ __forceinline__ void MultiplyDiagonal(Terms& terms) {
    constexpr int kHalf = kK / 2;
    const int lane = Lane(), own = 16 * warp_ + lane % 16, half = lane / 16;
    float kk[16], qk[16];
#pragma unroll
    for (int j = 0; j < 16; ++j) kk[j] = qk[j] = 0.0f;
#pragma unroll 1
    for (int channel = half * kHalf; channel < (half + 1) * kHalf; channel += 4) {
      float k[4], q[4], sums[4];
      Read4(shared_.k, own, channel, k);
      Read4(shared_.q, own, channel, q);
      ReadSums4(own, channel, sums);
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        float other[4], of_other[4];
        Read4(shared_.k, 16 * warp_ + j, channel, other);
        ReadSums4(16 * warp_ + j, channel, of_other);
        if (lane % 16 < j) continue;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const float x = Decayed(other[c], Exp2(sums[c] - of_other[c]));
          qk[j] = fmaf(q[c], x, qk[j]);
          if constexpr (kHasDeltaRule) kk[j] = fmaf(k[c], x, kk[j]);
        }
      }
    }
    const float k_norm = shared_.norms[0][own], q_norm = shared_.norms[1][own];
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const float norm = shared_.norms[0][16 * warp_ + j];
      qk[j] += __shfl_xor_sync(kFullWarp, qk[j], 16);
      qk[j] *= q_norm * norm;
      if constexpr (kHasDeltaRule) {
        kk[j] += __shfl_xor_sync(kFullWarp, kk[j], 16);
        const float factor = shared_.beta[own] * k_norm * norm;
        if (half == 0) shared_.diagonal[warp_][own % 16][j] = j < own % 16 ? factor * kk[j] : 0.0f;
      }
    }
    if (half == 0) {
#pragma unroll
      for (int j = 0; j < 16; j += 2) {
        *reinterpret_cast<u32*>(terms.qk + LowerIndex(own, 16 * warp_ + j)) =
            E::Pack(qk[j], qk[j + 1]);
      }
    }
  }
  __device__ __forceinline__ static void Read4(const unsigned char* tile, int row, int channel,
                                               float (&x)[4]) {
    const uint2 pairs = *reinterpret_cast<const uint2*>(tile + SwizzledByte(row, channel));
    x[0] = HalfOf<kDtype>(pairs.x, 0);
    x[1] = HalfOf<kDtype>(pairs.x, 1);
    x[2] = HalfOf<kDtype>(pairs.y, 0);
    x[3] = HalfOf<kDtype>(pairs.y, 1);
  }
  __device__ __forceinline__ void ReadSums4(int row, int channel, float (&x)[4]) const {
    const float4 sums = *reinterpret_cast<const float4*>(&shared_.sums[row][channel]);
    x[0] = sums.x;
    x[1] = sums.y;
    x[2] = sums.z;
    x[3] = sums.w;
  }

  Shared& shared_;
  const int warp_;
};

}  // namespace jax_attn
