// One unit of the backward pass; backward.cuh explains units.
#pragma once

#include "cuda/any/backward_index.cuh"
#include "cuda/any/backward_lists.cuh"
#include "cuda/common/budget.cuh"
#include "cuda/common/types.cuh"
#include "cuda/common/variant.cuh"

namespace jax_attn {

// --- shape ---

// Rows in shared memory, like RowLayout, with elements of any size.
template <int kBytes, int kHeadDim>
struct OperandLayout {
  static constexpr int kPadded = CeilDiv(kHeadDim, 16) * 16;
  static constexpr int kChunks = kPadded * kBytes / 16;       // chunks of 16 bytes that are copied
  static constexpr int kLiveChunks = kHeadDim * kBytes / 16;  // chunks with data
  static constexpr int kPitch = 16 * (kChunks | 1);           // bytes
};

// The shape of one kind of unit.
struct BackwardShape {
  int m_tiles;  // tiles of 16 rows that a warp owns
  int step;     // rows that stream by at a time
};

template <class Traits>
struct BackwardShapes {
  static constexpr int kBytes = Element<Traits::kDtype>::kBytes;
  static constexpr bool kIsF32 = Traits::kDtype == kElementF32;
  static constexpr bool kHasElements = Traits::Variant::kNumElements > 0;
  using Qk = OperandLayout<kBytes, Traits::kHeadDimQk>;
  using Vo = OperandLayout<kBytes, Traits::kHeadDimVo>;
  // Beyond 256 columns, two warps have the same rows. Each computes the logits, and sums half of
  // the columns.
  static constexpr int kColumnWarps = Max(Qk::kPadded, Vo::kPadded) > 256 ? 2 : 1;
  // Columns that a warp sums. The last warp may have fewer.
  template <class Layout>
  static constexpr int kSumColumns = CeilDiv(Layout::kPadded, 16 * kColumnWarps) * 16;
  static constexpr int kSums1 = kSumColumns<Qk>, kSums2 = kSumColumns<Vo>;
  // Beyond 128 registers of sums a thread, dk and dv are computed in two passes.
  static constexpr bool kSeparate = kSums1 + kSums2 > 256;

  // Columns of the sums of a 16-row tile.
  static constexpr int Columns(bool of_keys) {
    if (!of_keys) return kSums1;
    return kSeparate ? Max(kSums1, kSums2) : kSums1 + kSums2;
  }
  // The bytes that a CTA needs, whose warps own `warps` different stretches of rows.
  static constexpr int Bytes(int warps, BackwardShape shape, bool of_operands) {
    const int owned = 16 * warps * shape.m_tiles;
    const int products = (of_operands ? 2
                          : kIsF32    ? kColumnWarps
                                      : 0) *
                         owned * (shape.step + 1) * 4;
    return (owned + 2 * shape.step) * (Qk::kPitch + Vo::kPitch) + products + 40 * owned +
           24 * shape.step + 256;
  }
  // The best shape for so much shared memory; no rows if there is none. A streamed fragment is
  // loaded once for all m_tiles, so two halve the traffic. Sums, logits and dP take m_tiles *
  // (columns / 2 + step) of 255 registers; beyond 160 the rest begins to spill.
  static constexpr BackwardShape Best(bool of_keys, int warps, int budget,
                                      bool of_operands = false) {
    constexpr BackwardShape kShapes[] = {{2, 32}, {1, 64}, {1, 32}, {1, 16}, {1, 8}};
    for (const BackwardShape shape : kShapes) {
      if (!kIsF32 && shape.step < 16) continue;
      if (kIsF32 && (shape.m_tiles > 1 || shape.step > 32)) continue;
      if (!of_keys && Traits::kStepKeys % shape.step != 0)
        continue;  // steps are parts of list steps
      if (!of_operands && shape.m_tiles * (Columns(of_keys) / 2 + shape.step) > 160) continue;
      if (Bytes(warps, shape, of_operands) <= budget) return shape;
    }
    return {0, 0};
  }
  static constexpr bool Fit(int warps, int ctas) {
    const int budget = CtaSmemBudget(Traits::kArch, ctas);
    if (kHasElements && Best(false, warps, budget, true).step == 0) return false;
    return Best(false, warps, budget).step > 0 && Best(true, warps, budget).step > 0;
  }
  static constexpr int kRowWarps = Fit(4, 1) ? 4 : Fit(2, 1) ? 2 : 1;
  static constexpr int kWarps = kRowWarps * kColumnWarps;
  static constexpr int kCtas = kWarps <= 4 && Fit(kRowWarps, 2) ? 2 : 1;  // 255 registers a thread
  static constexpr int kBudget = CtaSmemBudget(Traits::kArch, kCtas);
};

// A block of keys or of query rows of one kv head of a request.
struct BackwardUnit {
  bool of_keys;
  int request, kv_head, block;
};

// --- what a variant asks ---

// The requests that a unit goes through, for variants and step lists.
struct alignas(16) SourceFacts {
  int request;
  int first_pos;  // keys: position in it of the unit's first key
};
struct NoSourceFacts {};

// Facts that a program may ask about a row of a request's queries and one of its kv heads.
template <class Traits>
class BackwardRowFacts {
 public:
  __device__ __forceinline__ BackwardRowFacts(const BackwardSource& source, int request,
                                              int kv_head, int row)
      : source_(source), request_(request), kv_head_(kv_head), row_(row) {}

  __device__ int head() const {
    return kv_head_ * Traits::kGroupSize + static_cast<int>(row_ % Traits::kGroupSize);
  }
  __device__ int kv_head() const { return kv_head_; }
  __device__ int request() const { return request_; }
  __device__ int q_pos() const { return source_.q_begin + Token(); }
  __device__ int q_row() const { return source_.qo_begin + Token(); }
  __device__ int q_len() const { return source_.qo_len; }
  __device__ int kv_len() const { return source_.kv_len; }

 private:
  __device__ int Token() const { return static_cast<int>(row_ / Traits::kGroupSize); }

  const BackwardSource& source_;
  const int request_, kv_head_;
  const u32 row_;  // unsigned, which makes divisions cheap
};

// Facts that a program may ask about a key, the one `offset` behind kv position `first`. eight: kv
// position, a multiple of 8, where its group of eight begins. The request may not have the key.
template <class Traits>
class BackwardKeyFacts {
 public:
  __device__ __forceinline__ BackwardKeyFacts(const AttentionParams& p,
                                              const BackwardSource& source, int first, int offset,
                                              int eight)
      : p_(p), source_(source), first_(first), offset_(offset), eight_(eight) {}

  __device__ int offset() const { return offset_; }
  __device__ int kv_pos() const { return first_ + offset_; }
  __device__ int kv_row() const {
    constexpr int kPage = Traits::kPageSize;
    if constexpr (kPage == 0) return source_.kv_begin + kv_pos();
    // The compiler sees that keys of one group of eight are in the same page.
    const int pos = kv_pos(), in_page = kPage % 8 == 0 ? eight_ : pos;
    if (static_cast<u32>(in_page) >= static_cast<u32>(source_.kv_len)) return 0;
    const u32 entry = static_cast<u32>(in_page) / Max(kPage, 1);
    const int page = variant::Field(p_.page_indices + source_.kv_begin + entry);
    return static_cast<int>(PoolRow<Max(kPage, 1)>(page, pos));
  }

