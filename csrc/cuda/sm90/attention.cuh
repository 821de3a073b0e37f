// Attention on Hopper: a producer warpgroup feeds wgmma through mbarriers in shared memory.
//
// A persistent CTA executes the items of its queue in order. The first warpgroup is the producer
// (with quantized keys and values, the first two: see quantized_producer.cuh). It copies q, and K
// and V in steps of kStep tokens, as far ahead as the rings have free slots, across the borders of
// items. The other warpgroups, two or three, are consumers, in one of two arrangements:
//   joint items (more rows): each consumer has 64 rows. They pass a token: while one issues its
//   products, the others exponentiate.
//   single items (up to 64 rows): one consumer has all rows, and the next consumer has the next
//   item. While one writes results and merges, another multiplies.
// A kernel for short sequences has one consumer, and CTAs that share a multiprocessor. Its items
// are joint: that consumer has the rows of all. decode.cuh computes single items of up to 32 rows.
// A kernel without larger tiles has nothing else. It is made for batches that take microseconds: K
// and V have a producer each, and a consumer copies its own q, so no copy waits until another one
// is issued. Within a warpgroup Q K^T of a step runs while P V of the step before does
// (FlashAttention-3, arXiv 2407.08608, section 3.2).
//
// kv steps start at absolute multiples of kStep. Slots outside the item's span are zero-filled,
// never read, and masked.
#pragma once

#include "cuda/common/partials.cuh"
#include "cuda/sm90/decode.cuh"
#include "cuda/sm90/fp8_matmul.cuh"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/quantized_producer.cuh"
#include "cuda/sm90/tile_rows.cuh"

namespace jax_attn {

template <class Traits, class Item>
__device__ __forceinline__ int NumRows(const Item& item) {
  return item.qo_len() * Traits::kGroupSize;
}

template <class Traits>
inline constexpr int kNumProducers = kOnlyDecodes<Traits> || kTwoConvert<Traits> ? 2 : 1;
template <class Traits>
using RolesOf =
    HopperRolesOf<Traits::kNumWarps / 4 - kNumProducers<Traits>, kNumProducers<Traits>,
                  Traits::kKvFormat != kPlainFormat && !Traits::kFp8Matmul, kCtasPerSm<Traits>>;

// The consumer that gets the token, or the next single item, after `consumer`.
template <class Traits>
__device__ __forceinline__ int NextConsumer(int consumer) {
  constexpr int kNumConsumers = RolesOf<Traits>::kNumConsumers;
  if constexpr (kNumConsumers == 2) return consumer ^ 1;
  return consumer == kNumConsumers - 1 ? 0 : consumer + 1;
}

// Whether all consumers work on the item together.
template <class Traits, class Item>
__device__ __forceinline__ bool IsJoint(const Item& item) {
  constexpr int kTallest = Traits::kNumTiles == 1 ? Traits::kTileQ0 : Traits::kTileQ1;
  if constexpr (HopperHasOneConsumer(Traits::kNumWarps)) return true;
  return kTallest > 64 && NumRows<Traits>(item) > 64;
}

// Whether the item has steps. An item without tokens has none. In a kernel that only decodes it has
// one step of zeros that no row sees.
template <class Traits>
__device__ __forceinline__ bool HasSteps(const ItemRecord& item) {
  return kOnlyDecodes<Traits> || item.kv_begin() < item.kv_end();
}

// Whether decode.cuh computes the item. It does not where all tiles have 64 rows: there a row must
// be computed the same way in every batch.
template <class Traits>
inline constexpr bool kHasDecode = Traits::kTileQ0 == DecodeShared<Traits>::kRows;
template <class Traits>
__device__ __forceinline__ bool IsDecode(const ItemRecord& item) {
  if constexpr (kOnlyDecodes<Traits>) return true;
  return kHasDecode<Traits> && NumRows<Traits>(item) <= DecodeShared<Traits>::kRows &&
         HasSteps<Traits>(item);
}

// Whether TMA copies the steps that lie in the item's span as a whole. Joint items are bound by the
// tensor cores, and instructions of the producer take issue slots from the softmax. Single items
// are bound by memory, and rows copied one by one arrive sooner. Measured (H200): 4 x 4096 without
// mask 545 TFLOP/s row by row and 586 by TMA; 64 decodes at 4096 254 us row by row and 270 by TMA.
template <class Traits, class Item>
__device__ __forceinline__ bool UsesTma(const AttentionParams& p, const Item& item) {
  return p.has_tensor_maps && IsJoint<Traits>(item);
}

inline constexpr int kMaxSlots = 8;

template <class Traits>
struct HopperShape {
  static constexpr int kStep = Traits::kTileKv;
  using Roles = RolesOf<Traits>;
  static constexpr int kNumConsumers = Roles::kNumConsumers;
  // kIsQuantized: keys and values in memory are quantized. They are multiplied as they are
  // (kFp8Matmul), or converted to 16 bits first (kConverts).
  static constexpr bool kIsQuantized = Traits::kKvFormat != kPlainFormat;
  static constexpr bool kFp8Matmul = Traits::kFp8Matmul;
  static constexpr bool kConverts = kIsQuantized && !kFp8Matmul;
  // Columns of o, and of P V. The FP8 product has columns of sums of P besides.
  static constexpr int kVoPadded = PaddedValues<Traits>();
  static constexpr int kPvColumns = kVoPadded + (kFp8Matmul ? kSumColumns : 0);
  // Tiles of 16-bit elements. Two e4m3 are one element. Where V is multiplied as e4m3 its tokens
  // are columns, see ValueTransposer.
  using Q = SwizzledTile<QueryColumns<Traits>(), 64>;  // one consumer's
  using K = SwizzledTile<Traits::kHeadDimQk / (kFp8Matmul ? 2 : 1), kStep>;
  using V = typename Conditional<kFp8Matmul, SwizzledTile<kStep / 2, kPvColumns>,
                                 SwizzledTile<Traits::kHeadDimVo, kStep>>::Type;

  static constexpr int kWarpTokens = kStep / 4;  // tokens that a producer warp copies
  static constexpr int kPageSize = Traits::kPageSize;
  // Rows of one TMA tile; 0: no TMA.
  static constexpr int kTmaRows =
      HopperTmaRows(Traits::kKvFormat, kPageSize, kStep, kOnlyDecodes<Traits>);

  // kv position of the token that a lane of the producer looks up in the step at `pos`.
  __device__ static int LanePosition(int pos) {
    const int lane = threadIdx.x % kWarpSize, warp = ProducerWarp();
    return pos + warp * kWarpTokens + lane % kWarpTokens;
  }
  // The thread's warp within its producer.
  __device__ static int ProducerWarp() { return threadIdx.x % 128 / kWarpSize; }

