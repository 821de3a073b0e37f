#include "jit/kernel_source.h"

#include <sstream>

namespace jax_attn {
namespace {

const char* DTypeName(int64_t dtype) {
  return dtype == kBF16 ? "bf16" : dtype == kF16 ? "f16" : "f32";
}

// Writes `struct Traits`, one readable member a line.
class TraitsWriter {
 public:
  void Int(const char* name, int64_t value, const std::string& comment = "") {
    Line("int", name, std::to_string(value), comment);
  }
  void Bool(const char* name, bool value, const std::string& comment = "") {
    Line("bool", name, value ? "true" : "false", comment);
  }
  std::string str() const {
    return "namespace jax_attn {\n\nstruct Traits {\n" + out_.str() +
           "};\n\n}  // namespace jax_attn\n";
  }

 private:
  void Line(const char* type, const char* name, const std::string& value,
            const std::string& comment) {
    out_ << "  static constexpr " << type << " " << name << " = " << value << ";";
    if (!comment.empty()) out_ << "  // " << comment;
    out_ << "\n";
  }
  std::ostringstream out_;
};

// The kernel is a thin shell: the body, its thread count and its shared memory are the header's.
std::string TranslationUnit(const std::string& header, const std::string& traits,
                            const std::string& body_template, const std::string& op,
                            const std::string& entry) {
  const std::string body = body_template + "<jax_attn::Traits>";
  std::ostringstream out;
  out << "#include \"" << header << "\"\n\n"
      << traits << "\n"
      << "using Body = jax_attn::" << body << ";\n\n"
      << "extern \"C\" __device__ int " << entry << "_smem_bytes = Body::kSmemBytes;\n"
      << "extern \"C\" __device__ int " << entry << "_num_threads = Body::kNumThreads;\n\n"
      << "extern \"C\" __global__ void\n"
      << "__launch_bounds__(Body::kNumThreads, Body::kMinCtasPerSm)\n"
      << entry << "(const __grid_constant__ jax_attn::" << op << "Params params) {\n"
      << "  Body::Run(params);\n"
      << "}\n";
  return out.str();
}

std::vector<std::string> Options(int64_t arch) {
  return {"--gpu-architecture=" + ArchName(arch), "-std=c++17",
          "--device-as-default-execution-space"};
}

}  // namespace

std::string ArchName(int64_t arch) {
  // From Hopper on, the fast instructions (wgmma, tcgen05, setmaxnreg) exist only in the
  // architecture-specific target, whose cubins run on exactly this capability: all we need.
  return "sm_" + std::to_string(arch) + (arch >= 90 ? "a" : "");
}

AttentionKernel MakeAttentionKernel(const AttentionProblem& problem) {
  const AttentionSpec& spec = problem.spec;
  const KernelConfig& config = problem.config;
  AttentionKernel kernel;
  kernel.arch = spec.arch;
  kernel.dtype = spec.dtype;
  kernel.q_is_e4m3 = spec.q_is_e4m3;
  kernel.kv_is_e4m3 = spec.kv_is_e4m3;
  kernel.head_dim_qk = spec.head_dim_qk;
  kernel.head_dim_vo = spec.head_dim_vo;
  kernel.mla = spec.mla;
  kernel.group_size = spec.group_size();
  kernel.page_size = spec.page_size;
  kernel.window_left = spec.window_left >= 0;
  kernel.window_right = spec.window_right >= 0;
  kernel.logits_soft_cap = spec.logits_soft_cap > 0;
  kernel.positive_scale = spec.sm_scale > 0;
  kernel.fresh_kv = spec.fresh_kv;
  kernel.main_loop = config.main_loop;
  kernel.num_tiles = config.num_tiles;
  for (int i = 0; i < config.num_tiles; ++i) kernel.tile_q[i] = config.tile_q[i];
  kernel.tile_kv = config.tile_kv;
  kernel.num_warps = config.num_warps;
  kernel.num_stages = config.num_stages;
  kernel.record_times = config.record_times;
  return kernel;
}

KernelSource MakeSource(const AttentionKernel& kernel) {
  TraitsWriter traits;
  traits.Int("kArch", kernel.arch);
  traits.Int("kDtype", kernel.dtype, DTypeName(kernel.dtype));
  traits.Bool("kQIsE4m3", kernel.q_is_e4m3);
  traits.Bool("kKvIsE4m3", kernel.kv_is_e4m3);
  traits.Int("kHeadDimQk", kernel.head_dim_qk);
  traits.Int("kHeadDimVo", kernel.head_dim_vo);
  traits.Bool("kIsMla", kernel.mla, "v is the first columns of k");
  traits.Int("kGroupSize", kernel.group_size);
  traits.Int("kPageSize", kernel.page_size, kernel.page_size == 0 ? "ragged" : "tokens");
  traits.Bool("kHasWindowLeft", kernel.window_left);
  traits.Bool("kHasWindowRight", kernel.window_right, "causal is window_right 0");
  traits.Bool("kHasSoftCap", kernel.logits_soft_cap);
  traits.Bool("kPositiveScale", kernel.positive_scale, "sm_scale > 0");
  traits.Bool("kHasFreshKv", kernel.fresh_kv, "the query tokens' k and v are k_new, v_new");
  traits.Int("kNumTiles", kernel.num_tiles);
  for (int i = 0; i < kMaxTiles; ++i) {
    const std::string name = "kTileQ" + std::to_string(i);
    traits.Int(name.c_str(), kernel.tile_q[i], i < kernel.num_tiles ? "rows" : "unused");
  }
  traits.Int("kTileKv", kernel.tile_kv, "kv tokens a main-loop step");
  traits.Int("kNumWarps", kernel.num_warps);
  traits.Int("kNumStages", kernel.num_stages, "depth of the kv pipeline");
  traits.Bool("kRecordsTimes", kernel.record_times, "of items");

  std::ostringstream name;
  name << "attention-" << ArchName(kernel.arch) << "-" << DTypeName(kernel.dtype) << "-d"
       << kernel.head_dim_qk;
  if (kernel.head_dim_vo != kernel.head_dim_qk) name << "x" << kernel.head_dim_vo;
  if (kernel.q_is_e4m3) name << "-qe4m3";
  if (kernel.kv_is_e4m3) name << "-kve4m3";
  if (kernel.mla) name << "-mla";
  name << "-g" << kernel.group_size;
  if (kernel.page_size == 0) name << "-ragged";
  if (kernel.page_size > 0) name << "-page" << kernel.page_size;
  name << "-q";
  for (int i = 0; i < kernel.num_tiles; ++i) name << (i ? "_" : "") << kernel.tile_q[i];
  name << "-kv" << kernel.tile_kv << "-w" << kernel.num_warps << "-s" << kernel.num_stages;
  if (kernel.window_left) name << "-left";
  if (kernel.window_right) name << "-right";
  if (kernel.logits_soft_cap) name << "-cap";
  if (!kernel.positive_scale) name << "-negative";
  if (kernel.fresh_kv) name << "-fresh";
  if (kernel.main_loop == kHopper) name << "-wgmma";
  if (kernel.record_times) name << "-times";

  const std::string entry = "attention_kernel";
  const bool hopper = kernel.main_loop == kHopper;
  // As select/cuda.cc has it: tiles that do not fill a wgmma with rows.
  const bool mla_decode = kernel.mla && hopper && kernel.tile_q[0] < 64;
  const std::string header =
      std::string(hopper ? "cuda/sm90/" : "cuda/sm80/") + (mla_decode   ? "mla_decode.cuh"
                                                           : kernel.mla ? "mla.cuh"
                                                                        : "attention.cuh");
  const std::string body = std::string(hopper ? "Hopper" : "") + (mla_decode   ? "MlaDecodeBody"
                                                                  : kernel.mla ? "MlaBody"
                                                                               : "AttentionBody");
  return {name.str(), entry, TranslationUnit(header, traits.str(), body, "Attention", entry),
          Options(kernel.arch)};
}

AppendKernel MakeAppendKernel(const AttentionSpec& spec, bool rotates) {
  AppendKernel kernel{spec.arch, spec.kv_is_e4m3};
  if (kernel.kv_is_e4m3 || rotates) kernel.dtype = spec.dtype;
  kernel.rotates = rotates;
  return kernel;
}

KernelSource MakeSource(const AppendKernel& kernel) {
  TraitsWriter traits;
  traits.Int("kArch", kernel.arch);
  traits.Bool("kKvIsE4m3", kernel.kv_is_e4m3);
  const bool any_dtype = !kernel.kv_is_e4m3 && !kernel.rotates;
  traits.Int("kDtype", kernel.dtype, any_dtype ? "any" : DTypeName(kernel.dtype));
  const std::string entry = "append_kernel";
  const std::string op = kernel.rotates ? "append_rotated" : "append";
  std::string name = op + "-" + ArchName(kernel.arch);
  if (!any_dtype) name += std::string("-") + DTypeName(kernel.dtype);
  if (kernel.kv_is_e4m3) name += "-kve4m3";
  return {name, entry,
          TranslationUnit("cuda/any/" + op + ".cuh", traits.str(),
                          kernel.rotates ? "AppendRotatedBody" : "AppendBody", "Append", entry),
          Options(kernel.arch)};
}

KernelSource MakeSource(const MergeKernel& kernel) {
  TraitsWriter traits;
  traits.Int("kArch", kernel.arch);
  traits.Int("kDtype", kernel.dtype, DTypeName(kernel.dtype));
  const std::string entry = "merge_kernel";
  return {"merge-" + ArchName(kernel.arch) + "-" + DTypeName(kernel.dtype), entry,
          TranslationUnit("cuda/any/merge.cuh", traits.str(), "MergeBody", "Merge", entry),
          Options(kernel.arch)};
}

KernelSource MakeSource(const PlanKernel& kernel) {
  TraitsWriter traits;
  traits.Int("kArch", kernel.arch);
  traits.Int("kNumThreads", 512, "a chunk each, for a few hundred requests");
  traits.Int("kSmemBytes", 96 * 1024, "what every architecture has");
  const std::string entry = "plan_kernel";
  return {"plan-" + ArchName(kernel.arch) + (kernel.general ? "-general" : ""), entry,
          TranslationUnit("cuda/any/plan.cuh", traits.str(),
                          kernel.general ? "GeneralPlanBody" : "PlanBody", "Plan", entry),
          Options(kernel.arch)};
}

KernelKey MakeKey(const AttentionKernel& k) {
  return {0,
          k.arch,
          k.dtype,
          k.head_dim_qk,
          k.head_dim_vo,
          k.mla,
          k.group_size,
          k.page_size,
          k.window_left,
          k.window_right,
          k.logits_soft_cap,
          k.num_tiles,
          k.tile_q[0],
          k.tile_q[1],
          k.tile_q[2],
          k.tile_kv,
          k.num_warps,
          k.num_stages,
          k.positive_scale,
          k.main_loop,
          k.fresh_kv,
          k.q_is_e4m3,
          k.kv_is_e4m3,
          k.record_times};
}
KernelKey MakeKey(const AppendKernel& k) { return {1, k.arch, k.kv_is_e4m3, k.dtype, k.rotates}; }
KernelKey MakeKey(const MergeKernel& k) { return {2, k.arch, k.dtype}; }
KernelKey MakeKey(const PlanKernel& k) { return {3, k.arch, k.general}; }

}  // namespace jax_attn
