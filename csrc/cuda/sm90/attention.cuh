// Attention on Hopper: wgmma fed by a producer warpgroup through barriers in shared memory.
//
// A persistent CTA executes the items of its queue in order. Its first warpgroup produces (of
// codes, which become 16-bit keys and values on their way, the first two: see e4m3.cuh): it copies
// q, and K and V rows in steps of kStep tokens, as far ahead as the rings have room, across the
// borders of items. The others, two or three, consume, in one of two arrangements:
//   joint items (more rows)        each has 64 rows, and they take turns on the tensor cores: while
//                                  one multiplies, the others exponentiate.
//   single items (up to 64 rows)   one has all rows, and the next one the next item: while one
//                                  writes results and merges, another multiplies.
// Single items of up to 32 rows are products of their own, see decode.cuh. Where no tile is taller,
// the kernel has nothing else, and is made for batches that are done in microseconds: K and V have
// a producer each, and a consumer copies its q itself, so that nobody waits for copies that are not
// its own to be issued.
// Within a warpgroup q . k of a step runs while p * v of the step before does (FlashAttention-3,
// arXiv 2407.08608, section 3.2).
//
// kv steps start at absolute multiples of the step. What a step holds beyond the item's span is
// zero-filled, never read, and masked.
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
using RolesOf = HopperRolesOf<Traits::kNumWarps / 4 - kNumProducers<Traits>, kNumProducers<Traits>,
                              Traits::kKvFormat != kPlainFormat && !Traits::kMultipliesCodes>;

// The consumer whose turn comes after that of `consumer`.
template <class Traits>
__device__ __forceinline__ int NextConsumer(int consumer) {
  constexpr int kNumConsumers = RolesOf<Traits>::kNumConsumers;
  if constexpr (kNumConsumers == 2) return consumer ^ 1;
  return consumer == kNumConsumers - 1 ? 0 : consumer + 1;
}

// Whether the consumers share an item.
template <class Traits, class Item>
__device__ __forceinline__ bool IsJoint(const Item& item) {
  constexpr int kTallest = Traits::kNumTiles == 1 ? Traits::kTileQ0 : Traits::kTileQ1;
  return kTallest > 64 && NumRows<Traits>(item) > 64;
}

// Whether the item has steps. One without tokens has none, but for decodes alone, where it is a
// step of zeros that nobody sees.
template <class Traits>
__device__ __forceinline__ bool HasSteps(const ItemRecord& item) {
  return kOnlyDecodes<Traits> || item.kv_begin() < item.kv_end();
}

// Whether decode.cuh has the item. Not where all tiles have 64 rows: a row is to be computed the
// same way in every batch there.
template <class Traits>
inline constexpr bool kHasDecode = Traits::kTileQ0 == DecodeShared<Traits>::kRows;
template <class Traits>
__device__ __forceinline__ bool IsDecode(const ItemRecord& item) {
  if constexpr (kOnlyDecodes<Traits>) return true;
  return kHasDecode<Traits> && NumRows<Traits>(item) <= DecodeShared<Traits>::kRows &&
         HasSteps<Traits>(item);
}

// Whether the copy engine copies steps that lie in the item's span as a whole. Joint items wait for
// the tensor cores, and the producer's instructions take issue slots from the softmax. Single items
// wait for memory, which single rows reach sooner. Measured (H200): 4 x 4096 without mask 545
// TFLOP/s by rows and 586 by boxes; 64 decodes at 4096 254 us by rows and 270 by boxes.
template <class Traits, class Item>
__device__ __forceinline__ bool UsesBoxes(const AttentionParams& p, const Item& item) {
  return p.has_tensor_maps && IsJoint<Traits>(item);
}

inline constexpr int kMaxSlots = 8;

template <class Traits>
struct HopperShape {
  static constexpr int kStep = Traits::kTileKv;
  using Roles = RolesOf<Traits>;
  static constexpr int kNumConsumers = Roles::kNumConsumers;
  // Keys and values are codes in memory; the products have codes, too, or what these stand for.
  static constexpr bool kHasCodes = Traits::kKvFormat != kPlainFormat;
  static constexpr bool kMultipliesCodes = Traits::kMultipliesCodes;
  static constexpr bool kConverts = kHasCodes && !kMultipliesCodes;
  // Columns of o, and of products of weights and v: those of codes have sums of weights besides.
  static constexpr int kVoPadded = PaddedValues<Traits>();
  static constexpr int kPvColumns = kVoPadded + (kMultipliesCodes ? kSumColumns : 0);
  // Of 16-bit elements. Two codes are one; and of values that are multiplied as codes the tokens
  // are columns, see ValueTransposer.
  using Q = SwizzledTile<QueryColumns<Traits>(), 64>;  // of a consumer
  using K = SwizzledTile<Traits::kHeadDimQk / (kMultipliesCodes ? 2 : 1), kStep>;
  using V = typename Choose<kMultipliesCodes, SwizzledTile<kStep / 2, kPvColumns>,
                            SwizzledTile<Traits::kHeadDimVo, kStep>>::Type;

