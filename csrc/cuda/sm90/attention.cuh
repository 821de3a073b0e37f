// Attention on Hopper: wgmma fed by a producer warpgroup through barriers in shared memory.
//
// A persistent CTA of three warpgroups executes the items of its queue in order. Warpgroup 0
// produces: it copies q, and K and V rows in steps of kStep tokens, as far ahead as the rings have
// room, across the borders of items. Warpgroups 1 and 2 consume, in one of two arrangements:
//   joint items (up to 128 rows)  each has 64 rows and all tokens of a step, and they take turns on
//                                 the tensor cores: while one multiplies, the other exponentiates.
//   split items (up to 64 rows)   both have all rows, and each its half of the tokens of a step;
//                                 their states are combined at the end. Decode is bound by memory,
//                                 rows that do not exist cost nothing that is short there.
// Within a warpgroup q . k of a step runs while p * v of the step before does (FlashAttention-3,
// arXiv 2407.08608, section 3.2).
//
// kv steps start at absolute multiples of the step. What a step holds beyond the item's span is
// zero-filled, never read, and masked.
#pragma once

#include "cuda/any/attention_row.cuh"
#include "cuda/common/budget.cuh"
#include "cuda/common/partials.cuh"
#include "cuda/common/variant.cuh"
#include "cuda/sm90/ptx.cuh"

namespace jax_attn {

// A tile of 16-bit rows in shared memory as wgmma reads it: blocks of 64 columns, and in each block
// rows of 128 bytes, swizzled. head_dim is padded with zeros to a multiple of 64.
template <int kHeadDim, int kRows>
struct SwizzledTile {
  static constexpr int kBlocks = CeilDiv(kHeadDim, 64);
  static constexpr int kPadded = 64 * kBlocks;
  static constexpr int kLiveChunks = kHeadDim / 8;  // of 16 bytes in a row, with data
  static constexpr int kBlockBytes = kRows * 128;
  static constexpr int kBytes = kBlocks * kBlockBytes;