  struct Barriers : QuantizedBarriers<kIsQuantized> {
    u64 full_q[kNumConsumers], empty_q[kNumConsumers];
    u64 full_k[kMaxSlots], empty_k[kMaxSlots], full_v[kMaxSlots], empty_v[kMaxSlots];
    u64 staging_free;  // no consumer reads K of a joint item's last step any more
  };
  static constexpr int kJointMerge = kNumConsumers > 1 ? kNumConsumers : 0;
  struct Nothing {};
  struct ControlSmem {
    Barriers barriers;
    KvPools pools;
    MergeScratch merge[kJointMerge + 1];  // one for each consumer's single items, and one for joint
                                          // items
    typename Conditional<kHasDecode<Traits>, DecodeExchange, Nothing>::Type exchange[kNumConsumers];
  };
  // Shared memory of one consumer. The producer may overwrite it once the consumer releases q.
  union ConsumerSmem16Bit {
    alignas(1024) unsigned char q[Q::kBytes];
    DecodeShared<Traits> decode;
  };
  struct ConsumerSmemFp8 {
    alignas(1024) unsigned char q[Q::kBytes];
    alignas(1024) unsigned char p[SwizzledTile<kStep / 2, 64>::kBytes];
  };
  using ConsumerSmem = typename Conditional<kFp8Matmul, ConsumerSmemFp8, ConsumerSmem16Bit>::Type;
  static constexpr int kRingBudget = CtaSmemBudget(Traits::kArch, kCtasPerSm<Traits>) -
                                     kNumConsumers * static_cast<int>(sizeof(ConsumerSmem)) -
                                     static_cast<int>(sizeof(ControlSmem));
  // With conversion, two slots of K and V are enough, as consumers and the producer alternate, and
  // quantized rows get what is left: they are what is on its way from memory. FP8 products: K is
  // copied to its slot directly, as far ahead as quantized V is.
  static constexpr int kSlotBytes = K::kBytes + V::kBytes;
  // Rows with scales of their own are copied in halves of steps where two whole steps of them do
  // not fit.
  static constexpr int kQuantizedParts =
      kHasRowScales<Traits> &&
              kRingBudget < 2 * (kSlotBytes + QuantizedRowTiles<Traits, kStep>::kSlotBytes)
          ? 2
          : 1;
  using QuantizedInTiles = typename Conditional<kFp8Matmul, QuantizedValueTiles<Traits, kStep>,
                                                QuantizedTiles<Traits, kStep>>::Type;
  using Quantized = typename Conditional<kHasRowScales<Traits>,
                                         QuantizedRowTiles<Traits, kStep / kQuantizedParts>,
                                         QuantizedInTiles>::Type;
  static constexpr int kQuantizedSlots =
      kConverts
          ? Clamp((kRingBudget - 2 * kSlotBytes) / Quantized::kSlotBytes, 1, kMaxQuantizedSlots)
      : !kFp8Matmul                                               ? 0
      : kRingBudget >= 4 * kSlotBytes + 3 * Quantized::kSlotBytes ? 3
                                                                  : 2;
  static constexpr int kSlots =
      Clamp((kRingBudget - kQuantizedSlots * Quantized::kSlotBytes) / kSlotBytes, 2, kMaxSlots);
  static_assert(!kFp8Matmul || kQuantizedSlots <= kSlots, "the producer waits for itself");

  // Release K after the next GEMM is issued, unless its slot is needed at once.
  static constexpr bool kReleasesLate = kSlots > 2;
  // Whether final rows of joint items are staged in the slot of the last K and written by TMA. Not
  // with quantized values: WriteByTma does not scale, and their two slots are needed at once
  // anyway.
  static constexpr bool kWritesByTma = kReleasesLate && !kIsQuantized && !kOnlyDecodes<Traits> &&
                                       HopperOutputTmaTokens(Traits::kGroupSize) > 0 &&
                                       kNumConsumers * 64 * kVoPadded * 2 <= K::kBytes;

  struct Shared : QuantizedRings<Quantized, kQuantizedSlots> {
    ConsumerSmem consumers[kNumConsumers];
    alignas(1024) unsigned char k[kSlots][K::kBytes];
    alignas(1024) unsigned char v[kSlots][V::kBytes];
    ControlSmem control;
  };

  __device__ __forceinline__ static void Init(Shared& shared, i32* counters) {
    for (MergeScratch& merge : shared.control.merge) merge.counters = counters;
    Barriers& b = shared.control.barriers;
    for (int i = 0; i < kNumConsumers && !kOnlyDecodes<Traits>; ++i) {
      InitBarrier(SharedAddress(b.full_q + i), Roles::kProducerThreads);
      InitBarrier(SharedAddress(b.empty_q + i), 4);  // the consumer's own warps
    }
    InitBarrier(SharedAddress(&b.staging_free), Roles::kConsumerWarps);
    for (int i = 0; i < kSlots; ++i) {
      // Each thread of a producer arrives for its copies, each warp for its conversions.
      InitBarrier(SharedAddress(b.full_k + i), kConverts ? 4 : 128);
      InitBarrier(SharedAddress(b.full_v + i), kIsQuantized ? 4 : 128);
      InitBarrier(SharedAddress(b.empty_k + i), Roles::kConsumerWarps);
      InitBarrier(SharedAddress(b.empty_v + i), Roles::kConsumerWarps);
    }
    if constexpr (kIsQuantized) {
      for (int i = 0; i < kQuantizedSlots; ++i) {
        InitBarrier(SharedAddress(b.full_k_quantized + i), 128);
        InitBarrier(SharedAddress(b.full_v_quantized + i), 128);
      }
    }
  }
};

// --- producer ---

template <class Traits>
class HopperProducer {
 public:
  using Shape = HopperShape<Traits>;
  using Shared = typename Shape::Shared;
  using E = Element<Traits::kDtype>;

  __device__ __forceinline__ HopperProducer(const AttentionParams& p, Shared& shared)
      : p_(p), shared_(shared), steps_(p) {}

  __device__ __forceinline__ void Run(int begin, int end) { RunBoth(begin, end); }
  __device__ __forceinline__ void Run(int begin, int end, const FirstItem<Traits>& first) {
    RunOne(begin, end, first);
  }

 protected:
  // All steps of the queue, in order. K of a step is copied ahead of V of the step before, as
  // consumers ask for them in this order. q comes behind both, except the first q, which is copied
  // while the first page id is on its way.
  __device__ __forceinline__ void RunBoth(int begin, int end) {
    Start(begin, end);
    bool has_v = false;
    u32 v_row = kNoRow;
    int v_head = 0;
    while (steps_.has_item()) {
      const int head = Head(steps_.item());
      const bool has_step = steps_.has_step();
      const int index = steps_.index();
      const bool has_q = has_step && index > begin && steps_.is_first();
      const u32 row = has_step ? steps_.Row() : kNoRow;
      steps_.Next();
      if (has_step) {
        Fill<Traits::kHeadDimQk, typename Shape::K>(
            k_cursor_, Barriers().full_k, Barriers().empty_k, shared_.k[k_cursor_.slot], pools_.k,
            p_.k_map, p_.k_new, p_.k_new_map, row, head);
      }
      if (has_v) LoadV(v_row, v_head);
      if (has_q) LoadQ(ItemRecord(p_, index));
      has_v = has_step;
      v_row = row;
      v_head = head;
    }
    if (has_v) LoadV(v_row, v_head);
    Finish();
  }

