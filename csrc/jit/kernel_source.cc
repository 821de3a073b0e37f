#include "jit/kernel_source.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include "jit/sha256.h"
#include "jit/transform_source.h"
#include "jit/variant_source.h"
#include "variant/words.h"

namespace jax_attn {
namespace {

// A field whose value is a code with a name; kPlainFormat has none.
struct Named {
  int64_t value;
  const char* name;
};

// A transform of a kernel, the variant whose operands it reads, and the name of its struct.
struct TransformOf {
  const Transform* transform;
  const VariantProgram* program;
  const char* name;
};

const char* DTypeName(int64_t dtype) {
  return dtype == kBF16 ? "bf16" : dtype == kF16 ? "f16" : "f32";
}

// A visitor of fields that writes `struct Traits`, one member per line, after the struct of a
// variant if there is one.
class TraitsWriter {
 public:
  void operator()(const char* name, const TransformOf& of) {
    if (of.transform->present()) {
      variant_ += InNamespace(TransformText(of.transform->View(*of.program), of.name));
    }
    const std::string type = std::string("variant::") + of.name;
    out_ << "  using " << name << " = " << (of.transform->present() ? type : "NoTransform")
         << ";\n";
  }
  void operator()(const char* name, int64_t value, const char* comment = "") {
    Line("int", name, std::to_string(value), comment);
  }
  void operator()(const char* name, bool value, const char* comment = "") {
    Line("bool", name, value ? "true" : "false", comment);
  }
  void operator()(const char* name, Named named) {
    Line("int", name, std::to_string(named.value), named.name);
  }
  void operator()(const char* name, const VariantProgram& program) {
    if (program.present) variant_ = InNamespace(VariantText(program, "Given"));
    Use(name, program.present);
  }
  void operator()(const char* name, const VariantGradient& gradient) {
    if (gradient.program.present) variant_ = InNamespace(VariantText(gradient, "Given"));
    Use(name, gradient.program.present);
  }
  std::string str() const {
    return "namespace jax_attn {\n\n" + variant_ + "struct Traits {\n" + out_.str() +
           "};\n\n}  // namespace jax_attn\n";
  }

 private:
  static std::string InNamespace(const std::string& text) {
    return "namespace variant {\n\n" + text + "\n}  // namespace variant\n\n";
  }
  void Use(const char* name, bool has_variant) {
    out_ << "  using " << name << " = " << (has_variant ? "variant::Given" : "NoVariant") << ";\n";
  }
  void Line(const char* type, const char* name, const std::string& value, const char* comment) {
    out_ << "  static constexpr " << type << " " << name << " = " << value << ";";
    if (*comment != 0) out_ << "  // " << comment;
    out_ << "\n";
  }
  std::ostringstream out_;
  std::string variant_;
};

// A hash of 16 hex digits, for names.
std::string HashOf(const std::vector<int64_t>& words) {
  std::string text;
  for (int64_t word : words) text += std::to_string(word) + " ";
  return Sha256Hex(text).substr(0, 16);
}

// A visitor of fields that appends their words to a key, which begins with the operation.
class KeyWriter {
 public:
  explicit KeyWriter(int64_t op) : key_{op} {}
  void operator()(const char*, int64_t value, const char* = "") { key_.push_back(value); }
  void operator()(const char*, Named named) { key_.push_back(named.value); }
  void operator()(const char*, const VariantProgram& program) { Append(EncodeProgram(program)); }
  void operator()(const char*, const VariantGradient& gradient) {
    Append(EncodeGradient(gradient));
  }
  void operator()(const char*, const TransformOf& of) {
    const std::vector<int64_t> words = EncodeTransform(*of.transform);
    key_.push_back(static_cast<int64_t>(words.size()));
    Append(words);
  }
  const KernelKey& key() const { return key_; }

