// kLinearGradients with a decay a channel: the gradients of q, k, v, g and beta in chunks, all
// chunks at once.
//
// With G the sums of log decays of a channel, q and k with their norms and q with scale, and E[i,
// j] = exp(G_i - G_j) channel by channel, rows i of a chunk have
//   b = tril(dO V'^T),  a = -tril(dR V'^T, -1)
//   dQ_i = exp(G_i) (dO S^T)_i + sum of b[i, j] K_j E[i, j], j <= i
//   X_i  = -exp(G_i) (dR S^T)_i + sum of a[i, j] K_j E[i, j], j < i
//   C_j  = exp(G_last - G_j) (V' dS^T)_j + sum of E[i, j] (a[i, j] beta_i K_i + b[i, j] Q_i), i >=
//   j dK = beta X + C,  dV = beta dR,  dbeta = rows of dR . V + K . X
// and the gradient of G is Q dQ + K (beta X - C), channel by channel; that of G_last also has the
// sums of K exp(G_last - G) (V' dS^T) and of S dS exp(G_last).
//
// Nothing is a quotient of exponentials. Between blocks of 16 tokens products are mma of rows that
// are decayed from the first row of their block, or up to that of the next one; sums go from block
// to block, whose decays they get on their way. On the diagonal a thread has a channel and 16
// tokens, and pairs of them have their exponentials, in f32.
#pragma once

#include "cuda/common/budget.cuh"
#include "cuda/sm80/linear_gradient_parts.cuh"

namespace jax_attn {

template <class Traits>
class LinearChannelGradientsPhase : LinearGradientParts<Traits> {
  using Base = LinearGradientParts<Traits>;
  using Base::kBlocks, Base::kDimK, Base::kDtype, Base::kHalf, Base::kHasDeltaRule;
  using Base::kK, Base::kParts, Base::kTiles;
  using Base::Lane, Base::Row;
  using Base::p_, Base::plan_, Base::params_, Base::warp_, Base::block_, Base::half_;
  using typename Base::E;
  using typename Base::Part;

 public:
  using Base::kNumThreads, Base::kWarps, Base::kMinCtasPerSm;
  using typename Base::Params;

  // Words between rows. Of G: lanes of four tokens and eight channels read other banks. Of
  // exchanged rows: so do lanes that write accumulators.
  static constexpr int kPitch = kK + 4, kExchangePitch = 72;
  static constexpr int kRounds = kK / 64;               // of 32 channels of each half
  static constexpr int kGroups = 2 * kNumThreads / kK;  // threads with two channels of S (.) dS

  // Rows of blocks with their decays. K until the next block, K and Q since their block's first
  // row; the second with beta.
  struct Decayed {
    alignas(1024) unsigned char k_until[kK / 64 * kPartBytes];
    alignas(1024) unsigned char k_since[kK / 64 * kPartBytes];
    alignas(1024) unsigned char q_since[kK / 64 * kPartBytes];
  };
  static constexpr bool kKeepsSums = KeepsChannelSums(Traits::kArch, kK);
  struct Shared {
    union {
      Part part;
      Decayed decayed;
      float exchange[3][kLinearTokens][kExchangePitch];  // dQ, X, C
    };
    alignas(1024) unsigned char k[kK / 64 * kPartBytes];
    alignas(1024) unsigned char q[kK / 64 * kPartBytes];
    alignas(1024) unsigned char a[kPartBytes];
    alignas(1024) unsigned char b[kPartBytes];
    alignas(16) float sums[kLinearTokens][kPitch];          // G in units of log2
    float2 diagonal[kBlocks][16][16];                       // a and b
    float d_rows[kKeepsSums ? 2 * kLinearTokens * kK : 4];  // sums of dQ and dK over v heads
    float norms[2][kLinearTokens];                          // of k and q
    float beta[kLinearTokens], of_values[kLinearTokens], of_beta[2][kLinearTokens];
    float of_until[kBlocks][kK];
    float of_states[kGroups][kK];
    float of_blocks[kBlocks][64];
  };
  static constexpr int kSmemBytes = sizeof(Shared);
  static_assert(kSmemBytes <= CtaSmemBudget(Traits::kArch, 1), "room of a CTA");

  __device__ __forceinline__ static void Run(const Params& p) {
    extern __shared__ __align__(1024) unsigned char smem[];
    LinearChannelGradientsPhase(p, *reinterpret_cast<Shared*>(smem)).Run();
  }