  // Rows from `row` on as operand a or b, columns along k; AlongK(.., kk) moves it to the columns
  // [16 * kk, 16 * kk + 16).
  __device__ __forceinline__ static u64 Descriptor(u32 tile, int row) {
    return MatrixDescriptor(tile + row * 128, 16, 1024);
  }
  __device__ __forceinline__ static u64 AlongK(u64 descriptor, int kk) {
    return MoveDescriptor(descriptor, kk / 4 * kBlockBytes + kk % 4 * 32);
  }
  // All columns along n, rows from `row` on along k: operand b, transposed. AlongRows(.., kk) moves
  // it to the rows [row + 16 * kk, row + 16 * kk + 16).
  __device__ __forceinline__ static u64 TransposedDescriptor(u32 tile, int row) {
    return MatrixDescriptor(tile + row * 128, kBlockBytes, 1024);
  }
  __device__ __forceinline__ static u64 AlongRows(u64 descriptor, int kk) {
    return MoveDescriptor(descriptor, kk * 16 * 128);
  }
};

// Whether the two consumers share the rows of an item rather than its tokens.
template <class Traits>
__device__ __forceinline__ bool IsJoint(const ItemRecord& item) {
  if (Traits::kNumTiles == 1) return Traits::kTileQ0 > 64;
  return item.tile() == 1;
}

// Whether the copy engine copies steps that lie in the item's span as a whole. Joint items wait for
// the tensor cores, and the producer's instructions take issue slots from the softmax. Split items
// wait for memory, which single rows reach sooner. Measured (H200): 4 x 4096 without mask 545
// TFLOP/s by rows and 586 by boxes; 64 decodes at 4096 254 us by rows and 270 by boxes.
template <class Traits>
__device__ __forceinline__ bool UsesBoxes(const AttentionParams& p, const ItemRecord& item) {
  return p.has_tensor_maps && IsJoint<Traits>(item);
}

// Position in a ring of slots. The parity is that of the slot's current phase.
template <int kSlots>
struct RingCursor {
  int slot = 0;
  u32 parity = 0;
  __device__ __forceinline__ void Advance() {
    if (++slot == kSlots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

inline constexpr int kMaxSlots = 8;

template <class Traits>
struct HopperShape {
  static constexpr int kStep = Traits::kTileKv;
  using Q = SwizzledTile<Traits::kHeadDimQk, 64>;  // half a tile of queries
  using K = SwizzledTile<Traits::kHeadDimQk, kStep>;
  using V = SwizzledTile<Traits::kHeadDimVo, kStep>;

  // Rows in a box of the copy engine, what a producer warp copies of a page; 0: boxes do not tile
  // the pages.
  static constexpr int kWarpTokens = kStep / 4;
  static constexpr int kPageSize = Traits::kPageSize;
  static constexpr int kBoxRows = kPageSize % kWarpTokens == 0 ? kWarpTokens
                                  : kPageSize > 0 && kPageSize % 8 == 0 &&
                                          kWarpTokens % Max(kPageSize, 1) == 0
                                      ? kPageSize
                                      : 0;

  static constexpr int kProducerThreads = 128;
  static constexpr int kConsumerThreads = 256;
  static constexpr int kNumThreads = kProducerThreads + kConsumerThreads;
  // 64K registers; the consumers hold o, logits and probabilities, the producer a few addresses.
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;

  struct Barriers {
    u64 full_q[2], empty_q[2];
    u64 full_k[kMaxSlots], empty_k[kMaxSlots], full_v[kMaxSlots], empty_v[kMaxSlots];
  };
  struct Small {
    Barriers barriers;
    KvPools pools;
    float states[4][128];  // split items: max_log2[2] and sum[2] of the second consumer's threads
    MergeScratch merge;
  };
  static constexpr int kRoom =
      CtaSmemBudget(Traits::kArch, 1) - 2 * Q::kBytes - static_cast<int>(sizeof(Small));
  static constexpr int kSlots = Clamp(kRoom / (K::kBytes + V::kBytes), 2, kMaxSlots);

  struct Shared {
    alignas(1024) unsigned char q[2][Q::kBytes];
    alignas(1024) unsigned char k[kSlots][K::kBytes];
    alignas(1024) unsigned char v[kSlots][V::kBytes];
    Small small;
  };
};

// The steps of an item: absolute multiples of kStep from the first that its span touches. An item
// without a span has none.
template <int kStep>
__device__ __forceinline__ int FirstStep(const ItemRecord& item) {
  return item.kv_begin() / kStep * kStep;
}

// --- producer ---

template <class Traits>
class HopperProducer {
 public:
  using Shape = HopperShape<Traits>;
  using Shared = typename Shape::Shared;
  using E = Element<Traits::kDtype>;

  __device__ __forceinline__ HopperProducer(const AttentionParams& p, Shared& shared)
      : p_(p),
        shared_(shared),
        pools_(FindPools<Traits, E::kBytes>(p)),
        layer_(Traits::kPageSize > 0 && p.layer != nullptr ? LoadConstant(p.layer) : 0) {}

  // Steps of the queue in order. K of a step goes ahead of V of the step before, which is the order
  // in which consumers ask for them.
  __device__ __forceinline__ void Run(int begin, int end) {
    index_ = begin - 1;
    end_ = end;
    pos_ = 0;
    end_pos_ = 0;
    NextStep();
    bool has_v = false;
    u32 v_row = kNoRow;
    int v_head = 0;
    while (index_ < end_) {
      const ItemRecord item(p_, index_);
      const int head = item.kv_head() | (UsesBoxes<Traits>(p_, item) ? kByBoxes : 0);
      const bool has_step = pos_ < end_pos_;
      const bool first = pos_ == FirstStep<Shape::kStep>(item);
      const int index = index_;
      const u32 row = has_step ? Row(item) : kNoRow;
      NextStep();
      if (has_step) {
        Fill<Traits::kHeadDimQk, typename Shape::K>(k_cursor_, Barriers().full_k,
                                                    Barriers().empty_k, shared_.k[k_cursor_.slot],
                                                    pools_.k, p_.k_map, row, head);
      }
      if (has_v) LoadV(v_row, v_head);
      if (first && has_step) LoadQ(ItemRecord(p_, index));
      has_v = has_step;
      v_row = row;
      v_head = head;
    }
    if (has_v) LoadV(v_row, v_head);
  }

 private:
  static constexpr int kWarpTokens = Shape::kWarpTokens;  // of a step, that a warp copies
  static constexpr int kBoxRows = Shape::kBoxRows;
  static constexpr int kByBoxes = 1 << 30;  // beside a kv head: its rows come by the copy engine
  static constexpr int kRowsPerCopy = 4;    // eight lanes copy 128 bytes of a row

  __device__ typename Shape::Barriers& Barriers() const { return shared_.small.barriers; }
  __device__ static int Lane() { return threadIdx.x % kWarpSize; }
  __device__ static int Warp() { return threadIdx.x / kWarpSize; }

  // kv position of this lane's token of the step.
  __device__ int Position() const { return pos_ + Warp() * kWarpTokens + Lane() % kWarpTokens; }

  // On to the next step of the queue; its page is asked for at once and used one step later.
  __device__ __forceinline__ void NextStep() {
    pos_ += Shape::kStep;
    if (pos_ >= end_pos_) {
      ++index_;
      if (index_ >= end_) return;
      const ItemRecord item(p_, index_);
      pos_ = FirstStep<Shape::kStep>(item);
      end_pos_ = item.kv_end();
      if (index_ + 1 < end_) ItemRecord(p_, index_ + 1).Prefetch();
    }
    if constexpr (Traits::kPageSize > 0) {
      const ItemRecord item(p_, index_);
      const int pos = Position();
      page_ = 0;
      if (pos >= item.kv_begin() && pos < item.kv_end()) {
        page_ = LoadPage<Traits::kPageSize>(p_, item.kv_base(), pos);
      }
    }
  }

  // Pool row of this lane's token, kNoRow outside of the item's span.
  __device__ __forceinline__ u32 Row(const ItemRecord& item) const {
    const int pos = Position();
    if (pos < item.kv_begin() || pos >= item.kv_end()) return kNoRow;
    if constexpr (Traits::kPageSize > 0) return PoolRow<Traits::kPageSize>(page_, pos);
    return static_cast<u32>(item.kv_base()) + pos;
  }

  __device__ __forceinline__ void LoadV(u32 row, int head) {
    Fill<Traits::kHeadDimVo, typename Shape::V>(v_cursor_, Barriers().full_v, Barriers().empty_v,
                                                shared_.v[v_cursor_.slot], pools_.v, p_.v_map, row,
                                                head);
  }

  // Rows of one step into the ring's next slot, once the consumers are through with it.
  template <int kHeadDim, class Tile>
  __device__ __forceinline__ void Fill(RingCursor<Shape::kSlots>& cursor, const u64* full,
                                       const u64* empty, const unsigned char* slot,
                                       const char* pool, const TensorMap& map, u32 row, int head) {
    WaitBarrier(SharedAddress(empty + cursor.slot), cursor.parity ^ 1);
    const u32 barrier = SharedAddress(full + cursor.slot);
    if constexpr (kBoxRows > 0) {
      if ((head & kByBoxes) != 0 && __all_sync(kFullWarp, row != kNoRow)) {
        CopyBoxes<Tile>(SharedAddress(slot), map, row, head & ~kByBoxes, barrier);
        cursor.Advance();
        return;
      }
    }
    const char* from_head = pool + ((head & ~kByBoxes) * (kHeadDim * E::kBytes) + Lane() % 8 * 16);
    if (Tile::kLiveChunks == 8 * Tile::kBlocks && __all_sync(kFullWarp, row != kNoRow)) {
      CopyRows<kHeadDim, Tile, true>(SharedAddress(slot), from_head, row);
    } else {
      CopyRows<kHeadDim, Tile, false>(SharedAddress(slot), from_head, row);
    }
    ArriveBarrierAfterCopies(barrier);
    cursor.Advance();
  }

  // This warp's rows of a step by the copy engine: one lane a box and block of columns.
  template <class Tile>
  __device__ __forceinline__ void CopyBoxes(u32 slot, const TensorMap& map, u32 row, int head,
                                            u32 barrier) const {
    if (Lane() == 0) {
      ExpectBytes(barrier, kWarpTokens * 128 * Tile::kBlocks);
      ArriveBarrier(barrier, kWarpSize);
    }
    __syncwarp();
    if (Lane() % kBoxRows == 0 && Lane() < kWarpTokens) {
      const u32 to = slot + (Warp() * kWarpTokens + Lane()) * 128;
#pragma unroll
      for (int block = 0; block < Tile::kBlocks; ++block) {
        CopyBox(to + block * Tile::kBlockBytes, map, block * 64, head, static_cast<int>(row),
                layer_, barrier);
      }
    }
  }

  // This warp's rows of a step. kWhole: all of them are in the span and have no padding.
  template <int kHeadDim, class Tile, bool kWhole>
  __device__ __forceinline__ void CopyRows(u32 slot, const char* from_head, u32 row) const {
    constexpr int kCopies = kWarpTokens / kRowsPerCopy;
    const u32 pitch = static_cast<u32>(p_.num_kv_heads) * (kHeadDim * E::kBytes);
    const int lane_row = Lane() / 8, chunk = Lane() % 8;
    const u32 to = slot + (Warp() * kWarpTokens + lane_row) * 128;
    const u32 swizzled[2] = {to + (chunk ^ lane_row) * 16, to + (chunk ^ (lane_row + 4)) * 16};
    u32 rows[kCopies];
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      rows[i] = __shfl_sync(kFullWarp, row, i * kRowsPerCopy + lane_row);
    }
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const bool in_span = kWhole || rows[i] != kNoRow;
      const char* from = from_head + static_cast<u64>(in_span ? rows[i] : 0) * pitch;
#pragma unroll
      for (int block = 0; block < Tile::kBlocks; ++block) {
        const u32 to_chunk = swizzled[i % 2] + i * kRowsPerCopy * 128 + block * Tile::kBlockBytes;
        if constexpr (kWhole) {
          CopyAsync16Once(to_chunk, from + block * 128, true);
        } else {
          const bool valid = in_span && block * 8 + chunk < Tile::kLiveChunks;
          CopyAsync16(to_chunk, valid ? from + block * 128 : from_head, valid);
        }
      }
    }
  }

  // 64 rows of q into half `half`.
  __device__ __forceinline__ void LoadHalfQ(const ItemRecord& item, int half, int first_row) {
    using Q = typename Shape::Q;
    WaitBarrier(SharedAddress(Barriers().empty_q + half), (q_parity_ >> half & 1) ^ 1);
    const int num_rows = item.qo_len() * Traits::kGroupSize;
    const QueryRows<Traits::kGroupSize> rows(p_, item.qo_begin(), item.kv_head(),
                                             item.num_groups());
    const int chunk = Lane() % 8;
#pragma unroll 1
    for (int r = Warp() * 16 + Lane() / 8; r < Warp() * 16 + 16; r += kRowsPerCopy) {
      const int row = first_row + r;
      const u16* from = static_cast<const u16*>(p_.q);
      if (row < num_rows) from += rows.Index(row) * Traits::kHeadDimQk;
      const u32 to = SharedAddress(shared_.q[half]) + r * 128 + (chunk ^ r % 8) * 16;
#pragma unroll
      for (int block = 0; block < Q::kBlocks; ++block) {
        const int column = block * 8 + chunk;
        const bool valid = row < num_rows && column < Q::kLiveChunks;
        CopyAsync16(to + block * Q::kBlockBytes, valid ? from + column * 8 : from, valid);
      }
    }
    ArriveBarrierAfterCopies(SharedAddress(Barriers().full_q + half));
    q_parity_ ^= 1u << half;
  }

  __device__ __forceinline__ void LoadQ(const ItemRecord& item) {
    if (IsJoint<Traits>(item)) {
      LoadHalfQ(item, 0, 0);
      LoadHalfQ(item, 1, 64);
      next_half_ = 0;
    } else {
      LoadHalfQ(item, next_half_, 0);
      next_half_ ^= 1;
    }
  }

  const AttentionParams& p_;
  Shared& shared_;
  const KvPools pools_;
  const int layer_;
  int index_, end_;    // item of the next step
  int pos_, end_pos_;  // kv position of the next step, end of its item's span
  i32 page_ = 0;       // page of this lane's token of the next step
  RingCursor<Shape::kSlots> k_cursor_, v_cursor_;
  u32 q_parity_ = 0;  // bit h: phase of half h
  int next_half_ = 0;
};

// --- rows ---

// What a warp knows of its 16 rows after the kv tokens it has seen, besides o. Index h is row 8h +
// lane / 4, of which the lane has columns 8j + 2 * (lane % 4) + {0, 1} in logits and o.
template <class Traits>
class TileRows {
 public:
  using E = Element<Traits::kDtype>;
  using Variant = typename BuiltInVariant<Traits::kHasSoftCap>::Type;

