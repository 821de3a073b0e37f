// Multi-head latent attention on Hopper, for tiles of 16 or 32 rows: wgmma with swapped operands.
//
// Few rows are bound by memory. A step always has 64 latent rows, so these are the 64 rows of a
// wgmma, and heads are its columns: S^T = K Q^T and O^T = V^T P^T. Both products use the same tile
// of shared memory as operand a, once as its rows lie and once transposed. One consumer warpgroup
// computes everything and releases a step's memory as soon as it has multiplied it. A producer
// warpgroup copies latent rows, and another one q, so that the rows of an item do not wait for its
// q. Two steps fit beside q. Measured (H200, 128 x 4096 tokens of 16 heads): steps that land and
// are released by 1 or 3 blocks of 64 columns took 182 and 187 us, whole steps 182.
#pragma once

#include "cuda/common/codec.cuh"
#include "cuda/common/logits.cuh"
#include "cuda/common/partials.cuh"
#include "cuda/sm90/mla_producer.cuh"
#include "cuda/sm90/tile_rows.cuh"

namespace jax_attn {

// Warpgroup 0 of a CTA copies latent rows, 1 copies q, 2 is the consumer.
struct HopperMlaDecodeRoles {
  static constexpr int kGroupThreads = 128, kGroupWarps = kGroupThreads / kWarpSize;
  static constexpr int kNumThreads = 3 * kGroupThreads;
  static constexpr int kConsumer = 2 * kGroupThreads;  // its first thread
  // The consumer holds o; 64K registers are more than enough.
  static constexpr int kProducerRegisters = 56;
  static constexpr int kConverterRegisters = 136;  // of warpgroup 0, which holds the next step of
                                                   // quantized rows
  static constexpr int kConsumerRegisters = 240;
};

// The consumer warpgroup as a group of threads.
struct HopperMlaDecodeConsumers {
  static constexpr int kNamedBarrier = 1;
  __device__ static int thread() { return Opaque(threadIdx.x) - HopperMlaDecodeRoles::kConsumer; }
  __device__ static int num_threads() { return HopperMlaDecodeRoles::kGroupThreads; }
  __device__ static void Sync() { SyncNamed(kNamedBarrier, num_threads()); }
  // Whether x holds for any of the threads.
  __device__ static bool SyncOr(bool x) { return SyncNamedOr(kNamedBarrier, num_threads(), x); }
};

// The key scale of an item, for each warp of the consumer. In a register it would spill.
template <bool kHas>
struct KeyScales {
  float scales[HopperMlaDecodeRoles::kGroupWarps];
  __device__ __forceinline__ void Keep(int warp, float scale) {
    __syncwarp();  // the scale of the item before has been read
    if (threadIdx.x % kWarpSize == 0) scales[warp] = scale;
    __syncwarp();
  }
  __device__ float Of(int warp) const { return scales[warp]; }
};
template <>
struct KeyScales<false> {
  __device__ void Keep(int, float) {}
  __device__ float Of(int) const { return 1.0f; }
};

template <class Traits>
struct HopperMlaDecodeShape : LatentShape<Traits> {
  using Base = LatentShape<Traits>;
  using Base::kBlocks, Base::kStep;
  using Roles = HopperMlaDecodeRoles;
  static constexpr bool kReadsOnce = true;  // all heads are one block, so no other CTA reads the
                                            // rows
  static constexpr int kMaxRows = Max(Traits::kTileQ0, Traits::kTileQ1);
  static_assert(kMaxRows <= 32 && Traits::kTileQ0 % 16 == 0 && Traits::kTileQ1 % 16 == 0,
                "o^T of 512 columns and 32 rows are 128 registers");

  // Steps are loaded and released as a whole.
  static constexpr int kUnits = 1;
  using Slot = SwizzledTile<Traits::kHeadDimQk, kStep>;
  using Ring = Slot;
  // All blocks at once: the other slot is on its way meanwhile.
  __device__ static constexpr int NumBlocks(int) { return kBlocks; }

  template <int kRows>
  using Q = SwizzledTile<Traits::kHeadDimQk, kRows>;
  // P of a step, or 64 columns of o: 128 bytes for each row of q.
  template <int kRows>
  using P = SwizzledTile<64, kRows>;

