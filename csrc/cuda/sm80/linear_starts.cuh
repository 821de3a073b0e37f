// The states before segments of linear attention, from one to the next: S <- M S + B. They replace
// the B of the segment that they follow.
//
// A CTA has 16 columns of v of a head of a request, as S^T, and goes through the maps; the next M
// is on its way meanwhile. S and M are pairs of bf16, high + low, so products have an error of some
// 2^-16: a start is as good as a state that was never split.
#pragma once

#include "cuda/common/budget.cuh"
#include "cuda/common/linear_places.cuh"
#include "cuda/common/linear_tiles.cuh"

namespace jax_attn {

template <class Traits>
class LinearStartsPhase : LinearPlaces<Traits> {
  using Places = LinearPlaces<Traits>;
  using Places::p_, Places::plan_;

 public:
  using Params = LinearAttentionParams;
  static constexpr int kDimK = Places::Dims::kDimK, kK = Places::Dims::kK, kV = Places::Dims::kV;
  static constexpr int kColumns = 16;
  static constexpr int kWarpRows = 16;  // of the new S
  static constexpr int kWarps = kK / kWarpRows, kNumThreads = kWarps * kWarpSize;
  static constexpr int kHalfBytes = kK * kK * 2;

  // M and S^T as high and low.
  struct Matrix {
    alignas(1024) unsigned char parts[2][kHalfBytes];
  };
  struct State {
    alignas(1024) unsigned char parts[2][kK / 64 * kPartBytes];  // 16 rows of each are in use
  };
  static constexpr int kBuffers =
      2 * sizeof(Matrix) + sizeof(State) <= CtaSmemBudget(Traits::kArch, 1) ? 2 : 1;
  struct Tiles {
    Matrix m[kBuffers];
    State s;
  };
  struct NoTiles {};
  struct Shared : Conditional<Traits::kHasDeltaRule, Tiles, NoTiles>::Type {
    int maxima[kWarps];
  };
  static constexpr int kSmemBytes = sizeof(Shared);
  static constexpr int kMinCtasPerSm = 1;

  __device__ __forceinline__ static void Run(const Params& p) {
    extern __shared__ __align__(1024) unsigned char smem[];
    LinearStartsPhase(p, *reinterpret_cast<Shared*>(smem)).Run();
  }

 private:
  __device__ __forceinline__ LinearStartsPhase(const Params& p, Shared& shared)
      : Places(p),
        shared_(shared),
        warp_(Uniform(static_cast<int>(threadIdx.x) / kWarpSize)),
        lane_(static_cast<int>(threadIdx.x) % kWarpSize) {}

  __device__ __forceinline__ void Run() {
    constexpr int kTiles = kV / kColumns;
    const int of_segment = p_.num_v_heads * kTiles;
    const int num_items = this->NumSegments() * of_segment;
    for (int i = static_cast<int>(blockIdx.x); i < num_items; i += static_cast<int>(gridDim.x)) {
      const LinearSegment segment = this->Segment(i / of_segment);
      const int begin = segment.begin;
      if (begin != segment.first || segment.is_followed == 0) continue;
      const int head = i % of_segment / kTiles, column = i % kTiles * kColumns;
      const int num_maps = CountMaps(begin);
      if constexpr (Traits::kHasDeltaRule) {
        GoThroughMatrices(begin, num_maps, head, column);
      } else {
        GoThroughMultiples(begin, num_maps, head, column);
      }
    }
  }

  // Segments of the request that another one follows.
  __device__ __forceinline__ int CountMaps(int begin) const {
    const int end =
        plan_.template FirstRequest<kWarps>(begin + 1, shared_.maxima, [](int) { return true; });
    return CeilDiv(end - begin, p_.segment_chunks) - 1;
  }
  __device__ __forceinline__ bool IsZero(i64 map) const { return this->MapIsZero(map) != 0; }

  // --- M is a matrix ---

  __device__ __forceinline__ void GoThroughMatrices(int begin, int num_maps, int head, int column) {
    const auto map = [&](int i) { return this->Map(begin + i * p_.segment_chunks, head); };
    const auto load = [&](int i) {
      const unsigned char* from = this->MapM(map(i)) + threadIdx.x * 16;
      const u32 to = SharedAddress(&shared_.m[i % kBuffers]) + threadIdx.x * 16;
#pragma unroll 8
      for (int at = 0; at < 2 * kHalfBytes; at += kNumThreads * 16) {
        CopyAsync16(to + at, from + at, true);
      }
    };
    // Asked for i from 0 on, one after the other.
    u32 zeros = 0;  // of 32 maps
    const auto is_zero = [&](int i) {
      if (i % kWarpSize == 0) {
        zeros = __ballot_sync(kFullWarp, i + lane_ < num_maps && IsZero(map(i + lane_)));
      }
      return i >= num_maps || (zeros >> i % kWarpSize & 1) != 0;
    };
    Sums s, next;  // B of this map and of the next one
    bool skips = is_zero(0), has_state = false;
    if (!skips) {
      if (kBuffers == 2) load(0);
      ReadB(this->MapB(map(0)) + column, s.x);
    }
    CommitCopies();
    for (int i = 0; i < num_maps; ++i) {
      const bool skips_next = is_zero(i + 1);
      if constexpr (kBuffers == 1) {
        if (!skips) load(i);
      } else {
        if (!skips_next) load(i + 1);
      }
      CommitCopies();
      if (!skips_next) ReadB(this->MapB(map(i + 1)) + column, next.x);
      if (!skips) {
        if (!has_state) {
          __syncthreads();  // the state that nobody needed is written
          LoadState(i == 0 ? this->MapState(map(0)) : this->MapB(map(i - 1)), column);
        }
        Advance(shared_.m[i % kBuffers], this->MapB(map(i)) + column, s.x);
      }
      s = next;
      has_state = !skips;
      skips = skips_next;
    }
    WaitCopies<0>();
    __syncthreads();
  }

