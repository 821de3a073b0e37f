// Facts about each device: every number that was measured or sized for one.
//
// To measure a new GPU, add a row to kCudaDevices in devices.cc and a Costs table of its own.
// Change a number, run `python -m benchmarks.bench_gpu` with the workloads that it affects, keep
// the best, and say beside it what was measured. A new architecture also needs its shared memory in
// cuda/common/budget.cuh and build_tools/check_kernels.py. A row stands for a compute capability,
// because a target names no more. Parts of one architecture differ in bandwidth, which scales an
// item and its fixed costs alike, and nearly cancels.
#pragma once

#include <cstdint>

#include "spec.h"

namespace jax_attn {

// A number and its reason, which JAX_ATTN_PRINT_CONFIG=1 prints.
struct Number {
  int64_t value;
  const char* why;
};

// Numbers by a size: the value of the first step that the size does not exceed, or of the last
// step.
struct Steps {
  static constexpr int kMaxSteps = 5;
  struct Step {
    int64_t up_to, value;
  } steps[kMaxSteps];  // ascending; unused ones are 0
  const char* why;

  int64_t At(int64_t size) const {
    int i = 0;
    while (i + 1 < kMaxSteps && steps[i + 1].up_to > 0 && size > steps[i].up_to) ++i;
    return steps[i].value;
  }
};

// Tiles and ring depths that fit the shared memory of a multiprocessor, for the portable loops.
// build_tools/check_kernels.py compiles them and reports what does not fit.
struct Tiles {
  const char* name;
  int64_t smem_bytes;      // that one CTA may have
  Steps prefill_rows;      // by head_dim_qk: rows of a prefill tile
  Steps step_tokens;       // by head_dim_qk: kv tokens of a step
  Steps ring_slots;        // by the larger head dim, in 16-bit elements: slots of the kv ring
  Steps ctas;              // by the larger head dim: CTAs that share a multiprocessor
  Steps f32_step_tokens;   // by head_dim_qk + head_dim_vo
  Steps f32_ring_slots;    // likewise
  Number mla_rows;         // rows of the largest tile
  Number mla_step_tokens;  // of sm80/wide.cuh
  Number wide_rows, wide_step_tokens;  // likewise, with k and v of up to 512 columns
};

// The operands that sm90/attention.cuh multiplies.
enum class HopperOperands {
  k16Bit,
  kDequantized,  // quantized keys and values, converted to 16 bits in shared memory
  kFp8,          // eight_bit_products: e4m3 without conversion
};

// A tile of sm90/attention.cuh: the warpgroups of its CTA, and the length of its kv steps. Prefill
// tiles have 64 rows for each consumer.
struct HopperTile {
  HopperOperands operands;
  int64_t up_to_head_dim_vo;
  int64_t producers, consumers;  // warpgroups
  // kv steps have 128 tokens up to this head_dim_qk, and 64 above.
  int64_t long_steps_up_to_head_dim_qk;
  const char* why;

  int64_t step_tokens(int64_t head_dim_qk) const {
    return head_dim_qk <= long_steps_up_to_head_dim_qk ? 128 : 64;
  }
};
// The first row of kHopperTiles with the spec's operands that holds its head_dim_vo.
const HopperTile& FindHopperTile(const AttentionSpec& spec);

// Costs that the planner weighs for one kernel, in kv tokens of the smallest tile, except kv_cost.
struct KernelCosts {
  Number min_chunk;   // shortest kv chunk worth a split
  Number item_cost;   // to fill and drain the pipeline
  Number split_cost;  // cost of a state in the workspace: the fence, a share of the merge
  Steps kv_cost;      // by the rows of a tile: time of 16 kv tokens; a decode tile has 16
  Number tall_split_cost = {0, nullptr};  // of tiles after the first, if it is not split_cost
};

// The kernels of Costs, as tuning files name them (tuning.h).
inline constexpr const char* kCudaKernelNames[] = {
    "portable",    "hopper", "hopper_ragged", "hopper_short", "portable_e4m3",
    "hopper_e4m3", "mla_16", "mla_32",        "mla_64",       "mla_hopper"};

struct Costs {
  const char* measured_on;
  Number cached_bytes;  // of keys and values of a request, which CTAs read at different times
  KernelCosts portable, hopper;
  KernelCosts hopper_ragged;  // ragged keys of head dims up to 128, which are prompts
  KernelCosts hopper_short;   // one consumer, for short requests
  KernelCosts portable_e4m3, hopper_e4m3;
  KernelCosts mla_16, mla_32, mla_64;  // sm80/wide.cuh, by the rows of its smallest tile
  KernelCosts mla_hopper;              // sm90/mla.cuh
};

struct CudaDevice {
  const char* name;
  int64_t first_arch, last_arch;  // compute capabilities
  int64_t num_processors;         // of the most common part
  MainLoop main_loop;             // for 16-bit types
  const Tiles* tiles;
  const Costs* costs;
  bool is_measured;         // whether the costs were measured on this device
  const char* no_own_loop;  // why the portable loop is used though a faster one is possible; null:
                            // it is the right one
};
const CudaDevice& FindCudaDevice(int64_t arch);

struct CpuNumbers {
  Number tile_kv;
  Number codes_tile_kv;          // for eight_bit_products
  Number cache_bytes;            // limit for q, o and scores of a prefill tile
  Number decode_queues, queues;  // for each thread
  Number min_chunk, item_cost, split_cost;
  // Rates of one core. They set the ratio of costs, not times.
  Number bytes_per_us;      // keys and values streamed by a decode tile
  Number low_flops_per_us;  // a decode tile with so many rows that arithmetic is the limit
  Number flops_per_us;      // a prefill tile
};
// The numbers of a dtype; tuned ones where there are some.
CpuNumbers CpuNumbersOf(int64_t dtype);
// The name of a dtype's kernels in tuning files: "float32".
const char* CpuKernelName(int64_t dtype);

// The format that the CPU kernels of a call read: e4m3, or the call's dtype. Rows of other formats,
// and e4m3 with fresh_kv, are widened to that first.
int64_t CpuReadFormat(const AttentionSpec& spec);

// Items of few rows that another instruction set computes faster than the best one of the machine.
// None is built in: on the machines that were measured the best one is as fast or faster for items
// of all sizes (docs/notes/cpu.md). Tuning may find some (tuning.h).
struct CpuIsaRule {
  const char* best;
  int64_t dtype, kv_format;  // kv_format: the format that is read
  int64_t up_to_rows;
  const char* isa;
  const char* why;
};
// The rule for an attention call on a machine with this best instruction set; null: none.
const CpuIsaRule* FindCpuIsaRule(const AttentionSpec& spec, const char* best);

}  // namespace jax_attn
