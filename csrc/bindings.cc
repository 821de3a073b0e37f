// Python bindings: registrations, the planner's entry, kernel and cache controls. No logic.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

#include "cpu/backward.h"
#include "cpu/dispatch.h"
#include "ffi/handlers.h"
#include "jit/compile_log.h"
#include "jit/device_group.h"
#include "jit/kernels.h"
#include "plan/check.h"
#include "plan/plan.h"
#include "plan/state_plan.h"
#include "select/select.h"
#include "select/tuning.h"
#include "variant/transform_words.h"
#include "variant/words.h"
#include "xla/ffi/api/c_api.h"

namespace nb = nanobind;

namespace jax_attn {
namespace {

// A contiguous numpy array of int32 or uint8, through the buffer protocol alone. nb::ndarray asks
// for DLPack first, which costs a plan of a few arrays microseconds.
template <typename T>
class HostArray {
 public:
  HostArray(nb::handle array, int num_dims, bool writeable = false) {
    const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writeable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(array.ptr(), &view_, flags) != 0) throw nb::python_error();
    const std::string_view format = view_.format == nullptr ? "B" : view_.format;
    if (format == kFormat && view_.ndim == num_dims) return;
    PyBuffer_Release(&view_);
    throw nb::type_error(*kFormat == 'i' ? "plan: expected an array of int32"
                                         : "plan: expected an array of uint8");
  }
  HostArray(const HostArray&) = delete;
  ~HostArray() { PyBuffer_Release(&view_); }

  T* data() const { return static_cast<T*>(view_.buf); }
  int64_t shape(int i) const { return view_.shape[i]; }

 private:
  static constexpr const char* kFormat = sizeof(T) == 4 ? "i" : "B";
  Py_buffer view_;
};
using Int32Array = HostArray<int32_t>;

void ThrowIfError(const Status& status) {
  if (!status.ok()) throw std::invalid_argument(status.message);
}

// Errors of jit/ come from what is installed, not from the caller's arguments.
void ThrowIfUnavailable(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.message);
}

template <typename Struct>
void FromDict(const nb::dict& dict, Struct* out) {
  VisitFields(*out, [&](const char* name, auto& field) {
    if (dict.contains(name)) field = nb::cast<std::decay_t<decltype(field)>>(dict[name]);
  });
}

template <typename Struct>
Struct FromDict(const nb::dict& dict) {
  Struct value;
  FromDict(dict, &value);
  return value;
}

template <typename Struct>
nb::dict ToDict(Struct value) {
  nb::dict dict;
  VisitFields(value, [&](const char* name, auto& field) { dict[name] = field; });
  return dict;
}

void ThrowIfBadSpec(const Status& status) {
  if (!status.ok()) throw std::invalid_argument("AttentionSpec: " + status.message);
}

// Makes a problem whose configuration is chosen by select/, except for the fields in `overrides`.
AttentionProblem MakeProblem(const nb::dict& spec, const nb::dict& overrides,
                             const std::vector<int64_t>& program,
                             const std::vector<std::vector<int64_t>>& transforms) {
  AttentionProblem problem;
  FromDict(spec, &problem.spec);
  ThrowIfBadSpec(DecodeProgram(program.data(), program.size(), &problem.program));
  for (size_t i = 0; i < std::min<size_t>(2, transforms.size()); ++i) {
    ThrowIfBadSpec(DecodeTransform(transforms[i].data(), transforms[i].size(),
                                   problem.program.operands, problem.program.num_operands,
                                   &problem.transforms[i]));
  }
  ThrowIfBadSpec(CheckSpec(problem.spec));
  SettleHeadBlocks(&problem.spec);
  problem.config =
      SelectAttention(problem.spec, nullptr, &problem.program, problem.transforms_rows());
  FromDict(overrides, &problem.config);
  ThrowIfBadSpec(CheckProblem(problem));  // FillCapacities computes with these fields
  FillCapacities(&problem);
  ThrowIfBadSpec(CheckProblem(problem));
  return problem;
}

