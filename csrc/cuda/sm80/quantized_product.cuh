// x @ W for few rows of x and a quantized W, on every architecture from sm_80 on: mma.sync,
// ldmatrix, cp.async.
//
// Up to some 64 rows the time is that of reading W, if its values reach the tensor cores without a
// detour. So a CTA has a wide tile of columns, so that x is read rarely, and all rows of a tile of
// x, so that W is read and dequantized once. It walks down W in steps of kDepth rows, with a ring
// of steps in flight.
//
// It computes the transposed product W^T x^T: W has the 16 rows of an mma and x its 8 columns, of
// which few are wasted if x has few rows. A warp has 32 columns and half of the depth of every
// step. A lane reads 4 bytes of a quantized row. The i-th bytes are column i of four 8-column
// halves of operands, so that a lane ends up with four neighbouring columns of y.
//
// The depth may be split over CTAs. Then y is one sum for each split, and the caller adds them up:
// the order is fixed, and XLA fuses the additions into the kernel that needs them.
#pragma once

#include "cuda/common/budget.cuh"
#include "cuda/common/quantized_weights.cuh"

namespace jax_attn {

// Products of a warp by mma.sync: of 32 columns and 32 of the depth of a step.
template <class Traits>
class MmaProducts {
 public:
  static constexpr int kRowTiles = Traits::kTileRows / 8;
  static constexpr int kXPitch = kProductStep + 8;  // an odd number of 16-byte chunks
  static constexpr int kXAlignment = 16;            // bytes
  static constexpr int kColumnWarps = 1;            // that multiply together

  // Byte offset of 8 elements of a row of x in a step.
  __device__ __forceinline__ static u32 XOffset(u32 row, u32 chunk) {
    return row * (kXPitch * 2) + chunk * 16;
  }
  // Before the barrier behind which other warps read what this thread copied.
  __device__ __forceinline__ static void Publish() {}

  // Adds to y, whose tiles are of the lane's columns 2 i and 2 i + 1. x: of the step. depth: the
  // first of the warp's. weights(k, w): operands of the 16 rows from 8 k on.
  template <class Weights>
  __device__ __forceinline__ static void Multiply(float (&y)[2][kRowTiles][4], u32 x, int depth,
                                                  int lane, Weights weights) {
#pragma unroll
    for (int k = 0; k < 4; k += 2) {
      u32 w[2][4];
      weights(k, w);
      // Matrices of an ldmatrix: twice 8 rows of x, each with 8 and 8 of the depth.
#pragma unroll
      for (int j = 0; j < kRowTiles; j += 2) {
        const int row = Min(j * 8 + lane / 16 * 8, Traits::kTileRows - 8) + lane % 8;
        const int chunk = depth / 8 + k + lane / 8 % 2;
        u32 b[4];
        LoadMatrix4(b, x + XOffset(static_cast<u32>(row), static_cast<u32>(chunk)));
#pragma unroll
        for (int i = 0; i < Min(2, kRowTiles - j); ++i) {
          E::Mma(y[0][j + i], w[0], b[2 * i], b[2 * i + 1]);
          E::Mma(y[1][j + i], w[1], b[2 * i], b[2 * i + 1]);
        }
      }
    }
  }

 private:
  using E = Element<Traits::kDtype>;
};

template <class Traits, class Products = MmaProducts<Traits>>
class QuantizedProductBody {
 public:
  using Params = QuantizedProductParams;
  using Quantized = WeightBits<Traits::kFormat, Traits::kDtype>;
  using Factors = WeightFactors<Traits::kFormat, Traits::kDtype>;

  // --- shape ---

  static constexpr int kRows = Traits::kTileRows, kColumns = Traits::kTileColumns;
  static constexpr int kDepth = kProductStep;  // of a step
  static constexpr int kWarpColumns = 32, kWarpDepth = 32;
  static constexpr int kColumnWarps = kColumns / kWarpColumns;
  static constexpr int kDepthWarps = kDepth / kWarpDepth;
  static constexpr int kNumThreads = kColumnWarps * kDepthWarps * kWarpSize;
  static constexpr int kMinCtasPerSm = 1;
  static constexpr int kRowTiles = kRows / 8;    // of mma
  static constexpr int kPairs = kWarpDepth / 8;  // rows of a column that a lane has
  static_assert(kRows % 8 == 0 && kColumns % kWarpColumns == 0 && kDepthWarps == 2, "whole tiles");
  static_assert(kColumnWarps % Products::kColumnWarps == 0 && kPairs == 4, "whole products");

