// jax_attn_linear_attention and its gradients: unpack, check, launch, return.
#include "cpu/linear_attention.h"

#include <algorithm>
#include <string>
#include <utility>

#include "cpu/threads/helper_pool.h"
#include "ffi/checks.h"
#include "ffi/handlers.h"
#include "ffi/state_plan.h"
#include "jit/kernels.h"
#include "select/linear.h"

namespace jax_attn {
namespace {

constexpr char kOp[] = "linear_attention";

// The operands that a call and its gradients share, in the order of their bindings. Absent operands
// are arrays of rank 1 without elements.
struct LinearOperands {
  ffi::AnyBuffer q, k, v, g, beta;
  ffi::AnyBuffer states;  // [num_slots, num_v_heads, dim_k, dim_v], or with num_layers in front
  ffi::AnyBuffer plan, layer;
};

struct LinearAttributes {
  ffi::Span<const int64_t> problem;
  float scale;
  int64_t chunks_begin;  // word of the plan
  bool poison;
};

// The pool of a call.
struct LinearPool {
  int64_t num_layers = 1, num_slots = 0;
};

Status ReadProblemOf(const LinearAttributes& attributes, LinearAttentionProblem* problem) {
  return ReadLinearProblem(attributes.problem.begin(),
                           static_cast<int64_t>(attributes.problem.size()), problem);
}

// Checks the arrays of a call without reading them.
Status CheckOperands(const LinearOperands& call, const LinearAttentionProblem& problem,
                     LinearPool* pool) {
  const LinearAttentionKernel& kernel = problem.kernel;
  const int64_t tokens = problem.max_tokens, heads = problem.num_v_heads;
  const int64_t dim_k = kernel.head_dim_k, dim_v = kernel.head_dim_v;
  const ffi::DataType type = ToDataType(kernel.dtype);
  JAX_ATTN_RETURN_IF_ERROR(
      CheckBuffer(kOp, "q", call.q, type, {tokens, problem.num_qk_heads, dim_k}));
  JAX_ATTN_RETURN_IF_ERROR(
      CheckBuffer(kOp, "k", call.k, type, {tokens, problem.num_qk_heads, dim_k}));
  JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(kOp, "v", call.v, type, {tokens, heads, dim_v}));
  if (kernel.decay == kNoDecay) {
    JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(kOp, "g", call.g, ffi::F32, {0}));
  } else {
    JAX_ATTN_RETURN_IF_ERROR(kernel.decay == kChannelDecay
                                 ? CheckBuffer(kOp, "g", call.g, ffi::F32, {tokens, heads, dim_k})
                                 : CheckBuffer(kOp, "g", call.g, ffi::F32, {tokens, heads}));
  }
  if (call.beta.dimensions().size() != 1) {
    JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(kOp, "beta", call.beta, ffi::F32, {tokens, heads}));
  }
  const auto of_states = call.states.dimensions();
  const bool is_stacked = of_states.size() == 5;
  if (of_states.size() != 4 && !is_stacked) {
    return Status::Error("linear_attention: states: expected rank 4 or 5, got " +
                         ShapeOf(call.states) + ".");
  }
  pool->num_layers = is_stacked ? of_states[0] : 1;
  pool->num_slots = of_states[is_stacked ? 1 : 0];
  const ffi::DataType of_state = kernel.bf16_states ? ffi::BF16 : ffi::F32;
  JAX_ATTN_RETURN_IF_ERROR(
      is_stacked ? CheckBuffer(kOp, "states", call.states, of_state,
                               {pool->num_layers, pool->num_slots, heads, dim_k, dim_v})
                 : CheckBuffer(kOp, "states", call.states, of_state,
                               {pool->num_slots, heads, dim_k, dim_v}));
  return CheckBuffer(kOp, "layer", call.layer, ffi::S32, {});
}

// ---- on CPUs ------------------------------------------------------------------------------------

