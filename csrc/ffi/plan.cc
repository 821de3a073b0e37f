// jax_attn_plan: the planner inside a compiled function. Unpack, check, plan, return.
#include "plan/plan.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "ffi/checks.h"
#include "ffi/handlers.h"
#include "jit/kernels.h"
#include "plan/rules/integers.h"

namespace jax_attn {
namespace {

constexpr char kOp[] = "plan";

using OptionalBuffer = std::optional<ffi::AnyBuffer>;

// The operands, results and attributes of one call, as BindCall binds them, in its order.
struct PlanCall {
  ffi::AnyBuffer qo_indptr, kv_lens, kv_indptr, page_indices, q_offsets;
  OptionalBuffer request_indptr, prefix_lens;  // both or neither: no levels are given
  OptionalBuffer block_classes;                // with step lists
  ResultBuffer plan, scratch;
  ffi::Span<const int64_t> problem;
  bool has_levels;
  int64_t q_block, kv_block;  // of block_classes

  int32_t* plan_words() const { return static_cast<int32_t*>(plan.untyped_data()); }
};

template <typename Binding>
auto BindAttributes(Binding binding) {
  return std::move(binding)
      .template Attr<ffi::Span<const int64_t>>("problem")
      .template Attr<bool>("levels")  // there are some
      .template Attr<int64_t>("q_block")
      .template Attr<int64_t>("kv_block");
}

// Binds what follows the contexts of a platform.
template <typename Binding>
auto BindCall(Binding binding) {
  return BindAttributes(std::move(binding)
                            .template Arg<ffi::AnyBuffer>()  // qo_indptr
                            .template Arg<ffi::AnyBuffer>()  // kv_lens
                            .template Arg<ffi::AnyBuffer>()  // page_indptr; ragged: kv_indptr
                            .template Arg<ffi::AnyBuffer>()  // page_indices
                            .template Arg<ffi::AnyBuffer>()  // q_offsets
                            .template OptionalArg<ffi::AnyBuffer>()  // request_indptr
                            .template OptionalArg<ffi::AnyBuffer>()  // prefix_lens
                            .template OptionalArg<ffi::AnyBuffer>()  // classes of a block map
                            .template Ret<ffi::AnyBuffer>()          // plan
                            .template Ret<ffi::AnyBuffer>());        // scratch
}

// Arguments of a planner.
struct PlanArguments {
  AttentionProblem problem;
  PlanInputs inputs;
  PrefixLevels levels;
  BlockMap block_map;
  bool has_levels, has_map;

  const PrefixLevels* levels_or_null() const { return has_levels ? &levels : nullptr; }
  const BlockMap* map_or_null() const { return has_map ? &block_map : nullptr; }
};

// Only the last operands may be omitted. If a map follows, request_indptr without columns means
// that no levels are given.
bool ToldLevels(const PlanCall& call) {
  return call.request_indptr && call.request_indptr->dimensions().size() == 2 &&
         call.request_indptr->dimensions()[1] > 0;
}

Status UnpackLevels(const PlanCall& call, PrefixLevels* levels) {
  *levels = {};
  if (!call.request_indptr && !call.prefix_lens) return Status::Ok();
  if (!call.request_indptr || !call.prefix_lens || call.request_indptr->dimensions().size() != 2 ||
      call.prefix_lens->dimensions().size() != 2) {
    return Status::Error("plan: request_indptr, prefix_lens: expected both, two-dimensional.");
  }
  if (!ToldLevels(call)) return Status::Ok();
  const int64_t num_levels = call.prefix_lens->dimensions()[0];
  const int64_t num_prefixes = call.prefix_lens->dimensions()[1];
  if (num_levels > kMaxLevels || num_prefixes >= kMaxChunks / kMaxLevels) {
    return Status::Error("plan: prefix_levels: expected at most " + std::to_string(kMaxLevels) +
                         " levels of fewer than 2^23 prefixes, got " + std::to_string(num_levels) +
                         " of " + std::to_string(num_prefixes) + ".");
  }
  JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(kOp, "request_indptr", *call.request_indptr, ffi::S32,
                                       {num_levels, num_prefixes + 1}));
  JAX_ATTN_RETURN_IF_ERROR(
      CheckBuffer(kOp, "prefix_lens", *call.prefix_lens, ffi::S32, {num_levels, num_prefixes}));
  levels->request_indptr = static_cast<const int32_t*>(call.request_indptr->untyped_data());
  levels->prefix_lens = static_cast<const int32_t*>(call.prefix_lens->untyped_data());
  levels->num_levels = static_cast<i32>(num_levels);
  levels->num_prefixes = static_cast<i32>(num_prefixes);
  return Status::Ok();
}

Status UnpackMap(const PlanCall& call, BlockMap* map) {
  if (!call.block_classes) return Status::Ok();
  const auto dims = call.block_classes->dimensions();
  if (call.block_classes->element_type() != ffi::U8 || dims.size() != 2 ||
      call.q_block > kMaxInt32 || call.kv_block > kMaxInt32) {
    return Status::Error("plan: block_map: expected uint8 classes by row and column of blocks.");
  }
  *map = {static_cast<const uint8_t*>(call.block_classes->untyped_data()), dims[0], dims[1],
          static_cast<int32_t>(call.q_block), static_cast<int32_t>(call.kv_block)};
  return Status::Ok();
}

Status Unpack(const PlanCall& call, PlanArguments* arguments) {
  *arguments = {};
  AttentionProblem* problem = &arguments->problem;
  PrefixLevels* levels = &arguments->levels;
  JAX_ATTN_RETURN_IF_ERROR(ReadProblem(kOp, call.problem, problem));
  arguments->has_levels = ToldLevels(call);
  arguments->has_map = call.block_classes.has_value();
  const int64_t batch_size = static_cast<int64_t>(call.kv_lens.element_count());
  const int64_t num_pages = static_cast<int64_t>(call.page_indices.element_count());
  const int64_t num_words = MakePlanLayout(*problem).num_words;
  JAX_ATTN_RETURN_IF_ERROR(
      CheckBuffer(kOp, "qo_indptr", call.qo_indptr, ffi::S32, {batch_size + 1}));
  JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(kOp, "kv_lens", call.kv_lens, ffi::S32, {batch_size}));
  JAX_ATTN_RETURN_IF_ERROR(
      CheckBuffer(kOp, "kv_indptr", call.kv_indptr, ffi::S32, {batch_size + 1}));
  JAX_ATTN_RETURN_IF_ERROR(
      CheckBuffer(kOp, "page_indices", call.page_indices, ffi::S32, {num_pages}));
  JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(kOp, "q_offsets", call.q_offsets, ffi::S32, {batch_size}));
  JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(kOp, "plan", call.plan, ffi::S32, {num_words}));
  JAX_ATTN_RETURN_IF_ERROR(UnpackLevels(call, levels));
  JAX_ATTN_RETURN_IF_ERROR(UnpackMap(call, &arguments->block_map));
  JAX_ATTN_RETURN_IF_ERROR(CheckBlockMap(*problem, arguments->map_or_null()));
  const int64_t scratch_bytes = PlanScratchBytes(*problem, levels->num_levels, levels->num_prefixes,
                                                 arguments->map_or_null());
  JAX_ATTN_RETURN_IF_ERROR(
      CheckBuffer(kOp, "scratch", call.scratch, ffi::S32, {scratch_bytes / 4}));
  JAX_ATTN_RETURN_IF_ERROR(CheckBatchSize(*problem, batch_size));
  PlanInputs* inputs = &arguments->inputs;
  inputs->qo_indptr = static_cast<const int32_t*>(call.qo_indptr.untyped_data());
  inputs->kv_lens = static_cast<const int32_t*>(call.kv_lens.untyped_data());
  inputs->kv_indptr = static_cast<const int32_t*>(call.kv_indptr.untyped_data());
  inputs->page_indices = static_cast<const int32_t*>(call.page_indices.untyped_data());
  inputs->q_offsets = static_cast<const int32_t*>(call.q_offsets.untyped_data());
  inputs->batch_size = batch_size;
  inputs->num_page_indices = num_pages;
  return Status::Ok();
}

