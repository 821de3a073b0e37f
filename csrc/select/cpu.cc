// The kernel configuration on CPUs. Each number has its reason beside it.
#include <algorithm>

#include "select/select.h"

namespace jax_attn {
namespace {

// Rates of one core that set the ratio of costs, not times. Measured on a Zen 3 core at 3.2 GHz
// with AVX2; both scale together well enough on wider machines.
constexpr double kBytesPerUs = 11e3;     // keys and values streamed by a decode tile
constexpr double kLowFlopsPerUs = 55e3;  // a decode tile whose rows are many enough to be the limit
constexpr double kFlopsPerUs = 75e3;     // a prefill tile

// 16 kv tokens of a tile of so many rows, one kv head.
double StepUs(const AttentionSpec& spec, int64_t rows, bool low) {
  const double dims = static_cast<double>(spec.head_dim_qk + spec.head_dim_vo);
  const double bytes = 16 * dims * static_cast<double>(ElementBytes(spec.dtype));
  const double flops = 2 * 16 * dims * static_cast<double>(rows);
  return std::max(bytes / kBytesPerUs, flops / (low ? kLowFlopsPerUs : kFlopsPerUs));
}

}  // namespace

void SelectCpu(const AttentionSpec& spec, KernelConfig* config) {
  const int64_t group = std::max<int64_t>(1, spec.group_size());
  *config = KernelConfig{};
  // One online softmax step. Steps start at absolute multiples of it, which makes the bits of a row
  // independent of its tile. 128 against 64: 5 % in prefill, where every step reads and writes o.
  config->tile_kv = 128;
  config->num_tiles = 3;
  // Decode: up to 16 rows the kernels stream keys and values and wait for memory alone.
  config->tile_q[0] = std::max<int64_t>(16, group);
  // Short chunks and speculation; the kernels are the same as for the tallest tile, the cost is
  // not.
  config->tile_q[1] = std::max<int64_t>(64, group);
  // Prefill: as tall as q, o and scores fit three quarters of a 512 KiB second cache, because each
  // kv block is packed once a tile (256 rows against 128 at head_dim 128: 3 %).
  const int64_t row_bytes = 4 * (spec.head_dim_qk + spec.head_dim_vo + config->tile_kv);
  const int64_t fitting_rows = (384 << 10) / row_bytes / 16 * 16;
  config->tile_q[2] = std::max(std::clamp<int64_t>(fitting_rows, 80, 256), config->tile_q[1]);
  // One queue a thread: threads take items from each other's queues when theirs is empty, and every
  // further queue would make the planner split prefill tiles, whose states are large. Where there
  // is only decode a split is cheap, and shorter chunks let a thread that starts late do less.
  const bool decode_only = spec.max_qo_tokens <= spec.max_batch;
  config->num_ctas = std::max<int64_t>(1, spec.num_processors) * (decode_only ? 4 : 1);
  // All kv heads of a decode tile side by side in a queue: their keys are one stretch of memory,
  // read once in its order. 22 against 8 GB/s (32/8 heads, head_dim 128, bf16, pages of 16, 2
  // threads).
  config->heads_per_unit = spec.num_kv_heads;
  // A split writes and reads back one f32 row of o per query row: with 256 tokens a few percent.
  config->min_chunk = 256;
  // Loading q, and storing o: 0.4 us against 0.7 us for 16 tokens of one kv head.
  config->item_cost = 8;
  config->split_cost = 8;
  config->cost_by_rows = 1;  // no row is computed in vain
  // In units of 1/16 of what 16 tokens cost a decode tile.
  const double unit = StepUs(spec, group, true) / 16;
  config->kv_cost[0] = 16;
  for (int i = 1; i < config->num_tiles; ++i) {
    config->kv_cost[i] = std::max<int64_t>(
        16, static_cast<int64_t>(StepUs(spec, config->tile_q[i], false) / unit + 0.5));
  }
}

}  // namespace jax_attn