 private:
  __device__ __forceinline__ LinearChannelGradientsPhase(const Params& params, Shared& shared)
      : Base(params), shared_(shared) {}

  __device__ __forceinline__ void Run() {
    this->FillPadding();
    const int cta = static_cast<int>(blockIdx.x) / p_.num_qk_heads;
    const int qk_head = static_cast<int>(blockIdx.x) % p_.num_qk_heads;
    // Chunks of the plan of a CTA, of which those matter that others are computed with.
    const int of_cta = CeilDiv(p_.plan.max_chunks, static_cast<int>(gridDim.x) / p_.num_qk_heads);
    const int end = Min(plan_.num_chunks, (cta + 1) * of_cta);
#pragma unroll 1
    for (int chunk = cta * of_cta; chunk < end; ++chunk) {
      if (this->PreviousChunk(chunk) < 0) continue;
      const StateChunk rows = this->ChunkAt(chunk).rows;
      if (rows.length > 0) RunChunk(chunk, rows, qk_head);
    }
  }

  __device__ __forceinline__ void RunChunk(int chunk, const StateChunk& rows, int qk_head) {
    const int group = p_.num_v_heads / p_.num_qk_heads, head = qk_head * group;
    const i64 pitch = static_cast<i64>(p_.num_qk_heads) * kDimK;
    __syncthreads();  // the chunk before is done
    LoadTile<kK, kNumThreads>(SharedAddress(shared_.k), p_.k, rows.begin, rows.length, pitch,
                              qk_head * kDimK, kDimK);
    LoadTile<kK, kNumThreads>(SharedAddress(shared_.q), p_.q, rows.begin, rows.length, pitch,
                              qk_head * kDimK, kDimK);
#pragma unroll 1
    for (int h = head; h < head + group; ++h) {
      if (h > head) __syncthreads();  // the head before is done
      LoadDecays(rows, h);
      CommitCopies();
      this->LoadPart(shared_.part, chunk, rows, h, 0);
      CommitCopies();
      WaitCopies<1>();
      __syncthreads();
      if (h == head) this->FindNorms(shared_.k, shared_.q, shared_.norms);
      SumDecays();
      RunHead(chunk, rows, qk_head, h, h == head);
    }
    __syncthreads();  // sums of rows
    WriteRows(rows, qk_head);
  }

  // Starts the copies of log decays. beta needs no copy.
  __device__ __forceinline__ void LoadDecays(const StateChunk& rows, int head) {
    constexpr int kVectors = kK / 4, kRows = kNumThreads / kVectors;
    const int thread = static_cast<int>(threadIdx.x), channel = thread % kVectors * 4;
#pragma unroll
    for (int i = 0; i < kLinearTokens / kRows; ++i) {
      const int row = thread / kVectors + i * kRows;
      const bool valid = row < rows.length && channel < kDimK;
      const i64 of_head = static_cast<i64>(rows.begin + row) * p_.num_v_heads + head;
      CopyAsync16(SharedAddress(&shared_.sums[row][channel]),
                  valid ? p_.g + of_head * kDimK + channel : p_.g, valid);
    }
    if (thread >= kLinearTokens) return;
    const i64 at = static_cast<i64>(rows.begin + thread) * p_.num_v_heads + head;
    shared_.beta[thread] = thread >= rows.length ? 0.0f : p_.beta ? p_.beta[at] : 1.0f;
  }

  // Threads have a channel of some tokens each. Ends with a barrier.
  __device__ __forceinline__ void SumDecays() {
    constexpr int kTokens = kLinearTokens * kK / kNumThreads;
    const int d = static_cast<int>(threadIdx.x) % kK;
    const int part = static_cast<int>(threadIdx.x) / kK;
    float sum = 0.0f;
#pragma unroll 8
    for (int i = 0; i < kTokens; ++i) {
      float& x = shared_.sums[part * kTokens + i][d];
      sum += (x < kLowestDecayLog ? kLowestDecayLog : x) * kLog2E;
      x = sum;
    }
    shared_.of_until[part][d] = sum;
    __syncthreads();
    float before = 0.0f;
    for (int i = 0; i < part; ++i) before += shared_.of_until[i][d];
    if (part > 0) {
#pragma unroll 8
      for (int i = 0; i < kTokens; ++i) shared_.sums[part * kTokens + i][d] += before;
    }
    __syncthreads();
  }

