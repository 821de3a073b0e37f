// jax_attn_plan: the planner inside a compiled function. Unpack, check, plan, return.
#include "plan/plan.h"

#include <algorithm>
#include <utility>

#include "ffi/checks.h"
#include "ffi/handlers.h"
#include "jit/kernels.h"

namespace jax_attn {
namespace {

constexpr char kOp[] = "plan";

struct PlanBuffers {
  ffi::AnyBuffer qo_indptr, kv_lens, kv_indptr, page_indices, q_offsets;
  ffi::AnyBuffer plan, scratch;
};

Status Unpack(ffi::Span<const int64_t> words, const PlanBuffers& b, AttentionProblem* problem,
              PlanInputs* inputs) {
  if (Status s = ReadProblem(kOp, words, problem); !s.ok()) return s;
  const int64_t batch_size = static_cast<int64_t>(b.kv_lens.element_count());
  const int64_t num_pages = static_cast<int64_t>(b.page_indices.element_count());
  const int64_t num_words = MakePlanLayout(*problem).num_words;
  Status s = CheckBuffer(kOp, "qo_indptr", b.qo_indptr, ffi::S32, {batch_size + 1});
  if (s.ok()) s = CheckBuffer(kOp, "kv_lens", b.kv_lens, ffi::S32, {batch_size});
  if (s.ok()) s = CheckBuffer(kOp, "kv_indptr", b.kv_indptr, ffi::S32, {batch_size + 1});
  if (s.ok()) s = CheckBuffer(kOp, "page_indices", b.page_indices, ffi::S32, {num_pages});
  if (s.ok()) s = CheckBuffer(kOp, "q_offsets", b.q_offsets, ffi::S32, {batch_size});
  if (s.ok()) s = CheckBuffer(kOp, "plan", b.plan, ffi::S32, {num_words});
  if (s.ok()) {
    s = CheckBuffer(kOp, "scratch", b.scratch, ffi::S32, {PlanScratchBytes(*problem) / 4});
  }
  if (s.ok()) s = CheckBatchSize(*problem, batch_size);
  if (!s.ok()) return s;
  *inputs = {};
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
                      ffi::Result<ffi::AnyBuffer> plan, ffi::Result<ffi::AnyBuffer> scratch,
                      ffi::Span<const int64_t> words) {
  AttentionProblem problem;
  PlanInputs inputs;
  Status s =
      Unpack(words, {qo_indptr, kv_lens, kv_indptr, page_indices, q_offsets, *plan, *scratch},
             &problem, &inputs);
  if (!s.ok()) return ToFfi(s);
  return ToFfi(Plan(problem, inputs, static_cast<int32_t*>(plan->untyped_data())));
}

ffi::Error InstantiateCuda(ffi::Span<const int64_t> words) {
  return RunStage(kOp, words, [](const AttentionProblem& p) { return PreparePlan({p.spec.arch}); });
}

ffi::Error InitializeCuda(int32_t device, ffi::Span<const int64_t> words) {
  return RunStage(kOp, words,
                  [=](const AttentionProblem& p) { return LoadPlan({p.spec.arch}, device); });
}

// The device cannot refuse: a bad batch leaves a faulty plan (cuda/any/plan.cuh).
ffi::Error ExecuteCuda(CUstream_st* stream, int32_t device_ordinal, ffi::AnyBuffer qo_indptr,
                       ffi::AnyBuffer kv_lens, ffi::AnyBuffer kv_indptr,
                       ffi::AnyBuffer page_indices, ffi::AnyBuffer q_offsets,
                       ffi::Result<ffi::AnyBuffer> plan, ffi::Result<ffi::AnyBuffer> scratch,
                       ffi::Span<const int64_t> words) {
  AttentionProblem problem;
  PlanInputs inputs;
  Status s =
      Unpack(words, {qo_indptr, kv_lens, kv_indptr, page_indices, q_offsets, *plan, *scratch},
             &problem, &inputs);
  if (!s.ok()) return ToFfi(s);
  const PlanParams params = MakePlanParams(
      problem, inputs, static_cast<int32_t*>(plan->untyped_data()), scratch->untyped_data());
  return ToFfi(LaunchPlan({problem.spec.arch}, params, static_cast<int64_t>(plan->element_count()),
                          stream, device_ordinal));
}

template <typename Binding>
auto BindCall(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()  // qo_indptr
      .template Arg<ffi::AnyBuffer>()  // kv_lens
      .template Arg<ffi::AnyBuffer>()  // page_indptr; ragged: kv_indptr
      .template Arg<ffi::AnyBuffer>()  // page_indices
      .template Arg<ffi::AnyBuffer>()  // q_offsets
      .template Ret<ffi::AnyBuffer>()  // plan
      .template Ret<ffi::AnyBuffer>()  // scratch
      .template Attr<ffi::Span<const int64_t>>("problem");
}

XLA_FFI_DEFINE_HANDLER(kExecuteCpu, ExecuteCpu, BindCall(ffi::Ffi::Bind()));

XLA_FFI_DEFINE_HANDLER(kInstantiateCuda, InstantiateCuda,
                       ffi::Ffi::BindInstantiate().Attr<ffi::Span<const int64_t>>("problem"));

XLA_FFI_DEFINE_HANDLER(
    kInitializeCuda, InitializeCuda,
    ffi::Ffi::BindInitialize().Ctx<ffi::DeviceOrdinal>().Attr<ffi::Span<const int64_t>>("problem"));

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
