// jax_attn_plan: the planner inside a compiled function. Unpack, check, plan, return.
#include "plan/plan.h"

#include <algorithm>

#include "ffi/checks.h"
#include "ffi/handlers.h"

namespace jax_attn {
namespace {

constexpr char kOp[] = "plan";

ffi::Error ExecuteCpu(ffi::AnyBuffer qo_indptr, ffi::AnyBuffer kv_lens, ffi::AnyBuffer kv_indptr,
                      ffi::AnyBuffer page_indices, ffi::AnyBuffer q_offsets,
                      ffi::Result<ffi::AnyBuffer> plan, ffi::Span<const int64_t> words) {
  AttentionProblem problem;
  if (Status s = ReadProblem(kOp, words, &problem); !s.ok()) return ToFfi(s);
  const int64_t batch_size = static_cast<int64_t>(kv_lens.element_count());
  const int64_t num_pages = static_cast<int64_t>(page_indices.element_count());
  const int64_t num_words = MakePlanLayout(problem).num_words;
  Status s = CheckBuffer(kOp, "qo_indptr", qo_indptr, ffi::S32, {batch_size + 1});
  if (s.ok()) s = CheckBuffer(kOp, "kv_lens", kv_lens, ffi::S32, {batch_size});
  if (s.ok()) s = CheckBuffer(kOp, "kv_indptr", kv_indptr, ffi::S32, {batch_size + 1});
  if (s.ok()) s = CheckBuffer(kOp, "page_indices", page_indices, ffi::S32, {num_pages});
  if (s.ok()) s = CheckBuffer(kOp, "q_offsets", q_offsets, ffi::S32, {batch_size});
  if (s.ok()) s = CheckBuffer(kOp, "plan", *plan, ffi::S32, {num_words});
  if (!s.ok()) return ToFfi(s);

  auto* buffer = static_cast<int32_t*>(plan->untyped_data());
  std::fill_n(buffer, num_words, 0);  // as on the host, where a plan starts as zeros
  PlanInputs inputs;
  inputs.qo_indptr = static_cast<const int32_t*>(qo_indptr.untyped_data());
  inputs.kv_lens = static_cast<const int32_t*>(kv_lens.untyped_data());
  inputs.kv_indptr = static_cast<const int32_t*>(kv_indptr.untyped_data());
  inputs.page_indices = static_cast<const int32_t*>(page_indices.untyped_data());
  inputs.q_offsets = static_cast<const int32_t*>(q_offsets.untyped_data());
  inputs.batch_size = batch_size;
  inputs.num_page_indices = num_pages;
  return ToFfi(Plan(problem, inputs, buffer));
}

XLA_FFI_DEFINE_HANDLER(kExecuteCpu, ExecuteCpu,
                       ffi::Ffi::Bind()
                           .Arg<ffi::AnyBuffer>()  // qo_indptr
                           .Arg<ffi::AnyBuffer>()  // kv_lens
                           .Arg<ffi::AnyBuffer>()  // page_indptr; ragged: kv_indptr
                           .Arg<ffi::AnyBuffer>()  // page_indices
                           .Arg<ffi::AnyBuffer>()  // q_offsets
                           .Ret<ffi::AnyBuffer>()  // plan
                           .Attr<ffi::Span<const int64_t>>("problem"));

}  // namespace

const std::vector<Target> kPlanTargets = {
    {"jax_attn_plan", "cpu", nullptr, nullptr, kExecuteCpu},
};

}  // namespace jax_attn