  __device__ __forceinline__ void RunHead(int chunk, const StateChunk& rows, int qk_head, int head,
                                          bool is_first) {
    float y[kTiles][4], x[kTiles][4], w[kTiles][4];  // dO S^T, dR S^T, V' dS^T
    {
      float upper[4][4], lower[4][4];  // dO V'^T, dR V'^T: columns of the warp's half
      SetZero(y);
      SetZero(x);
      SetZero(w);
      SetZero(upper);
      SetZero(lower);
      float of_states[2] = {}, of_values = 0.0f;
#pragma unroll 1
      for (int part = 0; part < kParts; ++part) {
        WaitCopies<0>();
        __syncthreads();
        this->MultiplyPart(shared_.part, y, x, w, upper, lower);
        AddStateProducts(of_states);
        of_values += this->WriteValues(shared_.part, rows, head, part, shared_.beta);
        __syncthreads();  // tiles are read
        if (part + 1 == kParts) break;
        this->LoadPart(shared_.part, chunk, rows, head, part + 1);
        CommitCopies();
      }
      of_values = QuadSum(of_values);
      if (threadIdx.x % 4 == 0) shared_.of_values[threadIdx.x / 4] = of_values;
      WriteStateProducts(of_states);
      WriteAmongTokens(upper, lower);
    }
    WriteDecayed();
    __syncthreads();
    SumUntil(w);
    AddBlocks(y, x, w);
#pragma unroll 1
    for (int round = 0; round < kRounds; ++round) {
      __syncthreads();  // decayed rows are read, and sums of the round before
      WriteRound(y, x, w);
      NextRound(y);
      NextRound(x);
      NextRound(w);
      __syncthreads();
      FinishChannels(rows, qk_head, head, round, is_first);
    }
    const int token = static_cast<int>(threadIdx.x);
    if (params_.d_beta && token < rows.length) {
      params_.d_beta[static_cast<i64>(rows.begin + token) * p_.num_v_heads + head] =
          shared_.of_values[token] + shared_.of_beta[0][token] + shared_.of_beta[1][token];
    }
  }

  // --- from states ---

  // Adds the products S (.) dS of two channels and some columns of v.
  __device__ __forceinline__ void AddStateProducts(float (&sum)[2]) const {
    constexpr int kRows = 64 / kGroups;
    const int channel = static_cast<int>(threadIdx.x) % (kK / 2) * 2;
    const int first = static_cast<int>(threadIdx.x) / (kK / 2) * kRows;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int at = SwizzledByte(first + i, channel);
      const u32 s = *reinterpret_cast<const u32*>(shared_.part.s + at);
      const u32 d_s = *reinterpret_cast<const u32*>(shared_.part.d_s + at);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        sum[c] = fmaf(HalfOf<kDtype>(s, c), HalfOf<kDtype>(d_s, c), sum[c]);
      }
    }
  }
  __device__ __forceinline__ void WriteStateProducts(const float (&sum)[2]) {
    const int channel = static_cast<int>(threadIdx.x) % (kK / 2) * 2;
    float* const to = shared_.of_states[static_cast<int>(threadIdx.x) / (kK / 2)];
    to[channel] = sum[0];
    to[channel + 1] = sum[1];
  }

  // Adds x over lanes that differ in bits of masks 16, 8, ... down to kLast, and leaves a part of
  // the values to each: with every bit, lanes that have it keep the upper half of what is left.
  template <int kLast, int kNum>
  __device__ __forceinline__ static void AddLanes(float (&x)[kNum]) {
    const int lane = Lane();
#pragma unroll
    for (int mask = 16, n = kNum / 2; mask >= kLast; mask /= 2, n /= 2) {
      const bool keeps_upper = (lane & mask) != 0;
#pragma unroll
      for (int i = 0; i < n; ++i) {
        const float gives = keeps_upper ? x[i] : x[i + n], keeps = keeps_upper ? x[i + n] : x[i];
        x[i] = keeps + __shfl_xor_sync(kFullWarp, gives, mask);
      }
    }
  }

  // Sums of K exp(G_last - G) (V' dS^T) over the warp's rows.
  __device__ __forceinline__ void SumUntil(const float (&w)[kTiles][4]) {
    constexpr int kLeft = kTiles / 4;  // of a lane
    const int lane = Lane();
    const float* const last = shared_.sums[kLinearTokens - 1];
    float sums[2 * kTiles];
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const int channel = kHalf * half_ + 8 * j + lane % 4 * 2;
      const float2 end = *reinterpret_cast<const float2*>(&last[channel]);
      sums[2 * j] = sums[2 * j + 1] = 0.0f;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = Row(half);
        const u32 k = *reinterpret_cast<const u32*>(shared_.k + SwizzledByte(row, channel));
        const float2 sum = *reinterpret_cast<const float2*>(&shared_.sums[row][channel]);
        const float norm = shared_.norms[0][row];
        sums[2 * j] =
            fmaf(norm * HalfOf<kDtype>(k, 0) * Exp2(end.x - sum.x), w[j][2 * half], sums[2 * j]);
        sums[2 * j + 1] = fmaf(norm * HalfOf<kDtype>(k, 1) * Exp2(end.y - sum.y),
                               w[j][2 * half + 1], sums[2 * j + 1]);
      }
    }
    AddLanes<4>(sums);
    const int first =
        (lane >> 4) * kTiles + (lane >> 3 & 1) * (kTiles / 2) + (lane >> 2 & 1) * kLeft;
