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

struct PlanBuffers {
  ffi::AnyBuffer qo_indptr, kv_lens, kv_indptr, page_indices, q_offsets;
  OptionalBuffer request_indptr, prefix_lens;  // both, or none: no levels are told
  OptionalBuffer block_classes;                // with step lists
  ffi::AnyBuffer plan, scratch;
  int64_t q_block, kv_block;  // of block_classes
};

// What a planner is given.
struct PlanArguments {
  AttentionProblem problem;
  PlanInputs inputs;
  PrefixLevels levels;
  BlockMap block_map;
  bool has_levels, has_map;

  const PrefixLevels* levels_or_null() const { return has_levels ? &levels : nullptr; }
  const BlockMap* map_or_null() const { return has_map ? &block_map : nullptr; }
};

// Only the last operands may be left out: before a map, request_indptr without columns says that no
// levels are told.
bool ToldLevels(const PlanBuffers& b) {
  return b.request_indptr && b.request_indptr->dimensions().size() == 2 &&
         b.request_indptr->dimensions()[1] > 0;
}

Status UnpackLevels(const PlanBuffers& b, PrefixLevels* levels) {
  *levels = {};
  if (!b.request_indptr && !b.prefix_lens) return Status::Ok();
  if (!b.request_indptr || !b.prefix_lens || b.request_indptr->dimensions().size() != 2 ||
      b.prefix_lens->dimensions().size() != 2) {
    return Status::Error("plan: request_indptr, prefix_lens: expected both, two-dimensional.");
  }
  if (!ToldLevels(b)) return Status::Ok();
  const int64_t num_levels = b.prefix_lens->dimensions()[0];
  const int64_t num_prefixes = b.prefix_lens->dimensions()[1];
  if (num_levels > kMaxLevels || num_prefixes >= kMaxChunks / kMaxLevels) {
    return Status::Error("plan: prefix_levels: expected at most " + std::to_string(kMaxLevels) +
                         " levels of fewer than 2^23 prefixes, got " + std::to_string(num_levels) +
                         " of " + std::to_string(num_prefixes) + ".");
  }
  Status s = CheckBuffer(kOp, "request_indptr", *b.request_indptr, ffi::S32,
                         {num_levels, num_prefixes + 1});
  if (s.ok()) {
    s = CheckBuffer(kOp, "prefix_lens", *b.prefix_lens, ffi::S32, {num_levels, num_prefixes});
  }
  levels->request_indptr = static_cast<const int32_t*>(b.request_indptr->untyped_data());
  levels->prefix_lens = static_cast<const int32_t*>(b.prefix_lens->untyped_data());
  levels->num_levels = static_cast<i32>(num_levels);
  levels->num_prefixes = static_cast<i32>(num_prefixes);
  return s;
}

Status UnpackMap(const PlanBuffers& b, BlockMap* map) {
  if (!b.block_classes) return Status::Ok();
  const auto dims = b.block_classes->dimensions();
  if (b.block_classes->element_type() != ffi::U8 || dims.size() != 2 || b.q_block > kMaxInt32 ||
      b.kv_block > kMaxInt32) {
    return Status::Error("plan: block_map: expected uint8 classes by row and column of blocks.");
  }
  *map = {static_cast<const uint8_t*>(b.block_classes->untyped_data()), dims[0], dims[1],
          static_cast<int32_t>(b.q_block), static_cast<int32_t>(b.kv_block)};
  return Status::Ok();
}

Status Unpack(ffi::Span<const int64_t> words, const PlanBuffers& b, PlanArguments* arguments) {
  *arguments = {};
  AttentionProblem* problem = &arguments->problem;
  PrefixLevels* levels = &arguments->levels;
  if (Status s = ReadProblem(kOp, words, problem); !s.ok()) return s;
  arguments->has_levels = ToldLevels(b);
  arguments->has_map = b.block_classes.has_value();
  const int64_t batch_size = static_cast<int64_t>(b.kv_lens.element_count());
  const int64_t num_pages = static_cast<int64_t>(b.page_indices.element_count());
  const int64_t num_words = MakePlanLayout(*problem).num_words;
  Status s = CheckBuffer(kOp, "qo_indptr", b.qo_indptr, ffi::S32, {batch_size + 1});
  if (s.ok()) s = CheckBuffer(kOp, "kv_lens", b.kv_lens, ffi::S32, {batch_size});
  if (s.ok()) s = CheckBuffer(kOp, "kv_indptr", b.kv_indptr, ffi::S32, {batch_size + 1});
  if (s.ok()) s = CheckBuffer(kOp, "page_indices", b.page_indices, ffi::S32, {num_pages});
  if (s.ok()) s = CheckBuffer(kOp, "q_offsets", b.q_offsets, ffi::S32, {batch_size});
  if (s.ok()) s = CheckBuffer(kOp, "plan", b.plan, ffi::S32, {num_words});
  if (s.ok()) s = UnpackLevels(b, levels);
  if (s.ok()) s = UnpackMap(b, &arguments->block_map);
  if (s.ok()) s = CheckBlockMap(*problem, arguments->map_or_null());
  if (s.ok()) {
    const int64_t scratch_bytes = PlanScratchBytes(*problem, levels->num_levels,
                                                   levels->num_prefixes, arguments->map_or_null());
    s = CheckBuffer(kOp, "scratch", b.scratch, ffi::S32, {scratch_bytes / 4});
  }
  if (s.ok()) s = CheckBatchSize(*problem, batch_size);
  if (!s.ok()) return s;
  PlanInputs* inputs = &arguments->inputs;
  inputs->qo_indptr = static_cast<const int32_t*>(b.qo_indptr.untyped_data());
  inputs->kv_lens = static_cast<const int32_t*>(b.kv_lens.untyped_data());
  inputs->kv_indptr = static_cast<const int32_t*>(b.kv_indptr.untyped_data());
  inputs->page_indices = static_cast<const int32_t*>(b.page_indices.untyped_data());
  inputs->q_offsets = static_cast<const int32_t*>(b.q_offsets.untyped_data());
  inputs->batch_size = batch_size;
  inputs->num_page_indices = num_pages;
  return Status::Ok();
}

