// What both consumers of the backward pass on sm_90a do, whichever products they have: the walk
// through a unit's tiles, P from S, dk and dv to memory.
#pragma once

#include "cuda/sm90/backward_roles.cuh"
#include "cuda/sm90/tile_rows.cuh"

namespace jax_attn {

template <class Traits>
class HopperBackwardConsumerBase : protected HopperBackwardRole<Traits> {
 public:
  using Base = HopperBackwardRole<Traits>;
  using Base::kGroup, Base::kKeys, Base::kPage, Base::kRows;
  using typename Base::Shape;
  using typename Base::Shared;
  using typename Base::Unit;
  using E = Element<Traits::kDtype>;
  using K = typename Shape::K;
  using V = typename Shape::V;
  using Q = typename Shape::Q;
  using O = typename Shape::O;
  using S = typename Shape::S;
  using SumsOfK = float[Shape::kQkSums / 8][4];
  using SumsOfV = float[Shape::kVoSums / 8][4];
  using Tile = float[kRows / 8][4];      // S^T or dP^T, keys are rows
  using Fragments = u32[kRows / 16][4];  // the same, packed

  __device__ __forceinline__ HopperBackwardConsumerBase(const BackwardCudaParams& p, Shared& shared)
      : Base(p, shared),
        consumer_(Uniform(static_cast<int>(threadIdx.x) / 128 - 1)),
        warp_(Uniform(static_cast<int>(threadIdx.x) % 128 / kWarpSize)),
        thread_(static_cast<int>(threadIdx.x) % 128) {}

 protected:
  using Base::f_, Base::p_, Base::shared_;
  // Opaque: registers are few, so nothing derived from it stays in them from step to step.
  __device__ int Lane() const { return Opaque(thread_) % kWarpSize; }
  // The first of this warp's 16 keys in the block. Consumers of wide heads have the same keys.
  __device__ int FirstKey() const { return (Shape::kIsWide ? 0 : 64 * consumer_) + 16 * warp_; }
  __device__ __forceinline__ void Arrive(const u64* barrier) const {
    __syncwarp();
    if (Lane() == 0) ArriveBarrier(SharedAddress(barrier));
  }

  __device__ __forceinline__ void PassUnitByWarp() {
    __syncwarp();
    if (Lane() == 0) {
      this->PassUnit();
    } else {
      this->unit_.Advance();
    }
  }

  // Calls run(unit) for all units. With pages it passes the unit's parts but the last one.
  template <class RunUnit>
  __device__ __forceinline__ void RunUnits(const RunUnit& run) {
#pragma unroll 1
    for (;;) {
      const Unit& unit = this->WaitForUnit();
      if (unit.block < 0) break;
      run(unit);
      PassUnitByWarp();
    }
  }

  // Runs a unit's steps: step(unit or part, tile, whether it is the unit's first one), and finish()
  // behind the last one, if there are any. Returns the part behind the last one, which the caller
  // passes; without pages the unit.
  template <class Step, class Finish>
  __device__ __forceinline__ const Unit* RunSteps(const Unit& unit, const Step& step,
                                                  const Finish& finish) {
    const Unit* part = &unit;
    int begin = Uniform(part->tile_begin), end = Uniform(part->tile_end);
    if (begin >= end) return part;
    WaitForKv();
    bool is_first = true;
    if constexpr (kPage > 0) {
#pragma unroll 1
      for (;;) {
        RunTiles(*part, begin, end, is_first, step);
        PassUnitByWarp();
        part = &this->WaitForUnit();
        begin = Uniform(part->tile_begin);
        end = Uniform(part->tile_end);
        if (begin == end) break;
      }
    } else {
      RunTiles(*part, begin, end, is_first, step);
    }
    finish();
    Arrive(&this->Barriers().empty_kv);
    return part;
  }

  __device__ __forceinline__ void WaitForKv() {
    WaitBarrier(SharedAddress(&this->Barriers().full_kv), this->kv_.parity);
    this->kv_.Advance();
    FenceSharedForWgmma();  // some rows may not have come by TMA
  }

  // is_first: whether the first tile is the unit's first one.
  template <class Step>
  __device__ __forceinline__ void RunTiles(const Unit& unit, int begin, int end, bool& is_first,
                                           const Step& step) {
    int i = begin;
#pragma unroll 1
    for (int left = (end - begin) * kGroup; left > 0; --left) {
      step(unit, unit.TileAt(i), is_first);
      is_first = false;
      if (++i == unit.tile_end) i = unit.tile_begin;
    }
  }

  // --- products ---

  // c = rows of `own` (k or v) from `row` on times rows of a tile (q or d_o).
  template <int kDim, class Own, class Other>
  __device__ __forceinline__ static void Dot(u32 own, int row, u32 tile, Tile& c) {
    const u64 a = Own::Descriptor(own, row), b = Other::Descriptor(tile, 0);
#pragma unroll
    for (int kk = 0; kk < CeilDiv(kDim, 16); ++kk) {
      Wgmma<kRows, Traits::kDtype>::SharedA(c, Own::AlongK(a, kk), Other::AlongK(b, kk), kk > 0);
    }
  }
  // sums += fragments times rows of a tile.
  template <class Other, int kTiles>
  __device__ __forceinline__ static void Add(const Fragments& a, u32 tile,
                                             float (&sums)[kTiles][4]) {
    const u64 b = Other::TransposedDescriptor(tile, 0);
#pragma unroll
    for (int kk = 0; kk < kRows / 16; ++kk) {
      Wgmma<8 * kTiles, Traits::kDtype>::RegistersATransposedB(sums, a[kk], Other::AlongRows(b, kk),
                                                               true);
    }
  }

  // --- between them ---

