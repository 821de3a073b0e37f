// Attention on tensor cores, for every architecture from sm_80 on: mma.sync, ldmatrix, cp.async.
//
// A persistent CTA executes the work items of its queue. Each item names its tile M, and the kernel
// has one TilePath for each. There are two arrangements of the warps:
//   split kv (up to 32 rows): every warp has all rows and its own 16 tokens of each kv step. A warp
//   loads exactly the tokens that it multiplies, so the main loop has no CTA barrier. The warps'
//   states are combined at the end of the item.
//   split q (64 rows and more): every warp has its own 16 or 32 rows and all tokens of the step,
//   which the warps load together.
//
// kv steps start at absolute multiples of kStep. So a row meets the same steps in any chunk or
// batch, and its bits depend on neither. Slots outside the item's span are zero-filled, never read,
// and masked.
//
// quantized_kv.cuh has the e4m3 products. Other quantized formats are dequantized in shared memory
// first (common/quantized_rows.cuh).
//
// K and V rows run through one ring of slots, alternating, kSlots - 1 loads ahead of the arithmetic
// and across the borders of items: while one item is finished, the next one's rows are on their
// way.
#pragma once

#include "cuda/any/attention_f32.cuh"
#include "cuda/common/budget.cuh"
#include "cuda/common/logits.cuh"
#include "cuda/common/partials.cuh"
#include "cuda/common/quantized_rows.cuh"
#include "cuda/common/transform.cuh"
#include "cuda/sm80/quantized_kv.cuh"
#include "cuda/sm80/softmax.cuh"

namespace jax_attn {

// kBudget: bytes of shared memory that the path may use.
template <class Traits, int kTile, int kBudget>
class TilePath {
 public:
  // --- shape ---

  using E = Element<Traits::kDtype>;
  using Stage = LogitStage<Traits>;
  static constexpr bool kE4m3 = Traits::kKvFormat == kE4m3Format;
  static constexpr bool kDequantizes = DequantizesRows(Traits::kKvFormat);
  static constexpr bool kQuantizes = Traits::kHasFreshKv && Traits::kKvFormat != kPlainFormat;
  static constexpr bool kHeadScales = FormatOf(Traits::kKvFormat).has_head_scale;
  // Bytes of one head's row of K or V in memory.
  static constexpr int RowBytes(int head_dim) {
    return Traits::kKvFormat == kPlainFormat
               ? head_dim * E::kBytes
               : static_cast<int>(QuantizedRowBytes(Traits::kKvFormat, head_dim));
  }
  template <int kHeadDim>
  using KvLayout = typename Conditional<kE4m3, E4m3RowLayout<kHeadDim>, RowLayout<kHeadDim>>::Type;
  // Rows of q, of K, and of V.
  using Qk = typename Conditional<kE4m3, E4m3QueryLayout<Traits::kHeadDimQk>,
                                  RowLayout<Traits::kHeadDimQk>>::Type;
  using Kk = KvLayout<Traits::kHeadDimQk>;
  using Vo = KvLayout<Traits::kHeadDimVo>;
  // Rows of K and of V as they are copied.
  template <int kHeadDim>
  using CopyLayout =
      typename Conditional<kDequantizes, QuantizedRowLayout<Traits::kKvFormat, kHeadDim>,
                           KvLayout<kHeadDim>>::Type;

  static constexpr int kTileQ = kTile == 0   ? Traits::kTileQ0
                                : kTile == 1 ? Traits::kTileQ1
                                             : Traits::kTileQ2;
  static constexpr int kGroupSize = Traits::kGroupSize;
  static constexpr int kPageSize = Traits::kPageSize;
  static constexpr int kWarps = Traits::kNumWarps;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr bool kSplitKv = kTileQ <= 32;
  static constexpr int kWarpRows = kSplitKv ? kTileQ : kTileQ / kWarps;
  static constexpr int kMTiles = kWarpRows / 16;
  static constexpr int kStep = kSplitKv ? 16 * kWarps : Traits::kTileKv;  // kv tokens
  static constexpr int kWarpTokens = kSplitKv ? 16 : kStep;  // tokens of a step that a warp
                                                             // multiplies
  static constexpr int kSlice = kStep / kWarps;              // tokens of a step that a warp loads
  static constexpr int kSTiles = kWarpTokens / 8;
  static constexpr int kOTiles = Vo::kPadded / 8;
  static constexpr int kQkSteps = Qk::kPadded / 16;
  // Split kv: q stays in registers for all steps of the item, unless o needs them.
  static constexpr bool kQInRegisters = kSplitKv && kMTiles * kQkSteps <= 8;
  static_assert(kWarpRows % 16 == 0 && kWarpRows > 0, "whole 16-row tiles a warp");
  static_assert(kSlice >= 8 && kSlice <= kWarpSize, "one lane finds the row of one token");
  static_assert(kTileQ >= kGroupSize, "a tile holds at least one token");

  static constexpr int kMaxPitch = Max(Kk::kPitch, Vo::kPitch);
  static constexpr int kCopyPitch =
      Max(CopyLayout<Traits::kHeadDimQk>::kPitch, CopyLayout<Traits::kHeadDimVo>::kPitch);
  static constexpr int kSlotBytes = kStep * kCopyPitch;
  static constexpr int kQBytes = kTileQ * Qk::kPitch;
  static constexpr int kQVectors = CeilDiv(kTileQ * Qk::kChunks, kThreads);  // for each thread

  // Split kv: the warps' states, exchanged kColumns columns at a time.
  template <int kExchangeColumns>
  struct ExchangeOf {
    float o[kWarps][kTileQ][kExchangeColumns + 8];  // + 8: rows start in different banks
    float max_log4[kWarps][kTileQ];
    float sum[kWarps][kTileQ];
  };
  struct NoExchange {};

  // Factors of the logits of each warp's rows, see PutLogitScales. In registers they would spill.
  struct HeadScales {
    float scales[kWarps][kWarpRows];
  };
  struct NoScales {};

  // The step that is multiplied, dequantized.
  struct DequantizedStep {
    alignas(16) unsigned char dequantized[kStep * kMaxPitch];
  };
  struct NoDequantizedStep {};
  using Dequantized = typename Conditional<kDequantizes, DequantizedStep, NoDequantizedStep>::Type;
  static constexpr int kDequantizedBytes = kDequantizes ? static_cast<int>(sizeof(Dequantized)) : 0;

