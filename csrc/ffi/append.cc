// jax_attn_append_kv: unpack, check, launch, return. Results alias the page operands.
#include "cpu/append.h"

#include <optional>
#include <utility>

#include "ffi/checks.h"
#include "ffi/cpu_task_pool.h"
#include "ffi/handlers.h"
#include "jit/kernels.h"
#include "plan/plan.h"

namespace jax_attn {
namespace {

constexpr char kOp[] = "append_kv";

struct AppendBuffers {
  ffi::AnyBuffer k_pages, k_new, plan, layer, k_out;
  std::optional<ffi::AnyBuffer> v_pages, v_new, v_out;  // none of them with mla
  std::optional<ffi::AnyBuffer> k_scale, v_scale;
};

Status Check(const AttentionProblem& problem, const AppendBuffers& b) {
  const AttentionSpec& spec = problem.spec;
  const ffi::DataType type = ToDataType(spec.dtype), kv_type = ToDataType(spec.kv_dtype());
  const auto dims = b.k_pages.dimensions();
  if (!spec.paged() || dims.size() != 5) {
    return Status::Error("append_kv: k_pages: expected a paged cache of rank 5, got rank " +
                         std::to_string(dims.size()) + ".");
  }
  const int64_t heads = spec.num_stored_heads();
  auto check_pages = [&](const char* name, const ffi::AnyBuffer& pages, int64_t head_dim) {
    return CheckBuffer(kOp, name, pages, kv_type,
                       {dims[0], dims[1], spec.page_size, heads, head_dim});
  };
  Status s = check_pages("k_pages", b.k_pages, spec.head_dim_qk);
  if (s.ok()) {
    s = CheckBuffer(kOp, "k_new", b.k_new, type, {spec.max_qo_tokens, heads, spec.head_dim_qk});
  }
  const bool has_v = b.v_pages && b.v_new && b.v_out;
  if (s.ok() && has_v == (spec.mla != 0)) {
    s = Status::Error("append_kv: v_pages, v_new: expected both, or neither with mla.");
  }
  if (s.ok() && has_v) s = check_pages("v_pages", *b.v_pages, spec.head_dim_vo);
  if (s.ok() && has_v) {
    s = CheckBuffer(kOp, "v_new", *b.v_new, type, {spec.max_qo_tokens, heads, spec.head_dim_vo});
  }
  if (s.ok()) s = CheckFloats(kOp, "k_scale", b.k_scale, spec.num_kv_heads);
  if (s.ok()) s = CheckFloats(kOp, "v_scale", b.v_scale, spec.num_kv_heads);
  if (s.ok()) s = CheckBuffer(kOp, "plan", b.plan, ffi::S32, {MakePlanLayout(problem).num_words});
  if (s.ok()) s = CheckBuffer(kOp, "layer", b.layer, ffi::S32, {});
  if (s.ok() && (b.k_out.untyped_data() != b.k_pages.untyped_data() ||
                 (has_v && b.v_out->untyped_data() != b.v_pages->untyped_data()))) {
    s = Status::Error("append_kv: k_pages, v_pages: expected results that alias them, got copies.");
  }
  return s;
}

AppendParams MakeParams(const AttentionProblem& problem, const AppendBuffers& b) {
  const AttentionSpec& spec = problem.spec;
  const PlanLayout layout = MakePlanLayout(problem);
  const auto* plan = static_cast<const int32_t*>(b.plan.untyped_data());
  const int64_t head_bytes = spec.num_stored_heads() * ElementBytes(spec.kv_dtype());
  AppendParams p = {};
  p.k_pages = b.k_out.untyped_data();
  p.v_pages = b.v_out ? b.v_out->untyped_data() : nullptr;
  p.k_new = b.k_new.untyped_data();
  p.v_new = b.v_new ? b.v_new->untyped_data() : nullptr;
  p.layer = static_cast<const int32_t*>(b.layer.untyped_data());
  p.header = reinterpret_cast<const PlanHeader*>(plan + layout.header);
  p.qo_indptr = plan + layout.qo_indptr;
  p.kv_lens = plan + layout.kv_lens;
  p.page_indptr = plan + layout.kv_indptr;
  p.page_indices = plan + layout.page_indices;
  p.num_pages = b.k_pages.dimensions()[1];
  p.k_row_bytes = head_bytes * spec.head_dim_qk;
  p.v_row_bytes = b.v_new ? head_bytes * spec.head_dim_vo : 0;
  p.page_size = static_cast<i32>(spec.page_size);
  p.max_qo_tokens = static_cast<i32>(spec.max_qo_tokens);
  p.k_scale = FloatsOf(b.k_scale);
  p.v_scale = FloatsOf(b.v_scale);
  p.kv_is_e4m3 = static_cast<i32>(spec.kv_is_e4m3);
  p.dtype = static_cast<i32>(spec.dtype);
  p.num_kv_heads = static_cast<i32>(spec.num_stored_heads());
  p.head_dim_qk = static_cast<i32>(spec.head_dim_qk);
  p.head_dim_vo = static_cast<i32>(spec.head_dim_vo);
  return p;
}

Status Unpack(ffi::Span<const int64_t> words, const AppendBuffers& buffers,
              AttentionProblem* problem, AppendParams* params) {
  if (Status s = ReadProblem(kOp, words, problem); !s.ok()) return s;
  if (Status s = Check(*problem, buffers); !s.ok()) return s;
  *params = MakeParams(*problem, buffers);
  return Status::Ok();
}

using OptionalBuffer = std::optional<ffi::AnyBuffer>;
using OptionalResult = std::optional<ffi::Result<ffi::AnyBuffer>>;

AppendBuffers Buffers(ffi::AnyBuffer k_pages, ffi::AnyBuffer k_new, ffi::AnyBuffer plan,
                      ffi::AnyBuffer layer, OptionalBuffer v_pages, OptionalBuffer v_new,
                      OptionalBuffer k_scale, OptionalBuffer v_scale,
                      ffi::Result<ffi::AnyBuffer> k_out, OptionalResult v_out) {
  AppendBuffers buffers{k_pages, k_new, plan,         layer,   *k_out,
                        v_pages, v_new, std::nullopt, k_scale, v_scale};
  if (v_out) buffers.v_out = **v_out;
  return buffers;
}

ffi::Error ExecuteCpu(ffi::ThreadPool pool, ffi::AnyBuffer k_pages, ffi::AnyBuffer k_new,
                      ffi::AnyBuffer plan, ffi::AnyBuffer layer, OptionalBuffer v_pages,
                      OptionalBuffer v_new, OptionalBuffer k_scale, OptionalBuffer v_scale,
                      ffi::Result<ffi::AnyBuffer> k_out, OptionalResult v_out,
                      ffi::Span<const int64_t> words) {
  AttentionProblem problem;
  AppendParams params;
  Status s = Unpack(
      words, Buffers(k_pages, k_new, plan, layer, v_pages, v_new, k_scale, v_scale, k_out, v_out),
      &problem, &params);
  if (s.ok()) s = CheckPlanHeader(kOp, problem, *params.header, params.num_pages);
  if (s.ok()) s = CheckLayer(kOp, *params.layer, k_pages.dimensions()[0]);
  if (!s.ok()) return ToFfi(s);
  XlaTaskPool task_pool(pool);
  AppendCpu(params, task_pool);
  return ffi::Error::Success();
}

ffi::Error InstantiateCuda(ffi::Span<const int64_t> words) {
  return RunStage(kOp, words, [](const AttentionProblem& p) {
    return PrepareAppend(MakeAppendKernel(p.spec));
  });
}

ffi::Error InitializeCuda(int32_t device, ffi::Span<const int64_t> words) {
  return RunStage(kOp, words, [=](const AttentionProblem& p) {
    return LoadAppend(MakeAppendKernel(p.spec), device);
  });
}

ffi::Error ExecuteCuda(CUstream_st* stream, int32_t device_ordinal, ffi::AnyBuffer k_pages,
                       ffi::AnyBuffer k_new, ffi::AnyBuffer plan, ffi::AnyBuffer layer,
                       OptionalBuffer v_pages, OptionalBuffer v_new, OptionalBuffer k_scale,
                       OptionalBuffer v_scale, ffi::Result<ffi::AnyBuffer> k_out,
                       OptionalResult v_out, ffi::Span<const int64_t> words) {
  AttentionProblem problem;
  AppendParams params;
  Status s = Unpack(
      words, Buffers(k_pages, k_new, plan, layer, v_pages, v_new, k_scale, v_scale, k_out, v_out),
      &problem, &params);
  return ToFfi(s.ok() ? LaunchAppend(MakeAppendKernel(problem.spec), params, stream, device_ordinal)
                      : s);
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

XLA_FFI_DEFINE_HANDLER(kExecuteCpu, ExecuteCpu, BindCall(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));

XLA_FFI_DEFINE_HANDLER(kInstantiateCuda, InstantiateCuda,
                       ffi::Ffi::BindInstantiate().Attr<ffi::Span<const int64_t>>("problem"));

XLA_FFI_DEFINE_HANDLER(
    kInitializeCuda, InitializeCuda,
    ffi::Ffi::BindInitialize().Ctx<ffi::DeviceOrdinal>().Attr<ffi::Span<const int64_t>>("problem"));

XLA_FFI_DEFINE_HANDLER(
    kExecuteCuda, ExecuteCuda,
    BindCall(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<CUstream_st*>>().Ctx<ffi::DeviceOrdinal>()),
    {ffi::Traits::kCmdBufferCompatible});

}  // namespace

const std::vector<Target> kAppendTargets = {
    {"jax_attn_append_kv", "cpu", nullptr, nullptr, kExecuteCpu},
    {"jax_attn_append_kv", "CUDA", kInstantiateCuda, kInitializeCuda, kExecuteCuda},
};

}  // namespace jax_attn