  float max_log2[2] = {-Infinity(), -Infinity()};  // reference of the exponents, see Exponentiate
  float sum[2] = {0.0f, 0.0f};  // over this lane's columns only, until FinishSums
  float factor[2];              // from the references before the last step to those after it

  // first_row: of this warpgroup, within the item.
  __device__ __forceinline__ TileRows(const AttentionParams& p, int index, int first_row,
                                      int thread)
      : p_(p), index_(index), first_row_(first_row + thread / kWarpSize * 16), lane_(thread % 32) {
    const ItemRecord item(p, index);
    const int num_rows = item.qo_len() * Traits::kGroupSize;
    live_ = first_row_ < num_rows;
    const VisibleSpan span = SpanOfTokens<Traits>(
        p, item.kv_begin(), item.kv_end(), item.q_pos(), first_row_ / Traits::kGroupSize,
        Min(first_row_ + 15, num_rows - 1) / Traits::kGroupSize);
    all_begin_ = span.all_begin;
    all_end_ = span.all_end;
    differ_ = span.all_begin > span.any_begin || span.all_end < span.any_end;
  }

  // Whether the references of the warp's rows changed in the last step.
  __device__ bool grows() const { return grows_; }
  // Whether any row of the warp exists. One without rows keeps the identity.
  __device__ bool warp_is_live() const { return live_; }