  static constexpr int kControlBytes = 3 << 10;
  static constexpr int kSlots =  // beyond 8 nothing is gained
      Min(8, (CtaSmemBudget(Traits::kArch, 1) - Q<kMaxRows>::kBytes - 2 * P<kMaxRows>::kBytes -
              kControlBytes) /
                 Slot::kBytes);
  static_assert(kSlots > 1, "the next step comes in while one is multiplied");

  struct RingPosition {
    RingCursor<kSlots> cursor;
    __device__ __forceinline__ void StartStep(int) {}
    __device__ int FirstBlock(int) const { return 0; }
    __device__ int Barrier(int) const { return cursor.slot; }
    __device__ u32 parity() const { return cursor.parity; }
    __device__ int Block(int, int i) const {
      return cursor.slot * Slot::kBytes + i * Slot::kBlockBytes;
    }
    __device__ __forceinline__ void NextUnit() {}
    __device__ __forceinline__ void NextStep() { cursor.Advance(); }
  };

  struct Barriers {
    u64 full_q, empty_q;
    u64 full[kSlots], empty[kSlots];
  };
  struct Shared {
    alignas(1024) unsigned char q[Q<kMaxRows>::kBytes];
    alignas(1024) unsigned char ring[kSlots * Slot::kBytes];
    // Two tiles in alternation, so that no barrier must say that the other warps' products have
    // read the last one.
    alignas(1024) unsigned char p[2][P<kMaxRows>::kBytes];
    float rows[4][kMaxRows];  // maxima or sums of the consumer's warps
    Barriers barriers;
    MergeScratch merge;
    KeyScales<kQuantizedLatent<Traits>> key_scales;
  };

  __device__ __forceinline__ static void Init(Shared& shared, i32* counters) {
    shared.merge.counters = counters;
    Barriers& b = shared.barriers;
    InitBarrier(SharedAddress(&b.full_q), Roles::kGroupThreads);
    InitBarrier(SharedAddress(&b.empty_q), Roles::kGroupWarps);
    for (int i = 0; i < kSlots; ++i) {
      // Each thread of the producer arrives for its copies, each warp for its conversions.
      InitBarrier(SharedAddress(b.full + i),
                  kQuantizedLatent<Traits> ? Roles::kGroupWarps : Roles::kGroupThreads);
      InitBarrier(SharedAddress(b.empty + i), Roles::kGroupWarps);
    }
  }
};

// --- producers ---

// Converts float8 latent rows to 16 bits on their way to a slot. The next step waits for memory in
// registers, as shared memory has no room for it beside q and the ring. The consumer finds the same
// as with 16-bit rows, so the bits are the same.
template <class Traits>
class LatentDequantizer {
 public:
  using Shape = HopperMlaDecodeShape<Traits>;
  using Shared = typename Shape::Shared;

  __device__ __forceinline__ LatentDequantizer(const AttentionParams& p, Shared& shared)
      : shared_(shared), pool_(LatentPool<Traits>(p)) {}

  // Loads the first step. lane_row: pool row of the token that the lane looked up, or kNoRow.
  __device__ __forceinline__ void Begin(u32 lane_row) {
    FindRows(lane_row);
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) step_[n] = Load(n);
  }