 private:
  const AttentionParams& p_;
  const BackwardSource& source_;
  const int first_, offset_, eight_;
};

// The unit that a CTA is working on. In shared memory, as the main loop has few registers.
struct alignas(16) BackwardState {
  BackwardUnit unit;
  BackwardSource own;  // the unit's request
  KvPools pools;
  int batch_size;
  UnitSearch search;
  bool is_done;
};

// --- a unit ---

// kOfOperands: a unit of queries for the sums of operands, backward_operands.cuh.
template <class Traits, bool kOfKeys, bool kOfOperands = false>
class BackwardPass {
 public:
  using Shapes = BackwardShapes<Traits>;
  using E = Element<Traits::kDtype>;
  using Variant = typename Traits::Variant;
  static constexpr bool kHasVariant =
      Variant::kHasLogits || Variant::kHasMask || !Variant::kNormalizes;
  static constexpr bool kHasSteps = Traits::kStepKeys > 0;
  using Lists = BackwardLists<Traits>;
  using L1 = typename Shapes::Qk;  // of q and k
  using L2 = typename Shapes::Vo;  // of d_o and v
  static constexpr BackwardShape kShape =
      Shapes::Best(kOfKeys, Shapes::kRowWarps, Shapes::kBudget, kOfOperands);
  static constexpr bool kIsF32 = Shapes::kIsF32;
  static constexpr int kWarps = Shapes::kWarps, kThreads = kWarps * kWarpSize;
  static constexpr int kMTiles = kShape.m_tiles, kWarpRows = 16 * kMTiles;
  static constexpr int kOwned = Shapes::kRowWarps * kWarpRows;  // rows of a unit
  static constexpr int kStep = kShape.step, kSTiles = kStep / 8;
  static constexpr int kGroup = Traits::kGroupSize, kPage = Traits::kPageSize;
  static_assert(kOwned <= kThreads && kStep <= kThreads, "a thread for each row");

  struct Stream {
    unsigned char rows1[kStep * L1::kPitch];
    unsigned char rows2[kStep * L2::kPitch];
  };
  struct NoProducts {};
  struct Products {
    float x[kWarps * kWarpRows][kStep + 1];  // a warp's own
  };
  // Rows of the stream that some of the rows see, and rows that all of them see.
  struct Bounds {
    int any_begin, any_end, all_begin, all_end;
  };
  struct TermProducts : SourceFacts {
    float s[kOwned][kStep + 1], d_p[kOwned][kStep + 1];
  };
  using OfVariant =
      typename Conditional<kHasVariant || kHasSteps, SourceFacts, NoSourceFacts>::Type;
  struct StepLists {
    // Step classes of the two slots. Keys: each streamed row's classes of the steps that the unit's
    // keys are in, two bits a step. Queries: the unit's rows' classes of the one step.
    u32 classes[2][kOfKeys ? kStep : kOwned];
    u32 shows_any[kWarps];  // one bit for each step of the stream: whether lists show any of it
  };
  struct NoStepLists {};
  struct alignas(16) Shared : Conditional<kOfOperands, TermProducts, OfVariant>::Type,
                              Conditional<kHasSteps, StepLists, NoStepLists>::Type {
    unsigned char own1[kOwned * L1::kPitch];  // q or k
    unsigned char own2[kOwned * L2::kPitch];  // d_o or v
    Stream stream[2];
    typename Conditional<kIsF32 && !kOfOperands, Products, NoProducts>::Type products;
    i64 own_at[kOwned];                            // row, in units of head_dim; -1: no row
    int spans[kOwned][2];                          // rows [begin, end) of the stream that it sees
    float lse_log2[kOfKeys ? 2 * kStep : kOwned];  // inf: the row does not count
    float d[kOfKeys ? 2 * kStep : kOwned];
    int entries[kOwned];  // keys: the next page table entry; -1: none
    unsigned char own_kind[kOwned], stream_kind[kStep];  // Kind
    unsigned char own_is_nan[kOwned];
    // The request that streams by, and what of it the rows see: those of all warps, and those of
    // each warp.
    BackwardSource source;
    Bounds bounds, warp_bounds[kWarps];
  };
  static_assert(sizeof(Shared) + sizeof(BackwardState) <= Shapes::kBudget, "as Bytes has it");

  __device__ __forceinline__ BackwardPass(const BackwardCudaParams& p, const BackwardState& state,
                                          unsigned char* smem)
      : p_(p),
        f_(p.forward),
        state_(state),
        shared_(*reinterpret_cast<Shared*>(smem)),
        thread_(Opaque(static_cast<int>(threadIdx.x))) {}

  __device__ __forceinline__ void Run() {
    if constexpr (!kOfKeys) {
      RunPart<true, false>();
    } else if constexpr (Shapes::kSeparate) {
      RunPart<true, false>();
      RunPart<false, true>();
    } else {
      RunPart<true, true>();
    }
  }

 protected:
  enum Kind : unsigned char { kCountsNot, kCounts, kIsNotFinite };
  using Tile = float[kMTiles][kSTiles][4];  // logits, laid out as accumulators of mma.sync
  template <class Layout>
  using Sums = float[kMTiles][Shapes::template kSumColumns<Layout> / 8][4];
  __device__ static u32 Least(u32 a, u32 b) { return a < b ? a : b; }
  __device__ static u32 Most(u32 a, u32 b) { return a > b ? a : b; }
  __device__ int Thread() const { return thread_; }
  __device__ int Lane() const { return Thread() % kWarpSize; }
  __device__ int Warp() const { return Thread() / kWarpSize; }
  __device__ int FirstRow() const { return Warp() % Shapes::kRowWarps * kWarpRows; }
  // Whether a warp before this one computes the same logits.
  __device__ bool IsSecondOfRows() const {
    return Shapes::kColumnWarps > 1 && Warp() >= Shapes::kRowWarps;
  }
  // The first of the columns that the warp sums.
  template <class Layout>
  __device__ int FirstColumn() const {
    if constexpr (Shapes::kColumnWarps == 1) return 0;
    return Warp() / Shapes::kRowWarps * Shapes::template kSumColumns<Layout>;
  }
  // Whether column 8 j of the warp's sums is in rows of kColumns columns.
  template <class Layout, int kColumns>
  __device__ bool HasColumns(int first, int j) const {
    return kColumns == Shapes::kColumnWarps * Shapes::template kSumColumns<Layout> ||
           first + 8 * j < kColumns;
  }
  // Ends the life of values derived from the thread index, mainly addresses: the main loop has few
  // registers.
  __device__ __forceinline__ void ForgetThread() { thread_ = Opaque(thread_); }