  static constexpr int kQuantizedRows = kDepth / Quantized::kPerByte;
  // Lanes read 4 neighbouring rows of bytes, or every other one of 8: these are in different banks.
  static constexpr int kQuantizedPitch =
      Quantized::kPerByte == 2 ? (kColumns + 31) / 64 * 64 + 32 : kColumns + 16;
  static constexpr int kXPitch = Products::kXPitch;
  // Vectors of 16 bytes in a row.
  static constexpr u32 kChunks = kColumns / 16, kXChunks = kDepth / 8;
  static_assert(kNumThreads % kChunks == 0 && kNumThreads % kXChunks == 0, "whole rows at once");
  static constexpr int kScaleBytes = Traits::kFormat == kE2m1Weights ? 1 : 4;
  static constexpr bool kHasZeros = Traits::kFormat == kInt4Weights;
  static constexpr int kScaleRows = Traits::kScaleRows;  // groups in a step, at most
  static_assert(kScaleRows == 1 || kScaleRows == kDepthWarps, "a warp's rows have one scale");

  struct Zeros {
    alignas(16) unsigned char zeros[kScaleRows][kColumns];
  };
  struct NoZeros {};
  struct Step : Conditional<kHasZeros, Zeros, NoZeros>::Type {
    alignas(Products::kXAlignment) u16 x[kRows][kXPitch];
    alignas(16) unsigned char quantized[kQuantizedRows][kQuantizedPitch];
    alignas(16) unsigned char scales[kScaleRows][kColumns * kScaleBytes];
  };
  // Sums of the warps with the second half of each step, in the order of registers.
  using Sums = float[kColumnWarps][kRowTiles * 8][kWarpSize];

  static constexpr int kStepBytes = static_cast<int>(sizeof(Step));
  // 8 steps are more than a multiprocessor needs in flight.
  static constexpr int kSlots = Clamp(CtaSmemBudget(Traits::kArch, 1) / kStepBytes, 1, 8);
  static constexpr int kSmemBytes = Max(kSlots * kStepBytes, static_cast<int>(sizeof(Sums)));
  static_assert(kSlots >= 2, "a step is copied while another one is multiplied");

  __device__ __forceinline__ static void Run(const Params& p) {
    extern __shared__ __align__(1024) unsigned char smem[];
    QuantizedProductBody(p, smem).Run();
  }

 private:
  // --- offsets ---

  // CTAs that read the same part of W are neighbours.
  __device__ __forceinline__ QuantizedProductBody(const Params& p, unsigned char* smem)
      : p_(p), ring_(reinterpret_cast<Step*>(smem)), sums_(*reinterpret_cast<Sums*>(smem)) {
    const int row_tiles = CeilDiv(p.num_rows, kRows);
    const int column_tiles = CeilDiv(p.columns, kColumns);
    const int index = static_cast<int>(blockIdx.x) / row_tiles;
    first_row_ = static_cast<int>(blockIdx.x) % row_tiles * kRows;
    first_column_ = index % column_tiles * kColumns;
    split_ = index / column_tiles;
    depth_begin_ = split_ * p.split_depth;  // may be behind the end
    num_steps_ = CeilDiv(Max(0, Min(p.split_depth, p.depth - depth_begin_)), kDepth);
    num_groups_ = CeilDiv(p.depth, p.group_size);
    const u32 column = static_cast<u32>(first_column_) + threadIdx.x % kChunks * 16;
    const u32 row = static_cast<u32>(depth_begin_ / Quantized::kPerByte) + threadIdx.x / kChunks;
    codes_at_ = row * (static_cast<u32>(p.columns) / 16) + column / 16;
    has_columns_ = static_cast<int>(column) < p.columns;
    x_at_ =
        (static_cast<u32>(first_row_) + threadIdx.x / kXChunks) * (static_cast<u32>(p.depth) / 8) +
        static_cast<u32>(depth_begin_) / 8 + threadIdx.x % kXChunks;
    // A single group may not be a whole number of steps.
    group_steps_ = num_groups_ == 1 ? CeilDiv(p.depth, kDepth) : p.group_size / kDepth;
    if constexpr (kScaleRows == 1) {
      first_group_end_ = group_steps_ - depth_begin_ / kDepth % group_steps_;
      load_group_ = depth_begin_ / kDepth / group_steps_;
    }
  }

  // The part of a tile and a step that a thread has. It is computed where it is used, like offsets
  // in memory: sums leave no registers to keep it.
  struct Part {
    int lane, column_warp, depth_warp;
    __device__ __forceinline__ Part() {
      const u32 thread = static_cast<u32>(Opaque(static_cast<int>(threadIdx.x)));
      const u32 warp = thread / kWarpSize;
      lane = static_cast<int>(thread % kWarpSize);
      column_warp = static_cast<int>(warp % kColumnWarps);
      depth_warp = static_cast<int>(warp / kColumnWarps);
    }
    // The first of the lane's four columns of the tile.
    __device__ __forceinline__ int Column() const {
      return column_warp * kWarpColumns + lane / 4 * 4;
    }
  };