ffi::Error ExecuteCpu(ffi::AnyBuffer qo_indptr, ffi::AnyBuffer kv_lens, ffi::AnyBuffer kv_indptr,
                      ffi::AnyBuffer page_indices, ffi::AnyBuffer q_offsets,
                      OptionalBuffer request_indptr, OptionalBuffer prefix_lens,
                      OptionalBuffer block_classes, ffi::Result<ffi::AnyBuffer> plan,
                      ffi::Result<ffi::AnyBuffer> scratch, ffi::Span<const int64_t> words, bool,
                      int64_t q_block, int64_t kv_block) {
  PlanArguments a;
  const Status s = Unpack(words,
                          {qo_indptr, kv_lens, kv_indptr, page_indices, q_offsets, request_indptr,
                           prefix_lens, block_classes, *plan, *scratch, q_block, kv_block},
                          &a);
  if (!s.ok()) return ToFfi(s);
  return ToFfi(Plan(a.problem, a.inputs, a.levels_or_null(),
                    static_cast<int32_t*>(plan->untyped_data()), a.map_or_null()));
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

// The device cannot refuse: a bad batch leaves a faulty plan (cuda/plan/plan.cuh).
ffi::Error ExecuteCuda(CUstream_st* stream, int32_t device_ordinal, ffi::AnyBuffer qo_indptr,
                       ffi::AnyBuffer kv_lens, ffi::AnyBuffer kv_indptr,
                       ffi::AnyBuffer page_indices, ffi::AnyBuffer q_offsets,
                       OptionalBuffer request_indptr, OptionalBuffer prefix_lens,
                       OptionalBuffer block_classes, ffi::Result<ffi::AnyBuffer> plan,
                       ffi::Result<ffi::AnyBuffer> scratch, ffi::Span<const int64_t> words,
                       bool has_levels, int64_t q_block, int64_t kv_block) {
  PlanArguments a;
  const Status s = Unpack(words,
                          {qo_indptr, kv_lens, kv_indptr, page_indices, q_offsets, request_indptr,
                           prefix_lens, block_classes, *plan, *scratch, q_block, kv_block},
                          &a);
  if (!s.ok()) return ToFfi(s);
  const PlanParams params = MakePlanParams(a.problem, a.inputs, a.levels_or_null(),
                                           static_cast<int32_t*>(plan->untyped_data()),
                                           scratch->untyped_data(), a.map_or_null());
  return ToFfi(LaunchPlan(KernelOf(a.problem, has_levels), params,
                          static_cast<int64_t>(plan->element_count()), stream, device_ordinal));
}

template <typename Binding>
auto BindCall(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()          // qo_indptr
      .template Arg<ffi::AnyBuffer>()          // kv_lens
      .template Arg<ffi::AnyBuffer>()          // page_indptr; ragged: kv_indptr
      .template Arg<ffi::AnyBuffer>()          // page_indices
      .template Arg<ffi::AnyBuffer>()          // q_offsets
      .template OptionalArg<ffi::AnyBuffer>()  // request_indptr
      .template OptionalArg<ffi::AnyBuffer>()  // prefix_lens
      .template OptionalArg<ffi::AnyBuffer>()  // classes of a block map
      .template Ret<ffi::AnyBuffer>()          // plan
      .template Ret<ffi::AnyBuffer>()          // scratch
      .template Attr<ffi::Span<const int64_t>>("problem")
      .template Attr<bool>("levels")  // there are some
      .template Attr<int64_t>("q_block")
      .template Attr<int64_t>("kv_block");
}

XLA_FFI_DEFINE_HANDLER(kExecuteCpu, ExecuteCpu, BindCall(ffi::Ffi::Bind()));

XLA_FFI_DEFINE_HANDLER(kInstantiateCuda, InstantiateCuda,
                       ffi::Ffi::BindInstantiate()
                           .Attr<ffi::Span<const int64_t>>("problem")
                           .Attr<bool>("levels")
                           .Attr<int64_t>("q_block")
                           .Attr<int64_t>("kv_block"));

XLA_FFI_DEFINE_HANDLER(kInitializeCuda, InitializeCuda,
                       ffi::Ffi::BindInitialize()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Attr<ffi::Span<const int64_t>>("problem")
                           .Attr<bool>("levels")
                           .Attr<int64_t>("q_block")
                           .Attr<int64_t>("kv_block"));

XLA_FFI_DEFINE_HANDLER(
    kExecuteCuda, ExecuteCuda,
    BindCall(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<CUstream_st*>>().Ctx<ffi::DeviceOrdinal>()),
    {ffi::Traits::kCmdBufferCompatible});

}  // namespace

const std::vector<Target> kPlanTargets = {
    {"jax_attn_plan", "cpu", nullptr, nullptr, kExecuteCpu},
    {"jax_attn_plan", "CUDA", kInstantiateCuda, kInitializeCuda, kExecuteCuda},
};

}  // namespace jax_attn