  // kWants1: computes dq or dk. kWants2: computes dv. If the part for dk before it had to be
  // careful, so is this one: keys whose dk is NaN get a NaN dv.
  template <bool kWants1, bool kWants2>
  __device__ __forceinline__ void RunPart() {
#pragma unroll 1
    for (;;) {
      Sums<L1> sums1;
      Sums<L2> sums2;
      if constexpr (kWants1) Clear(sums1);
      if constexpr (kWants2) Clear(sums2);
      const auto add = [&](int slot, int begin, bool seen_by_all) __attribute__((always_inline)) {
        Multiply<kWants1, kWants2>(slot, begin, seen_by_all, sums1, sums2);
      };
      LoadOwned();
      if (careful_) RecomputeOwned();
      if constexpr (kOfKeys && kPage > 0) {
#pragma unroll 1
        for (;;) {
          BackwardSource source;
          if (!FindReader(source)) break;
          RunSteps(source, careful_, add);
        }
      } else {
        PutFacts(state_.unit.request, 0);
        FindSpans(state_.own, 0, [](int) { return true; });
        RunSteps(state_.own, careful_, add);
      }
      WaitCopies<0>();
      __syncthreads();
      bool is_finite = true;
      if constexpr (kWants1) {
        const i64 layer = LayerOffset(Traits::kHeadDimQk);
        is_finite &= Write<L1, Traits::kHeadDimQk>(kOfKeys ? p_.d_k : p_.d_q, layer, f_.sm_scale,
                                                   careful_, sums1);
      }
      if constexpr (kWants2) {
        is_finite &= Write<L2, Traits::kHeadDimVo>(p_.d_v, LayerOffset(Traits::kHeadDimVo), 1.0f,
                                                   careful_, sums2);
      }
      if (__syncthreads_or(!is_finite) == 0 || careful_) break;
      careful_ = true;
    }
  }

