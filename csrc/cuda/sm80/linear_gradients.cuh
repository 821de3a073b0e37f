// The gradients of q, k, v, g and beta in chunks of linear attention, from the states before them
// and the gradients of the states behind them (common/linear_gradient_scan.cuh), all chunks at
// once.
//
// A CTA has a chunk and a q and k head, and goes through the head's v heads. With D[i, j] =
// exp(G_i - G_j), x n(x) rows of the call's q and k with their l2 norm factors, and q with scale:
//   a = -D (.) beta tril(dR V'^T, -1),  b = D (.) tril(dO V'^T)
//   dQ = since (.) (dO S^T) + b K
//   dK = -beta since (.) (dR S^T) + until (.) (V' dS^T) + a K + a^T K + b^T Q
//   dV = beta dR,  dbeta = rows of dR . (V - since (.) (K S)) - D (.) K K^T (.) tril(dR V'^T, -1)
// and the gradient of G is what these have of q and k in common with q and k. Factors n(k) and
// scale n(q) are with a, b, since and until, so that tiles are as in memory, and dQ and dK come out
// times them: what is left of the gradient of a norm is to take off their part along q and k.
#pragma once

#include "cuda/sm80/linear_gradient_parts.cuh"

namespace jax_attn {

template <class Traits>
class LinearGradientsPhase : LinearGradientParts<Traits> {
  using Base = LinearGradientParts<Traits>;
  using Base::kBlocks, Base::kDimK, Base::kDimV, Base::kDtype, Base::kHalf, Base::kHasDeltaRule;
  using Base::kK, Base::kParts, Base::kTiles;
  using Base::Lane, Base::Row;
  using Base::p_, Base::plan_, Base::params_, Base::warp_, Base::block_, Base::half_;
  using typename Base::E;
  using typename Base::Image;
  using typename Base::Part;

 public:
  using Base::kNumThreads, Base::kWarps, Base::kMinCtasPerSm;
  using typename Base::Params;

  struct Fixed {
    alignas(1024) unsigned char k[kK / 64 * kPartBytes];
    alignas(1024) unsigned char q[kK / 64 * kPartBytes];
    alignas(1024) unsigned char a[kPartBytes];
    alignas(1024) unsigned char b[kPartBytes];
    // K K^T and Q K^T up to the diagonal, as accumulators: tiles of 16 x 8 by rows of blocks.
    float4 products[2][2 * kBlocks * (kBlocks + 1) / 2][kWarpSize];
    float norms[2][kLinearTokens];  // of k and q
    float since_k[kLinearTokens], since_q[kLinearTokens], until_k[kLinearTokens];
    float beta[kLinearTokens], sums[kLinearTokens];
    // Parts of sums over channels or columns.
    float of_q[2][kLinearTokens], of_beta[2][kLinearTokens], of_until[2][kLinearTokens];
    float of_rows[2][kLinearTokens], of_inner[2][kLinearTokens], of_columns[4][kLinearTokens];
    float of_values[kLinearTokens];
    float of_states[kWarps];
    float decay;
  };
  static constexpr int kBuffers =
      static_cast<int>(sizeof(Fixed) + 2 * sizeof(Part)) <= CtaSmemBudget(Traits::kArch, 1) ? 2 : 1;
  struct Shared : Fixed {
    Part parts[kBuffers];
  };
  static constexpr int kSmemBytes = sizeof(Shared);

  __device__ __forceinline__ static void Run(const Params& p) {
    extern __shared__ __align__(1024) unsigned char smem[];
    LinearGradientsPhase(p, *reinterpret_cast<Shared*>(smem)).Run();
  }

 private:
  __device__ __forceinline__ LinearGradientsPhase(const Params& params, Shared& shared)
      : Base(params), shared_(shared) {}

  __device__ __forceinline__ void Run() {
    this->FillPadding();
    const int chunk = static_cast<int>(blockIdx.x) / p_.num_qk_heads;
    if (chunk >= plan_.num_chunks) return;
    const StateChunk rows = plan_.Chunk(chunk);
    if (rows.length == 0) return;
    RunChunk(chunk, rows, static_cast<int>(blockIdx.x) % p_.num_qk_heads);
  }

  struct Sums {
    float x[kTiles][4];
  };

