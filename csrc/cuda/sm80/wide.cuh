// Attention with rows of more than 256 elements on tensor cores, for every architecture from sm_80
// on: mma.sync, ldmatrix, cp.async.
//
// Multi-head latent attention (kIsMla): k has one head for all query heads, and v is the first
// kHeadDimVo columns of k. So a row of the cache is copied to shared memory once and multiplied
// twice. Heads are rows of the query tile, like tokens. A tile has 16 to 64 rows. More heads are
// divided into blocks, which count as kv heads in the plan (kv_head: the block) and all read the
// same rows of the cache.
//
// Else k and v have up to 512 columns, and are copied by turns: each step takes two slots of the
// ring.
//
// Rows are long: 64 rows of o with 512 columns are 128 registers a thread of 8 warps. Every warp
// has 16 rows and its own columns of o. The warps with the same rows share Q K^T: each has its own
// tokens and its own part of the depth. They exchange scores through shared memory, and each warp
// reads all scores of its rows and computes the same softmax. That is cheaper than one more
// barrier, and leaves P where P V needs it.
//
// Quantized rows: a step is dequantized to the kernel's 16-bit type (common/quantized_rows.cuh),
// once for all warps. Each warp dequantizes what it copied.
//
// Steps and loads are as in sm80/attention.cuh: steps start at absolute multiples of kStep; a ring
// of slots is kSlots - 1 loads ahead, across the borders of items. q of the next item is loaded
// while this item runs, whose own q is in registers.
#pragma once

#include "cuda/common/budget.cuh"
#include "cuda/common/logits.cuh"
#include "cuda/common/partials.cuh"
#include "cuda/common/quantized_rows.cuh"
#include "cuda/sm80/attention.cuh"
#include "cuda/sm80/quantized_kv.cuh"
#include "cuda/sm80/softmax.cuh"

namespace jax_attn {

// kBudget: bytes of shared memory that the path may use.
template <class Traits, int kTile, int kBudget>
class WidePath : ListedStep<Traits> {
 public:
  // --- shape ---

  using E = Element<Traits::kDtype>;
  using Stage = LogitStage<Traits>;
  static constexpr bool kOwnValues = !Traits::kIsMla;  // v is not in k's rows
  using Row = RowLayout<Traits::kHeadDimQk>;
  using ValueRow = typename Conditional<kOwnValues, RowLayout<Traits::kHeadDimVo>, Row>::Type;
  // Rows as they are copied.
  static constexpr bool kDequantizes = Traits::kKvFormat != kPlainFormat;
  template <int kHeadDim>
  using CopyOf = typename Conditional<kDequantizes, QuantizedRowLayout<Traits::kKvFormat, kHeadDim>,
                                      RowLayout<kHeadDim>>::Type;
  using Copy = CopyOf<Traits::kHeadDimQk>;
  using ValueCopy = typename Conditional<kOwnValues, CopyOf<Traits::kHeadDimVo>, Copy>::Type;
  static constexpr int kRowPitch = Max(Row::kPitch, ValueRow::kPitch);

  static constexpr int kTileQ = kTile == 0   ? Traits::kTileQ0
                                : kTile == 1 ? Traits::kTileQ1
                                             : Traits::kTileQ2;
  static constexpr int kGroupSize = Traits::kGroupSize;
  static constexpr int kPageSize = Traits::kPageSize;
  static constexpr int kWarps = Traits::kNumWarps;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kStep = Traits::kTileKv;              // kv tokens
  static constexpr int kSlice = kStep / kWarps;              // tokens of a step that a warp loads
  static constexpr int kRowGroups = kTileQ / 16;             // groups of 16 rows
  static constexpr int kWarpsPerPart = kWarps / kRowGroups;  // warps with the same rows
  // Columns of o for each warp, in pairs of tiles; the last warp may have fewer.
  static constexpr int kColumns = CeilDiv(Traits::kHeadDimVo, 16 * kWarpsPerPart) * 16;
  static constexpr bool kAllColumns = kColumns * kWarpsPerPart == Traits::kHeadDimVo;
  static constexpr int kOTiles = kColumns / 8;
  // Q K^T: each warp has kPartTokens tokens and kPartSteps steps of 16 through the depth.
  static constexpr int kTokenParts = Min(kWarpsPerPart / 2, kStep / 8);
  static constexpr int kDepthParts = kWarpsPerPart / kTokenParts;
  static constexpr int kPartTokens = kStep / kTokenParts;
  static constexpr int kPartTiles = kPartTokens / 8;
  static constexpr int kQkSteps = Row::kPadded / 16;
  static constexpr int kPartSteps = CeilDiv(kQkSteps, kDepthParts);
  // Sums of products are chains of dependent instructions. Few tiles take two chains each.
  static constexpr int kChains = kPartTiles >= 4 ? 1 : 2;
  static constexpr int kSTiles = kStep / 8;
  static_assert(kStep % 16 == 0 && kSlice * kWarps == kStep, "a whole step");
  static_assert(kWarpsPerPart >= 2 && kTokenParts * kDepthParts == kWarpsPerPart,
                "one part for every warp");
  static_assert(kOwnValues || (kAllColumns && Row::kChunks == Row::kLiveChunks),
                "latent rows are whole chunks and tiles");
  static_assert(kTileQ >= kGroupSize, "a tile holds at least one token");

