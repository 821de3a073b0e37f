// jax_attn_attention: unpack, check, launch, return.
#include "cpu/attention.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "cpu/threads/helper_pool.h"
#include "ffi/checks.h"
#include "ffi/handlers.h"
#include "jit/kernels.h"
#include "plan/check.h"
#include "plan/plan.h"
#include "plan/rules/integers.h"

namespace jax_attn {
namespace {

constexpr char kOp[] = "attention";

// The operands, results and attributes of one call, as in jax_attn/_xla/attention_operands.py.
struct AttentionCall {
  // In the order of BindCall.
  ffi::AnyBuffer q, k, v, plan, layer;
  ffi::RemainingArgs optional;
  ResultBuffer o, lse, workspace;
  ffi::Span<const int64_t> problem;
  bool poison;

  // In the order in which TakeOptional finds them in `optional`.
  std::optional<ffi::AnyBuffer> k_new = {}, v_new = {};  // with fresh_kv
  std::optional<ffi::AnyBuffer> sinks = {};
  std::optional<ffi::AnyBuffer> q_scale = {}, k_scale = {}, v_scale = {};  // of formats with them
  std::vector<ffi::AnyBuffer> variant_operands = {};

  const int32_t* plan_words() const { return static_cast<const int32_t*>(plan.untyped_data()); }
};

// Binds what follows the contexts of a platform.
template <typename Binding>
auto BindCall(Binding binding) {
  return BindProblem(std::move(binding)
                         .template Arg<ffi::AnyBuffer>()    // q
                         .template Arg<ffi::AnyBuffer>()    // k
                         .template Arg<ffi::AnyBuffer>()    // v
                         .template Arg<ffi::AnyBuffer>()    // plan
                         .template Arg<ffi::AnyBuffer>()    // layer
                         .RemainingArgs()                   // optional
                         .template Ret<ffi::AnyBuffer>()    // o
                         .template Ret<ffi::AnyBuffer>()    // lse
                         .template Ret<ffi::AnyBuffer>());  // workspace
}

// Optional operands: k_new and v_new with fresh_kv, then perhaps sinks. With scales of heads: sinks
// and the scales, where arrays without elements stand for absent ones. Then, in the same way, the
// operands of a variant.
Status TakeOptional(const AttentionProblem& problem, AttentionCall* call) {
  const AttentionSpec& spec = problem.spec;
  size_t next = 0;
  const auto take = [&](std::optional<ffi::AnyBuffer>* to) {
    if (const auto buffer = call->optional.get<ffi::AnyBuffer>(next); buffer.has_value()) {
      *to = *buffer;
      ++next;
    }
  };
  if (spec.fresh_kv) {
    take(&call->k_new);
    take(&call->v_new);
  }
  take(&call->sinks);
  if (FormatOf(spec.kv_format).has_head_scale) {
    take(&call->q_scale);
    take(&call->k_scale);
    take(&call->v_scale);
  }
  const auto num_operands = static_cast<size_t>(problem.program.num_operands);
  for (size_t i = 0; i < num_operands; ++i) {
    std::optional<ffi::AnyBuffer> operand;
    take(&operand);
    if (operand) call->variant_operands.push_back(*operand);
  }
  if (next == call->optional.size() && call->variant_operands.size() == num_operands &&
      call->k_new.has_value() == (spec.fresh_kv != 0) &&
      call->v_new.has_value() == (spec.fresh_kv != 0)) {
    return Status::Ok();
  }
  return Status::Error(
      "attention: operands: expected q, k, v, plan, layer, with fresh_kv k_new and v_new, perhaps "
      "sinks, with scales of heads these, and those of a variant, got " +
      std::to_string(call->optional.size()) + " after layer.");
}

// Rows of the cache are i32 in a variant's program.
bool ReadsKvRows(const VariantProgram& program) {
  for (i32 i = 0; i < program.num_instructions; ++i) {
    if (program.instructions[i].op == kOpKvRow) return true;
  }
  return false;
}

Status Check(const AttentionProblem& problem, const AttentionCall& call, Pool* pool) {
  const AttentionSpec& spec = problem.spec;
  const ffi::DataType type = ToDataType(spec.dtype);
  const int64_t tokens = spec.max_qo_tokens;
  JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(kOp, "q", call.q, ToDataType(spec.dtype, spec.q_format),
                                       {tokens, spec.num_qo_heads, spec.head_dim_qk}));
  if (spec.paged()) JAX_ATTN_RETURN_IF_ERROR(ReadPool(kOp, spec, call.k, pool));
  JAX_ATTN_RETURN_IF_ERROR(CheckKv(kOp, "k", spec, *pool, call.k, spec.head_dim_qk));
  JAX_ATTN_RETURN_IF_ERROR(  // mla: v is k
      CheckKv(kOp, "v", spec, *pool, call.v, spec.mla ? spec.head_dim_qk : spec.head_dim_vo));
  JAX_ATTN_RETURN_IF_ERROR(
      CheckBuffer(kOp, "plan", call.plan, ffi::S32, {MakePlanLayout(problem).num_words}));
  JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(kOp, "layer", call.layer, ffi::S32, {}));
  JAX_ATTN_RETURN_IF_ERROR(CheckFloats(kOp, "sinks", call.sinks, spec.num_qo_heads));
  if (call.k_new) {
    JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(kOp, "k_new", *call.k_new, type,
                                         {tokens, spec.num_kv_heads, spec.head_dim_qk}));
  }
  if (call.v_new) {
    JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(kOp, "v_new", *call.v_new, type,
                                         {tokens, spec.num_kv_heads, spec.head_dim_vo}));
  }
  JAX_ATTN_RETURN_IF_ERROR(CheckFloats(kOp, "q_scale", call.q_scale, spec.num_qo_heads));
  JAX_ATTN_RETURN_IF_ERROR(CheckFloats(kOp, "k_scale", call.k_scale, spec.num_stored_heads()));
  JAX_ATTN_RETURN_IF_ERROR(
      CheckFloats(kOp, "v_scale", call.v_scale, spec.mla ? 0 : spec.num_kv_heads));
  JAX_ATTN_RETURN_IF_ERROR(
      CheckBuffer(kOp, "o", call.o, type, {tokens, spec.num_qo_heads, spec.head_dim_vo}));
  JAX_ATTN_RETURN_IF_ERROR(
      CheckBuffer(kOp, "lse", call.lse, ffi::F32, {tokens, spec.num_qo_heads}));
  JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(kOp, "workspace", call.workspace, ffi::S32,
                                       {MakeWorkspaceLayout(problem).num_words}));
  if (FloatsOf(call.sinks) && problem.program.present && !problem.program.normalizes) {
    return Status::Error("attention: sinks: expected none with a variant without softmax.");
  }
  if (ReadsKvRows(problem.program) &&
      pool->num_pages * std::max<int64_t>(spec.page_size, 1) > kMaxInt32) {
    return Status::Error(
        "attention: k_pages: expected at most 2^31 - 1 token slots a layer with a variant that "
        "reads kv_row, got " +
        std::to_string(pool->num_pages * spec.page_size) + ".");
  }
  return CheckVariantOperands(kOp, problem.program, call.variant_operands);
}