  template <int kTiles>
  __device__ __forceinline__ static void Clear(float (&tiles)[kMTiles][kTiles][4]) {
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) tiles[mt][j][c] = 0.0f;
      }
    }
  }

  // Elements of d_k or d_v in front of the layer.
  __device__ __forceinline__ i64 LayerOffset(int head_dim) const {
    if constexpr (!kOfKeys) return 0;
    return LoadLayer<Traits>(f_) * f_.num_pages * (static_cast<i64>(kPage) * f_.num_kv_heads) *
           head_dim;
  }

  // --- rows ---

  // Where row `row` of a request's queries is in q, in units of head_dim.
  __device__ __forceinline__ i64 QueryAt(const BackwardSource& source, int row) const {
    return static_cast<i64>(source.qo_begin + row / kGroup) * f_.num_qo_heads +
           state_.unit.kv_head * kGroup + row % kGroup;
  }
  // Where position `pos` of a request is in k.
  __device__ __forceinline__ i64 KeyAt(const BackwardSource& source, int pos) const {
    i64 row;
    if constexpr (kPage > 0) {
      row = PoolRow<kPage>(LoadPage<kPage>(f_, source.kv_begin, pos), pos);
    } else {
      row = static_cast<i64>(source.kv_begin) + pos;
    }
    return row * f_.num_kv_heads + state_.unit.kv_head;
  }

  __device__ const char* Operand1(bool of_queries) const {
    return of_queries ? static_cast<const char*>(f_.q) : state_.pools.k;
  }
  __device__ const char* Operand2(bool of_queries) const {
    return of_queries ? static_cast<const char*>(p_.d_o) : state_.pools.v;
  }

  // Starts the copies of kRows rows. at(row): its offset; -1: zeros.
  template <int kRows, class At>
  __device__ __forceinline__ void CopyRows(const char* from1, const char* from2, u32 to1, u32 to2,
                                           const At& at) const {
    Copy<L1, kRows, Traits::kHeadDimQk>(from1, to1, at);
    Copy<L2, kRows, Traits::kHeadDimVo>(from2, to2, at);
  }
  template <class Layout, int kRows, int kHeadDim, class At>
  __device__ __forceinline__ void Copy(const char* from, u32 to, const At& at) const {
    // Neighbouring threads copy neighbouring chunks of a row.
    constexpr int kWidth = PowerOfTwoDivisor(Layout::kChunks, 16);
    constexpr int kRowsAtOnce = kThreads / kWidth;
    const int column = Thread() % kWidth;
#pragma unroll
    for (int first = 0; first < kRows; first += kRowsAtOnce) {
      const int row = first + Thread() / kWidth;
      if (kRows % kRowsAtOnce != 0 && row >= kRows) break;
      const i64 offset = at(row);
      const char* row_from = from + (offset < 0 ? 0 : offset) * (kHeadDim * E::kBytes);
#pragma unroll
      for (int c = 0; c < Layout::kChunks; c += kWidth) {
        const bool live =
            Layout::kChunks == Layout::kLiveChunks || c + column < Layout::kLiveChunks;
        const bool valid = offset >= 0 && live;
        CopyAsync16(to + row * Layout::kPitch + (c + column) * 16,
                    valid ? row_from + (c + column) * 16 : from, valid);
      }
    }
  }

  // Rows with kFarLseLog2 are left to the careful pass. There a logit that is lse but for rounding
  // has P = 1, and every lower one 0.
  __device__ __forceinline__ float FarLse(float lse_log2) const {
    if (!careful_) return __uint_as_float(kFullWarp);
    return lse_log2 < -kLargestFloat  ? -kLargestFloat
           : lse_log2 > kLargestFloat ? kLargestFloat
                                      : lse_log2;
  }
  // P of a logit, base-2 times `scale`.
  __device__ __forceinline__ float WeightOf(float logit, float scale, float lse_log2) const {
    const float size = fabsf(lse_log2);
    if (!careful_ || !(size >= kFarLseLog2) || size == Infinity())
      return Exp2(fmaf(logit, scale, -lse_log2));
    const float excess = __fsub_rn(__fmul_rn(logit, 0.5f * scale), 0.5f * lse_log2);  // in base 4
    return excess >= -(size < kLargestFloat ? 0x1p-20f : 0.25f) * size ? 1.0f : Exp2(2.0f * excess);
  }

  // Loads lse and d of row `at` of q, as Weigh takes them.
  __device__ __forceinline__ void LoadStats(i64 at, float& lse_log2, float& d) const {
    lse_log2 = Infinity();
    d = 0.0f;
    if (at < 0) return;
    const float lse = __uint_as_float(LoadOperand32(p_.lse + at));
    if (lse == -Infinity()) return;
    lse_log2 = (lse - lse) + lse * kLog2E;  // NaN for +inf, too
    if (!(fabsf(lse_log2) < kFarLseLog2)) lse_log2 = FarLse(lse_log2);
    if constexpr (Variant::kNormalizes) d = __uint_as_float(LoadOperand32(p_.d + at));
  }

  // Starts the copies of the unit's rows, and stores what is known of them.
  __device__ __forceinline__ void LoadOwned() {
    __syncthreads();  // what the unit before left has been read
    const int row = Thread();
    if (row < kOwned) {
      const int offset = state_.unit.block * kOwned + row;
      i64 at = -1;
      int entry = -1;
      if constexpr (!kOfKeys) {
        if (offset < state_.own.qo_len * kGroup) at = QueryAt(state_.own, offset);
        LoadStats(at, shared_.lse_log2[row], shared_.d[row]);
      } else if constexpr (kPage == 0) {
        if (offset < state_.own.kv_len) at = KeyAt(state_.own, offset);
      } else if (offset / kPage < CeilDiv(state_.own.kv_len, kPage)) {
        const int first = state_.own.kv_begin + offset / kPage;
        const int page = LoadConstant(f_.page_indices + first);
        if (LoadConstant(p_.first_entries + page) == p_.max_entries - first) {
          at = static_cast<i64>(PoolRow<kPage>(page, offset)) * f_.num_kv_heads +
               state_.unit.kv_head;
          entry = first;
        }
      }
      shared_.own_at[row] = at;
      shared_.entries[row] = entry;
      shared_.own_kind[row] = kCounts;
      shared_.own_is_nan[row] = 0;
    }
    __syncthreads();
    CopyRows<kOwned>(Operand1(!kOfKeys), Operand2(!kOfKeys), SharedAddress(shared_.own1),
                     SharedAddress(shared_.own2), [&](int i) { return shared_.own_at[i]; });
    CommitCopies();
  }

  // --- who sees whom ---

  // Finds the next request that reads pages of the unit's keys, and what its queries see. Returns
  // false if none is left. Pages of a block may belong to different requests, or lie at other
  // positions there: those at the same distance from the first entry come together.
  __device__ __forceinline__ bool FindReader(BackwardSource& source) {
    const int first_entry = state_.own.kv_begin;
    const auto distance = [&](int row) {
      const int entry = shared_.entries[row];
      const int first = first_entry + (state_.unit.block * kOwned + row) / Max(kPage, 1);
      return entry < 0 ? kFullWarp : static_cast<u32>(entry - first);
    };
    u32 least = kFullWarp;
    for (int i = Lane(); i < kOwned; i += kWarpSize) least = Least(least, distance(i));
    least = WarpMin(least);
    if (least == kFullWarp) return false;
    u32 entry = kFullWarp;
    for (int i = Lane(); i < kOwned; i += kWarpSize) {
      if (distance(i) == least) entry = Least(entry, static_cast<u32>(shared_.entries[i]));
    }
    entry = WarpMin(entry);
    const int request =
        least == 0
            ? state_.unit.request
            : BackwardIndex<Traits>(p_, state_.batch_size).RequestOf(static_cast<int>(entry));
    source = BackwardSource(p_, request);
    const int end = LoadConstant(p_.kv_indptr + request + 1);
    const int shift = (static_cast<int>(least) - source.kv_begin + first_entry) * kPage;
    PutFacts(request, shift);
    __syncthreads();  // all threads have read the entries
    FindSpans(source, shift, [&](int row) {
      if (distance(row) != least || shared_.entries[row] >= end) return false;
      shared_.entries[row] = LoadConstant(p_.next_entries + shared_.entries[row]) - 1;
      return true;
    });
    return true;
  }

  // Stores facts of the next request. shift: as in FindSpans.
  __device__ __forceinline__ void PutFacts(int request, int shift) {
    if constexpr (kHasVariant || kHasSteps) {
      if (Thread() != 0) return;
      shared_.request = request;
      shared_.first_pos = state_.unit.block * kOwned + shift;
    }
  }

  // Fills spans. shift: how much further on the keys are in the source than in the unit's request.
  // takes(row): whether the row is there.
  template <class Takes>
  __device__ __forceinline__ void FindSpans(const BackwardSource& source, int shift,
                                            const Takes& takes) {
    constexpr int kFar = 1 << 30;
    const int row = Thread(), offset = state_.unit.block * kOwned + row;
    const i64 left = Min(f_.window_left, kFar), right = Min(f_.window_right, kFar);
    if (row < kOwned) {
      int begin = 0, end = 0;
      if (shared_.own_at[row] >= 0 && takes(row)) {
        if constexpr (kOfKeys) {
          const i64 pos = static_cast<i64>(offset) + shift;
          const i64 token = pos - source.q_begin;  // the query token at the key's position
          if (pos < source.kv_len) {
            end = source.qo_len;
            if constexpr (Traits::kHasWindowRight) begin = Clamp(token - right, 0, source.qo_len);
            if constexpr (Traits::kHasWindowLeft) end = Clamp(token + left + 1, 0, source.qo_len);
            begin *= kGroup;
            end *= kGroup;
          }
        } else {
          const i64 pos = static_cast<i64>(source.q_begin) + offset / kGroup;
          end = source.kv_len;
          if constexpr (Traits::kHasWindowLeft) begin = Clamp(pos - left, 0, source.kv_len);
          if constexpr (Traits::kHasWindowRight) end = Clamp(pos + right + 1, 0, source.kv_len);
        }
      }
      // If some row sees nothing, no row is seen by all.
      shared_.spans[row][0] = begin < end ? begin : 0x7fffffff;
      shared_.spans[row][1] = begin < end ? end : 0;
    }
    __syncthreads();
  }

  __device__ __forceinline__ Bounds BoundsOf(int first, int num) const {
    u32 any_begin = kFullWarp, any_end = 0, all_begin = 0, all_end = kFullWarp;
    for (int i = first + Lane(); i < first + num; i += kWarpSize) {
      const auto begin = static_cast<u32>(shared_.spans[i][0]);
      const auto end = static_cast<u32>(shared_.spans[i][1]);
      any_begin = Least(any_begin, begin);
      any_end = Most(any_end, end);
      all_begin = Most(all_begin, begin);
      all_end = Least(all_end, end);
    }
    return {static_cast<int>(WarpMin(any_begin)), static_cast<int>(WarpMax(any_end)),
            static_cast<int>(WarpMax(all_begin)), static_cast<int>(WarpMin(all_end))};
  }

  // --- the stream ---

  // Calls add(slot, first row, whether all rows of the warp see all of it) for each step of the
  // stream that any row of the warp sees.
  template <class AddStep>
  __device__ __forceinline__ void RunSteps(const BackwardSource& source, bool careful,
                                           const AddStep& add) {
    const Bounds all = BoundsOf(0, kOwned), mine = BoundsOf(FirstRow(), kWarpRows);
    if (all.any_begin >= all.any_end) return;
    if (Thread() == 0) {
      shared_.source = source;
      shared_.bounds = all;
    }
    if (Lane() == 0) shared_.warp_bounds[Warp()] = mine;
    __syncthreads();
    const Bounds& bounds = shared_.bounds;
    const auto at = [&](int offset) -> i64 {
      if (offset < bounds.any_begin || offset >= bounds.any_end) return -1;
      return kOfKeys ? QueryAt(shared_.source, offset) : KeyAt(shared_.source, offset);
    };
    const auto load = [&](int begin, int slot) {
      if (begin < bounds.any_end) {
        Stream& to = shared_.stream[slot];
        CopyRows<kStep>(Operand1(kOfKeys), Operand2(kOfKeys), SharedAddress(to.rows1),
                        SharedAddress(to.rows2), [&](int row) { return at(begin + row); });
      }
      CommitCopies();
    };
    const auto stats = [&](int begin, float& lse_log2, float& d) {
      if constexpr (kOfKeys) {
        if (Thread() < kStep) LoadStats(at(begin + Thread()), lse_log2, d);
      }
    };
    const auto put_stats = [&](int slot, float lse_log2, float d) {
      if constexpr (kOfKeys) {
        if (Thread() >= kStep) return;
        shared_.lse_log2[slot * kStep + Thread()] = lse_log2;
        shared_.d[slot * kStep + Thread()] = d;
      }
    };
    int begin = FirstShown(-1, all.any_begin / kStep * kStep), slot = 0;
    float lse_log2 = 0, d = 0;
    u32 classes = 0;
    load(begin, 0);
    stats(begin, lse_log2, d);
    put_stats(0, lse_log2, d);
    FindClasses(begin, classes);
    PutClasses(0, classes);
#pragma unroll 1
    for (int next; begin < bounds.any_end; begin = kHasSteps ? next : begin + kStep, slot ^= 1) {
      WaitCopies<0>();
      __syncthreads();
      ForgetThread();
      next = FirstShown(begin, begin + kStep);
      load(next, slot ^ 1);
      stats(next, lse_log2, d);
      FindClasses(next, classes);
      if (careful) {
        RecomputeStream(slot, begin, bounds);
        __syncthreads();
      }
      ForgetThread();
      const Bounds& seen = shared_.warp_bounds[Warp()];
      const Shares listed = SharesOfWarp(slot);
      if (begin < seen.any_end && begin + kStep > seen.any_begin && listed.any) {
        const bool is_inside = begin >= seen.all_begin && begin + kStep <= seen.all_end;
        add(slot, begin, is_inside && listed.all);
      }
      put_stats(slot ^ 1, lse_log2, d);
      PutClasses(slot ^ 1, classes);
    }
    WaitCopies<0>();
    __syncthreads();  // slots and spans are about to be overwritten
  }

  // --- step lists ---

  // Returns the first row of the first step of the stream, from the one at `begin` on, of which
  // lists show anything to any row of the unit; at least bounds.any_end if there is none. The whole
  // CTA calls it and looks at kThreads steps at once. last: result of the last call; -1: none.
  __device__ __forceinline__ int FirstShown(int last, int begin) {
    if constexpr (!kHasSteps) {
      return begin;
    } else {
      int window = last < 0 ? -1 : last / (kThreads * kStep);
#pragma unroll 1
      for (int step = begin / kStep; step * kStep < shared_.bounds.any_end;
           step = (window + 1) * kThreads) {
        if (window != step / kThreads) {
          window = step / kThreads;
          __syncthreads();  // all threads have read the window before
          const bool shows_any = ShowsAny((window * kThreads + Thread()) * kStep);
          const u32 word = __ballot_sync(kFullWarp, shows_any);
          if (Lane() == 0) shared_.shows_any[Warp()] = word;
          __syncthreads();
        }
#pragma unroll 1
        for (int i = step % kThreads; i < kThreads; i = (i / kWarpSize + 1) * kWarpSize) {
          const u32 left = shared_.shows_any[i / kWarpSize] >> (i % kWarpSize);
          if (left != 0) return (window * kThreads + i + __ffs(static_cast<int>(left)) - 1) * kStep;
        }
      }
      return shared_.bounds.any_end;
    }
  }

  // Whether lists show any of the streamed step at `begin`.
  __device__ __forceinline__ bool ShowsAny(int begin) const {
    const int end = Min(begin + kStep, shared_.bounds.any_end);
    if (begin >= end) return false;
    const Lists lists(p_);
    if constexpr (kOfKeys) {
      const int first = FirstListStep(), qo_begin = shared_.source.qo_begin;
      return lists.ShowAny(qo_begin + begin / kGroup, qo_begin + (end - 1) / kGroup + 1, first,
                           first + kListSteps);
    } else {
      const int row = state_.unit.block * kOwned, qo_begin = state_.own.qo_begin;
      const int row_end = Min(row + kOwned, state_.own.qo_len * kGroup);
      return lists.ShowAny(qo_begin + row / kGroup, qo_begin + (row_end - 1) / kGroup + 1,
                           begin / kDivisor, begin / kDivisor + 1);
    }
  }

  // List steps that a unit's keys may be in.
  static constexpr int kDivisor = Max(Traits::kStepKeys, 1);
  static constexpr int kListSteps = (kOwned + kDivisor - 2) / kDivisor + 1;
  static_assert(!kHasSteps || kListSteps <= Lists::kMaxSteps, "as ClassesOf has it");
  __device__ __forceinline__ int FirstListStep() const {
    return Max(shared_.first_pos, 0) / kDivisor;  // there are no rows before position 0
  }
  // Bit position in classes of the unit's row `own`.
  __device__ __forceinline__ int ShiftOf(int own) const {
    if constexpr (kHasSteps && kOfKeys) {
      return 2 * (Max(shared_.first_pos + own, 0) / kDivisor - FirstListStep());
    } else {
      return 0;
    }
  }

  // Finds StepLists::classes of row Thread() for the streamed step at `begin`. Rows that do not
  // exist do not count.
  __device__ __forceinline__ void FindClasses(int begin, u32& classes) const {
    if constexpr (kHasSteps) {
      classes = kFullWarp / kStepMasked * kStepShown;
      const int end = shared_.bounds.any_end;
      if constexpr (kOfKeys) {
        const int offset = begin + Thread();
        if (Thread() >= kStep || offset < shared_.bounds.any_begin || offset >= end) return;
        const int row = shared_.source.qo_begin + offset / kGroup;
        classes = Lists(p_).ClassesOf(row, FirstListStep(), kListSteps);
      } else {
        if (Thread() >= kOwned || begin >= end || shared_.own_at[Thread()] < 0) return;
        const int offset = state_.unit.block * kOwned + Thread();
        classes = Lists(p_).ClassesOf(state_.own.qo_begin + offset / kGroup, begin / kDivisor, 1);
      }
    }
  }
  __device__ __forceinline__ void PutClasses(int slot, u32 classes) const {
    if constexpr (kHasSteps) {
      if (Thread() < (kOfKeys ? kStep : kOwned)) shared_.classes[slot][Thread()] = classes;
    }
  }

  // StepClass of the unit's row `own` and row `streamed` of a slot. shift: ShiftOf(own).
  __device__ __forceinline__ u32 ClassOf(int slot, int own, int shift, int streamed) const {
    if constexpr (!kHasSteps) {
      return kStepMasked;
    } else {
      return shared_.classes[slot][kOfKeys ? streamed : own] >> shift & kStepMasked;
    }
  }

  // The part of a slot's step that lists show to the rows of the warp: anything; or all of it
  // without a mask.
  struct Shares {
    bool any, all;
  };
  __device__ __forceinline__ Shares SharesOfWarp(int slot) const {
    if constexpr (!kHasSteps) {
      return {true, true};
    } else {
      u32 bits = kStepMasked;
      if constexpr (kOfKeys) {
        const int low = ShiftOf(FirstRow()), high = ShiftOf(FirstRow() + kWarpRows - 1);
        bits = (kFullWarp >> (30 - (high - low))) << low;
      }
      const u32 shown = kFullWarp / kStepMasked * kStepShown & bits;
      bool any = false, all = true;
      const u32* of_rows = shared_.classes[slot] + (kOfKeys ? 0 : FirstRow());
      for (int i = Lane(); i < (kOfKeys ? kStep : kWarpRows); i += kWarpSize) {
        const u32 classes = of_rows[i] & bits;
        any |= classes != 0;
        all &= classes == shown;
      }
      return {__any_sync(kFullWarp, any) != 0, __all_sync(kFullWarp, all) != 0};
    }
  }

  // --- products ---

  template <bool kWants1, bool kWants2>
  __device__ __forceinline__ void Multiply(int slot, int begin, bool seen_by_all, Sums<L1>& sums1,
                                           Sums<L2>& sums2) {
    Stream& stream = shared_.stream[slot];
    Tile s;
    Dot<L1>(shared_.own1, stream.rows1, s);
    if constexpr (kWants2) {
      Operand weights;
      Weigh(slot, begin, seen_by_all, s,
            [&](int mt, int h, int j, float left, float right)
                __attribute__((always_inline)) { Put(weights, mt, h, j, left, right); });
      Add<L2>(weights, stream.rows2, sums2);
    } else {
      Weigh(slot, begin, seen_by_all, s, [](int, int, int, float, float) {});
    }
    if constexpr (kWants1) {
      Tile d_s;
      Dot<L2>(shared_.own2, stream.rows2, d_s);
      Operand products;
#pragma unroll
      for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
          for (int j = 0; j < kSTiles; ++j) {
            const float2 d = StatsOf(shared_.d, slot, mt, h, j);
            Put(products, mt, h, j, Slope(s[mt][j][2 * h], d_s[mt][j][2 * h] - d.x),
                Slope(s[mt][j][2 * h + 1], d_s[mt][j][2 * h + 1] - d.y));
          }
        }
      }
      Add<L1>(products, stream.rows1, sums1);
    }
  }

  // The P of a hidden logit: products with what may be NaN are 0.
  static constexpr u32 kUnseen = 0x80000000u;  // -0, which no exponential is
  __device__ __forceinline__ static float Slope(float weight, float x) {
    return __float_as_uint(weight) == kUnseen ? 0.0f : weight * x;
  }

  // Loads lse_log2 or d of two neighbouring logits.
  template <class Array>
  __device__ __forceinline__ float2 StatsOf(const Array& stats, int slot, int mt, int h,
                                            int j) const {
    if constexpr (kOfKeys) {
      const float* two = stats + slot * kStep + 8 * j + 2 * (Lane() % 4);
      return make_float2(two[0], two[1]);
    } else {
      const float x = stats[FirstRow() + mt * 16 + h * 8 + Lane() / 4];
      return make_float2(x, x);
    }
  }

  // Turns Q K^T into P, and with a soft cap into P times the cap's slope: the factor of dP - d. put
  // gets P. Hidden logits become kUnseen.
  template <class PutTwo>
  __device__ __forceinline__ void Weigh(int slot, int begin, bool seen_by_all, Tile& s,
                                        const PutTwo& put) const {
    if constexpr (kHasVariant) return WeighVariant(slot, begin, seen_by_all, s, put);
    if (careful_) {
      WeighPlain<true>(slot, begin, seen_by_all, s, put);
    } else {
      WeighPlain<false>(slot, begin, seen_by_all, s, put);
    }
  }
  template <bool kCareful, class PutTwo>
  __device__ __forceinline__ void WeighPlain(int slot, int begin, bool seen_by_all, Tile& s,
                                             const PutTwo& put) const {
    const float scale = f_.sm_scale * kLog2E;
    const float slope = Traits::kHasSoftCap ? 2.0f * scale / f_.logits_soft_cap : 0.0f;
    const float cap = f_.logits_soft_cap * kLog2E;
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        int low = 0, high = kStep, shift = 0;
        const int own = FirstRow() + mt * 16 + h * 8 + Lane() / 4;
        if (!seen_by_all) {
          const int* span = shared_.spans[own];
          low = span[0] - begin;
          high = span[1] - begin;
          shift = ShiftOf(own);
        }
#pragma unroll
        for (int j = 0; j < kSTiles; ++j) {
          const float2 lse_log2 = StatsOf(shared_.lse_log2, slot, mt, h, j);
          float weights[2];
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float& x = s[mt][j][2 * h + c];
            const float lse = c == 0 ? lse_log2.x : lse_log2.y;
            float factor = 1.0f;
            if constexpr (Traits::kHasSoftCap) {
              // As class SoftCap, but infinity becomes NaN: its slope would hide it.
              const float one = fmaf(x, 0.0f, 1.0f);
              const float tanh = fmaf(-2.0f, Reciprocal(Exp2(slope * x) + 1.0f), one);
              factor = fmaf(-tanh, tanh, 1.0f);
              weights[c] = kCareful ? WeightOf(tanh, cap, lse) : Exp2(fmaf(cap, tanh, -lse));
            } else {
              weights[c] = kCareful ? WeightOf(x, scale, lse) : Exp2(fmaf(x, scale, -lse));
            }
            const int key = 8 * j + 2 * (Lane() % 4) + c;
            if (!seen_by_all &&
                (key < low || key >= high || ClassOf(slot, own, shift, key) == kStepHidden)) {
              weights[c] = __uint_as_float(kUnseen);
            }
            x = Traits::kHasSoftCap ? weights[c] * factor : weights[c];
          }
          put(mt, h, j, weights[0], weights[1]);
        }
      }
    }
  }

  // --- a variant ---

  __device__ __forceinline__ BackwardRowFacts<Traits> FactsOfRow(int row) const {
    return {shared_.source, shared_.request, state_.unit.kv_head, row};
  }
  __device__ __forceinline__ BackwardKeyFacts<Traits> FactsOfKey(int first, int offset,
                                                                 int eight) const {
    return {f_, shared_.source, first, offset, eight};
  }

  // The same with the user's functions. What they compute once for a row, and once for a key, is
  // kept for what the warp owns, and computed one after the other for what streams.
  template <class PutTwo>
  __device__ __forceinline__ void WeighVariant(int slot, int begin, bool seen_by_all, Tile& s,
                                               const PutTwo& put) const {
    const int own_eight = (kOfKeys ? shared_.first_pos : state_.unit.block * kOwned) + FirstRow();
    const int own = own_eight + Lane() / 4, streamed = begin + 2 * (Lane() % 4);
    const int first_key = kOfKeys ? own : streamed;
    const auto key_of = [&](int mt, int h, int j, int c) __attribute__((always_inline)) {
      const int offset = kOfKeys ? 16 * mt + 8 * h : 8 * j + c;
      return FactsOfKey(first_key, offset, kOfKeys ? own_eight + offset : begin + 8 * j);
    };
    using Row = typename Variant::Row;
    using Key = typename Variant::Key;
    typename Conditional<kOfKeys, Key, Row>::Type owned[kMTiles][2];
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if constexpr (kOfKeys) {
          owned[mt][h] = Variant::OfKey(f_, key_of(mt, h, 0, 0));
        } else {
          owned[mt][h] = Variant::OfRow(f_, FactsOfRow(own + 16 * mt + 8 * h), first_key);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kSTiles; ++j) {
      float weights[kMTiles][2][2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int offset = streamed + 8 * j + c;
        typename Conditional<kOfKeys, Row, Key>::Type other;
        if constexpr (kOfKeys) {
          other = Variant::OfRow(f_, FactsOfRow(offset), first_key);
        } else {
          other = Variant::OfKey(f_, key_of(0, 0, j, c));
        }
#pragma unroll
        for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float2 lse_log2 = StatsOf(shared_.lse_log2, slot, mt, h, j);
            const float lse = c == 0 ? lse_log2.x : lse_log2.y;
            bool sees = lse != Infinity();
            u32 step_class = kHasSteps ? kStepShown : kStepMasked;
            if (!seen_by_all) {
              const int own_row = FirstRow() + mt * 16 + h * 8 + Lane() / 4;
              const int* span = shared_.spans[own_row];
              step_class = ClassOf(slot, own_row, ShiftOf(own_row), offset - begin);
              sees = sees && offset >= span[0] && offset < span[1] && step_class != kStepHidden;
            }
            const auto key = key_of(mt, h, j, c);
            float& x = s[mt][j][2 * h + c];
            if constexpr (kOfKeys) {
              weights[mt][h][c] = WeighOne(other, owned[mt][h], key, sees, step_class, lse, x);
            } else {
              weights[mt][h][c] = WeighOne(owned[mt][h], other, key, sees, step_class, lse, x);
            }
          }
        }
      }