  static constexpr int kSlotBytes = kStep * Max(Copy::kPitch, ValueCopy::kPitch);
  static constexpr int kQBytes = kTileQ * Row::kPitch;
  using Scores = float[kDepthParts][kTileQ][kStep + 8];  // + 8: rows start in different banks

  // The step that is multiplied, dequantized.
  struct DequantizedStep {
    alignas(16) unsigned char dequantized[kStep * kRowPitch];
  };
  struct NoDequantizedStep {};
  using Dequantized = typename Conditional<kDequantizes, DequantizedStep, NoDequantizedStep>::Type;
  static constexpr int kDequantizedBytes = kDequantizes ? static_cast<int>(sizeof(Dequantized)) : 0;

  // The factor of the item's logits, for each warp. In a register it would spill.
  struct KeyScales {
    float key_scales[kWarps];
  };
  struct NoKeyScales {};

  struct ControlSmem : Conditional<kDequantizes, KeyScales, NoKeyScales>::Type {
    KvPools pools;              // v: unless it is in k's rows
    VisibleSpan spans[kWarps];  // span of the tile; the main loop has few registers
    MergeScratch merge;
  };
  static constexpr int kRingBudget = kBudget - kQBytes - kDequantizedBytes -
                                     static_cast<int>(sizeof(Scores) + sizeof(ControlSmem)) - 32;
  // 6 slots of 32 tokens are more than a multiprocessor needs in flight.
  static constexpr int kSlots = Clamp(kRingBudget / kSlotBytes, 2, 6);
  static constexpr int kLoadsOfStep = kOwnValues ? 2 : 1;

  struct alignas(16) Shared : Dequantized {
    ControlSmem control;
    alignas(16) unsigned char q[kQBytes];  // q of the next item
    unsigned char ring[kSlots * kSlotBytes];
    Scores scores;
  };

  // Executes the items of the queue from `first` on, up to the first one with another tile M.
  // Returns the first item not executed.
  __device__ __forceinline__ static int Run(const AttentionParams& p, unsigned char* smem,
                                            int first) {
    WidePath path(p, *reinterpret_cast<Shared*>(smem), first);
    path.FillRing();
    State state;
    while (path.IsMine(path.index_)) {
      RecordBegin<Traits>(p, path.index_, path.thread_);
      path.RunSteps(state);
      path.Finish(state);
      RecordEnd<Traits>(p, path.index_, path.thread_);
      ++path.index_;
    }
    WaitCopies<0>();
    __syncthreads();  // the next path lays out shared memory differently
    return path.index_;
  }

 private:
  using State = TileState<1, kOTiles>;
  using Tile = float[1][kSTiles][4];  // logits
  using Probabilities = u32[1][kSTiles / 2][4];
  using QFragments = u32[kPartSteps][4];