 private:
  void Append(const std::vector<int64_t>& words) {
    key_.insert(key_.end(), words.begin(), words.end());
  }
  KernelKey key_;
};

// "has_window_left" for the name kHasWindowLeft.
std::string FieldName(const std::string& traits_name) {
  std::string name;
  for (const char c : traits_name.substr(traits_name[0] == 'k' ? 1 : 0)) {
    const bool is_upper = c >= 'A' && c <= 'Z';
    if (is_upper && !name.empty()) name += '_';
    name += is_upper ? static_cast<char>(c - 'A' + 'a') : c;
  }
  return name;
}

// A visitor of fields that writes them as text, for people.
class FieldWriter {
 public:
  void operator()(const char* name, int64_t value, const char* = "") {
    Add(name, std::to_string(value));
  }
  void operator()(const char* name, bool value, const char* = "") {
    Add(name, value ? "true" : "false");
  }
  void operator()(const char* name, Named named) {
    Add(name, *named.name != 0 ? named.name : "plain");
  }
  void operator()(const char* name, const VariantProgram& program) {
    Add(name, program.present ? HashOf(EncodeProgram(program)) : "none");
  }
  void operator()(const char* name, const VariantGradient& gradient) {
    Add(name, gradient.program.present ? HashOf(EncodeGradient(gradient)) : "none");
  }
  void operator()(const char* name, const TransformOf& of) {
    Add(name, of.transform->present() ? HashOf(EncodeTransform(*of.transform)) : "none");
  }
  const std::vector<KeyField>& fields() const { return fields_; }