// What a call reads and where it writes.
struct LinearProblem {
  int64_t dtype;
  int64_t layer_begin = 0;  // bytes in front of the layer's states
  LinearParams params = {};
  StatePlan plan;
};

// Checks everything but the results, and reads the plan. params has no o.
Status Unpack(const LinearOperands& call, const LinearAttributes& attributes,
              LinearProblem* unpacked) {
  LinearAttentionProblem problem;
  LinearPool pool;
  JAX_ATTN_RETURN_IF_ERROR(ReadProblemOf(attributes, &problem));
  JAX_ATTN_RETURN_IF_ERROR(CheckOperands(call, problem, &pool));
  const int64_t layer = call.layer.typed_data<int32_t>()[0];
  JAX_ATTN_RETURN_IF_ERROR(CheckLayer(kOp, static_cast<int32_t>(layer), pool.num_layers));
  const LinearAttentionKernel& kernel = problem.kernel;
  unpacked->dtype = kernel.dtype;
  const int64_t of_layer =
      pool.num_slots * problem.num_v_heads * kernel.head_dim_k * kernel.head_dim_v;
  unpacked->layer_begin = layer * of_layer * (kernel.bf16_states ? 2 : 4);
  LinearParams* const p = &unpacked->params;
  p->q = call.q.untyped_data();
  p->k = call.k.untyped_data();
  p->v = call.v.untyped_data();
  if (kernel.decay != kNoDecay) p->g = call.g.typed_data<float>();
  if (call.beta.dimensions().size() != 1) p->beta = call.beta.typed_data<float>();
  p->states = static_cast<char*>(call.states.untyped_data()) + unpacked->layer_begin;
  p->num_qk_heads = problem.num_qk_heads;
  p->num_v_heads = problem.num_v_heads;
  p->dim_k = kernel.head_dim_k;
  p->dim_v = kernel.head_dim_v;
  p->scale = attributes.scale;
  p->has_channel_decay = kernel.decay == kChannelDecay;
  p->has_delta_rule = kernel.delta_rule;
  p->has_l2_norm = kernel.l2_norm;
  p->has_bf16_states = kernel.bf16_states;
  return ReadStatePlan(kOp, call.plan, attributes.chunks_begin, problem.max_tokens, pool.num_slots,
                       &unpacked->plan);
}

// Checks that an array has the type and shape of another.
Status CheckAlike(const char* name, const ffi::AnyBuffer& array, const ffi::AnyBuffer& other) {
  const auto dims = array.dimensions(), expected = other.dimensions();
  if (array.element_type() == other.element_type() && dims.size() == expected.size() &&
      std::equal(dims.begin(), dims.end(), expected.begin())) {
    return Status::Ok();
  }
  return Status::Error(std::string("linear_attention: ") + name + ": expected " + ShapeOf(other) +
                       ", got " + ShapeOf(array) + ".");
}

// The same, and that both are in the same memory.
Status CheckInPlace(const char* name, const ffi::AnyBuffer& result, const ffi::AnyBuffer& operand) {
  JAX_ATTN_RETURN_IF_ERROR(CheckAlike(name, result, operand));
  return CheckSameMemory(kOp, name, result, operand);
}

Status ExecuteCpu(ffi::ThreadPool pool, const LinearOperands& operands, ResultBuffer o,
                  ResultBuffer states, const LinearAttributes& attributes) {
  LinearProblem problem;
  JAX_ATTN_RETURN_IF_ERROR(Unpack(operands, attributes, &problem));
  JAX_ATTN_RETURN_IF_ERROR(CheckAlike("o", o, operands.v));
  JAX_ATTN_RETURN_IF_ERROR(CheckInPlace("states", states, operands.states));
  const StatePlan& plan = problem.plan;
  if (attributes.poison || plan.is_faulty) PoisonOnHost({o});
  if (plan.is_faulty) return Status::Ok();
  problem.params.o = o.untyped_data();
  HelperPool task_pool(pool.num_threads());
  LinearAttentionCpu(problem.dtype, problem.params, plan.chunks, plan.num_chunks, task_pool);
  ZeroPaddingRows(plan, o);
  return Status::Ok();
}