  __device__ __forceinline__ WidePath(const AttentionParams& p, Shared& shared, int first)
      : p_(p),
        shared_(shared),
        thread_(Opaque(threadIdx.x)),
        index_(first),
        steps_(kSlots),
        load_index_(first - 1),
        load_pos_(kNone),
        page_(0),
        value_row_(kNoRow),
        loads_values_(false),
        read_slot_(SharedAddress(shared.ring)) {
    if (thread_ == 0) {
      shared.control.merge.counters = LaunchCounters(p);
      if constexpr (kOwnValues) {
        shared.control.pools =
            FindPoolsOfRows<Traits, RowBytes(Traits::kHeadDimQk), RowBytes(Traits::kHeadDimVo)>(
                p, LoadLayer<Traits>(p));
      } else {
        shared.control.pools.k = static_cast<const char*>(p.k);
        if (kPageSize > 0 && p.layer != nullptr) {
          shared.control.pools.k += LoadConstant(p.layer) * p.num_pages * (kPageSize * kRowBytes);
        }
      }
    }
    __syncthreads();
  }

  static constexpr int kNone = 0x7fffffff;
  static constexpr int RowBytes(int head_dim) {
    return kDequantizes ? static_cast<int>(QuantizedRowBytes(Traits::kKvFormat, head_dim))
                        : head_dim * E::kBytes;
  }
  static constexpr int kRowBytes = RowBytes(Traits::kHeadDimQk);

  __device__ int Lane() const { return thread_ % kWarpSize; }
  __device__ int Warp() const { return thread_ / kWarpSize; }
  __device__ int FirstRow() const { return Warp() / kWarpsPerPart * 16; }  // of this warp
  __device__ int Part() const {
    return Warp() % kWarpsPerPart;
  }  // index among the warps with its
     // rows

  // Ends the life of values derived from the thread index, so that registers do not keep them
  // through a phase that does not use them.
  __device__ __forceinline__ void ForgetThread() { thread_ = Opaque(thread_); }

  __device__ __forceinline__ bool IsMine(int index) const {
    return index < QueueEnd(p_) && ItemRecord(p_, index).tile() == kTile;
  }

  // Steps are at kv offsets [FirstStep, EndOfSteps), kStep apart. An item without a span has one
  // step.
  __device__ static int EndOfSteps(const ItemRecord& item) {
    return Max(item.kv_end(), item.kv_begin() + 1);
  }

  // --- load kv ---

  // Load number n goes to slot n % kSlots. Each is a group of copies; q comes with one of them.
  __device__ __forceinline__ void FillRing() {
    LoadQ(index_);
    NextLoad();
    u32 slot = read_slot_;
#pragma unroll 1
    for (int n = 0; n < kSlots - 1; ++n, slot += kSlotBytes) {
      LoadSlot(slot);
      CommitCopies();
    }
  }

  // Finds the step behind the one that was loaded last. Page ids are requested one step before the
  // rows that they lead to.
  __device__ __forceinline__ void NextLoad() {
    if (load_pos_ != kNone) {
      load_pos_ += kStep;
      if (load_pos_ >= EndOfSteps(ItemRecord(p_, load_index_))) load_pos_ = kNone;
    }
    if (load_pos_ == kNone && IsMine(load_index_ + 1)) {
      ++load_index_;
      load_pos_ = FirstStep<kStep>(ItemRecord(p_, load_index_));
    }
    if constexpr (Traits::kHasSteps) {
      if (load_pos_ != kNone) {
        this->step = KvStep<Traits>(p_, load_pos_, ItemRecord(p_, load_index_).kv_end());
      }
    }
    if (kPageSize > 0 && load_pos_ != kNone) {
      const ItemRecord item(p_, load_index_);
      if (InSpan(item)) page_ = LoadPage<Max(kPageSize, 1)>(p_, item.kv_base(), LanePosition());
    }
  }

  // Lane l < kSlice handles token l of the warp's slice.
  __device__ int LanePosition() const { return this->Begin(load_pos_) + Warp() * kSlice + Lane(); }
  __device__ __forceinline__ bool InSpan(const ItemRecord& item) const {
    if constexpr (Traits::kHasSteps) {
      const VisibleSpan span = SpanOfItem<Traits>(p_, item);
      return Lane() < kSlice && LanePosition() >= span.any_begin && LanePosition() < span.any_end;
    }
    return Lane() < kSlice && LanePosition() >= item.kv_begin() && LanePosition() < item.kv_end();
  }

