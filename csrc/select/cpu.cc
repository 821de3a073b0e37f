// The kernel configuration on CPUs.
#include <algorithm>

#include "select/devices.h"
#include "select/select.h"

namespace jax_attn {
namespace {

// The time of 16 kv tokens of one kv head in a tile of `rows` rows.
double StepUs(const CpuNumbers& cpu, const AttentionSpec& spec, int64_t rows, bool low) {
  const double dims = static_cast<double>(spec.head_dim_qk + spec.head_dim_vo);
  const double bytes = 16 * static_cast<double>(spec.kv_row_bytes(spec.head_dim_qk) +
                                                spec.kv_row_bytes(spec.head_dim_vo));
  const double flops = 2 * 16 * dims * static_cast<double>(rows);
  const auto rate = [](const Number& number) { return static_cast<double>(number.value); };
  return std::max(bytes / rate(cpu.bytes_per_us),
                  flops / rate(low ? cpu.low_flops_per_us : cpu.flops_per_us));
}

}  // namespace

void SelectCpu(const AttentionSpec& spec, KernelConfig* config, Reasons* reasons) {
  const CpuNumbers cpu = CpuNumbersOf(spec.dtype);
  const auto because = [&](const char* what, const char* why) {
    if (reasons != nullptr) reasons->emplace_back(what, why);
  };
  const auto take = [&](const char* what, const Number& number) {
    because(what, number.why);
    return number.value;
  };
  const int64_t group = std::max<int64_t>(1, spec.group_size());
  *config = KernelConfig{};
  because("device", "a CPU");
  // Steps start at absolute multiples of it, so the bits of a row do not depend on its tile.
  config->tile_kv =
      spec.eight_bit_products ? take("tile_kv", cpu.codes_tile_kv) : take("tile_kv", cpu.tile_kv);
  config->num_tiles = 3;
  // Tiles for decode, for short chunks and speculation, and for prefill. Prefill tiles are as large
  // as the cache holds, because each kv block is packed once for each tile. 256 rows save 3 %
  // against 128 at head_dim 128. At head_dim 256 they save 8 % in f32 and 15 % with AMX tiles (2
  // MiB) against 144 rows, which 512 KiB hold. More than 256 rows would make 512 tokens one tile of
  // each head, which threads would have to split: 1.35 ms instead of 0.76 (8 heads, 2 threads). In
  // long prompts threads take several tiles of a head over the keys together, as many as the cache
  // holds.
  config->tile_q[0] = std::max<int64_t>(16, group);
  config->tile_q[1] = std::max<int64_t>(64, group);
  const int64_t row_bytes = 4 * (spec.head_dim_qk + spec.head_dim_vo + config->tile_kv);
  const int64_t fitting_rows = cpu.cache_bytes.value / row_bytes / 16 * 16;
  config->tile_q[2] = std::max(std::clamp<int64_t>(fitting_rows, 80, 256), config->tile_q[1]);
  because("tile_q",
          "up to 16 rows wait for memory alone; 64 for short chunks; the tallest that fits the "
          "cache for prefill");
  const bool decode_only = spec.max_qo_tokens <= spec.max_batch;
  config->num_ctas = std::max<int64_t>(1, spec.num_processors) *
                     take("num_ctas", decode_only ? cpu.decode_queues : cpu.queues);
  config->heads_per_unit = spec.num_kv_heads;
  because(
      "heads_per_unit",
      "the keys of all kv heads are one stretch of memory, read once in its order: 22 against 8 "
      "GB/s (32/8 heads, head_dim 128, bf16, pages of 16, 2 threads)");
  config->min_chunk = take("min_chunk", cpu.min_chunk);
  config->item_cost = take("item_cost", cpu.item_cost);
  config->split_cost = take("split_cost", cpu.split_cost);
  config->cost_by_rows = 1;
  because("cost_by_rows", "no row is computed in vain");
  // Costs are in units of 1/16 of what 16 tokens cost a decode tile.
  const double unit = StepUs(cpu, spec, group, true) / 16;
  config->kv_cost[0] = 16;
  for (int i = 1; i < config->num_tiles; ++i) {
    config->kv_cost[i] = std::max<int64_t>(
        16, static_cast<int64_t>(StepUs(cpu, spec, config->tile_q[i], false) / unit + 0.5));
  }
  because("kv_cost", cpu.flops_per_us.why);
}

}  // namespace jax_attn