#pragma unroll
      for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
        for (int h = 0; h < 2; ++h) put(mt, h, j, weights[mt][h][0], weights[mt][h][1]);
      }
    }
  }

  // tanh of the built-in soft cap, as class SoftCap.
  __device__ __forceinline__ float Tanh(float x) const {
    const float slope = 2.0f * kLog2E * f_.sm_scale / f_.logits_soft_cap;
    return fmaf(-2.0f, Reciprocal(Exp2(slope * x) + 1.0f), 1.0f);
  }

  // P of one logit. x: Q K^T; becomes the factor of dP - d.
  template <class Row, class Key>
  __device__ __forceinline__ float WeighOne(const Row& row, const Key& key,
                                            const BackwardKeyFacts<Traits>& at, bool sees,
                                            u32 step_class, float lse_log2, float& x) const {
    float logit = x, scale = f_.sm_scale, factor = 1.0f;
    if constexpr (Traits::kHasSoftCap) {
      logit = Tanh(x);
      scale = f_.logits_soft_cap;
      factor = fmaf(-logit, logit, 1.0f);
    }
    if constexpr (Variant::kHasLogits || !Variant::kNormalizes) {
      logit *= scale;
      scale = 1.0f;
    }
    if constexpr (Variant::kHasLogits) {
      float slope;
      logit = Variant::Differentiate(f_, row, key, at, logit, slope);
      if constexpr (Variant::kHasSlope) factor *= slope;
    }
    float weight = logit;
    if constexpr (Variant::kNormalizes) {
      weight = WeightOf(logit, scale * kLog2E, lse_log2);
      factor *= weight;
    }
    // A visible logit never has the factor -0. If the score is not finite the factor is NaN: the
    // user's functions may have hidden that.
    const float zero = x - x;
    factor += zero;
    if constexpr (Variant::kHasLogits || Traits::kHasSoftCap) weight += zero;
    if constexpr (Variant::kHasMask) {
      sees = sees && (step_class != kStepMasked || Variant::IsVisible(f_, row, key, at));
    }
    x = sees ? factor : __uint_as_float(kUnseen);
    return sees ? weight : __uint_as_float(kUnseen);
  }

  // Whether the user's mask shows row i of the stream to the unit's row `own`, or the other way
  // round.
  __device__ __forceinline__ bool ShowsOne(int own, int i) const {
    const int row = kOfKeys ? i : state_.unit.block * kOwned + own;
    const int pos = kOfKeys ? shared_.first_pos + own : i;
    const BackwardKeyFacts<Traits> key = FactsOfKey(pos, 0, pos / 8 * 8);
    return Variant::IsVisible(f_, Variant::OfRow(f_, FactsOfRow(row), pos), Variant::OfKey(f_, key),
                              key);
  }

  // c = rows of the warp times rows of the stream.
  template <class Layout>
  __device__ __forceinline__ void Dot(const unsigned char* own, const unsigned char* stream,
                                      Tile& c) const {
    Clear(c);
    if constexpr (kIsF32) {
      const unsigned char* a = own + (FirstRow() + Lane() / 4) * Layout::kPitch;
      const unsigned char* b = stream + 2 * (Lane() % 4) * Layout::kPitch;
#pragma unroll 1
      for (int chunk = 0; chunk < Layout::kLiveChunks; ++chunk) {
        float4 x[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          x[h] = *reinterpret_cast<const float4*>(a + 8 * h * Layout::kPitch + chunk * 16);
        }
#pragma unroll
        for (int j = 0; j < kSTiles; ++j) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float4 y =
                *reinterpret_cast<const float4*>(b + (8 * j + i) * Layout::kPitch + chunk * 16);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              float& sum = c[0][j][2 * h + i];
              sum = fmaf(x[h].x, y.x, fmaf(x[h].y, y.y, fmaf(x[h].z, y.z, fmaf(x[h].w, y.w, sum))));
            }
          }
        }
      }
    } else {
      const u32 a_at =
          SharedAddress(own) + (FirstRow() + Lane() % 16) * Layout::kPitch + Lane() / 16 * 16;
      const u32 b_at = SharedAddress(stream) + (Lane() / 16 * 8 + Lane() % 8) * Layout::kPitch +
                       Lane() / 8 % 2 * 16;
      // Fragments of all columns at once would spill beside such wide sums.
      [[maybe_unused]] constexpr int kUnroll = Layout::kPadded > 192 ? 2 : Layout::kPadded / 16;
#pragma unroll kUnroll
      for (int k = 0; k < Layout::kPadded / 16; ++k) {
        u32 a[kMTiles][4];
#pragma unroll
        for (int mt = 0; mt < kMTiles; ++mt) {
          LoadMatrix4(a[mt], a_at + mt * 16 * Layout::kPitch + k * 32);
        }
#pragma unroll
        for (int j = 0; j < kSTiles; j += 2) {
          u32 b[4];
          LoadMatrix4(b, b_at + j * 8 * Layout::kPitch + k * 32);
#pragma unroll
          for (int mt = 0; mt < kMTiles; ++mt) {
            E::Mma(c[mt][j], a[mt], b[0], b[1]);
            E::Mma(c[mt][j + 1], a[mt], b[2], b[3]);
          }
        }
      }
    }
  }

  // The operand that multiplies rows of the stream: operand a of mma.sync, or for f32 a matrix in
  // shared memory.
  struct InShared {};
  struct InRegisters {
    u32 a[kMTiles][kIsF32 ? 1 : kSTiles / 2][4];
  };
  using Operand = typename Conditional<kIsF32, InShared, InRegisters>::Type;

  __device__ __forceinline__ void Put(Operand& operand, int mt, int h, int j, float left,
                                      float right) const {
    if constexpr (kIsF32) {
      float* row = OwnProducts()[h * 8 + Lane() / 4] + 8 * j + 2 * (Lane() % 4);
      row[0] = left;
      row[1] = right;
    } else {
      operand.a[mt][j / 2][j % 2 * 2 + h] = E::Pack(left, right);
    }
  }

  __device__ auto* OwnProducts() const { return shared_.products.x + Warp() * kWarpRows; }

  // sums += operand times the warp's columns of the stream.
  template <class Layout>
  __device__ __forceinline__ void Add(const Operand& operand, const unsigned char* stream,
                                      Sums<Layout>& sums) const {
    const int column = FirstColumn<Layout>();
    constexpr int kTiles = Shapes::template kSumColumns<Layout> / 8;
    if constexpr (kIsF32) {
      __syncwarp();
      const unsigned char* b = stream + (column + 2 * (Lane() % 4)) * 4;
#pragma unroll 1
      for (int k = 0; k < kStep; ++k) {
        float x[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) x[h] = OwnProducts()[h * 8 + Lane() / 4][k];
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
          if (!HasColumns<Layout, Layout::kPadded>(column, j)) break;
          const float2 y = *reinterpret_cast<const float2*>(b + k * Layout::kPitch + j * 32);
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            sums[0][j][2 * h] = fmaf(x[h], y.x, sums[0][j][2 * h]);
            sums[0][j][2 * h + 1] = fmaf(x[h], y.y, sums[0][j][2 * h + 1]);
          }
        }
      }
      __syncwarp();
    } else {
      const u32 b_at =
          SharedAddress(stream) + Lane() % 16 * Layout::kPitch + Lane() / 16 * 16 + column * 2;
#pragma unroll
      for (int k = 0; k < kStep / 16; ++k) {
#pragma unroll
        for (int j = 0; j < kTiles; j += 2) {
          if (!HasColumns<Layout, Layout::kPadded>(column, j)) break;
          u32 b[4];
          LoadMatrix4Transposed(b, b_at + k * 16 * Layout::kPitch + j * 16);
#pragma unroll
          for (int mt = 0; mt < kMTiles; ++mt) {
            E::Mma(sums[mt][j], operand.a[mt][k], b[0], b[1]);
            E::Mma(sums[mt][j + 1], operand.a[mt][k], b[2], b[3]);
          }
        }
      }
    }
  }

  // --- what is not finite ---

  // Clears a row in shared memory, by one warp.
  template <class Layout>
  __device__ __forceinline__ bool IsFinite(const unsigned char* row) const {
    bool is_finite = true;
    for (int i = Lane(); i < Layout::kChunks * 4; i += kWarpSize) {
      const u32 word = reinterpret_cast<const u32*>(row)[i];
      if constexpr (kIsF32) {
        is_finite &= (word & 0x7f800000) != 0x7f800000;
      } else {
        is_finite &= E::IsFinite(word) && E::IsFinite(word >> 16);
      }
    }
    return __all_sync(kFullWarp, is_finite);
  }
  template <class Layout>
  __device__ __forceinline__ void ClearRow(unsigned char* row) const {
    for (int i = Lane(); i < Layout::kChunks * 4; i += kWarpSize) {
      reinterpret_cast<u32*>(row)[i] = 0;
    }
  }

  // Clears rows that do not count, or are not finite. exists(i): whether there is such a row.
  // lse_log2, d: of the rows; null for keys.
  template <class Exists>
  __device__ __forceinline__ void RecomputeNonFiniteRows(int num, unsigned char* rows1,
                                                         unsigned char* rows2, float* lse_log2,
                                                         float* d, unsigned char* kinds,
                                                         const Exists& exists) const {
#pragma unroll 1
    for (int i = Warp(); i < num; i += kWarps) {
      unsigned char *row1 = rows1 + i * L1::kPitch, *row2 = rows2 + i * L2::kPitch;
      bool is_finite = IsFinite<L1>(row1);
      is_finite &= IsFinite<L2>(row2);
      Kind kind = exists(i) ? kCounts : kCountsNot;
      if (lse_log2 != nullptr) {
        if (lse_log2[i] == Infinity()) kind = kCountsNot;
        is_finite &= lse_log2[i] - lse_log2[i] == 0 && d[i] - d[i] == 0;
      }
      if (kind == kCounts && !is_finite) kind = kIsNotFinite;
      __syncwarp();  // all lanes have read them
      if (kind != kCounts) {
        ClearRow<L1>(row1);
        ClearRow<L2>(row2);
        if (lse_log2 != nullptr && Lane() == 0) {
          lse_log2[i] = Infinity();
          d[i] = 0.0f;
        }
      }
      if (Lane() == 0) kinds[i] = kind;
    }
  }

  __device__ __forceinline__ void RecomputeOwned() {
    WaitCopies<0>();
    __syncthreads();
    RecomputeNonFiniteRows(kOwned, shared_.own1, shared_.own2, kOfKeys ? nullptr : shared_.lse_log2,
                           kOfKeys ? nullptr : shared_.d, shared_.own_kind,
                           [&](int i) { return shared_.own_at[i] >= 0; });
    __syncthreads();
  }

  __device__ __forceinline__ void RecomputeStream(int slot, int begin, const Bounds& all) {
    Stream& stream = shared_.stream[slot];
    RecomputeNonFiniteRows(
        kStep, stream.rows1, stream.rows2, kOfKeys ? shared_.lse_log2 + slot * kStep : nullptr,
        kOfKeys ? shared_.d + slot * kStep : nullptr, shared_.stream_kind,
        [&](int i) { return begin + i >= all.any_begin && begin + i < all.any_end; });
    __syncthreads();
    const int row = Thread();
    if (row >= kOwned || shared_.own_kind[row] == kCountsNot) return;
    const int first = Max(shared_.spans[row][0] - begin, 0);
    const int last = Min(shared_.spans[row][1] - begin, kStep);
#pragma unroll 1
    for (int i = first; i < last; ++i) {
      const bool counts = shared_.stream_kind[i] != kCountsNot;
      const bool is_finite =
          shared_.own_kind[row] == kCounts && shared_.stream_kind[i] != kIsNotFinite;
      const u32 step_class = ClassOf(slot, row, ShiftOf(row), i);
      if (step_class == kStepHidden) continue;
      if constexpr (Variant::kHasMask) {
        if (step_class == kStepMasked && !ShowsOne(row, begin + i)) continue;
      }
      if (counts && !is_finite) shared_.own_is_nan[row] = 1;
    }
  }

  // --- finish ---

  // Whether all of a result is finite.
  template <class Layout, int kHeadDim>
  __device__ __forceinline__ bool Write(void* result, i64 offset, float scale, bool careful,
                                        const Sums<Layout>& sums) const {
    constexpr int kTiles = Min(Shapes::template kSumColumns<Layout>, kHeadDim) / 8;
    const int column = FirstColumn<Layout>();
    bool is_finite = true;
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = FirstRow() + mt * 16 + h * 8 + Lane() / 4;
        const i64 at = shared_.own_at[row];
        if (at < 0) continue;
        const bool is_nan = careful && shared_.own_is_nan[row] != 0;
        const i64 first = offset + at * kHeadDim + column + 2 * (Lane() % 4);
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
          if (!HasColumns<Layout, kHeadDim>(column, j)) break;
          float left = sums[mt][j][2 * h] * scale, right = sums[mt][j][2 * h + 1] * scale;
          is_finite &= left - left == 0.0f && right - right == 0.0f;
          if (is_nan) left = right = __uint_as_float(kFullWarp);
          if constexpr (kIsF32) {
            *reinterpret_cast<float2*>(static_cast<float*>(result) + first + 8 * j) =
                make_float2(left, right);
          } else {
            *reinterpret_cast<u32*>(static_cast<u16*>(result) + first + 8 * j) =
                E::Pack(left, right);
          }
        }
      }
    }
    return is_finite;
  }

  const BackwardCudaParams& p_;
  const AttentionParams& f_;
  const BackwardState& state_;
  Shared& shared_;
  int thread_;            // threadIdx.x
  bool careful_ = false;  // the second pass over a unit whose results are not finite
};

}  // namespace jax_attn