  struct ControlSmem : Conditional<kHeadScales, HeadScales, NoScales>::Type {
    KvPools pools;
    VisibleSpan spans[kWarps];  // StepSpan of the item; the main loop has few registers
    MergeScratch merge;
  };
  static constexpr int kRingBudget =
      kBudget - kQBytes - kDequantizedBytes - static_cast<int>(sizeof(ControlSmem)) - 16;
  // Split q has a larger q and no exchange. It takes the slots that fit: beyond 4 nothing is
  // gained, and 2 is the least that overlaps loads and arithmetic.
  static constexpr int kSlots =
      kSplitKv ? Traits::kNumStages : Clamp(kRingBudget / kSlotBytes, 2, 4);
  static_assert(kSlots >= 2, "a slot is refilled while the next one is read");
  // All columns at once if they fit.
  static constexpr int kFreeColumns =
      (kRingBudget - kSlots * kSlotBytes) / (kWarps * kTileQ * 4) - 8 - 2;
  static constexpr int kColumns = kFreeColumns >= Vo::kPadded ? Vo::kPadded
                                  : kFreeColumns >= 128       ? 128
                                  : kFreeColumns >= 64        ? 64
                                  : kFreeColumns >= 32        ? 32
                                                              : 16;
  using Exchange = typename Conditional<kSplitKv, ExchangeOf<kColumns>, NoExchange>::Type;

  struct alignas(16) Shared : Dequantized {
    ControlSmem control;
    alignas(16) unsigned char q[kQBytes];
    unsigned char ring[kSlots * kSlotBytes];
    Exchange exchange;
  };

  // Executes the items of the queue from `first` on, up to the first one with another tile M.
  // Returns the first item not executed.
  __device__ __forceinline__ static int Run(const AttentionParams& p, unsigned char* smem,
                                            int first) {
    TilePath path(p, *reinterpret_cast<Shared*>(smem), first);
    State state;
    state.Reset(Stage::InitialMax());  // registers without a first value would be live before this
                                       // path, too
    for (;; ++path.index_) {
      const bool mine = path.index_ < QueueEnd(p) && path.Item().tile() == kTile;
      if (mine) path.LoadQ();
      if (path.index_ > first) path.Finish(path.index_ - 1, state);
      if (!mine) break;
      RecordBegin<Traits>(p, path.index_, path.thread_);
      path.RunSteps(path.index_ == first, state);
    }
    WaitCopies<0>();
    __syncthreads();  // the next path lays out shared memory differently
    return path.index_;
  }

 private:
  using State = TileState<kMTiles, kOTiles>;
  using Tile = float[kMTiles][kSTiles][4];  // logits
  using LogitLayout = RowMajorLayout<kMTiles, kSTiles>;
  using Probabilities = u32[kMTiles][kWarpTokens / 16][4];  // operand a of P V
  using QFragments = u32[kQInRegisters ? kMTiles : 1][kQInRegisters ? kQkSteps : 1][4];

  __device__ __forceinline__ TilePath(const AttentionParams& p, Shared& shared, int first)
      : p_(p),
        shared_(shared),
        thread_(Opaque(threadIdx.x)),
        index_(first),
        loader_(p, shared.control.pools, thread_, first),
        read_slot_(SharedAddress(shared.ring) +
                   (4 * kSlots - 2 * kWarmUpSteps) % kSlots * kSlotBytes),
        q_vectors_{} {
    if (thread_ == 0) {
      shared.control.pools =
          FindPoolsOfRows<Traits, RowBytes(Traits::kHeadDimQk), RowBytes(Traits::kHeadDimVo)>(
              p, LoadLayer<Traits>(p));
      shared.control.merge.counters = LaunchCounters(p);
    }
    __syncthreads();
  }

  __device__ int Lane() const { return thread_ % kWarpSize; }
  __device__ int Warp() const { return thread_ / kWarpSize; }
  __device__ int FirstRow() const { return kSplitKv ? 0 : Warp() * kWarpRows; }  // of this warp

  // Ends the life of values derived from the thread index, mainly rows and addresses, so that
  // registers do not keep them through a phase that does not use them.
  __device__ __forceinline__ void ForgetThread() {
    thread_ = Opaque(thread_);
    loader_.set_thread(thread_);
  }

