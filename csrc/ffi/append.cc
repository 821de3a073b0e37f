// jax_attn_append_kv and jax_attn_append_rotated: unpack, check, launch, return. Results alias the
// page operands.
#include "cpu/append.h"

#include <optional>
#include <utility>

#include "cpu/threads/helper_pool.h"
#include "ffi/checks.h"
#include "ffi/handlers.h"
#include "jit/kernels.h"
#include "plan/check.h"
#include "plan/plan.h"

namespace jax_attn {
namespace {

// The new rows, and where append_rotated writes q.
struct RotatedBuffers {
  ffi::AnyBuffer qkv, cos, sin, q;
};

// The operands, results and attributes of one call of either target.
struct AppendCall {
  ffi::Span<const int64_t> problem;
  ffi::AnyBuffer k_pages, plan, layer, k_out;
  std::optional<ffi::AnyBuffer> v_pages = {}, v_out = {};  // absent with mla
  std::optional<ffi::AnyBuffer> k_new = {}, v_new = {};  // absent in append_rotated; mla: no v_new
  std::optional<ffi::AnyBuffer> k_scale = {}, v_scale = {};
  std::optional<RotatedBuffers> rotated = {};

  const int32_t* plan_words() const { return static_cast<const int32_t*>(plan.untyped_data()); }
  const char* op() const { return rotated ? "append_rotated" : "append_kv"; }
};

Status CheckNew(const AttentionSpec& spec, const AppendCall& call) {
  const ffi::DataType type = ToDataType(spec.dtype);
  const int64_t tokens = spec.max_qo_tokens, heads = spec.num_stored_heads();
  const char* op = call.op();
  if (!call.rotated) {
    JAX_ATTN_RETURN_IF_ERROR(
        CheckBuffer(op, "k_new", *call.k_new, type, {tokens, heads, spec.head_dim_qk}));
    if (!call.v_new) return Status::Ok();
    return CheckBuffer(op, "v_new", *call.v_new, type, {tokens, heads, spec.head_dim_vo});
  }
  const RotatedBuffers& r = *call.rotated;
  const int64_t row_dim = (spec.num_qo_heads + heads) * spec.head_dim_qk + heads * spec.head_dim_vo;
  JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(op, "qkv", r.qkv, type, {tokens, row_dim}));
  JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(op, "cos", r.cos, ffi::F32, {tokens, spec.head_dim_qk / 2}));
  JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(op, "sin", r.sin, ffi::F32, {tokens, spec.head_dim_qk / 2}));
  return CheckBuffer(op, "q", r.q, type, {tokens, spec.num_qo_heads, spec.head_dim_qk});
}

Status Check(const AttentionProblem& problem, const AppendCall& call, Pool* pool) {
  const AttentionSpec& spec = problem.spec;
  const char* op = call.op();
  JAX_ATTN_RETURN_IF_ERROR(ReadPool(op, spec, call.k_pages, pool));
  JAX_ATTN_RETURN_IF_ERROR(CheckKv(op, "k_pages", spec, *pool, call.k_pages, spec.head_dim_qk));
  const bool has_v = call.v_pages && call.v_out;
  if (has_v == (spec.mla != 0) || (!call.rotated && call.v_new.has_value() != has_v)) {
    return Status::Error(std::string(op) + ": v_pages, v_new: expected both, or neither with mla.");
  }
  if (has_v) {
    JAX_ATTN_RETURN_IF_ERROR(CheckKv(op, "v_pages", spec, *pool, *call.v_pages, spec.head_dim_vo));
  }
  JAX_ATTN_RETURN_IF_ERROR(CheckNew(spec, call));
  JAX_ATTN_RETURN_IF_ERROR(CheckFloats(op, "k_scale", call.k_scale, spec.num_stored_heads()));
  JAX_ATTN_RETURN_IF_ERROR(
      CheckFloats(op, "v_scale", call.v_scale, spec.mla ? 0 : spec.num_kv_heads));
  JAX_ATTN_RETURN_IF_ERROR(
      CheckBuffer(op, "plan", call.plan, ffi::S32, {MakePlanLayout(problem).num_words}));
  JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(op, "layer", call.layer, ffi::S32, {}));
  if (call.k_out.untyped_data() != call.k_pages.untyped_data() ||
      (has_v && call.v_out->untyped_data() != call.v_pages->untyped_data())) {
    return Status::Error(std::string(op) +
                         ": k_pages, v_pages: expected results that alias them, got copies.");
  }
  return Status::Ok();
}

