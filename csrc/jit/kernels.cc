#include "jit/kernels.h"

#include <algorithm>
#include <atomic>

#include "jit/compiler.h"
#include "jit/cuda_api.h"
#include "jit/registry.h"
#include "select/linear_chunks.h"
#include "select/select.h"

namespace jax_attn {
namespace {

// CTAs of the backward pass: at best this many share an SM. They take units until none is left, so
// a CTA that starts late does no harm.
constexpr int64_t kBackwardCtasPerSm = 2;
// Append moves memory. It launches enough threads for all rows, but at most a few waves; the kernel
// loops over the rest in strides of the grid.
constexpr int64_t kCtasPerSm = 8;
constexpr int64_t kWarpSize = 32;        // append: a warp copies one row of k or of v
constexpr int64_t kBytesPerThread = 16;  // merge: a thread writes 16 bytes of a row
constexpr int64_t kMaxGrid = 0x7fffffff;
// short_convolution: tokens of a chunk that a thread takes together. Fewer read more inputs twice;
// more are taken while so many CTAs a multiprocessor remain. (H200, in us, with 64, 32 and 16: 83,
// 86 and 92 for 8192 tokens of 8192 channels; 26, 23 and 25 for 4096 of 4096; the last two for 2048
// of 1536: 9.4 and 7.8.)
constexpr int64_t kConvolutionRows = 16, kFewConvolutionRows = 8;
constexpr int64_t kConvolutionCtasPerSm = 3;
constexpr int64_t kPagesPerThread = 4;  // plan: a thread copies 16 bytes of page ids at a time

std::atomic<int64_t> attention_launches{0};
std::atomic<int64_t> backward_launches{0};
std::atomic<int64_t> append_launches{0};
std::atomic<int64_t> merge_launches{0};
std::atomic<int64_t> quantized_product_launches{0};
std::atomic<int64_t> grouped_product_launches{0};
std::atomic<int64_t> all_reduce_launches{0};
std::atomic<int64_t> linear_attention_launches{0};
std::atomic<int64_t> linear_gradient_launches{0};
std::atomic<int64_t> short_convolution_launches{0};
std::atomic<int64_t> plan_launches{0};

struct Launch {
  int64_t num_ctas = 0;
  i32* zero_words = nullptr;  // set to 0 on the stream before the kernel runs
  int64_t num_zero_words = 0;
  // The kernel may begin while the one before it runs, and waits for it itself.
  bool overlaps_before = false;
};

template <typename Params>
Status LaunchLoaded(const char* op, const LoadedKernel& kernel, const Launch& launch,
                    const Params& params, void* stream) {
  const CudaDriver& d = *kernel.driver;
  const ScopedContext context(d, kernel.context);
  auto* cu_stream = static_cast<CUstream>(stream);
  if (launch.num_zero_words > 0) {
    if (CUresult r = d.cuMemsetD32Async(reinterpret_cast<CUdeviceptr>(launch.zero_words), 0,
                                        static_cast<size_t>(launch.num_zero_words), cu_stream)) {
      return Status::Error(std::string(op) + ": " + d.Describe("cuMemsetD32Async", r));
    }
  }
  void* arguments[] = {const_cast<Params*>(&params)};  // the driver copies it before it returns
  const auto num_ctas = static_cast<unsigned>(launch.num_ctas);
  const bool overlaps = launch.overlaps_before && d.cuLaunchKernelEx != nullptr;
  CUresult r;
  if (overlaps) {
    CUlaunchAttribute overlap = {CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, 1, {}};
    const CUlaunchConfig config = {
        num_ctas, 1, 1, kernel.num_threads, 1, 1, kernel.smem_bytes, cu_stream, &overlap, 1};
    r = d.cuLaunchKernelEx(&config, kernel.function, arguments, nullptr);
  } else {
    r = d.cuLaunchKernel(kernel.function, num_ctas, 1, 1, kernel.num_threads, 1, 1,
                         kernel.smem_bytes, cu_stream, arguments, nullptr);
  }
  if (r == CUDA_SUCCESS) return Status::Ok();
  const char* const call = overlaps ? "cuLaunchKernelEx" : "cuLaunchKernel";
  return Status::Error(std::string(op) + ": " + d.Describe(call, r));
}

int64_t TmaRows(const AttentionProblem& problem) {
  const KernelConfig& config = problem.config;
  return HopperTmaRows(
      problem.spec.kv_format, problem.spec.page_size, config.tile_kv,
      HopperOnlyDecodes(problem.spec.mla != 0, config.num_tiles, config.tile_q[0]));
}

// An array that TMA copies. A TMA tile is 64 columns of tile_heads heads and tile_rows rows, which
// in shared memory are rows of 128 bytes, swizzled. Columns beyond head_dim arrive as zeros, and
// are not written.
struct TmaArray {
  const void* array;  // [num_layers, num_rows, num_heads, head_dim], 16-bit elements
  int64_t num_layers, num_rows, num_heads, head_dim;
  int64_t tile_rows, tile_heads;
};

Status MakeTensorMap(const char* op, const CudaDriver& d, int64_t dtype, const TmaArray& of,
                     TensorMap* map) {
  using u64 = unsigned long long;
  const u64 row_bytes = static_cast<u64>(of.num_heads * of.head_dim * 2);
  const u64 dims[] = {static_cast<u64>(of.head_dim), static_cast<u64>(of.num_heads),
                      static_cast<u64>(of.num_rows), static_cast<u64>(of.num_layers)};
  const u64 strides[] = {static_cast<u64>(of.head_dim * 2), row_bytes, row_bytes * dims[2]};
  const unsigned tile[] = {64, static_cast<unsigned>(of.tile_heads),
                           static_cast<unsigned>(of.tile_rows), 1};
  const unsigned steps[] = {1, 1, 1, 1};
  const int type =
      dtype == kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const CUresult r = d.cuTensorMapEncodeTiled(
      map, type, 4, const_cast<void*>(of.array), dims, strides, tile, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return r == CUDA_SUCCESS
             ? Status::Ok()
             : Status::Error(std::string(op) + ": " + d.Describe("cuTensorMapEncodeTiled", r));
}

// The map of keys or values. Two quantized values of 8 bits are a column.
Status MakeKvMap(const CudaDriver& d, const AttentionProblem& problem, const void* array,
                 int64_t head_dim, int64_t num_layers, int64_t num_rows, TensorMap* map) {
  if (problem.spec.quantized()) head_dim /= 2;
  const TmaArray of = {array,    num_layers,       num_rows, problem.spec.num_kv_heads,
                       head_dim, TmaRows(problem), 1};
  return MakeTensorMap("attention", d, problem.spec.dtype, of, map);
}

// Joint items write final rows by TMA, see HopperOutputTmaTokens.
Status AddOutputMap(const CudaDriver& d, const AttentionProblem& problem, AttentionParams* p) {
  const AttentionSpec& spec = problem.spec;
  const int64_t group = spec.num_qo_heads / spec.num_kv_heads;
  const int64_t tallest = problem.config.tile_q[problem.config.num_tiles - 1];
  const bool has_joint_items = tallest > 64 || HopperHasOneConsumer(problem.config.num_warps);
  const int64_t tile_tokens = HopperOutputTmaTokens(group);
  if (problem.config.main_loop != kHopper || spec.mla || !has_joint_items || tile_tokens == 0 ||
      p->max_qo_tokens == 0) {
    return Status::Ok();
  }
  const TmaArray of = {p->o,        1,    p->max_qo_tokens, spec.num_qo_heads, spec.head_dim_vo,
                       tile_tokens, group};
  JAX_ATTN_RETURN_IF_ERROR(MakeTensorMap("attention", d, spec.dtype, of, &p->o_map));
  p->has_o_map = 1;
  return Status::Ok();
}

Status AddTensorMaps(const CudaDriver& d, const AttentionProblem& problem, AttentionParams* p) {
  const AttentionSpec& spec = problem.spec;
  const int64_t rows = spec.paged() ? p->num_pages * spec.page_size : spec.max_kv_tokens;
  // Latent rows are copied one by one. Coordinates of a TMA tile are 32-bit integers.
  if (problem.config.main_loop != kHopper || spec.mla || TmaRows(problem) == 0 || rows == 0 ||
      rows >= (int64_t{1} << 31)) {
    return Status::Ok();
  }
  const auto map = [&](const void* array, int64_t head_dim, int64_t num_layers, int64_t num_rows,
                       TensorMap* to) {
    return MakeKvMap(d, problem, array, head_dim, num_layers, num_rows, to);
  };
  JAX_ATTN_RETURN_IF_ERROR(map(p->k, spec.head_dim_qk, p->num_layers, rows, &p->k_map));
  JAX_ATTN_RETURN_IF_ERROR(map(p->v, spec.head_dim_vo, p->num_layers, rows, &p->v_map));
  if (spec.fresh_kv) {
    const int64_t new_rows = p->max_qo_tokens;
    JAX_ATTN_RETURN_IF_ERROR(map(p->k_new, spec.head_dim_qk, 1, new_rows, &p->k_new_map));
    JAX_ATTN_RETURN_IF_ERROR(map(p->v_new, spec.head_dim_vo, 1, new_rows, &p->v_new_map));
  }
  p->has_tensor_maps = 1;
  return Status::Ok();
}

// The maps of the Hopper kernel of the backward pass.
Status AddBackwardMaps(const CudaDriver& d, const AttentionSpec& spec, BackwardCudaParams* p) {
  AttentionParams& f = p->forward;
  const int64_t kv_rows = spec.paged() ? f.num_pages * spec.page_size : spec.max_kv_tokens;
  // Coordinates of a TMA tile are 32-bit integers.
  if (kv_rows == 0 || kv_rows >= (int64_t{1} << 31) || spec.max_qo_tokens == 0) return Status::Ok();
  const auto dim_qk = static_cast<i32>(spec.head_dim_qk),
             dim_vo = static_cast<i32>(spec.head_dim_vo);
  const auto map = [&](const void* array, int64_t layers, int64_t rows, int64_t heads, i32 dim,
                       int64_t tile_rows, TensorMap* to) {
    return MakeTensorMap("attention's backward pass", d, spec.dtype,
                         {array, layers, rows, heads, dim, tile_rows, 1}, to);
  };
  const int64_t qo_rows = spec.max_qo_tokens, qo_heads = spec.num_qo_heads;
  const int64_t tile = HopperBackwardRows(dim_qk, dim_vo);
  JAX_ATTN_RETURN_IF_ERROR(map(f.q, 1, qo_rows, qo_heads, dim_qk, tile, &p->q_map));
  JAX_ATTN_RETURN_IF_ERROR(map(p->d_o, 1, qo_rows, qo_heads, dim_vo, tile, &p->d_o_map));
  const int64_t kv_tile =
      HopperBackwardTmaRows(static_cast<i32>(spec.page_size), HopperBackwardKeys(dim_qk, dim_vo));
  if (kv_tile > 0) {
    const int64_t layers = spec.paged() ? f.num_layers : 1, kv_heads = spec.num_kv_heads;
    JAX_ATTN_RETURN_IF_ERROR(map(f.k, layers, kv_rows, kv_heads, dim_qk, kv_tile, &f.k_map));
    JAX_ATTN_RETURN_IF_ERROR(map(f.v, layers, kv_rows, kv_heads, dim_vo, kv_tile, &f.v_map));
  }
  f.has_tensor_maps = 1;
  return Status::Ok();
}

Status NotLoaded(const char* op, int device_ordinal) {
  return Status::Error(std::string(op) + ": its kernel is not loaded on device " +
                       std::to_string(device_ordinal) +
                       "; the handler's initialize stage did not run there");
}

template <typename KernelSpec>
Status PrepareSpec(const KernelSpec& kernel, KernelInfo* info) {
  return PrepareKernel(MakeKey(kernel), [&] { return MakeSource(kernel); }, info);
}

// One lookup if the kernel is loaded. Otherwise prepares and loads it.
template <typename KernelSpec>
Status LoadSpec(const KernelSpec& kernel, int device_ordinal) {
  const KernelKey key = MakeKey(kernel);
  if (FindLoadedKernel(key, device_ordinal) != nullptr) return Status::Ok();
  JAX_ATTN_RETURN_IF_ERROR(PrepareSpec(kernel, nullptr));
  return LoadKernel(key, device_ordinal);
}

// Always contains the portable kernel, because the Hopper kernel leaves some batches to it.
std::vector<BackwardKernel> BackwardKernels(const AttentionProblem& problem,
                                            const VariantGradient& gradient) {
  std::vector<BackwardKernel> kernels = {MakeBackwardKernel(problem, gradient)};
  if (RunsHopperBackward(problem)) kernels.push_back(MakeHopperBackwardKernel(problem));
  return kernels;
}

int64_t GridFor(int64_t work, int64_t work_per_cta, const LoadedKernel& kernel) {
  return std::clamp<int64_t>((work + work_per_cta - 1) / work_per_cta, 1,
                             kCtasPerSm * kernel.num_sms);
}

// Replaces arch 0 by the capability of device 0, which is queried once.
template <typename KernelSpec>
Status ResolveArch(KernelSpec* kernel) {
  static std::atomic<int> device_arch{0};
  if (kernel->arch != 0) return Status::Ok();
  if (device_arch == 0) {
    int compute_capability = 0, num_sms = 0;
    JAX_ATTN_RETURN_IF_ERROR(QueryDevice(0, &compute_capability, &num_sms));
    device_arch = compute_capability;
  }
  kernel->arch = device_arch;
  return Status::Ok();
}

template <typename KernelSpec>
Status PrepareResolved(KernelSpec kernel, KernelInfo* info) {
  JAX_ATTN_RETURN_IF_ERROR(ResolveArch(&kernel));
  return PrepareSpec(kernel, info);
}

template <typename KernelSpec>
Status LoadResolved(KernelSpec kernel, int device_ordinal) {
  JAX_ATTN_RETURN_IF_ERROR(ResolveArch(&kernel));
  return LoadSpec(kernel, device_ordinal);
}

template <typename KernelSpec>
Status FindResolved(const char* op, KernelSpec kernel, int device_ordinal,
                    const LoadedKernel** loaded) {
  JAX_ATTN_RETURN_IF_ERROR(ResolveArch(&kernel));
  *loaded = FindLoadedKernel(MakeKey(kernel), device_ordinal);
  return *loaded == nullptr ? NotLoaded(op, device_ordinal) : Status::Ok();
}

}  // namespace

Status PrepareAttention(const AttentionProblem& problem, KernelInfo* info) {
  return PrepareSpec(MakeAttentionKernel(problem), info);
}

Status LoadAttention(const AttentionProblem& problem, int device_ordinal) {
  return LoadSpec(MakeAttentionKernel(problem), device_ordinal);
}

Status LaunchAttention(const AttentionProblem& problem, const AttentionParams& params, void* stream,
                       int device_ordinal) {
  attention_launches.fetch_add(1, std::memory_order_relaxed);
  const LoadedKernel* kernel =
      FindLoadedKernel(MakeKey(MakeAttentionKernel(problem)), device_ordinal);
  if (kernel == nullptr) return NotLoaded("attention", device_ordinal);
  Launch launch;
  launch.num_ctas = problem.config.num_ctas;
  AttentionParams complete = params;
  if (problem.config.max_partial_rows > 0) {
    const int64_t num_counters = problem.config.max_merge_groups;
    CounterPool::Counters counters;
    if (kernel->counters != nullptr) {
      counters =
          kernel->counters->Find(params.merge_counters, num_counters, problem.config.num_ctas);
    }
    if (counters.parity != nullptr) {
      complete.merge_counters = counters.merge_counters;
      complete.counter_parity = counters.parity;
    } else {
      launch.zero_words = params.merge_counters;
      launch.num_zero_words = num_counters;
    }
  }
  JAX_ATTN_RETURN_IF_ERROR(AddTensorMaps(*kernel->driver, problem, &complete));
  JAX_ATTN_RETURN_IF_ERROR(AddOutputMap(*kernel->driver, problem, &complete));
  return LaunchLoaded("attention", *kernel, launch, complete, stream);
}

Status PrepareBackward(const AttentionProblem& problem, const VariantGradient& gradient,
                       KernelInfo* info) {
  for (const BackwardKernel& kernel : BackwardKernels(problem, gradient)) {
    JAX_ATTN_RETURN_IF_ERROR(PrepareSpec(kernel, info));
  }
  return Status::Ok();
}

Status LoadBackward(const AttentionProblem& problem, const VariantGradient& gradient,
                    int device_ordinal) {
  for (const BackwardKernel& kernel : BackwardKernels(problem, gradient)) {
    JAX_ATTN_RETURN_IF_ERROR(LoadSpec(kernel, device_ordinal));
  }
  return Status::Ok();
}

Status LaunchBackward(const AttentionProblem& problem, const VariantGradient& gradient,
                      const BackwardCudaParams& params, int64_t num_zero_words, void* stream,
                      int device_ordinal) {
  constexpr char kOp[] = "attention's backward pass";
  backward_launches.fetch_add(1, std::memory_order_relaxed);
  const AttentionSpec& spec = problem.spec;
  const LoadedKernel* kernel =
      FindLoadedKernel(MakeKey(MakeBackwardKernel(problem, gradient)), device_ordinal);
  const bool runs_hopper = RunsHopperBackward(problem);
  const LoadedKernel* hopper = nullptr;
  if (runs_hopper) {
    hopper = FindLoadedKernel(MakeKey(MakeHopperBackwardKernel(problem)), device_ordinal);
  }
  if (kernel == nullptr || (runs_hopper && hopper == nullptr)) {
    return NotLoaded(kOp, device_ordinal);
  }
  BackwardCudaParams of_phase = params;
  if (hopper != nullptr) {
    JAX_ATTN_RETURN_IF_ERROR(AddBackwardMaps(*hopper->driver, spec, &of_phase));
  }
  void* const results[] = {params.d_q, params.d_k, params.d_v};
  for (int i = 0; i < 3; ++i) {
    if (hopper != nullptr && (i == 0 || !spec.paged()))
      continue;  // the kernel writes all of this result
    const int64_t bytes = params.num_elements[i] * ElementBytes(spec.dtype);
    JAX_ATTN_RETURN_IF_ERROR(FillBytes(results[i], 0, bytes, stream));
  }
  for (int i = 0; i < kMaxVariantOperands; ++i) {
    const int64_t bytes = params.num_operand_elements[i] * int64_t{sizeof(i64)};
    JAX_ATTN_RETURN_IF_ERROR(FillBytes(params.operand_sums[i], 0, bytes, stream));
  }
  Launch launch;
  launch.zero_words = params.num_taken;
  launch.num_zero_words = num_zero_words;
  for (const i32 phase : {kBackwardReadPlan, kBackwardLinkPages, kBackwardSums, kBackwardRound,
                          kBackwardRows, kBackwardBounds, kBackwardOperands, kBackwardToOperands}) {
    if (phase == kBackwardLinkPages && !spec.paged()) continue;
    if (phase >= kBackwardBounds && gradient.num_elements == 0) continue;
    const bool of_hopper = phase == kBackwardSums || phase == kBackwardRound;
    if (of_hopper && hopper == nullptr) continue;
    of_phase.phase = phase;
    launch.num_ctas = (of_hopper ? 1 : kBackwardCtasPerSm) * kernel->num_sms;
    const LoadedKernel& of = of_hopper ? *hopper : *kernel;
    JAX_ATTN_RETURN_IF_ERROR(LaunchLoaded(kOp, of, launch, of_phase, stream));
    launch.num_zero_words = 0;
  }
  return Status::Ok();
}

Status PrepareAppend(const AppendKernel& kernel, KernelInfo* info) {
  return PrepareResolved(kernel, info);
}

Status LoadAppend(const AppendKernel& kernel, int device_ordinal) {
  return LoadResolved(kernel, device_ordinal);
}

Status LaunchAppend(const AppendKernel& kernel, const AppendParams& params, void* stream,
                    int device_ordinal) {
  append_launches.fetch_add(1, std::memory_order_relaxed);
  const char* op = kernel.rotates ? "append_rotated" : "append_kv";
  const LoadedKernel* loaded;
  JAX_ATTN_RETURN_IF_ERROR(FindResolved(op, kernel, device_ordinal, &loaded));
  if (params.max_qo_tokens == 0) return Status::Ok();
  Launch launch;
  const int64_t warps_a_token = kernel.rotates ? AppendRotatedWarps(params) : 2;
  launch.num_ctas =
      GridFor(warps_a_token * params.max_qo_tokens, loaded->num_threads / kWarpSize, *loaded);
  return LaunchLoaded(op, *loaded, launch, params, stream);
}

Status PrepareMerge(const MergeKernel& kernel, KernelInfo* info) {
  return PrepareResolved(kernel, info);
}

Status LoadMerge(const MergeKernel& kernel, int device_ordinal) {
  return LoadResolved(kernel, device_ordinal);
}

Status LaunchMerge(const MergeKernel& kernel, const MergeParams& params, void* stream,
                   int device_ordinal) {
  merge_launches.fetch_add(1, std::memory_order_relaxed);
  const LoadedKernel* loaded;
  JAX_ATTN_RETURN_IF_ERROR(FindResolved("merge_states", kernel, device_ordinal, &loaded));
  if (params.num_rows == 0) return Status::Ok();
  Launch launch;
  // One CTA for each part: waiting CTAs balance the load better than strides of the grid.
  const int64_t bytes = params.num_rows * params.head_dim_vo * ElementBytes(kernel.dtype);
  const int64_t cta_bytes = kBytesPerThread * MergeRows(params) * loaded->num_threads;
  launch.num_ctas = std::min<int64_t>((bytes + cta_bytes - 1) / cta_bytes, kMaxGrid);
  return LaunchLoaded("merge_states", *loaded, launch, params, stream);
}

Status PrepareQuantizedProduct(const QuantizedProductKernel& kernel, KernelInfo* info) {
  return PrepareResolved(kernel, info);
}

Status LoadQuantizedProduct(const QuantizedProductKernel& kernel, int device_ordinal) {
  return LoadResolved(kernel, device_ordinal);
}

Status LaunchQuantizedProduct(const QuantizedProductKernel& kernel,
                              const QuantizedProductParams& params, void* stream,
                              int device_ordinal) {
  constexpr char kOp[] = "quantized_product";
  quantized_product_launches.fetch_add(1, std::memory_order_relaxed);
  const LoadedKernel* loaded;
  JAX_ATTN_RETURN_IF_ERROR(FindResolved(kOp, kernel, device_ordinal, &loaded));
  const auto tiles = [](int64_t count, int64_t tile) { return (count + tile - 1) / tile; };
  Launch launch;
  launch.num_ctas = tiles(params.num_rows, kernel.tile_rows) *
                    tiles(params.columns, kernel.tile_columns) * params.num_splits;
  if (launch.num_ctas == 0) return Status::Ok();
  return LaunchLoaded(kOp, *loaded, launch, params, stream);
}

Status PrepareGroupedProduct(const GroupedProductKernel& kernel, KernelInfo* info) {
  return PrepareSpec(kernel, info);
}

Status LoadGroupedProduct(const GroupedProductKernel& kernel, int device_ordinal) {
  return LoadSpec(kernel, device_ordinal);
}

Status LaunchGroupedProduct(const GroupedProductKernel& kernel, const GroupedProductParams& params,
                            void* stream, int device_ordinal) {
  constexpr char kOp[] = "grouped_product";
  grouped_product_launches.fetch_add(1, std::memory_order_relaxed);
  const LoadedKernel* loaded = FindLoadedKernel(MakeKey(kernel), device_ordinal);
  if (loaded == nullptr) return NotLoaded(kOp, device_ordinal);
  if (params.num_rows == 0) return Status::Ok();
  GroupedProductParams complete = params;
  const int64_t groups = params.num_groups, depth = params.depth, columns = params.columns;
  JAX_ATTN_RETURN_IF_ERROR(MakeTensorMap(
      kOp, *loaded->driver, kernel.dtype,
      {params.x, 1, params.num_rows, 1, depth, kernel.tile_rows, 1}, &complete.x_map));
  const TmaArray weights =
      kernel.transposed
          ? TmaArray{params.weights, groups, columns, 1, depth, kernel.tile_columns, 1}
          : TmaArray{params.weights, groups, depth, 1, columns, kGroupedProductStep, 1};
  JAX_ATTN_RETURN_IF_ERROR(
      MakeTensorMap(kOp, *loaded->driver, kernel.dtype, weights, &complete.weights_map));
  Launch launch;
  launch.num_ctas = std::min<int64_t>(
      loaded->num_sms, MostGroupedTiles(params, kernel.tile_rows, kernel.tile_columns));
  return LaunchLoaded(kOp, *loaded, launch, complete, stream);
}

Status PrepareAllReduce(const AllReduceKernel& kernel, KernelInfo* info) {
  return PrepareResolved(kernel, info);
}

Status LoadAllReduce(const AllReduceKernel& kernel, int device_ordinal) {
  return LoadResolved(kernel, device_ordinal);
}

Status LaunchAllReduce(const AllReduceKernel& kernel, const AllReduceParams& params,
                       int64_t num_ctas, void* stream, int device_ordinal) {
  all_reduce_launches.fetch_add(1, std::memory_order_relaxed);
  const LoadedKernel* loaded;
  JAX_ATTN_RETURN_IF_ERROR(FindResolved("all_reduce", kernel, device_ordinal, &loaded));
  if (params.num_rows == 0) return Status::Ok();
  Launch launch;
  launch.num_ctas = num_ctas;
  return LaunchLoaded("all_reduce", *loaded, launch, params, stream);
}

Status PrepareLinearAttention(const LinearAttentionKernel& kernel, KernelInfo* info) {
  return PrepareResolved(kernel, info);
}

Status PrepareLinearAttention(const LinearAttentionProblem& problem) {
  for (const LinearAttentionKernel& kernel : LinearAttentionKernels(problem)) {
    JAX_ATTN_RETURN_IF_ERROR(PrepareLinearAttention(kernel));
  }
  return Status::Ok();
}

Status LoadLinearAttention(const LinearAttentionProblem& problem, int device_ordinal) {
  for (const LinearAttentionKernel& kernel : LinearAttentionKernels(problem)) {
    JAX_ATTN_RETURN_IF_ERROR(LoadResolved(kernel, device_ordinal));
  }
  return Status::Ok();
}

namespace {

// launch_one(kernel, loaded, launch): launches one of the kernels.
template <class LaunchOne>
Status LaunchLinearKernels(const LinearAttentionProblem& problem,
                           const std::vector<LinearAttentionKernel>& kernels,
                           const LinearAttentionLaunch& size, int device_ordinal,
                           const LaunchOne& launch_one) {
  constexpr char kOp[] = "linear_attention";
  for (const LinearAttentionKernel& kernel : kernels) {
    const LoadedKernel* loaded;
    JAX_ATTN_RETURN_IF_ERROR(FindResolved(kOp, kernel, device_ordinal, &loaded));
    Launch launch;
    launch.num_ctas = kernel.main_loop == kRecurrence
                          ? size.num_ctas
                          : LinearChunkCtas(problem, kernel, loaded->num_sms);
    if (launch.num_ctas > kMaxGrid) {
      return Status::Error(std::string(kOp) + ": plan: expected at most 2^31 - 1 CTAs, got " +
                           std::to_string(launch.num_ctas) +
                           "; make max_batch or max_tokens smaller.");
    }
    launch.overlaps_before =
        kernel.main_loop != kRecurrence && OverlapsLaunchBefore(kernel.arch, kernel.phase);
    JAX_ATTN_RETURN_IF_ERROR(launch_one(kernel, *loaded, launch));
  }
  return Status::Ok();
}

}  // namespace

Status LaunchLinearAttention(const LinearAttentionProblem& problem,
                             const LinearAttentionParams& params, void* stream,
                             int device_ordinal) {
  linear_attention_launches.fetch_add(1, std::memory_order_relaxed);
  return LaunchLinearKernels(
      problem, LinearAttentionKernels(problem), SizeLinearAttention(problem), device_ordinal,
      [&](const LinearAttentionKernel&, const LoadedKernel& loaded, const Launch& launch) {
        return LaunchLoaded("linear_attention", loaded, launch, params, stream);
      });
}

Status PrepareLinearGradient(const LinearAttentionProblem& problem) {
  for (const LinearAttentionKernel& kernel : LinearGradientKernels(problem)) {
    JAX_ATTN_RETURN_IF_ERROR(PrepareLinearAttention(kernel));
  }
  return Status::Ok();
}

Status LoadLinearGradient(const LinearAttentionProblem& problem, int device_ordinal) {
  for (const LinearAttentionKernel& kernel : LinearGradientKernels(problem)) {
    JAX_ATTN_RETURN_IF_ERROR(LoadResolved(kernel, device_ordinal));
  }
  return Status::Ok();
}

Status LaunchLinearGradient(const LinearAttentionProblem& problem,
                            const LinearGradientParams& params, void* stream, int device_ordinal) {
  linear_gradient_launches.fetch_add(1, std::memory_order_relaxed);
  return LaunchLinearKernels(
      problem, LinearGradientKernels(problem), SizeLinearGradient(problem), device_ordinal,
      [&](const LinearAttentionKernel& kernel, const LoadedKernel& loaded, const Launch& launch) {
        return kernel.phase == kLinearGradientTerms
                   ? LaunchLoaded("linear_attention", loaded, launch, params.forward, stream)
                   : LaunchLoaded("linear_attention", loaded, launch, params, stream);
      });
}

Status PrepareShortConvolution(const ShortConvolutionKernel& kernel, KernelInfo* info) {
  return PrepareResolved(kernel, info);
}

Status LoadShortConvolution(const ShortConvolutionKernel& kernel, int device_ordinal) {
  return LoadResolved(kernel, device_ordinal);
}

Status LaunchShortConvolution(const ShortConvolutionKernel& kernel,
                              const ShortConvolutionParams& params, int64_t max_qo_len,
                              void* stream, int device_ordinal) {
  constexpr char kOp[] = "short_convolution";
  short_convolution_launches.fetch_add(1, std::memory_order_relaxed);
  const LoadedKernel* loaded;
  JAX_ATTN_RETURN_IF_ERROR(FindResolved(kOp, kernel, device_ordinal, &loaded));
  if (params.num_channels == 0) return Status::Ok();
  const auto tiles = [](int64_t count, int64_t tile) { return (count + tile - 1) / tile; };
  ShortConvolutionParams complete = params;
  const int64_t rows = std::clamp<int64_t>(max_qo_len, 1, kLinearTokens);
  const int64_t width = ConvolutionVector(kernel.dtype, kernel.width, params.num_channels);
  const auto ctas = [&](int64_t tile_rows) {
    return std::max<int64_t>(params.plan.max_chunks, 1) * tiles(rows, tile_rows) *
           tiles(params.num_channels, width * loaded->num_threads);
  };
  int64_t tile_rows = max_qo_len <= kFewConvolutionRows ? kFewConvolutionRows : kConvolutionRows;
  while (tile_rows < rows && ctas(2 * tile_rows) >= kConvolutionCtasPerSm * loaded->num_sms) {
    tile_rows *= 2;
  }
  complete.tile_rows = static_cast<i32>(tile_rows);
  complete.row_tiles = static_cast<i32>(tiles(rows, tile_rows));
  Launch launch;
  launch.num_ctas = ctas(tile_rows);
  if (launch.num_ctas > kMaxGrid) {
    return Status::Error(std::string(kOp) + ": plan: expected at most 2^31 - 1 CTAs, got " +
                         std::to_string(launch.num_ctas) +
                         "; make max_batch or max_tokens smaller.");
  }
  return LaunchLoaded(kOp, *loaded, launch, complete, stream);
}

Status PreparePlan(const PlanKernel& kernel, KernelInfo* info) {
  return PrepareResolved(kernel, info);
}

Status LoadPlan(const PlanKernel& kernel, int device_ordinal) {
  return LoadResolved(kernel, device_ordinal);
}

Status LaunchPlan(const PlanKernel& kernel, const PlanParams& params, int64_t num_words,
                  void* stream, int device_ordinal) {
  plan_launches.fetch_add(1, std::memory_order_relaxed);
  const LoadedKernel* loaded;
  JAX_ATTN_RETURN_IF_ERROR(FindResolved("plan", kernel, device_ordinal, &loaded));
  const int64_t pages = params.rules.page_size > 0
                            ? std::min(params.rules.max_kv, params.inputs.num_page_indices)
                            : 0;
  Launch launch;
  launch.num_ctas = 1;  // the one that schedules; the others copy page ids
  if (pages > 0) {
    const int64_t most = std::max<int64_t>(1, loaded->num_sms - 1);
    const int64_t wanted = (pages + kPagesPerThread * loaded->num_threads - 1) /
                           (kPagesPerThread * loaded->num_threads);
    launch.num_ctas += std::min(wanted, most);
  }
  launch.zero_words = reinterpret_cast<i32*>(params.header);
  launch.num_zero_words = num_words;
  return LaunchLoaded("plan", *loaded, launch, params, stream);
}

namespace {

// Calls run(driver, stream) in the context of the stream.
template <typename Run>
Status OnStream(void* stream, const char* name, const Run& run) {
  const CudaDriver* d = nullptr;
  JAX_ATTN_RETURN_IF_ERROR(GetCudaDriver(&d));
  auto* cu_stream = static_cast<CUstream>(stream);
  CUcontext stream_context = nullptr;
  if (CUresult r = d->cuStreamGetCtx(cu_stream, &stream_context)) {
    return Status::Error(d->Describe("cuStreamGetCtx", r));
  }
  const ScopedContext context(*d, stream_context);
  const CUresult r = run(*d, cu_stream);
  return r == CUDA_SUCCESS ? Status::Ok() : Status::Error(d->Describe(name, r));
}

}  // namespace

Status FillBytes(void* address, unsigned char value, size_t num_bytes, void* stream) {
  if (num_bytes == 0) return Status::Ok();
  return OnStream(stream, "cuMemsetD8Async", [&](const CudaDriver& d, CUstream cu_stream) {
    return d.cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(address), value, num_bytes, cu_stream);
  });
}

Status CopyBytes(void* to, const void* from, size_t num_bytes, void* stream) {
  if (num_bytes == 0 || to == from) return Status::Ok();
  return OnStream(stream, "cuMemcpyDtoDAsync", [&](const CudaDriver& d, CUstream cu_stream) {
    return d.cuMemcpyDtoDAsync(reinterpret_cast<CUdeviceptr>(to),
                               reinterpret_cast<CUdeviceptr>(from), num_bytes, cu_stream);
  });
}

void SetJitPaths(const JitPaths& paths) {
  SetCudaLibraries(paths.nvrtc, paths.driver);
  SetCacheDir(paths.cache_dir);
}

Status QueryDevice(int ordinal, int* compute_capability, int* num_sms) {
  const CudaDriver* d = nullptr;
  JAX_ATTN_RETURN_IF_ERROR(GetCudaDriver(&d));
  CUdevice device = 0;
  if (CUresult r = d->cuDeviceGet(&device, ordinal)) {
    return Status::Error("device " + std::to_string(ordinal) + ": " +
                         d->Describe("cuDeviceGet", r));
  }
  int major = 0, minor = 0;
  CUresult r =
      d->cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device);
  if (r == CUDA_SUCCESS) {
    r = d->cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device);
  }
  if (r == CUDA_SUCCESS) {
    r = d->cuDeviceGetAttribute(num_sms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device);
  }
  if (r != CUDA_SUCCESS) return Status::Error(d->Describe("cuDeviceGetAttribute", r));
  *compute_capability = 10 * major + minor;
  return Status::Ok();
}

