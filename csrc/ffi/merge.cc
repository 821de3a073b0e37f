// jax_attn_merge_states: unpack, check, launch, return.
#include "cpu/merge.h"

#include <string>
#include <utility>

#include "cpu/threads/helper_pool.h"
#include "ffi/checks.h"
#include "ffi/handlers.h"
#include "jit/kernels.h"

namespace jax_attn {
namespace {

constexpr char kOp[] = "merge_states";

// The operands, results and attributes of one call, in the order of BindCall.
struct MergeCall {
  ffi::AnyBuffer o_parts;    // [num_states, nnz_qo, num_heads, head_dim_vo]
  ffi::AnyBuffer lse_parts;  // [num_states, nnz_qo, num_heads]
  ResultBuffer o, lse;
  int64_t arch, dtype;
  bool poison;
};

// Checks the dtype attribute, which is an index into tables of kernels.
Status CheckDType(int64_t dtype) {
  if (dtype >= kBF16 && dtype <= kF32) return Status::Ok();
  return Status::Error("merge_states: attribute dtype: expected 0 to 2, got " +
                       std::to_string(dtype) + ".");
}

Status Unpack(const MergeCall& call, MergeParams* p) {
  JAX_ATTN_RETURN_IF_ERROR(CheckDType(call.dtype));
  const auto dims = call.o_parts.dimensions();
  if (dims.size() != 4) {
    return Status::Error("merge_states: o_parts: expected rank 4, got rank " +
                         std::to_string(dims.size()) + ".");
  }
  const ffi::DataType type = ToDataType(call.dtype);
  JAX_ATTN_RETURN_IF_ERROR(
      CheckBuffer(kOp, "o_parts", call.o_parts, type, {dims[0], dims[1], dims[2], dims[3]}));
  JAX_ATTN_RETURN_IF_ERROR(
      CheckBuffer(kOp, "lse_parts", call.lse_parts, ffi::F32, {dims[0], dims[1], dims[2]}));
  JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(kOp, "o", call.o, type, {dims[1], dims[2], dims[3]}));
  JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(kOp, "lse", call.lse, ffi::F32, {dims[1], dims[2]}));
  // Kernels count both in 32 bits, and add to the counts.
  for (int i : {0, 3}) {
    if (dims[i] > 1 << 30 || (i == 3 && dims[i] == 0)) {
      return Status::Error(
          "merge_states: o_parts: expected up to 2^30 states and 1 to 2^30 columns, got " +
          std::to_string(dims[i]) + " in dimension " + std::to_string(i) + ".");
    }
  }
  p->o_parts = call.o_parts.untyped_data();
  p->lse_parts = static_cast<const float*>(call.lse_parts.untyped_data());
  p->o = call.o.untyped_data();
  p->lse = static_cast<float*>(call.lse.untyped_data());
  p->num_rows = dims[1] * dims[2];
  p->num_states = static_cast<i32>(dims[0]);
  p->head_dim_vo = static_cast<i32>(dims[3]);
  return Status::Ok();
}

Status ExecuteCpu(ffi::ThreadPool pool, const MergeCall& call) {
  MergeParams params = {};
  JAX_ATTN_RETURN_IF_ERROR(Unpack(call, &params));
  if (call.poison) PoisonOnHost({call.o, call.lse});
  HelperPool task_pool(pool.num_threads());
  MergeCpu(call.dtype, params, task_pool);
  return Status::Ok();
}

ffi::Error InstantiateCuda(int64_t arch, int64_t dtype, bool) {
  const Status s = CheckDType(dtype);
  return ToFfi(s.ok() ? PrepareMerge({arch, dtype}) : s);
}

ffi::Error InitializeCuda(int32_t device_ordinal, int64_t arch, int64_t dtype, bool) {
  const Status s = CheckDType(dtype);
  return ToFfi(s.ok() ? LoadMerge({arch, dtype}, device_ordinal) : s);
}

Status ExecuteCuda(CUstream_st* stream, int32_t device_ordinal, const MergeCall& call) {
  MergeParams params = {};
  JAX_ATTN_RETURN_IF_ERROR(Unpack(call, &params));
  if (call.poison) JAX_ATTN_RETURN_IF_ERROR(PoisonOnDevice({call.o, call.lse}, stream));
  return LaunchMerge({call.arch, call.dtype}, params, stream, device_ordinal);
}

template <typename Binding>
auto BindAttributes(Binding binding) {
  return std::move(binding)
      .template Attr<int64_t>("arch")
      .template Attr<int64_t>("dtype")
      .template Attr<bool>("poison");
}

template <typename Binding>
auto BindCall(Binding binding) {
  return BindAttributes(std::move(binding)
                            .template Arg<ffi::AnyBuffer>()    // o_parts
                            .template Arg<ffi::AnyBuffer>()    // lse_parts
                            .template Ret<ffi::AnyBuffer>()    // o
                            .template Ret<ffi::AnyBuffer>());  // lse
}

XLA_FFI_DEFINE_HANDLER(
    kExecuteCpu,
    [](ffi::ThreadPool pool, auto... bound) {
      return ToFfi(ExecuteCpu(pool, MergeCall{bound...}));
    },
    BindCall(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));
XLA_FFI_DEFINE_HANDLER(kInstantiateCuda, InstantiateCuda,
                       BindAttributes(ffi::Ffi::BindInstantiate()));
XLA_FFI_DEFINE_HANDLER(kInitializeCuda, InitializeCuda,
                       BindAttributes(ffi::Ffi::BindInitialize().Ctx<ffi::DeviceOrdinal>()));
XLA_FFI_DEFINE_HANDLER(
    kExecuteCuda,
    [](CUstream_st* stream, int32_t device_ordinal, auto... bound) {
      return ToFfi(ExecuteCuda(stream, device_ordinal, MergeCall{bound...}));
    },
    BindCall(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<CUstream_st*>>().Ctx<ffi::DeviceOrdinal>()),
    {ffi::Traits::kCmdBufferCompatible});

}  // namespace

const std::vector<Target> kMergeTargets = {
    {"jax_attn_merge_states", "cpu", nullptr, nullptr, kExecuteCpu},
    {"jax_attn_merge_states", "CUDA", kInstantiateCuda, kInitializeCuda, kExecuteCuda},
};

}  // namespace jax_attn