  // Converts the loaded step once its slot is free, and loads the step that `next` is at, if there
  // is one.
  template <class Steps>
  __device__ __forceinline__ void Convert(const Steps& next) {
    WaitBarrier(SharedAddress(shared_.barriers.empty + cursor_.slot), cursor_.parity ^ 1);
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      Store(step_[n], cursor_.slot * Slot::kBytes + n * Slot::kBlockBytes);
      if (n + 1 == kBlocks) {
        __syncwarp();  // one arrival a warp
        if (Lane() == 0) ArriveBarrier(SharedAddress(shared_.barriers.full + cursor_.slot));
      }
      if (n == 0) FindRows(next.has_item() ? next.Row() : kNoRow);
      step_[n] = Load(n);
    }
    cursor_.Advance();
  }

 private:
  using Slot = typename Shape::Slot;
  static constexpr int kBlocks = Shape::kBlocks;        // of 64 columns
  static constexpr int kRows = Shape::kWarpTokens / 8;  // rows of a block of which a lane has 16
                                                        // values
  struct Quantized {
    uint4 rows[kRows];
  };

  // As in Float8Dequantizer: four lanes have 64 values of a row. Shared memory serves eight lanes
  // at once; their rows are chosen so that they hit different banks.
  __device__ static int Lane() { return threadIdx.x % kWarpSize; }
  __device__ static int Row() { return Lane() / 8 ^ Lane() / 4 % 2 * 5; }
  __device__ static int Chunk() { return Lane() % 4; }

  __device__ __forceinline__ void FindRows(u32 lane_row) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const u32 row = __shfl_sync(kFullWarp, lane_row, Row() + 8 * i);
      from_[i] = nullptr;
      if (row != kNoRow) {
        from_[i] = pool_ + static_cast<u64>(row) * kLatentRowBytes<Traits> + Chunk() * 16;
      }
    }
  }

  __device__ __forceinline__ Quantized Load(int block) const {
    Quantized x;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      x.rows[i] = LoadRow16If(from_[i] != nullptr, from_[i] + block * 64);
    }
    return x;
  }

  // block: byte offset in the ring.
  __device__ __forceinline__ void Store(const Quantized& quantized, int block) const {
    unsigned char* tile = shared_.ring + block;
    const int to = threadIdx.x / kWarpSize * (Shape::kWarpTokens * 128) + Row() * 128 +
                   (2 * Chunk() ^ Row()) * 16;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      // Converted only here: earlier it would take twice as many registers.
      const uint4 x = Opaque(quantized.rows[i]);
      *reinterpret_cast<uint4*>(tile + to + i * 1024) = DequantizeFloat8<Traits>(x.x, x.y);
      *reinterpret_cast<uint4*>(tile + (to ^ 16) + i * 1024) = DequantizeFloat8<Traits>(x.z, x.w);
    }
  }

  Shared& shared_;
  const char* pool_;                  // row 0 of the layer
  RingCursor<Shape::kSlots> cursor_;  // slot of the step that is converted
  const char* from_[kRows];           // the step's rows, at the lane's chunk; null: no row
  Quantized step_[kBlocks];
};

template <class Traits>
class HopperMlaDecodeProducer {
 public:
  using Shape = HopperMlaDecodeShape<Traits>;

  __device__ __forceinline__ static void Run(const AttentionParams& p,
                                             typename Shape::Shared& shared, int begin, int end) {
    LatentSteps<Traits, Shape> steps(p);
    steps.Start(begin, end);
    if constexpr (kQuantizedLatent<Traits>) {
      Convert(p, shared, steps);
      return;
    }
    LatentRows<Traits, Shape> rows(p, shared);  // the layer is loaded beside the first page
    while (steps.has_item()) {
      const bool has_step = steps.has_step();
      const int step_offset = steps.step_offset();
      const u32 row = has_step ? steps.Row() : kNoRow;
      if (has_step) steps.PrefetchPages();
      steps.Next();
      if (has_step) rows.LoadStep(row, step_offset);
    }
  }

 private:
  __device__ __forceinline__ static void Convert(const AttentionParams& p,
                                                 typename Shape::Shared& shared,
                                                 LatentSteps<Traits, Shape>& steps) {
    const auto pass_items = [&] {
      while (steps.has_item() && !steps.has_step()) steps.Next();
    };
    LatentDequantizer<Traits> rows(p, shared);  // the layer is loaded beside the first page
    pass_items();
    if (!steps.has_item()) return;
    rows.Begin(steps.Row());
    while (steps.has_item()) {
      steps.PrefetchPages();
      steps.Next();
      pass_items();
      rows.Convert(steps);
    }
  }
};

// Loads q of every item that has steps.
template <class Traits>
class HopperMlaDecodeQLoader {
 public:
  using Shape = HopperMlaDecodeShape<Traits>;
  using Shared = typename Shape::Shared;