void PlanInto(const AttentionProblem& problem, nb::handle qo_indptr, nb::handle kv_lens,
              nb::handle kv_indptr, nb::handle page_indices, nb::handle q_offsets,
              nb::handle request_indptr, nb::handle prefix_lens, nb::handle block_classes,
              int32_t q_block, int32_t kv_block, nb::handle buffer) {
  const Int32Array qo(qo_indptr, 1), lens(kv_lens, 1), kv(kv_indptr, 1), pages(page_indices, 1);
  const Int32Array plan(buffer, 1, true);
  std::optional<Int32Array> offsets, borders, prefixes;
  PlanInputs inputs;
  inputs.qo_indptr = qo.data();
  inputs.kv_lens = lens.data();
  inputs.kv_indptr = kv.data();
  inputs.page_indices = pages.data();
  if (!q_offsets.is_none()) offsets.emplace(q_offsets, 1);
  inputs.q_offsets = offsets ? offsets->data() : nullptr;
  inputs.batch_size = lens.shape(0);
  inputs.num_page_indices = pages.shape(0);
  PrefixLevels levels = {};
  if (!prefix_lens.is_none()) {
    borders.emplace(request_indptr, 2);
    prefixes.emplace(prefix_lens, 2);
    levels.request_indptr = borders->data();
    levels.prefix_lens = prefixes->data();
    levels.num_levels = static_cast<i32>(prefixes->shape(0));
    levels.num_prefixes = static_cast<i32>(prefixes->shape(1));
  }
  std::optional<HostArray<uint8_t>> classes;
  BlockMap map = {};
  if (!block_classes.is_none()) {
    classes.emplace(block_classes, 2);
    map = {classes->data(), classes->shape(0), classes->shape(1), q_block, kv_block};
  }
  ThrowIfError(
      Plan(problem, inputs, prefixes ? &levels : nullptr, plan.data(), classes ? &map : nullptr));
}

void CheckPlanOf(const AttentionProblem& problem, nb::handle buffer, int64_t num_pages) {
  const Int32Array plan(buffer, 1);
  const int64_t num_words = MakePlanLayout(problem).num_words;
  if (plan.shape(0) != num_words) {
    throw std::invalid_argument("plan: buffer: expected int32[" + std::to_string(num_words) +
                                "], got int32[" + std::to_string(plan.shape(0)) + "].");
  }
  ThrowIfError(CheckPlan(problem, plan.data(), num_pages));
}

// [(choice, reason)] for the configuration that select/ chose.
nb::list ReasonList(const AttentionProblem& problem) {
  Reasons reasons;
  SelectAttention(problem.spec, &reasons, &problem.program, problem.transforms_rows());
  nb::list list;
  if (problem.spec.arch == 0) reasons.emplace_back("isa", DescribeCpuIsas(problem.spec));
  for (const auto& [what, why] : reasons) list.append(nb::make_tuple(what, why));
  return list;
}

// All operations of programs in order: (word, rule, number of arguments, types).
nb::list VariantOps() {
  nb::list list;
  for (const VariantOpInfo& info : kVariantOps) {
    list.append(nb::make_tuple(info.word, static_cast<int>(info.rule), info.num_args, info.types));
  }
  return list;
}

// The level of each value of a program. Refuses words that are not a program.
std::vector<int> ProgramLevels(const std::vector<int64_t>& words) {
  VariantProgram program;
  ThrowIfError(DecodeProgram(words.data(), words.size(), &program));
  std::vector<int> levels;
  for (i32 i = 0; i < program.num_instructions; ++i) {
    levels.push_back(program.instructions[i].level);
  }
  return levels;
}

// Refuses words that are not a transform. types, ranks: of the variant's operands.
void CheckTransform(const std::vector<int64_t>& words, const std::vector<i32>& types,
                    const std::vector<i32>& ranks) {
  ProgramOperand operands[kMaxVariantOperands] = {};
  const size_t num = std::min<size_t>({types.size(), ranks.size(), kMaxVariantOperands});
  for (size_t i = 0; i < num; ++i) operands[i] = {types[i], ranks[i]};
  Transform transform;
  ThrowIfError(
      DecodeTransform(words.data(), words.size(), operands, static_cast<i32>(num), &transform));
  if (!transform.present()) throw std::invalid_argument("transform: expected words, got none.");
}