AttentionParams MakeParams(const AttentionProblem& problem, const AttentionCall& call,
                           const Pool& pool) {
  const AttentionSpec& spec = problem.spec;
  const WorkspaceLayout workspace = MakeWorkspaceLayout(problem);
  auto* workspace_words = static_cast<int32_t*>(call.workspace.untyped_data());
  AttentionParams p = MakeAttentionParams(problem, call.plan_words());
  p.q = call.q.untyped_data();
  p.k = call.k.untyped_data();
  p.v = call.v.untyped_data();
  p.sinks = FloatsOf(call.sinks);
  p.q_scale = FloatsOf(call.q_scale);
  p.k_scale = FloatsOf(call.k_scale);
  p.v_scale = spec.mla ? p.k_scale : FloatsOf(call.v_scale);
  p.layer = spec.paged() ? static_cast<const int32_t*>(call.layer.untyped_data()) : nullptr;
  p.o = call.o.untyped_data();
  p.lse = static_cast<float*>(call.lse.untyped_data());
  p.merge_counters = workspace_words + workspace.merge_counters;
  p.partial_states = reinterpret_cast<RowState*>(workspace_words + workspace.partial_states);
  p.partial_o = reinterpret_cast<float*>(workspace_words + workspace.partial_o);
  if (problem.config.record_times) {
    p.item_times = reinterpret_cast<i64*>(workspace_words + workspace.item_times);
  }
  if (call.k_new) {
    p.k_new = call.k_new->untyped_data();
    p.v_new = call.v_new->untyped_data();
  }
  p.num_pages = pool.num_pages;
  p.num_layers = static_cast<i32>(pool.num_layers);
  SetVariantOperands(call.variant_operands, &p);
  return p;
}