  __device__ __forceinline__ static void Run(const AttentionParams& p, Shared& shared, int begin,
                                             int end) {
    typename Shape::Barriers& barriers = shared.barriers;
    u32 parity = 0;
#pragma unroll 1
    for (int index = begin; index < end; ++index) {
      const ItemRecord item(p, index);
      if (FirstStep<Shape::kStep>(item) >= item.kv_end()) continue;
      WaitBarrier(SharedAddress(&barriers.empty_q), parity ^ 1);
      if (Traits::kNumTiles == 1 || item.tile() == 0) {
        Load<Traits::kTileQ0>(p, shared, item);
      } else {
        Load<Traits::kTileQ1>(p, shared, item);
      }
      ArriveBarrierAfterCopies(SharedAddress(&barriers.full_q));
      parity ^= 1;
    }
  }

 private:
  // Rows that do not exist are zeros.
  template <int kRows>
  __device__ __forceinline__ static void Load(const AttentionParams& p, Shared& shared,
                                              const ItemRecord& item) {
    using Q = typename Shape::template Q<kRows>;
    const int num_rows = item.qo_len() * Traits::kGroupSize;
    const QueryRows<Traits::kGroupSize> rows(p, item.first_token(), item.kv_head(),
                                             item.is_shared());
    const int chunk = threadIdx.x % 8;
#pragma unroll
    for (int i = 0; i < kRows; i += 16) {
      const int row = i + threadIdx.x / 8 % 16;
      const bool valid = row < num_rows && rows.map.QoHead(row) < p.num_qo_heads;
      const u16* from = static_cast<const u16*>(p.q) + chunk * 8;
      if (valid) from += rows.Index(row) * Traits::kHeadDimQk;
      const u32 to = SharedAddress(shared.q) + row * 128 + (chunk ^ row % 8) * 16;
#pragma unroll
      for (int block = 0; block < Q::kBlocks; ++block) {
        CopyAsync16(to + block * Q::kBlockBytes, from + block * 64, valid);
      }
    }
  }
};

// --- consumer ---

// One item of up to kRows rows in the consumer's registers. Columns of a wgmma accumulator are rows
// of q, in j tiles of 8 rows; its rows are tokens of S^T, or columns of O^T. A thread has rows
// Row(j, c), and tokens or columns Across(h) of them.
template <class Traits, int kRows>
class HopperMlaDecodeItem {
 public:
  using Shape = HopperMlaDecodeShape<Traits>;
  using Shared = typename Shape::Shared;
  using Team = HopperMlaDecodeConsumers;
  using E = Element<Traits::kDtype>;
  using Q = typename Shape::template Q<kRows>;
  using P = typename Shape::template P<kRows>;
  using Slot = typename Shape::Slot;
  using Cursor = RingCursor<Shape::kSlots>;

  __device__ __forceinline__ HopperMlaDecodeItem(const AttentionParams& p, Shared& shared,
                                                 int index)
      : p_(p), shared_(shared), index_(index), thread_(Team::thread()) {
    shared.key_scales.Keep(Warp(), KeyScale<Traits>(p, index));
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        max_log4_[j][c] = -Infinity();
        sum_[j][c] = 0.0f;
      }
    }