  // With split kv warps share nothing in the main loop.
  __device__ static void SyncReaders() {
    if constexpr (kSplitKv) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

  // --- load kv ---

  // Walks through the kv steps of the queue ahead of the arithmetic. Page ids are requested one
  // step before the rows that they lead to.
  class KvLoader : ListedStep<Traits> {
   public:
    __device__ __forceinline__ KvLoader(const AttentionParams& p, const KvPools& pools, int thread,
                                        int first)
        : p_(p),
          pools_(pools),
          thread_(thread),
          index_(first - 1),
          pos_(kNone),
          page_(0),
          v_row_(0),
          v_slice_(0) {}

    // Loads K rows of the next step, this warp's slice, into `slot`. The first call loads nothing;
    // it only finds the first step.
    __device__ __forceinline__ void LoadK(u32 slot) {
      v_slice_ = 0;
      if (pos_ != kNone) {
        FindSlice();
        CopySlice<Traits::kHeadDimQk>(slot, pools_.k, p_.k_new);
        pos_ += kStep;
        if (pos_ >= EndOfSteps(ItemRecord(p_, index_))) pos_ = kNone;
      }
      if (pos_ == kNone) NextItem();
      if constexpr (Traits::kHasSteps) {
        if (pos_ != kNone) this->step = KvStep<Traits>(p_, pos_, ItemRecord(p_, index_).kv_end());
      }
      if (pos_ != kNone) RequestPages();
    }

    __device__ __forceinline__ void set_thread(int thread) { thread_ = thread; }

    // Loads V rows of the step whose K rows were loaded last.
    __device__ __forceinline__ void LoadV(u32 slot) {
      if (v_slice_ != 0) CopySlice<Traits::kHeadDimVo>(slot, pools_.v, p_.v_new);
    }

   private:
    static constexpr int kNone = 0x7fffffff;

    // Slices start at multiples of their length, so they do not cross pages of this size. But they
    // may cross from pages to fresh tokens.
    static constexpr bool kContiguous = kPageSize % kSlice == 0 && !Traits::kHasFreshKv;

    __device__ int Lane() const { return thread_ % kWarpSize; }
    __device__ int Warp() const { return thread_ / kWarpSize; }

    __device__ __forceinline__ void NextItem() {
      const int next = index_ + 1;
      if (next >= QueueEnd(p_) || ItemRecord(p_, next).tile() != kTile) return;
      index_ = next;
      pos_ = FirstStep<kStep>(ItemRecord(p_, next));
    }

    // kv position of the slice's token 0, or of this lane's token.
    __device__ __forceinline__ int Position() const {
      return this->Begin(pos_) + Warp() * kSlice + (kContiguous ? 0 : Lane());
    }

    __device__ __forceinline__ bool InSpan(const ItemRecord& item) const {
      constexpr int kTokens = kContiguous ? kSlice : 1;
      return (kContiguous || Lane() < kSlice) &&
             Max(Position(), FirstOfItem<Traits>(item)) <
                 Min(Position() + kTokens, EndOfItem<Traits>(p_, item));
    }

    __device__ __forceinline__ void RequestPages() {
      if constexpr (kPageSize > 0) {
        const ItemRecord item(p_, index_);
        page_ = 0;
        if (InSpan(item)) page_ = LoadPage<kPageSize>(p_, item.kv_base(), Position());
      }
    }

    // Finds v_row_ and v_slice_ for the step at pos_.
    __device__ __forceinline__ void FindSlice() {
      const ItemRecord item(p_, index_);
      if constexpr (kPageSize > 0) {
        v_row_ = PoolRow<kPageSize>(page_, Position());
      } else {
        v_row_ = static_cast<u32>(item.kv_base()) + Position();
      }
      if constexpr (Traits::kHasFreshKv) {
        const FreshTokens fresh(p_, item.request());
        if (Position() >= fresh.begin) v_row_ = kFreshRow | fresh.Row(Position());
      }
      v_slice_ = 1u << 31 | static_cast<u32>(item.kv_head()) << 16;
      if constexpr (kContiguous) {
        v_slice_ |= Clamp(FirstOfItem<Traits>(item) - Position(), 0, kSlice) << 8;
        v_slice_ |= Clamp(EndOfItem<Traits>(p_, item) - Position(), 0, kSlice);
      } else if (!InSpan(item)) {
        v_row_ = kNoRow;
      }
    }

    // fresh_rows: k_new or v_new.
    template <int kHeadDim>
    __device__ __forceinline__ void CopySlice(u32 slot, const char* pool,
                                              const void* fresh_rows) const {
      if constexpr (kDequantizes) return CopyQuantized<kHeadDim>(slot, pool);
      using Layout = KvLayout<kHeadDim>;
      constexpr int kRowBytes = RowBytes(kHeadDim);
      // Neighbouring lanes copy neighbouring chunks of a row, up to 256 bytes.
      constexpr int kWidth = PowerOfTwoDivisor(Layout::kChunks, 16);
      constexpr int kRowsPerCopy = kWarpSize / kWidth;
      const int lane_row = Lane() / kWidth, lane_chunk = Lane() % kWidth;
      // Split kv: each warp has its own slice, whatever the pitches of K and V rows.
      const u32 to = slot + Warp() * (kSlice * (kSplitKv ? kMaxPitch : Layout::kPitch)) +
                     lane_row * Layout::kPitch + lane_chunk * 16;
      const int kv_head = v_slice_ >> 16 & 0x7fff;
      const int begin = v_slice_ >> 8 & 0xff, end = v_slice_ & 0xff;
      const u32 pitch = static_cast<u32>(p_.num_kv_heads) * kRowBytes;
      const int in_row = kv_head * kRowBytes + lane_chunk * 16;
      const char* head = pool + in_row;
      const char* from = head + static_cast<u64>(v_row_ + lane_row) * pitch;
#pragma unroll
      for (int r = 0; r < kSlice; r += kRowsPerCopy) {
        bool in_span;
        if constexpr (kContiguous) {
          in_span = r + lane_row >= begin && r + lane_row < end;
          if (r > 0) from += static_cast<u64>(pitch) * kRowsPerCopy;
        } else {
          const u32 row = __shfl_sync(kFullWarp, v_row_, r + lane_row);
          in_span = kQuantizes ? row < kFreshRow : row != kNoRow;
          from = head + static_cast<u64>(row) * pitch;
          if constexpr (Traits::kHasFreshKv && !kQuantizes) {
            if (row >= kFreshRow) {
              const char* fresh_head = static_cast<const char*>(fresh_rows) + in_row;
              from = fresh_head + static_cast<u64>(row - kFreshRow) * pitch;
            }
          }
        }
        const bool in_slice = kRowsPerCopy <= kSlice || lane_row < kSlice;
#pragma unroll
        for (int c = 0; c < Layout::kChunks; c += kWidth) {
          const bool live =
              Layout::kChunks == Layout::kLiveChunks || c + lane_chunk < Layout::kLiveChunks;
          // A copy that reads nothing still needs an address within the pool.
          const bool valid = in_span && live;
          if (in_slice) {
            const u32 to_chunk = to + r * Layout::kPitch + c * 16;
            const char* from_chunk = valid ? from + c * 16 : head;
            if constexpr (kSplitKv) {
              // A decode reads its keys and values once. Measured (H200): 128 x 2048 tokens 260 us,
              // with the hint 257.
              CopyAsync16(to_chunk, from_chunk, valid, EvictFirst());
            } else {
              CopyAsync16(to_chunk, from_chunk, valid);
            }
          }
        }
      }
    }

    // The same for quantized rows: neighbouring lanes copy neighbouring chunks of all rows of the
    // slice.
    template <int kHeadDim>
    __device__ __forceinline__ void CopyQuantized(u32 slot, const char* pool) const {
      using Layout = CopyLayout<kHeadDim>;
      constexpr int kNumChunks = kSlice * Layout::kChunks;
      const int thread = Opaque(threadIdx.x), lane = thread % kWarpSize;
      const u32 to =
          slot + thread / kWarpSize * (kSlice * (kSplitKv ? kCopyPitch : Layout::kPitch));
      const char* head = pool + (v_slice_ >> 16 & 0x7fff) * Layout::kRowBytes;
      const int begin = v_slice_ >> 8 & 0xff, end = v_slice_ & 0xff;
      const u32 pitch = static_cast<u32>(p_.num_kv_heads) * Layout::kRowBytes;
#pragma unroll
      for (int first = 0; first < kNumChunks; first += kWarpSize) {
        const int row = (first + lane) / Layout::kChunks;
        const int chunk = (first + lane) % Layout::kChunks;
        u32 pool_row = v_row_ + row;
        bool in_span = row >= begin && row < end;
        if constexpr (!kContiguous) {
          pool_row = __shfl_sync(kFullWarp, v_row_, row % kWarpSize);
          in_span = kQuantizes ? pool_row < kFreshRow : pool_row != kNoRow;
        }
        const u64 at = reinterpret_cast<u64>(head + static_cast<u64>(pool_row) * pitch);
        const char* from = reinterpret_cast<const char*>(at / 16 * 16) + chunk * 16;
        const bool valid = in_span && Layout::Holds(at, chunk);
        // A copy that reads nothing still needs an address within the pool.
        if (kNumChunks % kWarpSize == 0 || row < kSlice) {
          const u32 to_chunk = to + row * Layout::kPitch + chunk * 16;
          if constexpr (kSplitKv) {
            CopyAsync16(to_chunk, valid ? from : pool, valid, EvictFirst());
          } else {
            CopyAsync16(to_chunk, valid ? from : pool, valid);
          }
        }
      }
    }

    const AttentionParams& p_;
    const KvPools& pools_;
    int thread_;
    int index_;  // item of the next step
    int pos_;    // kv offset of the next step; kNone behind the items of this path
    i32 page_;   // page of the next step's slice, or, in lane l, of its token l
    // The slice whose K rows were loaded last. Contiguous: v_row_ is the pool row of token 0, and
    // tokens [begin, end) are in the item's span. Otherwise v_row_ in lane l is that of token l, or
    // kNoRow.
    u32 v_row_;
    u32 v_slice_;  // 1 << 31 | kv_head << 16 | begin << 8 | end; 0: no slice
  };

  // Load number n goes to slot n % kSlots; even loads are K. The slot before the one that is read
  // is free, so the load due at a K read has the parity of kSlots - 1. Steps without arithmetic
  // fill the pipeline before the first one. The loads due before number 0, which are one call of
  // LoadK and its neighbours, load nothing.
  static constexpr bool kLoadsKAtK = kSlots % 2 == 1;
  static constexpr int kNullLoads = kLoadsKAtK ? 2 : 3;
  static constexpr int kWarmUpSteps = (kNullLoads + kSlots - 1) / 2;

  __device__ __forceinline__ u32 NextSlot(u32 slot) const {
    const u32 ring = SharedAddress(shared_.ring);
    return slot == ring + (kSlots - 1) * kSlotBytes ? ring : slot + kSlotBytes;
  }
  __device__ __forceinline__ u32 PreviousSlot(u32 slot) const {
    const u32 ring = SharedAddress(shared_.ring);
    return slot == ring ? ring + (kSlots - 1) * kSlotBytes : slot - kSlotBytes;
  }

  // Makes the load that is due readable, and starts the load into the slot that became free.
  template <bool kAtK>
  __device__ __forceinline__ void NextLoad(bool due) {
    if (due) WaitCopies<kSlots - 2>();
    SyncReaders();
    if constexpr (kAtK == kLoadsKAtK) {
      loader_.LoadK(PreviousSlot(read_slot_));
    } else {
      loader_.LoadV(PreviousSlot(read_slot_));
    }
    CommitCopies();
  }

  // --- load q ---

  // Loads q of the next item. Split kv: into registers; ReceiveQ follows. Split q: as a group of
  // asynchronous copies. e4m3 q is converted to E here.
  __device__ __forceinline__ void LoadQ() {
    const ItemRecord item = Item();
    const int num_rows = item.qo_len() * kGroupSize;
    const QueryRows<kGroupSize> rows(p_, item.first_token(), item.kv_head(), item.is_shared());
    const int thread = Opaque(threadIdx.x);
#pragma unroll(kSplitKv ? kQVectors : 1)
    for (int i = 0; i < kQVectors; ++i) {
      const int at = thread + i * kThreads;
      const int row = at / Qk::kChunks, chunk = at % Qk::kChunks;
      const bool in_tile = kTileQ * Qk::kChunks % kThreads == 0 || row < kTileQ;
      const bool live = row < num_rows && chunk < Qk::kLiveChunks;
      if constexpr (Traits::kQFormat == kE4m3Format) {
        uint4 q = make_uint4(0, 0, 0, 0);
        if (live) {
          const i64 first = rows.Index(row) * Traits::kHeadDimQk + chunk * 8;
          const uint2 quantized =
              *reinterpret_cast<const uint2*>(static_cast<const unsigned char*>(p_.q) + first);
          UnpackE4m3<Traits>(quantized.x, q.x, q.y);
          UnpackE4m3<Traits>(quantized.y, q.z, q.w);
        }
        if constexpr (kSplitKv) {
          q_vectors_[i] = q;
        } else if (in_tile) {
          *reinterpret_cast<uint4*>(shared_.q + row * Qk::kPitch + chunk * 16) = q;
        }
        continue;
      }
      const u16* from = static_cast<const u16*>(p_.q);
      if (live) from += rows.Index(row) * Traits::kHeadDimQk + chunk * 8;
      if constexpr (kSplitKv) {
        q_vectors_[i] = make_uint4(0, 0, 0, 0);
        if (live) q_vectors_[i] = LoadConstant16(from);
      } else {
        const u32 to = SharedAddress(shared_.q) + row * Qk::kPitch + chunk * 16;
        if (in_tile) CopyAsync16(to, from, live);
      }
    }
    if constexpr (!kSplitKv) CommitCopies();
  }

  // Makes q of the beginning item readable.
  __device__ __forceinline__ void ReceiveQ(QFragments& q_fragments) {
    if constexpr (kSplitKv) {
#pragma unroll
      for (int i = 0; i < kQVectors; ++i) {
        const int at = thread_ + i * kThreads;
        const int row = at / Qk::kChunks, chunk = at % Qk::kChunks;
        if (kTileQ * Qk::kChunks % kThreads == 0 || row < kTileQ) {
          *reinterpret_cast<uint4*>(shared_.q + row * Qk::kPitch + chunk * 16) = q_vectors_[i];
        }
      }
      __syncthreads();
      if constexpr (kQInRegisters) {
#pragma unroll
        for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
          for (int kk = 0; kk < kQkSteps; ++kk) LoadQFragment(q_fragments[mt][kk], mt, kk);
        }
      }
    } else {
      WaitCopies<0>();  // q came with the latest group; the barrier before the K rows does the rest
    }
  }