  // The row of this lane's token of the step at load_pos_; kNoRow if no row of q sees it.
  __device__ __forceinline__ u32 LaneRow(const ItemRecord& item) const {
    if (!InSpan(item)) return kNoRow;
    if constexpr (Traits::kHasFreshKv) {
      const FreshTokens fresh(p_, item.request());
      if (LanePosition() >= fresh.begin) return kFreshRow | fresh.Row(LanePosition());
    }
    return kPageSize > 0 ? PoolRow<Max(kPageSize, 1)>(page_, LanePosition())
                         : static_cast<u32>(item.kv_base()) + LanePosition();
  }

  // Loads what is due, this warp's slice, into `slot`: rows of the step at load_pos_, or its values
  // after its keys.
  __device__ __forceinline__ void LoadSlot(u32 slot) {
    if (load_pos_ == kNone) return;
    const ItemRecord item(p_, load_index_);
    if constexpr (kOwnValues) {
      if (!loads_values_) {
        value_row_ = LaneRow(item);
        CopyRows<Copy>(slot, shared_.control.pools.k, p_.k_new, kRowBytes, item.kv_head(),
                       value_row_);
      } else {
        CopyRows<ValueCopy>(slot, shared_.control.pools.v, p_.v_new, RowBytes(Traits::kHeadDimVo),
                            item.kv_head(), value_row_);
        NextLoad();
      }
      loads_values_ = !loads_values_;
    } else {
      CopyRows<Copy>(slot, shared_.control.pools.k, nullptr, kRowBytes, 0, LaneRow(item));
      NextLoad();
    }
  }

  // Copies rows of a kv head; zeros for kNoRow. pool: in shared memory. fresh_rows: k_new or v_new.
  template <class Layout>
  __device__ __forceinline__ void CopyRows(u32 slot, const char* const& pool,
                                           const void* fresh_rows, int row_bytes, int kv_head,
                                           u32 lane_row) const {
    // Neighbouring lanes copy neighbouring chunks of a row.
    constexpr int kWidth = kWarpSize / kSlice;
    const int token = Lane() / kWidth, lane_chunk = Lane() % kWidth;
    const u32 row = __shfl_sync(kFullWarp, lane_row, token);
    const bool valid = row != kNoRow;
    // A copy that reads nothing still needs an address within the pool.
    const char* from = pool;
    if constexpr (kOwnValues) {
      u64 at = row;
      if constexpr (Traits::kHasFreshKv) {
        if (valid && row >= kFreshRow) {
          from = static_cast<const char*>(fresh_rows);
          at = row - kFreshRow;
        }
      }
      if (valid) from += (at * p_.num_kv_heads + kv_head) * row_bytes;
    } else {
      from += valid ? static_cast<u64>(row) * kRowBytes : 0;
    }
    const u32 to = slot + (Warp() * kSlice + token) * Layout::kPitch;
#pragma unroll
    for (int c = 0; c < Layout::kChunks; c += kWidth) {
      const int chunk = c + lane_chunk;
      // Blocks of heads read the same rows at about the same time, so L2 should keep them: no hint.
      if (Layout::kChunks % kWidth == 0 || chunk < Layout::kChunks) {
        const bool has_data = HasData<Layout>(chunk);
        CopyAsync16(to + chunk * 16, has_data ? from + chunk * 16 : from, valid && has_data);
      }
    }
  }
  // Whether the chunk-th vector of a row is not padding.
  template <class Layout>
  __device__ static bool HasData(int chunk) {
    if constexpr (kDequantizes) {
      return true;
    } else {
      return Layout::kChunks == Layout::kLiveChunks || chunk < Layout::kLiveChunks;
    }
  }

  __device__ __forceinline__ u32 NextSlot(u32 slot) const {
    const u32 ring = SharedAddress(shared_.ring);
    return slot == ring + (kSlots - 1) * kSlotBytes ? ring : slot + kSlotBytes;
  }
  __device__ __forceinline__ u32 PreviousSlot(u32 slot) const {
    const u32 ring = SharedAddress(shared_.ring);
    return slot == ring ? ring + (kSlots - 1) * kSlotBytes : slot - kSlotBytes;
  }

  // --- rows of the step as they are multiplied ---