#pragma unroll
    for (int block = 0; block < kValueBlocks; ++block) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) o_[block][j][c] = 0.0f;
      }
    }
  }

  // Runs all steps. cursor: the next slot.
  __device__ __forceinline__ void RunSteps(Cursor& cursor) {
    const ItemRecord item(p_, index_);
    const VisibleSpan span = SpanOfItem<Traits>(p_, item);
    const int end = item.kv_end();
    u32 p = SharedAddress(shared_.p[0]);
#pragma unroll 1
    for (int pos = FirstStep<kStep>(item); pos < end; pos += kStep) {
      const KvStep<Traits> step(p_, pos, end);
      const int begin = step.begin();
      Scores s;
      MultiplyQk(cursor, s);
      if (pos + kStep >= end) ReleaseQ();
      const bool seen_by_all = begin >= span.all_begin && begin + kStep <= span.all_end;
      const KeyMajorLayout<1, kTiles> layout(Warp(), Lane());
      ItemStage().Apply(layout, begin, seen_by_all, step.is_masked(), s);
      Exponentiate(s, p);
      if constexpr (kRowsMayDiffer<Traits>) {
        const bool by_mask = Traits::Variant::kHasMask && step.is_masked();
        if (by_mask || (!seen_by_all && item.qo_len() > 1))
          IsolateNonFinite(cursor, item, begin, step.is_masked());
      }
      MultiplyPv(cursor, p);
      cursor.Advance();
      p ^= SharedAddress(shared_.p[0]) ^ SharedAddress(shared_.p[1]);
    }
  }

  __device__ __forceinline__ void Write() {
    const ItemRecord item(p_, index_);
    AddSums();
    const int num_rows = item.qo_len() * Traits::kGroupSize;
    const RowMap<Traits::kGroupSize> map(p_, item.first_token(), item.kv_head());
    const int partial_row = item.partial_row();
    const bool final = partial_row < 0;
    const bool writes_states = Warp() == 0 && Lane() < 4;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int row = Row(j, c);
        const bool exists = row < num_rows && map.QoHead(row) < p_.num_qo_heads;
        const i64 at = exists ? final ? map.Index(row) : partial_row + row : 0;
        float o_scale = WriteState<Traits>(p_, final, at, exists ? map.QoHead(row) : 0,
                                           exists && writes_states, {max_log4_[j][c], sum_[j][c]});
        if (final) o_scale = WithValueScale<Traits>(p_, item.kv_head(), o_scale);
        if (!final && !exists) continue;
        float* partial = p_.partial_o + at * Traits::kHeadDimVo;
#pragma unroll
        for (int block = 0; block < kValueBlocks; ++block) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            float& x = o_[block][j][2 * h + c];
            if (final) {
              x *= o_scale;
            } else {
              partial[block * 64 + Across(h)] = x;
            }
          }
        }
      }
    }
    if (final) WriteFinal(num_rows, map);
  }

 private:
  static constexpr int kStep = Shape::kStep;
  static constexpr int kTiles = kRows / 8;
  static constexpr int kValueBlocks = Shape::kValueBlocks;
  using Scores = float[kTiles][4];
  using Product = Wgmma<kRows, Traits::kDtype>;
  using Stage = LogitStage<Traits>;

  __device__ __forceinline__ Stage ItemStage() const {
    return Stage(p_, index_, shared_.key_scales.Of(Warp()));
  }
  __device__ int Lane() const { return thread_ % kWarpSize; }
  __device__ int Warp() const { return thread_ / kWarpSize; }
  __device__ int Row(int j, int c) const { return 8 * j + 2 * (Lane() % 4) + c; }
  __device__ int Across(int h) const { return 16 * Warp() + 8 * h + Lane() / 4; }

  // --- products ---

  // Two chains of sums: short products would wait for each other.
  __device__ __forceinline__ void MultiplyQk(const Cursor& cursor, Scores& s) const {
    Scores chains[2] = {};
    PinBlocks(chains);
    const u64 q = Q::Descriptor(Opaque(SharedAddress(shared_.q)), 0);
    const u64 k = Slot::Descriptor(SlotAddress(cursor), 0);
    WaitBarrier(SharedAddress(shared_.barriers.full + cursor.slot), cursor.parity);
    FenceSharedForWgmma();
    WgmmaFence();
#pragma unroll
    for (int kk = 0; kk < 4 * Shape::kBlocks; ++kk) {
      Product::SharedA(chains[kk % 2], Slot::AlongK(k, kk), Q::AlongK(q, kk), true);
    }
    WgmmaCommit();
    WgmmaWait<0>();
    PinBlocks(chains);
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) s[j][c] = chains[0][j][c] + chains[1][j][c];
    }
  }

  // Adds P V of a step to o, and releases the step.
  __device__ __forceinline__ void MultiplyPv(const Cursor& cursor, u32 p) {
    PinBlocks(o_);
    WgmmaFence();
    const u64 v = Slot::TransposedDescriptor(SlotAddress(cursor), 0);
    const u64 b = P::Descriptor(p, 0);
#pragma unroll
    for (int kk = 0; kk < kStep / 16; ++kk) {
#pragma unroll
      for (int block = 0; block < kValueBlocks; ++block) {
        const u64 a = Slot::AlongRows(Slot::Right(v, block), kk);
        Product::TransposedSharedA(o_[block], a, P::AlongK(b, kk), true);
      }
    }
    WgmmaCommit();
    WgmmaWait<0>();
    PinBlocks(o_);
    Release(shared_.barriers.empty + cursor.slot);
  }

  __device__ u32 SlotAddress(const Cursor& cursor) const {
    return SharedAddress(shared_.ring) + cursor.slot * Slot::kBytes;
  }
  __device__ __forceinline__ void ReleaseQ() const { Release(&shared_.barriers.empty_q); }
  __device__ __forceinline__ void Release(const u64* barrier) const {
    __syncwarp();  // one arrival a warp
    if (Lane() == 0) ArriveBarrier(SharedAddress(barrier));
  }

  // --- softmax ---

  // Writes P of a step to shared memory, and adds up its sums. A running max rarely grows
  // (kMaxSlack) after the first step. The barrier that the products wait for anyway tells all
  // threads.
  // Scores of far rows become FarScore.
  __device__ __forceinline__ void Exponentiate(Scores& s, u32 p) {
    const float scale = ItemStage().scale();
    Scores x;
    bool followed = false;
#pragma unroll 1
    while (true) {
      bool grows = false;
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float base = BaseOf(max_log4_[j][c]);
          // False for -inf against -inf.
          grows |= Stage::kNormalizes && (fmaxf(s[j][c], s[j][2 + c]) * (0.5f * scale) >
                                              max_log4_[j][c] + 0.5f * kMaxSlack ||
                                          IsFar(max_log4_[j][c]));
          x[j][c] = Stage::Weight(s[j][c], scale, base);
          x[j][2 + c] = Stage::Weight(s[j][2 + c], scale, base);
        }
      }
      StoreTransposed(p, x);
      FenceSharedForWgmma();
      if (!Team::SyncOr(grows && !followed)) break;
      FollowMaxima(s, scale);
      followed = true;
    }
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) sum_[j][c] += x[j][c] + x[j][2 + c];
    }
  }

  // Moves the running max of the rows that need it; sums and o follow.
  __device__ __forceinline__ void FollowMaxima(Scores& s, float scale) {
    auto& maxima = shared_.rows;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float x = fmaxf(s[j][c], s[j][2 + c]);
#pragma unroll
        for (int mask = 4; mask < kWarpSize; mask *= 2) {
          x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, mask));
        }
        if (Lane() < 4) maxima[Warp()][Row(j, c)] = x * (0.5f * scale);
      }
    }
    Team::Sync();
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float step_max = maxima[0][Row(j, c)];
#pragma unroll
        for (int warp = 1; warp < 4; ++warp) step_max = fmaxf(step_max, maxima[warp][Row(j, c)]);
        const float old_max = max_log4_[j][c];
        if (step_max > old_max + 0.5f * kMaxSlack) max_log4_[j][c] = step_max;
        const float factor = StateWeight(old_max, max_log4_[j][c]);
        if (Stage::kNormalizes && IsFar(max_log4_[j][c])) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            s[j][2 * h + c] = FarScore(s[j][2 * h + c], scale, 1.0f / scale, max_log4_[j][c]);
          }
        }
        sum_[j][c] *= factor;