  // The offset that this lane addresses in a 16 x 16 block for LoadMatrix4: of q as operand a, and
  // of V, transposed, as operand b.
  __device__ u32 RowMajorOffset(int pitch) const {
    return (Lane() % 16) * pitch + (Lane() / 16) * 16;
  }
  // The same for K as operand b, whose 8 x 8 matrices come with the k dimension first.
  __device__ u32 KMajorOffset(int pitch) const {
    return (Lane() % 8 + Lane() / 16 * 8) * pitch + (Lane() / 8 % 2) * 16;
  }

  // Offset in a slot of the tokens that a warp multiplies.
  __device__ u32 WarpSliceOffset() const { return kSplitKv ? Warp() * (kSlice * kMaxPitch) : 0; }
  // Rows of the step as they are multiplied; WarpRows: those of this warp's tokens.
  __device__ __forceinline__ unsigned char* StepRows() const {
    if constexpr (kDequantizes) return shared_.dequantized;
    return shared_.ring + (read_slot_ - SharedAddress(shared_.ring));
  }
  __device__ __forceinline__ u32 WarpRows() const {
    if constexpr (kDequantizes) return SharedAddress(shared_.dequantized) + WarpSliceOffset();
    return read_slot_ + WarpSliceOffset();
  }

  // Dequantizes the slice that this warp loaded, of the step at kv position `begin` in the slot
  // that is read, into StepRows for all warps.
  template <int kHeadDim>
  __device__ __forceinline__ void DequantizeSlice(int begin) {
    using Layout = CopyLayout<kHeadDim>;
    const int thread = Opaque(threadIdx.x);
    const int first = thread / kWarpSize * kSlice;  // the slice's first row
    const unsigned char* quantized = shared_.ring + (read_slot_ - SharedAddress(shared_.ring)) +
                                     first * (kSplitKv ? kCopyPitch : Layout::kPitch);
    unsigned char* rows =
        shared_.dequantized + first * (kSplitKv ? kMaxPitch : RowLayout<kHeadDim>::kPitch);
    const QuantizedRowOffsets<Layout> offsets(p_, Item().kv_head());
    DequantizeRows<Traits, kHeadDim, kSlice>(quantized, offsets, begin + first, thread % kWarpSize,
                                             rows);
    SyncReaders();
  }

