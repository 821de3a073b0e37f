// What a chunk of linear attention computes without its state (LinearTerms), all chunks at once.
//
// A CTA has a chunk and neighbouring v heads of one q and k head, whose products K K^T and Q K^T it
// computes once. Each of its four warps has 16 of the chunk's 64 rows.
#pragma once

#include "cuda/common/budget.cuh"
#include "cuda/common/linear_places.cuh"
#include "cuda/common/linear_tiles.cuh"
#include "cuda/sm80/linear_inverse.cuh"

namespace jax_attn {

template <class Traits>
class LinearTermsPhase : LinearPlaces<Traits> {
  using Places = LinearPlaces<Traits>;
  using Places::p_, Places::plan_, Places::kIsGradient;
  using typename Places::Terms;

 public:
  using Params = LinearAttentionParams;
  static constexpr int kDtype = Traits::kDtype;
  using E = Element<kDtype>;

  static constexpr int kDimK = Places::Dims::kDimK, kK = Places::Dims::kK;
  static constexpr int kNumThreads = 128;
  static constexpr int kWarps = kNumThreads / kWarpSize, kBlocks = kLinearTokens / 16;
  static_assert(kWarps == kBlocks, "a warp has a row of blocks");

  struct Tiles {
    alignas(1024) unsigned char k[kK / 64 * kPartBytes];
    alignas(1024) unsigned char q[kK / 64 * kPartBytes];
  };
  // Behind the products, in the place of the tiles.
  struct Blocks {
    // K K^T and Q K^T up to the diagonal, as accumulators: tiles of 16 x 8 of the warps in turn.
    float4 products[2][2 * kBlocks * (kBlocks + 1) / 2][kWarpSize];
    LinearPairs pairs;
  };
  struct Shared {
    union {
      Tiles tiles;
      Blocks blocks;
    };
    alignas(16) float diagonal[kWarps][16][16];  // of A
    float sums[kWarps][kLinearTokens];           // each warp's own copies; G in units of log2
    float beta[kWarps][kLinearTokens];
    float norms[2][kLinearTokens];  // of k and q
  };
  static constexpr int kSmemBytes = sizeof(Shared);
  static constexpr int kMostCtas = Places::kIsGradient ? 4 : 5;  // that registers allow
  static constexpr int kMinCtasPerSm =
      CtaSmemBudget(Traits::kArch, kMostCtas) >= kSmemBytes ? kMostCtas : 2;

  __device__ __forceinline__ static void Run(const Params& p) {
    extern __shared__ __align__(1024) unsigned char smem[];
    LinearTermsPhase(p, *reinterpret_cast<Shared*>(smem)).Run();
  }

 private:
  __device__ __forceinline__ LinearTermsPhase(const Params& p, Shared& shared)
      : Places(p), shared_(shared), warp_(Uniform(static_cast<int>(threadIdx.x) / kWarpSize)) {}

  // Places are computed where they are used: products leave no registers to keep them.
  __device__ __forceinline__ static int Lane() {
    return Opaque(static_cast<int>(threadIdx.x)) % kWarpSize;
  }

  __device__ __forceinline__ void Run() {
    if (blockIdx.x == 0) return this->ListSegments();
    // Behind the first CTA the grid has so many for each chunk.
    const int cta = static_cast<int>(blockIdx.x) - 1;
    const int parts = (static_cast<int>(gridDim.x) - 1) / Max(p_.plan.max_chunks, 1);
    const int chunk = cta / parts, part = cta % parts;
    if (chunk >= plan_.num_chunks) return;
    const StateChunk rows = plan_.Chunk(chunk);
    const int num_heads = p_.num_v_heads / parts, head = part * num_heads;
    const int qk_head = head / (p_.num_v_heads / p_.num_qk_heads);
    const i64 pitch = static_cast<i64>(p_.num_qk_heads) * kDimK;
    LoadTile<kK, kNumThreads>(SharedAddress(shared_.tiles.k), p_.k, rows.begin, rows.length, pitch,
                              qk_head * kDimK, kDimK);
    LoadTile<kK, kNumThreads>(SharedAddress(shared_.tiles.q), p_.q, rows.begin, rows.length, pitch,
                              qk_head * kDimK, kDimK);
    CommitCopies();
    WaitCopies<0>();
    __syncthreads();
    FindNorms();
    MultiplyRows();
    __syncthreads();  // norms
    HeadTokens tokens(p_, rows, head);
#pragma unroll 1
    for (int h = head; h < head + num_heads; ++h) {
      if (h > head) __syncthreads();  // blocks of the head before are read
      SumDecays(tokens);
      if (h + 1 < head + num_heads) tokens = HeadTokens(p_, rows, h + 1);
      Terms& terms = this->TermsOf(Opaque(chunk), h);
      WriteFactors(terms);
      SplitProducts(terms);
      if constexpr (Traits::kHasDeltaRule) {
        Inverse().InvertDiagonal();
        __syncthreads();
        Inverse().template Substitute<!kIsGradient>(shared_.beta[warp_], terms.solve);
      }
    }
  }

