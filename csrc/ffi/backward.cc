// jax_attn_backward: unpack, check, launch, return.
#include "cpu/backward.h"

#include <utility>

#include "ffi/checks.h"
#include "ffi/cpu_task_pool.h"
#include "ffi/handlers.h"
#include "plan/check.h"
#include "plan/plan.h"

namespace jax_attn {
namespace {

constexpr char kOp[] = "attention's backward pass";

struct BackwardBuffers {
  ffi::AnyBuffer q, k, v, plan, layer, lse, d, d_o;
  ffi::AnyBuffer d_q, d_k, d_v, sums;
};

Status CheckKv(const AttentionSpec& spec, const char* name, const ffi::AnyBuffer& kv,
               int64_t head_dim, const Pool& pool) {
  if (spec.paged()) return CheckPages(kOp, name, spec, pool, kv, head_dim);
  return CheckBuffer(kOp, name, kv, ToDataType(spec.dtype),
                     {spec.max_kv_tokens, spec.num_kv_heads, head_dim});
}

Status Check(const AttentionProblem& problem, const BackwardBuffers& b, Pool* pool) {
  const AttentionSpec& spec = problem.spec;
  const ffi::DataType type = ToDataType(spec.dtype);
  Status s = Status::Ok();
  if (spec.mla || spec.quantized() || spec.fresh_kv) {
    s = Status::Error("attention's backward pass: spec: mla, kv_dtype and fresh_kv have none.");
  }
  const auto check_q = [&](const char* name, const ffi::AnyBuffer& x, int64_t dim) {
    if (s.ok()) s = CheckBuffer(kOp, name, x, type, {spec.max_qo_tokens, spec.num_qo_heads, dim});
  };
  const auto check_kv = [&](const char* name, const ffi::AnyBuffer& x, int64_t dim) {
    if (s.ok()) s = CheckKv(spec, name, x, dim, *pool);
  };
  const auto check_row = [&](const char* name, const ffi::AnyBuffer& x) {
    if (s.ok()) s = CheckBuffer(kOp, name, x, ffi::F32, {spec.max_qo_tokens, spec.num_qo_heads});
  };
  if (s.ok() && spec.paged()) s = ReadPool(kOp, spec, b.k, pool);
  check_q("q", b.q, spec.head_dim_qk);
  check_kv("k", b.k, spec.head_dim_qk);
  check_kv("v", b.v, spec.head_dim_vo);
  if (s.ok()) s = CheckBuffer(kOp, "plan", b.plan, ffi::S32, {MakePlanLayout(problem).num_words});
  if (s.ok()) s = CheckBuffer(kOp, "layer", b.layer, ffi::S32, {});
  check_row("lse", b.lse);
  check_row("d", b.d);
  check_q("d_o", b.d_o, spec.head_dim_vo);
  check_q("d_q", b.d_q, spec.head_dim_qk);
  check_kv("d_k", b.d_k, spec.head_dim_qk);
  check_kv("d_v", b.d_v, spec.head_dim_vo);
  return s;
}

ffi::Error ExecuteCpu(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                      ffi::AnyBuffer plan, ffi::AnyBuffer layer, ffi::AnyBuffer lse,
                      ffi::AnyBuffer d, ffi::AnyBuffer d_o, ffi::Result<ffi::AnyBuffer> d_q,
                      ffi::Result<ffi::AnyBuffer> d_k, ffi::Result<ffi::AnyBuffer> d_v,
                      ffi::Result<ffi::AnyBuffer> sums, ffi::Span<const int64_t> words,
                      bool poison) {
  AttentionProblem problem;
  Pool kv_pool;
  const BackwardBuffers b{q, k, v, plan, layer, lse, d, d_o, *d_q, *d_k, *d_v, *sums};
  Status s = ReadProblem(kOp, words, &problem);
  if (s.ok()) s = Check(problem, b, &kv_pool);
  if (!s.ok()) return ToFfi(s);
  const auto* plan_words = static_cast<const int32_t*>(plan.untyped_data());
  BackwardParams params = {};
  AttentionParams& p = params.forward;
  p = MakeAttentionParams(problem, plan_words);
  p.q = q.untyped_data();
  p.k = k.untyped_data();
  p.v = v.untyped_data();
  p.layer = problem.spec.paged() ? static_cast<const int32_t*>(layer.untyped_data()) : nullptr;
  p.num_pages = kv_pool.num_pages;
  p.num_layers = static_cast<i32>(kv_pool.num_layers);
  params.lse = static_cast<const float*>(lse.untyped_data());
  params.d = static_cast<const float*>(d.untyped_data());
  params.d_o = d_o.untyped_data();
  s = CheckBuffer(kOp, "sums", *sums, ffi::F32, {BackwardSums(problem.spec, p)});
  if (s.ok()) s = Prefixed(kOp, CheckPlan(problem, plan_words, p.num_pages));
  if (s.ok() && p.layer) s = CheckLayer(kOp, *p.layer, p.num_layers);
  if (!s.ok()) return ToFfi(s);
  if (poison) PoisonOnHost({*d_q, *d_k, *d_v, *sums});
  XlaTaskPool task_pool(pool);
  BackwardCpu(problem, params,
              {d_q->untyped_data(), d_k->untyped_data(), d_v->untyped_data(),
               static_cast<float*>(sums->untyped_data())},
              task_pool);
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kExecuteCpu, ExecuteCpu,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // q
                           .Arg<ffi::AnyBuffer>()  // k
                           .Arg<ffi::AnyBuffer>()  // v
                           .Arg<ffi::AnyBuffer>()  // plan
                           .Arg<ffi::AnyBuffer>()  // layer
                           .Arg<ffi::AnyBuffer>()  // lse
                           .Arg<ffi::AnyBuffer>()  // d
                           .Arg<ffi::AnyBuffer>()  // d_o
                           .Ret<ffi::AnyBuffer>()  // d_q
                           .Ret<ffi::AnyBuffer>()  // d_k
                           .Ret<ffi::AnyBuffer>()  // d_v
                           .Ret<ffi::AnyBuffer>()  // sums
                           .Attr<ffi::Span<const int64_t>>("problem")
                           .Attr<bool>("poison"));

}  // namespace

const std::vector<Target> kBackwardTargets = {
    {"jax_attn_backward", "cpu", nullptr, nullptr, kExecuteCpu},
};

}  // namespace jax_attn
