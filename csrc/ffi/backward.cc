// jax_attn_backward: unpack, check, launch, return.
#include "cpu/backward.h"

#include <string>
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

// The operands, results and attributes of one call.
struct BackwardCall {
  // In the order of BindCall.
  ffi::AnyBuffer q, k, v, plan, layer, lse, d, d_o;
  ffi::RemainingArgs args;
  ResultBuffer d_q, d_k, d_v, workspace;
  ffi::RemainingRets rets;
  ffi::Span<const int64_t> gradient;  // encoded gradient of a variant
  ffi::Span<const int64_t> problem;
  bool poison;

  // In the order in which TakeVariant finds them in `args` and `rets`.
  std::vector<ffi::AnyBuffer> variant_operands = {};
  std::vector<ffi::AnyBuffer> d_operands = {};  // one for each of OperandsOf(gradient)

  const int32_t* plan_words() const { return static_cast<const int32_t*>(plan.untyped_data()); }
};

template <typename Binding>
auto BindAttributes(Binding binding) {
  return BindProblem(std::move(binding).template Attr<ffi::Span<const int64_t>>("gradient"));
}

// Binds what follows the contexts of a platform.
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

// Takes the operands and results of a variant, which come last.
Status TakeVariant(BackwardCall* call) {
  for (size_t i = 0; i < call->args.size(); ++i) {
    const auto operand = call->args.get<ffi::AnyBuffer>(i);
    if (!operand.has_value())
      return Status::Error(std::string(kOp) + ": operands: expected arrays.");
    call->variant_operands.push_back(*operand);
  }
  for (size_t i = 0; i < call->rets.size(); ++i) {
    auto result = call->rets.get<ffi::AnyBuffer>(i);
    if (!result.has_value()) return Status::Error(std::string(kOp) + ": results: expected arrays.");
    call->d_operands.push_back(**result);
  }
  return Status::Ok();
}