  __device__ __forceinline__ unsigned char* StepRows() const {
    if constexpr (kDequantizes) return shared_.dequantized;
    return shared_.ring + (read_slot_ - SharedAddress(shared_.ring));
  }
  __device__ __forceinline__ u32 StepAddress() const {
    if constexpr (kDequantizes) return SharedAddress(shared_.dequantized);
    return read_slot_;
  }

  // Dequantizes this warp's slice of the slot that is read into StepRows for all warps.
  template <int kHeadDim>
  __device__ __forceinline__ void DequantizeSlice() const {
    using Quantized = CopyOf<kHeadDim>;
    static_assert(!kDequantizes || Quantized::kAlignment == 16, "rows begin where vectors do");
    const int first = Warp() * kSlice;
    const QuantizedRowOffsets<Quantized> offsets(p_, 0);
    const unsigned char* quantized = shared_.ring + (read_slot_ - SharedAddress(shared_.ring));
    DequantizeRows<Traits, kHeadDim, kSlice>(
        quantized + first * Quantized::kPitch, offsets, 0, Lane(),
        shared_.dequantized + first * RowLayout<kHeadDim>::kPitch);
  }

  // --- load q ---

  // Loads q of an item of this path; zeros where there is no row.
  __device__ __forceinline__ void LoadQ(int index) {
    const ItemRecord item(p_, index);
    const int num_rows = item.qo_len() * kGroupSize;
    const QueryRows<kGroupSize> rows(p_, item.first_token(), item.kv_head(), item.is_shared());
#pragma unroll 1
    for (int at = thread_; at < kTileQ * Row::kChunks; at += kThreads) {
      const int row = at / Row::kChunks, chunk = at % Row::kChunks;
      const bool live = row < num_rows && rows.map.QoHead(row) < p_.num_qo_heads &&
                        (Row::kChunks == Row::kLiveChunks || chunk < Row::kLiveChunks);
      const u16* from = static_cast<const u16*>(p_.q);
      if (live) from += rows.Index(row) * Traits::kHeadDimQk + chunk * 8;
      CopyAsync16(SharedAddress(shared_.q) + row * Row::kPitch + chunk * 16, from, live);
    }
  }

  // The offset that this lane addresses in a 16 x 16 block for LoadMatrix4: of q as operand a, and
  // of v, transposed, as operand b.
  __device__ u32 RowMajorOffset(int pitch) const {
    return (Lane() % 16) * pitch + (Lane() / 16) * 16;
  }
  // The same for k as operand b: 16 tokens by 16 of the depth, whose 8 x 8 matrices come with the
  // depth first; or 8 tokens by 32.
  __device__ u32 KMajorOffset() const {
    if constexpr (kPartTiles == 1) return (Lane() % 8) * Row::kPitch + (Lane() / 8) * 16;
    return (Lane() % 8 + Lane() / 16 * 8) * Row::kPitch + (Lane() / 8 % 2) * 16;
  }

  // Where this warp's part of Q K^T begins.
  __device__ int FirstToken() const { return Part() % kTokenParts * kPartTokens; }
  __device__ int FirstQkStep() const { return Part() / kTokenParts * kPartSteps; }
  // The last part may be shorter.
  __device__ bool HasQkStep(int kk) const {
    return kQkSteps % kDepthParts == 0 || FirstQkStep() + kk < kQkSteps;
  }

  __device__ __forceinline__ void ReadQ(QFragments& q) const {
    const u32 from = SharedAddress(shared_.q) + FirstRow() * Row::kPitch +
                     RowMajorOffset(Row::kPitch) + FirstQkStep() * 32;
#pragma unroll
    for (int kk = 0; kk < kPartSteps; ++kk) {
      if (HasQkStep(kk)) LoadMatrix4(q[kk], from + kk * 32);
    }
  }

  // --- one item ---