  // The same for K alone or V alone, with a producer each. V is not needed before P is there. The
  // first rows of K can then use all of the memory bandwidth.
  __device__ __forceinline__ void RunOne(int begin, int end, const FirstItem<Traits>& first) {
    const bool is_v = Uniform(threadIdx.x / 128) != 0;
    steps_.Start(begin, end, first.item);
    pools_ = FindPools<Traits, E::kBytes>(p_, first.layer);
    SyncNamed(kBarriersMade, Shape::Roles::kNumThreads);
    if (is_v) FinishLaunch<Traits, 2>(p_, threadIdx.x % 128, 128);
    auto& b = Barriers();
    if constexpr (Traits::kHeadDimQk == Traits::kHeadDimVo) {  // one copy of the code for both
      FillSteps<Traits::kHeadDimQk, typename Shape::K>(
          is_v ? b.full_v : b.full_k, is_v ? b.empty_v : b.empty_k,
          is_v ? shared_.v[0] : shared_.k[0], is_v ? pools_.v : pools_.k,
          is_v ? p_.v_new : p_.k_new);
    } else if (is_v) {
      FillSteps<Traits::kHeadDimVo, typename Shape::V>(b.full_v, b.empty_v, shared_.v[0], pools_.v,
                                                       p_.v_new);
    } else {
      FillSteps<Traits::kHeadDimQk, typename Shape::K>(b.full_k, b.empty_k, shared_.k[0], pools_.k,
                                                       p_.k_new);
    }
  }

  template <int kHeadDim, class Tile>
  __device__ __forceinline__ void FillSteps(const u64* full, const u64* empty,
                                            const unsigned char* slots, const char* pool,
                                            const void* fresh_rows) {
#pragma unroll 1
    while (steps_.has_item()) {
      const int head = steps_.item().kv_head();
      const u32 row = steps_.Row();
      steps_.Next();
      Fill<kHeadDim, Tile>(k_cursor_, full, empty, slots + k_cursor_.slot * Tile::kBytes, pool,
                           p_.k_map, fresh_rows, p_.k_new_map, row, head);
    }
  }

  static constexpr int kWarpTokens = Shape::kWarpTokens;  // tokens of a step that a warp copies
  static constexpr int kTmaRows = Shape::kTmaRows;
  // Flags beside the kv head: TMA copies the rows; or rows are copied one by one and other tiles
  // read them again.
  static constexpr int kByTma = 1 << 30, kReadAgain = 1 << 29, kHead = kReadAgain - 1;
  static constexpr int kRowsPerCopy = 4;  // eight lanes copy 128 bytes of a row

  __device__ typename Shape::Barriers& Barriers() const { return shared_.control.barriers; }
  __device__ static int Lane() { return threadIdx.x % kWarpSize; }
  __device__ static int Warp() { return Shape::ProducerWarp(); }

  __device__ __forceinline__ void Start(int begin, int end) {
    steps_.Start(begin, end);
    if (Traits::kPageSize > 0 && p_.layer != nullptr) layer_ = LoadConstant(p_.layer);
    pools_ = FindPoolsOfRows<Traits, kKvRowBytes<Traits, Traits::kHeadDimQk>,
                             kKvRowBytes<Traits, Traits::kHeadDimVo>>(p_, LoadLayer<Traits>(p_));
    if (steps_.has_item() && steps_.has_step()) LoadQ(ItemRecord(p_, begin));
  }
  // The kv head, with the flags that say how its rows are copied.
  __device__ __forceinline__ int Head(const ItemCopy& item) const {
    if constexpr (kTmaRows == 0) return item.kv_head() | (IsJoint<Traits>(item) ? kReadAgain : 0);
    return item.kv_head() | (UsesTma<Traits>(p_, item) ? kByTma : 0);
  }
  // Done while the consumers still compute: they would wait for the header, one more trip to
  // memory.
  __device__ __forceinline__ void Finish() {
    FinishLaunch<Traits, 2>(p_, threadIdx.x, Shape::Roles::kProducerThreads);
  }

  __device__ __forceinline__ void LoadV(u32 row, int head) {
    Fill<Traits::kHeadDimVo, typename Shape::V>(v_cursor_, Barriers().full_v, Barriers().empty_v,
                                                shared_.v[v_cursor_.slot], pools_.v, p_.v_map,
                                                p_.v_new, p_.v_new_map, row, head);
  }

  // Copies the rows of one step into the ring's next slot, once the consumers have released it.
  template <int kHeadDim, class Tile>
  __device__ __forceinline__ void Fill(RingCursor<Shape::kSlots>& cursor, const u64* full,
                                       const u64* empty, const unsigned char* slot,
                                       const char* pool, const TensorMap& map,
                                       const void* fresh_rows, const TensorMap& fresh_map, u32 row,
                                       int head) {
    WaitBarrier(SharedAddress(empty + cursor.slot), cursor.parity ^ 1);
    Copy<kHeadDim, Tile>(cursor, full, slot, pool, map, fresh_rows, fresh_map, row, head);
  }

  // The same, into a slot that is known to be free.
  template <int kHeadDim, class Tile, int kSlots>
  __device__ __forceinline__ void Copy(RingCursor<kSlots>& cursor, const u64* full,
                                       const unsigned char* slot, const char* pool,
                                       const TensorMap& map, const void* fresh_rows,
                                       const TensorMap& fresh_map, u32 row, int head) const {
    const u32 barrier = SharedAddress(full + cursor.slot);
    if constexpr (kTmaRows > 0) {
      if constexpr (Traits::kHasFreshKv) {  // a TMA tile lies in pages or in k_new, v_new
        if ((head & kByTma) != 0 && __all_sync(kFullWarp, row >= kFreshRow && row != kNoRow)) {
          CopyByTma<Tile>(SharedAddress(slot), fresh_map, 0, row - kFreshRow, head & kHead,
                          barrier);
          cursor.Advance();
          return;
        }
        if (__any_sync(kFullWarp, row >= kFreshRow)) head &= ~kByTma;
      }
      if ((head & kByTma) != 0 && __all_sync(kFullWarp, row != kNoRow)) {
        CopyByTma<Tile>(SharedAddress(slot), map, layer_, row, head & kHead, barrier);
        cursor.Advance();
        return;
      }
    }
    const char* from_head = pool + ((head & kHead) * (kHeadDim * E::kBytes) + Lane() % 8 * 16);
    if (Tile::kLiveChunks == 8 * Tile::kBlocks && __all_sync(kFullWarp, row != kNoRow)) {
      const bool again = kTmaRows == 0 && (head & kReadAgain) != 0;
      const u64 policy = again ? EvictNormal() : EvictFirst();
      CopyRows<kHeadDim, Tile, true>(SharedAddress(slot), from_head, row, pool, fresh_rows, policy);
    } else {
      CopyRows<kHeadDim, Tile, false>(SharedAddress(slot), from_head, row, pool, fresh_rows, 0);
    }
    ArriveBarrierAfterCopies(barrier);
    cursor.Advance();
  }

