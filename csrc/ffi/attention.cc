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

struct AttentionBuffers {
  ffi::AnyBuffer q, k, v, plan, layer;
  std::optional<ffi::AnyBuffer> sinks;
  std::optional<ffi::AnyBuffer> k_new, v_new;               // with fresh_kv
  std::optional<ffi::AnyBuffer> q_scale, k_scale, v_scale;  // of formats with them
  std::vector<ffi::AnyBuffer> variant_operands;
  ffi::AnyBuffer o, lse, workspace;
};

// k or v: of a pool, or ragged [max_kv_tokens, num_kv_heads, head_dim].
Status CheckKv(const AttentionSpec& spec, const char* name, const ffi::AnyBuffer& kv,
               int64_t head_dim, const Pool& pool) {
  if (spec.paged()) return CheckPages(kOp, name, spec, pool, kv, head_dim);
  return CheckBuffer(kOp, name, kv, ToDataType(spec.dtype, spec.kv_format),
                     {spec.max_kv_tokens, spec.num_stored_heads(), head_dim});
}

// Rows of the cache are i32 in a program.
bool ReadsKvRows(const VariantProgram& program) {
  for (i32 i = 0; i < program.num_instructions; ++i) {
    if (program.instructions[i].op == kOpKvRow) return true;
  }
  return false;
}

Status Check(const AttentionProblem& problem, const AttentionBuffers& b, Pool* pool) {
  const AttentionSpec& spec = problem.spec;
  const ffi::DataType type = ToDataType(spec.dtype);
  const int64_t plan_words = MakePlanLayout(problem).num_words;
  const int64_t workspace_words = MakeWorkspaceLayout(problem).num_words;
  Status s = CheckBuffer(kOp, "q", b.q, ToDataType(spec.dtype, spec.q_format),
                         {spec.max_qo_tokens, spec.num_qo_heads, spec.head_dim_qk});
  if (s.ok() && spec.paged()) s = ReadPool(kOp, spec, b.k, pool);
  if (s.ok()) s = CheckKv(spec, "k", b.k, spec.head_dim_qk, *pool);
  if (s.ok()) {  // mla: k again
    s = CheckKv(spec, "v", b.v, spec.mla ? spec.head_dim_qk : spec.head_dim_vo, *pool);
  }
  if (s.ok()) s = CheckBuffer(kOp, "plan", b.plan, ffi::S32, {plan_words});
  if (s.ok()) s = CheckBuffer(kOp, "layer", b.layer, ffi::S32, {});
  if (s.ok()) s = CheckFloats(kOp, "sinks", b.sinks, spec.num_qo_heads);
  if (s.ok() && b.k_new) {
    s = CheckBuffer(kOp, "k_new", *b.k_new, type,
                    {spec.max_qo_tokens, spec.num_kv_heads, spec.head_dim_qk});
  }
  if (s.ok() && b.v_new) {
    s = CheckBuffer(kOp, "v_new", *b.v_new, type,
                    {spec.max_qo_tokens, spec.num_kv_heads, spec.head_dim_vo});
  }
  if (s.ok()) s = CheckFloats(kOp, "q_scale", b.q_scale, spec.num_qo_heads);
  if (s.ok()) s = CheckFloats(kOp, "k_scale", b.k_scale, spec.num_stored_heads());
  if (s.ok()) s = CheckFloats(kOp, "v_scale", b.v_scale, spec.mla ? 0 : spec.num_kv_heads);
  if (s.ok()) {
    s = CheckBuffer(kOp, "o", b.o, type, {spec.max_qo_tokens, spec.num_qo_heads, spec.head_dim_vo});
  }
  if (s.ok()) {
    s = CheckBuffer(kOp, "lse", b.lse, ffi::F32, {spec.max_qo_tokens, spec.num_qo_heads});
  }
  if (s.ok()) s = CheckBuffer(kOp, "workspace", b.workspace, ffi::S32, {workspace_words});
  if (s.ok() && FloatsOf(b.sinks) && problem.program.present && !problem.program.normalizes) {
    return Status::Error("attention: sinks: expected none with a variant without softmax.");
  }
  if (s.ok() && ReadsKvRows(problem.program) &&
      pool->num_pages * std::max<int64_t>(spec.page_size, 1) > kMaxInt32) {
    return Status::Error(
        "attention: k_pages: expected at most 2^31 - 1 token slots a layer with a variant that "
        "reads "
        "kv_row, got " +
        std::to_string(pool->num_pages * spec.page_size) + ".");
  }
  return s.ok() ? CheckVariantOperands(kOp, problem.program, b.variant_operands) : s;
}

