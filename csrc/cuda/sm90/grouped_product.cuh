// Each row of x times the matrix of its group, on Hopper: the experts of a mixture.
//
// A tile of y is kTileRows rows of one group by kTileColumns columns. One warp copies steps of 64
// of the depth by TMA into a ring; each consumer, a warpgroup, multiplies 64 rows by all columns
// with wgmma. Every CTA stays and takes each gridDim.x-th tile. Which tile that is follows from the
// sizes of the groups, which are data: the CTA sums them up first.
//
// TMA copies rows from any row on, so the last tile of a group also copies rows of the next groups,
// or zeros behind all rows. Their products stay in their own rows and are not stored. Depth and
// columns beyond the arrays are zeros in both operands.
#pragma once

#include "cuda/common/budget.cuh"
#include "cuda/common/math.cuh"
#include "cuda/sm90/grouped_product_params.h"
#include "cuda/sm90/pipeline.cuh"

namespace jax_attn {

template <class Traits>
class GroupedProductBody {
  static constexpr int kRows = Traits::kTileRows, kColumns = Traits::kTileColumns;
  static constexpr int kStep = kGroupedProductStep;
  static constexpr int kConsumers = kRows / 64, kConsumerThreads = 128 * kConsumers;
  // Row tiles of a group whose columns are taken together: the rows and matrices that all CTAs read
  // at a time fit in L2.
  static constexpr int kBand = 8;

  using X = SwizzledTile<kStep, kRows>;
  using W = typename Conditional<Traits::kTransposed, SwizzledTile<kStep, kColumns>,
                                 SwizzledTile<kColumns, kStep>>::Type;
  static constexpr int kStageBytes = X::kBytes + W::kBytes;

  // Where each group begins. The rows behind all groups are one more group; the last number is the
  // end.
  struct Borders {
    i32 rows[kMaxProductGroups + 2];
    i32 tiles[kMaxProductGroups + 2];  // of kRows rows
  };
  static constexpr int kBarrierBytes = 256;
  static constexpr int kStages =
      (CtaSmemBudget(Traits::kArch, 1) - static_cast<int>(sizeof(Borders)) - kBarrierBytes) /
      kStageBytes;

  struct Shared {
    unsigned char x[kStages][X::kBytes];
    unsigned char w[kStages][W::kBytes];
    Borders borders;
    u64 full[kStages], empty[kStages];  // mbarriers
  };
  static_assert(kRows == 64 || kRows == 128, "one or two consumers");
  static_assert(kColumns % 64 == 0 && kColumns <= 256 && kStages >= 4, "a ring");

 public:
  static constexpr int kNumThreads = kConsumerThreads + kWarpSize;
  static constexpr int kMinCtasPerSm = 1;
  static constexpr int kSmemBytes = sizeof(Shared);
  static_assert(kSmemBytes <= CtaSmemBudget(Traits::kArch, 1), "a CTA fits a multiprocessor");

  __device__ __forceinline__ static void Run(const GroupedProductParams& p) {
    extern __shared__ __align__(1024) unsigned char smem[];
    Shared& shared = *reinterpret_cast<Shared*>(smem);
    const int thread = static_cast<int>(threadIdx.x);
    if (thread == kConsumerThreads) {
      PrefetchTensorMap(p.x_map);
      PrefetchTensorMap(p.weights_map);
      for (int s = 0; s < kStages; ++s) {
        InitBarrier(SharedAddress(&shared.full[s]), 1);
        InitBarrier(SharedAddress(&shared.empty[s]), kConsumerThreads / kWarpSize);
      }
    }
    for (int group = thread; group < p.num_groups; group += kNumThreads) {
      shared.borders.rows[group] = Clamp(LoadConstant(p.group_sizes + group), 0, p.num_rows);
    }
    __syncthreads();
    if (thread < kWarpSize) SumUp(p, shared.borders, thread);
    __syncthreads();
    GroupedProductBody body(p, shared);
    if (thread < kConsumerThreads) {
      body.Consume(thread);
    } else if (thread == kConsumerThreads) {
      body.Produce();
    }
  }

 private:
  struct Tile {
    int group, row, column;
    int row_end;  // of the group
  };

  // The place in the ring.
  struct Place {
    int stage = 0;
    u32 parity = 0;