  // s: q . k of the tokens [begin, begin + 8 * kTiles); becomes p = 2^(logit - reference).
  // The reference of a row follows its maximum only when that has grown by more than a factor of
  // 2^8: sums stay far from overflow, and nearly every step is spared the rescaling of o
  // (FlashAttention-4's observation). Each row decides for itself, so its bits do not depend on its
  // neighbours; for rows that keep their reference the factor is exactly 1.
  template <int kTiles>
  __device__ __forceinline__ void Exponentiate(int begin, float (&s)[kTiles][4]) {
    TransformLogits(s);
    if (begin < all_begin_ || begin + 8 * kTiles > all_end_) Mask(begin, s);
    constexpr float kSlack = 8.0f;
    const float scale = LogitScale();
    float new_max[2];
    bool grows = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float maxima[4];  // four chains: one would wait for its own latency
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        const float pair_max = fmaxf(s[j][2 * h], s[j][2 * h + 1]);
        maxima[j % 4] = j < 4 ? pair_max : fmaxf(maxima[j % 4], pair_max);
      }
      const float step_max =
          QuadMax(fmaxf(fmaxf(maxima[0], maxima[1]), fmaxf(maxima[2], maxima[3]))) * scale;
      // False if both are -inf, where the difference is NaN.
      const bool row_grows = step_max - max_log2[h] > kSlack;
      new_max[h] = row_grows ? step_max : max_log2[h];
      grows |= row_grows;
    }
    grows_ = __any_sync(kFullWarp, grows);
    if (grows_) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        factor[h] = Exp2(max_log2[h] - FiniteMax(new_max[h]));
        max_log2[h] = new_max[h];
        sum[h] *= factor[h];
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float reference = FiniteMax(max_log2[h]);
      float sums[2] = {sum[h], 0.0f};
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          s[j][2 * h + c] = Exp2(fmaf(s[j][2 * h + c], scale, -reference));
          sums[c] += s[j][2 * h + c];
        }
      }
      sum[h] = sums[0] + sums[1];
    }
  }

  // Takes over the references after a step that another warp exponentiated.
  __device__ __forceinline__ void Follow(float new_max_0, float new_max_1) {
    const float new_max[2] = {new_max_0, new_max_1};
    grows_ = __any_sync(kFullWarp, new_max[0] != max_log2[0] || new_max[1] != max_log2[1]);
    if (!grows_) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      factor[h] = Exp2(max_log2[h] - FiniteMax(new_max[h]));
      max_log2[h] = new_max[h];
      sum[h] *= factor[h];
    }
  }

  // o of the steps before the last Exponentiate, or Follow, follows its references.
  template <int kTiles>
  __device__ __forceinline__ void Rescale(float (&o)[kTiles][4]) const {
    if (!grows_) return;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) o[j][c] *= factor[c / 2];
    }
  }

  // The accumulators of two neighbouring 8-column tiles, packed, are operand a of the second
  // product as they are.
  template <int kTiles>
  __device__ __forceinline__ void Pack(const float (&s)[kTiles][4], u32 (&p)[kTiles / 2][4]) const {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) p[j / 2][j % 2 * 2 + h] = E::Pack(s[j][2 * h], s[j][2 * h + 1]);
    }
  }

  __device__ __forceinline__ void FinishSums() {
#pragma unroll
    for (int h = 0; h < 2; ++h) sum[h] = QuadSum(sum[h]);
  }

  // Final rows: a row's four lanes store 64 neighbouring bytes at a time. Measured (H200): by 16
  // bytes a row 16 x 1024 tokens took 204 us instead of 181.
  template <int kTiles>
  __device__ __forceinline__ void Write(const float (&o)[kTiles][4]) const {
    if (!live_) return;
    constexpr int kLiveTiles = Traits::kHeadDimVo / 8;
    const ItemRecord item(p_, index_);
    const int num_rows = item.qo_len() * Traits::kGroupSize;
    const RowMap<Traits::kGroupSize> map(p_, item.qo_begin(), item.kv_head());
    const int partial_row = item.partial_row();
    const bool final = partial_row < 0;
    const int column = lane_ % 4;
    u32 nan_rows[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row_ + 8 * h + lane_ / 4;
      const bool exists = row < num_rows;
      float nan_or_zero = 0.0f, o_scale = 0.0f;
      i64 at = 0;
      if (exists) {
        at = final ? map.Index(row) : partial_row + row;
        o_scale = WriteState(p_, final, at, map.QoHead(row), column == 0, {max_log2[h], sum[h]});
      }
      if (final) {
        uint4* to = reinterpret_cast<uint4*>(static_cast<u16*>(p_.o) + at * Traits::kHeadDimVo);
#pragma unroll
        for (int j = 0; j < kTiles; j += 4) {
          u32 x[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float left = o[j + i][2 * h] * o_scale, right = o[j + i][2 * h + 1] * o_scale;
            nan_or_zero = fmaf(left, 0.0f, fmaf(right, 0.0f, nan_or_zero));
            x[i] = E::Pack(left, right);
          }
          const uint4 tile = TransposeQuad(x);
          if (exists && j + column < kLiveTiles) to[j + column] = tile;
        }
      } else if (exists) {
        float* to = p_.partial_o + at * Traits::kHeadDimVo + 2 * column;
#pragma unroll
        for (int j = 0; j < kLiveTiles; ++j) {
          nan_or_zero = fmaf(o[j][2 * h], 0.0f, fmaf(o[j][2 * h + 1], 0.0f, nan_or_zero));
          *reinterpret_cast<float2*>(to + 8 * j) = make_float2(o[j][2 * h], o[j][2 * h + 1]);
        }
      }
      nan_rows[h] = kMayDiffer ? __ballot_sync(kFullWarp, exists && nan_or_zero != 0.0f) : 0;
    }
    if (kMayDiffer && differ_ && (nan_rows[0] | nan_rows[1]) != 0) Mend(nan_rows);
  }

 private:
  static constexpr bool kMayDiffer = Traits::kHasWindowLeft || Traits::kHasWindowRight;

  // Lane i of a quad gives x[j] of column pair i of tile j, and gets tile i: all four pairs.
  __device__ __forceinline__ uint4 TransposeQuad(const u32 (&x)[4]) const {
    const bool odd = lane_ % 2 != 0, upper = lane_ % 4 >= 2;
    // Tiles odd and 2 + odd, of this lane and its neighbour.
    const u32 kept[2] = {odd ? x[1] : x[0], odd ? x[3] : x[2]};
    const u32 got[2] = {__shfl_xor_sync(kFullWarp, odd ? x[0] : x[1], 1),
                        __shfl_xor_sync(kFullWarp, odd ? x[2] : x[3], 1)};
    u32 pair[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      pair[i][0] = odd ? got[i] : kept[i];
      pair[i][1] = odd ? kept[i] : got[i];
    }
    // Of these the one that this lane is for, of both halves of the quad.
    u32 mine[2], others[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      mine[c] = upper ? pair[1][c] : pair[0][c];
      others[c] = __shfl_xor_sync(kFullWarp, upper ? pair[0][c] : pair[1][c], 2);
    }
    return upper ? make_uint4(others[0], others[1], mine[0], mine[1])
                 : make_uint4(mine[0], mine[1], others[0], others[1]);
  }

  // The products multiply a value that a row does not see by 0, and 0 * NaN is NaN, but only rows
  // that see a NaN may get it. Rows that came out as such are computed again, token by token.
  __device__ __forceinline__ void Mend(const u32 (&nan_rows)[2]) const {
    __syncwarp();  // what the lanes wrote is about to be overwritten by others
#pragma unroll 1
    for (int r = 0; r < 16; ++r) {
      const u32 lanes = (r < 8 ? nan_rows[0] : nan_rows[1]) >> r % 8 * 4;
      if ((lanes & 0xf) != 0) ComputeRow<Traits>(p_, index_, first_row_ + r, lane_);
    }
  }

  // After it, s * LogitScale() is the logit in log2 units. A scale that is not positive would turn
  // the maximum around, so it is applied at once.
  static constexpr bool kScalesLater = !Variant::kTransformsLogits && Traits::kPositiveScale;
  template <int kTiles>
  __device__ __forceinline__ void TransformLogits(float (&s)[kTiles][4]) const {
    if constexpr (!kScalesLater) {
      const Variant variant(p_);
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          s[j][c] = Variant::kTransformsLogits ? variant.Logit(s[j][c])
                                               : s[j][c] * (p_.sm_scale * kLog2E);
        }
      }
    }
  }

  __device__ __forceinline__ float LogitScale() const {
    return kScalesLater ? p_.sm_scale * kLog2E : 1.0f;
  }

  // Sets what a row does not see to -inf.
  template <int kTiles>
  __device__ __forceinline__ void Mask(int begin, float (&s)[kTiles][4]) const {
    const ItemRecord item(p_, index_);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int token = (first_row_ + 8 * h + lane_ / 4) / Traits::kGroupSize;
      const VisibleSpan span =
          SpanOfTokens<Traits>(p_, item.kv_begin(), item.kv_end(), item.q_pos(), token, token);
      const int column = begin + 2 * (lane_ % 4);
      const int low = span.any_begin - column, high = span.any_end - column;
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (8 * j + c < low || 8 * j + c >= high) s[j][2 * h + c] = -Infinity();
        }
      }
    }
  }

  const AttentionParams& p_;
  const int index_;  // of the item
  const int first_row_, lane_;
  int all_begin_, all_end_;  // inside of it every row of the warp sees everything
  bool live_, differ_;       // differ_: some rows see tokens that others do not
  bool grows_ = false;
};