KernelSource AttentionKernelSource(const AttentionProblem& problem) {
  return MakeSource(MakeAttentionKernel(problem));
}
std::vector<KernelSource> BackwardKernelSources(const AttentionProblem& problem,
                                                const VariantGradient& gradient) {
  std::vector<KernelSource> sources;
  for (const BackwardKernel& kernel : BackwardKernels(problem, gradient)) {
    sources.push_back(MakeSource(kernel));
  }
  return sources;
}
KernelSource AppendKernelSource(const AppendKernel& kernel) { return MakeSource(kernel); }
KernelSource MergeKernelSource(const MergeKernel& kernel) { return MakeSource(kernel); }
KernelSource QuantizedProductKernelSource(const QuantizedProductKernel& kernel) {
  return MakeSource(kernel);
}
KernelSource GroupedProductKernelSource(const GroupedProductKernel& kernel) {
  return MakeSource(kernel);
}
KernelSource AllReduceKernelSource(const AllReduceKernel& kernel) { return MakeSource(kernel); }
KernelSource LinearAttentionKernelSource(const LinearAttentionKernel& kernel) {
  return MakeSource(kernel);
}
KernelSource ShortConvolutionKernelSource(const ShortConvolutionKernel& kernel) {
  return MakeSource(kernel);
}
KernelSource PlanKernelSource(const PlanKernel& kernel) { return MakeSource(kernel); }

Status CompileKernelSource(const KernelSource& source, std::string* cubin, std::string* log) {
  return Compile(source, cubin, log);
}

JitStats GetJitStats() {
  JitStats stats = GetRegistryStats();
  stats.attention_launches = attention_launches.load(std::memory_order_relaxed);
  stats.backward_launches = backward_launches.load(std::memory_order_relaxed);
  stats.append_launches = append_launches.load(std::memory_order_relaxed);
  stats.merge_launches = merge_launches.load(std::memory_order_relaxed);
  stats.quantized_product_launches = quantized_product_launches.load(std::memory_order_relaxed);
  stats.grouped_product_launches = grouped_product_launches.load(std::memory_order_relaxed);
  stats.all_reduce_launches = all_reduce_launches.load(std::memory_order_relaxed);
  stats.linear_attention_launches = linear_attention_launches.load(std::memory_order_relaxed);
  stats.linear_gradient_launches = linear_gradient_launches.load(std::memory_order_relaxed);
  stats.short_convolution_launches = short_convolution_launches.load(std::memory_order_relaxed);
  stats.plan_launches = plan_launches.load(std::memory_order_relaxed);
  return stats;
}

}  // namespace jax_attn
