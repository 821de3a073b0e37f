// What is known of each device: every number that was measured or sized for one.
//
// Who measures a new GPU adds a row to kCudaDevices in devices.cc, and beside it a Costs table of
// its own: change a number, run `python -m benchmarks.bench_gpu` with the workloads that it is
// about, keep the best, and say what was measured beside it. A new architecture has its shared
// memory in cuda/common/budget.cuh and build_tools/check_kernels.py as well. A target names no more
// than a compute capability, so that is what a row is for: the parts of one architecture differ in
// bandwidth, which scales an item and its fixed costs alike, and nearly cancels.
#pragma once

#include <cstdint>

#include "spec.h"

namespace jax_attn {

// A number and where it comes from, which JAX_ATTN_PRINT_CONFIG=1 prints.
struct Number {
  int64_t value;
  const char* why;
};

// Numbers by a size: that of the first step that the size does not exceed, or of the last one.
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

// Tiles and depths that fit the shared memory of a multiprocessor. Sized, then compiled by
// build_tools/check_kernels.py, which says what does not fit.
struct Tiles {
  const char* name;
  Steps prefill_rows;  // by head_dim_qk: rows of a prefill tile
  Steps step_tokens;   // by head_dim_qk: kv tokens of a step
  Steps ring_slots;  // by the larger head dim, in 16-bit elements: slots of 64 rows in the kv ring
  Steps ctas;        // by the larger head dim: CTAs that share a multiprocessor
  Steps f32_step_tokens;   // by head_dim_qk + head_dim_vo
  Steps f32_ring_slots;    // likewise
  Number mla_rows;         // the tallest tile
  Number mla_step_tokens;  // sm80/mla.cuh
};

// What the planner weighs for one kernel. In kv tokens of the smallest tile, but for kv_cost.
struct KernelCosts {
  Number min_chunk;   // shortest kv chunk worth a split
  Number item_cost;   // to fill and drain
  Number split_cost;  // what a state in the workspace adds: the fence, a share of the merge
  Steps kv_cost;      // by the rows of a tile: time of 16 kv tokens; 16 is a decode tile's
};

// The kernels of Costs, as a file of tuned numbers names them (tuning.h).
inline constexpr const char* kCudaKernelNames[] = {"portable",    "hopper",    "portable_e4m3",
                                                   "hopper_e4m3", "mla_16",    "mla_32",
                                                   "mla_64",      "mla_hopper"};

struct Costs {
  const char* measured_on;
  Number cached_bytes;  // of a request's keys and values, which CTAs read at different times
  KernelCosts portable, hopper, portable_e4m3, hopper_e4m3;
  KernelCosts mla_16, mla_32, mla_64;  // sm80/mla.cuh, by the rows of its smallest tile
  KernelCosts mla_hopper;              // sm90/mla.cuh
};

struct CudaDevice {
  const char* name;
  int64_t first_arch, last_arch;  // compute capabilities
  int64_t num_processors;         // of the part that most people have of it
  MainLoop main_loop;             // of 16-bit types
  const Tiles* tiles;
  const Costs* costs;
  bool is_measured;         // the costs are of this device
  const char* no_own_loop;  // why the portable loop serves though a faster one could; null: none
};
const CudaDevice& FindCudaDevice(int64_t arch);

struct CpuNumbers {
  Number tile_kv;
  Number codes_tile_kv;          // of products of codes
  Number cache_bytes;            // what q, o and scores of a prefill tile may take
  Number decode_queues, queues;  // a thread
  Number min_chunk, item_cost, split_cost;
  // Rates of one core that set the ratio of costs, not times.
  Number bytes_per_us;      // keys and values streamed by a decode tile
  Number low_flops_per_us;  // a decode tile whose rows are many enough to be the limit
  Number flops_per_us;      // a prefill tile
};
// Those of a dtype; tuned ones where there are.
CpuNumbers CpuNumbersOf(int64_t dtype);
// As a file of tuned numbers names the kernels of a dtype: "float32".
const char* CpuKernelName(int64_t dtype);

// What the CPU kernels of a call read: e4m3, or values of its dtype, to which rows of all other
// formats, and with fresh_kv of e4m3, are widened first.
int64_t CpuReadFormat(const AttentionSpec& spec);

// Items of few rows that another instruction set computes faster than the best one of the machine.
// Built in there is none: the best one is as fast or faster for items of all heights (docs/notes/
// cpu.md), on the machines that were measured. Tuning may find some (tuning.h).
struct CpuIsaRule {
  const char* best;
  int64_t dtype, kv_format;  // kv_format: what is read
  int64_t up_to_rows;
  const char* isa;
  const char* why;
};
// The rule for an attention call on a machine with this best instruction set; null: there is none.
const CpuIsaRule* FindCpuIsaRule(const AttentionSpec& spec, const char* best);

}  // namespace jax_attn