// Everything between XLA's call and the launch that both platforms share.
Status Unpack(AttentionCall* call, AttentionProblem* problem, AttentionParams* params) {
  JAX_ATTN_RETURN_IF_ERROR(ReadProblem(kOp, call->problem, problem));
  JAX_ATTN_RETURN_IF_ERROR(TakeOptional(*problem, call));
  Pool kv_pool;
  JAX_ATTN_RETURN_IF_ERROR(Check(*problem, *call, &kv_pool));
  *params = MakeParams(*problem, *call, kv_pool);
  return Status::Ok();
}

Status ExecuteCpu(ffi::ThreadPool pool, AttentionCall call) {
  AttentionProblem problem;
  AttentionParams params;
  JAX_ATTN_RETURN_IF_ERROR(Unpack(&call, &problem, &params));
  // Always checked, so that no buffer can crash the process: it takes less than a hundredth of the
  // call.
  JAX_ATTN_RETURN_IF_ERROR(Prefixed(kOp, CheckPlan(problem, call.plan_words(), params.num_pages)));
  if (params.layer) {
    JAX_ATTN_RETURN_IF_ERROR(CheckLayer(kOp, *params.layer, params.num_layers));
  }
  PreferHugePages({call.o, call.lse, call.workspace});
  if (call.poison) PoisonOnHost({call.o, call.lse, call.workspace});
  HelperPool task_pool(pool.num_threads());
  AttentionCpu(problem, params, task_pool);
  return Status::Ok();
}

ffi::Error InstantiateCuda(ffi::Span<const int64_t> words, bool) {
  return RunStage(kOp, words, [](const AttentionProblem& p) { return PrepareAttention(p); });
}

ffi::Error InitializeCuda(int32_t device, ffi::Span<const int64_t> words, bool) {
  return RunStage(kOp, words, [=](const AttentionProblem& p) { return LoadAttention(p, device); });
}

Status ExecuteCuda(CUstream_st* stream, int32_t device_ordinal, AttentionCall call) {
  AttentionProblem problem;
  AttentionParams params;
  JAX_ATTN_RETURN_IF_ERROR(Unpack(&call, &problem, &params));
  if (call.poison) {
    JAX_ATTN_RETURN_IF_ERROR(PoisonOnDevice({call.o, call.lse, call.workspace}, stream));
  }
  return LaunchAttention(problem, params, stream, device_ordinal);
}

XLA_FFI_DEFINE_HANDLER(
    kExecuteCpu,
    [](ffi::ThreadPool pool, auto... bound) {
      return ToFfi(ExecuteCpu(pool, AttentionCall{bound...}));
    },
    BindCall(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));

XLA_FFI_DEFINE_HANDLER(kInstantiateCuda, InstantiateCuda, BindProblem(ffi::Ffi::BindInstantiate()));

XLA_FFI_DEFINE_HANDLER(kInitializeCuda, InitializeCuda,
                       BindProblem(ffi::Ffi::BindInitialize().Ctx<ffi::DeviceOrdinal>()));

XLA_FFI_DEFINE_HANDLER(
    kExecuteCuda,
    [](CUstream_st* stream, int32_t device_ordinal, auto... bound) {
      return ToFfi(ExecuteCuda(stream, device_ordinal, AttentionCall{bound...}));
    },
    BindCall(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<CUstream_st*>>().Ctx<ffi::DeviceOrdinal>()),
    {ffi::Traits::kCmdBufferCompatible});

}  // namespace

const std::vector<Target> kAttentionTargets = {
    {"jax_attn_attention", "cpu", nullptr, nullptr, kExecuteCpu},
    {"jax_attn_attention", "CUDA", kInstantiateCuda, kInitializeCuda, kExecuteCuda},
};

}  // namespace jax_attn