#pragma unroll
        for (int block = 0; block < kValueBlocks; ++block) {
          o_[block][j][c] *= factor;
          o_[block][j][2 + c] *= factor;
        }
      }
    }
    // The next barrier comes before any thread writes maxima or sums again.
  }

  // Stores accumulators as 16-bit rows of q, 64 tokens or columns each.
  __device__ __forceinline__ void StoreTransposed(u32 tile, const Scores& x) const {
    const int lane = Lane();
    // Lanes 0 to 15 give addresses of 8 rows of each of two matrices, Across(0) and Across(1).
    const int chunk = 2 * Warp() + lane / 8 % 2;
    const u32 to = tile + lane % 8 * 128 + (chunk ^ lane % 8) * 16;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      StoreMatrix2Transposed(to + j * 1024, E::Pack(x[j][0], x[j][1]), E::Pack(x[j][2], x[j][3]));
    }
  }

  // Handles values that are not finite in a step that some rows see more of than others. Such a
  // value must reach the rows that see it and no other, but 0 * NaN and 0 * inf are NaN. If there
  // is one, it is added here to the rows that see it, and replaced by 0. All warps have read the
  // keys, as they met since. A thread handles half of a row of each block of 64 columns; columns
  // beyond v do no harm.
  __device__ __forceinline__ void IsolateNonFinite(const Cursor& cursor, const ItemRecord& item,
                                                   int pos, bool is_masked) {
    unsigned char* slot = shared_.ring + cursor.slot * Slot::kBytes;
    auto values = [&](int block, int i) -> uint4& {
      return *reinterpret_cast<uint4*>(slot + block * Slot::kBlockBytes + thread_ * 64 + i * 16);
    };
    u32 not_finite = 0;
#pragma unroll 1
    for (int block = 0; block < kValueBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint4 x = values(block, i);
        not_finite = E::FmaX2(x.x, 0, not_finite);  // 0 * x is NaN unless x is finite
        not_finite = E::FmaX2(x.y, 0, not_finite);
        not_finite = E::FmaX2(x.z, 0, not_finite);
        not_finite = E::FmaX2(x.w, 0, not_finite);
      }
    }
    if (!Team::SyncOr((not_finite & 0x7fff7fff) != 0)) return;
    MarkRows(slot, item, pos, is_masked);
    Team::Sync();