Status ExecuteCpu(const PlanCall& call) {
  PlanArguments a;
  JAX_ATTN_RETURN_IF_ERROR(Unpack(call, &a));
  return Plan(a.problem, a.inputs, a.levels_or_null(), call.plan_words(), a.map_or_null());
}

PlanKernel KernelOf(const AttentionProblem& problem, bool has_levels) {
  const AttentionSpec& spec = problem.spec;
  return {spec.arch, has_levels || spec.schedule == kAuto || spec.max_steps > 0};
}

ffi::Error InstantiateCuda(ffi::Span<const int64_t> words, bool has_levels, int64_t, int64_t) {
  return RunStage(kOp, words,
                  [=](const AttentionProblem& p) { return PreparePlan(KernelOf(p, has_levels)); });
}

ffi::Error InitializeCuda(int32_t device, ffi::Span<const int64_t> words, bool has_levels, int64_t,
                          int64_t) {
  return RunStage(kOp, words, [=](const AttentionProblem& p) {
    return LoadPlan(KernelOf(p, has_levels), device);
  });
}

// The device planner cannot raise: a bad batch leaves a faulty plan (cuda/plan/plan.cuh).
Status ExecuteCuda(CUstream_st* stream, int32_t device_ordinal, const PlanCall& call) {
  PlanArguments a;
  JAX_ATTN_RETURN_IF_ERROR(Unpack(call, &a));
  const PlanParams params =
      MakePlanParams(a.problem, a.inputs, a.levels_or_null(), call.plan_words(),
                     call.scratch.untyped_data(), a.map_or_null());
  return LaunchPlan(KernelOf(a.problem, call.has_levels), params,
                    static_cast<int64_t>(call.plan.element_count()), stream, device_ordinal);
}

XLA_FFI_DEFINE_HANDLER(
    kExecuteCpu, [](auto... bound) { return ToFfi(ExecuteCpu(PlanCall{bound...})); },
    BindCall(ffi::Ffi::Bind()));

XLA_FFI_DEFINE_HANDLER(kInstantiateCuda, InstantiateCuda,
                       BindAttributes(ffi::Ffi::BindInstantiate()));

XLA_FFI_DEFINE_HANDLER(kInitializeCuda, InitializeCuda,
                       BindAttributes(ffi::Ffi::BindInitialize().Ctx<ffi::DeviceOrdinal>()));

XLA_FFI_DEFINE_HANDLER(
    kExecuteCuda,
    [](CUstream_st* stream, int32_t device_ordinal, auto... bound) {
      return ToFfi(ExecuteCuda(stream, device_ordinal, PlanCall{bound...}));
    },
    BindCall(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<CUstream_st*>>().Ctx<ffi::DeviceOrdinal>()),
    {ffi::Traits::kCmdBufferCompatible});

}  // namespace

const std::vector<Target> kPlanTargets = {
    {"jax_attn_plan", "cpu", nullptr, nullptr, kExecuteCpu},
    {"jax_attn_plan", "CUDA", kInstantiateCuda, kInitializeCuda, kExecuteCuda},
};

}  // namespace jax_attn