    __device__ __forceinline__ void Advance() {
      if (++stage == kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
  };

  __device__ __forceinline__ GroupedProductBody(const GroupedProductParams& p, Shared& shared)
      : p_(p), shared_(shared), column_tiles_(CeilDiv(p.columns, kColumns)) {
    num_tiles_ = shared.borders.tiles[p.num_groups + 1] * column_tiles_;
  }

  // --- tiles ---

  // Turns the sizes of groups, in borders.rows, into borders. Each lane of the warp has
  // neighbouring groups.
  __device__ static void SumUp(const GroupedProductParams& p, Borders& borders, int lane) {
    const int groups = p.num_groups, own = CeilDiv(groups, kWarpSize);
    const int begin = Min(lane * own, groups), end = Min(begin + own, groups);
    int rows = 0;
    for (int group = begin; group < end; ++group) {
      rows = Min(rows + borders.rows[group], p.num_rows);
    }
    int row = Before(rows, p.num_rows, lane), tiles = 0;
    for (int group = begin; group < end; ++group) {
      const int next = Min(row + borders.rows[group], p.num_rows);
      borders.rows[group] = row;
      borders.tiles[group] = tiles;
      tiles += CeilDiv(next - row, kRows);
      row = next;
    }
    const int tile = Before(tiles, 0x7fffffff, lane);
    for (int group = begin; group < end; ++group) borders.tiles[group] += tile;
    if (lane == kWarpSize - 1) {
      borders.rows[groups] = row;
      borders.tiles[groups] = tile + tiles;
      borders.rows[groups + 1] = p.num_rows;
      borders.tiles[groups + 1] = tile + tiles + CeilDiv(p.num_rows - row, kRows);
    }
  }

  // The sum over the lanes before this one, at most `limit`.
  __device__ static int Before(int x, int limit, int lane) {
    int sum = x;
#pragma unroll
    for (int i = 1; i < kWarpSize; i *= 2) {
      const int other = __shfl_up_sync(kFullWarp, sum, i);
      if (lane >= i) sum = Min(sum + other, limit);
    }
    const int before = __shfl_up_sync(kFullWarp, sum, 1);
    return lane == 0 ? 0 : before;
  }

  // The i-th tile. Tiles of a group follow each other: bands of kBand row tiles, in each the
  // columns from left to right.
  __device__ __forceinline__ Tile Find(int i) const {
    const Borders& borders = shared_.borders;
    const int row_tile = i / column_tiles_;
    int group = 0, last = p_.num_groups;
    while (group < last) {
      const int middle = (group + last + 1) / 2;
      if (borders.tiles[middle] <= row_tile) {
        group = middle;
      } else {
        last = middle - 1;
      }
    }
    const int first = borders.tiles[group], num = borders.tiles[group + 1] - first;
    const int in_group = i - first * column_tiles_, band = in_group / (kBand * column_tiles_);
    const int in_band = in_group - band * kBand * column_tiles_;
    const int height = Min(kBand, num - band * kBand);
    const int column = in_band / height;
    const int row = borders.rows[group] + (band * kBand + in_band - column * height) * kRows;
    return {group, row, column * kColumns, borders.rows[group + 1]};
  }

  // --- producer: one thread ---

  __device__ __forceinline__ void Produce() {
    Place place;
    for (int i = static_cast<int>(blockIdx.x); i < num_tiles_; i += static_cast<int>(gridDim.x)) {
      const Tile tile = Find(i);
      if (tile.group == p_.num_groups) break;  // none of the tiles behind it has products
      for (int k = 0; k < p_.depth; k += kStep, place.Advance()) {
        const u32 full = SharedAddress(&shared_.full[place.stage]);
        const u32 w = SharedAddress(shared_.w[place.stage]);
        WaitBarrier(SharedAddress(&shared_.empty[place.stage]), place.parity ^ 1);
        ExpectBytes(full, kStageBytes);
        if constexpr (Traits::kTransposed) {
          LoadTmaTile(w, p_.weights_map, k, 0, tile.column, tile.group, full);
        } else {
#pragma unroll
          for (int b = 0; b < W::kBlocks; ++b) {
            LoadTmaTile(w + b * W::kBlockBytes, p_.weights_map, tile.column + 64 * b, 0, k,
                        tile.group, full);
          }
        }
        LoadTmaTile(SharedAddress(shared_.x[place.stage]), p_.x_map, k, 0, tile.row, 0, full);
        ArriveBarrier(full);
      }
    }
  }

  // --- consumers ---

  static constexpr int kColumnTiles = kColumns / 8;  // of the accumulators
  using Product = Wgmma<kColumns, Traits::kDtype>;
  using E = Element<Traits::kDtype>;

  __device__ __forceinline__ void Consume(int thread) {
    const int consumer = Uniform(thread / 128), lane = thread % kWarpSize;
    const int own_row = 64 * consumer + Uniform(thread % 128 / kWarpSize) * 16 + lane / 4;
    float y[kColumnTiles][4] = {};
    Place place;
    for (int i = static_cast<int>(blockIdx.x); i < num_tiles_; i += static_cast<int>(gridDim.x)) {
      const Tile tile = Find(i);
      if (tile.group == p_.num_groups) {
        StoreZeros(tile, own_row, lane);
      } else if (tile.row + 64 * consumer < tile.row_end) {
        Multiply(y, place, consumer, lane);
        Store(y, tile, own_row, lane);
      } else {
        Skip(place, lane);
      }
    }
  }

  __device__ __forceinline__ void Release(int stage, int lane) {
    if (lane == 0) ArriveBarrier(SharedAddress(&shared_.empty[stage]));
  }

  // Lets the steps of a tile pass in which this consumer has no rows.
  __device__ __forceinline__ void Skip(Place& place, int lane) {
    for (int k = 0; k < p_.depth; k += kStep, place.Advance()) {
      WaitBarrier(SharedAddress(&shared_.full[place.stage]), place.parity);
      __syncwarp();
      Release(place.stage, lane);
    }
  }

  __device__ __forceinline__ void Multiply(float (&y)[kColumnTiles][4], Place& place, int consumer,
                                           int lane) {
    int before = 0;
    PinRegisters(y);
    for (int k = 0; k < p_.depth; k += kStep, place.Advance()) {
      WaitBarrier(SharedAddress(&shared_.full[place.stage]), place.parity);
      const u64 x = X::Descriptor(SharedAddress(shared_.x[place.stage]), 64 * consumer);
      const u32 tile = SharedAddress(shared_.w[place.stage]);
      const u64 w = Traits::kTransposed ? W::Descriptor(tile, 0) : W::TransposedDescriptor(tile, 0);
      WgmmaFence();
#pragma unroll
      for (int kk = 0; kk < kStep / 16; ++kk) {
        const bool adds = k > 0 || kk > 0;
        if constexpr (Traits::kTransposed) {
          Product::SharedA(y, X::AlongK(x, kk), W::AlongK(w, kk), adds);
        } else {
          Product::SharedATransposedB(y, X::AlongK(x, kk), W::AlongRows(w, kk), adds);
        }
      }
      WgmmaCommit();
      // One step is in flight while the next one is issued.
      WgmmaWait<1>();
      if (k > 0) Release(before, lane);
      before = place.stage;
    }
    WgmmaWait<0>();
    PinRegisters(y);
    Release(before, lane);
  }

  // Four lanes have 32 columns of a row, and each writes 8 of them at once.
  __device__ __forceinline__ void Store(const float (&y)[kColumnTiles][4], const Tile& tile,
                                        int own_row, int lane) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = tile.row + own_row + 8 * h;
      u16* const to = RowOf(row) + tile.column;
      const int num = row < tile.row_end ? p_.columns - tile.column : 0;
#pragma unroll
      for (int j = 0; j < kColumnTiles; j += 4) {
        u32 packed[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          packed[c] = E::Pack(y[j + c][2 * h], y[j + c][2 * h + 1]);
        }
        const uint4 words = TransposeQuad(packed, lane);
        const int column = 8 * (j + lane % 4);
        if (column < num) StoreVector(to + column, words);
      }
    }
  }

  __device__ __forceinline__ void StoreZeros(const Tile& tile, int own_row, int lane) {
    for (int h = 0; h < 2; ++h) {
      const int row = tile.row + own_row + 8 * h;
      if (row >= tile.row_end) continue;
      const int end = Min(tile.column + kColumns, p_.columns);
      for (int column = tile.column + 8 * (lane % 4); column < end; column += 32) {
        StoreVector(RowOf(row) + column, make_uint4(0, 0, 0, 0));
      }
    }
  }

  __device__ __forceinline__ u16* RowOf(int row) const {
    return static_cast<u16*>(p_.y) + static_cast<i64>(row) * p_.columns;
  }

  const GroupedProductParams& p_;
  Shared& shared_;
  const int column_tiles_;
  int num_tiles_;
};

}  // namespace jax_attn