#pragma unroll 1
    for (int block = 0; block < kValueBlocks; ++block) {
#pragma unroll 1
      for (int i = 0; i < 4; ++i) {
        uint4& x = values(block, i);
        x = make_uint4(FiniteOrZero(x.x), FiniteOrZero(x.y), FiniteOrZero(x.z), FiniteOrZero(x.w));
      }
    }
    FenceSharedForWgmma();
    Team::Sync();
  }
  __device__ __forceinline__ void MarkRows(const unsigned char* slot, const ItemRecord& item,
                                           int pos, bool is_masked) {
#pragma unroll 1
    for (int token = 0; token < kStep; ++token) {
      OneKeyLayout<2 * kTiles> layout;
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) layout.rows[i] = Row(i / 2, i % 2);
      bool sees[2 * kTiles][1];
      Stage(p_, index_)
          .Look(
              layout, pos + token, is_masked,
              [&](int i) { return SpanOfRow<Traits>(p_, item, layout.rows[i]); }, sees);
#pragma unroll
      for (int block = 0; block < kValueBlocks; ++block) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int chunk = Across(h) / 8 ^ token % 8;
          const u16 x = *reinterpret_cast<const u16*>(slot + block * Slot::kBlockBytes +
                                                      token * 128 + chunk * 16 + Across(h) % 8 * 2);
          if (E::IsFinite(x)) continue;
          // Such a value makes its logit -inf, unless it is NaN, and its P 0. With a soft cap the
          // logit is finite.
          const float mark = (Stage::kChangesScores ? 1.0f : 0.0f) * E::ToFloat(x);
#pragma unroll
          for (int j = 0; j < kTiles; ++j) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              if (sees[2 * j + c][0]) o_[block][j][2 * h + c] += mark;
            }
          }
        }
      }
    }
  }
  __device__ static u32 FiniteOrZero(u32 x) {
    return (E::IsFinite(x) ? x & 0xffff : 0) | (E::IsFinite(x >> 16) ? x & 0xffff0000 : 0);
  }

  // --- results ---

  // Adds up sums over all tokens, in the same order in every thread.
  __device__ __forceinline__ void AddSums() {
    auto& sums = shared_.rows;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float x = sum_[j][c];
#pragma unroll
        for (int mask = 4; mask < kWarpSize; mask *= 2) {
          x += __shfl_xor_sync(kFullWarp, x, mask);
        }
        if (Lane() < 4) sums[Warp()][Row(j, c)] = x;
      }
    }
    Team::Sync();
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int row = Row(j, c);
        sum_[j][c] = (sums[0][row] + sums[1][row]) + (sums[2][row] + sums[3][row]);
      }
    }
    Team::Sync();  // P and sums have been read everywhere
  }

  // Writes final o, 64 columns at a time through shared memory: eight threads write 128 bytes of a
  // row.
  __device__ __forceinline__ void WriteFinal(int num_rows,
                                             const RowMap<Traits::kGroupSize>& map) const {
    const int first_row = thread_ / 8, chunk = thread_ % 8;
#pragma unroll
    for (int block = 0; block < kValueBlocks; ++block) {
      const unsigned char* tile = shared_.p[block % 2];
      StoreTransposed(SharedAddress(tile), o_[block]);
      Team::Sync();  // so the other tile has been read, too
#pragma unroll
      for (int i = 0; i < kRows; i += 16) {
        const int row = i + first_row;
        if (row >= num_rows || map.QoHead(row) >= p_.num_qo_heads) continue;
        u16* to = static_cast<u16*>(p_.o) + map.Index(row) * Traits::kHeadDimVo + block * 64;
        *reinterpret_cast<uint4*>(to + chunk * 8) =
            *reinterpret_cast<const uint4*>(tile + row * 128 + (chunk ^ row % 8) * 16);
      }
    }
    if (kValueBlocks % 2 == 1) Team::Sync();  // before the next item's P
  }

  const AttentionParams& p_;
  Shared& shared_;
  const int index_;
  const int thread_;
  float max_log4_[kTiles][2];  // running maxima, see Exponentiate
  float sum_[kTiles][2];       // over this thread's tokens only, until AddSums
  float o_[kValueBlocks][kTiles][4];
};