// What gradients read and write besides the call's operands.
struct LinearGradientBuffers {
  ffi::AnyBuffer d_o, d_after;
  ResultBuffer d_q, d_k, d_v, d_g, d_beta, d_states;
};

Status CheckGradients(const LinearOperands& operands, const LinearGradientBuffers& gradients) {
  JAX_ATTN_RETURN_IF_ERROR(CheckAlike("d_o", gradients.d_o, operands.v));
  JAX_ATTN_RETURN_IF_ERROR(CheckAlike("d_q", gradients.d_q, operands.q));
  JAX_ATTN_RETURN_IF_ERROR(CheckAlike("d_k", gradients.d_k, operands.k));
  JAX_ATTN_RETURN_IF_ERROR(CheckAlike("d_v", gradients.d_v, operands.v));
  JAX_ATTN_RETURN_IF_ERROR(CheckAlike("d_g", gradients.d_g, operands.g));
  JAX_ATTN_RETURN_IF_ERROR(CheckAlike("d_beta", gradients.d_beta, operands.beta));
  JAX_ATTN_RETURN_IF_ERROR(CheckAlike("gradient of states", gradients.d_after, operands.states));
  return CheckAlike("d_states", gradients.d_states, gradients.d_after);
}

Status BackwardCpu(ffi::ThreadPool pool, const LinearOperands& operands,
                   const LinearGradientBuffers& gradients, const LinearAttributes& attributes) {
  LinearProblem problem;
  JAX_ATTN_RETURN_IF_ERROR(Unpack(operands, attributes, &problem));
  JAX_ATTN_RETURN_IF_ERROR(CheckGradients(operands, gradients));
  const auto& [d_o, d_after, d_q, d_k, d_v, d_g, d_beta, d_states] = gradients;
  JAX_ATTN_RETURN_IF_ERROR(CheckSameMemory(kOp, "d_states", d_states, d_after));
  const StatePlan& plan = problem.plan;
  if (attributes.poison) PoisonOnHost({d_q, d_k, d_v, d_g, d_beta});
  const LinearParams& p = problem.params;
  LinearBackwardParams grad = {p,
                               d_o.untyped_data(),
                               d_q.untyped_data(),
                               d_k.untyped_data(),
                               d_v.untyped_data(),
                               p.g ? static_cast<float*>(d_g.untyped_data()) : nullptr,
                               p.beta ? static_cast<float*>(d_beta.untyped_data()) : nullptr,
                               static_cast<char*>(d_states.untyped_data()) + problem.layer_begin};
  HelperPool task_pool(pool.num_threads());
  LinearAttentionBackwardCpu(problem.dtype, grad, plan.chunks, plan.num_chunks, task_pool);
  for (const ResultBuffer& rows : {d_q, d_k, d_v}) ZeroPaddingRows(plan, rows);
  if (grad.d_g) ZeroPaddingRows(plan, d_g);
  if (grad.d_beta) ZeroPaddingRows(plan, d_beta);
  return Status::Ok();
}

// ---- on CUDA ------------------------------------------------------------------------------------

Status InstantiateCuda(const LinearAttributes& attributes) {
  LinearAttentionProblem problem;
  JAX_ATTN_RETURN_IF_ERROR(ReadProblemOf(attributes, &problem));
  return PrepareLinearAttention(problem);
}

Status InitializeCuda(int32_t device_ordinal, const LinearAttributes& attributes) {
  LinearAttentionProblem problem;
  JAX_ATTN_RETURN_IF_ERROR(ReadProblemOf(attributes, &problem));
  return LoadLinearAttention(problem, device_ordinal);
}