  // Transforms the rows of the slice that this warp loaded, of the step at kv position `begin`, in
  // the slot that is read. Rows outside of the item's span stay 0.
  template <class Transform, int kHeadDim>
  __device__ __forceinline__ void TransformSlice(int begin) {
    static_assert(Traits::kKvFormat == kPlainFormat, "rows are those of E");
    constexpr int kPitch = RowLayout<kHeadDim>::kPitch;
    const ItemRecord item(p_, Opaque(index_));
    const int thread = Opaque(threadIdx.x), warp = thread / kWarpSize;
    const int first = begin + warp * kSlice;
    unsigned char* slice = shared_.ring + (read_slot_ - SharedAddress(shared_.ring)) +
                           warp * (kSlice * (kSplitKv ? kMaxPitch : kPitch));
    const int from = Max(first, FirstOfItem<Traits>(item));
    const int end = Min(first + kSlice, EndOfItem<Traits>(p_, item));
#pragma unroll 2
    for (int pos = from; pos < end; ++pos) {
      const variant::RowOfKeyFacts<Traits> facts(p_, p_.items + index_, pos);
      TransformRow<Traits, Transform, kHeadDim>(
          p_, facts, thread % kWarpSize, reinterpret_cast<u16*>(slice + (pos - first) * kPitch));
    }
    SyncReaders();
  }

  // Quantizes fresh rows of the slice that this warp loaded, of the step at kv position `begin`,
  // into the slot that is read, as append_kv does. rows: k_new or v_new. The copies left zeros
  // there.
  template <int kHeadDim>
  __device__ __forceinline__ void QuantizeFreshRows(int begin, const void* rows,
                                                    const float* scales) {
    using Layout = CopyLayout<kHeadDim>;
    if constexpr (kDequantizes)
      ForgetThread();  // here it avoids spills; without kDequantizes it
                       // causes them
    const ItemRecord item(p_, kDequantizes ? Opaque(index_) : index_);
    const FreshTokens fresh(p_, item.request());
    const int first_fresh = Max(fresh.begin, FirstOfItem<Traits>(item));
    const int end = EndOfItem<Traits>(p_, item);
    if (first_fresh >= Min(end, begin + kStep)) return;  // no fresh row in the whole step
    const int first = static_cast<int>(Opaque(threadIdx.x)) / kWarpSize * kSlice;
    unsigned char* slice = shared_.ring + (read_slot_ - SharedAddress(shared_.ring)) +
                           first * (kSplitKv ? kCopyPitch : Layout::kPitch);
    float scale = 1.0f;
    if (kHeadScales && scales != nullptr) scale = scales[item.kv_head()];
#pragma unroll 1
    for (int pos = Max(begin + first, first_fresh); pos < Min(end, begin + first + kSlice); ++pos) {
      const u64 row = static_cast<u64>(fresh.Row(pos)) * p_.num_kv_heads + item.kv_head();
      unsigned char* to = slice + (pos - begin - first) * Layout::kPitch;
      if constexpr (kDequantizes) to += QuantizedRowOffsets<Layout>(p_, item.kv_head()).At(pos);
      QuantizeFreshRow<Traits, kHeadDim>(static_cast<const u16*>(rows) + row * kHeadDim, scale, to);
    }
    // This same warp dequantizes the slice.
    kDequantizes ? __syncwarp() : SyncReaders();
  }

  __device__ __forceinline__ void LoadQFragment(u32 (&a)[4], int mt, int kk) const {
    if constexpr (kE4m3) {
      LoadE4m3QFragment<Qk::kPitch>(a, shared_.q, FirstRow() + mt * 16, kk, Lane());
      return;
    }
    const u32 q = SharedAddress(shared_.q) + FirstRow() * Qk::kPitch + RowMajorOffset(Qk::kPitch);
    LoadMatrix4(a, q + mt * 16 * Qk::kPitch + kk * 32);
  }

  // --- one item ---

  __device__ __forceinline__ ItemRecord Item() const { return ItemRecord(p_, index_); }
  __device__ __forceinline__ Stage Logits() const { return Stage(p_, index_); }

  static_assert(!Traits::kHasSteps || kStep == Traits::kTileKv, "a step is one of the list");

  // Steps are at kv offsets [FirstStep, EndOfSteps), kStep apart. An item without a span has one
  // step.
  __device__ static int EndOfSteps(const ItemRecord& item) {
    return Max(item.kv_end(), item.kv_begin() + 1);
  }

  __device__ __forceinline__ void RunSteps(bool warm_up, State& state) {
    ForgetThread();
    state.Reset(Stage::InitialMax());
    QFragments q_fragments = {};
    // Positions are relative to Origin() here.
    __syncwarp();
    if (Lane() == 0) shared_.control.spans[Warp()] = StepSpan();
    if constexpr (kHeadScales) PutLogitScales();
    __syncwarp();
    const int end_of_steps = EndOfSteps(Item()) - FirstStep<kStep>(Item());
#pragma unroll 1
    for (int pos = warm_up ? -kWarmUpSteps * kStep : 0; pos < end_of_steps; pos += kStep) {
      const VisibleSpan span = shared_.control.spans[Warp()];
      int step_begin = pos;
      bool is_masked = true;
      if constexpr (Traits::kHasSteps) {
        const int offset = FirstStep<kStep>(Item()) + pos, end = pos < 0 ? offset : Item().kv_end();
        const KvStep<Traits> step(p_, offset, end);
        step_begin = step.begin();
        is_masked = step.is_masked();
      }
      const int begin = step_begin + (kSplitKv ? Warp() * kWarpTokens : 0);
      const int end = begin + kWarpTokens;
      const bool seen = begin < span.any_end && end > span.any_begin;
      const bool seen_by_all = begin >= span.all_begin && end <= span.all_end;

      if (pos == 0) ReceiveQ(q_fragments);
      NextLoad<true>(pos >= 0);
      if constexpr (kQuantizes) {
        if (pos >= 0) {
          QuantizeFreshRows<Traits::kHeadDimQk>(Origin() + step_begin, p_.k_new, p_.k_scale);
        }
      }
      if constexpr (kDequantizes) {
        if (pos >= 0) DequantizeSlice<Traits::kHeadDimQk>(Origin() + step_begin);
      }
      if constexpr (Traits::TransformOfK::kIsPresent) {
        if (pos >= 0) {
          TransformSlice<typename Traits::TransformOfK, Traits::kHeadDimQk>(Origin() + step_begin);
        }
      }
      Probabilities p = {};
      if (seen) {
        Tile s;
        MultiplyQk(q_fragments, s);
        if constexpr (kHeadScales) ScaleAtOnce(s);
        Logits().Apply(LogitLayout(FirstRow(), Lane()), Origin() + begin, seen_by_all, is_masked,
                       s);
        if constexpr (kHeadScales) {
          const RowScales<kMTiles> scales = ExponentScales();
          UpdateMax<Traits>(scales, s, state);
          Exponentiate<Traits>(scales, s, state, p);
        } else {
          UpdateMax<Traits>(Logits().scale(), s, state);
          Exponentiate<Traits>(Logits().scale(), s, state, p);
        }
      }
      read_slot_ = NextSlot(read_slot_);

      NextLoad<false>(pos >= 0);
      if constexpr (kQuantizes) {
        if (pos >= 0) {
          QuantizeFreshRows<Traits::kHeadDimVo>(Origin() + step_begin, p_.v_new, p_.v_scale);
        }
      }
      if constexpr (kDequantizes) {
        if (pos >= 0) DequantizeSlice<Traits::kHeadDimVo>(Origin() + step_begin);
      }
      if constexpr (Traits::TransformOfV::kIsPresent) {
        if (pos >= 0) {
          TransformSlice<typename Traits::TransformOfV, Traits::kHeadDimVo>(Origin() + step_begin);
        }
      }
      if constexpr (kRowsMayDiffer<Traits>) {
        const bool by_mask = Stage::Variant::kHasMask && is_masked;
        if (pos >= 0 && (by_mask || (!seen_by_all && Item().qo_len() > 1))) {
          IsolateNonFinite(Origin() + begin, seen, is_masked, state);
        }
      }
      if (seen) MultiplyPv(p, state);
      read_slot_ = NextSlot(read_slot_);
    }
  }

