// Makes the translation unit that NVRTC compiles for a problem.
//
// A kernel struct holds everything that changes the binary and nothing else. Head counts, scales,
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
  int64_t q_format = kPlainFormat;
  int64_t kv_format = kPlainFormat;
  int64_t head_dim_qk = 0;
  int64_t head_dim_vo = 0;
  bool mla = false;  // v is the first columns of k
  int64_t group_size = 0;
  int64_t page_size = 0;      // 0: ragged
  bool window_left = false;   // is limited
  bool window_right = false;  // is limited, as causal is
  bool logits_soft_cap = false;
  bool positive_scale = true;       // sm_scale > 0
  bool fresh_kv = false;            // the query tokens' k and v are k_new, v_new
  bool eight_bit_products = false;  // q and P are rounded to kv_format; both products are 8-bit
  int64_t main_loop = kPortable;
  int64_t num_tiles = 0;
  std::array<int64_t, kMaxTiles> tile_q{};
  int64_t tile_kv = 0;
  int64_t num_warps = 0;
  int64_t num_stages = 0;
  bool record_times = false;
  bool steps = false;  // items are ranges of step lists
  VariantProgram variant = {};
  Transform transforms[2];  // of k and v
};
AttentionKernel MakeAttentionKernel(const AttentionProblem& problem);

// A kernel of the backward pass.
struct BackwardKernel {
  int64_t arch = 0;
  int64_t dtype = kBF16;
  int64_t head_dim_qk = 0;
  int64_t head_dim_vo = 0;
  int64_t group_size = 0;
  int64_t page_size = 0;      // 0: ragged
  bool window_left = false;   // is limited
  bool window_right = false;  // is limited, as causal is
  bool logits_soft_cap = false;
  int64_t main_loop = kPortable;
  int64_t step_keys = 0;  // keys per step of the step lists; 0: no step lists
  VariantGradient variant = {};
};
BackwardKernel MakeBackwardKernel(const AttentionProblem& problem, const VariantGradient& gradient);
// The kernel that runs before the portable one if RunsHopperBackward.
BackwardKernel MakeHopperBackwardKernel(const AttentionProblem& problem);

struct AppendKernel {
  int64_t arch = 0;                  // 0: the capability of device 0
  int64_t kv_format = kPlainFormat;  // plain: bytes are copied; their type does not matter
  int64_t dtype = kBF16;             // DType of k_new and v_new, unless bytes are copied
  bool rotates = false;              // append_rotated
};
AppendKernel MakeAppendKernel(const AttentionSpec& spec, bool rotates);

struct MergeKernel {
  int64_t arch = 0;  // 0: the capability of device 0
  int64_t dtype = kBF16;
};

struct QuantizedProductKernel {
  int64_t arch = 0;  // 0: the capability of device 0
  int64_t dtype = kBF16;
  int64_t format = kInt4Weights;
  int64_t tile_rows = 0;          // rows of x per tile
  int64_t tile_columns = 0;       // columns of the matrix per tile
  int64_t scale_rows = 0;         // most groups in kProductStep rows: 1 or 2
  int64_t main_loop = kPortable;  // or kHopper
};

// Hopper only.
struct GroupedProductKernel {
  int64_t arch = 90;
  int64_t dtype = kBF16;
  bool transposed = false;   // matrices are [columns, depth]
  int64_t tile_rows = 0;     // rows of x per tile: 64 or 128
  int64_t tile_columns = 0;  // 64, 128 or 256
};

struct AllReduceKernel {
  int64_t arch = 0;  // 0: the capability of device 0
  int64_t dtype = kBF16;
  int64_t num_devices = 0;
  int64_t num_threads = 0;
  int64_t vectors = 0;     // of 16 bytes, that a thread has of a row
  bool two_shot = false;   // devices send sums, too
  bool norm = false;       // an RMS norm follows
  bool quantizes = false;  // and its result is e4m3
};

struct LinearAttentionKernel {
  int64_t arch = 0;       // 0: the capability of device 0
  int64_t dtype = kBF16;  // of q, k, v and o
  int64_t head_dim_k = 0;
  int64_t head_dim_v = 0;
  int64_t decay = kHeadDecay;  // LinearDecay
  bool delta_rule = true;
  bool l2_norm = false;
  bool bf16_states = false;         // else f32
  int64_t main_loop = kRecurrence;  // LinearLoop
  int64_t phase = kLinearTerms;     // LinearPhase of a chunked loop
  int64_t tile_columns = 0;         // columns of v of one CTA, a multiple of 32
};

struct ShortConvolutionKernel {
  int64_t arch = 0;       // 0: the capability of device 0
  int64_t dtype = kBF16;  // of x, y and the states
  int64_t width = 0;
  bool silu = false;
};

struct PlanKernel {
  int64_t arch = 0;      // 0: the capability of device 0
  bool general = false;  // takes prefix levels, kAuto and step lists
};

// A field of a kernel struct as text, such as {"head_dim_qk", "128"}.
struct KeyField {
  std::string name;
  std::string value;
};

// A translation unit with one kernel. It also defines two ints, <entry>_smem_bytes and
// <entry>_num_threads, which the loader reads from the cubin.
struct KernelSource {
  std::string name;   // readable, unique within one version of the sources
  std::string entry;  // extern "C" name of the kernel
  std::string text;
  std::vector<std::string> options;  // NVRTC's
  std::vector<KeyField> fields;      // every field of the kernel struct
};
KernelSource MakeSource(const AttentionKernel& kernel);
KernelSource MakeSource(const BackwardKernel& kernel);
KernelSource MakeSource(const AppendKernel& kernel);
KernelSource MakeSource(const MergeKernel& kernel);
KernelSource MakeSource(const QuantizedProductKernel& kernel);
KernelSource MakeSource(const GroupedProductKernel& kernel);
KernelSource MakeSource(const AllReduceKernel& kernel);
KernelSource MakeSource(const LinearAttentionKernel& kernel);
KernelSource MakeSource(const ShortConvolutionKernel& kernel);
KernelSource MakeSource(const PlanKernel& kernel);

// The operation and the fields of a kernel struct. Kernels with equal keys have equal binaries.
using KernelKey = std::vector<int64_t>;
KernelKey MakeKey(const AttentionKernel& kernel);
KernelKey MakeKey(const BackwardKernel& kernel);
KernelKey MakeKey(const AppendKernel& kernel);
KernelKey MakeKey(const MergeKernel& kernel);
KernelKey MakeKey(const QuantizedProductKernel& kernel);
KernelKey MakeKey(const GroupedProductKernel& kernel);
KernelKey MakeKey(const AllReduceKernel& kernel);
KernelKey MakeKey(const LinearAttentionKernel& kernel);
KernelKey MakeKey(const ShortConvolutionKernel& kernel);
KernelKey MakeKey(const PlanKernel& kernel);

// The NVRTC target for a compute capability, with every instruction that it has: "sm_90a" for 90.
std::string ArchName(int64_t arch);

}  // namespace jax_attn