  // Rows in a box of the copy engine, what a producer warp copies of a page; 0: boxes do not tile
  // the pages.
  static constexpr int kWarpTokens = kStep / 4;
  static constexpr int kPageSize = Traits::kPageSize;
  static constexpr int kBoxRows = kOnlyDecodes<Traits> || kHasCodeRows<Traits> ? 0
                                  : kPageSize % kWarpTokens == 0               ? kWarpTokens
                                  : kPageSize > 0 && kPageSize % 8 == 0 &&
                                          kWarpTokens % Max(kPageSize, 1) == 0
                                      ? kPageSize
                                      : 0;

  // kv position of the token that a producer's lane looks up in the step at `pos`.
  __device__ static int LanePosition(int pos) {
    const int lane = threadIdx.x % kWarpSize, warp = ProducerWarp();
    return pos + warp * kWarpTokens + lane % kWarpTokens;
  }
  // Of the producer that the thread is of.
  __device__ static int ProducerWarp() { return threadIdx.x % 128 / kWarpSize; }

  struct Barriers : CodeBarriers<kHasCodes> {
    u64 full_q[kNumConsumers], empty_q[kNumConsumers];
    u64 full_k[kMaxSlots], empty_k[kMaxSlots], full_v[kMaxSlots], empty_v[kMaxSlots];
    u64 free_room;  // nobody reads K of a joint item's last step any more
  };
  struct Small {
    Barriers barriers;
    KvPools pools;
    MergeScratch merge[kNumConsumers + 1];  // of each one's single items, and of joint items
    DecodeExchange exchange[kNumConsumers];
  };
  // What belongs to a consumer until it releases q.
  union ShareOf16Bits {
    alignas(1024) unsigned char q[Q::kBytes];
    DecodeShared<Traits> decode;
  };
  struct ShareOfCodes {
    alignas(1024) unsigned char q[Q::kBytes];
    alignas(1024) unsigned char weights[SwizzledTile<kStep / 2, 64>::kBytes];
  };
  using Share = typename Choose<kMultipliesCodes, ShareOfCodes, ShareOf16Bits>::Type;
  static constexpr int kRoom = CtaSmemBudget(Traits::kArch, 1) -
                               kNumConsumers * static_cast<int>(sizeof(Share)) -
                               static_cast<int>(sizeof(Small));
  // Conversion: two slots are enough for products that take turns with it; codes have what is left,
  // which is what is on its way from memory. Products of codes: K is on its way to its slot, as far
  // ahead as codes of V are.
  static constexpr int kSlotBytes = K::kBytes + V::kBytes;
  // Rows with scales of their own come in halves of steps where no two steps of them fit.
  static constexpr int kCodeParts =
      kHasCodeRows<Traits> && kRoom < 2 * (kSlotBytes + CodeRowTiles<Traits, kStep>::kSlotBytes)
          ? 2
          : 1;
  using CodesInTiles = typename Choose<kMultipliesCodes, ValueCodeTiles<Traits, kStep>,
                                       CodeTiles<Traits, kStep>>::Type;
  using Codes = typename Choose<kHasCodeRows<Traits>, CodeRowTiles<Traits, kStep / kCodeParts>,
                                CodesInTiles>::Type;
  static constexpr int kCodeSlots =
      kConverts           ? Clamp((kRoom - 2 * kSlotBytes) / Codes::kSlotBytes, 1, kMaxCodeSlots)
      : !kMultipliesCodes ? 0
      : kRoom >= 4 * kSlotBytes + 3 * Codes::kSlotBytes ? 3
                                                        : 2;
  static constexpr int kSlots =
      Clamp((kRoom - kCodeSlots * Codes::kSlotBytes) / kSlotBytes, 2, kMaxSlots);
  static_assert(!kMultipliesCodes || kCodeSlots <= kSlots, "the producer waits for itself");

  // K of a step is given back while the next products run, which is on nobody's way, unless its
  // slot is needed at once.
  static constexpr bool kReleasesLate = kSlots > 2;
  // Whether results of joint items go by way of the slot of the last K. Not those of codes,
  // which WriteBoxes does not scale: their two slots are needed at once anyway.
  static constexpr bool kWritesBoxes = kReleasesLate && !kHasCodes && !kOnlyDecodes<Traits> &&
                                       16 % Traits::kGroupSize == 0 &&
                                       kNumConsumers * 64 * kVoPadded * 2 <= K::kBytes;

  struct Shared : CodeRings<Codes, kCodeSlots> {
    Share shares[kNumConsumers];
    alignas(1024) unsigned char k[kSlots][K::kBytes];
    alignas(1024) unsigned char v[kSlots][V::kBytes];
    Small small;
  };