 private:
  void Add(const char* name, std::string value) {
    fields_.push_back({FieldName(name), std::move(value)});
  }
  std::vector<KeyField> fields_;
};

// The one list of a kernel's fields: its key, its Traits and the text of its key come from it, so
// none of them can miss a field. visit(name in Traits, value or Named[, comment]).
template <typename Visitor>
void VisitFields(const AttentionKernel& k, Visitor& visit) {
  constexpr const char* kTileNames[kMaxTiles] = {"kTileQ0", "kTileQ1", "kTileQ2"};
  visit("kArch", k.arch);
  visit("kDtype", Named{k.dtype, DTypeName(k.dtype)});
  visit("kQFormat", Named{k.q_format, FormatOf(k.q_format).name});
  visit("kKvFormat", Named{k.kv_format, FormatOf(k.kv_format).name});
  visit("kHeadDimQk", k.head_dim_qk);
  visit("kHeadDimVo", k.head_dim_vo);
  visit("kIsMla", k.mla, "v is the first columns of k");
  visit("kGroupSize", k.group_size);
  visit("kPageSize", k.page_size, k.page_size == 0 ? "ragged" : "tokens");
  visit("kHasWindowLeft", k.window_left);
  visit("kHasWindowRight", k.window_right, "causal is window_right 0");
  visit("kHasSoftCap", k.logits_soft_cap);
  visit("kPositiveScale", k.positive_scale, "sm_scale > 0");
  visit("kHasFreshKv", k.fresh_kv, "the query tokens' k and v are k_new, v_new");
  visit("kFp8Matmul", k.eight_bit_products, "Q K^T and P V of e4m3");
  visit("kMainLoop", Named{k.main_loop, k.main_loop == kHopper ? "cuda/sm90" : "cuda/sm80"});
  visit("kNumTiles", k.num_tiles);
  for (int i = 0; i < kMaxTiles; ++i) {
    visit(kTileNames[i], k.tile_q[i], i < k.num_tiles ? "rows" : "unused");
  }
  visit("kTileKv", k.tile_kv, "kv tokens per main-loop step");
  visit("kNumWarps", k.num_warps);
  visit("kNumStages", k.num_stages, "depth of the kv pipeline");
  visit("kRecordsTimes", k.record_times, "begin and end of each item");
  visit("kHasSteps", k.steps, "items are ranges of step lists");
  visit("Variant", k.variant);
  visit("TransformOfK", TransformOf{&k.transforms[0], &k.variant, "GivenOfK"});
  visit("TransformOfV", TransformOf{&k.transforms[1], &k.variant, "GivenOfV"});
}

template <typename Visitor>
void VisitFields(const BackwardKernel& k, Visitor& visit) {
  visit("kArch", k.arch);
  visit("kDtype", Named{k.dtype, DTypeName(k.dtype)});
  visit("kHeadDimQk", k.head_dim_qk);
  visit("kHeadDimVo", k.head_dim_vo);
  visit("kGroupSize", k.group_size);
  visit("kPageSize", k.page_size, k.page_size == 0 ? "ragged" : "tokens");
  visit("kHasWindowLeft", k.window_left);
  visit("kHasWindowRight", k.window_right, "causal is window_right 0");
  visit("kHasSoftCap", k.logits_soft_cap);
  visit("kMainLoop", Named{k.main_loop, k.main_loop == kHopper ? "cuda/sm90" : "cuda/sm80"});
  visit("kStepKeys", k.step_keys,
        k.step_keys == 0 ? "no step lists" : "keys per step of step lists");
  visit("Variant", k.variant);
}

// Whether the kernel copies bytes, so that their type does not matter.
bool CopiesBytes(const AppendKernel& k) { return k.kv_format == kPlainFormat && !k.rotates; }

template <typename Visitor>
void VisitFields(const AppendKernel& k, Visitor& visit) {
  visit("kArch", k.arch);
  visit("kKvFormat", Named{k.kv_format, FormatOf(k.kv_format).name});
  visit("kDtype", Named{k.dtype, CopiesBytes(k) ? "any" : DTypeName(k.dtype)});
  visit("kRotates", k.rotates);
}

template <typename Visitor>
void VisitFields(const MergeKernel& k, Visitor& visit) {
  visit("kArch", k.arch);
  visit("kDtype", Named{k.dtype, DTypeName(k.dtype)});
}

const char* WeightName(int64_t format) {
  return format == kInt4Weights ? "int4" : format == kE2m1Weights ? "e2m1" : "e4m3";
}

template <typename Visitor>
void VisitFields(const QuantizedProductKernel& k, Visitor& visit) {
  visit("kArch", k.arch);
  visit("kDtype", Named{k.dtype, DTypeName(k.dtype)});
  visit("kFormat", Named{k.format, WeightName(k.format)});
  visit("kTileRows", k.tile_rows, "rows of x");
  visit("kTileColumns", k.tile_columns);
  visit("kScaleRows", k.scale_rows, "most groups in a step");
  visit("kMainLoop", k.main_loop);
}

template <typename Visitor>
void VisitFields(const GroupedProductKernel& k, Visitor& visit) {
  visit("kArch", k.arch);
  visit("kDtype", Named{k.dtype, DTypeName(k.dtype)});
  visit("kTransposed", k.transposed);
  visit("kTileRows", k.tile_rows, "rows of x");
  visit("kTileColumns", k.tile_columns);
}

const char* DecayName(int64_t decay) {
  return decay == kNoDecay ? "none" : decay == kHeadDecay ? "head" : "channel";
}
const char* LoopName(int64_t main_loop) {
  return main_loop == kRecurrence       ? "recurrence"
         : main_loop == kPortableChunks ? "chunks"
                                        : "wgmma";
}

const char* PhaseName(int64_t phase) {
  return phase == kLinearTerms            ? "terms"
         : phase == kLinearMaps           ? "maps"
         : phase == kLinearStarts         ? "starts"
         : phase == kLinearOutputs        ? "outputs"
         : phase == kLinearGradientTerms  ? "gradient_terms"
         : phase == kLinearStates         ? "states"
         : phase == kLinearStateGradients ? "state_gradients"
                                          : "gradients";
}

template <typename Visitor>
void VisitFields(const LinearAttentionKernel& k, Visitor& visit) {
  visit("kArch", k.arch);
  visit("kDtype", Named{k.dtype, DTypeName(k.dtype)});
  visit("kHeadDimK", k.head_dim_k);
  visit("kHeadDimV", k.head_dim_v);
  visit("kDecay", Named{k.decay, DecayName(k.decay)});
  visit("kHasDeltaRule", k.delta_rule);
  visit("kHasL2Norm", k.l2_norm);
  visit("kHasBf16States", k.bf16_states, "else f32");
  visit("kMainLoop", Named{k.main_loop, LoopName(k.main_loop)});
  visit("kPhase", Named{k.phase, PhaseName(k.phase)});
  visit("kTileColumns", k.tile_columns, "columns of v of one CTA");
}

template <typename Visitor>
void VisitFields(const ShortConvolutionKernel& k, Visitor& visit) {
  visit("kArch", k.arch);
  visit("kDtype", Named{k.dtype, DTypeName(k.dtype)});
  visit("kWidth", k.width);
  visit("kHasSilu", k.silu);
}

template <typename Visitor>
void VisitFields(const AllReduceKernel& k, Visitor& visit) {
  visit("kArch", k.arch);
  visit("kDtype", Named{k.dtype, DTypeName(k.dtype)});
  visit("kNumDevices", k.num_devices);
  visit("kNumThreads", k.num_threads);
  visit("kVectors", k.vectors, "of 16 bytes, of a row and thread");
  visit("kTwoShot", k.two_shot);
  visit("kNorm", k.norm);
  visit("kQuantizes", k.quantizes);
}

template <typename Visitor>
void VisitFields(const PlanKernel& k, Visitor& visit) {
  visit("kArch", k.arch);
  visit("kGeneral", k.general);
}

template <typename Kernel>
KernelKey KeyOf(int64_t op, const Kernel& kernel) {
  KeyWriter key(op);
  VisitFields(kernel, key);
  return key.key();
}

template <typename Kernel>
std::vector<KeyField> FieldsOf(const Kernel& kernel) {
  FieldWriter fields;
  VisitFields(kernel, fields);
  return fields.fields();
}

template <typename Kernel>
TraitsWriter TraitsOf(const Kernel& kernel) {
  TraitsWriter traits;
  VisitFields(kernel, traits);
  return traits;
}

// The kernel is a thin shell. The header has the body, its thread count and its shared memory.
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
  // architecture-specific target. Its cubins run on exactly this capability, which is all we need.
  return "sm_" + std::to_string(arch) + (arch >= 90 ? "a" : "");
}

AttentionKernel MakeAttentionKernel(const AttentionProblem& problem) {
  const AttentionSpec& spec = problem.spec;
  const KernelConfig& config = problem.config;
  AttentionKernel kernel;
  kernel.arch = spec.arch;
  kernel.dtype = spec.dtype;
  kernel.q_format = spec.q_format;
  kernel.kv_format = spec.kv_format;
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
  kernel.eight_bit_products = spec.eight_bit_products;
  kernel.main_loop = config.main_loop;
  kernel.num_tiles = config.num_tiles;
  for (int i = 0; i < config.num_tiles; ++i) kernel.tile_q[i] = config.tile_q[i];
  kernel.tile_kv = config.tile_kv;
  kernel.num_warps = config.num_warps;
  kernel.num_stages = config.num_stages;
  kernel.record_times = config.record_times;
  kernel.steps = spec.max_steps > 0;
  kernel.variant = problem.program;
  for (int i = 0; i < 2; ++i) kernel.transforms[i] = problem.transforms[i];
  return kernel;
}

KernelSource MakeSource(const AttentionKernel& kernel) {
  std::ostringstream name;
  name << "attention-" << ArchName(kernel.arch) << "-" << DTypeName(kernel.dtype) << "-d"
       << kernel.head_dim_qk;
  if (kernel.head_dim_vo != kernel.head_dim_qk) name << "x" << kernel.head_dim_vo;
  if (kernel.q_format != kPlainFormat) name << "-q" << FormatOf(kernel.q_format).name;
  if (kernel.kv_format != kPlainFormat) name << "-kv" << FormatOf(kernel.kv_format).name;
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
  if (kernel.eight_bit_products) name << "-products8";
  if (kernel.main_loop == kHopper) name << "-wgmma";
  if (kernel.record_times) name << "-times";
  if (kernel.steps) name << "-steps";
  if (kernel.variant.present) name << "-variant" << HashOf(EncodeProgram(kernel.variant));

  for (int i = 0; i < 2; ++i) {
    if (!kernel.transforms[i].present()) continue;
    name << (i == 0 ? "-k" : "-v") << HashOf(EncodeTransform(kernel.transforms[i]));
  }

  const std::string entry = "attention_kernel";
  const bool hopper = kernel.main_loop == kHopper;
  // Tiles with fewer rows than one wgmma has, as in select/cuda.cc.
  const bool mla_decode = kernel.mla && hopper && kernel.tile_q[0] < 64;
  const bool wide = !hopper && kernel.dtype != kF32 &&
                    (kernel.mla || std::max(kernel.head_dim_qk, kernel.head_dim_vo) > kWideHeadDim);
  const std::string header =
      std::string(hopper ? "cuda/sm90/" : "cuda/sm80/") + (mla_decode   ? "mla_decode.cuh"
                                                           : wide       ? "wide.cuh"
                                                           : kernel.mla ? "mla.cuh"
                                                                        : "attention.cuh");
  const std::string body = std::string(hopper ? "Hopper" : "") + (mla_decode   ? "MlaDecodeBody"
                                                                  : wide       ? "WideBody"
                                                                  : kernel.mla ? "MlaBody"
                                                                               : "AttentionBody");
  return {name.str(), entry,
          TranslationUnit(header, TraitsOf(kernel).str(), body, "Attention", entry),
          Options(kernel.arch), FieldsOf(kernel)};
}

BackwardKernel MakeBackwardKernel(const AttentionProblem& problem,
                                  const VariantGradient& gradient) {
  const AttentionSpec& spec = problem.spec;
  BackwardKernel kernel;
  kernel.arch = spec.arch;
  kernel.dtype = spec.dtype;
  kernel.head_dim_qk = spec.head_dim_qk;
  kernel.head_dim_vo = spec.head_dim_vo;
  kernel.group_size = spec.group_size();
  kernel.page_size = spec.page_size;
  kernel.window_left = spec.window_left >= 0;
  kernel.window_right = spec.window_right >= 0;
  kernel.logits_soft_cap = spec.logits_soft_cap > 0;
  if (spec.max_steps > 0) kernel.step_keys = problem.config.tile_kv;
  kernel.variant = gradient;
  return kernel;
}

BackwardKernel MakeHopperBackwardKernel(const AttentionProblem& problem) {
  BackwardKernel kernel = MakeBackwardKernel(problem, {});
  kernel.main_loop = kHopper;
  return kernel;
}

KernelSource MakeSource(const BackwardKernel& kernel) {
  std::ostringstream name;
  name << "backward-" << ArchName(kernel.arch) << "-" << DTypeName(kernel.dtype) << "-d"
       << kernel.head_dim_qk;
  if (kernel.head_dim_vo != kernel.head_dim_qk) name << "x" << kernel.head_dim_vo;
  name << "-g" << kernel.group_size;
  if (kernel.page_size == 0) name << "-ragged";
  if (kernel.page_size > 0) name << "-page" << kernel.page_size;
  if (kernel.window_left) name << "-left";
  if (kernel.window_right) name << "-right";
  if (kernel.logits_soft_cap) name << "-cap";
  const bool hopper = kernel.main_loop == kHopper;
  if (hopper) name << "-wgmma";
  if (kernel.step_keys > 0) name << "-steps" << kernel.step_keys;
  if (kernel.variant.program.present) {
    name << "-variant" << HashOf(EncodeGradient(kernel.variant));
  }
  const std::string entry = "backward_kernel";
  return {name.str(), entry,
          TranslationUnit(hopper ? "cuda/sm90/backward.cuh" : "cuda/sm80/backward.cuh",
                          TraitsOf(kernel).str(), hopper ? "HopperBackwardBody" : "BackwardBody",
                          "BackwardCuda", entry),
          Options(kernel.arch), FieldsOf(kernel)};
}

AppendKernel MakeAppendKernel(const AttentionSpec& spec, bool rotates) {
  AppendKernel kernel;
  kernel.arch = spec.arch;
  kernel.kv_format = spec.kv_format;
  if (kernel.kv_format != kPlainFormat || rotates) kernel.dtype = spec.dtype;
  kernel.rotates = rotates;
  return kernel;
}

KernelSource MakeSource(const AppendKernel& kernel) {
  const std::string entry = "append_kernel";
  const std::string op = kernel.rotates ? "append_rotated" : "append";
  std::string name = op + "-" + ArchName(kernel.arch);
  if (!CopiesBytes(kernel)) name += std::string("-") + DTypeName(kernel.dtype);
  if (kernel.kv_format != kPlainFormat) {
    name += std::string("-kv") + FormatOf(kernel.kv_format).name;
  }
  return {name, entry,
          TranslationUnit("cuda/any/" + op + ".cuh", TraitsOf(kernel).str(),
                          kernel.rotates ? "AppendRotatedBody" : "AppendBody", "Append", entry),
          Options(kernel.arch), FieldsOf(kernel)};
}

KernelSource MakeSource(const MergeKernel& kernel) {
  const std::string entry = "merge_kernel";
  return {
      "merge-" + ArchName(kernel.arch) + "-" + DTypeName(kernel.dtype), entry,
      TranslationUnit("cuda/any/merge.cuh", TraitsOf(kernel).str(), "MergeBody", "Merge", entry),
      Options(kernel.arch), FieldsOf(kernel)};
}

KernelSource MakeSource(const QuantizedProductKernel& kernel) {
  const std::string entry = "quantized_product_kernel";
  std::ostringstream name;
  name << "quantized_product-" << ArchName(kernel.arch) << "-" << DTypeName(kernel.dtype) << "-"
       << WeightName(kernel.format) << "-m" << kernel.tile_rows << "-n" << kernel.tile_columns
       << "-g" << kProductStep / kernel.scale_rows;
  const bool hopper = kernel.main_loop == kHopper;
  if (hopper) name << "-wgmma";
  return {
      name.str(), entry,
      TranslationUnit(
          hopper ? "cuda/sm90/quantized_product.cuh" : "cuda/sm80/quantized_product.cuh",
          TraitsOf(kernel).str(), hopper ? "HopperQuantizedProductBody" : "QuantizedProductBody",
          "QuantizedProduct", entry),
      Options(kernel.arch), FieldsOf(kernel)};
}

KernelSource MakeSource(const GroupedProductKernel& kernel) {
  const std::string entry = "grouped_product_kernel";
  std::ostringstream name;
  name << "grouped_product-" << ArchName(kernel.arch) << "-" << DTypeName(kernel.dtype) << "-m"
       << kernel.tile_rows << "-n" << kernel.tile_columns;
  if (kernel.transposed) name << "-transposed";
  return {name.str(), entry,
          TranslationUnit("cuda/sm90/grouped_product.cuh", TraitsOf(kernel).str(),
                          "GroupedProductBody", "GroupedProduct", entry),
          Options(kernel.arch), FieldsOf(kernel)};
}

KernelSource MakeSource(const AllReduceKernel& kernel) {
  const std::string entry = "all_reduce_kernel";
  std::ostringstream name;
  name << "all_reduce-" << ArchName(kernel.arch) << "-" << DTypeName(kernel.dtype) << "-n"
       << kernel.num_devices << "-t" << kernel.num_threads << "-v" << kernel.vectors
       << (kernel.two_shot ? "-two_shot" : "") << (kernel.norm ? "-norm" : "")
       << (kernel.quantizes ? "-e4m3" : "");
  return {name.str(), entry,
          TranslationUnit("cuda/any/all_reduce.cuh", TraitsOf(kernel).str(), "AllReduceBody",
                          "AllReduce", entry),
          Options(kernel.arch), FieldsOf(kernel)};
}

KernelSource MakeSource(const LinearAttentionKernel& kernel) {
  const std::string entry = "linear_attention_kernel";
  std::ostringstream name;
  name << "linear_attention-" << ArchName(kernel.arch) << "-" << DTypeName(kernel.dtype) << "-d"
       << kernel.head_dim_k << "x" << kernel.head_dim_v << "-" << DecayName(kernel.decay);
  if (kernel.delta_rule) name << "-delta";
  if (kernel.l2_norm) name << "-l2";
  name << "-s" << (kernel.bf16_states ? "bf16" : "f32") << "-" << LoopName(kernel.main_loop) << "-n"
       << kernel.tile_columns;
  if (kernel.main_loop != kRecurrence) name << "-" << PhaseName(kernel.phase);
  constexpr const char* kFolders[kNumLinearLoops] = {"any", "sm80", "sm90"};
  constexpr const char* kBodies[kNumLinearLoops] = {"LinearRecurrenceBody", "LinearChunksBody",
                                                    "HopperLinearChunksBody"};
  const std::string header =
      std::string("cuda/") + kFolders[kernel.main_loop] + "/linear_attention.cuh";
  return {name.str(), entry,
          TranslationUnit(
              header, TraitsOf(kernel).str(), kBodies[kernel.main_loop],
              kernel.phase > kLinearGradientTerms ? "LinearGradient" : "LinearAttention", entry),
          Options(kernel.arch), FieldsOf(kernel)};
}

KernelSource MakeSource(const ShortConvolutionKernel& kernel) {
  const std::string entry = "short_convolution_kernel";
  std::ostringstream name;
  name << "short_convolution-" << ArchName(kernel.arch) << "-" << DTypeName(kernel.dtype) << "-w"
       << kernel.width;
  if (kernel.silu) name << "-silu";
  return {name.str(), entry,
          TranslationUnit("cuda/any/short_convolution.cuh", TraitsOf(kernel).str(),
                          "ShortConvolutionBody", "ShortConvolution", entry),
          Options(kernel.arch), FieldsOf(kernel)};
}

KernelSource MakeSource(const PlanKernel& kernel) {
  TraitsWriter traits = TraitsOf(kernel);
  traits("kNumThreads", int64_t{512}, "one chunk each, for a few hundred requests");
  traits("kSmemBytes", int64_t{96 * 1024}, "every architecture has that much");
  const std::string entry = "plan_kernel";
  return {"plan-" + ArchName(kernel.arch) + (kernel.general ? "-general" : ""), entry,
          TranslationUnit("cuda/plan/plan.cuh", traits.str(),
                          kernel.general ? "GeneralPlanBody" : "PlanBody", "Plan", entry),
          Options(kernel.arch), FieldsOf(kernel)};
}

KernelKey MakeKey(const AttentionKernel& kernel) { return KeyOf(0, kernel); }
KernelKey MakeKey(const AppendKernel& kernel) { return KeyOf(1, kernel); }
KernelKey MakeKey(const MergeKernel& kernel) { return KeyOf(2, kernel); }
KernelKey MakeKey(const PlanKernel& kernel) { return KeyOf(3, kernel); }
KernelKey MakeKey(const BackwardKernel& kernel) { return KeyOf(4, kernel); }
KernelKey MakeKey(const QuantizedProductKernel& kernel) { return KeyOf(5, kernel); }
KernelKey MakeKey(const LinearAttentionKernel& kernel) { return KeyOf(6, kernel); }
KernelKey MakeKey(const ShortConvolutionKernel& kernel) { return KeyOf(7, kernel); }
KernelKey MakeKey(const AllReduceKernel& kernel) { return KeyOf(8, kernel); }
KernelKey MakeKey(const GroupedProductKernel& kernel) { return KeyOf(9, kernel); }

}  // namespace jax_attn