AppendParams MakeParams(const AttentionProblem& problem, const AppendCall& call, const Pool& pool) {
  const AttentionSpec& spec = problem.spec;
  const PlanLayout layout = MakePlanLayout(problem);
  const int32_t* plan = call.plan_words();
  AppendParams p = {};
  p.k_pages = call.k_out.untyped_data();
  p.v_pages = call.v_out ? call.v_out->untyped_data() : nullptr;
  p.k_new = call.k_new ? call.k_new->untyped_data() : nullptr;
  p.v_new = call.v_new ? call.v_new->untyped_data() : nullptr;
  p.layer = static_cast<const int32_t*>(call.layer.untyped_data());
  p.header = reinterpret_cast<const PlanHeader*>(plan + layout.header);
  p.qo_indptr = plan + layout.qo_indptr;
  p.kv_lens = plan + layout.kv_lens;
  p.page_indptr = plan + layout.kv_indptr;
  p.page_indices = plan + layout.page_indices;
  static_cast<PlanLimits&>(p) = MakePlanLimits(problem, pool.num_pages);
  p.k_row_bytes = spec.num_stored_heads() * spec.kv_row_bytes(spec.head_dim_qk);
  p.v_row_bytes = call.v_pages ? spec.num_stored_heads() * spec.kv_row_bytes(spec.head_dim_vo) : 0;
  p.page_size = static_cast<i32>(spec.page_size);
  p.k_scale = FloatsOf(call.k_scale);
  p.v_scale = FloatsOf(call.v_scale);
  p.kv_format = static_cast<i32>(spec.kv_format);
  p.dtype = static_cast<i32>(spec.dtype);
  p.num_kv_heads = static_cast<i32>(spec.num_stored_heads());
  p.head_dim_qk = static_cast<i32>(spec.head_dim_qk);
  p.head_dim_vo = static_cast<i32>(spec.head_dim_vo);
  if (call.rotated) {
    p.qkv = call.rotated->qkv.untyped_data();
    p.cos = static_cast<const float*>(call.rotated->cos.untyped_data());
    p.sin = static_cast<const float*>(call.rotated->sin.untyped_data());
    p.q = call.rotated->q.untyped_data();
    p.num_qo_heads = static_cast<i32>(spec.num_qo_heads);
  }
  return p;
}

// Optional operands are packed in order: with mla, which has no v, scales come first.
AppendCall InPlace(const AttentionSpec& spec, AppendCall call) {
  if (spec.mla && FormatOf(spec.kv_format).has_head_scale && !call.rotated) {
    call.k_scale = std::exchange(call.v_pages, std::nullopt);
    call.v_scale = std::exchange(call.v_new, std::nullopt);
  }
  return call;
}

Status Unpack(const AppendCall& given, AttentionProblem* problem, Pool* pool,
              AppendParams* params) {
  JAX_ATTN_RETURN_IF_ERROR(ReadProblem(given.op(), given.problem, problem));
  const AppendCall call = InPlace(problem->spec, given);
  JAX_ATTN_RETURN_IF_ERROR(Check(*problem, call, pool));
  *params = MakeParams(*problem, call, *pool);
  return Status::Ok();
}