  // The position that RunSteps counts from.
  __device__ __forceinline__ int Origin() const {
    return Traits::kHasSteps ? 0 : FirstStep<kStep>(Item());
  }

  // The positions that the rows of this warp may see, relative to Origin(). all_begin and all_end
  // are those of all warps' rows, which must agree in IsolateNonFinite.
  __device__ __forceinline__ VisibleSpan StepSpan() const {
    const ItemRecord item = Item();
    const int num_rows = item.qo_len() * kGroupSize;
    const int kv_begin = FirstOfItem<Traits>(item), kv_end = EndOfItem<Traits>(p_, item),
              q_pos = item.q_pos();
    const int last_row = Min(num_rows, FirstRow() + kWarpRows) - 1;
    const VisibleSpan warp = SpanOfTokens<Traits>(p_, kv_begin, kv_end, q_pos,
                                                  FirstRow() / kGroupSize, last_row / kGroupSize);
    const VisibleSpan tile =
        SpanOfTokens<Traits>(p_, kv_begin, kv_end, q_pos, 0, item.qo_len() - 1);
    const int first_step = Origin();
    VisibleSpan span = {warp.any_begin - first_step, warp.any_end - first_step,
                        tile.all_begin - first_step, tile.all_end - first_step};
    if (FirstRow() >= num_rows) span.any_end = -kStep * kWarmUpSteps;  // no rows, nothing seen
    return span;
  }

  // --- qk ---

  // Stores the factor of each row's Q K^T from the scales of heads. It is applied before the soft
  // cap and other nonlinear steps; and if it is not positive, before the maximum is taken.
  // Otherwise it waits for the exponent, where large logits are not rounded.
  __device__ __forceinline__ void PutLogitScales() const {
    if (Lane() >= kWarpRows) return;
    const int kv_head = Item().kv_head();
    const int qo_head = kv_head * kGroupSize + (FirstRow() + Lane()) % kGroupSize;
    float scale = LogitScaleOfHead(p_.q_scale, qo_head) * LogitScaleOfHead(p_.k_scale, kv_head);
    if (Stage::kScalesLater) scale *= Logits().scale();
    shared_.control.scales[Warp()][Lane()] = scale;
  }
  __device__ __forceinline__ float RowScale(int mt, int h) const {
    return shared_.control.scales[Warp()][mt * 16 + h * 8 + Lane() / 4];
  }
  __device__ __forceinline__ void ScaleAtOnce(Tile& s) const {
    if constexpr (Stage::kScalesLater) return;
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int j = 0; j < kSTiles; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) s[mt][j][c] *= RowScale(mt, c / 2);
      }
    }
  }
  __device__ __forceinline__ RowScales<kMTiles> ExponentScales() const {
    RowScales<kMTiles> scales;
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        scales.of[mt][h] = Stage::kScalesLater ? RowScale(mt, h) : Logits().scale();
      }
    }
    return scales;
  }

  __device__ __forceinline__ void MultiplyQk(const QFragments& q_fragments, Tile& s) const {
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int j = 0; j < kSTiles; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) s[mt][j][c] = 0.0f;
      }
    }
    if constexpr (kE4m3) {
      const auto load = [&](u32(&a)[4], int mt, int kk) __attribute__((always_inline)) {
        if constexpr (kQInRegisters) {
#pragma unroll
          for (int c = 0; c < 4; ++c) a[c] = q_fragments[mt][kk][c];
        } else {
          LoadQFragment(a, mt, kk);
        }
      };
      MultiplyE4m3Qk<Traits, kQkSteps, Kk::kPitch>(WarpRows(), Lane(), load, s);
      return;
    }
    const u32 k = WarpRows() + KMajorOffset(Qk::kPitch);