template <class Traits>
class HopperMlaDecodeConsumer {
 public:
  using Shape = HopperMlaDecodeShape<Traits>;
  using Shared = typename Shape::Shared;
  using Team = HopperMlaDecodeConsumers;

  __device__ __forceinline__ HopperMlaDecodeConsumer(const AttentionParams& p, Shared& shared)
      : p_(p), shared_(shared) {}

  __device__ __forceinline__ void Run(int begin, int end) {
#pragma unroll 1
    for (int index = begin; index < end; ++index) {
      RecordBegin<Traits>(p_, index, Team::thread());
      const ItemRecord item(p_, index);
      if (Traits::kNumTiles == 1 || item.tile() == 0) {
        RunItem<Traits::kTileQ0>(index);
      } else {
        RunItem<Max(Traits::kTileQ1, 16)>(index);
      }
      const int num_groups = item.num_groups();
      if (num_groups > 0) {
        ArriveAndMerge<Traits, Team>(p_, index, item.merge_idx(), num_groups, shared_.merge);
      }
      RecordEnd<Traits>(p_, index, Team::thread());
    }
  }

 private:
  template <int kRows>
  __device__ __forceinline__ void RunItem(int index) {
    const ItemRecord item(p_, index);
    HopperMlaDecodeItem<Traits, kRows> work(p_, shared_, index);
    if (FirstStep<Shape::kStep>(item) < item.kv_end()) {
      WaitBarrier(SharedAddress(&shared_.barriers.full_q), q_parity_);
      q_parity_ ^= 1;
      work.RunSteps(cursor_);
    }
    work.Write();
  }

  const AttentionParams& p_;
  Shared& shared_;
  RingCursor<Shape::kSlots> cursor_;
  u32 q_parity_ = 0;
};

// --- kernel ---

template <class Traits>
struct HopperMlaDecodeTeams {
  using Roles = HopperMlaDecodeRoles;
  using Shared = typename HopperMlaDecodeShape<Traits>::Shared;
  static constexpr int kNumThreads = Roles::kNumThreads;

  __device__ __forceinline__ static void Run(const AttentionParams& p, Shared& shared, int begin,
                                             int end) {
    if (threadIdx.x < Roles::kGroupThreads) {
      LowerRegisterLimit<kQuantizedLatent<Traits> ? Roles::kConverterRegisters
                                                  : Roles::kProducerRegisters>();
      HopperMlaDecodeProducer<Traits>::Run(p, shared, begin, end);
    } else if (threadIdx.x < Roles::kConsumer) {
      LowerRegisterLimit<Roles::kProducerRegisters>();
      HopperMlaDecodeQLoader<Traits>::Run(p, shared, begin, end);
    } else {
      RaiseRegisterLimit<Roles::kConsumerRegisters>();
      HopperMlaDecodeConsumer<Traits>(p, shared).Run(begin, end);
    }
  }
};

template <class Traits>
using HopperMlaDecodeBody =
    HopperBody<Traits, HopperMlaDecodeShape<Traits>, HopperMlaDecodeTeams<Traits>>;

}  // namespace jax_attn
