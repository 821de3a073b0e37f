// The kernel configuration on CUDA devices, portable path. Each number has its reason beside it;
// build_tools/check_kernels.py verifies registers and shared memory for every combination.
#include <algorithm>

#include "select/select.h"

namespace jax_attn {
namespace {

// Shared memory of one multiprocessor decides tiles and depth; the rest of an architecture does
// not.
enum class SmemClass { k100KB, k164KB, k228KB };

SmemClass SmemClassOf(int64_t arch) {
  if (arch == 80 || arch == 87) return SmemClass::k164KB;
  if (arch >= 90 && arch < 120) return SmemClass::k228KB;
  return SmemClass::k100KB;  // 86, 89, 120, 121
}

// Plain FFMA kernel: eight threads a row, a few rows and tokens at a time; enough for correct work
// at a sane speed. Keys and values are twice as wide, so steps shrink before memory runs out.
void SelectF32(const AttentionSpec& spec, SmemClass smem, KernelConfig* config) {
  const int64_t dims = spec.head_dim_qk + spec.head_dim_vo;
  const bool wide = dims > 256;
  config->num_tiles = 1;
  config->tile_q[0] = 16;
  while (config->tile_q[0] < spec.group_size()) config->tile_q[0] *= 2;
  config->num_warps = config->tile_q[0] / 4;
  config->tile_kv = smem == SmemClass::k100KB && dims > 400 ? 8 : wide ? 16 : 32;
  config->num_stages = smem == SmemClass::k228KB && !wide ? 2 : 1;
}

// Rows of a prefill tile. 32 rows a warp (128 a CTA) double the reuse of each K and V fragment, and
// shared memory is the next limit after the tensor cores; but o takes head_dim_vo registers a
// thread then, which leaves room for the logits only up to 128. Where a multiprocessor has 100 KB,
// two CTAs hold 64 rows and short steps.
int64_t PrefillTile(const AttentionSpec& spec, SmemClass smem) {
  if (spec.head_dim_vo > 128 || spec.head_dim_qk > 192) return 64;
  switch (smem) {
    case SmemClass::k228KB:
      return 128;
    case SmemClass::k164KB:
      return spec.head_dim_qk > 128 ? 64 : 128;
    case SmemClass::k100KB:
      return spec.head_dim_qk > 64 ? 64 : 128;
  }
  return 64;
}

// CTAs that share a multiprocessor: one computes while the other waits. Only where the rows of a
// step are too long for half of its memory, one CTA must do.
int64_t CtasPerProcessor(const AttentionSpec& spec, SmemClass smem) {
  if (spec.mla) return 1;
  if (spec.dtype == kF32) return 2;
  const int64_t head_dim = std::max(spec.head_dim_qk, spec.head_dim_vo);
  if (smem == SmemClass::k164KB && head_dim > 192) return 1;
  if (smem == SmemClass::k100KB && head_dim > 128) return 1;
  return 2;
}

// Slots of the kv ring of the decode tile (a slot: K or V rows of 64 tokens), as many as fit beside
// q and the exchange of the warps' states. 4 slots of head_dim 128 keep 96 KB in flight on an H200
// multiprocessor, which takes in 34 bytes a ns: nearly 3 us, two to three times the latency of
// memory under load.
int64_t NumStages(const AttentionSpec& spec, SmemClass smem) {
  const int64_t head_dim = std::max(spec.head_dim_qk, spec.head_dim_vo);
  switch (smem) {
    case SmemClass::k228KB:
      return head_dim <= 64    ? 6
             : head_dim <= 96  ? 5
             : head_dim <= 128 ? 4
             : head_dim <= 192 ? 3
                               : 2;
    case SmemClass::k164KB:
      return head_dim <= 64 ? 5 : head_dim <= 128 ? 3 : head_dim <= 192 ? 2 : 4;
    case SmemClass::k100KB:
      return head_dim <= 64 ? 3 : head_dim <= 128 ? 2 : head_dim <= 192 ? 3 : 2;
  }
  return 2;
}

void SelectTensorCore(const AttentionSpec& spec, SmemClass smem, KernelConfig* config) {
  const int64_t prefill = PrefillTile(spec, smem);
  if (spec.schedule == kFixedSplit) {
    // One height, whatever the capacities, so that a row is computed the same way in every batch.
    config->num_tiles = 1;
    config->tile_q[0] = 64;
  } else if (spec.group_size() <= 16) {
    // Decode: one mma.sync tile of rows, the warps split the kv tokens. A height between the two
    // would serve 17 to 64 rows a little better, and cost half as much compile time again.
    config->num_tiles = 2;
    config->tile_q[0] = 16;
    config->tile_q[1] = prefill;
  } else {
    config->num_tiles = 1;
    config->tile_q[0] = prefill;
  }
  // 32 x 64 logits a warp take 64 registers a thread. Half of that where o takes 128 of them in
  // 16-row warps, or where memory is short.
  const bool half_step = std::max(spec.head_dim_qk, spec.head_dim_vo) > 192 ||
                         (smem == SmemClass::k100KB && spec.head_dim_qk > 64);
  config->tile_kv = half_step ? 32 : 64;
  config->num_warps = 4;  // 2 CTAs a multiprocessor: 255 registers a thread
  config->num_stages = NumStages(spec, smem);
}

// wgmma, for Hopper alone: nobody else executes it. One CTA a multiprocessor: two consumer
// warpgroups and a producer.
bool HasHopperLoop(const AttentionSpec& spec) { return spec.arch == 90 && spec.dtype != kF32; }

void SelectHopper(const AttentionSpec& spec, KernelConfig* config) {
  config->main_loop = kHopper;
  config->num_warps = 12;
  // Rows are padded to whole 128-byte blocks. A step of logits and probabilities takes 3 / 4 of
  // tile_kv registers a thread, o half its head_dim, of 232; and two slots of K and V must fit
  // beside 128 rows of q.
  const int64_t dim_qk = (spec.head_dim_qk + 63) / 64 * 64;
  const int64_t dim_vo = (spec.head_dim_vo + 63) / 64 * 64;
  const int64_t smem_128 = 2 * (2 * 128 * (dim_qk + dim_vo) + 128 * dim_qk) + (6 << 10);
  config->tile_kv = dim_vo > 128 || smem_128 > (227 << 10) ? 64 : 128;
  // 64 rows, the height of a wgmma: both consumers share them and split the tokens. With 128 each
  // has its own 64.
  config->num_tiles = spec.schedule == kFixedSplit ? 1 : 2;
  config->tile_q[0] = 64;
  if (config->num_tiles == 2) config->tile_q[1] = 128;
}

// MLA (sm80/mla.cuh). Rows of the latent cache are long, 1152 bytes, and in shared memory besides
// q: 64 rows of q take 73 KB, a step of 32 tokens 37 KB. 64 rows reuse each latent row four times
// as often as 16; 16 rows (up to 16 heads, one token) wait for memory alone.
void SelectMla(const AttentionSpec& spec, SmemClass smem, KernelConfig* config) {
  const int64_t most_rows = MaxMlaRows(spec.arch);
  const int64_t group = spec.group_size();
  // sm90/mla.cuh: wgmma has 64 rows; with up to 32 heads most tiles would not fill half of them,
  // and wait for memory all the same.
  if (HasHopperLoop(spec) && group > 32 && spec.head_dim_qk % 64 == 0) {
    config->main_loop = kHopper;
    config->num_warps = 12;
    config->num_tiles = 1;
    config->tile_q[0] = 64;
    config->tile_kv = 64;
    return;
  }
  config->num_tiles = 0;
  // fixed_split: one height, whatever the capacities, so that a row is computed the same way in
  // every batch.
  if (spec.schedule != kFixedSplit && group <= most_rows / 2) {
    config->tile_q[config->num_tiles++] = group <= 16 ? 16 : 32;
  }
  config->tile_q[config->num_tiles++] = most_rows;
  // Short steps, so that several are on their way: 3 of 37 KB are more than the 74 KB that one
  // multiprocessor of an H200 needs (34 bytes/ns for 2 us).
  config->tile_kv = smem == SmemClass::k100KB ? 16 : 32;
  config->num_warps = 8;   // o takes 128 registers a thread with 64 rows of 512 columns
  config->num_stages = 0;  // as many as fit
}

// Not measured yet. A CTA has a multiprocessor for itself: 34 bytes/ns, a token of 1152 bytes in 34
// ns. 64 rows multiply for 50 ns a token (139 KFLOP at 2.8 TFLOP/s a multiprocessor, which reading
// operands from shared memory leaves of mma.sync) or on Hopper 29 ns (4.8 TFLOP/s); 32 rows still
// wait for memory.
void CostMla(KernelConfig* config) {
  const bool hopper = config->main_loop == kHopper;
  const bool tall = config->tile_q[0] > 32;
  // 3 us to fill and drain. A state is 2 KB a row, written and read: 2 us for 16 rows, 8 for 64.
  config->item_cost = tall && !hopper ? 64 : 96;
  config->split_cost = config->tile_q[0] <= 16 ? 96 : hopper ? 280 : 192;
  config->min_chunk = 128;
  for (int i = 0; i < config->num_tiles; ++i) {
    config->kv_cost[i] = !tall && config->tile_q[i] > 32 ? 24 : 16;
  }
}

}  // namespace

int64_t MaxMlaRows(int64_t arch) { return SmemClassOf(arch) == SmemClass::k228KB ? 64 : 32; }

void SelectCuda(const AttentionSpec& spec, KernelConfig* config) {
  *config = KernelConfig{};
  const SmemClass smem = SmemClassOf(spec.arch);
  if (spec.mla) {
    SelectMla(spec, smem, config);
  } else if (HasHopperLoop(spec)) {
    SelectHopper(spec, config);
  } else if (spec.dtype == kF32) {
    SelectF32(spec, smem, config);
  } else {
    SelectTensorCore(spec, smem, config);
  }
  // A persistent grid that fills the device once.
  const bool hopper = config->main_loop == kHopper;
  config->num_ctas =
      (hopper ? 1 : CtasPerProcessor(spec, smem)) * std::max<int64_t>(1, spec.num_processors);
  config->heads_per_unit = 1;
  // One step. Measured (H200): 8 requests of 1024 take 19.0 us, with chunks of 128 and more 23.0.
  config->min_chunk = 64;
  // Fill and drain of an item, about 3 us, and what a state in the workspace adds (the fence, a
  // share of the merge), about 2: kv tokens that a CTA streams meanwhile, 17 bytes/ns. Measured
  // (H200): item_cost 32 and 96, split_cost 0, 48, 64 and 128; these two were best or within noise
  // on decode batches of equal, uniform and zipf lengths. Without a price for splits 16 requests of
  // 8192 took 176 us, with it 140. On Hopper a CTA has the multiprocessor for itself and streams
  // twice as fast.
  config->item_cost = hopper ? 192 : 96;
  config->split_cost = hopper ? 128 : 64;
  // Time of 16 kv tokens. Decode moves 8 KB in 0.48 us (16 units); 128 rows multiply for 0.92 us at
  // 300 TFLOP/s; 64 rows reuse less, so more than half of that. On Hopper decode moves them in 0.24
  // us, and 128 rows multiply for 0.21 us at 650 TFLOP/s.
  for (int i = 0; i < config->num_tiles; ++i) {
    const int64_t rows = config->tile_q[i];
    config->kv_cost[i] = hopper || rows <= 16 ? 16 : rows <= 64 ? 20 : 32;
  }
  if (spec.mla) CostMla(config);
}

}  // namespace jax_attn