  __device__ __forceinline__ void RunSteps(State& state) {
    state.Reset(Stage::InitialMax());
    QFragments q = {};
    const ItemRecord item(p_, index_);
    __syncwarp();
    if (Lane() == 0) {
      shared_.control.spans[Warp()] = SpanOfItem<Traits>(p_, item);
      if constexpr (kDequantizes) shared_.control.key_scales[Warp()] = KeyScale<Traits>(p_, index_);
    }
    __syncwarp();
    const int first_step = FirstStep<kStep>(item), end_of_steps = EndOfSteps(item);
#pragma unroll 1
    for (int pos = first_step; pos < end_of_steps; pos += kStep) {
      const bool is_first = pos == first_step;
      // q came with the last load that started in the first step of the item before
      if (is_first && steps_ * kLoadsOfStep < kSlots - 2 + kLoadsOfStep) {
        WaitCopies<0>();
      } else {
        WaitCopies<kSlots - 2>();
      }
      __syncthreads();  // this step's rows are there, and the last step's have been read
      ForgetThread();
      LoadSlot(PreviousSlot(read_slot_));
      ForgetThread();
      if constexpr (kOwnValues) CommitCopies();
      if constexpr (kDequantizes) {
        DequantizeSlice<Traits::kHeadDimQk>();
        __syncthreads();
        ForgetThread();
      }
      if (is_first) ReadQ(q);
      MultiplyQk(q);
      if constexpr (kOwnValues) WaitCopies<kSlots - 2>();
      __syncthreads();  // the scores are complete; the step's keys have been read, its values are
                        // there
      if constexpr (kOwnValues) {
        LoadSlot(read_slot_);
        read_slot_ = NextSlot(read_slot_);
      }
      if (is_first && IsMine(index_ + 1)) LoadQ(index_ + 1);
      CommitCopies();

      ForgetThread();
      Tile s;
      Probabilities p;
      ReadScores(s);
      const VisibleSpan span = shared_.control.spans[Warp()];
      const KvStep<Traits> step(p_, pos, item.kv_end());
      const int begin = step.begin();
      const bool seen_by_all = begin >= span.all_begin && begin + kStep <= span.all_end;
      const Stage stage(p_, index_, ItemKeyScale());
      stage.Apply(RowMajorLayout<1, kSTiles>(FirstRow(), Lane()), begin, seen_by_all,
                  step.is_masked(), s);
      UpdateMax<Traits>(stage.scale(), s, state);
      Exponentiate<Traits>(stage.scale(), s, state, p);
      if constexpr (kOwnValues && kDequantizes) {
        ForgetThread();
        DequantizeSlice<Traits::kHeadDimVo>();
        __syncthreads();
      }
      if constexpr (kRowsMayDiffer<Traits>) {
        const bool by_mask = Stage::Variant::kHasMask && step.is_masked();
        if (by_mask || (!seen_by_all && item.qo_len() > 1))
          IsolateNonFinite(begin, step.is_masked(), state);
      }
      ForgetThread();
      MultiplyPv(p, state);
      read_slot_ = NextSlot(read_slot_);
    }
    steps_ = CeilDiv(end_of_steps - first_step, kStep);
  }

  __device__ __forceinline__ float ItemKeyScale() const {
    if constexpr (kDequantizes) return shared_.control.key_scales[Warp()];
    return 1.0f;
  }

  // --- qk ---

  // Computes this warp's part of the scores.
  __device__ __forceinline__ void MultiplyQk(const QFragments& q) {
    float s[kChains][kPartTiles][4] = {};
    const u32 k = StepAddress() + FirstToken() * Row::kPitch + KMajorOffset() + FirstQkStep() * 32;
    if constexpr (kPartTiles == 1) {
#pragma unroll
      for (int kk = 0; kk < kPartSteps; kk += 2) {
        if (!HasQkStep(kk)) continue;
        u32 b[4];
        LoadMatrix4(b, k + kk * 32);
        E::Mma(s[0][0], q[kk], b[0], b[1]);
        if (kk + 1 < kPartSteps && HasQkStep(kk + 1)) E::Mma(s[1][0], q[kk + 1], b[2], b[3]);
      }
    } else {
#pragma unroll
      for (int kk = 0; kk < kPartSteps; ++kk) {
        if (!HasQkStep(kk)) continue;
#pragma unroll
        for (int j = 0; j < kPartTiles; j += 2) {
          u32 b[4];
          LoadMatrix4(b, k + j * 8 * Row::kPitch + kk * 32);
          E::Mma(s[kk % kChains][j], q[kk], b[0], b[1]);
          E::Mma(s[kk % kChains][j + 1], q[kk], b[2], b[3]);
        }
      }
    }
    float (&scores)[kTileQ][kStep + 8] = shared_.scores[Part() / kTokenParts];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float* row = scores[FirstRow() + 8 * h + Lane() / 4] + FirstToken() + 2 * (Lane() % 4);
#pragma unroll
      for (int j = 0; j < kPartTiles; ++j) {
        float2 x = make_float2(s[0][j][2 * h], s[0][j][2 * h + 1]);
        if constexpr (kChains == 2) {
          x.x += s[1][j][2 * h];
          x.y += s[1][j][2 * h + 1];
        }
        *reinterpret_cast<float2*>(row + 8 * j) = x;
      }
    }
  }