// --- consumers ---

template <class Traits>
class HopperConsumer {
 public:
  using Shape = HopperShape<Traits>;
  using Shared = typename Shape::Shared;
  using E = Element<Traits::kDtype>;
  using Rows = TileRows<Traits>;
  using Q = typename Shape::Q;
  using K = typename Shape::K;
  using V = typename Shape::V;

  __device__ __forceinline__ HopperConsumer(const AttentionParams& p, Shared& shared)
      : p_(p),
        shared_(shared),
        group_(__shfl_sync(kFullWarp, threadIdx.x / 128, 0) - 1),  // the same in the whole warp
        thread_(threadIdx.x % 128),
        next_half_(0),
        q_parity_(0) {}

  __device__ __forceinline__ void Run(int begin, int end) {
    if (group_ == 1) ArriveNamed(kTurn, kBoth);  // the first turn is that of group 0
    for (int index = begin; index < end; ++index) {
      if (IsJoint<Traits>(ItemRecord(p_, index))) {
        RunItem<false>(index);
      } else {
        RunItem<true>(index);
      }
    }
    if (group_ == 0) SyncNamed(kTurn, kBoth);  // takes the turn that nobody needs
  }

 private:
  static constexpr int kBoth = Shape::kConsumerThreads;
  static constexpr int kTurn = 1;  // and 2: named barriers of the turns of group 0 and 1
  static constexpr int kMeet = 3;
  static constexpr int kOTiles = V::kPadded / 8;
  using Output = float[kOTiles][4];