// Checks the operands of a call, and sets the params but for o. states: those of the operands.
Status SetParams(const LinearOperands& call, ResultBuffer workspace,
                 const LinearAttentionLaunch& launch, const LinearAttributes& attributes,
                 const LinearAttentionProblem& problem, LinearAttentionParams* params) {
  LinearPool pool;
  JAX_ATTN_RETURN_IF_ERROR(CheckOperands(call, problem, &pool));
  JAX_ATTN_RETURN_IF_ERROR(
      CheckBuffer(kOp, "workspace", workspace, ffi::S32, {launch.workspace_words}));
  LinearAttentionParams& p = *params;
  JAX_ATTN_RETURN_IF_ERROR(SetStatePlan(kOp, call.plan, call.layer, attributes.chunks_begin,
                                        problem.max_tokens, pool.num_slots, pool.num_layers,
                                        &p.plan));
  if (p.plan.max_chunks != problem.max_chunks) {
    return Status::Error("linear_attention: plan: expected " + std::to_string(problem.max_chunks) +
                         " chunks, got " + std::to_string(p.plan.max_chunks) + ".");
  }
  p.q = call.q.untyped_data();
  p.k = call.k.untyped_data();
  p.v = call.v.untyped_data();
  if (problem.kernel.decay != kNoDecay) p.g = call.g.typed_data<float>();
  if (call.beta.dimensions().size() != 1) p.beta = call.beta.typed_data<float>();
  p.states = call.states.untyped_data();
  p.scale = attributes.scale;
  p.num_qk_heads = static_cast<i32>(problem.num_qk_heads);
  p.num_v_heads = static_cast<i32>(problem.num_v_heads);
  p.segment_chunks = static_cast<i32>(launch.segment_chunks);
  p.workspace = workspace.untyped_data();
  return Status::Ok();
}

Status ExecuteCuda(CUstream_st* stream, int32_t device_ordinal, const LinearOperands& call,
                   ResultBuffer o, ResultBuffer states, ResultBuffer workspace,
                   const LinearAttributes& attributes) {
  LinearAttentionProblem problem;
  LinearAttentionParams p = {};
  JAX_ATTN_RETURN_IF_ERROR(ReadProblemOf(attributes, &problem));
  JAX_ATTN_RETURN_IF_ERROR(
      SetParams(call, workspace, SizeLinearAttention(problem), attributes, problem, &p));
  JAX_ATTN_RETURN_IF_ERROR(CheckAlike("o", o, call.v));
  JAX_ATTN_RETURN_IF_ERROR(CheckAlike("states", states, call.states));
  p.states = states.untyped_data();
  p.o = o.untyped_data();
  if (attributes.poison) JAX_ATTN_RETURN_IF_ERROR(PoisonOnDevice({o, workspace}, stream));
  JAX_ATTN_RETURN_IF_ERROR(CopyToResult(call.states, states, stream));
  return LaunchLinearAttention(problem, p, stream, device_ordinal);
}

Status RequireGradient(const LinearAttentionProblem& problem) {
  if (!LinearGradientKernels(problem).empty()) return Status::Ok();
  return Status::Error(
      "linear_attention: gradients: expected a call that has kernels of gradients on this GPU, got"
      " another one.");
}

Status InstantiateBackwardCuda(const LinearAttributes& attributes) {
  LinearAttentionProblem problem;
  JAX_ATTN_RETURN_IF_ERROR(ReadProblemOf(attributes, &problem));
  JAX_ATTN_RETURN_IF_ERROR(RequireGradient(problem));
  return PrepareLinearGradient(problem);
}

Status InitializeBackwardCuda(int32_t device_ordinal, const LinearAttributes& attributes) {
  LinearAttentionProblem problem;
  JAX_ATTN_RETURN_IF_ERROR(ReadProblemOf(attributes, &problem));
  return LoadLinearGradient(problem, device_ordinal);
}