  // Loads all scores of the rows, laid out as accumulators of mma.sync.
  __device__ __forceinline__ void ReadScores(Tile& s) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = FirstRow() + 8 * h + Lane() / 4, column = 2 * (Lane() % 4);
#pragma unroll
      for (int j = 0; j < kSTiles; ++j) {
        float2 sum = *reinterpret_cast<const float2*>(&shared_.scores[0][row][8 * j + column]);
#pragma unroll
        for (int part = 1; part < kDepthParts; ++part) {
          const float2 x =
              *reinterpret_cast<const float2*>(&shared_.scores[part][row][8 * j + column]);
          sum.x += x.x;
          sum.y += x.y;
        }
        s[0][j][2 * h] = sum.x;
        s[0][j][2 * h + 1] = sum.y;
      }
    }
  }

  // --- pv ---

  // Whether o has the j-th tile of this warp.
  __device__ bool HasTile(int j) const {
    return kAllColumns || Part() * kColumns + 8 * j < Traits::kHeadDimVo;
  }

  // The contribution to a row of a value that is not finite. With mla the value is also in the
  // row's logit: unless it is NaN, the logit is -inf and P is 0, and 0 * inf is NaN. With a soft
  // cap the logit is finite.
  __device__ __forceinline__ static float Marked(u32 bits) {
    return (kOwnValues || Stage::kChangesScores ? 1.0f : 0.0f) * E::ToFloat(static_cast<u16>(bits));
  }
  // As TilePath::IsolateNonFinite. The keys have been read by now.
  __device__ __forceinline__ void IsolateNonFinite(int pos, bool is_masked, State& state) {
    constexpr int kVectors = Traits::kHeadDimVo / 8;
    unsigned char* step = StepRows();
    u32 not_finite = 0;
#pragma unroll 2
    for (int i = thread_; i < kStep * kVectors; i += kThreads) {
      const uint4 x = *reinterpret_cast<const uint4*>(step + i / kVectors * ValueRow::kPitch +
                                                      i % kVectors * 16);
      not_finite = E::FmaX2(x.x, 0, not_finite);  // 0 * x is NaN unless x is finite
      not_finite = E::FmaX2(x.y, 0, not_finite);
      not_finite = E::FmaX2(x.z, 0, not_finite);
      not_finite = E::FmaX2(x.w, 0, not_finite);
    }
    if (!__syncthreads_or((not_finite & 0x7fff7fff) != 0)) return;
    MarkRows(pos, is_masked, step, state);
    __syncthreads();
#pragma unroll 1
    for (int i = thread_; i < kStep * kVectors * 8; i += kThreads) {
      u16* x =
          reinterpret_cast<u16*>(step + i / (kVectors * 8) * ValueRow::kPitch) + i % (kVectors * 8);
      if (!E::IsFinite(*x)) *x = 0;
    }
    __syncthreads();
  }

  __device__ __forceinline__ void MarkRows(int pos, bool is_masked, const unsigned char* step,
                                           State& state) const {
    const unsigned char* columns = step + Part() * (kColumns * E::kBytes) + Lane() % 4 * 4;
    OneKeyLayout<2> layout;
    VisibleSpan spans[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      layout.rows[h] = FirstRow() + h * 8 + Lane() / 4;
      spans[h] = SpanOfRow<Traits>(p_, ItemRecord(p_, index_), layout.rows[h]);
    }
#pragma unroll 1
    for (int token = 0; token < kStep; ++token) {
      bool sees[2][1];
      Stage(p_, index_).Look(layout, pos + token, is_masked, [&](int h) { return spans[h]; }, sees);
#pragma unroll
      for (int j = 0; j < kOTiles; ++j) {
        if (!HasTile(j)) continue;
        const u32 x = *reinterpret_cast<const u32*>(columns + token * ValueRow::kPitch + j * 16);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const u32 bits = c % 2 == 0 ? x : x >> 16;
          if (sees[c / 2][0] && !E::IsFinite(bits)) state.o[0][j][c] += Marked(bits);
        }
      }
    }
  }

  __device__ __forceinline__ void MultiplyPv(const Probabilities& p, State& state) const {
    const u32 v =
        StepAddress() + RowMajorOffset(ValueRow::kPitch) + Part() * (kColumns * E::kBytes);
#pragma unroll
    for (int kk = 0; kk < kStep / 16; ++kk) {
#pragma unroll
      for (int j = 0; j < kOTiles; j += 2) {
        if (!HasTile(j)) continue;
        u32 b[4];
        LoadMatrix4Transposed(b, v + kk * 16 * ValueRow::kPitch + j * 16);
        E::Mma(state.o[0][j], p[0][kk], b[0], b[1]);
        E::Mma(state.o[0][j + 1], p[0][kk], b[2], b[3]);
      }
    }
  }

  // --- finish ---

  __device__ __forceinline__ void Finish(State& state) {
    const ItemRecord item(p_, index_);
    WriteRows(item, state);
    const int num_groups = item.num_groups();
    if (num_groups > 0) {
      ArriveAndMerge<Traits>(p_, index_, item.merge_idx(), num_groups, shared_.control.merge);
    }
  }

  // A row's four lanes store 16 or 32 neighbouring bytes at a time; o is small beside what was read
  // for it. All warps of a row know its state; the first one writes it.
  __device__ __forceinline__ void WriteRows(const ItemRecord& item, State& state) const {
    const int num_rows = item.qo_len() * kGroupSize;
    const RowMap<kGroupSize> map(p_, item.first_token(), item.kv_head());
    const int partial_row = item.partial_row();
    const bool final = partial_row < 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float sum = QuadSum(state.sum[0][h]);
      const int row = FirstRow() + h * 8 + Lane() / 4;
      if (row >= num_rows || map.QoHead(row) >= p_.num_qo_heads) continue;
      const i64 at = final ? map.Index(row) : partial_row + row;
      float o_scale =
          WriteState<Traits>(p_, final, at, map.QoHead(row), Part() == 0 && Lane() % 4 == 0,
                             {state.max_log4[0][h], sum});
      if (kDequantizes && final) o_scale = WithValueScale<Traits>(p_, item.kv_head(), o_scale);
      const i64 first = at * Traits::kHeadDimVo + Part() * kColumns + 2 * (Lane() % 4);
      float* partial = p_.partial_o + first;
      u16* o = static_cast<u16*>(p_.o) + first;
#pragma unroll
      for (int j = 0; j < kOTiles; ++j) {
        if (!HasTile(j)) continue;
        const float left = state.o[0][j][2 * h] * o_scale;
        const float right = state.o[0][j][2 * h + 1] * o_scale;
        if (final) {
          *reinterpret_cast<u32*>(o + 8 * j) = E::Pack(left, right);
        } else {
          *reinterpret_cast<float2*>(partial + 8 * j) = make_float2(left, right);
        }
      }
    }
  }

  const AttentionParams& p_;
  Shared& shared_;
  int thread_;      // threadIdx.x; opaque to the code of other phases
  int index_;       // item whose steps run
  int steps_;       // of the item before
  int load_index_;  // item of the next load
  int load_pos_;    // kv offset of the next load; kNone behind the items of this path
  i32 page_;        // in lane l, the page of token l of the warp's slice
  // With kOwnValues: in lane l, the row of token l of the step whose keys were loaded last, and
  // whether its values come next.
  u32 value_row_;
  bool loads_values_;
  u32 read_slot_;
};

// One CTA a multiprocessor: its 8 warps may use all registers.
template <class Traits>
struct WideBody : QueueBody<Traits, WidePath, 1> {};

}  // namespace jax_attn
