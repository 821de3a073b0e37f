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

// What is new, and where append_rotated leaves q.
struct RotatedBuffers {
  ffi::AnyBuffer qkv, cos, sin, q;
};

struct AppendBuffers {
  ffi::AnyBuffer k_pages, plan, layer, k_out;
  std::optional<ffi::AnyBuffer> v_pages, v_out;  // none of them with mla
  std::optional<ffi::AnyBuffer> k_new, v_new;    // none of append_rotated, no v_new with mla
  std::optional<ffi::AnyBuffer> k_scale, v_scale;
  std::optional<RotatedBuffers> rotated;

  const char* op() const { return rotated ? "append_rotated" : "append_kv"; }
};

Status CheckNew(const AttentionSpec& spec, const AppendBuffers& b) {
  const ffi::DataType type = ToDataType(spec.dtype);
  const int64_t tokens = spec.max_qo_tokens, heads = spec.num_stored_heads();
  if (!b.rotated) {
    Status s = CheckBuffer(b.op(), "k_new", *b.k_new, type, {tokens, heads, spec.head_dim_qk});
    if (s.ok() && b.v_new) {
      s = CheckBuffer(b.op(), "v_new", *b.v_new, type, {tokens, heads, spec.head_dim_vo});
    }
    return s;
  }
  const RotatedBuffers& r = *b.rotated;
  const int64_t row_dim = (spec.num_qo_heads + heads) * spec.head_dim_qk + heads * spec.head_dim_vo;
  Status s = CheckBuffer(b.op(), "qkv", r.qkv, type, {tokens, row_dim});
  if (s.ok()) s = CheckBuffer(b.op(), "cos", r.cos, ffi::F32, {tokens, spec.head_dim_qk / 2});
  if (s.ok()) s = CheckBuffer(b.op(), "sin", r.sin, ffi::F32, {tokens, spec.head_dim_qk / 2});
  if (s.ok()) {
    s = CheckBuffer(b.op(), "q", r.q, type, {tokens, spec.num_qo_heads, spec.head_dim_qk});
  }
  return s;
}

Status Check(const AttentionProblem& problem, const AppendBuffers& b, Pool* pool) {
  const AttentionSpec& spec = problem.spec;
  const std::string op = b.op();
  auto check_pages = [&](const char* name, const ffi::AnyBuffer& pages, int64_t head_dim) {
    return CheckPages(b.op(), name, spec, *pool, pages, head_dim);
  };
  Status s = ReadPool(b.op(), spec, b.k_pages, pool);
  if (s.ok()) s = check_pages("k_pages", b.k_pages, spec.head_dim_qk);
  const bool has_v = b.v_pages && b.v_out;
  if (s.ok() && (has_v == (spec.mla != 0) || (!b.rotated && b.v_new.has_value() != has_v))) {
    s = Status::Error(op + ": v_pages, v_new: expected both, or neither with mla.");
  }
  if (s.ok() && has_v) s = check_pages("v_pages", *b.v_pages, spec.head_dim_vo);
  if (s.ok()) s = CheckNew(spec, b);
  if (s.ok()) s = CheckFloats(b.op(), "k_scale", b.k_scale, spec.num_stored_heads());
  if (s.ok()) s = CheckFloats(b.op(), "v_scale", b.v_scale, spec.mla ? 0 : spec.num_kv_heads);
  if (s.ok()) {
    s = CheckBuffer(b.op(), "plan", b.plan, ffi::S32, {MakePlanLayout(problem).num_words});
  }
  if (s.ok()) s = CheckBuffer(b.op(), "layer", b.layer, ffi::S32, {});
  if (s.ok() && (b.k_out.untyped_data() != b.k_pages.untyped_data() ||
                 (has_v && b.v_out->untyped_data() != b.v_pages->untyped_data()))) {
    s = Status::Error(op + ": k_pages, v_pages: expected results that alias them, got copies.");
  }
  return s;
}

const int32_t* PlanOf(const AppendBuffers& b) {
  return static_cast<const int32_t*>(b.plan.untyped_data());
}