  __device__ __forceinline__ void RunChunk(int chunk, const StateChunk& rows, int qk_head) {
    const int group = p_.num_v_heads / p_.num_qk_heads, head = qk_head * group;
    const i64 pitch = static_cast<i64>(p_.num_qk_heads) * kDimK;
    LoadTile<kK, kNumThreads>(SharedAddress(shared_.k), p_.k, rows.begin, rows.length, pitch,
                              qk_head * kDimK, kDimK);
    LoadTile<kK, kNumThreads>(SharedAddress(shared_.q), p_.q, rows.begin, rows.length, pitch,
                              qk_head * kDimK, kDimK);
    CommitCopies();
    const int num_turns = group * kParts;
    int to_load = 0;
    const auto load = [&] {
      if (to_load < num_turns) {
        this->LoadPart(shared_.parts[to_load % kBuffers], chunk, rows, head + to_load / kParts,
                       to_load % kParts);
        ++to_load;
      }
      CommitCopies();
    };
    load();
    WaitCopies<1>();
    __syncthreads();
    this->FindNorms(shared_.k, shared_.q, shared_.norms);
    MultiplyRows();

    Sums d_q, d_k;  // of all heads
    SetZero(d_q.x);
    SetZero(d_k.x);
    int turn = 0;
    for (int h = head; h < head + group; ++h) {
      __syncthreads();  // the head before has been written
      LoadFactors(chunk, h);
      Sums y, x, w;                    // dO S^T, dR S^T, V' dS^T
      float upper[4][4], lower[4][4];  // dO V'^T, dR V'^T: columns of the warp's half
      SetZero(y.x);
      SetZero(x.x);
      SetZero(w.x);
      SetZero(upper);
      SetZero(lower);
      float of_states = 0.0f, of_values = 0.0f;
      for (int part = 0; part < kParts; ++part, ++turn) {
        if constexpr (kBuffers == 2) load();
        WaitCopies<kBuffers - 1>();
        __syncthreads();
        const Part& tiles = shared_.parts[turn % kBuffers];
        this->MultiplyPart(tiles, y.x, x.x, w.x, upper, lower);
        of_states += StateProducts(tiles);
        of_values += this->WriteValues(tiles, rows, h, part, shared_.beta);
        __syncthreads();  // tiles are read
        if constexpr (kBuffers == 1) load();
      }
      FinishHead(rows, h, of_states, of_values, y.x, x.x, w.x, upper, lower, d_q.x, d_k.x);
    }
    WriteRows(rows, qk_head, d_q.x, d_k.x);
  }

  __device__ __forceinline__ void LoadFactors(int chunk, int head) {
    const LinearGradientTerms& terms = this->TermsOf(chunk, head);
    const int token = static_cast<int>(threadIdx.x) % kLinearTokens;
    const int which = static_cast<int>(threadIdx.x) / kLinearTokens;
    if (which == 0) {
      shared_.since_k[token] = terms.since_k[token];
      shared_.sums[token] = terms.sums[token];
    } else if (which == 1) {
      shared_.since_q[token] = terms.since_q[token];
    } else if (which == 2) {
      shared_.until_k[token] = terms.until_k[token];
    } else {
      shared_.beta[token] = terms.beta[token];
      if (token == 0) shared_.decay = terms.decay[0];
    }
  }

  // First of the tiles of a row of blocks in `products`.
  __device__ __forceinline__ int FirstTile() const { return block_ * (block_ + 1); }