  // Copies this warp's rows of a step by TMA. One lane issues each tile and block of columns.
  template <class Tile>
  __device__ __forceinline__ void CopyByTma(u32 slot, const TensorMap& map, int layer, u32 row,
                                            int head, u32 barrier) const {
    if (Lane() == 0) {
      ExpectBytes(barrier, kWarpTokens * 128 * Tile::kBlocks);
      ArriveBarrier(barrier, kWarpSize);
    }
    __syncwarp();
    if (Lane() % kTmaRows == 0 && Lane() < kWarpTokens) {
      const u32 to = slot + (Warp() * kWarpTokens + Lane()) * 128;
#pragma unroll
      for (int block = 0; block < Tile::kBlocks; ++block) {
        LoadTmaTile(to + block * Tile::kBlockBytes, map, block * 64, head, static_cast<int>(row),
                    layer, barrier);
      }
    }
  }

  // Copies this warp's rows of a step one by one. kWhole: all rows are in the span and have no
  // padding; `policy` is for these. Measured (H200, 1 x 16384 with pages of one token): 3,230 us
  // where L2 is told to drop rows that other tiles read again, 3,165 where it is not.
  template <int kHeadDim, class Tile, bool kWhole>
  __device__ __forceinline__ void CopyRows(u32 slot, const char* from_head, u32 row,
                                           const char* pool, const void* fresh_rows,
                                           u64 policy) const {
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
      if constexpr (Traits::kHasFreshKv) {
        if (in_span && rows[i] >= kFreshRow) {
          const char* fresh_head = static_cast<const char*>(fresh_rows) + (from_head - pool);
          from = fresh_head + static_cast<u64>(rows[i] - kFreshRow) * pitch;
        }
      }
#pragma unroll
      for (int block = 0; block < Tile::kBlocks; ++block) {
        const u32 to_chunk = swizzled[i % 2] + i * kRowsPerCopy * 128 + block * Tile::kBlockBytes;
        if constexpr (kWhole) {
          CopyAsync16(to_chunk, from + block * 128, true, policy);
        } else {
          const bool valid = in_span && block * 8 + chunk < Tile::kLiveChunks;
          CopyAsync16(to_chunk, valid ? from + block * 128 : from_head, valid);
        }
      }
    }
  }

  // Copies num_tile_rows rows of q for `consumer`, zeros behind those of the item.
  __device__ __forceinline__ void LoadQ(const ItemRecord& item, int consumer, int first_row,
                                        int num_tile_rows) {
    using Q = typename Shape::Q;
    const int num_rows = NumRows<Traits>(item);
    const QueryRows<Traits::kGroupSize> rows(p_, item.first_token(), item.kv_head(),
                                             item.is_shared());
    const int thread = Opaque(threadIdx.x);  // else registers would keep what only q needs
    const int chunk = thread % 8;
    WaitBarrier(SharedAddress(Barriers().empty_q + consumer), (q_parity_ >> consumer & 1) ^ 1);
#pragma unroll 1
    for (int r = thread / 8; r < num_tile_rows; r += Shape::Roles::kProducerThreads / 8) {
      const int row = first_row + r;
      const u16* from = static_cast<const u16*>(p_.q);
      if (row < num_rows) from += rows.Index(row) * QueryColumns<Traits>();
      const u32 to = SharedAddress(shared_.consumers[consumer].q) + r * 128 + (chunk ^ r % 8) * 16;
#pragma unroll
      for (int block = 0; block < Q::kBlocks; ++block) {
        const int column = block * 8 + chunk;
        const bool valid = row < num_rows && column < Q::kLiveChunks;
        CopyAsync16(to + block * (num_tile_rows * 128), valid ? from + column * 8 : from, valid);
      }
    }
    ArriveBarrierAfterCopies(SharedAddress(Barriers().full_q + consumer));
    q_parity_ ^= 1u << consumer;
  }

  __device__ __forceinline__ void LoadQ(const ItemRecord& item) {
    if (IsJoint<Traits>(item)) {
#pragma unroll
      for (int i = 0; i < Shape::kNumConsumers; ++i) LoadQ(item, i, 64 * i, 64);
      next_consumer_ = 0;
    } else {
      LoadQ(item, next_consumer_, 0, IsDecode<Traits>(item) ? DecodeShared<Traits>::kRows : 64);
      next_consumer_ = NextConsumer<Traits>(next_consumer_);
    }
  }

  const AttentionParams& p_;
  Shared& shared_;
  KvPools pools_ = {};
  int layer_ = 0;
  QueueSteps<Traits, Shape> steps_;
  RingCursor<Shape::kSlots> k_cursor_, v_cursor_;
  u32 q_parity_ = 0;       // bit i: phase of consumer i's q
  int next_consumer_ = 0;  // gets the next single item
};

// --- consumers ---

template <class Traits>
class HopperConsumer {
 public:
  using Shape = HopperShape<Traits>;
  using Shared = typename Shape::Shared;
  using E = Element<Traits::kDtype>;
  using Rows = TileRows<Traits>;
  using Step = KvStep<Traits>;
  using Q = typename Shape::Q;
  using K = typename Shape::K;
  using V = typename Shape::V;
  using Consumers = HopperConsumersOf<typename Shape::Roles>;

  __device__ __forceinline__ HopperConsumer(const AttentionParams& p, Shared& shared)
      : p_(p),
        shared_(shared),
        group_(Uniform(threadIdx.x / 128) - Shape::Roles::kNumProducers),
        thread_(threadIdx.x % 128) {}

  __device__ __forceinline__ void Run(int begin, int end) {
    if constexpr (kOnlyDecodes<Traits>) {
      Consumers::Sync();
      ArriveNamed(kBarriersMade, Shape::Roles::kNumThreads);
    }
    // Consumer 0 has the ping-pong token first.
    if (kTakesTurns && group_ == Shape::kNumConsumers - 1) ArriveNamed(kTokenBarrier, kBoth);
    int owner = 0;  // gets the next single item
    for (int index = Uniform(begin); index < end; ++index) {
      const ItemRecord item(p_, index);
      const bool joint = IsJoint<Traits>(item);
      if (!joint && owner != group_) {
        Pass(item);
      } else if (IsDecode<Traits>(item)) {
        if constexpr (kHasDecode<Traits>) RunDecode(index, index > begin, index + 1 < end);
      } else if constexpr (!kOnlyDecodes<Traits>) {
        RunItem(index, joint);
      }
      if (HasSteps<Traits>(item))
        owner = joint ? 0 : NextConsumer<Traits>(owner);  // as HopperProducer::LoadQ
    }
    ReleaseStaging();
    // Takes the token that is left over.
    if (kTakesTurns && group_ == 0) SyncNamed(kTokenBarrier, kBoth);
  }