#pragma unroll
    for (int kk = 0; kk < kQkSteps; ++kk) {
      u32 a[kMTiles][4];
#pragma unroll
      for (int mt = 0; mt < kMTiles; ++mt) {
        if constexpr (kQInRegisters) {
#pragma unroll
          for (int c = 0; c < 4; ++c) a[mt][c] = q_fragments[mt][kk][c];
        } else {
          LoadQFragment(a[mt], mt, kk);
        }
      }
#pragma unroll
      for (int j = 0; j < kSTiles; j += 2) {
        u32 b[4];
        LoadMatrix4(b, k + j * 8 * Qk::kPitch + kk * 32);
#pragma unroll
        for (int mt = 0; mt < kMTiles; ++mt) {
          E::Mma(s[mt][j], a[mt], b[0], b[1]);
          E::Mma(s[mt][j + 1], a[mt], b[2], b[3]);
        }
      }
    }
  }

  // --- pv ---

  // Column of o[mt][j][2h + c].
  __device__ int Column(int j, int c) const {
    return kE4m3 ? E4m3Column(j, c, Lane()) : 8 * j + Lane() % 4 * 2 + c;
  }

  __device__ __forceinline__ void MultiplyPv(const Probabilities& p, State& state) const {
    const u32 v = WarpRows() + RowMajorOffset(Vo::kPitch);
    if constexpr (kE4m3) {
      MultiplyE4m3Pv<Traits, Vo::kPitch>(v, p, state.o);
      return;
    }
#pragma unroll
    for (int kk = 0; kk < kWarpTokens / 16; ++kk) {
#pragma unroll
      for (int j = 0; j < kOTiles; j += 2) {
        u32 b[4];
        LoadMatrix4Transposed(b, v + kk * 16 * Vo::kPitch + j * 16);
#pragma unroll
        for (int mt = 0; mt < kMTiles; ++mt) {
          E::Mma(state.o[mt][j], p[mt][kk], b[0], b[1]);
          E::Mma(state.o[mt][j + 1], p[mt][kk], b[2], b[3]);
        }
      }
    }
  }

  // Handles values that are not finite in a step that some rows see more of than others. Such a
  // value must reach the rows that see it and no other, but 0 * NaN and 0 * inf are NaN. Every warp
  // checks the tokens that it loaded. If there is such a value, it is added here to the rows that
  // see it, and replaced by 0.
  __device__ __forceinline__ void IsolateNonFinite(int begin, bool seen, bool is_masked,
                                                   State& state) {
    unsigned char* step = StepRows() + WarpSliceOffset();
    unsigned char* slice = kSplitKv ? step : step + Warp() * (kSlice * Vo::kPitch);
    constexpr int kVectors = kSlice * Vo::kChunks;
    u32 not_finite = 0;
#pragma unroll 2
    for (int i = Lane(); i < kVectors; i += kWarpSize) {
      const uint4 x = *reinterpret_cast<const uint4*>(slice + i / Vo::kChunks * Vo::kPitch +
                                                      i % Vo::kChunks * 16);
      if constexpr (kE4m3) {
        not_finite |= E4m3NanBits(x);
        continue;
      }
      not_finite = E::FmaX2(x.x, 0, not_finite);  // 0 * x is NaN unless x is finite
      not_finite = E::FmaX2(x.y, 0, not_finite);
      not_finite = E::FmaX2(x.z, 0, not_finite);
      not_finite = E::FmaX2(x.w, 0, not_finite);
    }
    const bool found = (kE4m3 ? not_finite : not_finite & 0x7fff7fff) != 0;
    const bool mend = kSplitKv ? __any_sync(kFullWarp, found) : __syncthreads_or(found);
    if (!mend) return;

    if (seen) MarkRows(begin, is_masked, step, state);
    SyncReaders();
    if constexpr (kE4m3) {
#pragma unroll 1
      for (int i = Lane(); i < kVectors * 16; i += kWarpSize) {
        unsigned char* x = slice + i / (Vo::kChunks * 16) * Vo::kPitch + i % (Vo::kChunks * 16);
        if (E4m3NanBits(*x) != 0) *x = 0;
      }
      SyncReaders();
      return;
    }
#pragma unroll 1
    for (int i = Lane(); i < kVectors * 8; i += kWarpSize) {
      u16* x = reinterpret_cast<u16*>(slice + i / (Vo::kChunks * 8) * Vo::kPitch) +
               i % (Vo::kChunks * 8);
      if (!E::IsFinite(*x)) *x = 0;
    }
    SyncReaders();
  }

  __device__ __forceinline__ void MarkRows(int begin, bool is_masked, const unsigned char* step,
                                           State& state) const {
#pragma unroll 1
    for (int token = 0; token < kWarpTokens; ++token) {
      OneKeyLayout<2 * kMTiles> layout;
#pragma unroll
      for (int i = 0; i < 2 * kMTiles; ++i) layout.rows[i] = FirstRow() + i * 8 + Lane() / 4;
      bool sees[2 * kMTiles][1];
      Logits().Look(
          layout, begin + token, is_masked,
          [&](int i) { return SpanOfRow<Traits>(p_, Item(), layout.rows[i]); }, sees);
      if constexpr (kE4m3) {
#pragma unroll
        for (int j = 0; j < kOTiles; ++j) {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            if (E4m3NanBits(step[token * Vo::kPitch + Column(j, c % 2)]) == 0) continue;
#pragma unroll
            for (int mt = 0; mt < kMTiles; ++mt) {
              if (sees[2 * mt + c / 2][0]) state.o[mt][j][c] = __int_as_float(0x7fffffff);
            }
          }
        }
        continue;
      }
#pragma unroll
      for (int j = 0; j < kOTiles; ++j) {
        const u32 x =
            *reinterpret_cast<const u32*>(step + token * Vo::kPitch + j * 16 + Lane() % 4 * 4);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const u32 bits = c % 2 == 0 ? x : x >> 16;
          if (E::IsFinite(bits)) continue;
#pragma unroll
          for (int mt = 0; mt < kMTiles; ++mt) {
            if (sees[2 * mt + c / 2][0]) state.o[mt][j][c] += E::ToFloat(static_cast<u16>(bits));
          }
        }
      }
    }
  }

  // --- finish ---

  __device__ __forceinline__ void Finish(int index, State& state) {
    ForgetThread();
    const ItemRecord item(p_, index);
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int h = 0; h < 2; ++h) state.sum[mt][h] = QuadSum(state.sum[mt][h]);
    }
    if constexpr (kSplitKv) {
      WriteCombined(item, state);
    } else {
      WriteRows(item, state);
    }
    const int num_groups = item.num_groups();
    if (num_groups > 0) {
      ArriveAndMerge<Traits>(p_, index, item.merge_idx(), num_groups, shared_.control.merge);
    }
    RecordEnd<Traits>(p_, index, thread_);
  }

  // Split q: every warp has the complete state of its rows. A row's four lanes store 16 or 32
  // neighbouring bytes at a time; o is small beside what was read for it.
  __device__ __forceinline__ void WriteRows(const ItemRecord& item, State& state) const {
    const int num_rows = item.qo_len() * kGroupSize;
    const RowMap<kGroupSize> map(p_, item.first_token(), item.kv_head());
    const int partial_row = item.partial_row();
    const bool final = partial_row < 0;
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = FirstRow() + mt * 16 + h * 8 + Lane() / 4;
        if (row >= num_rows) continue;
        const i64 at = final ? map.Index(row) : partial_row + row;
        float o_scale = WriteState<Traits>(p_, final, at, map.QoHead(row), Lane() % 4 == 0,
                                           {state.max_log4[mt][h], state.sum[mt][h]});
        if constexpr (kHeadScales) {
          if (final) o_scale = WithValueScale<Traits>(p_, item.kv_head(), o_scale);
        }
        if constexpr (kE4m3) {
          WriteE4m3Row<Traits>(p_, state.o[mt], h, Lane(), final, at, o_scale);
          continue;
        }
        const i64 first = at * Traits::kHeadDimVo + 2 * (Lane() % 4);
        float* partial = p_.partial_o + first;
        u16* o = static_cast<u16*>(p_.o) + first;
#pragma unroll
        for (int j = 0; j < Vo::kLiveChunks; ++j) {
          const float left = state.o[mt][j][2 * h] * o_scale;
          const float right = state.o[mt][j][2 * h + 1] * o_scale;
          if (final) {
            *reinterpret_cast<u32*>(o + 8 * j) = E::Pack(left, right);
          } else {
            *reinterpret_cast<float2*>(partial + 8 * j) = make_float2(left, right);
          }
        }
      }
    }
  }

  // Split kv: combines the warps' states in the order of the warps. kRowThreads threads write a
  // row.
  __device__ __forceinline__ void WriteCombined(const ItemRecord& item, const State& state) {
    constexpr int kRowThreads = kThreads / kTileQ;
    Exchange& exchange = shared_.exchange;
    const int row = thread_ / kRowThreads, part = thread_ % kRowThreads;
    float weights[kWarps];
#pragma unroll
    for (int first = 0; first < Vo::kPadded; first += kColumns) {
      if (first > 0) __syncthreads();
      PutState(first, state);
      __syncthreads();
      if (row >= item.qo_len() * kGroupSize) continue;

      const RowMap<kGroupSize> map(p_, item.first_token(), item.kv_head());
      const int partial_row = item.partial_row();
      const bool final = partial_row < 0;
      const i64 at = final ? map.Index(row) : partial_row + row;
      const RowState all = CombineRow(row, weights);
      float o_scale =
          WriteState<Traits>(p_, final, at, map.QoHead(row), first == 0 && part == 0, all);
      if (kHeadScales && final) o_scale = WithValueScale<Traits>(p_, item.kv_head(), o_scale);
#pragma unroll 1
      for (int c = 4 * part; c < Min(kColumns, Traits::kHeadDimVo - first); c += 4 * kRowThreads) {
        float4 o = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
          Accumulate(o, weights[w], *reinterpret_cast<const float4*>(&exchange.o[w][row][c]));
        }
        Scale(o, o_scale);
        if (final) {
          Store4<Traits::kDtype>(p_.o, at * Traits::kHeadDimVo + first + c, o);
        } else {
          Store4<kElementF32>(p_.partial_o, at * Traits::kHeadDimVo + first + c, o);
        }
      }
    }
  }

  // Publishes columns [first, first + kColumns) of this warp's state.
  __device__ __forceinline__ void PutState(int first, const State& state) {
    Exchange& exchange = shared_.exchange;
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = mt * 16 + h * 8 + Lane() / 4;
        if (first == 0 && Lane() % 4 == 0) {
          exchange.max_log4[Warp()][row] = state.max_log4[mt][h];
          exchange.sum[Warp()][row] = state.sum[mt][h];
        }
        if constexpr (kE4m3) {
#pragma unroll
          for (int j = 0; j < Min(kColumns / 8, kOTiles); j += 2) {
            if (first / 8 + j >= kOTiles) continue;
            *reinterpret_cast<float4*>(&exchange.o[Warp()][row][Column(j, 0)]) =
                NeighboursOf(state.o[mt], first / 8 + j, h);
          }
          continue;
        }
#pragma unroll
        for (int j = 0; j < Min(kColumns / 8, kOTiles); ++j) {
          if (first / 8 + j >= kOTiles) continue;
          *reinterpret_cast<float2*>(&exchange.o[Warp()][row][8 * j + 2 * (Lane() % 4)]) =
              make_float2(state.o[mt][first / 8 + j][2 * h], state.o[mt][first / 8 + j][2 * h + 1]);
        }
      }
    }
  }

  // Combines the warps' (max, sum) of a row. weights: of the warps' states.
  __device__ __forceinline__ RowState CombineRow(int row, float (&weights)[kWarps]) const {
    const Exchange& exchange = shared_.exchange;
    float max_log4 = exchange.max_log4[0][row];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) max_log4 = fmaxf(max_log4, exchange.max_log4[w][row]);
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      weights[w] = StateWeight(exchange.max_log4[w][row], max_log4);
      sum = fmaf(weights[w], exchange.sum[w][row], sum);
    }
    return {max_log4, sum};
  }

  const AttentionParams& p_;
  Shared& shared_;
  int thread_;  // threadIdx.x; opaque to the code of other paths
  int index_;   // item whose steps run or come next
  KvLoader loader_;
  u32 read_slot_;
  uint4 q_vectors_[kSplitKv ? kQVectors : 1];
};

