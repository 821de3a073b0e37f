// What the stages of the device planner share, and what they hand to one another; see plan.cuh.
#pragma once

#include "cuda/plan/cta.cuh"
#include "cuda/plan/pages.cuh"
#include "plan/rules/checks.h"
#include "plan/rules/choice.h"
#include "plan/rules/cuts.h"
#include "plan/rules/sharing.h"
#include "plan/rules/steps.h"

namespace jax_attn {

static_assert(kMaxChunks == 1ll << kChunkBits, "a key holds any chunk");

__device__ __forceinline__ u32 ClampToWord(i64 x) {
  return static_cast<u32>(Least(x, 0xffffffffll));
}

// --- what stages hand to one another ---

// The query tiles that are cut: those of the batch, or, with shared prefixes, those of a
// SharedTiling. kGeneral: as in PlanContext.
template <bool kGeneral>
struct PlanTiles {
  i32 num_tiles;
  QueryTile* tiles;       // [num_tiles]
  const i32* first_tile;  // [batch_size + 1] of each request
  i64 span_cost;          // of all tiles; with shared prefixes, of those that are not shared
  // Of the batch alone:
  i64 longest_span_cost;
  bool several_heights;
  // With shared prefixes alone:
  const TileSharing* sharing;  // [num_tiles]; else null
  i64 shared_span_cost;        // of shared tiles

  __device__ bool shares() const { return kGeneral && sharing != nullptr; }

  // What the tile is besides; without shared prefixes: nothing.
  __device__ TileSharing SharingOf(i32 i) const {
    return shares() ? sharing[i] : TileSharing{0, -1, 0, 0};
  }
};

// Step lists of some tiles, one behind the other.
struct StepLists {
  i32 num_words, num_steps;
  const i32* first_word;   // [num_tiles + 1] of each tile
  const StepWord* words;   // [num_words]
  const i32* first_entry;  // [num_words + 1] of each word
};

// Where a chunk of one head unit went: a queue, and how many went there before it.
struct __align__(8) PlanSlot {
  i32 queue, place;
};

// The chunks of some tiles, and their queues.
struct PlanChunks {
  i32* chunk_base;  // [num_tiles + 1] first chunk of a tile
  TileCut* cuts;    // [num_tiles] unless by ranges
  u64* keys;        // [num_chunks, to a power of two] in the order of rules/order.h
  i64* costs;       // [num_chunks] in the order of keys
  PlanSlot* slots;  // [num_chunks * num_units] in the order of keys; sections as SlotsOf says
  u32* weights;     // [num_chunks * num_units] costs of slots as dealers add them, or their keys
  i32* filled;      // [num_queues] chunks of a queue
  union {           // for whoever assigns chunks
    i64* loads;     // [num_queues]
    u32* counts;    // see DealInRegisters
  };

  __device__ i32 NumChunksOf(i32 i) const { return chunk_base[i + 1] - chunk_base[i]; }
  __device__ i64 SplitsOf(i32 i) const {  // 0: not cut
    const i64 splits = NumChunksOf(i);
    return splits > 1 ? splits : 0;
  }
};

// One way to cut tiles by length, to be dealt.
struct PlanTrial {
  PlanChunks chunks;
  i64 cost;        // of all chunks of all units
  i32 num_chunks;  // negative: the trial has more parts than a plan may
  // Of the queue in the keys by which chunks are dealt, 31 bits with a load above; negative: the
  // queues are too many, or the loads may be too large.
  i32 key_bits;
  // With kGeneral: from this slot on queues that have none get none.
  i32 leaves_empty_from;
};

// Chunks that have their queues.
struct PlanSchedule {
  PlanChunks chunks;
  i32 num_chunks;
  i64 makespan;      // load of the fullest queue; with kGeneral
  const i32* inner;  // by ranges: the positions that cut a tile, in order; else null
};

// --- what they share ---

// kIsGeneral: prefixes may be told, PlanParams::levels, the schedule may be kAuto, and tiles may
// have step lists.
template <class Traits, bool kIsGeneral>
struct PlanContext {
  static constexpr bool kGeneral = kIsGeneral;
  static constexpr int kNumThreads = Traits::kNumThreads;
  using Cta = PlanCta<kNumThreads, kGeneral>;
  using Tiles = PlanTiles<kGeneral>;

  // Chunks are dealt by a team of warps, one on each scheduler of a multiprocessor, so that several
  // trials are at once, or the rest of the CTA does something else.
  static constexpr int kTeamWarps = Min(4, Cta::kNumWarps);
  static constexpr int kTeamThreads = kTeamWarps * kWarpSize;
  static constexpr int kNumTeams = Cta::kNumWarps / kTeamWarps;
  // Queues of a lane at most, and what their counts take, for two rounds.
  static constexpr int kMostQueues = 9;
  static constexpr i32 kMostCounts = 2 * ((kMostQueues + 1) / 2) * kWarpSize * kTeamWarps;

  static constexpr int kMostTrials =
      kGeneral ? Max(1 + kNumRetries, kNumSharedTrials) : 1 + kNumRetries;
  // Behind the arena, from which arrays are taken.
  struct Shared {
    typename Cta::WarpTotals warp_totals;
    PlanTrial trials[kMostTrials];
    i64 makespan[kMostTrials];
    PlanCounts counts;
    StepLists lists[2];  // of the flat tiles, and of those with shared prefixes
    bool others_done;    // CTAs 1 and on, and what they found
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