// The names of the operations on vectors, by number from kFirstTransformOp on.
nb::list TransformOps() {
  nb::list list;
#define JAX_ATTN_OP(name, word) list.append(word);
  JAX_ATTN_TRANSFORM_OPS(JAX_ATTN_OP)
#undef JAX_ATTN_OP
  return list;
}

// Reads the gradient of the problem's variant; without a variant there are no words.
VariantGradient ReadGradient(const AttentionProblem& problem, const std::vector<int64_t>& words) {
  VariantGradient gradient;
  ThrowIfError(DecodeGradient(words.data(), words.size(), problem.program, &gradient));
  return gradient;
}

nb::dict LayoutDict(const AttentionProblem& problem) {
  const PlanLayout l = MakePlanLayout(problem);
  nb::dict dict;
  dict["header"] = l.header;
  dict["queue_indptr"] = l.queue_indptr;
  dict["qo_indptr"] = l.qo_indptr;
  dict["kv_lens"] = l.kv_lens;
  dict["kv_indptr"] = l.kv_indptr;
  dict["merge_groups"] = l.merge_groups;
  dict["partial_rows"] = l.partial_rows;
  dict["qo_indices"] = l.qo_indices;
  dict["items"] = l.items;
  dict["page_indices"] = l.page_indices;
  dict["steps"] = l.steps;
  dict["num_words"] = l.num_words;
  return dict;
}

nb::list Registrations() {
  nb::list list;
  auto capsule = [](XLA_FFI_Handler* handler) {
    return nb::capsule(reinterpret_cast<void*>(handler), "xla._CUSTOM_CALL_TARGET");
  };
  for (const auto* targets :
       {&kPlanTargets, &kAttentionTargets, &kBackwardTargets, &kAppendTargets, &kMergeTargets,
        &kAllReduceTargets, &kProductTargets, &kLinearAttentionTargets, &kLoraTargets,
        &kQuantizedGroupsTargets, &kQuantizedProductTargets, &kGroupedProductTargets,
        &kShortConvolutionTargets}) {
    for (const Target& target : *targets) {
      nb::dict stages;
      if (target.instantiate) stages["instantiate"] = capsule(target.instantiate);
      if (target.initialize) stages["initialize"] = capsule(target.initialize);
      stages["execute"] = capsule(target.execute);
      list.append(nb::make_tuple(target.name, target.platform, stages));
    }
  }
  return list;
}

nb::dict InfoDict(const KernelInfo& info) {
  static constexpr const char* kOrigins[] = {"memory", "disk", "compiled"};
  nb::dict dict;
  dict["name"] = info.name;
  dict["cache_path"] = info.cache_path;
  dict["origin"] = kOrigins[static_cast<int>(info.origin)];
  dict["milliseconds"] = info.milliseconds;
  dict["cubin_bytes"] = info.cubin_bytes;
  dict["smem_bytes"] = info.smem_bytes;
  dict["num_threads"] = info.num_threads;
  return dict;
}

// Releases the GIL: a compile takes seconds, and other threads may trace or compile meanwhile.
template <typename Prepare>
nb::dict Prepared(const Prepare& prepare) {
  KernelInfo info;
  Status status;
  {
    nb::gil_scoped_release release;
    status = prepare(&info);
  }
  ThrowIfUnavailable(status);
  return InfoDict(info);
}

nb::dict StatsDict() {
  const JitStats stats = GetJitStats();
  nb::dict dict;
  dict["compiled"] = stats.compiled;
  dict["disk_hits"] = stats.disk_hits;
  dict["memory_hits"] = stats.memory_hits;
  dict["corrupt"] = stats.corrupt;
  dict["compile_ms"] = stats.compile_ms;
  dict["loaded"] = stats.loaded;
  dict["attention_launches"] = stats.attention_launches;
  dict["backward_launches"] = stats.backward_launches;
  dict["append_launches"] = stats.append_launches;
  dict["merge_launches"] = stats.merge_launches;
  dict["quantized_product_launches"] = stats.quantized_product_launches;
  dict["grouped_product_launches"] = stats.grouped_product_launches;
  dict["all_reduce_launches"] = stats.all_reduce_launches;
  dict["linear_attention_launches"] = stats.linear_attention_launches;
  dict["linear_gradient_launches"] = stats.linear_gradient_launches;
  dict["short_convolution_launches"] = stats.short_convolution_launches;
  dict["plan_launches"] = stats.plan_launches;
  return dict;
}

