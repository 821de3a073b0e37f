// jax_attn_backward: unpack, check, launch, return.
#include "cpu/backward.h"

#include <utility>
#include <vector>

#include "cpu/threads/helper_pool.h"
#include "ffi/checks.h"
#include "ffi/handlers.h"
#include "jit/kernels.h"
#include "plan/check.h"
#include "plan/plan.h"
#include "variant/words.h"

namespace jax_attn {
namespace {

constexpr char kOp[] = "attention's backward pass";

struct BackwardBuffers {
  ffi::AnyBuffer q, k, v, plan, layer, lse, d, d_o;
  ffi::AnyBuffer d_q, d_k, d_v, workspace;
  std::vector<ffi::AnyBuffer> variant_operands;
  std::vector<ffi::AnyBuffer> d_operands;  // of OperandsOf the gradient
};

// Operands and results of a variant, after the others.
Status TakeVariant(ffi::RemainingArgs args, ffi::RemainingRets rets, BackwardBuffers* b) {
  for (size_t i = 0; i < args.size(); ++i) {
    const auto operand = args.get<ffi::AnyBuffer>(i);
    if (!operand.has_value()) return Status::Error("attention's backward pass: operands.");
    b->variant_operands.push_back(*operand);
  }
  for (size_t i = 0; i < rets.size(); ++i) {
    auto result = rets.get<ffi::AnyBuffer>(i);
    if (!result.has_value()) return Status::Error("attention's backward pass: results.");
    b->d_operands.push_back(**result);
  }
  return Status::Ok();
}

Status CheckVariant(const AttentionProblem& problem, const VariantGradient& gradient,
                    const BackwardBuffers& b) {
  const auto refuse = [](const char* what, size_t expected, size_t got) {
    return Status::Error("attention's backward pass: " + std::string(what) + ": expected " +
                         std::to_string(expected) + ", got " + std::to_string(got) + ".");
  };
  const auto num_operands = static_cast<size_t>(problem.program.num_operands);
  if (b.variant_operands.size() != num_operands) {
    return refuse("variant_operands", num_operands, b.variant_operands.size());
  }
  if (Status s = CheckVariantOperands(kOp, problem.program, b.variant_operands); !s.ok()) return s;
  const std::vector<i32> operands = OperandsOf(gradient);
  if (b.d_operands.size() != operands.size()) {
    return refuse("gradients of operands", operands.size(), b.d_operands.size());
  }
  for (size_t i = 0; i < operands.size(); ++i) {
    const auto got = b.d_operands[i].dimensions();
    const auto dims = b.variant_operands[operands[i]].dimensions();
    const bool on_cpu = problem.spec.arch == 0;
    bool fits = b.d_operands[i].element_type() == ffi::F32 && got.size() == 1 + dims.size();
    if (fits && on_cpu) fits = got[0] == 1 || got[0] == problem.spec.num_kv_heads;
    if (fits && !on_cpu) fits = got.back() == 2;
    fits = fits && std::equal(dims.begin(), dims.end(), got.begin() + (on_cpu ? 1 : 0));
    if (!fits) {
      return Status::Error(
          std::string("attention's backward pass: gradients of operands: expected ") +
          (on_cpu ? "f32 sums of one or of each kv head" : "two f32 words of each element") +
          ", got another array.");
    }
  }
  return Status::Ok();
}

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

Status ReadGradient(ffi::Span<const int64_t> words, const AttentionProblem& problem,
                    VariantGradient* gradient) {
  return Prefixed(kOp, DecodeGradient(words.begin(), words.size(), problem.program, gradient));
}

// Everything between XLA's call and the work that both platforms share. params: without results.
Status Unpack(ffi::Span<const int64_t> words, ffi::Span<const int64_t> gradient_words,
              const BackwardBuffers& b, AttentionProblem* problem, VariantGradient* gradient,
              BackwardParams* params) {
  if (Status s = ReadProblem(kOp, words, problem); !s.ok()) return s;
  Pool kv_pool;
  if (Status s = Check(*problem, b, &kv_pool); !s.ok()) return s;
  Status s = ReadGradient(gradient_words, *problem, gradient);
  if (s.ok()) s = CheckVariant(*problem, *gradient, b);
  if (!s.ok()) return s;
  AttentionParams& p = params->forward;
  p = MakeAttentionParams(*problem, static_cast<const int32_t*>(b.plan.untyped_data()));
  p.q = b.q.untyped_data();
  p.k = b.k.untyped_data();
  p.v = b.v.untyped_data();
  p.layer = problem->spec.paged() ? static_cast<const int32_t*>(b.layer.untyped_data()) : nullptr;
  p.num_pages = kv_pool.num_pages;
  p.num_layers = static_cast<i32>(kv_pool.num_layers);
  params->lse = static_cast<const float*>(b.lse.untyped_data());
  params->d = static_cast<const float*>(b.d.untyped_data());
  params->d_o = b.d_o.untyped_data();
  SetVariantOperands(b.variant_operands, &p);
  return CheckBuffer(kOp, "workspace", b.workspace, ffi::F32,
                     {problem->spec.arch == 0 ? BackwardSums(problem->spec, p.num_pages)
                                              : BackwardWorkspaceWords(*problem, p.num_pages)});
}

ffi::Error ExecuteCpu(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                      ffi::AnyBuffer plan, ffi::AnyBuffer layer, ffi::AnyBuffer lse,
                      ffi::AnyBuffer d, ffi::AnyBuffer d_o, ffi::RemainingArgs args,
                      ffi::Result<ffi::AnyBuffer> d_q, ffi::Result<ffi::AnyBuffer> d_k,
                      ffi::Result<ffi::AnyBuffer> d_v, ffi::Result<ffi::AnyBuffer> workspace,
                      ffi::RemainingRets rets, ffi::Span<const int64_t> gradient_words,
                      ffi::Span<const int64_t> words, bool poison) {
  AttentionProblem problem;
  BackwardParams params = {};
  VariantGradient gradient;
  BackwardBuffers b{q, k, v, plan, layer, lse, d, d_o, *d_q, *d_k, *d_v, *workspace, {}, {}};
  Status s = TakeVariant(args, rets, &b);
  if (s.ok()) s = Unpack(words, gradient_words, b, &problem, &gradient, &params);
  const AttentionParams& p = params.forward;
  if (s.ok()) {
    const auto* plan_words = static_cast<const int32_t*>(plan.untyped_data());
    s = Prefixed(kOp, CheckPlan(problem, plan_words, p.num_pages));
  }
  if (s.ok() && p.layer) s = CheckLayer(kOp, *p.layer, p.num_layers);
  if (!s.ok()) return ToFfi(s);
  PreferHugePages({*d_q, *d_k, *d_v, *workspace});
  if (poison) PoisonOnHost({*d_q, *d_k, *d_v, *workspace});
  BackwardResults results = {d_q->untyped_data(),
                             d_k->untyped_data(),
                             d_v->untyped_data(),
                             static_cast<float*>(workspace->untyped_data()),
                             {}};
  for (const ffi::AnyBuffer& x : b.d_operands) {
    if (poison) PoisonOnHost({x});
    const int64_t copies = x.dimensions()[0];
    results.operands.push_back({static_cast<float*>(x.untyped_data()), copies,
                                static_cast<int64_t>(x.element_count()) / copies});
  }
  HelperPool task_pool(pool.num_threads());
  BackwardCpu(problem, gradient, params, results, task_pool);
  return ffi::Error::Success();
}

// stage(problem, gradient) returns a Status.
template <typename Stage>
ffi::Error RunStageWithGradient(ffi::Span<const int64_t> gradient_words,
                                ffi::Span<const int64_t> words, Stage stage) {
  return RunStage(kOp, words, [&](const AttentionProblem& problem) {
    VariantGradient gradient;
    const Status s = ReadGradient(gradient_words, problem, &gradient);
    return s.ok() ? stage(problem, gradient) : s;
  });
}

ffi::Error InstantiateCuda(ffi::Span<const int64_t> gradient_words, ffi::Span<const int64_t> words,
                           bool) {
  return RunStageWithGradient(gradient_words, words,
                              [](const AttentionProblem& problem, const VariantGradient& gradient) {
                                return PrepareBackward(problem, gradient);
                              });
}

ffi::Error InitializeCuda(int32_t device, ffi::Span<const int64_t> gradient_words,
                          ffi::Span<const int64_t> words, bool) {
  return RunStageWithGradient(
      gradient_words, words, [=](const AttentionProblem& problem, const VariantGradient& gradient) {
        return LoadBackward(problem, gradient, device);
      });
}

ffi::Error ExecuteCuda(CUstream_st* stream, int32_t device_ordinal, ffi::AnyBuffer q,
                       ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::AnyBuffer plan,
                       ffi::AnyBuffer layer, ffi::AnyBuffer lse, ffi::AnyBuffer d,
                       ffi::AnyBuffer d_o, ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> d_q,
                       ffi::Result<ffi::AnyBuffer> d_k, ffi::Result<ffi::AnyBuffer> d_v,
                       ffi::Result<ffi::AnyBuffer> workspace, ffi::RemainingRets rets,
                       ffi::Span<const int64_t> gradient_words, ffi::Span<const int64_t> words,
                       bool poison) {
  AttentionProblem problem;
  BackwardParams params = {};
  VariantGradient gradient;
  BackwardBuffers b{q, k, v, plan, layer, lse, d, d_o, *d_q, *d_k, *d_v, *workspace, {}, {}};
  Status s = TakeVariant(args, rets, &b);
  if (s.ok()) s = Unpack(words, gradient_words, b, &problem, &gradient, &params);
  if (s.ok() && poison) s = PoisonOnDevice({*d_q, *d_k, *d_v, *workspace}, stream);
  if (!s.ok()) return ToFfi(s);
  BackwardCudaParams p =
      MakeBackwardParams(problem, params.forward, static_cast<const int32_t*>(plan.untyped_data()),
                         static_cast<int32_t*>(workspace->untyped_data()));
  p.lse = params.lse;
  p.d = params.d;
  p.d_o = params.d_o;
  p.d_q = d_q->untyped_data();
  p.d_k = d_k->untyped_data();
  p.d_v = d_v->untyped_data();
  const std::vector<i32> operands = OperandsOf(gradient);
  for (size_t i = 0; i < operands.size(); ++i) {
    p.operand_sums[operands[i]] = static_cast<i64*>(b.d_operands[i].untyped_data());
    p.num_operand_elements[operands[i]] = static_cast<i64>(b.d_operands[i].element_count()) / 2;
  }
  const int64_t num_zero_words = BackwardZeroWords(problem, params.forward.num_pages);
  return ToFfi(LaunchBackward(problem, gradient, p, num_zero_words, stream, device_ordinal));
}

// gradient: the words of that of a variant.
template <typename Binding>
auto BindAttributes(Binding binding) {
  return BindProblem(std::move(binding).template Attr<ffi::Span<const int64_t>>("gradient"));
}

// The operands, results and attributes of one call, after the contexts of a platform.
template <typename Binding>
auto BindCall(Binding binding) {
  return BindAttributes(std::move(binding)
                            .template Arg<ffi::AnyBuffer>()  // q
                            .template Arg<ffi::AnyBuffer>()  // k
                            .template Arg<ffi::AnyBuffer>()  // v
                            .template Arg<ffi::AnyBuffer>()  // plan
                            .template Arg<ffi::AnyBuffer>()  // layer
                            .template Arg<ffi::AnyBuffer>()  // lse
                            .template Arg<ffi::AnyBuffer>()  // d
                            .template Arg<ffi::AnyBuffer>()  // d_o
                            .RemainingArgs()                 // of a variant
                            .template Ret<ffi::AnyBuffer>()  // d_q
                            .template Ret<ffi::AnyBuffer>()  // d_k
                            .template Ret<ffi::AnyBuffer>()  // d_v
                            .template Ret<ffi::AnyBuffer>()  // workspace
                            .RemainingRets());               // of a variant's operands
}

XLA_FFI_DEFINE_HANDLER(kExecuteCpu, ExecuteCpu, BindCall(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));

XLA_FFI_DEFINE_HANDLER(kInstantiateCuda, InstantiateCuda,
                       BindAttributes(ffi::Ffi::BindInstantiate()));

XLA_FFI_DEFINE_HANDLER(kInitializeCuda, InitializeCuda,
                       BindAttributes(ffi::Ffi::BindInitialize().Ctx<ffi::DeviceOrdinal>()));

XLA_FFI_DEFINE_HANDLER(
    kExecuteCuda, ExecuteCuda,
    BindCall(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<CUstream_st*>>().Ctx<ffi::DeviceOrdinal>()),
    {ffi::Traits::kCmdBufferCompatible});

}  // namespace

const std::vector<Target> kBackwardTargets = {
    {"jax_attn_backward", "cpu", nullptr, nullptr, kExecuteCpu},
    {"jax_attn_backward", "CUDA", kInstantiateCuda, kInitializeCuda, kExecuteCuda},
};

}  // namespace jax_attn