Status ExecuteCpu(ffi::ThreadPool threads, const AppendCall& call) {
  AttentionProblem problem;
  Pool pool;
  AppendParams params;
  JAX_ATTN_RETURN_IF_ERROR(Unpack(call, &problem, &pool, &params));
  JAX_ATTN_RETURN_IF_ERROR(
      Prefixed(call.op(), CheckPlanBatch(problem, call.plan_words(), params.num_pages)));
  JAX_ATTN_RETURN_IF_ERROR(CheckLayer(call.op(), *params.layer, pool.num_layers));
  HelperPool task_pool(threads.num_threads());
  call.rotated ? AppendRotatedCpu(params, task_pool) : AppendCpu(params, task_pool);
  return Status::Ok();
}

Status ExecuteCuda(CUstream_st* stream, int32_t device_ordinal, const AppendCall& call) {
  AttentionProblem problem;
  Pool pool;
  AppendParams params;
  JAX_ATTN_RETURN_IF_ERROR(Unpack(call, &problem, &pool, &params));
  return LaunchAppend(MakeAppendKernel(problem.spec, call.rotated.has_value()), params, stream,
                      device_ordinal);
}

template <bool kRotates>
ffi::Error InstantiateCuda(ffi::Span<const int64_t> words) {
  return RunStage(kRotates ? "append_rotated" : "append_kv", words, [](const AttentionProblem& p) {
    return PrepareAppend(MakeAppendKernel(p.spec, kRotates));
  });
}

template <bool kRotates>
ffi::Error InitializeCuda(int32_t device, ffi::Span<const int64_t> words) {
  return RunStage(kRotates ? "append_rotated" : "append_kv", words, [=](const AttentionProblem& p) {
    return LoadAppend(MakeAppendKernel(p.spec, kRotates), device);
  });
}

using OptionalBuffer = std::optional<ffi::AnyBuffer>;
using OptionalResult = std::optional<ffi::Result<ffi::AnyBuffer>>;

// Arguments in the order of BindAppend.
AppendCall Append(ffi::AnyBuffer k_pages, ffi::AnyBuffer k_new, ffi::AnyBuffer plan,
                  ffi::AnyBuffer layer, OptionalBuffer v_pages, OptionalBuffer v_new,
                  OptionalBuffer k_scale, OptionalBuffer v_scale, ffi::Result<ffi::AnyBuffer> k_out,
                  OptionalResult v_out, ffi::Span<const int64_t> problem) {
  AppendCall call{problem, k_pages, plan, layer, *k_out};
  call.v_pages = v_pages;
  if (v_out) call.v_out = **v_out;
  call.k_new = k_new;
  call.v_new = v_new;
  call.k_scale = k_scale;
  call.v_scale = v_scale;
  return call;
}

template <typename Binding>
auto BindAppend(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()          // k_pages
      .template Arg<ffi::AnyBuffer>()          // k_new
      .template Arg<ffi::AnyBuffer>()          // plan
      .template Arg<ffi::AnyBuffer>()          // layer
      .template OptionalArg<ffi::AnyBuffer>()  // v_pages
      .template OptionalArg<ffi::AnyBuffer>()  // v_new
      .template OptionalArg<ffi::AnyBuffer>()  // k_scale
      .template OptionalArg<ffi::AnyBuffer>()  // v_scale
      .template Ret<ffi::AnyBuffer>()          // k_pages
      .template OptionalRet<ffi::AnyBuffer>()  // v_pages
      .template Attr<ffi::Span<const int64_t>>("problem");
}

// Arguments in the order of BindRotated. v_pages is always present, since mla rotates by itself.
AppendCall Rotated(ffi::AnyBuffer qkv, ffi::AnyBuffer cos, ffi::AnyBuffer sin,
                   ffi::AnyBuffer k_pages, ffi::AnyBuffer v_pages, ffi::AnyBuffer plan,
                   ffi::AnyBuffer layer, OptionalBuffer k_scale, OptionalBuffer v_scale,
                   ffi::Result<ffi::AnyBuffer> q, ffi::Result<ffi::AnyBuffer> k_out,
                   ffi::Result<ffi::AnyBuffer> v_out, ffi::Span<const int64_t> problem) {
  AppendCall call{problem, k_pages, plan, layer, *k_out};
  call.v_pages = v_pages;
  call.v_out = *v_out;
  call.k_scale = k_scale;
  call.v_scale = v_scale;
  call.rotated = RotatedBuffers{qkv, cos, sin, *q};
  return call;
}