Status CheckVariant(const AttentionProblem& problem, const VariantGradient& gradient,
                    const BackwardCall& call) {
  const auto refuse = [](const char* what, size_t expected, size_t got) {
    return Status::Error("attention's backward pass: " + std::string(what) + ": expected " +
                         std::to_string(expected) + ", got " + std::to_string(got) + ".");
  };
  const auto num_operands = static_cast<size_t>(problem.program.num_operands);
  if (call.variant_operands.size() != num_operands) {
    return refuse("variant_operands", num_operands, call.variant_operands.size());
  }
  JAX_ATTN_RETURN_IF_ERROR(CheckVariantOperands(kOp, problem.program, call.variant_operands));
  const std::vector<i32> operands = OperandsOf(gradient);
  if (call.d_operands.size() != operands.size()) {
    return refuse("gradients of operands", operands.size(), call.d_operands.size());
  }
  for (size_t i = 0; i < operands.size(); ++i) {
    const auto got = call.d_operands[i].dimensions();
    const auto dims = call.variant_operands[operands[i]].dimensions();
    const bool on_cpu = problem.spec.arch == 0;
    bool fits = call.d_operands[i].element_type() == ffi::F32 && got.size() == 1 + dims.size();
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

Status Check(const AttentionProblem& problem, const BackwardCall& call, Pool* pool) {
  const AttentionSpec& spec = problem.spec;
  const ffi::DataType type = ToDataType(spec.dtype);
  if (spec.mla || spec.quantized() || spec.fresh_kv) {
    return Status::Error("attention's backward pass: spec: mla, kv_dtype and fresh_kv have none.");
  }
  const auto check_q = [&](const char* name, const ffi::AnyBuffer& x, int64_t dim) {
    return CheckBuffer(kOp, name, x, type, {spec.max_qo_tokens, spec.num_qo_heads, dim});
  };
  const auto check_row = [&](const char* name, const ffi::AnyBuffer& x) {
    return CheckBuffer(kOp, name, x, ffi::F32, {spec.max_qo_tokens, spec.num_qo_heads});
  };
  if (spec.paged()) JAX_ATTN_RETURN_IF_ERROR(ReadPool(kOp, spec, call.k, pool));
  JAX_ATTN_RETURN_IF_ERROR(check_q("q", call.q, spec.head_dim_qk));
  JAX_ATTN_RETURN_IF_ERROR(CheckKv(kOp, "k", spec, *pool, call.k, spec.head_dim_qk));
  JAX_ATTN_RETURN_IF_ERROR(CheckKv(kOp, "v", spec, *pool, call.v, spec.head_dim_vo));
  JAX_ATTN_RETURN_IF_ERROR(
      CheckBuffer(kOp, "plan", call.plan, ffi::S32, {MakePlanLayout(problem).num_words}));
  JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(kOp, "layer", call.layer, ffi::S32, {}));
  JAX_ATTN_RETURN_IF_ERROR(check_row("lse", call.lse));
  JAX_ATTN_RETURN_IF_ERROR(check_row("d", call.d));
  JAX_ATTN_RETURN_IF_ERROR(check_q("d_o", call.d_o, spec.head_dim_vo));
  JAX_ATTN_RETURN_IF_ERROR(check_q("d_q", call.d_q, spec.head_dim_qk));
  JAX_ATTN_RETURN_IF_ERROR(CheckKv(kOp, "d_k", spec, *pool, call.d_k, spec.head_dim_qk));
  return CheckKv(kOp, "d_v", spec, *pool, call.d_v, spec.head_dim_vo);
}

Status ReadGradient(ffi::Span<const int64_t> words, const AttentionProblem& problem,
                    VariantGradient* gradient) {
  return Prefixed(kOp, DecodeGradient(words.begin(), words.size(), problem.program, gradient));
}

// Everything between XLA's call and the work that both platforms share. params: without results.
Status Unpack(BackwardCall* call, AttentionProblem* problem, VariantGradient* gradient,
              BackwardParams* params) {
  JAX_ATTN_RETURN_IF_ERROR(TakeVariant(call));
  JAX_ATTN_RETURN_IF_ERROR(ReadProblem(kOp, call->problem, problem));
  Pool kv_pool;
  JAX_ATTN_RETURN_IF_ERROR(Check(*problem, *call, &kv_pool));
  JAX_ATTN_RETURN_IF_ERROR(ReadGradient(call->gradient, *problem, gradient));
  JAX_ATTN_RETURN_IF_ERROR(CheckVariant(*problem, *gradient, *call));
  AttentionParams& p = params->forward;
  p = MakeAttentionParams(*problem, call->plan_words());
  p.q = call->q.untyped_data();
  p.k = call->k.untyped_data();
  p.v = call->v.untyped_data();
  p.layer =
      problem->spec.paged() ? static_cast<const int32_t*>(call->layer.untyped_data()) : nullptr;
  p.num_pages = kv_pool.num_pages;
  p.num_layers = static_cast<i32>(kv_pool.num_layers);
  params->lse = static_cast<const float*>(call->lse.untyped_data());
  params->d = static_cast<const float*>(call->d.untyped_data());
  params->d_o = call->d_o.untyped_data();
  SetVariantOperands(call->variant_operands, &p);
  return CheckBuffer(kOp, "workspace", call->workspace, ffi::F32,
                     {problem->spec.arch == 0 ? BackwardSums(problem->spec, p.num_pages)
                                              : BackwardWorkspaceWords(*problem, p.num_pages)});
}

Status ExecuteCpu(ffi::ThreadPool pool, BackwardCall call) {
  AttentionProblem problem;
  BackwardParams params = {};
  VariantGradient gradient;
  JAX_ATTN_RETURN_IF_ERROR(Unpack(&call, &problem, &gradient, &params));
  const AttentionParams& p = params.forward;
  JAX_ATTN_RETURN_IF_ERROR(Prefixed(kOp, CheckPlan(problem, call.plan_words(), p.num_pages)));
  if (p.layer) JAX_ATTN_RETURN_IF_ERROR(CheckLayer(kOp, *p.layer, p.num_layers));
  PreferHugePages({call.d_q, call.d_k, call.d_v, call.workspace});
  if (call.poison) PoisonOnHost({call.d_q, call.d_k, call.d_v, call.workspace});
  BackwardResults results = {call.d_q.untyped_data(),
                             call.d_k.untyped_data(),
                             call.d_v.untyped_data(),
                             static_cast<float*>(call.workspace.untyped_data()),
                             {}};
  for (const ffi::AnyBuffer& x : call.d_operands) {
    if (call.poison) PoisonOnHost({x});
    const int64_t copies = x.dimensions()[0];
    results.operands.push_back({static_cast<float*>(x.untyped_data()), copies,
                                static_cast<int64_t>(x.element_count()) / copies});
  }
  HelperPool task_pool(pool.num_threads());
  BackwardCpu(problem, gradient, params, results, task_pool);
  return Status::Ok();
}

// stage(problem, gradient) returns a Status.
template <typename Stage>
ffi::Error RunStageWithGradient(ffi::Span<const int64_t> gradient_words,
                                ffi::Span<const int64_t> words, Stage stage) {
  return RunStage(kOp, words, [&](const AttentionProblem& problem) -> Status {
    VariantGradient gradient;
    JAX_ATTN_RETURN_IF_ERROR(ReadGradient(gradient_words, problem, &gradient));
    return stage(problem, gradient);
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

Status ExecuteCuda(CUstream_st* stream, int32_t device_ordinal, BackwardCall call) {
  AttentionProblem problem;
  BackwardParams params = {};
  VariantGradient gradient;
  JAX_ATTN_RETURN_IF_ERROR(Unpack(&call, &problem, &gradient, &params));
  if (call.poison) {
    JAX_ATTN_RETURN_IF_ERROR(
        PoisonOnDevice({call.d_q, call.d_k, call.d_v, call.workspace}, stream));
  }
  BackwardCudaParams p = MakeBackwardParams(problem, params.forward, call.plan_words(),
                                            static_cast<int32_t*>(call.workspace.untyped_data()));
  p.lse = params.lse;
  p.d = params.d;
  p.d_o = params.d_o;
  p.d_q = call.d_q.untyped_data();
  p.d_k = call.d_k.untyped_data();
  p.d_v = call.d_v.untyped_data();
  const std::vector<i32> operands = OperandsOf(gradient);
  for (size_t i = 0; i < operands.size(); ++i) {
    p.operand_sums[operands[i]] = static_cast<i64*>(call.d_operands[i].untyped_data());
    p.num_operand_elements[operands[i]] = static_cast<i64>(call.d_operands[i].element_count()) / 2;
  }
  const int64_t num_zero_words = BackwardZeroWords(problem, params.forward.num_pages);
  return LaunchBackward(problem, gradient, p, num_zero_words, stream, device_ordinal);
}

XLA_FFI_DEFINE_HANDLER(
    kExecuteCpu,
    [](ffi::ThreadPool pool, auto... bound) {
      return ToFfi(ExecuteCpu(pool, BackwardCall{bound...}));
    },
    BindCall(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));

XLA_FFI_DEFINE_HANDLER(kInstantiateCuda, InstantiateCuda,
                       BindAttributes(ffi::Ffi::BindInstantiate()));

XLA_FFI_DEFINE_HANDLER(kInitializeCuda, InitializeCuda,
                       BindAttributes(ffi::Ffi::BindInitialize().Ctx<ffi::DeviceOrdinal>()));

XLA_FFI_DEFINE_HANDLER(
    kExecuteCuda,
    [](CUstream_st* stream, int32_t device_ordinal, auto... bound) {
      return ToFfi(ExecuteCuda(stream, device_ordinal, BackwardCall{bound...}));
    },
    BindCall(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<CUstream_st*>>().Ctx<ffi::DeviceOrdinal>()),
    {ffi::Traits::kCmdBufferCompatible});

}  // namespace

const std::vector<Target> kBackwardTargets = {
    {"jax_attn_backward", "cpu", nullptr, nullptr, kExecuteCpu},
    {"jax_attn_backward", "CUDA", kInstantiateCuda, kInitializeCuda, kExecuteCuda},
};

}  // namespace jax_attn