  // The warp's rows of K K^T or Q K^T, up to the diagonal.
  __device__ __forceinline__ void MultiplyRows() {
    if (half_ == 0 && !kHasDeltaRule) return;
    float sums[8][4];
    SetZero(sums);
    const u32 k_tile = SharedAddress(shared_.k);
    const u32 rows = half_ == 0 ? k_tile : SharedAddress(shared_.q);
#pragma unroll 2
    for (int step = 0; step < kK / 16; ++step) {
      u32 a[4];
      LoadA(a, rows, 16 * block_, 16 * step);
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        if (j > block_) break;
        u32 b[4];
        LoadRowsB(b, k_tile, 16 * j, 16 * step);
        E::Mma(sums[2 * j], a, b[0], b[1]);
        E::Mma(sums[2 * j + 1], a, b[2], b[3]);
      }
    }
    const int lane = Lane();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (j / 2 > block_) break;
      shared_.products[half_][FirstTile() + j][lane] =
          make_float4(sums[j][0], sums[j][1], sums[j][2], sums[j][3]);
    }
  }

  // The thread's part of the sum of S (.) dS.
  __device__ __forceinline__ static float StateProducts(const Part& tiles) {
    if constexpr (Traits::kDecay == kNoDecay) return 0.0f;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < Image::kTileBytes / 16 / kNumThreads; ++i) {
      const int at = (i * kNumThreads + static_cast<int>(threadIdx.x)) * 16;
      sum = AddProducts<kDtype>(*reinterpret_cast<const uint4*>(tiles.s + at),
                                *reinterpret_cast<const uint4*>(tiles.d_s + at), sum);
    }
    return sum;
  }

  __device__ __forceinline__ void FinishHead(const StateChunk& rows, int head, float of_states,
                                             float of_values, float (&y)[kTiles][4],
                                             float (&x)[kTiles][4], float (&w)[kTiles][4],
                                             const float (&upper)[4][4], const float (&lower)[4][4],
                                             float (&d_q)[kTiles][4], float (&d_k)[kTiles][4]) {
    const int lane = Lane();
    of_values = QuadSum(of_values);
    if (threadIdx.x % 4 == 0) shared_.of_values[threadIdx.x / 4] = of_values;
    if constexpr (Traits::kDecay != kNoDecay) {
      of_states = WarpSumOf(of_states);
      if (lane == 0) shared_.of_states[warp_] = of_states;
    }
    AddStates(y, x, w, d_q, d_k);
    AmongTokens(upper, lower);
    __syncthreads();
    AddTokens(d_q, d_k);
    if (warp_ == 0) WriteFactors(rows, head);
  }

  // What comes from the state before the chunk and the gradient of that behind it.
  __device__ __forceinline__ void AddStates(const float (&y)[kTiles][4],
                                            const float (&x)[kTiles][4],
                                            const float (&w)[kTiles][4], float (&d_q)[kTiles][4],
                                            float (&d_k)[kTiles][4]) {
    const int lane = Lane();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = Row(half);
      const float since_q = shared_.since_q[row], until = shared_.until_k[row];
      const float since_k = kHasDeltaRule ? shared_.since_k[row] : 0.0f;
      const float beta = shared_.beta[row];
      float of_q = 0.0f, of_beta = 0.0f, of_until = 0.0f;
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        const int at = SwizzledByte(row, kHalf * half_ + 8 * j + lane % 4 * 2);
        const u32 k = *reinterpret_cast<const u32*>(shared_.k + at);
        const u32 q = *reinterpret_cast<const u32*>(shared_.q + at);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float of_y = since_q * y[j][2 * half + c], of_w = until * w[j][2 * half + c];
          const float key = HalfOf<kDtype>(k, c);
          of_q = fmaf(HalfOf<kDtype>(q, c), of_y, of_q);
          of_until = fmaf(key, of_w, of_until);
          d_q[j][2 * half + c] += of_y;
          float change = of_w;
          if constexpr (kHasDeltaRule) {
            const float of_x = since_k * x[j][2 * half + c];
            of_beta = fmaf(key, of_x, of_beta);
            change = fmaf(-beta, of_x, of_w);
          }
          d_k[j][2 * half + c] += change;
        }
      }
      of_q = QuadSum(of_q);
      of_until = QuadSum(of_until);
      if constexpr (kHasDeltaRule) of_beta = QuadSum(of_beta);
      if (lane % 4 == 0) {
        shared_.of_q[half_][row] = of_q;
        shared_.of_until[half_][row] = of_until;
        shared_.of_beta[half_][row] = of_beta;
      }
    }
  }

  // Writes a and b, and sums of their products with K K^T and Q K^T.
  __device__ __forceinline__ void AmongTokens(const float (&upper)[4][4],
                                              const float (&lower)[4][4]) {
    const int lane = Lane();
    float of_row[2] = {}, of_inner[2] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int column = 32 * half_ + 8 * j + lane % 4 * 2, tile = 4 * half_ + j;
      const bool is_past = tile / 2 <= block_;  // else all of the tile is of later tokens
      float of_column[2] = {};
      const float2 sums = *reinterpret_cast<const float2*>(&shared_.sums[column]);
      const float2 norms = *reinterpret_cast<const float2*>(&shared_.norms[0][column]);
      float4 kk = make_float4(0, 0, 0, 0), qk = kk;
      if (is_past) {
        if constexpr (kHasDeltaRule) kk = shared_.products[0][FirstTile() + tile][lane];
        qk = shared_.products[1][FirstTile() + tile][lane];
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = Row(half), at = SwizzledByte(row, column);
        float a[2] = {}, b[2] = {};
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (!is_past || row < column + c) continue;
          const float decay = Exp2(shared_.sums[row] - (c == 0 ? sums.x : sums.y));
          if (decay == 0.0f) continue;  // whatever the products are
          const float factor = decay * (c == 0 ? norms.x : norms.y);
          const float of_q = half == 0 ? (c == 0 ? qk.x : qk.y) : (c == 0 ? qk.z : qk.w);
          b[c] = factor * p_.scale * shared_.norms[1][row] * upper[j][2 * half + c];
          float change = b[c] * of_q;
          if constexpr (kHasDeltaRule) {
            if (row > column + c) {
              const float of_k = half == 0 ? (c == 0 ? kk.x : kk.y) : (c == 0 ? kk.z : kk.w);
              const float inner = factor * shared_.norms[0][row] * lower[j][2 * half + c];
              a[c] = -shared_.beta[row] * inner;
              of_inner[half] = fmaf(inner, of_k, of_inner[half]);
              change = fmaf(a[c], of_k, change);
            }
          }
          of_row[half] += change;
          of_column[c] += change;
        }
        *reinterpret_cast<u32*>(shared_.b + at) = E::Pack(b[0], b[1]);
        if constexpr (kHasDeltaRule) {
          *reinterpret_cast<u32*>(shared_.a + at) = E::Pack(a[0], a[1]);
        }
      }
      if constexpr (Traits::kDecay != kNoDecay) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
