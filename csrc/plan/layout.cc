#include <algorithm>
#include <numeric>

#include "plan/plan.h"
#include "plan/prefix.h"
#include "plan/rules/choice.h"
#include "plan/rules/merges.h"
#include "plan/rules/sharing.h"
#include "plan/rules/steps.h"
#include "plan/schedule.h"
#include "select/select.h"

namespace jax_attn {
namespace {

constexpr int64_t kHeaderWords = sizeof(PlanHeader) / 4;
constexpr int64_t kItemWords = sizeof(WorkItem) / 4;
constexpr int64_t kMergeGroupWords = sizeof(MergeGroup) / 4;

// Sections start at multiples of 64 bytes because records are read by 16-byte loads.
int64_t Align(int64_t words) { return (words + 15) / 16 * 16; }

// Counts are int32 words of a plan, so capacities are clamped to int32: a batch that needs more is
// refused.
int64_t Capacity(int64_t count) { return std::min<int64_t>(count, kMaxInt32); }

// Upper bound on query tiles of any batch: each request ends in at most one partial tile.
int64_t MaxTiles(const AttentionProblem& problem) {
  const AttentionSpec& spec = problem.spec;
  const KernelConfig& config = problem.config;
  const int64_t tokens_per_tile = config.tile_q[config.num_tiles - 1] / spec.group_size();
  return std::min(spec.max_qo_tokens, spec.max_batch + spec.max_qo_tokens / tokens_per_tile);
}

}  // namespace

PlanLayout MakePlanLayout(const AttentionProblem& problem) {
  const AttentionSpec& spec = problem.spec;
  const KernelConfig& config = problem.config;
  PlanLayout layout;
  int64_t end = 0;
  auto section = [&end](int64_t num_words) {
    const int64_t begin = end;
    end = Align(end + num_words);
    return begin;
  };
  layout.header = section(kHeaderWords);
  layout.queue_indptr = section(config.num_ctas + 1);
  layout.qo_indptr = section(spec.max_batch + 1);
  layout.kv_lens = section(spec.max_batch);
  layout.kv_indptr = section(spec.max_batch + 1);
  layout.merge_groups = section(config.max_merge_groups * kMergeGroupWords);
  layout.partial_rows = section(config.max_partials);
  layout.qo_indices = section(config.max_shared_tokens);
  // A CTA may read the item with its own number before it knows of any item (sm90/pipeline.cuh).
  layout.items = section(std::max(config.max_items, config.num_ctas) * kItemWords);
  layout.page_indices = section(spec.max_kv_pages);
  layout.steps = section(spec.max_steps);
  layout.num_words = end;
  return layout;
}

WorkspaceLayout MakeWorkspaceLayout(const AttentionProblem& problem) {
  const KernelConfig& config = problem.config;
  WorkspaceLayout layout;
  layout.merge_counters = 0;
  layout.partial_states = Align(config.max_merge_groups);
  layout.partial_o = Align(layout.partial_states + 2 * config.max_partial_rows);
  layout.num_words = Align(layout.partial_o + config.max_partial_rows * problem.spec.head_dim_vo);
  layout.num_words = std::max<int64_t>(layout.num_words, 16);  // XLA buffers are never empty
  layout.item_times =
      layout.num_words;  // last, so that Python finds it at the end of the usual workspace
  if (config.record_times) layout.num_words += Align(4 * config.max_items);
  return layout;
}

PlanRules MakePlanRules(const AttentionProblem& problem) {
  const AttentionSpec& spec = problem.spec;
  const KernelConfig& config = problem.config;
  const int64_t units = spec.num_kv_heads / config.heads_per_unit;
  const int64_t partitions = std::gcd(config.num_ctas, units);
  PlanRules rules = {};
  rules.schedule = static_cast<i32>(spec.balances() ? int64_t{kBalanced} : spec.schedule);
  rules.fewer_splits = spec.schedule == kAuto;
  rules.num_kv_heads = static_cast<i32>(spec.num_kv_heads);
  rules.group_size = static_cast<i32>(spec.group_size());
  rules.state_bytes = static_cast<i32>(spec.group_size() * 4 * spec.head_dim_vo);
  rules.shares_reductions = spec.mla && spec.arch != 0;  // cuda/common/partials.cuh
  rules.window_left = static_cast<i32>(spec.window_left);
  rules.window_right = static_cast<i32>(spec.window_right);
  rules.kv_split = static_cast<i32>(
      Least(kPositionLimit, spec.schedule == kFixedSplit ? spec.kv_split : kPositionLimit));
  rules.page_size = static_cast<i32>(spec.page_size);
  rules.max_steps = static_cast<i32>(spec.max_steps);
  rules.num_tiles = static_cast<i32>(config.num_tiles);
  for (int i = 0; i < kMaxTiles; ++i) {
    rules.tile_tokens[i] = static_cast<i32>(config.tile_q[i] / spec.group_size());
    rules.kv_cost[i] = static_cast<i32>(config.kv_cost[i]);
    const int64_t tall = i > 0 ? config.min_tall_chunk : 0;
    rules.min_chunk[i] = static_cast<i32>(std::max(config.min_chunk, tall));
    const bool has_own = i > 0 && config.tall_split_cost > 0;
    rules.split_cost[i] = static_cast<i32>(has_own ? config.tall_split_cost : config.split_cost);
  }
  rules.tile_kv = static_cast<i32>(config.tile_kv);
  rules.item_cost = static_cast<i32>(config.item_cost);
  rules.cached_tokens = static_cast<i32>(config.cached_tokens);
  rules.num_ctas = static_cast<i32>(config.num_ctas);
  rules.num_partitions = static_cast<i32>(partitions);
  rules.num_queues = static_cast<i32>(config.num_ctas / partitions);
  rules.num_units = static_cast<i32>(units / partitions);
  rules.heads_per_unit = static_cast<i32>(config.heads_per_unit);
  rules.max_qo_tokens = spec.max_qo_tokens;
  rules.max_kv = spec.paged() ? spec.max_kv_pages : spec.max_kv_tokens;
  rules.num_pages = spec.num_pages;
  rules.max_items = config.max_items;
  rules.max_merge_groups = config.max_merge_groups;
  rules.max_partials = config.max_partials;
  rules.max_partial_rows = config.max_partial_rows;
  rules.max_balanced_partials = MaxBalancedPartials(config);
  return rules;
}

SharingRules MakeSharingRules(const AttentionProblem& problem) {
  const AttentionSpec& spec = problem.spec;
  const KernelConfig& config = problem.config;
  SharingRules sharing = {};
  // Whole steps, and whole chunks for kFixedSplit, so that partial states are the same as without
  // sharing.
  sharing.alignment =
      static_cast<i32>(spec.schedule == kFixedSplit ? spec.kv_split : config.tile_kv);
  sharing.token_bytes =
      static_cast<i32>(spec.kv_row_bytes(spec.head_dim_qk) + spec.kv_row_bytes(spec.head_dim_vo));
  sharing.fresh_kv = static_cast<i32>(spec.fresh_kv);
  sharing.cost_by_rows = static_cast<i32>(config.cost_by_rows);
  for (int i = 0; i < kMaxTiles; ++i) sharing.tile_rows[i] = static_cast<i32>(config.tile_q[i]);
  return sharing;
}

int64_t PlanScratchBytes(const AttentionProblem& problem, int64_t num_levels, int64_t num_prefixes,
                         const BlockMap* map) {
  if (problem.spec.arch == 0) return 64;  // XLA buffers are never empty
  const PlanRules rules = MakePlanRules(problem);
  const int64_t requests = problem.spec.max_batch;
  const int64_t queues = rules.num_queues;
  const int64_t tiles = MaxTiles(problem) + 1;
  const bool balanced = rules.schedule == kBalanced;
  const auto sort_size = [](int64_t count) {
    int64_t size = 4;
    while (size < count) size *= 2;
    return size;
  };
  // kBalanced: upper bound on chunks of split tiles for one head unit.
  const auto max_chunks = [&](int64_t num_tiles, int64_t cut_chunks) {
    return balanced ? num_tiles + cut_chunks
                    : std::max<int64_t>(1, rules.max_items / rules.num_kv_heads);
  };
  const auto trial = [&](int64_t num_tiles, int64_t cut_chunks) {
    const int64_t chunks = max_chunks(num_tiles, cut_chunks);
    return (4 + sizeof(TileCut)) * num_tiles + 12 * queues + 5120 +
           8 * (sort_size(chunks) + chunks) + 12 * chunks * rules.num_units;
  };
  const auto results = [&](int64_t num_tiles, int64_t cut_chunks) {
    const int64_t chunks = max_chunks(num_tiles, cut_chunks);
    return (8 + 8) * num_tiles + 4 * (queues + 1) +
           (sizeof(WorkItem) + 16 + 8 * rules.num_kv_heads) * chunks;
  };
  const int64_t num_trials = balanced ? 1 + kNumRetries + kNumFewerSplits : 1;
  // Ranges: tiles of head units, and what a trial of one unit takes (cuda/plan/ranges.cuh).
  int64_t unit_tiles = tiles;
  if (rules.num_units > 1) {
    unit_tiles = std::min<int64_t>(tiles * rules.num_units, kMostTilesOfRanges * queues);
  }
  const int64_t ranges = balanced ? 8 * (unit_tiles + 1) + 4 * kNumCapacities + 16 * (queues + 1) +
                                        trial(unit_tiles + 1, queues)
                                  : 0;
  int64_t bytes = 4 * (requests + 1) + sizeof(QueryTile) * tiles +
                  num_trials * trial(tiles, 2 * queues) + ranges +
                  results(tiles, 2 * queues) +  // of the first trial, and of the chosen schedule
                  std::max(results(tiles, 2 * queues), results(unit_tiles + 1, queues));
  bytes += 160 * 16;                                      // each array is rounded up to 16 bytes
  const auto lists = [&](int64_t num_tiles) -> int64_t {  // cuda/plan/steps.cuh
    if (map == nullptr) return 0;
    const AttentionSpec& spec = problem.spec;
    const int64_t kv_tokens = spec.paged() ? rules.max_kv * spec.page_size : rules.max_kv;
    const int64_t seen =
        std::min<int64_t>({kv_tokens, kPositionLimit, map->num_columns * map->kv_block});
    const int64_t words = num_tiles * CeilDivide(CeilDivide(seen, rules.tile_kv), 32);
    return 4 * num_tiles + (sizeof(StepWord) + 4) * (words + 1);
  };
  bytes += lists(tiles);
  if (num_levels == 0) return bytes;
  // cuda/plan/prefix.cuh.
  const int64_t nodes = num_levels * num_prefixes;
  const int64_t shared_tiles = tiles + MaxSharedTiles(requests);
  const int64_t forest = 8 * (requests + 1) + 40 * nodes + 24 * (requests + 1) +
                         12 * nodes * (num_levels + 1) + 8 * sort_size(nodes) +
                         12 * (requests + 1) + 4 * (nodes + 1) + 8 * num_levels * requests;
  bytes += forest + (sizeof(QueryTile) + sizeof(TileSharing) + 4) * shared_tiles +
           kNumSharedTrials * trial(shared_tiles, 3 * queues) + results(shared_tiles, 3 * queues) +
           4 * (requests + 1) + lists(shared_tiles) + (map != nullptr ? 4 * tiles : 0);
  return bytes + 64 * 16;
}

PlanParams MakePlanParams(const AttentionProblem& problem, const PlanInputs& inputs,
                          const PrefixLevels* levels, i32* plan, void* scratch,
                          const BlockMap* map) {
  const PlanLayout layout = MakePlanLayout(problem);
  PlanParams p = {};
  p.inputs = inputs;
  p.rules = MakePlanRules(problem);
  p.header = reinterpret_cast<PlanHeader*>(plan + layout.header);
  p.queue_indptr = plan + layout.queue_indptr;
  p.qo_indptr = plan + layout.qo_indptr;
  p.kv_lens = plan + layout.kv_lens;
  p.kv_indptr = plan + layout.kv_indptr;
  p.merge_groups = reinterpret_cast<MergeGroup*>(plan + layout.merge_groups);
  p.partial_rows = plan + layout.partial_rows;
  p.items = reinterpret_cast<WorkItem*>(plan + layout.items);
  p.page_indices = plan + layout.page_indices;
  p.scratch = static_cast<unsigned char*>(scratch);
  if (levels != nullptr) p.levels = *levels;
  p.sharing = MakeSharingRules(problem);
  p.qo_indices = plan + layout.qo_indices;
  if (map != nullptr) p.block_map = *map;
  p.steps = plan + layout.steps;
  return p;
}

PlanLimits MakePlanLimits(const AttentionProblem& problem, int64_t num_pages) {
  const AttentionSpec& spec = problem.spec;
  const KernelConfig& config = problem.config;
  PlanLimits limits = {};
  limits.num_pages = num_pages;
  limits.max_batch = static_cast<i32>(spec.max_batch);
  limits.max_qo_tokens = static_cast<i32>(spec.max_qo_tokens);
  limits.max_items = static_cast<i32>(config.max_items);
  limits.max_merge_groups = static_cast<i32>(config.max_merge_groups);
  limits.max_partial_rows = static_cast<i32>(config.max_partial_rows);
  limits.max_kv = static_cast<i32>(spec.paged() ? spec.max_kv_pages : spec.max_kv_tokens);
  limits.max_partials = static_cast<i32>(config.max_partials);
  limits.max_shared_tokens = static_cast<i32>(config.max_shared_tokens);
  limits.max_steps = static_cast<i32>(spec.max_steps);
  return limits;
}

AttentionParams MakeAttentionParams(const AttentionProblem& problem, const i32* plan) {
  const AttentionSpec& spec = problem.spec;
  const PlanLayout layout = MakePlanLayout(problem);
  AttentionParams p = {};
  p.header = reinterpret_cast<const PlanHeader*>(plan + layout.header);
  p.queue_indptr = plan + layout.queue_indptr;
  p.items = reinterpret_cast<const WorkItem*>(plan + layout.items);
  p.merge_groups = reinterpret_cast<const MergeGroup*>(plan + layout.merge_groups);
  p.partial_rows = plan + layout.partial_rows;
  p.qo_indices = plan + layout.qo_indices;
  p.page_indices = plan + layout.page_indices;
  p.qo_indptr = plan + layout.qo_indptr;
  p.kv_lens = plan + layout.kv_lens;
  if (spec.max_steps > 0) p.steps = plan + layout.steps;
  static_cast<PlanLimits&>(p) = MakePlanLimits(problem, spec.paged() ? 0 : 1);
  p.num_ctas = static_cast<i32>(problem.config.num_ctas);
  p.num_qo_heads = static_cast<i32>(spec.num_qo_heads);
  p.num_kv_heads = static_cast<i32>(spec.num_kv_heads);
  p.group_size = static_cast<i32>(spec.group_size());
  p.head_dim_qk = static_cast<i32>(spec.head_dim_qk);
  p.head_dim_vo = static_cast<i32>(spec.head_dim_vo);
  p.mla = static_cast<i32>(spec.mla);
  p.page_size = static_cast<i32>(spec.page_size);
  p.window_left = static_cast<i32>(spec.window_left);
  p.window_right = static_cast<i32>(spec.window_right);
  p.sm_scale = static_cast<float>(spec.sm_scale);
  p.logits_soft_cap = static_cast<float>(spec.logits_soft_cap);
  p.q_format = static_cast<i32>(spec.q_format);
  p.kv_format = static_cast<i32>(spec.kv_format);
  p.sums_weights = problem.program.present && !problem.program.normalizes;
  return p;
}

namespace {

// Tiles of the Hopper backward kernel, and their sums after the words that are zeroed.
struct HopperBackwardLayout {
  int64_t max_tiles = 0, own_begins = 0, page_lens = 0, readers = 0, run_ends = 0;
  int64_t tile_progress = 0, sums = 0, num_words = 0;
};

HopperBackwardLayout MakeHopperBackwardLayout(const AttentionSpec& spec, int64_t num_pages,
                                              int64_t num_words) {
  HopperBackwardLayout layout;
  const auto dim_qk = static_cast<i32>(spec.head_dim_qk),
             dim_vo = static_cast<i32>(spec.head_dim_vo);
  const int64_t rows = HopperBackwardRows(dim_qk, dim_vo);
  layout.max_tiles = spec.max_qo_tokens / rows + spec.max_batch;
  layout.own_begins = layout.tile_progress = num_words;
  if (spec.paged()) {
    layout.page_lens = layout.own_begins + spec.max_batch;
    layout.readers = layout.page_lens + num_pages;
    layout.run_ends = layout.readers + spec.max_kv_pages;
    layout.tile_progress = layout.run_ends + spec.max_kv_pages;
  }
  const int64_t tiles_of_heads = layout.max_tiles * spec.num_qo_heads;
  layout.sums = (layout.tile_progress + tiles_of_heads + 3) / 4 * 4;  // aligned to 16 bytes
  layout.num_words = layout.sums + tiles_of_heads * rows * HopperBackwardColumns(dim_qk, dim_vo);
  return layout;
}

int64_t PortableBackwardWords(const AttentionSpec& spec, int64_t num_pages) {
  const int64_t of_pages = spec.paged() ? 2 * spec.max_kv_pages + 2 * num_pages : 0;
  const int64_t of_lists = spec.max_steps > 0 ? 3 * spec.max_qo_tokens : 0;
  return 16 + spec.max_batch + of_pages + of_lists;
}

}  // namespace

int64_t BackwardWorkspaceWords(const AttentionProblem& problem, int64_t num_pages) {
  const int64_t words = PortableBackwardWords(problem.spec, num_pages);
  if (!RunsHopperBackward(problem)) return words;
  return MakeHopperBackwardLayout(problem.spec, num_pages, words).num_words;
}

int64_t BackwardZeroWords(const AttentionProblem& problem, int64_t num_pages) {
  const int64_t words = PortableBackwardWords(problem.spec, num_pages);
  if (!RunsHopperBackward(problem)) return words;
  return MakeHopperBackwardLayout(problem.spec, num_pages, words).sums;
}

BackwardCudaParams MakeBackwardParams(const AttentionProblem& problem,
                                      const AttentionParams& forward, const i32* plan,
                                      i32* workspace) {
  const AttentionSpec& spec = problem.spec;
  const bool paged = spec.paged();
  BackwardCudaParams p = {};
  p.forward = forward;
  p.kv_indptr = plan + MakePlanLayout(problem).kv_indptr;
  p.max_entries = static_cast<i32>(paged ? spec.max_kv_pages : 0);
  const int64_t kv_rows =
      paged ? forward.num_layers * forward.num_pages * spec.page_size : spec.max_kv_tokens;
  p.num_elements[0] = spec.max_qo_tokens * spec.num_qo_heads * spec.head_dim_qk;
  p.num_elements[1] = kv_rows * spec.num_kv_heads * spec.head_dim_qk;
  p.num_elements[2] = kv_rows * spec.num_kv_heads * spec.head_dim_vo;
  p.num_taken = workspace;
  p.num_terms = reinterpret_cast<i64*>(workspace + 4);
  p.num_operand_units = workspace + 6;
  p.operand_bounds = workspace + 8;
  p.q_begins = workspace + 16;
  p.next_entries = p.q_begins + spec.max_batch;
  p.is_read = p.next_entries + p.max_entries;
  p.first_entries = p.is_read + p.max_entries;
  p.last_entries = p.first_entries + (paged ? forward.num_pages : 0);
  if (spec.max_steps > 0) {
    p.list_begins = p.last_entries + (paged ? forward.num_pages : 0);
    p.list_ends = p.list_begins + spec.max_qo_tokens;
    p.tile_ends = p.list_ends + spec.max_qo_tokens;
  }
  if (RunsHopperBackward(problem)) {
    const HopperBackwardLayout layout = MakeHopperBackwardLayout(
        spec, forward.num_pages, PortableBackwardWords(spec, forward.num_pages));
    p.num_blocks_taken = workspace + 1;
    p.needs_portable = workspace + 2;
    if (paged) {
      p.own_begins = workspace + layout.own_begins;
      p.page_lens = workspace + layout.page_lens;
      p.readers = workspace + layout.readers;
      p.run_ends = workspace + layout.run_ends;
    }
    p.tile_progress = workspace + layout.tile_progress;
    p.d_q_sums = reinterpret_cast<float*>(workspace + layout.sums);
    p.max_tiles = static_cast<i32>(layout.max_tiles);
  }
  return p;
}

void FillCapacities(AttentionProblem* problem) {
  const AttentionSpec& spec = problem->spec;
  KernelConfig& config = problem->config;
  const int64_t largest_tile = config.tile_q[config.num_tiles - 1];
  const int64_t max_tiles = MaxTiles(*problem);
  int64_t max_chunks = 0;  // items beyond one per tile and head
  int64_t max_partial_rows = 0;
  if (spec.balances()) {
    max_chunks = MaxBalancedPartials(config);
    max_partial_rows = max_chunks * largest_tile;
  } else if (spec.schedule == kFixedSplit) {
    // The number of chunks follows from lengths alone. The capacity suffices if every kv token is
    // read by one query tile of one token, i.e. for any decode batch. Prefill batches may need
    // more; they are refused with the name of this capacity.
    const int64_t kv_tokens =
        spec.paged() ? spec.max_kv_pages * spec.page_size : spec.max_kv_tokens;
    const int64_t chunks = Capacity(CeilDivide(kv_tokens, spec.kv_split) + spec.max_batch);
    max_chunks = chunks * spec.num_kv_heads;
    max_partial_rows = std::max(chunks * spec.num_qo_heads, 2 * config.num_ctas * largest_tile);
  }
  const bool shares = spec.share_prefixes && spec.paged() && spec.schedule != kNoSplit;
  const int64_t max_units = std::min(spec.max_batch, spec.max_qo_tokens);
  const int64_t max_shared_tiles = shares && max_units > 1 ? MaxSharedTiles(max_units) : 0;
  if (config.max_items == 0) {
    config.max_items = max_tiles * spec.num_kv_heads + max_chunks;
    // Chunks of kFixedSplit are the same however many requests share them.
    if (spec.balances()) config.max_items += max_shared_tiles * spec.num_kv_heads;
    config.max_items = Capacity(config.max_items);
  }
  config.max_partials = spec.balances() ? max_chunks : config.max_items;
  config.max_merge_groups = MaxMergeGroups(max_tiles * spec.num_kv_heads, config.max_partials);
  if (shares && spec.balances()) {  // also for the requests that share a prefix
    config.max_merge_groups = Capacity(config.max_merge_groups + max_units * spec.num_kv_heads);
    config.max_partials =
        Capacity(std::max(max_chunks, max_chunks * largest_tile / spec.group_size()));
  }
  config.max_shared_tokens = Capacity(max_shared_tiles * (largest_tile / spec.group_size()));
  if (spec.schedule == kNoSplit) config.max_merge_groups = config.max_partials = 0;
  if (config.max_partial_rows == 0) config.max_partial_rows = Capacity(max_partial_rows);
}

}  // namespace jax_attn