AppendParams MakeParams(const AttentionProblem& problem, const AppendBuffers& b, const Pool& pool) {
  const AttentionSpec& spec = problem.spec;
  const PlanLayout layout = MakePlanLayout(problem);
  const int32_t* plan = PlanOf(b);
  AppendParams p = {};
  p.k_pages = b.k_out.untyped_data();
  p.v_pages = b.v_out ? b.v_out->untyped_data() : nullptr;
  p.k_new = b.k_new ? b.k_new->untyped_data() : nullptr;
  p.v_new = b.v_new ? b.v_new->untyped_data() : nullptr;
  p.layer = static_cast<const int32_t*>(b.layer.untyped_data());
  p.header = reinterpret_cast<const PlanHeader*>(plan + layout.header);
  p.qo_indptr = plan + layout.qo_indptr;
  p.kv_lens = plan + layout.kv_lens;
  p.page_indptr = plan + layout.kv_indptr;
  p.page_indices = plan + layout.page_indices;
  static_cast<PlanLimits&>(p) = MakePlanLimits(problem, pool.num_pages);
  p.k_row_bytes = spec.num_stored_heads() * spec.kv_row_bytes(spec.head_dim_qk);
  p.v_row_bytes = b.v_pages ? spec.num_stored_heads() * spec.kv_row_bytes(spec.head_dim_vo) : 0;
  p.page_size = static_cast<i32>(spec.page_size);
  p.k_scale = FloatsOf(b.k_scale);
  p.v_scale = FloatsOf(b.v_scale);
  p.kv_format = static_cast<i32>(spec.kv_format);
  p.dtype = static_cast<i32>(spec.dtype);
  p.num_kv_heads = static_cast<i32>(spec.num_stored_heads());
  p.head_dim_qk = static_cast<i32>(spec.head_dim_qk);
  p.head_dim_vo = static_cast<i32>(spec.head_dim_vo);
  if (b.rotated) {
    p.qkv = b.rotated->qkv.untyped_data();
    p.cos = static_cast<const float*>(b.rotated->cos.untyped_data());
    p.sin = static_cast<const float*>(b.rotated->sin.untyped_data());
    p.q = b.rotated->q.untyped_data();
    p.num_qo_heads = static_cast<i32>(spec.num_qo_heads);
  }
  return p;
}

// Optional operands follow each other: with mla, which has no v, scales come first.
AppendBuffers InPlace(const AttentionSpec& spec, AppendBuffers b) {
  if (spec.mla && FormatOf(spec.kv_format).has_head_scale && !b.rotated) {
    b.k_scale = std::exchange(b.v_pages, std::nullopt);
    b.v_scale = std::exchange(b.v_new, std::nullopt);
  }
  return b;
}

Status Unpack(ffi::Span<const int64_t> words, const AppendBuffers& given, AttentionProblem* problem,
              Pool* pool, AppendParams* params) {
  if (Status s = ReadProblem(given.op(), words, problem); !s.ok()) return s;
  const AppendBuffers buffers = InPlace(problem->spec, given);
  if (Status s = Check(*problem, buffers, pool); !s.ok()) return s;
  *params = MakeParams(*problem, buffers, *pool);
  return Status::Ok();
}

ffi::Error RunCpu(ffi::ThreadPool threads, ffi::Span<const int64_t> words, const AppendBuffers& b) {
  AttentionProblem problem;
  Pool pool;
  AppendParams params;
  Status s = Unpack(words, b, &problem, &pool, &params);
  if (s.ok()) s = Prefixed(b.op(), CheckPlanBatch(problem, PlanOf(b), params.num_pages));
  if (s.ok()) s = CheckLayer(b.op(), *params.layer, pool.num_layers);
  if (!s.ok()) return ToFfi(s);
  HelperPool task_pool(threads.num_threads());
  b.rotated ? AppendRotatedCpu(params, task_pool) : AppendCpu(params, task_pool);
  return ffi::Error::Success();
}