#pragma unroll
          for (int mask = 4; mask < kWarpSize; mask *= 2) {
            of_column[c] += __shfl_xor_sync(kFullWarp, of_column[c], mask);
          }
          if (lane / 4 == 0) shared_.of_columns[block_][column + c] = of_column[c];
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      of_row[half] = QuadSum(of_row[half]);
      of_inner[half] = QuadSum(of_inner[half]);
      if (lane % 4 != 0) continue;
      shared_.of_rows[half_][Row(half)] = of_row[half];
      shared_.of_inner[half_][Row(half)] = of_inner[half];
    }
  }

  // dQ += b K, dK += a K + a^T K + b^T Q
  __device__ __forceinline__ void AddTokens(float (&d_q)[kTiles][4],
                                            float (&d_k)[kTiles][4]) const {
    const u32 a_tile = SharedAddress(shared_.a), b_tile = SharedAddress(shared_.b);
    const u32 k_tile = SharedAddress(shared_.k), q_tile = SharedAddress(shared_.q);
#pragma unroll 1
    for (int step = 0; step < kBlocks; ++step) {
      const bool is_past = step <= block_, is_later = step >= block_;
      u32 a[4], b[4], a_back[4], b_back[4];
      if (is_past) {
        LoadA(b, b_tile, 16 * block_, 16 * step);
        if constexpr (kHasDeltaRule) LoadA(a, a_tile, 16 * block_, 16 * step);
      }
      if (is_later) {
        LoadTransposedA(b_back, b_tile, 16 * step, 16 * block_);
        if constexpr (kHasDeltaRule) LoadTransposedA(a_back, a_tile, 16 * step, 16 * block_);
      }
#pragma unroll
      for (int j = 0; j < kTiles / 2; ++j) {
        const int column = kHalf * half_ + 16 * j;
        u32 k[4], q[4];
        LoadColumnsB(k, k_tile, 16 * step, column);
        if (is_later) LoadColumnsB(q, q_tile, 16 * step, column);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float (&of_q)[4] = d_q[2 * j + i];
          float (&of_k)[4] = d_k[2 * j + i];
          if (is_past) {
            E::Mma(of_q, b, k[2 * i], k[2 * i + 1]);
            if constexpr (kHasDeltaRule) E::Mma(of_k, a, k[2 * i], k[2 * i + 1]);
          }
          if (is_later) {
            if constexpr (kHasDeltaRule) E::Mma(of_k, a_back, k[2 * i], k[2 * i + 1]);
            E::Mma(of_k, b_back, q[2 * i], q[2 * i + 1]);
          }
        }
      }
    }
  }

  // Gradients of g and beta. For one warp.
  __device__ __forceinline__ void WriteFactors(const StateChunk& rows, int head) const {
    const int lane = Lane();
    float of_states = 0.0f, last = 0.0f;
    if constexpr (Traits::kDecay != kNoDecay) {
#pragma unroll
      for (int w = 0; w < kWarps; ++w) of_states += shared_.of_states[w];
      of_states *= shared_.decay;
    }
    float of_sums[2];  // gradients of G of tokens 63 - lane and 31 - lane
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = kLinearTokens - 1 - lane - i * kWarpSize;
      const float of_until = shared_.of_until[0][token] + shared_.of_until[1][token];
      const float of_beta =
          kHasDeltaRule ? shared_.of_beta[0][token] + shared_.of_beta[1][token] : 0.0f;
      of_sums[i] = shared_.of_rows[0][token] + shared_.of_rows[1][token] +
                   (shared_.of_q[0][token] + shared_.of_q[1][token]) - of_until -
                   shared_.beta[token] * of_beta;
#pragma unroll
      for (int w = 0; w < kBlocks; ++w) {
        if constexpr (Traits::kDecay != kNoDecay) of_sums[i] -= shared_.of_columns[w][token];
      }
      last += of_until;
      const i64 at = (rows.begin + token) * static_cast<i64>(p_.num_v_heads) + head;
      if (params_.d_beta && token < rows.length) {
        params_.d_beta[at] = shared_.of_values[token] - of_beta -
                             (shared_.of_inner[0][token] + shared_.of_inner[1][token]);
      }
    }
    if constexpr (Traits::kDecay != kNoDecay) {
      // Each g is in all later sums of the chunk, and in the decay of the state.
      float total = WarpSumOf(last) + of_states;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float sum = of_sums[i];
#pragma unroll
        for (int distance = 1; distance < kWarpSize; distance *= 2) {
          const float before = __shfl_up_sync(kFullWarp, sum, distance);
          if (lane >= distance) sum += before;
        }
        sum += total;
        total = __shfl_sync(kFullWarp, sum, kWarpSize - 1);
        const int token = kLinearTokens - 1 - lane - i * kWarpSize;
        if (token >= rows.length) continue;
        params_.d_g[(rows.begin + token) * static_cast<i64>(p_.num_v_heads) + head] = sum;
      }
    }
  }

  // Writes dQ and dK through the tiles of q and k, whose elements a thread reads and writes alone.
  __device__ __forceinline__ void WriteRows(const StateChunk& rows, int qk_head,
                                            float (&d_q)[kTiles][4], float (&d_k)[kTiles][4]) {
    if constexpr (Traits::kHasL2Norm) {
      FindInner(shared_.q, d_q, shared_.of_q);
      FindInner(shared_.k, d_k, shared_.of_beta);
    }
    __syncthreads();
    Replace(shared_.q, d_q, shared_.of_q, shared_.norms[1]);
    Replace(shared_.k, d_k, shared_.of_beta, shared_.norms[0]);
    __syncthreads();
    const i64 pitch = static_cast<i64>(p_.num_qk_heads) * kDimK;
    const i64 first = rows.begin * pitch + qk_head * kDimK;
    for (int i = static_cast<int>(threadIdx.x); i < rows.length * (kDimK / 8); i += kNumThreads) {
      const int token = i / (kDimK / 8), column = i % (kDimK / 8) * 8;
      const int at = SwizzledByte(token, column);
      const i64 to = first + token * pitch + column;
      StoreVector(static_cast<u16*>(params_.d_q) + to,
                  *reinterpret_cast<const uint4*>(shared_.q + at));
      StoreVector(static_cast<u16*>(params_.d_k) + to,
                  *reinterpret_cast<const uint4*>(shared_.k + at));
    }
  }
  // Products of rows of a tile with their gradients, which are behind __syncthreads.
  __device__ __forceinline__ void FindInner(const unsigned char* tile, const float (&d)[kTiles][4],
                                            float (&inner)[2][kLinearTokens]) {
    const int lane = Lane();
    __syncthreads();  // the sums of the last head are read
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = Row(half);
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        const int at = SwizzledByte(row, kHalf * half_ + 8 * j + lane % 4 * 2);
        const u32 pair = *reinterpret_cast<const u32*>(tile + at);
        sum = fmaf(HalfOf<kDtype>(pair, 0), d[j][2 * half], sum);
        sum = fmaf(HalfOf<kDtype>(pair, 1), d[j][2 * half + 1], sum);
      }
      sum = QuadSum(sum);
      if (lane % 4 == 0) inner[half_][row] = sum;
    }
  }
  __device__ __forceinline__ void Replace(unsigned char* tile, const float (&d)[kTiles][4],
                                          const float (&inner)[2][kLinearTokens],
                                          const float (&norms)[kLinearTokens]) const {
    const int lane = Lane();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = Row(half);
      float less = 0.0f;
      if constexpr (Traits::kHasL2Norm) {
        less = norms[row] * norms[row] * (inner[0][row] + inner[1][row]);
      }
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        const int at = SwizzledByte(row, kHalf * half_ + 8 * j + lane % 4 * 2);
        u32* const pair = reinterpret_cast<u32*>(tile + at);
        *pair = E::Pack(fmaf(-less, HalfOf<kDtype>(*pair, 0), d[j][2 * half]),
                        fmaf(-less, HalfOf<kDtype>(*pair, 1), d[j][2 * half + 1]));
      }
    }
  }

  Shared& shared_;
};

}  // namespace jax_attn