 private:
  // Whether joint items have a ping-pong token.
  static constexpr bool kTakesTurns = !kOnlyDecodes<Traits> && Shape::kNumConsumers > 1;
  static constexpr int kBoth = 256;  // threads of two consumers: the one that passes the token and
                                     // the one that waits
  // Named barriers of the token: this one for consumer 0, the next ones for the others.
  static constexpr int kTokenBarrier = Shape::kNumConsumers == 2 ? 1 : 7;
  static constexpr bool kReleasesLate = Shape::kReleasesLate;
  static constexpr int kStep = Shape::kStep;
  static constexpr int kSTiles = kStep / 8;
  static constexpr int kOTiles = Shape::kVoPadded / 8;
  using Output = float[kOTiles][4];
  static constexpr int kLast = Shape::kNumConsumers - 1;
  // A consumer of a joint item leaves it behind the last key that its rows see, where the first and
  // the last consumer differ by a step or more. The last consumer stays to the end of the item.
  static constexpr int kConsumerTokens = CeilDiv(64, Traits::kGroupSize);
  // Not where results are staged in the slot of the last K: it must be the last K of all consumers.
  static constexpr bool kLeavesEarly = Traits::kHasWindowRight && !Traits::kHasSteps &&
                                       !Shape::kWritesByTma &&
                                       kLast * 64 >= kStep * Traits::kGroupSize;

  __device__ typename Shape::Barriers& Barriers() const { return shared_.control.barriers; }
  __device__ int Lane() const { return thread_ % kWarpSize; }
  __device__ int Warp() const { return thread_ / kWarpSize; }

  // --- rings ---

  using Cursor = RingCursor<Shape::kSlots>;

  __device__ u32 FullK() const { return SharedAddress(Barriers().full_k + k_cursor_.slot); }
  __device__ u32 FullV() const { return SharedAddress(Barriers().full_v + v_cursor_.slot); }
  __device__ __forceinline__ void WaitFull(const u64* full, const Cursor& cursor) const {
    WaitBarrier(SharedAddress(full + cursor.slot), cursor.parity);
    FenceSharedForWgmma();
  }
  // Each warp that reads a slot arrives for itself, as products of other warps may still read. In a
  // single item a warp arrives for a warp of each other consumer as well.
  __device__ __forceinline__ void Release(const u64* empty, int slot, bool joint) const {
    __syncwarp();
    if (Lane() == 0) {
      ArriveBarrier(SharedAddress(empty + slot), joint ? 1 : Shape::kNumConsumers);
    }
  }
  __device__ __forceinline__ void Release(const u64* empty, Cursor& cursor, bool joint) {
    Release(empty, cursor.slot, joint);
    cursor.Advance();
  }
  // Gives back the slot that results were staged in. Called when the next item begins.
  __device__ __forceinline__ void ReleaseStaging() {
    if constexpr (Shape::kWritesByTma) {
      if (staging_slot_ < 0) return;
      if (Lane() == 0) {
        WaitStoresRead();
        ArriveBarrier(SharedAddress(Barriers().empty_k + staging_slot_));
      }
      staging_slot_ = -1;
    }
  }
  __device__ __forceinline__ void ReleaseQ() {
    __syncwarp();
    if (Lane() == 0) ArriveBarrier(SharedAddress(Barriers().empty_q + group_));
  }

  // Skips the steps of an item that another consumer has, without waiting for their barriers. A
  // barrier tells apart only two phases in a row. This is safe: the consumer next waits for q of an
  // item, and the same threads copied all earlier rows before that q, so those phases are over by
  // then. In a kernel that only decodes, a consumer passes the token when all rows of its item are
  // there.
  __device__ __forceinline__ void Pass(const ItemRecord& item) {
    if (!HasSteps<Traits>(item)) return;
    int num_steps = Uniform(CeilDiv(item.kv_end() - FirstStep<kStep>(item), kStep));
    if (kOnlyDecodes<Traits>) num_steps = Max(num_steps, 1);
    k_cursor_.Advance(num_steps);
    v_cursor_.Advance(num_steps);
  }

  // Skips the steps of a joint item that others have still to do when this consumer leaves it. It
  // releases the slots unread, but only once their rows are there: two phases later a barrier looks
  // the same, and this consumer would wait for ever.
  __device__ __forceinline__ void PassUnread(int num_steps) {
#pragma unroll 1
    for (; num_steps > 0; --num_steps) {
      WaitBarrier(FullK(), k_cursor_.parity);
      Release(Barriers().empty_k, k_cursor_, true);
      WaitBarrier(FullV(), v_cursor_.parity);
      Release(Barriers().empty_v, v_cursor_, true);
    }
  }

  // --- products ---

  // The slots at the cursors. Uniform, so that the descriptors of a step are made beside the
  // products and take no registers from them.
  __device__ u32 KSlot() const { return Uniform(SharedAddress(shared_.k[k_cursor_.slot])); }
  __device__ u32 VSlot() const { return Uniform(SharedAddress(shared_.v[v_cursor_.slot])); }

  __device__ __forceinline__ void StartQk(u32 k_slot, float (&s)[kSTiles][4]) const {
    // Opaque: computed again in every step. Kept in registers it would push out others.
    const u64 q = Q::Descriptor(Opaque(SharedAddress(shared_.consumers[group_].q)), 0);
    const u64 k = K::Descriptor(k_slot, 0);
    if constexpr (Shape::kFp8Matmul) {
#pragma unroll
      for (int kk = 0; kk < CeilDiv(Traits::kHeadDimQk, 32); ++kk) {
        WgmmaE4m3<kStep>::SharedA(s, Q::AlongK(q, kk), K::AlongK(k, kk), kk > 0);
      }
    } else {
#pragma unroll
      for (int kk = 0; kk < Q::kPadded / 16; ++kk) {
        Wgmma<kStep, Traits::kDtype>::SharedA(s, Q::AlongK(q, kk), K::AlongK(k, kk), kk > 0);
      }
    }
    WgmmaCommit();
  }

  // P of a step as operand a, and the accumulators of P V. FP8 P is read from shared memory, so no
  // product waits for registers. FP8 products have accumulators of their own in each step, see
  // kSumColumns.
  static constexpr int kPTiles = kStep / (Shape::kFp8Matmul ? 32 : 16);
  using StepP = u32[kPTiles][4];
  using PTile = SwizzledTile<kStep / 2, 64>;  // e4m3
  using StepOutput = float[Shape::kPvColumns / 8][4];

  __device__ __forceinline__ void StartPv(const StepP& p, u32 v_slot, Output& o) const {
    const u64 v = V::TransposedDescriptor(v_slot, 0);
#pragma unroll
    for (int kk = 0; kk < kPTiles; ++kk) {
      Wgmma<V::kPadded, Traits::kDtype>::RegistersATransposedB(o, p[kk], V::AlongRows(v, kk), true);
    }
    WgmmaCommit();
  }
  __device__ __forceinline__ void StartFp8Pv(u32 v_slot, StepOutput& step_o) const {
    const u64 p = PTile::Descriptor(Opaque(SharedAddress(shared_.consumers[group_].p)), 0);
    const u64 v = V::Descriptor(v_slot, 0);
#pragma unroll
    for (int kk = 0; kk < kPTiles; ++kk) {
      WgmmaE4m3<Shape::kPvColumns>::SharedA(step_o, PTile::AlongK(p, kk), V::AlongK(v, kk), kk > 0);
    }
    WgmmaCommit();
  }
  // O += P V, 16-bit or FP8. Call PinForPv before the wgmma fence.
  __device__ __forceinline__ void StartAnyPv(const StepP& p, u32 v_slot, Output& o,
                                             StepOutput& step_o) const {
    if constexpr (Shape::kFp8Matmul) {
      StartFp8Pv(v_slot, step_o);
    } else {
      StartPv(p, v_slot, o);
    }
  }
  __device__ __forceinline__ static void PinForPv(StepP& p, Output& o) {
    if constexpr (!Shape::kFp8Matmul) {
      PinRegisters(p);
      PinRegisters(o);
    }
  }
  // Stores a warp's rows of FP8 P. Only the warp's own part of the product reads them.
  __device__ __forceinline__ void StoreFp8P(const StepP& p) const {
    if constexpr (Shape::kFp8Matmul) {
      const int lane = Lane(), row = lane % 16;
      const u32 to = SharedAddress(shared_.consumers[group_].p) + (Warp() * 16 + row) * 128 +
                     (lane / 16 ^ row % 8) * 16;
#pragma unroll
      for (int kk = 0; kk < kPTiles; ++kk) StoreMatrix4(to ^ 2 * kk * 16, p[kk]);
      FenceSharedForWgmma();
      __syncwarp();
    }
  }