  // The warp's rows of S, or B, from the item's columns on, as accumulators.
  struct Sums {
    float x[kWarpRows / 8][4];
  };
  __device__ __forceinline__ void ReadB(const float* b, float (&s)[kWarpRows / 8][4]) const {
    ForElements(s, [&](float& x, int row, int column) {
      x = b[static_cast<i64>(warp_ * kWarpRows + row) * kV + column];
    });
  }

  // s: B, which becomes the new state, also in memory.
  __device__ __forceinline__ void Advance(const Matrix& m, float* b, float (&s)[kWarpRows / 8][4]) {
    const int first_row = warp_ * kWarpRows;
    WaitCopies<kBuffers - 1>();
    __syncthreads();  // M and S are there
    const u32 high_m = SharedAddress(m.parts[0]) + first_row / 64 * (kK / 64 * kPartBytes);
    float rest[kWarpRows / 8][4];  // of small products: a chain of its own
    SetZero(rest);
#pragma unroll
    for (int k = 0; k < kK / 16; ++k) {
      u32 high[4], low[4];
      LoadA(high, SharedAddress(shared_.s.parts[0]), 0, 16 * k);
      LoadA(low, SharedAddress(shared_.s.parts[1]), 0, 16 * k);
      u32 m_high[4], m_low[4];
      LoadRowsB(m_high, high_m, first_row % 64, 16 * k);
      LoadRowsB(m_low, high_m + kHalfBytes, first_row % 64, 16 * k);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        MmaBf16(rest[i], low, m_high[2 * i], m_high[2 * i + 1]);
        MmaBf16(s[i], high, m_high[2 * i], m_high[2 * i + 1]);
        MmaBf16(rest[i], high, m_low[2 * i], m_low[2 * i + 1]);
      }
    }
#pragma unroll
    for (int i = 0; i < kWarpRows / 8; ++i) {
#pragma unroll
      for (int c = 0; c < 4; ++c) s[i][c] += rest[i][c];
    }
    __syncthreads();  // S and M are read
    ForElements(s, [&](float& x, int row, int column) {
      b[static_cast<i64>(first_row + row) * kV + column] = x;
    });
#pragma unroll
    for (int j = 0; j < kWarpRows / 8; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        WritePair(lane_ / 4 + 8 * half, first_row + 8 * j + lane_ % 4 * 2, s[j][2 * half],
                  s[j][2 * half + 1]);
      }
    }
  }

  // Calls fn(x, row, column) for the lane's elements of the warp's rows of S.
  template <class Fn>
  __device__ __forceinline__ void ForElements(float (&s)[kWarpRows / 8][4], const Fn& fn) const {
#pragma unroll
    for (int j = 0; j < kWarpRows / 8; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        fn(s[j][c], 8 * j + lane_ % 4 * 2 + c % 2, lane_ / 4 + c / 2 * 8);
      }
    }
  }

  // Two elements of S^T.
  __device__ __forceinline__ void WritePair(int column, int row, float x, float y) {
    const int at = SwizzledByte(column, row);
    const u32 high = PackBf16(x, y);
    *reinterpret_cast<u32*>(shared_.s.parts[0] + at) = high;
    *reinterpret_cast<u32*>(shared_.s.parts[1] + at) =
        PackBf16(x - HalfOf<kElementBf16>(high, 0), y - HalfOf<kElementBf16>(high, 1));
  }

  // from: [kK, kV], of which rows behind kDimK may be anything.
  __device__ __forceinline__ void LoadState(const float* from, int column) {
    for (int i = static_cast<int>(threadIdx.x); i < kK / 2 * kColumns; i += kNumThreads) {
      const int row = i / kColumns * 2, v = i % kColumns;
      const float* x = from + static_cast<i64>(row) * kV + column + v;
      WritePair(v, row, row < kDimK ? x[0] : 0.0f, row < kDimK ? x[kV] : 0.0f);
    }
  }

  // --- M is a multiple of I ---

  __device__ __forceinline__ void GoThroughMultiples(int begin, int num_maps, int head,
                                                     int column) {
    for (int e = static_cast<int>(threadIdx.x); e < kDimK * kColumns; e += kNumThreads) {
      const i64 at = static_cast<i64>(e / kColumns) * kV + column + e % kColumns;
      float x = this->MapState(this->Map(begin, head))[at];
      for (int i = 0; i < num_maps; ++i) {
        const i64 map = this->Map(begin + i * p_.segment_chunks, head);
        float& b = this->MapB(map)[at];
        if (IsZero(map)) {
          x = b;
        } else {
          b = x = fmaf(*reinterpret_cast<const float*>(this->MapM(map)), x, b);
        }
      }
    }
  }

  Shared& shared_;
  const int warp_, lane_;
};

}  // namespace jax_attn