#pragma unroll
    for (int i = 0; i < kLeft; ++i) {
      const int at = first + i;
      shared_.of_until[block_][kHalf * half_ + at / 2 * 8 + lane % 4 * 2 + at % 2] = sums[i];
    }
  }

  // --- among tokens ---

  // Writes a and b: left of the diagonal as tiles, blocks on it as they are.
  __device__ __forceinline__ void WriteAmongTokens(const float (&upper)[4][4],
                                                   const float (&lower)[4][4]) {
    const int lane = Lane();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int of_block = 2 * half_ + j / 2;  // the block of the columns
      if (of_block > block_) break;
      const int column = 32 * half_ + 8 * j + lane % 4 * 2;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = Row(half);
        const float a[2] = {-lower[j][2 * half], -lower[j][2 * half + 1]};
        const float b[2] = {upper[j][2 * half], upper[j][2 * half + 1]};
        if (of_block == block_) {
          float2* const to = &shared_.diagonal[block_][row % 16][column % 16];
          to[0] = make_float2(a[0], b[0]);
          to[1] = make_float2(a[1], b[1]);
        } else {
          const int at = SwizzledByte(row, column);
          *reinterpret_cast<u32*>(shared_.b + at) = E::Pack(b[0], b[1]);
          if constexpr (kHasDeltaRule) {
            *reinterpret_cast<u32*>(shared_.a + at) = E::Pack(a[0], a[1]);
          }
        }
      }
    }
  }

  // 0 where the decay is, whatever x is.
  __device__ __forceinline__ static float Times(float x, float decay) {
    return decay == 0.0f ? 0.0f : x * decay;
  }

  __device__ __forceinline__ void WriteDecayed() {
    constexpr int kVectors = kK / 8;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < kLinearTokens * kVectors; i += kNumThreads) {
      const int row = i / kVectors, channel = i % kVectors * 8, at = SwizzledByte(row, channel);
      const float* const first = &shared_.sums[row / 16 * 16][channel];
      const float* const next = &shared_.sums[Min(row / 16 * 16 + 16, kLinearTokens - 1)][channel];
      const uint4 k = *reinterpret_cast<const uint4*>(shared_.k + at);
      const uint4 q = *reinterpret_cast<const uint4*>(shared_.q + at);
      const u32 of_k[4] = {k.x, k.y, k.z, k.w}, of_q[4] = {q.x, q.y, q.z, q.w};
      const float k_norm = shared_.norms[0][row], q_norm = shared_.norms[1][row] * p_.scale;
      const float beta = shared_.beta[row];
      u32 tiles[3][4];
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        float x[3][2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int d = 2 * pair + c;
          const float sum = shared_.sums[row][channel + d];
          const float since = Exp2(sum - first[d]), until = Exp2(next[d] - sum);
          const float key = HalfOf<kDtype>(of_k[pair], c) * k_norm;
          x[0][c] = Times(key, until);
          x[1][c] = Times(beta * key, since);
          x[2][c] = Times(HalfOf<kDtype>(of_q[pair], c) * q_norm, since);
        }
#pragma unroll
        for (int tile = 0; tile < 3; ++tile) tiles[tile][pair] = E::Pack(x[tile][0], x[tile][1]);
      }
      const auto write = [&](unsigned char* tile, const u32(&words)[4]) {
        *reinterpret_cast<uint4*>(tile + at) = make_uint4(words[0], words[1], words[2], words[3]);
      };
      write(shared_.decayed.k_until, tiles[0]);
      write(shared_.decayed.k_since, tiles[1]);
      write(shared_.decayed.q_since, tiles[2]);
    }
  }

  // G of a row for two neighbours of channels.
  __device__ __forceinline__ float2 SumsOf(int row, int channel) const {
    return *reinterpret_cast<const float2*>(&shared_.sums[row][channel]);
  }
  // Columns of a tile of the warp's rows times exp2(to - from).
  __device__ __forceinline__ static void Decay(float (&x)[4], float2 from, float2 to) {
    const float2 f = make_float2(Exp2(to.x - from.x), Exp2(to.y - from.y));
    x[0] = Times(x[0], f.x);
    x[1] = Times(x[1], f.y);
    x[2] = Times(x[2], f.x);
    x[3] = Times(x[3], f.y);
  }

  // y, x and w become dQ, X and C, but for the blocks on the diagonal.
  __device__ __forceinline__ void AddBlocks(float (&y)[kTiles][4], float (&x)[kTiles][4],
                                            float (&w)[kTiles][4]) const {
    const int lane = Lane();
    const auto channel = [&](int j) { return kHalf * half_ + 8 * j + lane % 4 * 2; };
    // From the state before the chunk to the warp's block.
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const float2 first = SumsOf(0, channel(j));
      Decay(y[j], make_float2(0.0f, 0.0f), first);
      if constexpr (kHasDeltaRule) {
#pragma unroll
        for (int c = 0; c < 4; ++c) x[j][c] = -x[j][c];
        Decay(x[j], make_float2(0.0f, 0.0f), first);
      }
    }