AttentionParams MakeParams(const AttentionProblem& problem, const AttentionBuffers& b,
                           const Pool& pool) {
  const AttentionSpec& spec = problem.spec;
  const WorkspaceLayout workspace = MakeWorkspaceLayout(problem);
  auto* workspace_words = static_cast<int32_t*>(b.workspace.untyped_data());
  AttentionParams p =
      MakeAttentionParams(problem, static_cast<const int32_t*>(b.plan.untyped_data()));
  p.q = b.q.untyped_data();
  p.k = b.k.untyped_data();
  p.v = b.v.untyped_data();
  p.sinks = FloatsOf(b.sinks);
  p.q_scale = FloatsOf(b.q_scale);
  p.k_scale = FloatsOf(b.k_scale);
  p.v_scale = spec.mla ? p.k_scale : FloatsOf(b.v_scale);
  p.layer = spec.paged() ? static_cast<const int32_t*>(b.layer.untyped_data()) : nullptr;
  p.o = b.o.untyped_data();
  p.lse = static_cast<float*>(b.lse.untyped_data());
  p.merge_counters = workspace_words + workspace.merge_counters;
  p.partial_states = reinterpret_cast<RowState*>(workspace_words + workspace.partial_states);
  p.partial_o = reinterpret_cast<float*>(workspace_words + workspace.partial_o);
  if (problem.config.record_times) {
    p.item_times = reinterpret_cast<i64*>(workspace_words + workspace.item_times);
  }
  if (b.k_new) {
    p.k_new = b.k_new->untyped_data();
    p.v_new = b.v_new->untyped_data();
  }
  p.num_pages = pool.num_pages;
  p.num_layers = static_cast<i32>(pool.num_layers);
  SetVariantOperands(b.variant_operands, &p);
  return p;
}

// What some calls have besides: k_new and v_new with fresh_kv, then perhaps sinks; with scales of
// heads sinks and those, what is absent as arrays without elements; then likewise those of a
// variant.
Status TakeOptional(const AttentionProblem& problem, ffi::RemainingArgs rest, AttentionBuffers* b) {
  const AttentionSpec& spec = problem.spec;
  size_t next = 0;
  const auto take = [&](std::optional<ffi::AnyBuffer>* to) {
    if (const auto buffer = rest.get<ffi::AnyBuffer>(next); buffer.has_value()) {
      *to = *buffer;
      ++next;
    }
  };
  if (spec.fresh_kv) {
    take(&b->k_new);
    take(&b->v_new);
  }
  take(&b->sinks);
  if (FormatOf(spec.kv_format).has_head_scale) {
    take(&b->q_scale);
    take(&b->k_scale);
    take(&b->v_scale);
  }
  const auto num_operands = static_cast<size_t>(problem.program.num_operands);
  for (size_t i = 0; i < num_operands; ++i) {
    std::optional<ffi::AnyBuffer> operand;
    take(&operand);
    if (operand) b->variant_operands.push_back(*operand);
  }
  if (next == rest.size() && b->variant_operands.size() == num_operands &&
      b->k_new.has_value() == (spec.fresh_kv != 0) &&
      b->v_new.has_value() == (spec.fresh_kv != 0)) {
    return Status::Ok();
  }
  return Status::Error(
      "attention: operands: expected q, k, v, plan, layer, with fresh_kv k_new and v_new, perhaps "
      "sinks, with scales of heads these, and those of a variant, got " +
      std::to_string(rest.size()) + " after layer.");
}

// Everything between XLA's call and the launch that both platforms share.
Status Unpack(ffi::Span<const int64_t> words, ffi::RemainingArgs rest, AttentionBuffers buffers,
              AttentionProblem* problem, AttentionParams* params) {
  if (Status s = ReadProblem(kOp, words, problem); !s.ok()) return s;
  if (Status s = TakeOptional(*problem, rest, &buffers); !s.ok()) return s;
  Pool kv_pool;
  if (Status s = Check(*problem, buffers, &kv_pool); !s.ok()) return s;
  *params = MakeParams(*problem, buffers, kv_pool);
  return Status::Ok();
}