  __device__ __forceinline__ void Run() {
    // Unrolled: from a rolled loop NVRTC 13.0 makes copies that are illegal instructions (H100,
    // e4m3, 8 rows).
#pragma unroll
    for (int i = 0; i < kSlots - 1; ++i) Load(i, i);
    int slot = 0;
    for (int step = 0; step < num_steps_; ++step) {
      WaitCopies<kSlots - 2>();
      Products::Publish();
      __syncthreads();  // the step is there for all, and the slot that is filled next has been read
      Load(step + kSlots - 1, slot == 0 ? kSlots - 1 : slot - 1);
      Multiply(step, slot);
      slot = slot == kSlots - 1 ? 0 : slot + 1;
    }
    WaitCopies<0>();
    __syncthreads();
    Finish();
  }

  // Whether scales must be loaded again. end: the step at which the present group ends, counted
  // from the CTA's first.
  __device__ __forceinline__ bool BeginsGroup(int step, int& end) const {
    if constexpr (kScaleRows > 1) return true;
    if (step != end) return false;
    end = step == 0 ? first_group_end_ : step + group_steps_;
    return true;
  }

  // --- load ---

  // Copies kNum rows from `first` on of `array`, whose rows have p.columns elements: the CTA's
  // columns. Zeros behind num_rows and the last column.
  template <int kNum, int kBytes, int kPitch>
  __device__ __forceinline__ void Copy(unsigned char (&to)[kNum][kPitch], const void* array,
                                       int first, int num_rows) {
    constexpr u32 kElementBytes = kBytes / kColumns;
    const u32 row_bytes = static_cast<u32>(p_.columns) * kElementBytes;
    const u32 begin = static_cast<u32>(first_column_) * kElementBytes;
    ForEachChunk<kNum, kBytes / 16>([&](u32 row, u32 chunk) {
      const u32 byte = begin + chunk * 16;
      const bool valid = static_cast<int>(row) < num_rows - first && byte < row_bytes;
      const char* from = static_cast<const char*>(array) +
                         static_cast<u64>(static_cast<u32>(first) + row) * row_bytes + byte;
      CopyAsync16(SharedAddress(&to[row][chunk * 16]), from, valid, EvictFirst());
    });
  }

  // Divides kNum rows of kChunks vectors of 16 bytes among all threads: copy(row, chunk). Offsets
  // in memory are computed again in every step: sums leave no registers for them.
  template <u32 kNum, u32 kChunks, class CopyChunk>
  __device__ __forceinline__ static void ForEachChunk(CopyChunk copy) {
    const u32 thread = static_cast<u32>(Opaque(static_cast<int>(threadIdx.x)));
#pragma unroll
    for (u32 i = 0; i < kNum * kChunks; i += kNumThreads) {
      const u32 index = i + thread;
      if (i + kNumThreads <= kNum * kChunks || index < kNum * kChunks) {
        copy(index / kChunks, index % kChunks);
      }
    }
  }

  // Copies kNum rows of a step, `rows` at a time and from `at` on, in vectors of 16 bytes: of the
  // thread, which has row `row` of the first ones. They are row_vectors apart; num_valid are there.
  template <u32 kNum, u32 kAtOnce, class To>
  __device__ __forceinline__ static void CopyRows(const void* array, u32 at, u32 row,
                                                  u32 row_vectors, int num_valid, To to) {
#pragma unroll
    for (u32 i = 0; i < kNum; i += kAtOnce) {
      if (i + kAtOnce > kNum && row + i >= kNum) break;
      const char* from =
          static_cast<const char*>(array) + static_cast<u64>(at + i * row_vectors) * 16;
      to(row + i, from, static_cast<int>(row + i) < num_valid);
    }
  }

  __device__ __forceinline__ void Load(int step, int slot) {
    if (step < num_steps_) {
      Step& to = ring_[slot];
      const int k = depth_begin_ + step * kDepth;
      const u32 thread = static_cast<u32>(Opaque(static_cast<int>(threadIdx.x)));
      const u32 row_vectors = static_cast<u32>(p_.columns) / 16;
      CopyRows<kQuantizedRows, kNumThreads / kChunks>(
          p_.codes, codes_at_, thread / kChunks, row_vectors, (p_.depth - k) / Quantized::kPerByte,
          [&](u32 row, const char* from, bool valid) {
            CopyAsync16(SharedAddress(&to.quantized[row][thread % kChunks * 16]), from,
                        valid && has_columns_, EvictFirst());
          });
      codes_at_ += kQuantizedRows * row_vectors;
      if (BeginsGroup(step, load_group_end_)) {
        const int group = kScaleRows == 1 ? load_group_++ : k / kWarpDepth;
        Copy<kScaleRows, kColumns * kScaleBytes>(to.scales, p_.scales, group, num_groups_);
        if constexpr (kHasZeros) {
          const bool has_zeros = p_.zeros != nullptr;
          Copy<kScaleRows, kColumns>(to.zeros, has_zeros ? p_.zeros : p_.codes, group,
                                     has_zeros ? num_groups_ : 0);
        }
      }
      const u32 chunk = thread % kXChunks;
      const bool is_inside = static_cast<int>(chunk * 8) < p_.depth - k;
      CopyRows<kRows, kNumThreads / kXChunks>(
          p_.x, x_at_, thread / kXChunks, static_cast<u32>(p_.depth) / 8, p_.num_rows - first_row_,
          [&](u32 row, const char* from, bool valid) {
            CopyAsync16(SharedAddress(to.x) + Products::XOffset(row, chunk), from,
                        valid && is_inside);
          });
      x_at_ += kXChunks;
    }
    CommitCopies();
  }