  // The ping-pong token of joint items: products of one consumer run while another exponentiates.
  __device__ __forceinline__ void WaitForToken() const { SyncNamed(kTokenBarrier + group_, kBoth); }
  __device__ __forceinline__ void PassToken(int consumer) const {
    ArriveNamed(kTokenBarrier + consumer, kBoth);
  }
  __device__ __forceinline__ void PassToken() const { PassToken(NextConsumer<Traits>(group_)); }

  // With kLeavesEarly, the end of what rows of the first consumer see. For each further consumer it
  // is at most kConsumerTokens later.
  __device__ __forceinline__ int FirstEnd(const ItemRecord& item) const {
    constexpr int kLastToken = 63 / Traits::kGroupSize;
    return SpanOfTokens<Traits>(p_, FirstOfItem<Traits>(item), EndOfItem<Traits>(p_, item),
                                item.q_pos(), kLastToken, kLastToken)
        .any_end;
  }
  // The consumer that gets the token next. The last consumer passes it to the first one that has
  // not left before the next step, at `pos`; that may be itself.
  __device__ __forceinline__ int NextTokenHolder(int pos, int end, int first_end) const {
    if (!kLeavesEarly || group_ < kLast) return NextConsumer<Traits>(group_);
    if (pos >= end || pos < first_end) return 0;
    return Min(static_cast<int>(static_cast<u32>(pos - first_end) / kConsumerTokens) + 1, kLast);
  }

  // S^T = K Q^T of a decode item. The addresses are uniform, which halves the price of making 16
  // descriptors of each.
  template <class Decode>
  __device__ __forceinline__ static void StartKq(typename Decode::Scores& s, u32 k_slot, u32 q_at) {
    using DecodeQ = typename Decode::Shared::Q;
    const u64 k = K::Descriptor(k_slot, 0), q = DecodeQ::Descriptor(q_at, 0);
#pragma unroll
    for (int kk = 0; kk < DecodeQ::kPadded / 16; ++kk) {
#pragma unroll
      for (int b = 0; b < Decode::kBlocks; ++b) {
        Wgmma<Decode::kRows, Traits::kDtype>::SharedA(s[b], K::AlongK(K::Down(k, 64 * b), kk),
                                                      DecodeQ::AlongK(q, kk), kk > 0);
      }
    }
    WgmmaCommit();
  }

  template <class Decode>
  __device__ __forceinline__ static void StartVp(typename Decode::Output& o, u32 v_slot, u32 p_at) {
    using P = typename Decode::Shared::P;
    const u64 v = V::TransposedDescriptor(v_slot, 0), p = P::Descriptor(p_at, 0);
#pragma unroll
    for (int kk = 0; kk < kStep / 16; ++kk) {
#pragma unroll
      for (int m = 0; m < Decode::kOBlocks; ++m) {
        Wgmma<Decode::kRows, Traits::kDtype>::TransposedSharedA(
            o[m], V::AlongRows(V::Right(v, m), kk), P::AlongK(p, kk), true);
      }
    }
    WgmmaCommit();
  }

  // --- phases of an item ---

  __device__ __forceinline__ void WaitForQ(const ItemRecord& item, bool joint, Rows& rows) {
    WaitBarrier(SharedAddress(Barriers().full_q + group_), q_parity_);
    q_parity_ ^= 1;
    if constexpr (Shape::kFp8Matmul) {
      rows.SetQueryScales(QuantizedQuery<Traits>(p_, item, shared_.consumers[group_].q,
                                                 joint ? group_ * 64 : 0, thread_)
                              .scales);
    }
  }

  // Waits until K of the step at k_cursor_ is in shared memory and wgmma may read it.
  __device__ __forceinline__ void WaitForK() const { WaitFull(Barriers().full_k, k_cursor_); }

  // Waits for K of the step and V of the one before, in steps after the first. Call FenceIfCopied
  // next.
  __device__ __forceinline__ void WaitForKAndV() const {
    WaitBarrier(FullK(), k_cursor_.parity);
    WaitBarrier(FullV(), v_cursor_.parity);
  }

  // Fences K of the step at `pos` and V of the one before if cp.async wrote any of it; TMA writes
  // need no fence. tma_begin: from here on TMA copies whole steps. border: the first fresh
  // position.
  __device__ __forceinline__ void FenceIfCopied(int pos, int tma_begin, int end, int border) const {
    if (Traits::kHasSteps || pos - kStep < tma_begin || pos + kStep > end ||
        (Traits::kHasFreshKv && pos - kStep < border && pos + kStep > border)) {
      FenceSharedForWgmma();
    }
  }

  // S = Q K^T of the step at k_cursor_. Waits for the product.
  __device__ __forceinline__ void MultiplyQk(float (&s)[kSTiles][4]) const {
    WgmmaFence();
    StartQk(KSlot(), s);
    WgmmaWait<0>();
    PinRegisters(s);
  }

  // Issues S = Q K^T of a step and O += P V of the one before.
  __device__ __forceinline__ void StartQkAndPv(u32 k_slot, u32 v_slot, float (&s)[kSTiles][4],
                                               StepP& p, Output& o, StepOutput& step_o) const {
    PinForPv(p, o);
    WgmmaFence();
    StartQk(k_slot, s);
    StartAnyPv(p, v_slot, o, step_o);
  }

  // Masks S and computes P of a step while the products of StartQkAndPv run. In between it finishes
  // P V of the step before and releases V. Returns whether P must be computed again. arrived:
  // whether WaitForKAndV of the next step would return at once.
  __device__ __forceinline__ bool ComputeP(const Step& step, bool joint, Rows& rows,
                                           float (&s)[kSTiles][4], StepP& p, Output& o,
                                           StepOutput& step_o, bool& arrived) {
    const float scale = rows.Scale();
    KeepBefore(scale);
    rows.template FindBias<kSTiles>(step);
    WgmmaWait<1>();
    PinRegisters(s);
    rows.MakeLogits(step, s);
    const bool again = rows.Exponentiate(scale, false, s, p, [&] {
      FinishPv(rows, o, step_o);
      if constexpr (Rows::kMoves) rows.Rescale(o);
      Release(Barriers().empty_v, v_cursor_, joint);
      Cursor next_k = k_cursor_;
      next_k.Advance();
      arrived = TestBarrier(SharedAddress(Barriers().full_k + next_k.slot), next_k.parity) &
                TestBarrier(FullV(), v_cursor_.parity);
    });
    if constexpr (Rows::kFp8P) rows.Rescale(o);
    StoreFp8P(p);
    return again;
  }

