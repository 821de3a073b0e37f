// Host side of the CUDA kernels: compile, load, launch. Plain C++, no CUDA headers.
//
// Each operation has three steps that match the stages of an XLA FFI handler:
//   Prepare  instantiate: the cubin is in memory afterwards, from the disk cache or from NVRTC.
//   Needs no GPU. Load     initialize: the cubin is a function on this device, its shared memory
//   attribute set. Launch   execute: memsets and launches on `stream` and nothing else, so it may
//   be captured.
// All are safe to call from several threads at once; handlers of different devices do.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "jit/kernel_source.h"
#include "params.h"
#include "spec.h"
#include "status.h"

namespace jax_attn {

// How Prepare got a kernel.
enum class KernelOrigin : int64_t { kMemory = 0, kDisk = 1, kCompiled = 2 };

struct KernelInfo {
  std::string name;        // readable, with the hash of the cache key
  std::string cache_path;  // folder in the disk cache; empty if it is not kept there
  KernelOrigin origin = KernelOrigin::kMemory;
  double milliseconds = 0;  // time this Prepare took
  int64_t cubin_bytes = 0;
  int64_t smem_bytes = 0;  // dynamic shared memory of the launch
  int64_t num_threads = 0;
};

// `info` may be null.
Status PrepareAttention(const AttentionProblem& problem, KernelInfo* info = nullptr);
Status LoadAttention(const AttentionProblem& problem, int device_ordinal);
// Grid: config.num_ctas. If the problem has room for splits at all, counters of the device's
// pool take the place of params.merge_counters, or else these are zeroed first.
Status LaunchAttention(const AttentionProblem& problem, const AttentionParams& params, void* stream,
                       int device_ordinal);

// gradient: of the problem's variant; empty without one.
Status PrepareBackward(const AttentionProblem& problem, const VariantGradient& gradient,
                       KernelInfo* info = nullptr);
Status LoadBackward(const AttentionProblem& problem, const VariantGradient& gradient,
                    int device_ordinal);
// Zeroes the workspace, num_zero_words from params.num_taken on, and what the kernels do not write
// of the results, and launches every phase.
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

Status PreparePlan(const PlanKernel& kernel, KernelInfo* info = nullptr);
Status LoadPlan(const PlanKernel& kernel, int device_ordinal);
// Zeroes the plan, num_words from params.header on, and writes it.
Status LaunchPlan(const PlanKernel& kernel, const PlanParams& params, int64_t num_words,
                  void* stream, int device_ordinal);

// Sets every byte on the stream, for tests that poison results before a launch.
Status FillBytes(void* address, unsigned char value, size_t num_bytes, void* stream);

// Where things are. Takes effect for libraries that are not loaded yet and for later Prepares.
struct JitPaths {
  std::vector<std::string> nvrtc;   // candidates in order; a copy already in the process wins
  std::vector<std::string> driver;  // candidates in order; empty: libcuda.so.1
  std::string cache_dir;            // empty: keep kernels in memory only
};
void SetJitPaths(const JitPaths& paths);

// Compute capability (90 for sm_90) and multiprocessors of a device. Creates no context.
Status QueryDevice(int ordinal, int* compute_capability, int* num_sms);

// The source and options of a kernel as Prepare compiles it, for tools and tests.
KernelSource AttentionKernelSource(const AttentionProblem& problem);
std::vector<KernelSource> BackwardKernelSources(const AttentionProblem& problem,
                                                const VariantGradient& gradient);
KernelSource AppendKernelSource(const AppendKernel& kernel);
KernelSource MergeKernelSource(const MergeKernel& kernel);
KernelSource QuantizedProductKernelSource(const QuantizedProductKernel& kernel);
KernelSource PlanKernelSource(const PlanKernel& kernel);

// Compiles past every cache. `log` gets NVRTC's output, also on success.
Status CompileKernelSource(const KernelSource& source, std::string* cubin, std::string* log);

// Counts since the process started.
struct JitStats {
  int64_t compiled = 0;     // NVRTC runs
  int64_t disk_hits = 0;    // cubins read from the cache
  int64_t memory_hits = 0;  // Prepares that found their kernel in the process
  int64_t corrupt = 0;      // cache entries that failed verification and were rebuilt
  double compile_ms = 0;
  int64_t loaded = 0;  // functions loaded, over all devices
  // Times the host code of execute ran. A replayed command buffer does not count here.
  int64_t attention_launches = 0;
  int64_t backward_launches = 0;
  int64_t append_launches = 0;
  int64_t merge_launches = 0;
  int64_t quantized_product_launches = 0;
  int64_t plan_launches = 0;
};
JitStats GetJitStats();

}  // namespace jax_attn