ffi::Error RunCuda(CUstream_st* stream, int32_t device_ordinal, ffi::Span<const int64_t> words,
                   const AppendBuffers& b) {
  AttentionProblem problem;
  Pool pool;
  AppendParams params;
  Status s = Unpack(words, b, &problem, &pool, &params);
  return ToFfi(s.ok() ? LaunchAppend(MakeAppendKernel(problem.spec, b.rotated.has_value()), params,
                                     stream, device_ordinal)
                      : s);
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

AppendBuffers Buffers(ffi::AnyBuffer k_pages, ffi::AnyBuffer k_new, ffi::AnyBuffer plan,
                      ffi::AnyBuffer layer, OptionalBuffer v_pages, OptionalBuffer v_new,
                      OptionalBuffer k_scale, OptionalBuffer v_scale,
                      ffi::Result<ffi::AnyBuffer> k_out, OptionalResult v_out) {
  AppendBuffers b{k_pages, plan, layer, *k_out, v_pages};
  b.k_new = k_new;
  b.v_new = v_new;
  b.k_scale = k_scale;
  b.v_scale = v_scale;
  if (v_out) b.v_out = **v_out;
  return b;
}

template <typename Binding>
auto BindCall(Binding binding) {
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

// The operands of append_rotated: v_pages always, since mla rotates by itself.
AppendBuffers RotatedAppend(ffi::AnyBuffer qkv, ffi::AnyBuffer cos, ffi::AnyBuffer sin,
                            ffi::AnyBuffer k_pages, ffi::AnyBuffer v_pages, ffi::AnyBuffer plan,
                            ffi::AnyBuffer layer, OptionalBuffer k_scale, OptionalBuffer v_scale,
                            ffi::Result<ffi::AnyBuffer> q, ffi::Result<ffi::AnyBuffer> k_out,
                            ffi::Result<ffi::AnyBuffer> v_out) {
  AppendBuffers b{k_pages, plan, layer, *k_out, v_pages, *v_out};
  b.k_scale = k_scale;
  b.v_scale = v_scale;
  b.rotated = RotatedBuffers{qkv, cos, sin, *q};
  return b;
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
using Buffer = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;

XLA_FFI_DEFINE_HANDLER(
    kExecuteCpu,
    [](ffi::ThreadPool pool, Buffer k_pages, Buffer k_new, Buffer plan, Buffer layer,
       OptionalBuffer v_pages, OptionalBuffer v_new, OptionalBuffer k_scale, OptionalBuffer v_scale,
       Result k_out, OptionalResult v_out, Words words) {
      return RunCpu(
          pool, words,
          Buffers(k_pages, k_new, plan, layer, v_pages, v_new, k_scale, v_scale, k_out, v_out));
    },
    BindCall(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));

XLA_FFI_DEFINE_HANDLER(
    kExecuteCuda,
    [](CUstream_st* stream, int32_t device, Buffer k_pages, Buffer k_new, Buffer plan, Buffer layer,
       OptionalBuffer v_pages, OptionalBuffer v_new, OptionalBuffer k_scale, OptionalBuffer v_scale,
       Result k_out, OptionalResult v_out, Words words) {
      return RunCuda(
          stream, device, words,
          Buffers(k_pages, k_new, plan, layer, v_pages, v_new, k_scale, v_scale, k_out, v_out));
    },
    BindCall(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<CUstream_st*>>().Ctx<ffi::DeviceOrdinal>()),
    {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(
    kRotateCpu,
    [](ffi::ThreadPool pool, Buffer qkv, Buffer cos, Buffer sin, Buffer k_pages, Buffer v_pages,
       Buffer plan, Buffer layer, OptionalBuffer k_scale, OptionalBuffer v_scale, Result q,
       Result k_out, Result v_out, Words words) {
      return RunCpu(pool, words,
                    RotatedAppend(qkv, cos, sin, k_pages, v_pages, plan, layer, k_scale, v_scale, q,
                                  k_out, v_out));
    },
    BindRotated(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));

XLA_FFI_DEFINE_HANDLER(
    kRotateCuda,
    [](CUstream_st* stream, int32_t device, Buffer qkv, Buffer cos, Buffer sin, Buffer k_pages,
       Buffer v_pages, Buffer plan, Buffer layer, OptionalBuffer k_scale, OptionalBuffer v_scale,
       Result q, Result k_out, Result v_out, Words words) {
      return RunCuda(stream, device, words,
                     RotatedAppend(qkv, cos, sin, k_pages, v_pages, plan, layer, k_scale, v_scale,
                                   q, k_out, v_out));
    },
    BindRotated(
        ffi::Ffi::Bind().Ctx<ffi::PlatformStream<CUstream_st*>>().Ctx<ffi::DeviceOrdinal>()),
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