  __device__ typename Shape::Barriers& Barriers() const { return shared_.small.barriers; }
  __device__ int Lane() const { return thread_ % kWarpSize; }
  __device__ int Warp() const { return thread_ / kWarpSize; }

  // --- rings ---

  using Cursor = RingCursor<Shape::kSlots>;

  __device__ __forceinline__ void WaitFull(const u64* full, const Cursor& cursor) const {
    WaitBarrier(SharedAddress(full + cursor.slot), cursor.parity);
    FenceSharedForWgmma();
  }
  // One arrival a warp: the products of the others may still read.
  __device__ __forceinline__ void Release(const u64* empty, Cursor& cursor) {
    __syncwarp();
    if (Lane() == 0) ArriveBarrier(SharedAddress(empty + cursor.slot));
    cursor.Advance();
  }
  __device__ __forceinline__ void ReleaseQ(int half) {
    __syncwarp();
    if (Lane() == 0) ArriveBarrier(SharedAddress(Barriers().empty_q + half));
  }

  // --- products ---

  template <int kTokens>
  __device__ __forceinline__ void StartQk(int half, int first_token,
                                          float (&s)[kTokens / 8][4]) const {
    // Made anew in every step: kept in registers it would push out others.
    const u64 q = Q::Descriptor(Anew(SharedAddress(shared_.q[half])), 0);
    const u64 k = K::Descriptor(Anew(SharedAddress(shared_.k[k_cursor_.slot])), first_token);
#pragma unroll
    for (int kk = 0; kk < Q::kPadded / 16; ++kk) {
      Wgmma<kTokens, Traits::kDtype>::SharedA(s, Q::AlongK(q, kk), K::AlongK(k, kk), kk > 0);
    }
    WgmmaCommit();
  }