LinearAttentionProblem ReadLinear(const std::vector<int64_t>& words) {
  LinearAttentionProblem problem;
  ThrowIfError(ReadLinearProblem(words.data(), static_cast<int64_t>(words.size()), &problem));
  return problem;
}

}  // namespace

NB_MODULE(_core, m) {
  // Specs stay in JAX's caches of compiled functions until the process ends.
  nb::set_leak_warnings(false);

  m.attr("ffi_api_version") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.attr("plan_version") = kPlanVersion;
  m.attr("max_levels") = static_cast<int>(kMaxLevels);
  m.attr("faulty_plan_magic") = static_cast<int>(kFaultyPlanMagic);
  m.attr("fault_page_indices") = static_cast<int>(kFaultPageIndices);
  m.attr("fault_page_id") = static_cast<int>(kFaultPageId);
  m.attr("program_version") = kProgramVersion;
  m.attr("max_instructions") = kMaxInstructions;
  m.attr("max_instruction_args") = kMaxInstructionArgs;
  m.attr("max_operand_rank") = kMaxOperandRank;
  m.attr("max_variant_operands") = kMaxVariantOperands;
  m.attr("max_derivatives") = kMaxDerivatives;
  m.attr("variant_ops") = VariantOps();
  m.attr("transform_version") = kTransformVersion;
  m.attr("first_transform_op") = kFirstTransformOp;
  m.attr("transform_ops") = TransformOps();
  m.attr("max_transform_args") = kMaxTransformArgs;
  m.attr("max_transform_values") = kMaxTransformValues;
  m.attr("max_transform_results") = kMaxTransformResults;
  m.attr("max_transform_pool") = kMaxTransformPool;
  m.def("program_levels", &ProgramLevels);
  m.def("check_transform", &CheckTransform);
  m.def("registrations", &Registrations);

  nb::class_<AttentionProblem>(m, "Problem")
      .def(
          "__init__",
          [](AttentionProblem* self, const nb::dict& spec, const nb::dict& overrides,
             const std::vector<int64_t>& program,
             const std::vector<std::vector<int64_t>>& transforms) {
            new (self) AttentionProblem(MakeProblem(spec, overrides, program, transforms));
          },
          nb::arg("spec"), nb::arg("overrides"), nb::arg("program") = std::vector<int64_t>(),
          nb::arg("transforms") = std::vector<std::vector<int64_t>>())
      .def_prop_ro("spec", [](const AttentionProblem& p) { return ToDict(p.spec); })
      .def_prop_ro("config", [](const AttentionProblem& p) { return ToDict(p.config); })
      .def_prop_ro("reasons", &ReasonList)
      .def_prop_ro("layout", &LayoutDict)
      .def_prop_ro("words", &EncodeProblem)
      .def_prop_ro("workspace_words",
                   [](const AttentionProblem& p) { return MakeWorkspaceLayout(p).num_words; })
      .def("backward_words",
           [](const AttentionProblem& p, int64_t num_pages) {
             return p.spec.arch == 0 ? BackwardSums(p.spec, num_pages)
                                     : BackwardWorkspaceWords(p, num_pages);
           })
      .def("plan_scratch_words",
           [](const AttentionProblem& p, int64_t num_levels, int64_t num_prefixes,
              int64_t num_columns, int32_t kv_block) {
             BlockMap map = {};
             map.num_columns = num_columns;
             map.kv_block = kv_block;
             return PlanScratchBytes(p, num_levels, num_prefixes,
                                     p.spec.max_steps > 0 ? &map : nullptr) /
                    4;
           })
      .def("plan_fault",
           [](const AttentionProblem& p, int32_t code, int32_t at, int32_t got, int32_t expected) {
             return DescribeFault(p, {code, at, got, expected}).message;
           })
      .def("check_plan", &CheckPlanOf, nb::arg("buffer"), nb::arg("num_pages"))
      .def("plan", &PlanInto, nb::arg("qo_indptr"), nb::arg("kv_lens"), nb::arg("kv_indptr"),
           nb::arg("page_indices"), nb::arg("q_offsets").none(), nb::arg("request_indptr").none(),
           nb::arg("prefix_lens").none(), nb::arg("block_classes").none(), nb::arg("q_block"),
           nb::arg("kv_block"), nb::arg("buffer"));

  m.def("default_processors", &DefaultProcessors);
  m.def("largest_cuda_head_dim",
        [](const nb::dict& spec) { return LargestCudaHeadDim(FromDict<AttentionSpec>(spec)); });
  m.def("largest_cuda_backward_head_dim", &LargestCudaBackwardHeadDim);
  m.def("largest_cuda_group",
        [](const nb::dict& spec) { return LargestCudaGroup(FromDict<AttentionSpec>(spec)); });
  m.def("describe_fallback", &DescribeFallback);

  m.def("cpu_isa", &CpuIsa);
  m.def("supported_cpu_isas", &SupportedCpuIsas);
  m.def("set_cpu_isa", [](const std::string& name) { ThrowIfError(SetCpuIsa(name)); });

  m.def("set_tuning",
        [](int64_t arch, const std::string& device, const nb::dict& numbers, const nb::list& isas) {
          Tuning tuning = {arch, device, {}, {}};
          for (const auto& [name, value] : numbers) {
            tuning.numbers[nb::cast<std::string>(name)] = nb::cast<int64_t>(value);
          }
          for (nb::handle isa : isas) {
            tuning.isas.push_back({nb::cast<std::string>(isa[0]), nb::cast<int64_t>(isa[1]),
                                   nb::cast<int64_t>(isa[2]), nb::cast<int64_t>(isa[3]),
                                   nb::cast<std::string>(isa[4])});
          }
          ThrowIfError(SetTuning(std::move(tuning)));
        });

  m.def("set_jit_paths",
        [](std::vector<std::string> nvrtc, std::vector<std::string> driver, std::string cache_dir) {
          SetJitPaths({std::move(nvrtc), std::move(driver), std::move(cache_dir)});
        });
  m.def("set_compile_log", &SetCompileLog);
  m.def("prepare_attention", [](const AttentionProblem& problem) {
    return Prepared([&](KernelInfo* info) { return PrepareAttention(problem, info); });
  });
  m.def("prepare_backward", [](const AttentionProblem& problem,
                               const std::vector<int64_t>& gradient_words) {
    const VariantGradient gradient = ReadGradient(problem, gradient_words);
    return Prepared([&](KernelInfo* info) { return PrepareBackward(problem, gradient, info); });
  });
  m.def("prepare_append", [](const AttentionProblem& problem, bool rotates) {
    return Prepared([&](KernelInfo* info) {
      return PrepareAppend(MakeAppendKernel(problem.spec, rotates), info);
    });
  });
  m.def("prepare_merge", [](int64_t arch, int64_t dtype) {
    return Prepared([&](KernelInfo* info) { return PrepareMerge({arch, dtype}, info); });
  });
  m.def("prepare_plan", [](int64_t arch, bool general) {
    return Prepared([&](KernelInfo* info) { return PreparePlan({arch, general}, info); });
  });
  // The kernel of linear_attention_sources(words)[index].
  m.def("prepare_linear_attention", [](const std::vector<int64_t>& words, size_t index) {
    const LinearAttentionKernel kernel = LinearAttentionKernels(ReadLinear(words)).at(index);
    return Prepared([&](KernelInfo* info) { return PrepareLinearAttention(kernel, info); });
  });
  // The kernel of linear_gradient_sources(words)[index].
  m.def("prepare_linear_gradient", [](const std::vector<int64_t>& words, size_t index) {
    const LinearAttentionKernel kernel = LinearGradientKernels(ReadLinear(words)).at(index);
    return Prepared([&](KernelInfo* info) { return PrepareLinearAttention(kernel, info); });
  });
  m.def("prepare_short_convolution", [](int64_t arch, int64_t dtype, int64_t width, bool silu) {
    return Prepared([&](KernelInfo* info) {
      return PrepareShortConvolution({arch, dtype, width, silu}, info);
    });
  });
  m.def("jit_stats", &StatsDict);
  m.def("can_access_peers", &CanAccessPeers);
  m.def("all_reduce_fault", [] { return AnyGroupFault().message; });
  m.attr("max_reducers") = kMaxReducers;
  m.attr("all_reduce_ctas") = kAllReduceCtas;
  m.attr("all_reduce_row_bytes") = kAllReduceSlotBytes;

  nb::class_<KernelSource>(m, "KernelSource")
      .def_ro("name", &KernelSource::name)
      .def_ro("entry", &KernelSource::entry)
      .def_ro("text", &KernelSource::text)
      .def_ro("options", &KernelSource::options)
      .def("compile", [](const KernelSource& source) {
        std::string cubin, log;
        ThrowIfUnavailable(CompileKernelSource(source, &cubin, &log));
        return nb::make_tuple(nb::bytes(cubin.data(), cubin.size()), log);
      });
  m.def("attention_source", &AttentionKernelSource);
  m.def("backward_sources",
        [](const AttentionProblem& problem, const std::vector<int64_t>& gradient_words) {
          return BackwardKernelSources(problem, ReadGradient(problem, gradient_words));
        });
  m.def("append_source", [](const AttentionProblem& problem, bool rotates) {
    return AppendKernelSource(MakeAppendKernel(problem.spec, rotates));
  });
  m.def("plan_source",
        [](int64_t arch, bool general) { return PlanKernelSource({arch, general}); });
  m.def("merge_source",
        [](int64_t arch, int64_t dtype) { return MergeKernelSource({arch, dtype}); });
  m.def("all_reduce_source",
        [](int64_t arch, int64_t dtype, int64_t num_devices, int64_t num_threads, int64_t vectors,
           bool two_shot, bool norm, bool quantizes) {
          return AllReduceKernelSource(
              {arch, dtype, num_devices, num_threads, vectors, two_shot, norm, quantizes});
        });
  m.def("quantized_product_source",
        [](int64_t arch, int64_t dtype, int64_t format, int64_t tile_rows, int64_t tile_columns,
           int64_t scale_rows, int64_t main_loop) {
          return QuantizedProductKernelSource(
              {arch, dtype, format, tile_rows, tile_columns, scale_rows, main_loop});
        });
  m.def("grouped_product_source",
        [](int64_t dtype, bool transposed, int64_t tile_rows, int64_t tile_columns) {
          return GroupedProductKernelSource({90, dtype, transposed, tile_rows, tile_columns});
        });
  m.def("check_state_plan", [](const std::string& op, nb::handle buffer, int64_t begin,
                               int64_t max_tokens, int64_t num_slots) {
    const Int32Array words(buffer, 1);
    StatePlan plan;
    ThrowIfError(
        ReadStatePlan(op, words.data(), words.shape(0), begin, max_tokens, num_slots, &plan));
  });
  m.def("linear_attention_sources", [](const std::vector<int64_t>& words) {
    std::vector<KernelSource> sources;
    for (const LinearAttentionKernel& kernel : LinearAttentionKernels(ReadLinear(words))) {
      sources.push_back(LinearAttentionKernelSource(kernel));
    }
    return sources;
  });
  // None where gradients are jax.numpy code.
  m.def("linear_gradient_sources", [](const std::vector<int64_t>& words) {
    std::vector<KernelSource> sources;
    for (const LinearAttentionKernel& kernel : LinearGradientKernels(ReadLinear(words))) {
      sources.push_back(LinearAttentionKernelSource(kernel));
    }
    return sources;
  });
  m.def("linear_gradient_workspace_words", [](const std::vector<int64_t>& words) {
    return SizeLinearGradient(ReadLinear(words)).workspace_words;
  });
  m.def("linear_attention_workspace_words", [](const std::vector<int64_t>& words) {
    return SizeLinearAttention(ReadLinear(words)).workspace_words;
  });
  m.def("short_convolution_source", [](int64_t arch, int64_t dtype, int64_t width, bool silu) {
    return ShortConvolutionKernelSource({arch, dtype, width, silu});
  });
}

}  // namespace jax_attn
