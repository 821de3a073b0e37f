// Records that the stages of the device planner share and pass to each other; see plan.cuh.
#pragma once

#include "cuda/plan/cta.cuh"
#include "cuda/plan/pages.cuh"
#include "plan/rules/checks.h"
#include "plan/rules/choice.h"
#include "plan/rules/cuts.h"
#include "plan/rules/sharing.h"
#include "plan/rules/steps.h"
#include "plan/rules/units.h"

namespace jax_attn {

static_assert(kMaxChunks == 1ll << kChunkBits, "a key holds any chunk");

__device__ __forceinline__ u32 ClampToWord(i64 x) {
  return static_cast<u32>(Least(x, 0xffffffffll));
}

// --- what stages hand to one another ---

// The query tiles that are cut: those of the batch or, with shared prefixes, of a SharedTiling.
// kGeneral: as in PlanContext.
template <bool kGeneral>
struct PlanTiles {
  i32 num_tiles;
  QueryTile* tiles;       // [num_tiles]
  const i32* first_tile;  // [batch_size + 1] first tile of each request
  i64 span_cost;          // of all tiles; with shared prefixes, of those that are not shared
  // Only for the batch:
  i64 longest_span_cost;
  bool several_tile_sizes;
  // Only with shared prefixes:
  const TileSharing* sharing;  // [num_tiles]; else null
  i64 shared_span_cost;        // of shared tiles

  __device__ bool shares() const { return kGeneral && sharing != nullptr; }

  // The tile's sharing; without shared prefixes there is none.
  __device__ TileSharing SharingOf(i32 i) const {
    return shares() ? sharing[i] : TileSharing{0, -1, 0, 0};
  }
};

// The step lists of some tiles, one behind the other.
struct StepLists {
  i32 num_words, num_steps;
  const i32* first_word;   // [num_tiles + 1] first word of each tile
  const StepWord* words;   // [num_words]
  const i32* first_entry;  // [num_words + 1] first entry of each word
};

// Where a chunk of one head unit went: its queue, and how many chunks that had before.
struct __align__(8) PlanSlot {
  i32 queue, place;
};

// The chunks of some tiles, and their queues.
struct PlanChunks {
  i32* chunk_base;  // [num_tiles + 1] first chunk of a tile
  TileCut* cuts;    // [num_tiles] not with ranges
  u64* keys;        // [num_chunks, to a power of two] in the order of rules/order.h
  i64* costs;       // [num_chunks] in the order of keys
  PlanSlot* slots;  // [num_chunks * num_units] in the order of keys; sections as SlotsOf says
  u32* weights;     // [num_chunks * num_units] costs of slots, as dealers add them, or their keys
  i32* filled;      // [num_queues] number of chunks in a queue
  union {           // scratch of the code that assigns chunks
    i64* loads;     // [num_queues]
    u32* counts;    // see DealInRegisters
  };

  __device__ i32 NumChunksOf(i32 i) const { return chunk_base[i + 1] - chunk_base[i]; }
  __device__ i64 SplitsOf(i32 i) const {  // parts that a tile is cut into; 0: not cut
    const i64 splits = NumChunksOf(i);
    return splits > 1 ? splits : 0;
  }
};

// One way to cut tiles by length, before its chunks are dealt.
struct PlanTrial {
  PlanChunks chunks;
  i64 cost;        // of all chunks of all units
  i64 margin;      // as in Retry
  i32 num_chunks;  // negative: more parts than a plan may have, or it cannot be worth them
  // Bits of the queue in the keys by which chunks are dealt: 31 bits with the load above. Negative:
  // too many queues, or loads that may be too large.
  i32 key_bits;
  // With kGeneral: from this slot on, queues that have no chunk get none.
  i32 leaves_empty_from;
  bool by_weight;  // as in Retry
};

// Chunks with their queues.
struct PlanSchedule {
  PlanChunks chunks;  // of tiles or, with ranges, of tiles of head units (rules/units.h)
  i32 num_chunks;
  i64 makespan;      // load of the fullest queue
  const i32* inner;  // ranges: the positions that cut a tile, in order; else null
  bool by_weight;    // as in Retry

  __device__ bool has_ranges() const { return inner != nullptr; }
};

// What a schedule cuts: tiles, each once or, with ranges, once for each head unit.
template <class Tiles>
__device__ __forceinline__ i32 NumCutTiles(const PlanRules& rules, const Tiles& tiles,
                                           bool by_unit) {
  return by_unit ? tiles.num_tiles * rules.num_units : tiles.num_tiles;
}
template <class Tiles>
__device__ __forceinline__ UnitTile CutTileAt(const PlanRules& rules, const Tiles& tiles,
                                              bool by_unit, i32 i) {
  if (!by_unit) return {i, kEveryUnit};
  const i32 request = tiles.tiles[i / rules.num_units].request;
  const i32 first = tiles.first_tile[request];
  return UnitTileOf(rules, first, tiles.first_tile[request + 1] - first,
                    i - first * rules.num_units);
}

// Trials for tiles that share nothing: the first schedule, retries, and from kFirstOfFewer on fewer
// splits.
inline constexpr int kFirstOfFewer = 1 + kNumRetries;
inline constexpr int kNumFlatTrials = kFirstOfFewer + kNumFewerSplits;

// --- what they share ---

// kIsGeneral: prefixes may be given (PlanParams::levels), the schedule may be kAuto, and tiles may
// have step lists.
template <class Traits, bool kIsGeneral>
struct PlanContext {
  static constexpr bool kGeneral = kIsGeneral;
  static constexpr int kNumThreads = Traits::kNumThreads;
  using Cta = PlanCta<kNumThreads, kGeneral>;
  using Tiles = PlanTiles<kGeneral>;

  // A team of warps deals chunks, one warp on each scheduler of a multiprocessor. So several trials
  // run at once, or the rest of the CTA does something else.
  static constexpr int kTeamWarps = Min(4, Cta::kNumWarps);
  static constexpr int kTeamThreads = kTeamWarps * kWarpSize;
  static constexpr int kNumTeams = Cta::kNumWarps / kTeamWarps;
  // Most queues of a lane, and what their counts take in two rounds.
  static constexpr int kMostQueues = 9;
  static constexpr i32 kMostCounts = 2 * ((kMostQueues + 1) / 2) * kWarpSize * kTeamWarps;

  static constexpr int kMostTrials = Max(kNumFlatTrials, kGeneral ? kNumSharedTrials : 0);
  // The arena, from which arrays are taken, lies behind it.
  struct Shared {
    typename Cta::WarpTotals warp_totals;
    PlanTrial trials[kMostTrials];
    i64 makespan[kMostTrials];
    PlanCounts counts;
    StepLists lists[2];  // of the batch's tiles, and of those with shared prefixes
    bool others_done;    // whether CTAs 1 and up are done, and what they found
    PageFindings found;
  };
  static constexpr int kArenaBytes =
      (Traits::kSmemBytes - static_cast<int>(sizeof(Shared))) / 16 * 16;

  __device__ PlanContext(const PlanParams& params, unsigned char* smem)
      : p(params),
        rules(params.rules),
        in(params.inputs),
        shared(*reinterpret_cast<Shared*>(smem + kArenaBytes)),
        cta(smem, kArenaBytes, params.scratch, shared.warp_totals) {}

  __device__ int thread() const { return cta.thread(); }
  template <class T>
  __device__ T* Take(i64 count) {
    return cta.template Take<T>(count);
  }

  const PlanParams& p;
  const PlanRules& rules;
  const PlanInputs& in;
  Shared& shared;
  Cta cta;
};

}  // namespace jax_attn
