#include "plan/schedule.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>

namespace jax_attn {
namespace {

// Least loaded queue first; among equals the lowest index, so that the plan is a function of its
// inputs. Keys are load << 20 | queue, a binary heap under replace-top.
class LoadHeap {
 public:
  void Reset(int64_t num_queues) {
    keys_.resize(num_queues);
    std::iota(keys_.begin(), keys_.end(), uint64_t{0});
  }

  // Adds cost to the least loaded queue and returns it.
  int32_t Assign(int64_t cost) {
    const uint64_t key = keys_[0];
    const uint64_t moved = key + (static_cast<uint64_t>(cost) << kQueueBits);
    const size_t n = keys_.size();
    size_t hole = 0;
    for (size_t child = 1; child < n; child = 2 * hole + 1) {
      if (child + 1 < n && keys_[child + 1] < keys_[child]) ++child;
      if (keys_[child] >= moved) break;
      keys_[hole] = keys_[child];
      hole = child;
    }
    keys_[hole] = moved;
    return static_cast<int32_t>(key & ((uint64_t{1} << kQueueBits) - 1));
  }

  int64_t MaxLoad() const {
    return static_cast<int64_t>(*std::max_element(keys_.begin(), keys_.end()) >> kQueueBits);
  }

 private:
  static constexpr int kQueueBits = 20;
  std::vector<uint64_t> keys_;
};

struct Assignment {
  std::vector<Chunk> chunks;
  std::vector<int32_t> order;     // chunk indices, heaviest first
  std::vector<int32_t> queue_of;  // [order position * units + unit] queue within a partition
  int64_t makespan = 0;           // load of the fullest queue
  int64_t total_cost = 0;         // of all queues of a partition
  int64_t num_items = 0;          // over all partitions and heads
  int64_t num_merge_groups = 0;
  int64_t num_partials = 0;
  int64_t num_partial_rows = 0;
};

void CountAssignment(const PlanRules& rules, const std::vector<QueryTile>& tiles, Assignment* a) {
  const int64_t heads = rules.num_kv_heads;
  a->total_cost = 0;
  a->num_items = static_cast<int64_t>(a->chunks.size()) * heads;
  a->num_merge_groups = a->num_partials = a->num_partial_rows = 0;
  for (const Chunk& c : a->chunks) {
    a->total_cost += c.cost * rules.num_units;
    if (c.num_splits == 1) continue;
    a->num_partials += heads;
    a->num_partial_rows +=
        static_cast<int64_t>(tiles[c.tile_idx].qo_len) * rules.group_size * heads;
    if (c.split == 0) a->num_merge_groups += heads;
  }
}

// Longest processing time first. Graham (1969): within 4/3 of the best makespan for these chunks.
void AssignChunks(const PlanRules& rules, const std::vector<QueryTile>& tiles, Assignment* a) {
  thread_local LoadHeap heap;
  thread_local std::vector<uint64_t> keys;
  const size_t num_chunks = a->chunks.size();
  keys.resize(num_chunks);
  for (size_t i = 0; i < num_chunks; ++i) {
    // Descending cost, ascending index. Costs of one item stay far below 2^38.
    keys[i] = (((uint64_t{1} << 38) - 1 - static_cast<uint64_t>(a->chunks[i].cost)) << 26) | i;
  }
  std::sort(keys.begin(), keys.end());

  heap.Reset(rules.num_queues);
  a->order.resize(num_chunks);
  a->queue_of.resize(num_chunks * rules.num_units);
  size_t slot = 0;
  for (size_t i = 0; i < num_chunks; ++i) {
    a->order[i] = static_cast<int32_t>(keys[i] & ((1u << 26) - 1));
    const int64_t cost = a->chunks[a->order[i]].cost;
    for (i32 u = 0; u < rules.num_units; ++u) a->queue_of[slot++] = heap.Assign(cost);
  }
  a->makespan = heap.MaxLoad();
  CountAssignment(rules, tiles, a);
}

void AssignRanges(const PlanRules& rules, const std::vector<QueryTile>& tiles, Assignment* a) {
  CutByRanges(rules, tiles, &a->chunks, &a->queue_of);
  a->order.resize(a->chunks.size());
  std::iota(a->order.begin(), a->order.end(), 0);
  thread_local std::vector<int64_t> loads;
  loads.assign(rules.num_queues, 0);
  for (size_t i = 0; i < a->chunks.size(); ++i) loads[a->queue_of[i]] += a->chunks[i].cost;
  a->makespan = *std::max_element(loads.begin(), loads.end());
  CountAssignment(rules, tiles, a);
}

bool HaveSeveralHeights(const std::vector<QueryTile>& tiles) {
  return std::any_of(tiles.begin(), tiles.end(),
                     [&](const QueryTile& t) { return t.tile != tiles[0].tile; });
}

Status RefuseCapacity(const char* what, const char* capacity, int64_t max, int64_t need) {
  return Status::Error(std::string("plan: ") + what + ": expected at most " + capacity + " = " +
                       std::to_string(max) + ", got " + std::to_string(need) + "; raise " +
                       capacity + " of the AttentionSpec.");
}

// Replaces `best` by a better schedule of Algorithm 1 with shorter chunks, or of stream-K. What is
// tried must not depend on capacities, or they would change a result's bits.
void Rebalance(const PlanRules& rules, const std::vector<QueryTile>& tiles, Assignment* best) {
  thread_local Assignment trial;
  const int64_t total_cost = best->total_cost;
  auto balanced = [&] { return IsBalanced(best->makespan, total_cost, rules.num_queues); };
  if (balanced()) return;
  // Stream-K cuts one line of tiles, the same for every head. Not for tiles of several heights: a
  // queue should begin with its large tiles and fill up with small ones; ranges took 736 us there.
  if (rules.num_units == 1 && !HaveSeveralHeights(tiles)) {
    AssignRanges(rules, tiles, &trial);
    if (trial.num_partials <= rules.max_balanced_partials && trial.makespan < best->makespan) {
      std::swap(*best, trial);
    }
    return;
  }
  for (i32 twice_divisor : kRetryDivisors) {
    CutByLength(rules, tiles, twice_divisor, &trial.chunks);
    AssignChunks(rules, tiles, &trial);
    if (trial.num_partials > rules.max_balanced_partials) return;
    if (IsWorthMoreSplits(trial.makespan, best->makespan)) std::swap(*best, trial);
    if (balanced()) return;
  }
}

Status CheckCapacities(const PlanRules& rules, const Assignment& a) {
  if (a.num_items > rules.max_items) {
    return RefuseCapacity("work items", "max_items", rules.max_items, a.num_items);
  }
  if (a.num_merge_groups > rules.max_merge_groups) {  // half of the items at most
    return RefuseCapacity("merge groups", "max_items", rules.max_items, 2 * a.num_merge_groups);
  }
  if (a.num_partials > rules.max_partials) {
    return RefuseCapacity("partial states", "max_items", rules.max_items, a.num_partials);
  }
  if (a.num_partial_rows > rules.max_partial_rows) {
    return RefuseCapacity("rows of partial states", "max_partial_rows", rules.max_partial_rows,
                          a.num_partial_rows);
  }
  return Status::Ok();
}

// Rows of the partial states of every split chunk, per chunk: base of its first kv head.
void NumberPartials(const PlanRules& rules, const std::vector<QueryTile>& tiles,
                    const std::vector<Chunk>& chunks, std::vector<int32_t>* partial_base,
                    std::vector<int32_t>* group_base, ScheduleOutput* out) {
  const int64_t heads = rules.num_kv_heads;
  partial_base->assign(chunks.size(), -1);
  group_base->assign(chunks.size(), -1);
  for (size_t i = 0; i < chunks.size(); ++i) {
    const Chunk& c = chunks[i];
    if (c.num_splits == 1) continue;
    const QueryTile& t = tiles[c.tile_idx];
    const int32_t rows = t.qo_len * rules.group_size;
    if (c.split == 0) {
      (*partial_base)[i] = out->num_partial_rows;
      (*group_base)[i] = out->num_merge_groups;
      for (int64_t h = 0; h < heads; ++h) {
        out->merge_groups[out->num_merge_groups++] = {
            t.qo_begin, t.qo_len, static_cast<i32>(h), c.num_splits, out->num_partials, {0, 0, 0}};
        for (int32_t s = 0; s < c.num_splits; ++s) {
          out->partial_rows[out->num_partials++] = out->num_partial_rows;
          out->num_partial_rows += rows;
        }
      }
    } else {
      (*partial_base)[i] = (*partial_base)[i - 1] + rows;  // chunks of a tile are consecutive
      (*group_base)[i] = (*group_base)[i - 1];
    }
  }
}

void WriteItems(const PlanRules& rules, const std::vector<QueryTile>& tiles, const Assignment& a,
                ScheduleOutput* out) {
  thread_local std::vector<int32_t> partial_base, group_base, filled;
  NumberPartials(rules, tiles, a.chunks, &partial_base, &group_base, out);

  const int64_t heads_per_unit = rules.heads_per_unit;
  filled.assign(rules.num_queues, 0);
  for (int32_t q : a.queue_of) filled[q] += static_cast<int32_t>(heads_per_unit);
  // Queue q of partition p is CTA q * partitions + p: neighbours read the same tokens of
  // neighbouring heads at the same time, which share DRAM rows.
  int32_t begin = 0;
  for (int64_t cta = 0; cta < rules.num_ctas; ++cta) {
    out->queue_indptr[cta] = begin;
    begin += filled[cta / rules.num_partitions];
  }
  out->queue_indptr[rules.num_ctas] = begin;
  out->num_items = begin;

  // Large tiles are bound by arithmetic, small ones by memory. The two halves of the grid share the
  // multiprocessors; when heights mix, the second half takes its items from the other end, so that
  // both units are busy all the time.
  const int64_t first_backwards = HaveSeveralHeights(tiles) ? rules.num_ctas / 2 : rules.num_ctas;
  filled.assign(rules.num_queues, 0);
  size_t slot = 0;
  for (int32_t chunk_idx : a.order) {
    const Chunk& c = a.chunks[chunk_idx];
    const QueryTile& t = tiles[c.tile_idx];
    const int32_t rows = t.qo_len * rules.group_size;
    for (i32 u = 0; u < rules.num_units; ++u) {
      const int32_t q = a.queue_of[slot++];
      const int32_t at = filled[q];
      filled[q] += static_cast<int32_t>(heads_per_unit);
      for (int64_t p = 0; p < rules.num_partitions; ++p) {
        const int64_t cta = q * rules.num_partitions + p;
        WorkItem* item =
            out->items + (cta < first_backwards ? out->queue_indptr[cta] + at
                                                : out->queue_indptr[cta + 1] - at - heads_per_unit);
        for (int64_t h = 0; h < heads_per_unit; ++h, ++item) {
          const int32_t head = static_cast<int32_t>((p * rules.num_units + u) * heads_per_unit + h);
          const bool split = c.num_splits > 1;
          *item = {t.qo_begin,
                   t.qo_len,
                   head,
                   t.tile,
                   c.kv_begin,
                   c.kv_end,
                   t.kv_base,
                   t.q_pos,
                   split ? partial_base[chunk_idx] + head * rows * c.num_splits : -1,
                   split ? group_base[chunk_idx] + head : -1,
                   t.request,
                   split ? 1 : 0};
        }
      }
    }
  }
}

}  // namespace

Status WriteSchedule(const PlanRules& rules, const std::vector<QueryTile>& tiles,
                     ScheduleOutput* out) {
  thread_local Assignment best;
  CutByLength(rules, tiles, 2, &best.chunks);
  if (best.chunks.size() >= (size_t{1} << 26)) {
    return Status::Error("plan: the batch needs more than 2^26 kv chunks; raise kv_split.");
  }
  AssignChunks(rules, tiles, &best);
  if (rules.schedule == kBalanced) Rebalance(rules, tiles, &best);
  if (Status s = CheckCapacities(rules, best); !s.ok()) return s;
  WriteItems(rules, tiles, best, out);
  return Status::Ok();
}

}  // namespace jax_attn
