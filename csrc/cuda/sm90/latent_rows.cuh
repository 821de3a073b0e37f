// The producer warpgroup of mla.cuh and mla_decode.cuh: latent rows of the steps of a queue, on
// their way to shared memory as blocks of 64 columns, swizzled.
#pragma once

#include "cuda/sm90/pipeline.cuh"

namespace jax_attn {

// A Shape has kUnits units of a step, which are loaded by themselves, in the order of UnitInOrder:
// NumBlocks(unit) blocks of 64 columns from FirstBlock(unit) on. Its RingPlace says where they go:
// Barrier(unit) of Shared::full and empty, phase parity(); the offset in bytes of Block(unit, i),
// and on it moves by NextUnit and NextStep.
template <class Traits, class Shape>
class LatentRows {
 public:
  using Shared = typename Shape::Shared;

  __device__ __forceinline__ LatentRows(const AttentionParams& p, Shared& shared)
      : p_(p), shared_(shared), pool_(static_cast<const char*>(p.k)) {
    if (Traits::kPageSize > 0 && p.layer != nullptr) {
      pool_ += LoadConstant(p.layer) * p.num_pages * (Traits::kPageSize * kRowBytes);
    }
  }

  // In the step at `pos` of item `index`, of a queue up to `end`: brings the page ids of steps to
  // come into L2. With pages of a token they are as many lines as steps take at a time, and each is
  // read once, so they come from memory, which under load answers in about the time of a step.
  __device__ __forceinline__ void PrefetchPages(int index, int pos, int end) const {
    if (Traits::kPageSize == 0 || Warp() != 0) return;
    constexpr int kSteps = 3;  // ahead: 6 us, while L2 keeps a line for some 10
    const ItemRecord item(p_, index);
    if (pos == FirstStep<Shape::kStep>(item)) {
      PrefetchPages<kSteps + 1>(item, pos);
    } else {
      PrefetchPages<1>(item, pos + kSteps * Shape::kStep);
    }
    if (pos + Shape::kStep < item.kv_end() || index + 1 == end) return;
    const ItemRecord next(p_, index + 1);
    PrefetchPages<kSteps + 1>(next, FirstStep<Shape::kStep>(next));
  }

  // The rows of a step that this warp copies, each unit once nobody needs what was there.
  // lane_row: in the pool, of the token that the lane looked up, or kNoRow.
  __device__ __forceinline__ void LoadStep(u32 lane_row) {
#pragma unroll
    for (int order = 0; order < Shape::kUnits; ++order) {
      const int unit = Shape::UnitInOrder(order);
      if (Shape::NumBlocks(unit) == 0) continue;
      const u32 full = SharedAddress(shared_.barriers.full + place_.Barrier(unit));
      WaitBarrier(SharedAddress(shared_.barriers.empty + place_.Barrier(unit)),
                  place_.parity() ^ 1);
      CopyRows(unit, lane_row);
      ArriveBarrierAfterCopies(full);
      place_.NextUnit();
    }
    place_.NextStep();
  }

 private:
  static constexpr int kRowBytes = Traits::kHeadDimQk * 2;
  static constexpr int kWarpTokens = Shape::kStep / 4;
  static constexpr int kRowsPerCopy = 4;  // eight lanes copy 128 bytes of a row
  static constexpr int kCopies = kWarpTokens / kRowsPerCopy;

  __device__ static int Lane() { return threadIdx.x % kWarpSize; }
  __device__ static int Warp() { return threadIdx.x / kWarpSize; }

  // Ids of 16 positions are 64 bytes, or less with larger pages.
  template <int kSteps>
  __device__ __forceinline__ void PrefetchPages(const ItemRecord& item, int pos) const {
    if constexpr (Traits::kPageSize > 0) {
      const int at = pos + Lane() * 16;
      if (at >= item.kv_end() || Lane() * 16 >= kSteps * Shape::kStep) return;
      PrefetchL2(p_.page_indices + (item.kv_base() + static_cast<i64>(at / Traits::kPageSize)));
    }
  }

  // This warp's rows one by one. Addresses are computed for every unit: a producer has few
  // registers.
  __device__ __forceinline__ void CopyRows(int unit, u32 lane_row) const {
    const int lane_token = Lane() / 8, chunk = Lane() % 8;
    u32 rows[kCopies];
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      rows[i] = __shfl_sync(kFullWarp, lane_row, i * kRowsPerCopy + lane_token);
    }
    const u32 ring = SharedAddress(shared_.ring) + (Warp() * kWarpTokens + lane_token) * 128;
    const u32 swizzled[2] = {ring + (chunk ^ lane_token) * 16,
                             ring + (chunk ^ (lane_token + 4)) * 16};
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const bool valid = rows[i] != kNoRow;
      // The address of a copy that reads nothing still is one of the pool.
      const char* from = pool_ + (valid ? static_cast<u64>(rows[i]) * kRowBytes : 0) + chunk * 16;
      const u32 to = swizzled[i % 2] + i * kRowsPerCopy * 128;
#pragma unroll
      for (int b = 0; b < Shape::NumBlocks(unit); ++b) {
        CopyAsync16(to + place_.Block(unit, b), from + (Shape::FirstBlock(unit) + b) * 128, valid);
      }
    }
  }

  const AttentionParams& p_;
  Shared& shared_;
  const char* pool_;  // rows of the layer
  typename Shape::RingPlace place_;
};

// What the two Shapes have in common.
template <class Traits>
struct LatentShape {
  static constexpr int kStep = 64;  // kv tokens
  static_assert(Traits::kTileKv == kStep, "as select/cuda.cc has it");
  static constexpr int kBlocks = Traits::kHeadDimQk / 64;  // of 64 columns
  static constexpr int kValueBlocks = Traits::kHeadDimVo / 64;
  static_assert(Traits::kHeadDimQk % 64 == 0 && Traits::kHeadDimVo % 64 == 0, "whole blocks");

  static constexpr int kWarpTokens = kStep / 4;  // that a producer's warp copies

  // kv position of the token that a producer's lane looks up in the step at `pos`.
  __device__ static int LanePosition(int pos) {
    return pos + threadIdx.x / kWarpSize * kWarpTokens + threadIdx.x % kWarpTokens;
  }
};

}  // namespace jax_attn