Status BackwardCuda(CUstream_st* stream, int32_t device_ordinal, const LinearOperands& call,
                    const LinearGradientBuffers& gradients, ResultBuffer workspace,
                    const LinearAttributes& attributes) {
  LinearAttentionProblem problem;
  LinearGradientParams p = {};
  JAX_ATTN_RETURN_IF_ERROR(ReadProblemOf(attributes, &problem));
  JAX_ATTN_RETURN_IF_ERROR(RequireGradient(problem));
  JAX_ATTN_RETURN_IF_ERROR(
      SetParams(call, workspace, SizeLinearGradient(problem), attributes, problem, &p.forward));
  JAX_ATTN_RETURN_IF_ERROR(CheckGradients(call, gradients));
  const auto& [d_o, d_after, d_q, d_k, d_v, d_g, d_beta, d_states] = gradients;
  p.d_o = d_o.untyped_data();
  p.d_q = d_q.untyped_data();
  p.d_k = d_k.untyped_data();
  p.d_v = d_v.untyped_data();
  if (p.forward.g) p.d_g = static_cast<float*>(d_g.untyped_data());
  if (p.forward.beta) p.d_beta = static_cast<float*>(d_beta.untyped_data());
  p.d_states = d_states.untyped_data();
  if (attributes.poison) {
    JAX_ATTN_RETURN_IF_ERROR(PoisonOnDevice({d_q, d_k, d_v, d_g, d_beta, workspace}, stream));
  }
  JAX_ATTN_RETURN_IF_ERROR(CopyToResult(d_after, d_states, stream));
  return LaunchLinearGradient(problem, p, stream, device_ordinal);
}

template <typename Binding>
auto BindOperands(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()   // q
      .template Arg<ffi::AnyBuffer>()   // k
      .template Arg<ffi::AnyBuffer>()   // v
      .template Arg<ffi::AnyBuffer>()   // g
      .template Arg<ffi::AnyBuffer>()   // beta
      .template Arg<ffi::AnyBuffer>()   // states
      .template Arg<ffi::AnyBuffer>()   // plan
      .template Arg<ffi::AnyBuffer>();  // layer
}
template <typename Binding>
auto BindResults(Binding binding) {
  return std::move(binding)
      .template Ret<ffi::AnyBuffer>()   // o
      .template Ret<ffi::AnyBuffer>()   // states
      .template Ret<ffi::AnyBuffer>();  // workspace; on CPUs without elements
}
template <typename Binding>
auto BindAttributes(Binding binding) {
  return std::move(binding)
      .template Attr<ffi::Span<const int64_t>>("problem")
      .template Attr<float>("scale")
      .template Attr<int64_t>("chunks_begin")
      .template Attr<bool>("poison");
}

using Buffer = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;

XLA_FFI_DEFINE_HANDLER(
    kExecuteCpu,
    [](ffi::ThreadPool pool, Buffer q, Buffer k, Buffer v, Buffer g, Buffer beta, Buffer states,
       Buffer plan, Buffer layer, Result o, Result after, Result, auto... attributes) {
      return ToFfi(
          ExecuteCpu(pool, {q, k, v, g, beta, states, plan, layer}, o, after, {attributes...}));
    },
    BindAttributes(BindResults(BindOperands(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()))));

XLA_FFI_DEFINE_HANDLER(
    kInstantiateCuda, [](auto... attributes) { return ToFfi(InstantiateCuda({attributes...})); },
    BindAttributes(ffi::Ffi::BindInstantiate()));
XLA_FFI_DEFINE_HANDLER(
    kInitializeCuda,
    [](int32_t device_ordinal, auto... attributes) {
      return ToFfi(InitializeCuda(device_ordinal, {attributes...}));
    },
    BindAttributes(ffi::Ffi::BindInitialize().Ctx<ffi::DeviceOrdinal>()));
