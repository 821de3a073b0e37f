// Host side of the CUDA kernels: compile, load, launch. Plain C++, no CUDA headers.
//
// Each operation has three steps that match the stages of an XLA FFI handler:
//   Prepare  instantiate  Gets the cubin from the disk cache or from NVRTC. Needs no GPU.
//   Load     initialize   Makes the cubin a function on this device and sets its shared memory.
//   Launch   execute      Only sets memory and launches on `stream`, so it may be captured.
// All may be called from several threads at once, as handlers of different devices do.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/any/all_reduce_params.h"
#include "cuda/sm90/grouped_product_params.h"
#include "jit/kernel_source.h"
#include "params.h"
#include "select/linear.h"
#include "spec.h"
#include "status.h"

namespace jax_attn {

// Where Prepare found a kernel.
enum class KernelOrigin : int64_t { kMemory = 0, kDisk = 1, kCompiled = 2 };

struct KernelInfo {
  std::string name;        // readable, ends with the hash of the cache key
  std::string cache_path;  // folder in the disk cache; empty: not kept there
  KernelOrigin origin = KernelOrigin::kMemory;
  double milliseconds = 0;  // duration of this Prepare
  int64_t cubin_bytes = 0;
  int64_t smem_bytes = 0;  // dynamic shared memory of a launch
  int64_t num_threads = 0;
};

// `info` may be null.
Status PrepareAttention(const AttentionProblem& problem, KernelInfo* info = nullptr);
Status LoadAttention(const AttentionProblem& problem, int device_ordinal);
// The grid is config.num_ctas. If the problem has room for splits, the launch counts with counters
// of the device's pool. If the pool has none left, it zeroes params.merge_counters first.
Status LaunchAttention(const AttentionProblem& problem, const AttentionParams& params, void* stream,
                       int device_ordinal);

// gradient: the gradient of the problem's variant; empty without a variant.
Status PrepareBackward(const AttentionProblem& problem, const VariantGradient& gradient,
                       KernelInfo* info = nullptr);
Status LoadBackward(const AttentionProblem& problem, const VariantGradient& gradient,
                    int device_ordinal);
// Zeroes num_zero_words of the workspace from params.num_taken on and the parts of the results that
// the kernels do not write. Then launches every phase.
Status LaunchBackward(const AttentionProblem& problem, const VariantGradient& gradient,
                      const BackwardCudaParams& params, int64_t num_zero_words, void* stream,
                      int device_ordinal);

Status PrepareAppend(const AppendKernel& kernel, KernelInfo* info = nullptr);
Status LoadAppend(const AppendKernel& kernel, int device_ordinal);
Status LaunchAppend(const AppendKernel& kernel, const AppendParams& params, void* stream,
                    int device_ordinal);

Status PrepareMerge(const MergeKernel& kernel, KernelInfo* info = nullptr);
Status LoadMerge(const MergeKernel& kernel, int device_ordinal);
Status LaunchMerge(const MergeKernel& kernel, const MergeParams& params, void* stream,
                   int device_ordinal);

Status PrepareQuantizedProduct(const QuantizedProductKernel& kernel, KernelInfo* info = nullptr);
Status LoadQuantizedProduct(const QuantizedProductKernel& kernel, int device_ordinal);
Status LaunchQuantizedProduct(const QuantizedProductKernel& kernel,
                              const QuantizedProductParams& params, void* stream,
                              int device_ordinal);

Status PrepareGroupedProduct(const GroupedProductKernel& kernel, KernelInfo* info = nullptr);
Status LoadGroupedProduct(const GroupedProductKernel& kernel, int device_ordinal);
// Makes the tensor maps of the params.
Status LaunchGroupedProduct(const GroupedProductKernel& kernel, const GroupedProductParams& params,
                            void* stream, int device_ordinal);

Status PrepareAllReduce(const AllReduceKernel& kernel, KernelInfo* info = nullptr);
Status LoadAllReduce(const AllReduceKernel& kernel, int device_ordinal);
// num_ctas: the same on all devices, at most kAllReduceCtas.
Status LaunchAllReduce(const AllReduceKernel& kernel, const AllReduceParams& params,
                       int64_t num_ctas, void* stream, int device_ordinal);

// One of LinearAttentionKernels, or all of them.
Status PrepareLinearAttention(const LinearAttentionKernel& kernel, KernelInfo* info = nullptr);
Status PrepareLinearAttention(const LinearAttentionProblem& problem);
Status LoadLinearAttention(const LinearAttentionProblem& problem, int device_ordinal);
Status LaunchLinearAttention(const LinearAttentionProblem& problem,
                             const LinearAttentionParams& params, void* stream, int device_ordinal);

// The same for gradients (LinearGradientKernels), of which there must be some.
Status PrepareLinearGradient(const LinearAttentionProblem& problem);
Status LoadLinearGradient(const LinearAttentionProblem& problem, int device_ordinal);
Status LaunchLinearGradient(const LinearAttentionProblem& problem,
                            const LinearGradientParams& params, void* stream, int device_ordinal);

Status PrepareShortConvolution(const ShortConvolutionKernel& kernel, KernelInfo* info = nullptr);
Status LoadShortConvolution(const ShortConvolutionKernel& kernel, int device_ordinal);
// Sets tile_rows and row_tiles of the params. max_qo_len: most tokens of a request.
Status LaunchShortConvolution(const ShortConvolutionKernel& kernel,
                              const ShortConvolutionParams& params, int64_t max_qo_len,
                              void* stream, int device_ordinal);

Status PreparePlan(const PlanKernel& kernel, KernelInfo* info = nullptr);
Status LoadPlan(const PlanKernel& kernel, int device_ordinal);
// Zeroes num_words from params.header on and writes the plan there.
Status LaunchPlan(const PlanKernel& kernel, const PlanParams& params, int64_t num_words,
                  void* stream, int device_ordinal);

// Sets every byte on the stream. Poisons results before a launch, for tests.
Status FillBytes(void* address, unsigned char value, size_t num_bytes, void* stream);

// Copies on the stream. Does nothing if both are the same memory.
Status CopyBytes(void* to, const void* from, size_t num_bytes, void* stream);

// Where libraries and the disk cache are. Applies to libraries that are not loaded yet and to later
// Prepares.
struct JitPaths {
  std::vector<std::string> nvrtc;   // candidates in order; a copy in the process goes before them
  std::vector<std::string> driver;  // candidates in order; empty: libcuda.so.1
  std::string cache_dir;            // empty: kernels stay in memory only
};
void SetJitPaths(const JitPaths& paths);

// Gets compute capability (90 for sm_90) and number of SMs of a device. Creates no context.
Status QueryDevice(int ordinal, int* compute_capability, int* num_sms);

// The source and the options of a kernel as Prepare compiles it, for tools and tests.
KernelSource AttentionKernelSource(const AttentionProblem& problem);
std::vector<KernelSource> BackwardKernelSources(const AttentionProblem& problem,
                                                const VariantGradient& gradient);
KernelSource AppendKernelSource(const AppendKernel& kernel);
KernelSource MergeKernelSource(const MergeKernel& kernel);
KernelSource QuantizedProductKernelSource(const QuantizedProductKernel& kernel);
KernelSource GroupedProductKernelSource(const GroupedProductKernel& kernel);
KernelSource AllReduceKernelSource(const AllReduceKernel& kernel);
KernelSource LinearAttentionKernelSource(const LinearAttentionKernel& kernel);
KernelSource ShortConvolutionKernelSource(const ShortConvolutionKernel& kernel);
KernelSource PlanKernelSource(const PlanKernel& kernel);

// Compiles without any cache. `log` gets NVRTC's output, also on success.
Status CompileKernelSource(const KernelSource& source, std::string* cubin, std::string* log);

// Counts since the process started.
struct JitStats {
  int64_t compiled = 0;     // NVRTC runs
  int64_t disk_hits = 0;    // cubins read from the cache
  int64_t memory_hits = 0;  // Prepares of a kernel that the process had already
  int64_t corrupt = 0;      // cache entries that failed verification and were replaced
  double compile_ms = 0;
  int64_t loaded = 0;  // functions loaded, on all devices
  // How often the host code of execute ran. Replays of a command buffer do not count.
  int64_t attention_launches = 0;
  int64_t backward_launches = 0;
  int64_t append_launches = 0;
  int64_t merge_launches = 0;
  int64_t quantized_product_launches = 0;
  int64_t grouped_product_launches = 0;
  int64_t all_reduce_launches = 0;
  int64_t linear_attention_launches = 0;
  int64_t linear_gradient_launches = 0;
  int64_t short_convolution_launches = 0;
  int64_t plan_launches = 0;
};
JitStats GetJitStats();

}  // namespace jax_attn