template <typename Binding>
auto BindRotated(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()          // qkv
      .template Arg<ffi::AnyBuffer>()          // cos
      .template Arg<ffi::AnyBuffer>()          // sin
      .template Arg<ffi::AnyBuffer>()          // k_pages
      .template Arg<ffi::AnyBuffer>()          // v_pages
      .template Arg<ffi::AnyBuffer>()          // plan
      .template Arg<ffi::AnyBuffer>()          // layer
      .template OptionalArg<ffi::AnyBuffer>()  // k_scale
      .template OptionalArg<ffi::AnyBuffer>()  // v_scale
      .template Ret<ffi::AnyBuffer>()          // q
      .template Ret<ffi::AnyBuffer>()          // k_pages
      .template Ret<ffi::AnyBuffer>()          // v_pages
      .template Attr<ffi::Span<const int64_t>>("problem");
}

using Words = ffi::Span<const int64_t>;

XLA_FFI_DEFINE_HANDLER(
    kExecuteCpu,
    [](ffi::ThreadPool pool, auto... bound) { return ToFfi(ExecuteCpu(pool, Append(bound...))); },
    BindAppend(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));

XLA_FFI_DEFINE_HANDLER(
    kExecuteCuda,
    [](CUstream_st* stream, int32_t device_ordinal, auto... bound) {
      return ToFfi(ExecuteCuda(stream, device_ordinal, Append(bound...)));
    },
    BindAppend(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<CUstream_st*>>().Ctx<ffi::DeviceOrdinal>()),
    {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(
    kRotateCpu,
    [](ffi::ThreadPool pool, auto... bound) { return ToFfi(ExecuteCpu(pool, Rotated(bound...))); },
    BindRotated(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));

XLA_FFI_DEFINE_HANDLER(kRotateCuda,
                       [](CUstream_st* stream, int32_t device_ordinal, auto... bound) {
                         return ToFfi(ExecuteCuda(stream, device_ordinal, Rotated(bound...)));
                       },
                       BindRotated(ffi::Ffi::Bind()
                                       .Ctx<ffi::PlatformStream<CUstream_st*>>()
                                       .Ctx<ffi::DeviceOrdinal>()),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kInstantiateCuda, InstantiateCuda<false>,
                       ffi::Ffi::BindInstantiate().Attr<Words>("problem"));
XLA_FFI_DEFINE_HANDLER(kInitializeCuda, InitializeCuda<false>,
                       ffi::Ffi::BindInitialize().Ctx<ffi::DeviceOrdinal>().Attr<Words>("problem"));
XLA_FFI_DEFINE_HANDLER(kInstantiateRotated, InstantiateCuda<true>,
                       ffi::Ffi::BindInstantiate().Attr<Words>("problem"));
XLA_FFI_DEFINE_HANDLER(kInitializeRotated, InitializeCuda<true>,
                       ffi::Ffi::BindInitialize().Ctx<ffi::DeviceOrdinal>().Attr<Words>("problem"));

}  // namespace

const std::vector<Target> kAppendTargets = {
    {"jax_attn_append_kv", "cpu", nullptr, nullptr, kExecuteCpu},
    {"jax_attn_append_kv", "CUDA", kInstantiateCuda, kInitializeCuda, kExecuteCuda},
    {"jax_attn_append_rotated", "cpu", nullptr, nullptr, kRotateCpu},
    {"jax_attn_append_rotated", "CUDA", kInstantiateRotated, kInitializeRotated, kRotateCuda},
};

}  // namespace jax_attn