  // Waits for all products. FP8: adds those of the step to o.
  __device__ __forceinline__ void FinishPv(Rows& rows, Output& o, StepOutput& step_o) const {
    WgmmaWait<0>();
    if constexpr (Shape::kFp8Matmul) {
      PinRegisters(step_o);
      rows.AddStep(step_o, o);
    } else {
      PinRegisters(o);
    }
  }

  // Waits for V of the last step and issues O += P V.
  __device__ __forceinline__ void StartLastPv(StepP& p, Output& o, StepOutput& step_o) const {
    WaitFull(Barriers().full_v, v_cursor_);
    PinForPv(p, o);
    WgmmaFence();
    StartAnyPv(p, VSlot(), o, step_o);
  }

  // Writes final rows by TMA from slot `slot` of the K ring, once no consumer reads K there any
  // more. If not `writes`, it releases the slot.
  __device__ __forceinline__ void WriteFromStaging(int slot, bool writes, const Rows& rows,
                                                   const Output& o, const float (&o_scale)[2]) {
    WaitBarrier(SharedAddress(&Barriers().staging_free), staging_parity_);
    staging_parity_ ^= 1;
    if (writes) {
      constexpr int kWarpBytes = 16 * Shape::kVoPadded * 2;
      const u32 staging = SharedAddress(shared_.k[slot]) + (group_ * 4 + Warp()) * kWarpBytes;
      rows.WriteByTma(o, o_scale, Uniform(staging));
      staging_slot_ = slot;
    } else {
      Release(Barriers().empty_k, slot, true);
    }
  }

  // --- one item ---

  __device__ __forceinline__ void RunItem(int index, bool joint) {
    const int team_thread = joint ? Consumers::thread() : thread_;
    RecordBegin<Traits>(p_, index, team_thread);
    const ItemRecord item(p_, index);
    Rows rows(p_, index, joint ? group_ * 64 : 0, thread_, 0.0f);
    Output o;
#pragma unroll
    for (int j = 0; j < kOTiles; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) o[j][c] = 0.0f;
    }