  __device__ __forceinline__ static int KeyEnd(const Unit& unit) {
    if constexpr (kPage > 0) {
      return unit.key_end;
    } else {
      return unit.source.kv_len;
    }
  }
  // Whether the request has such a key, and with pages whether the owner owns it.
  __device__ __forceinline__ static bool IsOwn(const Unit& unit, int key) {
    bool is_own = key < KeyEnd(unit);
    if constexpr (kPage > 0) is_own &= key >= unit.key_begin;
    return is_own;
  }

  // Whether all of the tile's tokens see all of this warp's keys.
  __device__ __forceinline__ bool IsSeenByAll(const Unit& unit, int tile) const {
    const i64 key = unit.block * kKeys + FirstKey();
    const i64 pos = static_cast<i64>(unit.source.q_begin) + tile * kRows;
    bool all = key + 16 <= KeyEnd(unit);
    if constexpr (kPage > 0) all &= key >= unit.key_begin;
    if constexpr (Traits::kHasWindowRight) all &= key + 15 <= pos + f_.window_right;
    if constexpr (Traits::kHasWindowLeft) all &= key >= pos + kRows - 1 - f_.window_left;
    return Uniform(static_cast<int>(all)) != 0;
  }

  // Turns S into P, and with a soft cap into P times the cap's slope: the factor of dP - d. p: P,
  // packed; without a soft cap MakeSlopes packs it.
  template <bool kMasks>
  __device__ __forceinline__ void Weigh(const Unit& unit, int tile, int slot, Tile& s,
                                        Fragments& p) const {
    const float scale = f_.sm_scale * kLog2E;
    const float slope = Traits::kHasSoftCap ? 2.0f * scale / f_.logits_soft_cap : 0.0f;
    const float cap = f_.logits_soft_cap * kLog2E;
    const int lane = Lane();
    const float* lse_log2 = shared_.lse_log2[slot] + 2 * (lane % 4);
    // Rows [low, high) of the tile see the lane's keys.
    int low[2] = {0, 0}, high[2] = {kRows, kRows};
    if constexpr (kMasks) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int key = unit.block * kKeys + FirstKey() + 8 * h + lane / 4;
        const i64 row = static_cast<i64>(key) - unit.source.q_begin - tile * kRows;
        if constexpr (Traits::kHasWindowRight) low[h] = Clamp(row - f_.window_right, 0, kRows);
        if constexpr (Traits::kHasWindowLeft) high[h] = Clamp(row + f_.window_left + 1, 0, kRows);
        if (!IsOwn(unit, key)) high[h] = 0;
      }
    }
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      const float2 lse = *reinterpret_cast<const float2*>(lse_log2 + 8 * j);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float weights[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = s[j][2 * h + c];
          const float row_lse = c == 0 ? lse.x : lse.y;
          float factor = 1.0f;
          if constexpr (Traits::kHasSoftCap) {  // as class SoftCap
            const float tanh = fmaf(-2.0f, Reciprocal(Exp2(slope * x) + 1.0f), 1.0f);
            factor = fmaf(-tanh, tanh, 1.0f);
            weights[c] = Exp2(fmaf(cap, tanh, -row_lse));
          } else {
            weights[c] = Exp2(fmaf(x, scale, -row_lse));
          }
          if constexpr (kMasks) {
            const int row = 8 * j + 2 * (lane % 4) + c;
            if (row < low[h] || row >= high[h]) weights[c] = 0.0f;
          }
          x = Traits::kHasSoftCap ? weights[c] * factor : weights[c];
        }
        if constexpr (Traits::kHasSoftCap) {
          p[j / 2][j % 2 * 2 + h] = E::Pack(weights[0], weights[1]);
        }
      }
    }
  }

  __device__ __forceinline__ void StoreSlopes(u32 d_s_at, const Fragments& d_s) const {
    const int lane = Lane();
    const u32 to = d_s_at + (FirstKey() + lane % 16) * 128 + (lane / 16 ^ lane % 8) * 16;
#pragma unroll
    for (int kk = 0; kk < kRows / 16; ++kk) {
      StoreMatrix4((to ^ kk % 4 * 32) + kk / 4 * S::kBlockBytes, d_s[kk]);
    }
  }

  // Writes kDim columns of dk or dv. Returns whether all of them are finite.
  template <int kDim, int kTiles>
  __device__ __forceinline__ bool Write(void* result, const Unit& unit, float scale,
                                        const float (&sums)[kTiles][4]) const {
    const int lane = Lane();
    bool is_finite = true;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int key = unit.block * kKeys + FirstKey() + 8 * h + lane / 4;
      const bool is_own = IsOwn(unit, key);
      i64 row = unit.source.kv_begin + key;
      if constexpr (kPage > 0) {
        row = LoadLayer<Traits>(f_) * f_.num_pages * kPage;
        if (is_own) row += PoolRow<kPage>(LoadPage<kPage>(f_, unit.source.kv_begin, key), key);
      }
      u16* to = static_cast<u16*>(result) + (row * f_.num_kv_heads + unit.kv_head) * kDim;
#pragma unroll
      for (int j = 0; j < kDim / 8; j += 4) {
        u32 packed[4] = {};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (j + i >= kDim / 8) continue;
          const float left = sums[j + i][2 * h] * scale, right = sums[j + i][2 * h + 1] * scale;
          is_finite &= left - left == 0.0f && right - right == 0.0f;
          packed[i] = E::Pack(left, right);
        }
        const uint4 x = TransposeQuad(packed, lane);
        if (is_own && (kDim % 32 == 0 || j + lane % 4 < kDim / 8)) {
          *reinterpret_cast<uint4*>(to + 8 * (j + lane % 4)) = x;
        }
      }
    }
    return is_finite;
  }

  const int consumer_, warp_, thread_;
};

}  // namespace jax_attn