// The kernel of a specialisation, with one path for each tile M that it may meet.
template <class Traits, template <class, int, int> class PathT, int kMaxCtasPerSm>
struct QueueBody {
  static constexpr int kNumThreads = Traits::kNumWarps * kWarpSize;

  template <int kTile, int kBudget>
  using PathOf = PathT<Traits, Min(kTile, Traits::kNumTiles - 1), kBudget>;
  template <int kBudget>
  static constexpr int SmemBytes() {
    return Max(Max(sizeof(typename PathOf<0, kBudget>::Shared),
                   sizeof(typename PathOf<1, kBudget>::Shared)),
               sizeof(typename PathOf<2, kBudget>::Shared));
  }
  // Two CTAs share a multiprocessor if they fit: one computes while the other waits, and 128
  // threads may use all 255 registers. select/cuda.cc launches as many.
  static constexpr int kHalf = CtaSmemBudget(Traits::kArch, 2);
  static constexpr int kMinCtasPerSm =
      kMaxCtasPerSm == 2 && Traits::kNumWarps <= 4 && SmemBytes<kHalf>() <= kHalf ? 2 : 1;
  static constexpr int kBudget = CtaSmemBudget(Traits::kArch, kMinCtasPerSm);
  static constexpr int kSmemBytes = SmemBytes<kBudget>();
  template <int kTile>
  using Path = PathOf<kTile, kBudget>;

  __device__ __forceinline__ static void Run(const AttentionParams& p) {
    extern __shared__ __align__(128) unsigned char smem[];
    // Brings these words near before they are needed.
    if (p.counter_parity != nullptr) LoadConstant(p.counter_parity + blockIdx.x);
    if (Traits::kPageSize > 0 && p.layer != nullptr) LoadConstant(p.layer);
    int item = QueueBegin(p);
    while (item < QueueEnd(p)) {
      const int tile = Traits::kNumTiles == 1 ? 0 : LoadConstant(&p.items[item].tile);
      int next;
      if (tile == 0) {
        next = Path<0>::Run(p, smem, item);
      } else if (Traits::kNumTiles == 2 || tile == 1) {
        next = Path<1>::Run(p, smem, item);
      } else {
        next = Path<2>::Run(p, smem, item);
      }
      item = Max(next, item + 1);  // a damaged plan may name no tile; such an item is skipped
    }
    FinishLaunch<Traits, 2>(p, threadIdx.x, blockDim.x);
  }
};

template <class Traits, bool kTensorCores = Traits::kDtype != kElementF32>
struct AttentionBody : QueueBody<Traits, TilePath, 2> {};

template <class Traits>
struct AttentionBody<Traits, false> : AttentionF32Body<Traits> {};

}  // namespace jax_attn