  // --- multiply ---

  __device__ __forceinline__ void Multiply(int step, int slot) {
    const Step& from = ring_[slot];
    const Part part;
    if (BeginsGroup(step, factors_end_)) SetFactors(from, part);
    // Operands of mma: the lane's columns 2 i and 2 i + 1, 16 rows.
    const auto weights = [&](int k, u32(&w)[2][4]) {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          w[c / 2][2 * pair + c % 2] = factors_[c].Dequantize(Halves(from, part, k + pair, c));
        }
      }
    };
    Products::Multiply(y_, SharedAddress(from.x), part.depth_warp * kWarpDepth, part.lane, weights);
  }

  // Rows 8 pair + 2 t and the next of the warp's depth, t = lane % 4, in the order in which
  // ldmatrix gives those of x.
  __device__ __forceinline__ u32 Halves(const Step& from, const Part& part, int pair, int c) const {
    const int t = part.lane % 4, column = part.Column();
    const auto word = [&](int row) {
      return *reinterpret_cast<const u32*>(&from.quantized[row][column]);
    };
    if constexpr (Quantized::kPerByte == 2) {
      return Quantized::Column(word(part.depth_warp * kWarpDepth / 2 + pair * 4 + t), c);
    } else {
      const int row = part.depth_warp * kWarpDepth + pair * 8 + 2 * t;
      return ColumnOf(word(row), word(row + 1), c);
    }
  }

  __device__ __forceinline__ void SetFactors(const Step& from, const Part& part) {
    const int row = kScaleRows == 1 ? 0 : part.depth_warp, column = part.Column();
    u32 zeros = 0;
    if constexpr (kHasZeros) zeros = *reinterpret_cast<const u32*>(&from.zeros[row][column]);
    const unsigned char* scales = &from.scales[row][column * kScaleBytes];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const u32 scale = kScaleBytes == 1 ? scales[c] : reinterpret_cast<const u32*>(scales)[c];
      factors_[c].Set(scale, zeros >> 8 * c & 0xff);
    }
  }

  // --- sums ---

  // Warps with the second half of each step hand over their sums.
  __device__ __forceinline__ void Finish() {
    const Part part;
    float (&sums)[kRowTiles * 8][kWarpSize] = sums_[part.column_warp];
    if (part.depth_warp == 1) {
#pragma unroll
      for (int i = 0; i < kRowTiles * 8; ++i) sums[i][part.lane] = y_[i / 4 % 2][i / 8][i % 4];
    }
    __syncthreads();
    const int column = first_column_ + part.Column();
    if (part.depth_warp == 1 || column >= p_.columns) return;
    // A lane has four neighbouring columns of rows 2 t and 2 t + 1 of each 8.
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = first_row_ + j * 8 + part.lane % 4 * 2 + e;
        const auto sum = [&](int tile, int i) {
          return y_[tile][j][i] + sums[j * 8 + tile * 4 + i][part.lane];
        };
        const float4 y = make_float4(sum(0, e), sum(0, 2 + e), sum(1, e), sum(1, 2 + e));
        if (row >= p_.num_rows) continue;
        const i64 at = (static_cast<i64>(split_) * p_.num_rows + row) * p_.columns + column;
        if (p_.is_wide) {
          Store4<kElementF32>(p_.y, at, y);
        } else {
          Store4<Traits::kDtype>(p_.y, at, y);
        }
      }
    }
  }

  const Params& p_;
  Step* const ring_;
  Sums& sums_;
  int first_row_, first_column_, split_, depth_begin_, num_steps_;
  int num_groups_, group_steps_, first_group_end_ = 0;
  // The thread's next vectors of the codes and of x, and whether its columns are there.
  u32 codes_at_, x_at_;
  bool has_columns_;
  int load_group_ = 0;
  int load_group_end_ = 0, factors_end_ = 0;  // see BeginsGroup
  Factors factors_[4];
  float y_[2][kRowTiles][4] = {};
};

}  // namespace jax_attn