ffi::Error ExecuteCpu(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                      ffi::AnyBuffer plan, ffi::AnyBuffer layer, ffi::RemainingArgs rest,
                      ffi::Result<ffi::AnyBuffer> o, ffi::Result<ffi::AnyBuffer> lse,
                      ffi::Result<ffi::AnyBuffer> workspace, ffi::Span<const int64_t> words,
                      bool poison) {
  AttentionProblem problem;
  AttentionParams params;
  const AttentionBuffers buffers{q,  k,  v,  plan, layer, {},   {},        {},
                                 {}, {}, {}, {},   *o,    *lse, *workspace};
  Status s = Unpack(words, rest, buffers, &problem, &params);
  // Always, so that no buffer brings the process down: it takes less than a hundredth of the rest.
  if (s.ok()) {
    const auto* plan_words = static_cast<const int32_t*>(plan.untyped_data());
    s = Prefixed(kOp, CheckPlan(problem, plan_words, params.num_pages));
  }
  if (s.ok() && params.layer) s = CheckLayer(kOp, *params.layer, params.num_layers);
  if (!s.ok()) return ToFfi(s);
  PreferHugePages({*o, *lse, *workspace});
  if (poison) PoisonOnHost({*o, *lse, *workspace});
  HelperPool task_pool(pool.num_threads());
  AttentionCpu(problem, params, task_pool);
  return ffi::Error::Success();
}

ffi::Error InstantiateCuda(ffi::Span<const int64_t> words, bool) {
  return RunStage(kOp, words, [](const AttentionProblem& p) { return PrepareAttention(p); });
}

ffi::Error InitializeCuda(int32_t device, ffi::Span<const int64_t> words, bool) {
  return RunStage(kOp, words, [=](const AttentionProblem& p) { return LoadAttention(p, device); });
}

ffi::Error ExecuteCuda(CUstream_st* stream, int32_t device_ordinal, ffi::AnyBuffer q,
                       ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::AnyBuffer plan,
                       ffi::AnyBuffer layer, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> o,
                       ffi::Result<ffi::AnyBuffer> lse, ffi::Result<ffi::AnyBuffer> workspace,
                       ffi::Span<const int64_t> words, bool poison) {
  AttentionProblem problem;
  AttentionParams params;
  const AttentionBuffers buffers{q,  k,  v,  plan, layer, {},   {},        {},
                                 {}, {}, {}, {},   *o,    *lse, *workspace};
  Status s = Unpack(words, rest, buffers, &problem, &params);
  if (s.ok() && poison) s = PoisonOnDevice({*o, *lse, *workspace}, stream);
  return ToFfi(s.ok() ? LaunchAttention(problem, params, stream, device_ordinal) : s);
}

// The operands, results and attributes of one call, after the contexts of a platform.
template <typename Binding>
auto BindCall(Binding binding) {
  return BindProblem(std::move(binding)
                         .template Arg<ffi::AnyBuffer>()    // q
                         .template Arg<ffi::AnyBuffer>()    // k
                         .template Arg<ffi::AnyBuffer>()    // v
                         .template Arg<ffi::AnyBuffer>()    // plan
                         .template Arg<ffi::AnyBuffer>()    // layer
                         .RemainingArgs()                   // see TakeOptional
                         .template Ret<ffi::AnyBuffer>()    // o
                         .template Ret<ffi::AnyBuffer>()    // lse
                         .template Ret<ffi::AnyBuffer>());  // workspace
}

XLA_FFI_DEFINE_HANDLER(kExecuteCpu, ExecuteCpu, BindCall(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));

XLA_FFI_DEFINE_HANDLER(kInstantiateCuda, InstantiateCuda, BindProblem(ffi::Ffi::BindInstantiate()));

XLA_FFI_DEFINE_HANDLER(kInitializeCuda, InitializeCuda,
                       BindProblem(ffi::Ffi::BindInitialize().Ctx<ffi::DeviceOrdinal>()));

XLA_FFI_DEFINE_HANDLER(
    kExecuteCuda, ExecuteCuda,
    BindCall(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<CUstream_st*>>().Ctx<ffi::DeviceOrdinal>()),
    {ffi::Traits::kCmdBufferCompatible});

}  // namespace

const std::vector<Target> kAttentionTargets = {
    {"jax_attn_attention", "cpu", nullptr, nullptr, kExecuteCpu},
    {"jax_attn_attention", "CUDA", kInstantiateCuda, kInitializeCuda, kExecuteCuda},
};

}  // namespace jax_attn
