// From a problem to the translation unit that NVRTC compiles.
//
// A kernel struct holds everything that changes the binary and nothing else: head counts, scales,
// capacities and page counts are arguments of the launch.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "spec.h"

namespace jax_attn {

struct AttentionKernel {
  int64_t arch = 0;  // compute capability, 90 for sm_90
  int64_t dtype = kBF16;
  int64_t q_is_e4m3 = 0;
  int64_t kv_is_e4m3 = 0;
  int64_t head_dim_qk = 0;
  int64_t head_dim_vo = 0;
  int64_t mla = 0;  // 1: v is columns of k
  int64_t group_size = 0;
  int64_t page_size = 0;        // 0: ragged
  int64_t window_left = 0;      // 1: window_left is limited
  int64_t window_right = 0;     // 1: window_right is limited (causal is)
  int64_t logits_soft_cap = 0;  // 1: on
  int64_t positive_scale = 1;   // 1: sm_scale > 0
  int64_t fresh_kv = 0;         // 1: the query tokens' k and v are k_new, v_new
  int64_t main_loop = kPortable;
  int64_t num_tiles = 0;
  std::array<int64_t, kMaxTiles> tile_q{};
  int64_t tile_kv = 0;
  int64_t num_warps = 0;
  int64_t num_stages = 0;
  int64_t record_times = 0;  // 1: on
};
AttentionKernel MakeAttentionKernel(const AttentionProblem& problem);

struct AppendKernel {
  int64_t arch = 0;        // 0: that of device 0
  int64_t kv_is_e4m3 = 0;  // 0: bytes are copied, whatever their type
  int64_t dtype = kBF16;   // of k_new and v_new, where elements are computed with
  int64_t rotates = 0;     // 1: append_rotated
};
AppendKernel MakeAppendKernel(const AttentionSpec& spec, bool rotates);

struct MergeKernel {
  int64_t arch = 0;  // 0: that of device 0
  int64_t dtype = kBF16;
};

struct PlanKernel {
  int64_t arch = 0;     // 0: that of device 0
  int64_t general = 0;  // 1: may be told which prefixes are shared, and may plan kAuto
};

// One translation unit with one kernel. Beside `entry` it defines two ints, <entry>_smem_bytes and
// <entry>_num_threads, which the launch reads from the cubin.
struct KernelSource {
  std::string name;   // readable, unique within one version of the sources
  std::string entry;  // extern "C" name of the kernel
  std::string text;
  std::vector<std::string> options;  // of NVRTC
};
KernelSource MakeSource(const AttentionKernel& kernel);
KernelSource MakeSource(const AppendKernel& kernel);
KernelSource MakeSource(const MergeKernel& kernel);
KernelSource MakeSource(const PlanKernel& kernel);

// The words of a kernel struct, operation first: equal keys, equal binaries.
using KernelKey = std::array<int64_t, 24>;
KernelKey MakeKey(const AttentionKernel& kernel);
KernelKey MakeKey(const AppendKernel& kernel);
KernelKey MakeKey(const MergeKernel& kernel);
KernelKey MakeKey(const PlanKernel& kernel);

// "sm_90a" for 90: the architecture whose cubin runs on this compute capability with every
// instruction it has.
std::string ArchName(int64_t arch);

}  // namespace jax_attn