#pragma unroll 1
    for (int block = 0; block < block_; ++block) {
      u32 a[4], b[4];
      LoadA(b, SharedAddress(shared_.b), 16 * block_, 16 * block);
      if constexpr (kHasDeltaRule) LoadA(a, SharedAddress(shared_.a), 16 * block_, 16 * block);
#pragma unroll
      for (int j = 0; j < kTiles / 2; ++j) {
        u32 k[4];
        LoadColumnsB(k, SharedAddress(shared_.decayed.k_until), 16 * block, kHalf * half_ + 16 * j);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int tile = 2 * j + i;
          const float2 from = SumsOf(16 * block, channel(tile));
          const float2 to = SumsOf(16 * block + 16, channel(tile));
          Decay(y[tile], from, to);
          E::Mma(y[tile], b, k[2 * i], k[2 * i + 1]);
          if constexpr (kHasDeltaRule) {
            Decay(x[tile], from, to);
            E::Mma(x[tile], a, k[2 * i], k[2 * i + 1]);
          }
        }
      }
    }
    // From the state behind the chunk to the block behind the warp's.
#pragma unroll 1
    for (int block = kBlocks - 1; block > block_; --block) {
      u32 a[4], b[4];
      LoadTransposedA(b, SharedAddress(shared_.b), 16 * block, 16 * block_);
      if constexpr (kHasDeltaRule) {
        LoadTransposedA(a, SharedAddress(shared_.a), 16 * block, 16 * block_);
      }
#pragma unroll
      for (int j = 0; j < kTiles / 2; ++j) {
        const int column = kHalf * half_ + 16 * j;
        u32 k[4], q[4];
        LoadColumnsB(q, SharedAddress(shared_.decayed.q_since), 16 * block, column);
        if constexpr (kHasDeltaRule) {
          LoadColumnsB(k, SharedAddress(shared_.decayed.k_since), 16 * block, column);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int tile = 2 * j + i;
          Decay(w[tile], SumsOf(16 * block, channel(tile)),
                SumsOf(Min(16 * block + 16, kLinearTokens - 1), channel(tile)));
          E::Mma(w[tile], b, q[2 * i], q[2 * i + 1]);
          if constexpr (kHasDeltaRule) E::Mma(w[tile], a, k[2 * i], k[2 * i + 1]);
        }
      }
    }
    // To the warp's rows.
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const float2 first = SumsOf(16 * block_, channel(j));
      const float2 next = SumsOf(Min(16 * block_ + 16, kLinearTokens - 1), channel(j));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 own = SumsOf(Row(half), channel(j));
        const float since[2] = {Exp2(own.x - first.x), Exp2(own.y - first.y)};
        const float until[2] = {Exp2(next.x - own.x), Exp2(next.y - own.y)};
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          y[j][2 * half + c] = Times(y[j][2 * half + c], since[c]);
          w[j][2 * half + c] = Times(w[j][2 * half + c], until[c]);
          if constexpr (kHasDeltaRule) x[j][2 * half + c] = Times(x[j][2 * half + c], since[c]);
        }
      }
    }
  }

  // --- a channel of 16 tokens a thread ---

  // Writes the first 32 channels of the warp's.
  __device__ __forceinline__ void WriteRound(const float (&y)[kTiles][4],
                                             const float (&x)[kTiles][4],
                                             const float (&w)[kTiles][4]) {
    const int lane = Lane();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto write = [&](int which, const float (&tile)[4]) {
          float* const to = &shared_.exchange[which][Row(half)][32 * half_ + 8 * j + lane % 4 * 2];
          *reinterpret_cast<float2*>(to) = make_float2(tile[2 * half], tile[2 * half + 1]);
        };
        write(0, y[j]);
        if constexpr (kHasDeltaRule) write(1, x[j]);
        write(2, w[j]);
      }
    }
  }

  // The other channels of the warp's become the first ones. Nothing else stays in registers.
  __device__ __forceinline__ static void NextRound(float (&x)[kTiles][4]) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) x[j][c] = j + 4 < kTiles ? x[(j + 4) % kTiles][c] : 0.0f;
    }
  }

  // Sums of dQ and dK over v heads: rows of a token, those of dK kK further.
  __device__ __forceinline__ float* RowSums(const StateChunk& rows, int qk_head) const {
    if constexpr (kKeepsSums) return shared_.d_rows;
    const i64 first = static_cast<i64>(rows.begin) * p_.num_qk_heads + qk_head;
    return this->template At<float>(this->ChannelArrays().sums) + first * (2 * kK);
  }
  __device__ __forceinline__ i64 RowPitch() const {
    return kKeepsSums ? 2 * kK : static_cast<i64>(p_.num_qk_heads) * (2 * kK);
  }

  // The thread has tokens of the warp's block, and a channel of the round. Has a barrier.
  __device__ __forceinline__ void FinishChannels(const StateChunk& rows, int qk_head, int head,
                                                 int round, bool is_first) {
    const int lane = Lane(), c = 32 * half_ + lane, d = kHalf * half_ + 32 * round + lane;
    const int begin = 16 * block_;
    float* const d_rows = RowSums(rows, qk_head) + d;
    const i64 pitch = RowPitch();
    const auto add = [&](int row, int column, float x) {
      float& to = d_rows[row * pitch + column];
      if (kKeepsSums || row < rows.length) to = is_first ? x : to + x;
    };
    float k[16], sum[16], of_column[16], of_sums[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const u16 key = *reinterpret_cast<const u16*>(shared_.k + SwizzledByte(begin + i, d));
      k[i] = E::ToFloat(key) * shared_.norms[0][begin + i];
      sum[i] = shared_.sums[begin + i][d];
      of_column[i] = shared_.exchange[2][begin + i][c];
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int row = begin + i;
      const u16 query = *reinterpret_cast<const u16*>(shared_.q + SwizzledByte(row, d));
      const float q = E::ToFloat(query) * (shared_.norms[1][row] * p_.scale);
      const float beta = shared_.beta[row], of_key = beta * k[i];
      float of_q = shared_.exchange[0][row][c], of_k = 0.0f;
      if constexpr (kHasDeltaRule) of_k = shared_.exchange[1][row][c];
#pragma unroll
      for (int j = 0; j < i; ++j) {
        const float2 ab = shared_.diagonal[block_][i][j];
        const float decay = Exp2(sum[i] - sum[j]), key = decay * k[j];
        of_q = fmaf(ab.y, key, of_q);
        float back = ab.y * q;
        if constexpr (kHasDeltaRule) {
          of_k = fmaf(ab.x, key, of_k);
          back = fmaf(ab.x, of_key, back);
        }
        of_column[j] = fmaf(decay, back, of_column[j]);
      }
      const float b = shared_.diagonal[block_][i][i].y;
      of_q = fmaf(b, k[i], of_q);
      of_column[i] = fmaf(b, q, of_column[i]);
      add(row, 0, of_q);
      of_sums[i] = q * of_q;
      if constexpr (kHasDeltaRule) shared_.exchange[1][row][c] = of_k;
    }
    float of_beta[16],
        later = 0.0f;  // of_sums: the gradients of G of tokens from here on in the block
#pragma unroll
    for (int i = 15; i >= 0; --i) {
      float of_k = 0.0f;
      if constexpr (kHasDeltaRule) of_k = shared_.exchange[1][begin + i][c];
      of_beta[i] = k[i] * of_k;
      of_k *= shared_.beta[begin + i];
      add(begin + i, kK, of_k + of_column[i]);
      later += fmaf(k[i], of_k - of_column[i], of_sums[i]);
      of_sums[i] = later;
    }
    shared_.of_blocks[block_][c] = later;
    AddBeta(of_beta, round);
    __syncthreads();
    // Each g is in all later sums of the chunk, and in the decay of the state.
    float behind = 0.0f, of_last = 0.0f;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) of_last += shared_.of_states[i][d];
    of_last = Times(of_last, Exp2(shared_.sums[kLinearTokens - 1][d]));
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      of_last += shared_.of_until[i][d];
      if (i > block_) behind += shared_.of_blocks[i][c];
    }
    if (!params_.d_g || d >= kDimK) return;
    float* const to =
        params_.d_g + (static_cast<i64>(rows.begin + begin) * p_.num_v_heads + head) * kDimK + d;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (begin + i >= rows.length) break;
      to[static_cast<i64>(i) * p_.num_v_heads * kDimK] = of_sums[i] + (behind + of_last);
    }
  }

  // Sums of 32 channels of K (.) X, with those of the round before.
  __device__ __forceinline__ void AddBeta(float (&x)[16], int round) {
    if constexpr (kHasDeltaRule) {
      AddLanes<2>(x);
      const float sum = x[0] + __shfl_xor_sync(kFullWarp, x[0], 1);
      const int lane = Lane();
      float* const to = &shared_.of_beta[half_][16 * block_ + lane / 2];
      if (lane % 2 == 0) *to = round == 0 ? sum : *to + sum;
    } else if (Lane() < 16) {
      shared_.of_beta[half_][16 * block_ + Lane()] = 0.0f;
    }
  }

  // dQ and dK of all heads to those of the call's q and k. A warp has a row.
  __device__ __forceinline__ void WriteRows(const StateChunk& rows, int qk_head) const {
    const int lane = Lane();
    const float* const d_rows = RowSums(rows, qk_head);
    const i64 pitch = RowPitch();
#pragma unroll 1
    for (int i = warp_; i < 2 * rows.length; i += kWarps) {
      const int row = i / 2, which = i % 2;  // dQ, dK
      const unsigned char* const tile = which == 0 ? shared_.q : shared_.k;
      const float norm = shared_.norms[1 - which][row];
      const float factor = which == 0 ? norm * p_.scale : norm;
      float d[kK / 64][2], x[kK / 64][2], inner = 0.0f;
#pragma unroll
      for (int j = 0; j < kK / 64; ++j) {
        const int channel = 64 * j + 2 * lane;
        const float2 sums =
            *reinterpret_cast<const float2*>(d_rows + row * pitch + which * kK + channel);
        const u32 pair = *reinterpret_cast<const u32*>(tile + SwizzledByte(row, channel));
        d[j][0] = sums.x;
        d[j][1] = sums.y;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          x[j][c] = norm * HalfOf<kDtype>(pair, c);
          inner = fmaf(x[j][c], d[j][c], inner);
        }
      }
      inner = Traits::kHasL2Norm ? WarpSumOf(inner) : 0.0f;
      u16* const to = static_cast<u16*>(which == 0 ? params_.d_q : params_.d_k) +
                      (static_cast<i64>(rows.begin + row) * p_.num_qk_heads + qk_head) * kDimK;
#pragma unroll
      for (int j = 0; j < kK / 64; ++j) {
        const int channel = 64 * j + 2 * lane;
        if (channel >= kDimK) continue;
        *reinterpret_cast<u32*>(to + channel) = E::Pack(factor * fmaf(-x[j][0], inner, d[j][0]),
                                                        factor * fmaf(-x[j][1], inner, d[j][1]));
      }
    }
  }

  Shared& shared_;
};

}  // namespace jax_attn