  __device__ __forceinline__ static void Init(Shared& shared, i32* counters) {
    for (MergeScratch& merge : shared.small.merge) merge.counters = counters;
    Barriers& b = shared.small.barriers;
    for (int i = 0; i < kNumConsumers && !kOnlyDecodes<Traits>; ++i) {
      InitBarrier(SharedAddress(b.full_q + i), Roles::kProducerThreads);
      InitBarrier(SharedAddress(b.empty_q + i), 4);  // its own warps
    }
    InitBarrier(SharedAddress(&b.free_room), Roles::kConsumerWarps);
    for (int i = 0; i < kSlots; ++i) {
      // Copies arrive for each thread of a producer, conversions for each warp.
      InitBarrier(SharedAddress(b.full_k + i), kConverts ? 4 : 128);
      InitBarrier(SharedAddress(b.full_v + i), kHasCodes ? 4 : 128);
      InitBarrier(SharedAddress(b.empty_k + i), Roles::kConsumerWarps);
      InitBarrier(SharedAddress(b.empty_v + i), Roles::kConsumerWarps);
    }
    if constexpr (kHasCodes) {
      for (int i = 0; i < kCodeSlots; ++i) {
        InitBarrier(SharedAddress(b.full_k_codes + i), 128);
        InitBarrier(SharedAddress(b.full_v_codes + i), 128);
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
  // Steps of the queue in order. K of a step goes ahead of V of the step before, which is the order
  // in which consumers ask for them, and q behind both, but for the first q, while the first page
  // is on its way.
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

  // The same of K or of V alone, by a producer each. V is not needed before there are weights: the
  // first rows of K have a trip to memory's start, or both would arrive late.
  __device__ __forceinline__ void RunOne(int begin, int end, const FirstItem<Traits>& first) {
    const bool is_v = Uniform(threadIdx.x / 128) != 0;
    steps_.Start(begin, end, first.item);
    pools_ = FindPools<Traits, E::kBytes>(p_, first.layer);
    SyncNamed(kBarriersMade, Shape::Roles::kNumThreads);
    if (is_v) FinishLaunch<Traits, 2>(p_, threadIdx.x % 128, 128);
    auto& b = Barriers();
    if constexpr (Traits::kHeadDimQk == Traits::kHeadDimVo) {  // one piece of code for both
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

  static constexpr int kWarpTokens = Shape::kWarpTokens;  // of a step, that a warp copies
  static constexpr int kBoxRows = Shape::kBoxRows;
  // Beside a kv head: its rows come by the copy engine; or one by one, and again for other tiles.
  static constexpr int kByBoxes = 1 << 30, kReadAgain = 1 << 29, kHead = kReadAgain - 1;
  static constexpr int kRowsPerCopy = 4;  // eight lanes copy 128 bytes of a row

  __device__ typename Shape::Barriers& Barriers() const { return shared_.small.barriers; }
  __device__ static int Lane() { return threadIdx.x % kWarpSize; }
  __device__ static int Warp() { return Shape::ProducerWarp(); }

  __device__ __forceinline__ void Start(int begin, int end) {
    steps_.Start(begin, end);
    if (Traits::kPageSize > 0 && p_.layer != nullptr) layer_ = LoadConstant(p_.layer);
    pools_ = FindPoolsOfRows<Traits, kKvRowBytes<Traits, Traits::kHeadDimQk>,
                             kKvRowBytes<Traits, Traits::kHeadDimVo>>(p_, LoadLayer<Traits>(p_));
    if (steps_.has_item() && steps_.has_step()) LoadQ(ItemRecord(p_, begin));
  }
  // The kv head, and how its rows come.
  __device__ __forceinline__ int Head(const ItemCopy& item) const {
    if constexpr (kBoxRows == 0) return item.kv_head() | (IsJoint<Traits>(item) ? kReadAgain : 0);
    return item.kv_head() | (UsesBoxes<Traits>(p_, item) ? kByBoxes : 0);
  }
  // While the consumers still compute: for them the header would be a trip to memory more.
  __device__ __forceinline__ void Finish() {
    FinishLaunch<Traits, 2>(p_, threadIdx.x, Shape::Roles::kProducerThreads);
  }

  __device__ __forceinline__ void LoadV(u32 row, int head) {
    Fill<Traits::kHeadDimVo, typename Shape::V>(v_cursor_, Barriers().full_v, Barriers().empty_v,
                                                shared_.v[v_cursor_.slot], pools_.v, p_.v_map,
                                                p_.v_new, p_.v_new_map, row, head);
  }

  // Rows of one step into the ring's next slot, once the consumers are through with it.
  template <int kHeadDim, class Tile>
  __device__ __forceinline__ void Fill(RingCursor<Shape::kSlots>& cursor, const u64* full,
                                       const u64* empty, const unsigned char* slot,
                                       const char* pool, const TensorMap& map,
                                       const void* fresh_rows, const TensorMap& fresh_map, u32 row,
                                       int head) {
    WaitBarrier(SharedAddress(empty + cursor.slot), cursor.parity ^ 1);
    Copy<kHeadDim, Tile>(cursor, full, slot, pool, map, fresh_rows, fresh_map, row, head);
  }

  // The same into a slot that nobody reads any more.
  template <int kHeadDim, class Tile, int kSlots>
  __device__ __forceinline__ void Copy(RingCursor<kSlots>& cursor, const u64* full,
                                       const unsigned char* slot, const char* pool,
                                       const TensorMap& map, const void* fresh_rows,
                                       const TensorMap& fresh_map, u32 row, int head) const {
    const u32 barrier = SharedAddress(full + cursor.slot);
    if constexpr (kBoxRows > 0) {
      if constexpr (Traits::kHasFreshKv) {  // a box is of one kind
        if ((head & kByBoxes) != 0 && __all_sync(kFullWarp, row >= kFreshRow && row != kNoRow)) {
          CopyBoxes<Tile>(SharedAddress(slot), fresh_map, 0, row - kFreshRow, head & kHead,
                          barrier);
          cursor.Advance();
          return;
        }
        if (__any_sync(kFullWarp, row >= kFreshRow)) head &= ~kByBoxes;
      }
      if ((head & kByBoxes) != 0 && __all_sync(kFullWarp, row != kNoRow)) {
        CopyBoxes<Tile>(SharedAddress(slot), map, layer_, row, head & kHead, barrier);
        cursor.Advance();
        return;
      }
    }
    const char* from_head = pool + ((head & kHead) * (kHeadDim * E::kBytes) + Lane() % 8 * 16);
    if (Tile::kLiveChunks == 8 * Tile::kBlocks && __all_sync(kFullWarp, row != kNoRow)) {
      const bool again = kBoxRows == 0 && (head & kReadAgain) != 0;
      const u64 policy = again ? EvictNormal() : EvictFirst();
      CopyRows<kHeadDim, Tile, true>(SharedAddress(slot), from_head, row, pool, fresh_rows, policy);
    } else {
      CopyRows<kHeadDim, Tile, false>(SharedAddress(slot), from_head, row, pool, fresh_rows, 0);
    }
    ArriveBarrierAfterCopies(barrier);
    cursor.Advance();
  }

  // This warp's rows of a step by the copy engine: one lane a box and block of columns.
  template <class Tile>
  __device__ __forceinline__ void CopyBoxes(u32 slot, const TensorMap& map, int layer, u32 row,
                                            int head, u32 barrier) const {
    if (Lane() == 0) {
      ExpectBytes(barrier, kWarpTokens * 128 * Tile::kBlocks);
      ArriveBarrier(barrier, kWarpSize);
    }
    __syncwarp();
    if (Lane() % kBoxRows == 0 && Lane() < kWarpTokens) {
      const u32 to = slot + (Warp() * kWarpTokens + Lane()) * 128;
#pragma unroll
      for (int block = 0; block < Tile::kBlocks; ++block) {
        CopyBox(to + block * Tile::kBlockBytes, map, block * 64, head, static_cast<int>(row), layer,
                barrier);
      }
    }
  }

  // This warp's rows of a step. kWhole: all of them are in the span and have no padding; policy: of
  // these. Measured (H200, 1 x 16384 by pages of one token): 3,230 us where L2 is told to drop rows
  // that other tiles read again, 3,165 where it is not.
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

  // num_tile_rows rows of q for `consumer`, zeros beyond those of the item.
  __device__ __forceinline__ void LoadQ(const ItemRecord& item, int consumer, int first_row,
                                        int num_tile_rows) {
    using Q = typename Shape::Q;
    const int num_rows = NumRows<Traits>(item);
    const QueryRows<Traits::kGroupSize> rows(p_, item.first_token(), item.kv_head(),
                                             item.is_shared());
    const int thread = Anew(threadIdx.x);  // or registers would keep what only q needs
    const int chunk = thread % 8;
    WaitBarrier(SharedAddress(Barriers().empty_q + consumer), (q_parity_ >> consumer & 1) ^ 1);
#pragma unroll 1
    for (int r = thread / 8; r < num_tile_rows; r += Shape::Roles::kProducerThreads / 8) {
      const int row = first_row + r;
      const u16* from = static_cast<const u16*>(p_.q);
      if (row < num_rows) from += rows.Index(row) * QueryColumns<Traits>();
      const u32 to = SharedAddress(shared_.shares[consumer].q) + r * 128 + (chunk ^ r % 8) * 16;
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
  u32 q_parity_ = 0;       // bit i: phase of consumer i's
  int next_consumer_ = 0;  // has the next single item
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
    // The first turn is that of group 0.
    if (!kOnlyDecodes<Traits> && group_ == Shape::kNumConsumers - 1) ArriveNamed(kTurn, kBoth);
    int owner = 0;  // of the next single item
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
    ReleaseRoom();
    // Takes the turn that nobody needs.
    if (!kOnlyDecodes<Traits> && group_ == 0) SyncNamed(kTurn, kBoth);
  }

 private:
  static constexpr int kBoth = 256;  // threads of two consumers: who passes the turn, who takes it
  // Named barriers of the turns of group 0 and up.
  static constexpr int kTurn = Shape::kNumConsumers == 2 ? 1 : 7;
  static constexpr bool kReleasesLate = Shape::kReleasesLate;
  static constexpr int kStep = Shape::kStep;
  static constexpr int kSTiles = kStep / 8;
  static constexpr int kOTiles = Shape::kVoPadded / 8;
  using Output = float[kOTiles][4];
  static constexpr int kLast = Shape::kNumConsumers - 1;
  // Consumers of a joint item leave it behind the last key that their rows see, where it is a step
  // or more from the first consumer's to the last one's, who has the item to its end.
  static constexpr int kConsumerTokens = CeilDiv(64, Traits::kGroupSize);
  // Not where results are written from the slot of the last K, which is everybody's last then.
  static constexpr bool kLeavesEarly = Traits::kHasWindowRight && !Traits::kHasSteps &&
                                       !Shape::kWritesBoxes &&
                                       kLast * 64 >= kStep * Traits::kGroupSize;

  __device__ typename Shape::Barriers& Barriers() const { return shared_.small.barriers; }
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
  // An arrival for each warp that reads the slot: the products of the others may still do. Of a
  // single item a warp arrives for one of each other consumer, too.
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
  // The slot that results are written from, which this comes to ask when the next item begins.
  __device__ __forceinline__ void ReleaseRoom() {
    if constexpr (Shape::kWritesBoxes) {
      if (room_slot_ < 0) return;
      if (Lane() == 0) {
        WaitStoresRead();
        ArriveBarrier(SharedAddress(Barriers().empty_k + room_slot_));
      }
      room_slot_ = -1;
    }
  }
  __device__ __forceinline__ void ReleaseQ() {
    __syncwarp();
    if (Lane() == 0) ArriveBarrier(SharedAddress(Barriers().empty_q + group_));
  }

  // Passes the steps of an item that another consumer has. Its barriers are not waited for, and
  // one tells apart two phases in a row, no more. What comes next is the wait for q of an item, and
  // q comes after all rows of the steps before, which the same threads have copied: so those phases
  // are over by then. Of decodes alone a consumer passes its turn when all rows of its item are
  // there.
  __device__ __forceinline__ void Pass(const ItemRecord& item) {
    if (!HasSteps<Traits>(item)) return;
    int num_steps = Uniform(CeilDiv(item.kv_end() - FirstStep<kStep>(item), kStep));
    if (kOnlyDecodes<Traits>) num_steps = Max(num_steps, 1);
    k_cursor_.Advance(num_steps);
    v_cursor_.Advance(num_steps);
  }

  // Passes the steps of a joint item that others have still to do, when this consumer leaves it.
  // Their slots are given back unread, but not before their rows are there: two phases further a
  // barrier looks as it did, and this consumer would wait for it for ever.
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

  // Of the slots whose turn it is. Uniform: the descriptors of a step are then made beside the
  // products, and take no registers from them.
  __device__ u32 KSlot() const { return Uniform(SharedAddress(shared_.k[k_cursor_.slot])); }
  __device__ u32 VSlot() const { return Uniform(SharedAddress(shared_.v[v_cursor_.slot])); }

  __device__ __forceinline__ void StartQk(u32 k_slot, float (&s)[kSTiles][4]) const {
    // Made anew in every step: kept in registers it would push out others.
    const u64 q = Q::Descriptor(Anew(SharedAddress(shared_.shares[group_].q)), 0);
    const u64 k = K::Descriptor(k_slot, 0);
    if constexpr (Shape::kMultipliesCodes) {
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

  // The weights of a step, and what their product with v goes to. Codes are read from shared
  // memory, so that nobody waits for registers to be read, and their products have accumulators of
  // their own in each step, see kSumColumns.
  static constexpr int kWeightTiles = kStep / (Shape::kMultipliesCodes ? 32 : 16);
  using StepWeights = u32[kWeightTiles][4];
  using Weights = SwizzledTile<kStep / 2, 64>;  // codes
  using StepOutput = float[Shape::kPvColumns / 8][4];

  __device__ __forceinline__ void StartPv(const StepWeights& p, u32 v_slot, Output& o) const {
    const u64 v = V::TransposedDescriptor(v_slot, 0);
#pragma unroll
    for (int kk = 0; kk < kWeightTiles; ++kk) {
      Wgmma<V::kPadded, Traits::kDtype>::RegistersATransposedB(o, p[kk], V::AlongRows(v, kk), true);
    }
    WgmmaCommit();
  }
  __device__ __forceinline__ void StartPvOfCodes(u32 v_slot, StepOutput& step_o) const {
    const u64 p = Weights::Descriptor(Anew(SharedAddress(shared_.shares[group_].weights)), 0);
    const u64 v = V::Descriptor(v_slot, 0);
#pragma unroll
    for (int kk = 0; kk < kWeightTiles; ++kk) {
      WgmmaE4m3<Shape::kPvColumns>::SharedA(step_o, Weights::AlongK(p, kk), V::AlongK(v, kk),
                                            kk > 0);
    }
    WgmmaCommit();
  }
  // A warp's rows of weights of codes, which its own share of a product reads, no other.
  __device__ __forceinline__ void StoreCodes(const StepWeights& p) const {
    if constexpr (Shape::kMultipliesCodes) {
      const int lane = Lane(), row = lane % 16;
      const u32 to = SharedAddress(shared_.shares[group_].weights) + (Warp() * 16 + row) * 128 +
                     (lane / 16 ^ row % 8) * 16;
#pragma unroll
      for (int kk = 0; kk < kWeightTiles; ++kk) StoreMatrix4(to ^ 2 * kk * 16, p[kk]);
      FenceSharedForWgmma();
      __syncwarp();
    }
  }

  // Joint items: the others' products run while this one exponentiates, and the other way around.
  __device__ __forceinline__ void TakeTurn() const { SyncNamed(kTurn + group_, kBoth); }
  __device__ __forceinline__ void PassTurn(int consumer) const {
    ArriveNamed(kTurn + consumer, kBoth);
  }
  __device__ __forceinline__ void PassTurn() const { PassTurn(NextConsumer<Traits>(group_)); }

  // Where consumers leave early: what rows of the first one see ends here, what those of each other
  // one see, at most kConsumerTokens behind that of the one before.
  __device__ __forceinline__ int FirstEnd(const ItemRecord& item) const {
    constexpr int kLastToken = 63 / Traits::kGroupSize;
    return SpanOfTokens<Traits>(p_, FirstOfItem<Traits>(item), EndOfItem<Traits>(p_, item),
                                item.q_pos(), kLastToken, kLastToken)
        .any_end;
  }
  // Who has the turn after this consumer's. The last one passes it to the first one that has not
  // left before the next step, at `pos`, which may be itself.
  __device__ __forceinline__ int AfterThis(int pos, int end, int first_end) const {
    if (!kLeavesEarly || group_ < kLast) return NextConsumer<Traits>(group_);
    if (pos >= end || pos < first_end) return 0;
    return Min(static_cast<int>(static_cast<u32>(pos - first_end) / kConsumerTokens) + 1, kLast);
  }

  // Of a decode item. Addresses are uniform, so 16 descriptors are made of each at half the price.
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
    const bool boxes = joint && Shape::kBoxRows > 0 && UsesBoxes<Traits>(p_, item);
    const int boxes_begin = boxes ? begin : end;
    const int border = Border(item);
    int pos = Uniform(FirstStep<kStep>(item));
    ReleaseRoom();
    bool is_written = false;
    int num_left = 0;   // steps of the item behind this consumer's last
    if (begin < end) {  // as the producer has it: not pos, which a reversed span may reach
      int first_end = end;
      bool takes_turn = joint;
      if (kLeavesEarly && joint) {
        first_end = Uniform(FirstEnd(item));
        if (group_ < kLast) end = Min(first_end + group_ * kConsumerTokens, end);
      }
      WaitBarrier(SharedAddress(Barriers().full_q + group_), q_parity_);
      q_parity_ ^= 1;
      if constexpr (Shape::kMultipliesCodes) {
        rows.SetQueryScales(
            QueryCodes<Traits>(p_, item, shared_.shares[group_].q, joint ? group_ * 64 : 0, thread_)
                .scales);
      }
      StepWeights p;
      StepOutput step_o = {};
      bool again, has_rows = false;  // asked for ahead: an answer takes its time
      {
        float s[kSTiles][4] = {};
        WaitFull(Barriers().full_k, k_cursor_);
        WgmmaFence();
        StartQk(KSlot(), s);
        WgmmaWait<0>();
        PinRegisters(s);
        rows.template FindBias<kSTiles>(Step(p_, pos, end));
        rows.MakeLogits(Step(p_, pos, end), s);
        again = rows.Exponentiate(rows.Scale(), true, s, p, [] {});
        StoreCodes(p);
      }
      for (bool is_first = true;; is_first = false) {
        if (OneHopperConsumer::SyncOr(again)) {
          float s[kSTiles][4] = {};
          WgmmaFence();
          StartQk(KSlot(), s);
          WgmmaWait<0>();
          PinRegisters(s);
          rows.MakeLogits(Step(p_, pos, end), s);
          rows.ExponentiateAnew(is_first, s, p);
          rows.Rescale(o);
          StoreCodes(p);
        }
        rows.AddSums();
        // K of this step, which is where V of it is in the other ring.
        if (!kReleasesLate) Release(Barriers().empty_k, v_cursor_.slot, joint);
        k_cursor_.Advance();
        pos += kStep;
        if (pos >= end) break;
        float s[kSTiles][4] = {};
        if (!has_rows) {
          WaitBarrier(FullK(), k_cursor_.parity);
          WaitBarrier(FullV(), v_cursor_.parity);
        }
        // What the copy engine wrote needs none: K of this step and V of the one before.
        if (Traits::kHasSteps || pos - kStep < boxes_begin || pos + kStep > end ||
            (Traits::kHasFreshKv && pos - kStep < border && pos + kStep > border)) {
          FenceSharedForWgmma();
        }
        const u32 k_slot = KSlot(), v_slot = VSlot();  // ahead of the turn
        const Step step(p_, pos, end);
        const int next = AfterThis(pos + kStep, end, first_end);
        const bool passes_turn = joint && next != group_;
        if (takes_turn) TakeTurn();
        if constexpr (!Shape::kMultipliesCodes) {
          PinRegisters(p);
          PinRegisters(o);
        }
        WgmmaFence();
        StartQk(k_slot, s);
        if constexpr (Shape::kMultipliesCodes) {
          StartPvOfCodes(v_slot, step_o);
        } else {
          StartPv(p, v_slot, o);
        }
        if (passes_turn) PassTurn(next);
        takes_turn = passes_turn;
        if (kReleasesLate) Release(Barriers().empty_k, v_cursor_.slot, joint);
        const float scale = rows.Scale();
        KeepBefore(scale);
        rows.template FindBias<kSTiles>(step);
        WgmmaWait<1>();
        PinRegisters(s);
        rows.MakeLogits(step, s);
        again = rows.Exponentiate(scale, false, s, p, [&] {
          WgmmaWait<0>();
          if constexpr (Shape::kMultipliesCodes) {
            PinRegisters(step_o);
            rows.AddStep(step_o, o);
          } else {
            PinRegisters(o);
          }
          if constexpr (Rows::kMoves) rows.Rescale(o);
          Release(Barriers().empty_v, v_cursor_, joint);
          Cursor next_k = k_cursor_;
          next_k.Advance();
          has_rows = TestBarrier(SharedAddress(Barriers().full_k + next_k.slot), next_k.parity) &
                     TestBarrier(FullV(), v_cursor_.parity);
        });
        if constexpr (Rows::kFitsCodes) rows.Rescale(o);
        StoreCodes(p);
      }
      ReleaseQ();
      const bool has_room = Shape::kWritesBoxes && joint;
      const int slot = v_cursor_.slot;
      if (has_room) {
        __syncwarp();
        if (Lane() == 0) ArriveBarrier(SharedAddress(&Barriers().free_room));
        is_written = rows.AreWhole();
      } else if (kReleasesLate) {
        Release(Barriers().empty_k, slot, joint);
      }
      WaitFull(Barriers().full_v, v_cursor_);
      if constexpr (Shape::kMultipliesCodes) {
        WgmmaFence();
        StartPvOfCodes(VSlot(), step_o);
      } else {
        PinRegisters(p);
        PinRegisters(o);
        WgmmaFence();
        StartPv(p, VSlot(), o);
      }
      rows.FinishSums();
      float o_scale[2];
      if (is_written) rows.WriteStates(o_scale);
      WgmmaWait<0>();
      if constexpr (Shape::kMultipliesCodes) {
        PinRegisters(step_o);
        rows.AddStep(step_o, o);
      } else {
        PinRegisters(o);
      }
      Release(Barriers().empty_v, v_cursor_, joint);
      if constexpr (Shape::kWritesBoxes) {
        if (has_room) {
          WaitBarrier(SharedAddress(&Barriers().free_room), room_parity_);
          room_parity_ ^= 1;
          if (is_written) {
            constexpr int kWarpBytes = 16 * Shape::kVoPadded * 2;
            const u32 room = SharedAddress(shared_.k[slot]) + (group_ * 4 + Warp()) * kWarpBytes;
            rows.WriteBoxes(o, o_scale, Uniform(room));
            room_slot_ = slot;
          } else {
            Release(Barriers().empty_k, slot, true);
          }
        }
      }
      if (kLeavesEarly && joint && group_ < kLast) {
        const int item_end = item.kv_end();
        if (pos < item_end) {
          // In the second step everybody has a turn.
          if (pos == FirstStep<kStep>(item) + kStep) {
            TakeTurn();
            PassTurn();
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
                                        shared_.small.merge[Shape::kNumConsumers]);
    } else {
      struct One : OneHopperConsumer, HopperFold<Shape::kNumConsumers> {};
      ArriveAndMerge<Traits, One>(p_, index, item.merge_idx(), num_groups,
                                  shared_.small.merge[group_]);
    }
  }

  // takes_turn, passes_turn: of decodes alone, whether there is an item before it, or behind it.
  __device__ __forceinline__ void RunDecode(int index, bool takes_turn, bool passes_turn) {
    ReleaseRoom();
    RecordBegin<Traits>(p_, index, thread_);
    const ItemRecord item(p_, index);
    if (Traits::kGroupSize <= kFewRows && NumRows<Traits>(item) <= kFewRows) {
      RunDecodeItem<DecodeRows<Traits, kFewRows>>(index, takes_turn, passes_turn);
    } else {
      RunDecodeItem<DecodeRows<Traits, kDecodeRows>>(index, takes_turn, passes_turn);
    }
    Merge(index, item, false);
    RecordEnd<Traits>(p_, index, thread_);
  }

  // Weights go to the other warps by shared memory. The barrier that lets them be read says as well
  // whether the reference of a row has to grow first, as all have to in the first step.
  template <class Decode>
  __device__ __forceinline__ void RunDecodeItem(int index, bool takes_turn, bool passes_turn) {
    const ItemRecord item(p_, index);
    // Anew: else addresses that only this loop needs would be kept in registers all along.
    const int group = Uniform(Anew(group_));
    typename Decode::Shared& mine = shared_.shares[group].decode;
    const u32 q_at = SharedAddress(mine.q), p_at = SharedAddress(mine.p);
    if constexpr (kOnlyDecodes<Traits>) {
      if (takes_turn) OneHopperConsumer::Sync();  // nobody reads results of the item before
      LoadDecodeQ(item, q_at);
    }
    Decode rows(p_, index, Anew(thread_), mine, shared_.small.exchange[group]);
    typename Decode::Output o = {};
    typename Decode::Scores s = {};
    const int end = Uniform(item.kv_end());
    int pos = Uniform(FirstStep<kStep>(item));
    if constexpr (kOnlyDecodes<Traits>) {
      WaitCopies<0>();  // q
      FenceSharedForWgmma();
      OneHopperConsumer::Sync();
      if (takes_turn) TakeTurn();
    } else {
      WaitBarrier(SharedAddress(Barriers().full_q + group_), q_parity_);
      q_parity_ ^= 1;
    }
    WaitFull(Barriers().full_k, k_cursor_);
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
      FenceSharedForWgmma();  // our weights
      if ((kOnlyDecodes<Traits> && is_first) || OneHopperConsumer::SyncOr(grows)) {
        rows.Grow(s, o);
        rows.Exponentiate(s);
        rows.StoreWeights();
        FenceSharedForWgmma();
        OneHopperConsumer::Sync();
      }
      rows.AddSums();
      WaitBarrier(SharedAddress(Barriers().full_v + v_cursor_.slot), v_cursor_.parity);
      if (!is_last) {
        WaitBarrier(SharedAddress(Barriers().full_k + k_cursor_.slot), k_cursor_.parity);
      }
      FenceSharedForWgmma();  // rows of these
      PinBlocks(o);
      if (is_last) {
        if (kOnlyDecodes<Traits> && passes_turn) PassTurn();
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
      OneHopperConsumer::Sync();  // nobody reads the weights before
      rows.StoreWeights();
      Release(Barriers().empty_v, v_cursor_, false);
    }
    rows.FinishStates();
    WgmmaWait<0>();
    PinBlocks(o);
    Release(Barriers().empty_v, v_cursor_, false);
    rows.Write(o);
    if constexpr (!kOnlyDecodes<Traits>) ReleaseQ();
  }

  // By the consumer that has the item.
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

  // The first fresh position; a step across it is copied by rows.
  __device__ __forceinline__ int Border(const ItemRecord& item) const {
    if constexpr (Traits::kHasFreshKv) return FreshTokens(p_, item.request()).begin;
    return 0;
  }

  const AttentionParams& p_;
  Shared& shared_;
  const int group_;   // which consumer
  const int thread_;  // of the group
  Cursor k_cursor_, v_cursor_;
  u32 q_parity_ = 0;
  u32 room_parity_ = 0;
  int room_slot_ = -1;  // of this warp's results on their way; -1: none
};

// --- kernel ---

template <class Traits>
using ProducerOf = typename Choose<Traits::kKvFormat != kPlainFormat, E4m3Producer<Traits>,
                                   HopperProducer<Traits>>::Type;

template <class Traits>
using HopperAttentionBody =
    HopperBody<Traits, HopperShape<Traits>,
               HopperTeams<ProducerOf<Traits>, HopperConsumer<Traits>, RolesOf<Traits>>>;

}  // namespace jax_attn