XLA_FFI_DEFINE_HANDLER(
    kExecuteCuda,
    [](CUstream_st* stream, int32_t device_ordinal, Buffer q, Buffer k, Buffer v, Buffer g,
       Buffer beta, Buffer states, Buffer plan, Buffer layer, Result o, Result after,
       Result workspace, auto... attributes) {
      return ToFfi(ExecuteCuda(stream, device_ordinal, {q, k, v, g, beta, states, plan, layer}, o,
                               after, workspace, {attributes...}));
    },
    BindAttributes(BindResults(BindOperands(
        ffi::Ffi::Bind().Ctx<ffi::PlatformStream<CUstream_st*>>().Ctx<ffi::DeviceOrdinal>()))),
    {ffi::Traits::kCmdBufferCompatible});

template <typename Binding>
auto BindGradients(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()   // d_o
      .template Arg<ffi::AnyBuffer>()   // gradient of the states after the call
      .template Ret<ffi::AnyBuffer>()   // d_q
      .template Ret<ffi::AnyBuffer>()   // d_k
      .template Ret<ffi::AnyBuffer>()   // d_v
      .template Ret<ffi::AnyBuffer>()   // d_g
      .template Ret<ffi::AnyBuffer>()   // d_beta
      .template Ret<ffi::AnyBuffer>()   // d_states
      .template Ret<ffi::AnyBuffer>();  // workspace, as of a call
}

XLA_FFI_DEFINE_HANDLER(
    kBackwardCpu,
    [](ffi::ThreadPool pool, Buffer q, Buffer k, Buffer v, Buffer g, Buffer beta, Buffer states,
       Buffer plan, Buffer layer, Buffer d_o, Buffer d_after, Result d_q, Result d_k, Result d_v,
       Result d_g, Result d_beta, Result d_states, Result, auto... attributes) {
      return ToFfi(BackwardCpu(pool, {q, k, v, g, beta, states, plan, layer},
                               {d_o, d_after, d_q, d_k, d_v, d_g, d_beta, d_states},
                               {attributes...}));
    },
    BindAttributes(BindGradients(BindOperands(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()))));

XLA_FFI_DEFINE_HANDLER(
    kInstantiateBackwardCuda,
    [](auto... attributes) { return ToFfi(InstantiateBackwardCuda({attributes...})); },
    BindAttributes(ffi::Ffi::BindInstantiate()));
XLA_FFI_DEFINE_HANDLER(
    kInitializeBackwardCuda,
    [](int32_t device_ordinal, auto... attributes) {
      return ToFfi(InitializeBackwardCuda(device_ordinal, {attributes...}));
    },
    BindAttributes(ffi::Ffi::BindInitialize().Ctx<ffi::DeviceOrdinal>()));
XLA_FFI_DEFINE_HANDLER(
    kBackwardCuda,
    [](CUstream_st* stream, int32_t device_ordinal, Buffer q, Buffer k, Buffer v, Buffer g,
       Buffer beta, Buffer states, Buffer plan, Buffer layer, Buffer d_o, Buffer d_after,
       Result d_q, Result d_k, Result d_v, Result d_g, Result d_beta, Result d_states,
       Result workspace, auto... attributes) {
      return ToFfi(BackwardCuda(stream, device_ordinal, {q, k, v, g, beta, states, plan, layer},
                                {d_o, d_after, d_q, d_k, d_v, d_g, d_beta, d_states}, workspace,
                                {attributes...}));
    },
    BindAttributes(BindGradients(BindOperands(
        ffi::Ffi::Bind().Ctx<ffi::PlatformStream<CUstream_st*>>().Ctx<ffi::DeviceOrdinal>()))),
    {ffi::Traits::kCmdBufferCompatible});

}  // namespace

const std::vector<Target> kLinearAttentionTargets = {
    {"jax_attn_linear_attention", "cpu", nullptr, nullptr, kExecuteCpu},
    {"jax_attn_linear_attention", "CUDA", kInstantiateCuda, kInitializeCuda, kExecuteCuda},
    {"jax_attn_linear_attention_backward", "cpu", nullptr, nullptr, kBackwardCpu},
    {"jax_attn_linear_attention_backward", "CUDA", kInstantiateBackwardCuda,
     kInitializeBackwardCuda, kBackwardCuda},
};

}  // namespace jax_attn