    const int begin = Uniform(item.kv_begin());
    int end = Uniform(item.kv_end());
    const bool uses_tma = joint && Shape::kTmaRows > 0 && UsesTma<Traits>(p_, item);
    const int tma_begin = uses_tma ? begin : end;
    const int border = Border(item);
    int pos = Uniform(FirstStep<kStep>(item));
    ReleaseStaging();
    bool is_written = false;
    int num_left = 0;  // steps of the item behind this consumer's last one
    // The same condition as in the producer: not on pos, which a reversed span may reach.
    if (begin < end) {
      int first_end = end;
      bool waits_for_token = kTakesTurns && joint;
      if (kLeavesEarly && joint) {
        first_end = Uniform(FirstEnd(item));
        if (group_ < kLast) end = Min(first_end + group_ * kConsumerTokens, end);
      }
      WaitForQ(item, joint, rows);
      StepP p;
      StepOutput step_o = {};
      // Whether K and V of the next step are there (asked early, as the answer takes time), and
      // whether P must be computed again, see TileRows::Exponentiate.
      bool arrived = false, again;
      {  // P of the first step
        float s[kSTiles][4] = {};
        WaitForK();
        MultiplyQk(s);
        rows.template FindBias<kSTiles>(Step(p_, pos, end));
        rows.MakeLogits(Step(p_, pos, end), s);
        again = rows.Exponentiate(rows.Scale(), true, s, p, [] {});
        StoreFp8P(p);
      }
      for (bool is_first = true;; is_first = false) {
        if (OneHopperConsumer::SyncOr(again)) {  // with another running max; the logits were lost
          float s[kSTiles][4] = {};
          MultiplyQk(s);
          rows.MakeLogits(Step(p_, pos, end), s);
          rows.RecomputeP(is_first, s, p);
          rows.Rescale(o);
          StoreFp8P(p);
        }
        rows.AddSums();
        // K of this step is in the slot that has its V in the other ring.
        if (!kReleasesLate) Release(Barriers().empty_k, v_cursor_.slot, joint);
        k_cursor_.Advance();
        pos += kStep;
        if (pos >= end) break;
        float s[kSTiles][4] = {};
        if (!arrived) WaitForKAndV();
        FenceIfCopied(pos, tma_begin, end, border);
        const u32 k_slot = KSlot(), v_slot = VSlot();  // before waiting for the token
        const Step step(p_, pos, end);
        const int next = NextTokenHolder(pos + kStep, end, first_end);
        const bool passes_token = kTakesTurns && joint && next != group_;
        if (waits_for_token) WaitForToken();
        StartQkAndPv(k_slot, v_slot, s, p, o, step_o);
        if (passes_token) PassToken(next);
        waits_for_token = passes_token;
        if (kReleasesLate) Release(Barriers().empty_k, v_cursor_.slot, joint);
        again = ComputeP(step, joint, rows, s, p, o, step_o, arrived);
      }
      ReleaseQ();
      const bool has_staging = Shape::kWritesByTma && joint;
      const int slot = v_cursor_.slot;  // slot of the last K
      if (has_staging) {
        __syncwarp();
        if (Lane() == 0) ArriveBarrier(SharedAddress(&Barriers().staging_free));
        is_written = rows.AreWhole();
      } else if (kReleasesLate) {
        Release(Barriers().empty_k, slot, joint);
      }
      StartLastPv(p, o, step_o);
      rows.FinishSums();
      float o_scale[2];
      if (is_written) rows.WriteStates(o_scale);
      FinishPv(rows, o, step_o);
      Release(Barriers().empty_v, v_cursor_, joint);
      if constexpr (Shape::kWritesByTma) {
        if (has_staging) WriteFromStaging(slot, is_written, rows, o, o_scale);
      }
      if (kLeavesEarly && joint && group_ < kLast) {
        const int item_end = item.kv_end();
        if (pos < item_end) {
          if (pos == FirstStep<kStep>(item) + kStep) {  // there every consumer gets the token
            WaitForToken();
            PassToken();
          }
          num_left = Uniform(CeilDiv(item_end - pos, kStep));
        }
      }
    }
    if (!is_written) rows.Write(o);
    if constexpr (kLeavesEarly) PassUnread(num_left);
    Merge(index, item, joint);
    RecordEnd<Traits>(p_, index, team_thread);
  }

  __device__ __forceinline__ void Merge(int index, const ItemRecord& item, bool joint) {
    const int num_groups = item.num_groups();
    if (num_groups == 0) return;
    if (joint) {
      ArriveAndMerge<Traits, Consumers>(p_, index, item.merge_idx(), num_groups,
                                        shared_.control.merge[Shape::kJointMerge]);
    } else {
      struct One : OneHopperConsumer, HopperReduce<Shape::kNumConsumers> {};
      ArriveAndMerge<Traits, One>(p_, index, item.merge_idx(), num_groups,
                                  shared_.control.merge[group_]);
    }
  }

  // waits_for_token, passes_token: in a kernel that only decodes, whether another item comes
  // before, and behind.
  __device__ __forceinline__ void RunDecode(int index, bool waits_for_token, bool passes_token) {
    ReleaseStaging();
    RecordBegin<Traits>(p_, index, thread_);
    const ItemRecord item(p_, index);
    if (Traits::kGroupSize <= kFewRows && NumRows<Traits>(item) <= kFewRows) {
      RunDecodeItem<DecodeRows<Traits, kFewRows>>(index, waits_for_token, passes_token);
    } else {
      RunDecodeItem<DecodeRows<Traits, kHopperDecodeRows>>(index, waits_for_token, passes_token);
    }
    Merge(index, item, false);
    RecordEnd<Traits>(p_, index, thread_);
  }

  // P goes to the other warps through shared memory. The barrier behind which they may read it also
  // tells whether the running max of a row must grow first. In the first step every row's must.
  template <class Decode>
  __device__ __forceinline__ void RunDecodeItem(int index, bool waits_for_token,
                                                bool passes_token) {
    const ItemRecord item(p_, index);
    // Opaque: else registers would keep addresses that only this loop needs.
    const int group = Uniform(Opaque(group_));
    typename Decode::Shared& mine = shared_.consumers[group].decode;
    const u32 q_at = SharedAddress(mine.q), p_at = SharedAddress(mine.p);
    if constexpr (kOnlyDecodes<Traits>) {
      if (waits_for_token)
        OneHopperConsumer::Sync();  // the results of the item before have been
                                    // read
      LoadDecodeQ(item, q_at);
    }
    Decode rows(p_, index, Opaque(thread_), mine, shared_.control.exchange[group]);
    typename Decode::Output o = {};
    typename Decode::Scores s = {};
    const int end = Uniform(item.kv_end());
    int pos = Uniform(FirstStep<kStep>(item));
    if constexpr (kOnlyDecodes<Traits>) {
      WaitCopies<0>();  // q
      FenceSharedForWgmma();
      OneHopperConsumer::Sync();
      if (waits_for_token) WaitForToken();
    } else {
      WaitBarrier(SharedAddress(Barriers().full_q + group_), q_parity_);
      q_parity_ ^= 1;
    }
    WaitForK();
    WgmmaFence();
    StartKq<Decode>(s, Uniform(SharedAddress(shared_.k[k_cursor_.slot])), q_at);
    WgmmaWait<0>();
    PinBlocks(s);
    Release(Barriers().empty_k, k_cursor_, false);
    rows.MakeLogits(Step(p_, pos, end), s);
    bool grows = true;
    for (bool is_first = true;; is_first = false) {
      pos += kStep;
      const bool is_last = pos >= end;
      const u32 k_slot = Uniform(SharedAddress(shared_.k[k_cursor_.slot]));
      const u32 v_slot = Uniform(SharedAddress(shared_.v[v_cursor_.slot]));
      FenceSharedForWgmma();  // our P
      if ((kOnlyDecodes<Traits> && is_first) || OneHopperConsumer::SyncOr(grows)) {
        rows.Grow(s, o);
        rows.template Exponentiate<true>(s);
        rows.StoreP();
        FenceSharedForWgmma();
        OneHopperConsumer::Sync();
      }
      rows.AddSums();
      WaitBarrier(SharedAddress(Barriers().full_v + v_cursor_.slot), v_cursor_.parity);
      if (!is_last) {
        WaitBarrier(SharedAddress(Barriers().full_k + k_cursor_.slot), k_cursor_.parity);
      }
      FenceSharedForWgmma();  // rows of K and V
      PinBlocks(o);
      if (is_last) {
        if (kOnlyDecodes<Traits> && passes_token) PassToken();
        WgmmaFence();
        StartVp<Decode>(o, v_slot, p_at);
        break;
      }
      PinBlocks(s);
      WgmmaFence();
      StartKq<Decode>(s, k_slot, q_at);
      StartVp<Decode>(o, v_slot, p_at);
      WgmmaWait<1>();
      PinBlocks(s);
      Release(Barriers().empty_k, k_cursor_, false);
      rows.MakeLogits(Step(p_, pos, end), s);
      grows = rows.Exponentiate(s);
      KeepBefore(rows.LastWritten());
      WgmmaWait<0>();
      PinBlocks(o);
      OneHopperConsumer::Sync();  // the products that read P are done
      rows.StoreP();
      Release(Barriers().empty_v, v_cursor_, false);
    }
    rows.FinishStates();
    WgmmaWait<0>();
    PinBlocks(o);
    Release(Barriers().empty_v, v_cursor_, false);
    rows.Write(o);
    if constexpr (!kOnlyDecodes<Traits>) ReleaseQ();
  }

  // Copies q of a decode item, by the consumer that has it.
  __device__ __forceinline__ void LoadDecodeQ(const ItemRecord& item, u32 q_at) const {
    using DecodeQ = typename DecodeShared<Traits>::Q;
    const int num_rows = NumRows<Traits>(item);
    const QueryRows<Traits::kGroupSize> rows(p_, item.first_token(), item.kv_head(),
                                             item.is_shared());
    const int chunk = thread_ % 8;
#pragma unroll 1
    for (int row = thread_ / 8; row < CeilDiv(num_rows, 8) * 8; row += 16) {
      const u16* from = static_cast<const u16*>(p_.q);
      if (row < num_rows) from += rows.Index(row) * Traits::kHeadDimQk;
      const u32 to = q_at + row * 128 + (chunk ^ row % 8) * 16;
#pragma unroll
      for (int block = 0; block < DecodeQ::kBlocks; ++block) {
        const int column = block * 8 + chunk;
        const bool valid = row < num_rows && column < DecodeQ::kLiveChunks;
        CopyAsync16(to + block * DecodeQ::kBlockBytes, valid ? from + column * 8 : from, valid);
      }
    }
    CommitCopies();
  }

  // The first fresh position. A step across it is copied row by row.
  __device__ __forceinline__ int Border(const ItemRecord& item) const {
    if constexpr (Traits::kHasFreshKv) return FreshTokens(p_, item.request()).begin;
    return 0;
  }

  const AttentionParams& p_;
  Shared& shared_;
  const int group_;   // which consumer
  const int thread_;  // within the consumer
  Cursor k_cursor_, v_cursor_;
  u32 q_parity_ = 0;
  u32 staging_parity_ = 0;
  int staging_slot_ = -1;  // slot of this warp's results on their way; -1: none
};

// --- kernel ---

template <class Traits>
using ProducerOf = typename Conditional<Traits::kKvFormat != kPlainFormat,
                                        QuantizedProducer<Traits>, HopperProducer<Traits>>::Type;

template <class Traits>
using HopperAttentionBody =
    HopperBody<Traits, HopperShape<Traits>,
               HopperTeams<ProducerOf<Traits>, HopperConsumer<Traits>, RolesOf<Traits>>>;

}  // namespace jax_attn