  // --- products of rows ---

  __device__ __forceinline__ void FindNorms() {
    const int row = static_cast<int>(threadIdx.x) % kLinearTokens;
    const int which = static_cast<int>(threadIdx.x) / kLinearTokens;
    shared_.norms[which][row] =
        NormFactor<Traits, kK>(which == 0 ? shared_.tiles.k : shared_.tiles.q, row);
  }

  // The warp's rows of K K^T and Q K^T, up to the diagonal.
  __device__ __forceinline__ void MultiplyRows() {
    float kk[8][4], qk[8][4];
    const u32 k_tile = SharedAddress(shared_.tiles.k), q_tile = SharedAddress(shared_.tiles.q);
    SetZero(kk);
    SetZero(qk);
#pragma unroll 2
    for (int step = 0; step < kK / 16; ++step) {
      u32 k[4], q[4];
      if constexpr (Traits::kHasDeltaRule) LoadA(k, k_tile, 16 * warp_, 16 * step);
      LoadA(q, q_tile, 16 * warp_, 16 * step);
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        if (j > warp_) break;
        u32 b[4];
        LoadRowsB(b, k_tile, 16 * j, 16 * step);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if constexpr (Traits::kHasDeltaRule) E::Mma(kk[2 * j + i], k, b[2 * i], b[2 * i + 1]);
          E::Mma(qk[2 * j + i], q, b[2 * i], b[2 * i + 1]);
        }
      }
    }
    __syncthreads();  // tiles are read
    const int lane = Lane();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (j / 2 > warp_) break;
      const auto write = [&](int which, const float (&x)[4]) {
        shared_.blocks.products[which][FirstTile() + j][lane] = make_float4(x[0], x[1], x[2], x[3]);
      };
      if constexpr (Traits::kHasDeltaRule) write(0, kk[j]);
      write(1, qk[j]);
    }
  }
  // The warp's first tile of the products.
  __device__ __forceinline__ int FirstTile() const { return warp_ * (warp_ + 1); }

  // --- a head ---

  // The log decays and beta of two of the chunk's tokens, which the lane loads a head ahead.
  struct HeadTokens {
    float g[2], beta[2];
    __device__ __forceinline__ HeadTokens(const Params& p, const StateChunk& rows, int head) {
      const int lane = Lane();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int token = half * kWarpSize + lane;
        const i64 at = static_cast<i64>(rows.begin + token) * p.num_v_heads + head;
        g[half] = beta[half] = 0.0f;
        if (token >= rows.length) continue;
        if constexpr (Traits::kDecay != kNoDecay) g[half] = p.g[at];
        beta[half] = p.beta ? p.beta[at] : 1.0f;
      }
    }
  };

  // Sums of log decays of the chunk's tokens. Each warp has its own copies.
  __device__ __forceinline__ void SumDecays(const HeadTokens& tokens) {
    const int lane = Lane();
    float total = 0.0f;
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = 0.0f;
      if constexpr (Traits::kDecay != kNoDecay) {
        sum = (tokens.g[half] < kLowestDecayLog ? kLowestDecayLog : tokens.g[half]) * kLog2E;
#pragma unroll
        for (int distance = 1; distance < kWarpSize; distance *= 2) {
          const float before = __shfl_up_sync(kFullWarp, sum, distance);
          if (lane >= distance) sum += before;
        }
        sum += total;
        total = __shfl_sync(kFullWarp, sum, kWarpSize - 1);
      }
      shared_.sums[warp_][half * kWarpSize + lane] = sum;
      shared_.beta[warp_][half * kWarpSize + lane] = tokens.beta[half];
    }
    __syncwarp();
  }

  __device__ __forceinline__ void WriteFactors(Terms& terms) {
    const int lane = Lane();
    if (warp_ != 0) return;
    const float total = shared_.sums[0][kLinearTokens - 1];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = half * kWarpSize + lane;
      const float sum = shared_.sums[0][token], since = Exp2(sum);
      const float k = shared_.norms[0][token];
      terms.since_k[token] = Traits::kHasDeltaRule ? since * k : shared_.beta[0][token];
      terms.since_q[token] = p_.scale * since * shared_.norms[1][token];
      terms.until_k[token] = Exp2(total - sum) * k;
      if constexpr (kIsGradient) {
        terms.beta[token] = shared_.beta[0][token];
        terms.sums[token] = sum;
      }
    }
    terms.decay[lane] = Exp2(total);
  }

  // Writes the warp's rows of q k^T, and of A: below the diagonal as pairs, blocks on it as f32.
  __device__ __forceinline__ void SplitProducts(Terms& terms) {
    const int lane = Lane();
    const float* sums = shared_.sums[warp_];
    const int first_row = 16 * warp_ + lane / 4;
    float of_row[2], k_row[2], q_row[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + 8 * half;
      of_row[half] = sums[row];
      k_row[half] = shared_.norms[0][row] * shared_.beta[warp_][row];
      q_row[half] = shared_.norms[1][row] * p_.scale;
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (j / 2 > warp_) break;
      const bool is_diagonal = j / 2 == warp_;
      const int column = 8 * j + lane % 4 * 2;
      const float2 of_column = *reinterpret_cast<const float2*>(&sums[column]);
      const float2 norms = *reinterpret_cast<const float2*>(&shared_.norms[0][column]);
      const float4 qk = shared_.blocks.products[1][FirstTile() + j][lane];
      float4 kk = make_float4(0, 0, 0, 0);
      if constexpr (Traits::kHasDeltaRule) kk = shared_.blocks.products[0][FirstTile() + j][lane];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row + 8 * half;
        float x = Exp2(of_row[half] - of_column.x) * norms.x;
        float y = Exp2(of_row[half] - of_column.y) * norms.y;
        if (is_diagonal) {
          if (row < column) x = 0.0f;
          if (row < column + 1) y = 0.0f;
        }
        *reinterpret_cast<u32*>(terms.qk + LowerIndex(row, column)) =
            E::Pack(Product(half == 0 ? qk.x : qk.z, x, q_row[half]),
                    Product(half == 0 ? qk.y : qk.w, y, q_row[half]));
        if constexpr (!Traits::kHasDeltaRule) continue;
        if (is_diagonal && row == column) x = 0.0f;
        if (is_diagonal && row == column + 1) y = 0.0f;
        const float a0 = Product(half == 0 ? kk.x : kk.z, x, k_row[half]);
        const float a1 = Product(half == 0 ? kk.y : kk.w, y, k_row[half]);
        if (is_diagonal) {
          float* const to = &shared_.diagonal[warp_][row % 16][column % 16];
          *reinterpret_cast<float2*>(to) = make_float2(a0, a1);
        } else {
          shared_.blocks.pairs.Set(row, column, a0, a1);
        }
      }
    }
  }

  // 0 where the decay is, whatever the product of rows is.
  __device__ __forceinline__ static float Product(float x, float decay, float factor) {
    return decay == 0.0f ? 0.0f : x * (decay * factor);
  }

  __device__ __forceinline__ LinearInverse<kDtype> Inverse() const {
    return {shared_.blocks.pairs, shared_.diagonal, warp_};
  }

  Shared& shared_;
  const int warp_;
};

}  // namespace jax_attn
