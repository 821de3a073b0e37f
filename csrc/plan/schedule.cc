#include "plan/schedule.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "plan/prefix.h"
#include "plan/rules/checks.h"
#include "plan/rules/choice.h"
#include "plan/rules/merges.h"
#include "plan/rules/units.h"

namespace jax_attn {
namespace {

// Least loaded queue first; among equals the lowest index, so that the plan is a function of its
// inputs. Keys are load << 20 | queue. A tournament tree: every node is the smaller of its two
// children, and the matches of a queue whose load grew are replayed. No branch depends on loads,
// which a heap would mispredict at every level (512 chunks to 33 queues: half of the time).
template <typename Key>
class LoadTree {
 public:
  // Whether loads that add up to at most total_cost fit the keys.
  static bool Holds(int64_t total_cost) {
    return sizeof(Key) > 8 || total_cost < int64_t{1} << (63 - kQueueBits);
  }

  void Reset(int64_t num_queues) {
    num_queues_ = num_queues;
    leaves_ = 1;
    while (leaves_ < num_queues) leaves_ *= 2;
    keys_.assign(2 * leaves_, kClosed);
    std::iota(keys_.begin() + leaves_, keys_.begin() + leaves_ + num_queues, Key{0});
    for (int64_t i = leaves_ - 1; i > 0; --i) keys_[i] = std::min(keys_[2 * i], keys_[2 * i + 1]);
  }

  // Adds cost to the least loaded queue and returns it.
  int32_t Assign(int64_t cost) {
    Key* const keys = keys_.data();
    Key key = keys[1];
    const auto queue = static_cast<uint64_t>(key & ((Key{1} << kQueueBits) - 1));
    key += static_cast<Key>(cost) << kQueueBits;
    uint64_t i = leaves_ + queue;
    for (keys[i] = key; i > 1; keys[i] = key) {
      key = std::min(key, keys[i ^ 1]);
      i >>= 1;
    }
    return static_cast<int32_t>(queue);
  }

  // Queues that are still empty get no work from now on.
  void CloseEmpty() {
    for (int64_t i = leaves_; i < leaves_ + num_queues_; ++i) {
      if (keys_[i] >> kQueueBits == 0) keys_[i] = kClosed;
    }
    for (int64_t i = leaves_ - 1; i > 0; --i) keys_[i] = std::min(keys_[2 * i], keys_[2 * i + 1]);
  }

  int64_t LoadOf(int32_t queue) const {
    return static_cast<int64_t>(keys_[leaves_ + queue] >> kQueueBits);
  }

  int64_t MaxLoad() const {
    Key most = 0;
    for (int64_t i = leaves_; i < leaves_ + num_queues_; ++i) {
      if (keys_[i] != kClosed) most = std::max(most, keys_[i]);
    }
    return static_cast<int64_t>(most >> kQueueBits);
  }