  template <int kTokens>
  __device__ __forceinline__ void StartPv(int first_token, const u32 (&p)[kTokens / 16][4],
                                          Output& o) const {
    const u64 v =
        V::TransposedDescriptor(Anew(SharedAddress(shared_.v[v_cursor_.slot])), first_token);
#pragma unroll
    for (int kk = 0; kk < kTokens / 16; ++kk) {
      Wgmma<V::kPadded, Traits::kDtype>::RegistersATransposedB(o, p[kk], V::AlongRows(v, kk), true);
    }
    WgmmaCommit();
  }

  // Joint items: the other consumer's products run while this one exponentiates, and the other way
  // around.
  __device__ __forceinline__ void TakeTurn() const { SyncNamed(kTurn + group_, kBoth); }
  __device__ __forceinline__ void PassTurn() const { ArriveNamed(kTurn + 1 - group_, kBoth); }

  // --- one item ---

  template <bool kSplit>
  __device__ __forceinline__ void RunItem(int index) {
    constexpr int kStep = Shape::kStep;
    constexpr int kTokens = kSplit ? kStep / 2 : kStep;
    const ItemRecord item(p_, index);
    const int first_token = kSplit ? group_ * kTokens : 0;
    Rows rows(p_, index, kSplit ? 0 : group_ * 64, thread_);
    PrefetchMergeGroup(p_, item.merge_idx());
    Output o;
#pragma unroll
    for (int j = 0; j < kOTiles; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) o[j][c] = 0.0f;
    }

    const int end = item.kv_end();
    const bool boxes = Shape::kBoxRows > 0 && UsesBoxes<Traits>(p_, item);
    int pos = FirstStep<kStep>(item);
    if (pos < end) {
      const int half = kSplit ? next_half_ : group_;
      WaitBarrier(SharedAddress(Barriers().full_q + half), q_parity_ >> half & 1);
      u32 p[kTokens / 16][4];
      {
        float s[kTokens / 8][4] = {};
        WaitFull(Barriers().full_k, k_cursor_);
        WgmmaFence();
        StartQk<kTokens>(half, first_token, s);
        WgmmaWait<0>();
        PinRegisters(s);
        Release(Barriers().empty_k, k_cursor_);
        rows.Exponentiate(pos + first_token, s);
        rows.Pack(s, p);
      }
      for (pos += kStep; pos < end; pos += kStep) {
        float s[kTokens / 8][4] = {};
        WaitBarrier(SharedAddress(Barriers().full_k + k_cursor_.slot), k_cursor_.parity);
        WaitBarrier(SharedAddress(Barriers().full_v + v_cursor_.slot), v_cursor_.parity);
        // What the copy engine wrote needs none: K of this step and V of the one before.
        if (kSplit || !boxes || pos - kStep < item.kv_begin() || pos + kStep > end) {
          FenceSharedForWgmma();
        }
        if (!kSplit) TakeTurn();
        PinRegisters(p);
        PinRegisters(o);
        WgmmaFence();
        StartQk<kTokens>(half, first_token, s);
        StartPv<kTokens>(first_token, p, o);
        if (!kSplit) PassTurn();
        WgmmaWait<1>();
        PinRegisters(s);
        Release(Barriers().empty_k, k_cursor_);
        rows.Exponentiate(pos + first_token, s);
        KeepBefore(rows.sum[0] + rows.sum[1]);  // all exponentials; the sums are not negative
        WgmmaWait<0>();
        PinRegisters(o);
        Release(Barriers().empty_v, v_cursor_);
        rows.Rescale(o);
        rows.Pack(s, p);
      }
      ReleaseQ(half);
      if (!kSplit) {
        // Joint items fill both halves. Whoever has no use for one waits for it all the same, lest
        // it should count as read before it was written.
        WaitBarrier(SharedAddress(Barriers().full_q + (half ^ 1)), q_parity_ >> (half ^ 1) & 1);
        ReleaseQ(half ^ 1);
      }
      q_parity_ ^= kSplit ? 1u << half : 3u;
      next_half_ = kSplit ? half ^ 1 : 0;

      WaitFull(Barriers().full_v, v_cursor_);
      PinRegisters(p);
      PinRegisters(o);
      WgmmaFence();
      StartPv<kTokens>(first_token, p, o);
      WgmmaWait<0>();
      PinRegisters(o);
      rows.FinishSums();
      if (kSplit) {
        Combine(rows, o);
        FenceSharedForWgmma();  // the copy engine may write there next
      }
      Release(Barriers().empty_v, v_cursor_);
    }
    if (!kSplit || group_ == 0) rows.Write(o);
    const int num_groups = item.num_groups();
    if (num_groups > 0) {
      ArriveAndMerge<Traits, Consumers>(p_, item.merge_idx(), num_groups, shared_.small.merge);
    }
  }

  struct Consumers {
    __device__ static int thread() { return threadIdx.x - Shape::kProducerThreads; }
    __device__ static int num_threads() { return kBoth; }
    __device__ static void Sync() { SyncNamed(kMeet, kBoth); }
  };

  // Split items: group 0 adds the state of group 1 to its own. It comes through the V slot that
  // both have read last, thread by thread.
  __device__ __forceinline__ void Combine(Rows& rows, Output& o) {
    constexpr int kTilesAtOnce = Min(V::kBytes / (128 * 16), kOTiles);
    float4* exchange = reinterpret_cast<float4*>(shared_.v[v_cursor_.slot]);
    float (*states)[128] = shared_.small.states;
    float weight[2] = {0.0f, 0.0f};
#pragma unroll
    for (int first = 0; first < kOTiles; first += kTilesAtOnce) {
      SyncNamed(kMeet, kBoth);
      if (group_ == 1 && rows.warp_is_live()) {
        if (first == 0) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            states[h][thread_] = rows.max_log2[h];
            states[2 + h][thread_] = rows.sum[h];
          }
        }
#pragma unroll
        for (int j = 0; j < kTilesAtOnce; ++j) {
          exchange[j * 128 + thread_] =
              make_float4(o[first + j][0], o[first + j][1], o[first + j][2], o[first + j][3]);
        }
      }
      SyncNamed(kMeet, kBoth);
      if (group_ == 0 && rows.warp_is_live()) {
        if (first == 0) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float other_max = states[h][thread_];
            const float max_log2 = fmaxf(rows.max_log2[h], other_max);
            rows.factor[h] = StateWeight(rows.max_log2[h], max_log2);
            weight[h] = StateWeight(other_max, max_log2);
            rows.max_log2[h] = max_log2;
            rows.sum[h] = rows.sum[h] * rows.factor[h] + weight[h] * states[2 + h][thread_];
          }
        }
