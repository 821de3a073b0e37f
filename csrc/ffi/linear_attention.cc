// jax_attn_linear_attention: unpack, check, launch, return. CPUs only.
#include "cpu/linear_attention.h"

#include <algorithm>
#include <string>
#include <utility>

#include "cpu/threads/helper_pool.h"
#include "ffi/checks.h"
#include "ffi/handlers.h"
#include "ffi/state_plan.h"

namespace jax_attn {
namespace {

constexpr char kOp[] = "linear_attention";
constexpr int64_t kMaxHeadDim = 256;

// The operands that a call and its gradients share, in the order of their bindings. Absent operands
// are arrays of rank 1 without elements.
struct LinearOperands {
  ffi::AnyBuffer q, k, v, g, beta;
  ffi::AnyBuffer states;  // [num_slots, num_v_heads, dim_k, dim_v], or with num_layers in front
  ffi::AnyBuffer plan, layer;
};

struct LinearAttributes {
  bool has_delta_rule, has_l2_norm;
  float scale;
  int64_t chunks_begin;  // word of the plan
  bool poison;
};

// What a call reads and where it writes.
struct LinearProblem {
  int64_t dtype, tokens, slots;
  int64_t layer_begin = 0;  // bytes in front of the layer's states
  LinearParams params = {};
  StatePlan plan;
};

// Checks everything but the results, and reads the plan. params has no o.
Status Unpack(const LinearOperands& call, const LinearAttributes& attributes,
              LinearProblem* problem) {
  LinearParams* const p = &problem->params;
  const ffi::DataType type = call.q.element_type();
  problem->dtype = type == ffi::BF16 ? kBF16 : type == ffi::F16 ? kF16 : kF32;
  const auto of_q = call.q.dimensions(), of_v = call.v.dimensions();
  const auto of_states = call.states.dimensions();
  const bool is_stacked = of_states.size() == 5;
  if (of_q.size() != 3 || of_v.size() != 3 || (of_states.size() != 4 && !is_stacked)) {
    return Status::Error("linear_attention: q, v, states: expected rank 3, 3, and 4 or 5, got " +
                         ShapeOf(call.q) + ", " + ShapeOf(call.v) + " and " + ShapeOf(call.states) +
                         ".");
  }
  problem->tokens = of_q[0];
  p->num_qk_heads = of_q[1];
  p->dim_k = of_q[2];
  p->num_v_heads = of_v[1];
  p->dim_v = of_v[2];
  problem->slots = of_states[is_stacked ? 1 : 0];
  for (const int64_t dim : {p->dim_k, p->dim_v}) {
    if (dim < 8 || dim > kMaxHeadDim || dim % 8 != 0) {
      return Status::Error("linear_attention: head_dim: expected multiples of 8 up to 256, got " +
                           std::to_string(dim) + ".");
    }
  }
  if (p->num_qk_heads < 1 || p->num_v_heads < 1 || p->num_v_heads % p->num_qk_heads != 0) {
    return Status::Error("linear_attention: v: expected a multiple of q's " +
                         std::to_string(p->num_qk_heads) + " heads, got " +
                         std::to_string(p->num_v_heads) + ".");
  }
  const ffi::DataType expected = ToDataType(problem->dtype);
  JAX_ATTN_RETURN_IF_ERROR(
      CheckBuffer(kOp, "q", call.q, expected, {problem->tokens, p->num_qk_heads, p->dim_k}));
  JAX_ATTN_RETURN_IF_ERROR(
      CheckBuffer(kOp, "k", call.k, expected, {problem->tokens, p->num_qk_heads, p->dim_k}));
  JAX_ATTN_RETURN_IF_ERROR(
      CheckBuffer(kOp, "v", call.v, expected, {problem->tokens, p->num_v_heads, p->dim_v}));
  const size_t rank = call.g.dimensions().size();
  p->has_channel_decay = rank == 3;
  if (rank == 3) {
    JAX_ATTN_RETURN_IF_ERROR(
        CheckBuffer(kOp, "g", call.g, ffi::F32, {problem->tokens, p->num_v_heads, p->dim_k}));
  } else if (rank != 1) {
    JAX_ATTN_RETURN_IF_ERROR(
        CheckBuffer(kOp, "g", call.g, ffi::F32, {problem->tokens, p->num_v_heads}));
  }
  if (rank != 1) p->g = call.g.typed_data<float>();
  if (call.beta.dimensions().size() != 1) {
    JAX_ATTN_RETURN_IF_ERROR(
        CheckBuffer(kOp, "beta", call.beta, ffi::F32, {problem->tokens, p->num_v_heads}));
    p->beta = call.beta.typed_data<float>();
  }
  p->has_bf16_states = call.states.element_type() == ffi::BF16;
  const ffi::DataType of_state = p->has_bf16_states ? ffi::BF16 : ffi::F32;
  const int64_t layers = is_stacked ? of_states[0] : 1;
  JAX_ATTN_RETURN_IF_ERROR(
      is_stacked ? CheckBuffer(kOp, "states", call.states, of_state,
                               {layers, problem->slots, p->num_v_heads, p->dim_k, p->dim_v})
                 : CheckBuffer(kOp, "states", call.states, of_state,
                               {problem->slots, p->num_v_heads, p->dim_k, p->dim_v}));
  JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(kOp, "layer", call.layer, ffi::S32, {}));
  const int64_t layer = call.layer.typed_data<int32_t>()[0];
  if (layer < 0 || layer >= layers) {
    return Status::Error("linear_attention: layer: expected 0 to " + std::to_string(layers - 1) +
                         ", got " + std::to_string(layer) + ".");
  }
  const int64_t of_layer = problem->slots * p->num_v_heads * p->dim_k * p->dim_v;
  problem->layer_begin = layer * of_layer * (p->has_bf16_states ? 2 : 4);
  p->states = static_cast<char*>(call.states.untyped_data()) + problem->layer_begin;
  p->q = call.q.untyped_data();
  p->k = call.k.untyped_data();
  p->v = call.v.untyped_data();
  p->scale = attributes.scale;
  p->has_delta_rule = attributes.has_delta_rule;
  p->has_l2_norm = attributes.has_l2_norm;
  return ReadStatePlan(kOp, call.plan, attributes.chunks_begin, problem->tokens, problem->slots,
                       &problem->plan);
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
  if (operand.size_bytes() == 0 || result.untyped_data() == operand.untyped_data()) {
    return Status::Ok();
  }
  return Status::Error(std::string("linear_attention: ") + name +
                       ": expected the memory of the operand, got other memory.");
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

Status BackwardCpu(ffi::ThreadPool pool, const LinearOperands& operands, ffi::AnyBuffer d_o,
                   ffi::AnyBuffer d_after, ResultBuffer d_q, ResultBuffer d_k, ResultBuffer d_v,
                   ResultBuffer d_g, ResultBuffer d_beta, ResultBuffer d_states,
                   const LinearAttributes& attributes) {
  LinearProblem problem;
  JAX_ATTN_RETURN_IF_ERROR(Unpack(operands, attributes, &problem));
  JAX_ATTN_RETURN_IF_ERROR(CheckAlike("d_o", d_o, operands.v));
  JAX_ATTN_RETURN_IF_ERROR(CheckAlike("d_q", d_q, operands.q));
  JAX_ATTN_RETURN_IF_ERROR(CheckAlike("d_k", d_k, operands.k));
  JAX_ATTN_RETURN_IF_ERROR(CheckAlike("d_v", d_v, operands.v));
  JAX_ATTN_RETURN_IF_ERROR(CheckAlike("d_g", d_g, operands.g));
  JAX_ATTN_RETURN_IF_ERROR(CheckAlike("d_beta", d_beta, operands.beta));
  JAX_ATTN_RETURN_IF_ERROR(CheckAlike("gradient of states", d_after, operands.states));
  JAX_ATTN_RETURN_IF_ERROR(CheckInPlace("d_states", d_states, d_after));
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
auto BindAttributes(Binding binding) {
  return std::move(binding)
      .template Attr<bool>("delta_rule")
      .template Attr<bool>("l2_norm")
      .template Attr<float>("scale")
      .template Attr<int64_t>("chunks_begin")
      .template Attr<bool>("poison");
}

using Buffer = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;

XLA_FFI_DEFINE_HANDLER(
    kExecuteCpu,
    [](ffi::ThreadPool pool, Buffer q, Buffer k, Buffer v, Buffer g, Buffer beta, Buffer states,
       Buffer plan, Buffer layer, Result o, Result after, auto... attributes) {
      return ToFfi(
          ExecuteCpu(pool, {q, k, v, g, beta, states, plan, layer}, o, after, {attributes...}));
    },
    BindAttributes(BindOperands(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>())
                       .Ret<ffi::AnyBuffer>()     // o
                       .Ret<ffi::AnyBuffer>()));  // states

XLA_FFI_DEFINE_HANDLER(
    kBackwardCpu,
    [](ffi::ThreadPool pool, Buffer q, Buffer k, Buffer v, Buffer g, Buffer beta, Buffer states,
       Buffer plan, Buffer layer, Buffer d_o, Buffer d_after, Result d_q, Result d_k, Result d_v,
       Result d_g, Result d_beta, Result d_states, auto... attributes) {
      return ToFfi(BackwardCpu(pool, {q, k, v, g, beta, states, plan, layer}, d_o, d_after, d_q,
                               d_k, d_v, d_g, d_beta, d_states, {attributes...}));
    },
    BindAttributes(BindOperands(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>())
                       .Arg<ffi::AnyBuffer>()     // d_o
                       .Arg<ffi::AnyBuffer>()     // gradient of the states after the call
                       .Ret<ffi::AnyBuffer>()     // d_q
                       .Ret<ffi::AnyBuffer>()     // d_k
                       .Ret<ffi::AnyBuffer>()     // d_v
                       .Ret<ffi::AnyBuffer>()     // d_g
                       .Ret<ffi::AnyBuffer>()     // d_beta
                       .Ret<ffi::AnyBuffer>()));  // d_states

}  // namespace

const std::vector<Target> kLinearAttentionTargets = {
    {"jax_attn_linear_attention", "cpu", nullptr, nullptr, kExecuteCpu},
    {"jax_attn_linear_attention_backward", "cpu", nullptr, nullptr, kBackwardCpu},
};

}  // namespace jax_attn