 private:
  static constexpr int kQueueBits = 20;
  static constexpr Key kClosed = ~Key{0};
  int64_t num_queues_ = 0, leaves_ = 0;
  std::vector<Key> keys_;
};

// A chunk for one head unit, in a queue of a partition.
struct Slot {
  int32_t chunk, unit, queue;
};

struct Assignment {
  std::vector<Chunk> chunks;
  std::vector<Slot> slots;  // in the order in which queues execute them
  int64_t makespan = 0;     // load of the fullest queue
  bool by_weight = false;   // as in Retry
  // By CountAssignment, over all partitions and heads:
  int64_t num_cut_items = 0;
  PlanCounts counts = {};
};

void CountAssignment(const PlanRules& rules, const Tiling& tiling, Assignment* a) {
  a->num_cut_items = 0;
  PlanCounts& n = a->counts;
  n = {};
  for (const Chunk& c : a->chunks) {
    const TileSharing sharing = tiling.SharingOf(c.tile_idx);
    const int64_t heads = NumHeadsOf(rules, c.unit);
    n.num_items += heads;
    if (c.num_splits > 1) a->num_cut_items += heads;
    if (c.num_splits == 1 && !sharing.partial()) continue;
    n.num_partials += heads * std::max(1, sharing.num_units);
    n.num_partial_rows +=
        static_cast<int64_t>(tiling.tiles[c.tile_idx].qo_len) * rules.group_size * heads;
    if (c.split > 0 || sharing.shared()) continue;
    const QueryTile& t = tiling.tiles[c.tile_idx];
    n.num_merge_groups += heads * (sharing.partial() ? 1 : NumMergeGroups(rules, t, c.num_splits));
  }
}

// How chunks are dealt.
struct DealOptions {
  bool leaves_empty = false;                           // as in SharedTrial
  bool by_weight = false;                              // as in Retry
  int64_t most = std::numeric_limits<int64_t>::max();  // a fuller queue ends it: no use
};

// Assigns chunks to queues in the order of their keys, until a queue has more than options.most.
template <typename Key>
void Deal(const PlanRules& rules, const Tiling& tiling, const std::vector<uint64_t>& keys,
          const DealOptions& options, Assignment* a) {
  thread_local LoadTree<Key> loads;
  const size_t num_chunks = a->chunks.size();
  loads.Reset(rules.num_queues);
  a->slots.resize(num_chunks * rules.num_units);
  Slot* slot = a->slots.data();
  auto request_at = [&](size_t i) {
    return tiling.tiles[a->chunks[ChunkOfKey(keys[i])].tile_idx].request;
  };
  bool leaves_empty = options.leaves_empty;
  bool by_weight = false;  // all cost that is left
  for (size_t begin = 0, end; begin < num_chunks; begin = end) {
    end = begin + 1;
    if (leaves_empty && keys[begin] > LastSharedKey()) {
      loads.CloseEmpty();
      leaves_empty = false;
    }
    if (IsSectionKey(keys[begin]) && !by_weight) {
      while (end < num_chunks && IsSectionKey(keys[end]) && request_at(end) == request_at(begin)) {
        ++end;
      }
      const i32 section = tiling.tiles[a->chunks[ChunkOfKey(keys[begin])].tile_idx].section;
      by_weight = end == num_chunks && GoesByWeight(rules, section);
      if (by_weight) end = begin + 1;
    }
    for (i32 u = 0; u < rules.num_units; ++u) {
      for (size_t i = begin; i < end; ++i) {
        const int32_t chunk = ChunkOfKey(keys[i]);
        *slot++ = {chunk, u, loads.Assign(a->chunks[chunk].cost)};
      }
    }
    if (loads.LoadOf(slot[-1].queue) > options.most) break;
  }
  a->makespan = loads.MaxLoad();
}

// Longest processing time first. Graham (1969): within 4/3 of the best makespan for these chunks.
// Before them come requests with several tiles, section by section, head by head (rules/order.h).
void AssignChunks(const PlanRules& rules, const Tiling& tiling, DealOptions options,
                  Assignment* a) {
  thread_local std::vector<uint64_t> keys;
  const size_t num_chunks = a->chunks.size();
  int64_t cost = 0;
  a->by_weight = options.by_weight;
  keys.resize(num_chunks);
  for (size_t i = 0; i < num_chunks; ++i) {
    const Chunk& c = a->chunks[i];
    cost += c.cost;
    // Shared chunks come first, so that they complete few merge groups: merging many groups in one
    // CTA at the end would take longer than the attention itself.
    const bool shared = tiling.SharingOf(c.tile_idx).shared();
    const i32 section = options.by_weight ? 0 : tiling.tiles[c.tile_idx].section;
    keys[i] = section > 0 ? SectionKey(section, i) : ChunkKey(c.cost, i, shared);
  }
  std::sort(keys.begin(), keys.end());
  if (LoadTree<uint64_t>::Holds(cost * rules.num_units)) {
    Deal<uint64_t>(rules, tiling, keys, options, a);
  } else {
    Deal<unsigned __int128>(rules, tiling, keys, options, a);
  }
}

// Returns false if ranges would not take less than `makespan`.
bool AssignRanges(const PlanRules& rules, const Tiling& tiling, i64 makespan, Assignment* a) {
  thread_local std::vector<int32_t> queue_of;
  if (!CutByRanges(rules, tiling.tiles, makespan, &a->chunks, &queue_of)) return false;
  a->by_weight = false;
  a->slots.clear();
  for (size_t i = 0; i < a->chunks.size(); ++i) {
    a->slots.push_back({static_cast<int32_t>(i), a->chunks[i].unit, queue_of[i]});
  }
  thread_local std::vector<int64_t> loads;
  loads.assign(rules.num_queues, 0);
  for (size_t i = 0; i < a->chunks.size(); ++i) loads[queue_of[i]] += a->chunks[i].cost;
  a->makespan = *std::max_element(loads.begin(), loads.end());
  return true;
}

// What the fullest queue has at least, in any order: the mean, and as many chunks as the fullest
// queue of equal ones.
int64_t LeastMakespan(const PlanRules& rules, const CutTotals& cut) {
  const int64_t chunks_of_queue = CeilDivide(cut.num_chunks * rules.num_units, rules.num_queues);
  return std::max<int64_t>(cut.cost * rules.num_units / rules.num_queues,
                           chunks_of_queue * cut.least_cost);
}

// Cuts that were dealt, with their order.
class DealtCuts {
 public:
  // Whether it is a new one, which it is not from now on.
  bool Add(const CutTotals& cut, bool by_weight) {
    const Dealt dealt = {cut.lengths, by_weight};
    const auto end = dealt_.begin() + num_dealt_;
    if (std::find(dealt_.begin(), end, dealt) != end) return false;
    dealt_[num_dealt_++] = dealt;
    return true;
  }