#pragma unroll
        for (int j = 0; j < kTilesAtOnce; ++j) {
          const float4 other = exchange[j * 128 + thread_];
          float (&x)[4] = o[first + j];
          x[0] = fmaf(weight[0], other.x, x[0] * rows.factor[0]);
          x[1] = fmaf(weight[0], other.y, x[1] * rows.factor[0]);
          x[2] = fmaf(weight[1], other.z, x[2] * rows.factor[1]);
          x[3] = fmaf(weight[1], other.w, x[3] * rows.factor[1]);
        }
      }
    }
  }

  const AttentionParams& p_;
  Shared& shared_;
  const int group_;   // 0 or 1
  const int thread_;  // of the group
  Cursor k_cursor_, v_cursor_;
  int next_half_;  // of q, for split items
  u32 q_parity_;   // bit h: phase of half h
};

// --- kernel ---

template <class Traits>
struct HopperAttentionBody {
  using Shape = HopperShape<Traits>;
  using Shared = typename Shape::Shared;
  static constexpr int kNumThreads = Shape::kNumThreads;
  static constexpr int kMinCtasPerSm = 1;
  static constexpr int kSmemBytes = sizeof(Shared);
  static_assert(kSmemBytes <= CtaSmemBudget(Traits::kArch, 1), "one CTA fits a multiprocessor");

  __device__ __forceinline__ static void Run(const AttentionParams& p) {
    extern __shared__ __align__(1024) unsigned char smem[];
    Shared& shared = *reinterpret_cast<Shared*>(smem);
    // For later, so that they are near by then.
    LoadConstant(&p.header->nnz_qo);
    if (Traits::kPageSize > 0 && p.layer != nullptr) LoadConstant(p.layer);
    const int begin = LoadConstant(p.queue_indptr + blockIdx.x);
    const int end = QueueEnd(p);
    if (threadIdx.x == 0) InitBarriers(shared.small.barriers);
    __syncthreads();
    if (threadIdx.x < Shape::kProducerThreads) {
      LowerRegisterLimit<Shape::kProducerRegisters>();
      HopperProducer<Traits>(p, shared).Run(begin, end);
    } else {
      RaiseRegisterLimit<Shape::kConsumerRegisters>();
      HopperConsumer<Traits>(p, shared).Run(begin, end);
    }
    BlankPaddingRows<Traits, 2>(p);
  }

 private:
  __device__ __forceinline__ static void InitBarriers(typename Shape::Barriers& b) {
    constexpr int kConsumerWarps = Shape::kConsumerThreads / kWarpSize;
    for (int i = 0; i < 2; ++i) {
      InitBarrier(SharedAddress(b.full_q + i), Shape::kProducerThreads);
      InitBarrier(SharedAddress(b.empty_q + i), kConsumerWarps);
    }
    for (int i = 0; i < Shape::kSlots; ++i) {
      InitBarrier(SharedAddress(b.full_k + i), Shape::kProducerThreads);
      InitBarrier(SharedAddress(b.full_v + i), Shape::kProducerThreads);
      InitBarrier(SharedAddress(b.empty_k + i), kConsumerWarps);
      InitBarrier(SharedAddress(b.empty_v + i), kConsumerWarps);
    }
  }
};

}  // namespace jax_attn