 private:
  using Dealt = std::pair<std::array<int32_t, kMaxTiles>, bool>;
  std::array<Dealt, 1 + kNumRetries> dealt_;
  int num_dealt_ = 0;
};

bool HaveSeveralHeights(const std::vector<QueryTile>& tiles) {
  return std::any_of(tiles.begin(), tiles.end(),
                     [&](const QueryTile& t) { return t.tile != tiles[0].tile; });
}

// Replaces `best` by a better schedule: stream-K, or Algorithm 1 with shorter chunks. The trials
// must not depend on capacities, or capacities would change a result's bits. first_longest_cost: of
// the schedule in `best`.
void Rebalance(const PlanRules& rules, const Tiling& tiling, int64_t span_cost,
               int64_t first_longest_cost, Assignment* best) {
  thread_local Assignment trial;
  const auto num_tiles = static_cast<int64_t>(tiling.tiles.size());
  const int64_t total_cost = WholeCost(rules, num_tiles, span_cost);
  auto balanced = [&] { return IsBalanced(best->makespan, total_cost, rules.num_queues); };
  if (balanced()) return;
  const bool several = HaveSeveralHeights(tiling.tiles);
  const bool large = HaveLargeStates(several, tiling.tiles[0]);
  const i64 margin = MarginOfSplits(large);
  const i64 mean = total_cost / rules.num_queues;
  if (MayHaveRanges(rules, num_tiles) &&
      AreRangesWorthIt(rules, several, margin, mean, best->makespan)) {
    if (AssignRanges(rules, tiling, best->makespan, &trial) &&
        AreRangesWorthIt(rules, several, margin, trial.makespan, best->makespan)) {
      std::swap(*best, trial);
    }
    if (balanced()) return;
  }
  DealtCuts dealt;
  dealt.Add(TotalsOfCut(rules, tiling.tiles, first_longest_cost), false);
  for (i32 r = 0; r < kNumRetries; ++r) {
    const Retry retry = RetryOf(rules, span_cost, first_longest_cost, large, r);
    if (!MayBeWorthMoreSplits(retry.margin, total_cost, rules.num_queues, best->makespan)) continue;
    const CutTotals cut = TotalsOfCut(rules, tiling.tiles, retry.longest_cost);
    // A cut that was dealt before has no smaller makespan now, and margins of an order are equal.
    if (cut.num_split_chunks * rules.num_kv_heads > rules.max_balanced_partials ||
        !IsWorthMoreSplits(retry.margin, LeastMakespan(rules, cut), best->makespan) ||
        !dealt.Add(cut, retry.by_weight)) {
      continue;
    }
    CutByLength(rules, tiling.tiles, retry.longest_cost, &trial.chunks);
    const i64 most = MostWorthMoreSplits(retry.margin, best->makespan);
    AssignChunks(rules, tiling, {false, retry.by_weight, most}, &trial);
    if (trial.makespan <= most) std::swap(*best, trial);
    if (balanced()) return;
  }
}

// Replaces `best` by a schedule with longer chunks if that is predicted to be faster. first: the
// cut of the first schedule, which is no faster than `best`.
void TryFewerSplits(const PlanRules& rules, const Tiling& tiling, int64_t span_cost,
                    int64_t longest_span_cost, int64_t first_longest_cost, Assignment* best) {
  thread_local Assignment trial;
  if (best->chunks.empty()) return;
  const auto may_gain = [&] {  // another order may be better even where no tile is cut
    return best->chunks.size() > tiling.tiles.size() || best->chunks.front().unit != kEveryUnit ||
           best->by_weight;
  };
  for (i32 r = FirstOfFewer(rules); r < kNumFewerSplits && may_gain(); ++r) {
    if (!MayBeWorthFewerSplits(rules, r, longest_span_cost, best->makespan)) continue;
    const i64 longest_cost = LongestOfFewer(rules, span_cost, r);
    const CutTotals cut = TotalsOfCut(rules, tiling.tiles, longest_cost);
    if (LeastMakespan(rules, cut) >= best->makespan ||
        cut.lengths == TotalsOfCut(rules, tiling.tiles, first_longest_cost).lengths) {
      continue;
    }
    CutByLength(rules, tiling.tiles, longest_cost, &trial.chunks);
    AssignChunks(rules, tiling, {false, false, best->makespan - 1}, &trial);
    if (trial.makespan < best->makespan) std::swap(*best, trial);
  }
}

// Checks whether a schedule other than kBalanced fits the capacities; such a schedule is unique.
// Checked before its chunks are made, since they may be many more than fit.
PlanFault CheckChunks(const PlanRules& rules, const std::vector<QueryTile>& tiles) {
  if (rules.schedule == kBalanced) return {};
  i64 num_chunks = 0;
  for (const QueryTile& t : tiles) num_chunks += CutTile(rules, kUncut, t).num_splits;
  if (num_chunks >= kMaxChunks) return MakeFault(kFaultChunks, 0, num_chunks);
  const i64 num_items = num_chunks * rules.num_kv_heads;
  return num_items > rules.max_items ? MakeFault(kFaultItems, 0, num_items) : PlanFault{};
}

// Assigns chunks under the spec's schedule, ignoring shared prefixes.
PlanFault Assign(const PlanRules& rules, const Tiling& tiling, Assignment* best) {
  const std::vector<QueryTile>& tiles = tiling.tiles;
  int64_t span_cost = 0, longest_span_cost = 0;
  for (const QueryTile& t : tiles) {
    span_cost += SpanCost(t);
    longest_span_cost = std::max(longest_span_cost, static_cast<int64_t>(SpanCost(t)));
  }
  if (PlanFault f = CheckChunks(rules, tiles); f.code) return f;
  const i64 longest_cost =
      FirstLongestCost(rules, static_cast<int64_t>(tiles.size()), longest_span_cost,
                       LongestChunkCost(rules, span_cost, 2));
  CutByLength(rules, tiles, longest_cost, &best->chunks);
  AssignChunks(rules, tiling, {}, best);
  if (rules.schedule == kBalanced) {
    Rebalance(rules, tiling, span_cost, longest_cost, best);
    TryFewerSplits(rules, tiling, span_cost, longest_span_cost, longest_cost, best);
  }
  return {};
}

// found: the schedule fits the capacities of schedules without sharing.
PlanFault AssignShared(const PlanRules& rules, const Tiling& tiling, Assignment* best,
                       bool* found) {
  thread_local Assignment trial;
  *found = false;
  if (PlanFault f = CheckChunks(rules, tiling.tiles); f.code) {
    return f.code == kFaultChunks ? PlanFault{} : f;
  }
  for (i32 r = 0; r < kNumSharedTrials; ++r) {
    CutShared(rules, tiling, kSharedTrials[r], &trial.chunks);
    AssignChunks(rules, tiling, {kSharedTrials[r].leaves_empty}, &trial);
    CountAssignment(rules, tiling, &trial);
    const bool fits =
        rules.schedule != kBalanced || (trial.num_cut_items <= rules.max_balanced_partials &&
                                        trial.counts.num_partial_rows <= MaxSharedRows(rules));
    if (fits && (!*found || trial.makespan < best->makespan)) {
      std::swap(*best, trial);
      *found = true;
    }
    if (rules.schedule != kBalanced) break;  // only one way to split
  }
  return {};
}

// Mean load per queue: no schedule without sharing finishes all queues earlier.
int64_t MeanFlatLoad(const PlanRules& rules, const Tiling& flat) {
  int64_t total = 0;
  for (const QueryTile& t : flat.tiles) {
    total += ItemCost(rules, t, 0, false) + SpanCost(t);
  }
  return total * rules.num_units / rules.num_queues;
}

// Where the states of a chunk are stored, and which group merges them.
struct ChunkPlace {
  int32_t partial_row = -1;  // for the first head of the chunk; those of one head are contiguous
  int32_t group = -1;        // for the first head of the chunk
  int32_t group_step = 0;    // from one of its heads to the next
};

// Partial i of a group, for every kv head.
struct PartialPlace {
  int32_t first_row, head_step;
};

void AddGroup(const QueryTile& t, int32_t head, int32_t group, int32_t parent,
              ScheduleOutput* out) {
  out->merge_groups[group] = {t.first_token, t.qo_len, head, 0, out->num_partials, 1, parent, 0};
}

void AddPartial(int32_t group, int32_t row, ScheduleOutput* out) {
  ++out->merge_groups[group].num_partials;
  out->partial_rows[out->num_partials++] = row;
}

// Adds the merge groups of one kv head for a tile that is split into chunks like c and shares
// nothing. Its partial states begin at `row`.
void AddTileGroups(const PlanRules& rules, const QueryTile& t, const Chunk& c, int32_t head,
                   int32_t row, ScheduleOutput* out) {
  const int32_t num_groups = NumMergeGroups(rules, t, c.num_splits);
  const int32_t first = out->num_merge_groups;
  out->num_merge_groups += num_groups;
  AddGroup(t, head, first, -1, out);
  MergeGroup& final = out->merge_groups[first];
  final.first_offset = FirstReduceOffset(rules, t);
  for (int32_t s = 0; s < c.num_splits; ++s) {
    const int32_t group = first + MergeGroupOfSplit(num_groups, s);
    if (group > first && s % kReduceBatch == 0) AddGroup(t, head, group, first, out);
    AddPartial(group, row, out);
    row += t.qo_len * rules.group_size;
  }
  if (num_groups > 1) {
    final.num_partials = static_cast<int32_t>(CeilDivide(c.num_splits, kReduceBatch));
    final.partials_step = kReduceBatch;
  }
}

// The merge groups of units come first: [head, unit], so that those of any shared tile are
// contiguous. Their partial states are in kv order: first those of shared tiles, then the unit's
// own.
void NumberUnits(const PlanRules& rules, const Tiling& tiling, const std::vector<Chunk>& chunks,
                 const std::vector<ChunkPlace>& places, ScheduleOutput* out) {
  thread_local std::vector<std::vector<PartialPlace>> partials;
  const auto num_units = static_cast<int32_t>(tiling.unit_tiles.size());
  if (partials.size() < tiling.unit_tiles.size()) partials.resize(num_units);
  for (auto& list : partials) list.clear();
  const auto add = [&](const TileSharing& sharing, const Chunk& c, const ChunkPlace& place) {
    const int32_t step = tiling.tiles[c.tile_idx].qo_len * rules.group_size * c.num_splits;
    const int32_t first = sharing.shared() ? sharing.first_unit : sharing.unit;
    int32_t row = place.partial_row;
    for (int32_t u = first; u < first + std::max(1, sharing.num_units); ++u) {
      partials[u].push_back({row, step});
      row += tiling.tiles[tiling.unit_tiles[u]].qo_len * rules.group_size;
    }
  };
  for (bool shared : {true, false}) {  // ancestors come first among the shared tiles
    for (size_t i = 0; i < chunks.size(); ++i) {
      const TileSharing sharing = tiling.SharingOf(chunks[i].tile_idx);
      if (sharing.partial() && sharing.shared() == shared) add(sharing, chunks[i], places[i]);
    }
  }
  for (int32_t head = 0; head < rules.num_kv_heads; ++head) {
    for (int32_t u = 0; u < num_units; ++u) {
      const int32_t group = head * num_units + u;
      AddGroup(tiling.tiles[tiling.unit_tiles[u]], head, group, -1, out);
      for (const PartialPlace& place : partials[u]) {
        AddPartial(group, place.first_row + head * place.head_step, out);
      }
    }
  }
}

// Numbers partial states and merge groups.
void PlacePartials(const PlanRules& rules, const Tiling& tiling, const std::vector<Chunk>& chunks,
                   std::vector<ChunkPlace>* places, ScheduleOutput* out) {
  const auto num_units = static_cast<int32_t>(tiling.unit_tiles.size());
  out->num_merge_groups = rules.num_kv_heads * num_units;
  places->assign(chunks.size(), {});
  for (size_t i = 0; i < chunks.size(); ++i) {
    const Chunk& c = chunks[i];
    const QueryTile& t = tiling.tiles[c.tile_idx];
    const TileSharing sharing = tiling.SharingOf(c.tile_idx);
    if (c.num_splits == 1 && !sharing.partial()) continue;
    const int32_t rows = t.qo_len * rules.group_size;
    ChunkPlace& place = (*places)[i];
    if (c.split > 0) {
      place = (*places)[i - 1];  // chunks of a tile are consecutive
      place.partial_row += rows;
      if (!sharing.partial()) {
        place.group += MergeGroupOfSplit(place.group_step, c.split) -
                       MergeGroupOfSplit(place.group_step, c.split - 1);
      }
      continue;
    }
    const int32_t heads = NumHeadsOf(rules, c.unit);
    place.partial_row = out->num_partial_rows;
    out->num_partial_rows += heads * rows * c.num_splits;
    if (sharing.partial()) {
      place.group = sharing.shared() ? sharing.first_unit : sharing.unit;
      place.group_step = num_units;
      continue;
    }
    place.group_step = NumMergeGroups(rules, t, c.num_splits);
    place.group = out->num_merge_groups + MergeGroupOfSplit(place.group_step, 0);
    for (int32_t h = 0; h < heads; ++h) {
      AddTileGroups(rules, t, c, HeadOf(rules, c.unit, h),
                    place.partial_row + h * c.num_splits * rows, out);
    }
  }
  NumberUnits(rules, tiling, chunks, *places, out);
}

void WriteItems(const PlanRules& rules, const Tiling& tiling, const Assignment& a,
                ScheduleOutput* out) {
  thread_local std::vector<int32_t> filled;
  thread_local std::vector<ChunkPlace> places;
  const std::vector<QueryTile>& tiles = tiling.tiles;
  PlacePartials(rules, tiling, a.chunks, &places, out);
  std::copy(tiling.qo_indices.begin(), tiling.qo_indices.end(), out->qo_indices);
  out->num_shared_tokens = static_cast<int32_t>(tiling.qo_indices.size());

  // Local copies, because the compiler must assume that every write of an item changes the
  // arguments.
  const int64_t heads_per_unit = rules.heads_per_unit, partitions = rules.num_partitions;
  const int32_t group_size = rules.group_size, num_units = rules.num_units;
  const int64_t num_ctas = rules.num_ctas;
  int32_t* const queue_indptr = out->queue_indptr;
  WorkItem* const items = out->items;
  filled.assign(rules.num_queues, 0);
  for (const Slot& s : a.slots) filled[s.queue] += static_cast<int32_t>(heads_per_unit);
  // Queue q of partition p is CTA q * partitions + p: neighbouring CTAs read the same tokens of
  // neighbouring heads at the same time, and these share DRAM rows.
  int32_t begin = 0;
  for (int64_t queue = 0, cta = 0; cta < num_ctas; ++queue) {
    for (int64_t p = 0; p < partitions; ++p, ++cta) {
      queue_indptr[cta] = begin;
      begin += filled[queue];
    }
  }
  queue_indptr[num_ctas] = begin;
  out->num_items = begin;

  // Not with shared tiles, which come first for another reason.
  const bool both_ends = HaveSeveralHeights(tiles) && tiling.unit_tiles.empty();
  filled.assign(rules.num_queues, 0);
  for (const Slot& slot : a.slots) {
    const Chunk& c = a.chunks[slot.chunk];
    const QueryTile& t = tiles[c.tile_idx];
    const ChunkPlace place = places[slot.chunk];
    const bool split = place.group >= 0;
    const int32_t num_groups = split ? std::max(1, tiling.SharingOf(c.tile_idx).num_units) : 0;
    const int32_t row_step = split ? t.qo_len * group_size * c.num_splits : 0;
    const int32_t at = filled[slot.queue];
    filled[slot.queue] += static_cast<int32_t>(heads_per_unit);
    WorkItem item = {t.first_token, t.qo_len, 0,  t.tile, c.kv_begin, c.kv_end,
                     t.kv_base,     t.q_pos,  -1, -1,     t.request,  num_groups};
    for (int64_t p = 0; p < partitions; ++p) {
      const int64_t cta = slot.queue * partitions + p;
      const int64_t first = (p * num_units + slot.unit) * heads_per_unit;
      const bool backwards = both_ends && BeginsWithSmallTiles(num_ctas, cta);
      WorkItem* to = items + (backwards ? queue_indptr[cta + 1] - at - heads_per_unit
                                        : queue_indptr[cta] + at);
      // Index of a head among those that have the chunk.
      const int64_t first_idx = c.unit == kEveryUnit ? first : p * heads_per_unit;
      for (int64_t h = 0; h < heads_per_unit; ++h) {
        item.kv_head = static_cast<int32_t>(first + h);
        if (split) {
          const auto idx = static_cast<int32_t>(first_idx + h);
          item.partial_row = place.partial_row + idx * row_step;
          item.merge_idx = place.group + idx * place.group_step;
        }
        to[h] = item;
      }
    }
  }
}

}  // namespace

PlanFault WriteSchedule(const PlanRules& rules, const Tiling& flat, const Tiling* shared,
                        ScheduleOutput* out) {
  thread_local Assignment best, best_shared;
  bool shares = false;
  if (shared != nullptr) {
    if (PlanFault f = AssignShared(rules, *shared, &best_shared, &shares); f.code) return f;
  }
  if (!shares || best_shared.makespan > MeanFlatLoad(rules, flat)) {
    const PlanFault f = Assign(rules, flat, &best);
    if (f.code && !shares) return f;
    shares = shares && (f.code || best_shared.makespan <= best.makespan);
  }
  if (!shares) CountAssignment(rules, flat, &best);
  const Assignment& chosen = shares ? best_shared : best;
  if (PlanFault f = CheckCapacities(rules, chosen.counts); f.code) return f;
  out->shares = shares;
  WriteItems(rules, shares ? *shared : flat, chosen, out);
  return {};
}

}  // namespace jax_attn
