// jax_attn_lora: unpack, check, launch, return. CPUs only: elsewhere XLA's matmuls are fast.
#include "cpu/lora.h"

#include <algorithm>
#include <string>

#include "cpu/threads/helper_pool.h"
#include "ffi/checks.h"
#include "ffi/handlers.h"

namespace jax_attn {
namespace {

constexpr char kOp[] = "lora";

Status CheckRange(const char* argument, const int32_t* values, int64_t num, int64_t low,
                  int64_t high) {
  for (int64_t i = 0; i < num; ++i) {
    if (values[i] < low || values[i] > high) {
      return Status::Error(std::string("lora: ") + argument + ": expected " + std::to_string(low) +
                           " to " + std::to_string(high) + ", got " + std::to_string(values[i]) +
                           ".");
    }
  }
  return Status::Ok();
}

Status ExecuteCpu(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer y, ffi::AnyBuffer adapters,
                  ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::AnyBuffer ranks, ResultBuffer out,
                  ffi::Span<const int64_t> ends) {
  const ffi::DataType type = x.element_type();
  DType dtype = kF32;
  if (type == ffi::BF16) {
    dtype = kBF16;
  } else if (type == ffi::F16) {
    dtype = kF16;
  } else if (type != ffi::F32) {
    return Status::Error("lora: x: expected bfloat16, float16 or float32, got " + ShapeOf(x) + ".");
  }
  if (x.dimensions().size() != 2 || a.dimensions().size() != 4 || b.dimensions().size() != 3) {
    return Status::Error(
        "lora: x, a, b: expected [n, depth], [adapters, parts, rank, depth] and "
        "[adapters, rank, columns], got " +
        ShapeOf(x) + ", " + ShapeOf(a) + " and " + ShapeOf(b) + ".");
  }
  LoraParams p = {};
  p.num_rows = x.dimensions()[0];
  p.depth = x.dimensions()[1];
  const int64_t num_adapters = a.dimensions()[0];
  p.num_parts = a.dimensions()[1];
  p.max_rank = a.dimensions()[2];
  p.columns = b.dimensions()[2];
  JAX_ATTN_RETURN_IF_ERROR(
      CheckBuffer(kOp, "a", a, type, {num_adapters, p.num_parts, p.max_rank, p.depth}));
  JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(kOp, "b", b, type, {num_adapters, p.max_rank, p.columns}));
  JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(kOp, "y", y, type, {p.num_rows, p.columns}));
  JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(kOp, "result", out, type, {p.num_rows, p.columns}));
  JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(kOp, "adapters", adapters, ffi::S32, {p.num_rows}));
  JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(kOp, "ranks", ranks, ffi::S32, {num_adapters, p.num_parts}));
  JAX_ATTN_RETURN_IF_ERROR(CheckSameMemory(kOp, "result", out, y));
  int64_t last = 0;
  for (const int64_t end : ends) {
    if (end < last || end > p.columns) last = p.columns + 1;
    last = std::max(last, end);
  }
  if (static_cast<int64_t>(ends.size()) != p.num_parts || last != p.columns) {
    return Status::Error("lora: ends: expected ascending ends of " + std::to_string(p.num_parts) +
                         " parts, the last at " + std::to_string(p.columns) + ".");
  }
  const int32_t* of_rows = adapters.typed_data<int32_t>();
  const int32_t* of_adapters = ranks.typed_data<int32_t>();
  JAX_ATTN_RETURN_IF_ERROR(CheckRange("adapters", of_rows, p.num_rows, -1, num_adapters - 1));
  JAX_ATTN_RETURN_IF_ERROR(
      CheckRange("ranks", of_adapters, num_adapters * p.num_parts, 0, p.max_rank));
  p.x = x.untyped_data();
  p.a = a.untyped_data();
  p.b = b.untyped_data();
  p.y = out.untyped_data();
  HelperPool task_pool(pool.num_threads());
  LoraCpu(dtype, p, of_rows, of_adapters, ends.begin(), task_pool);
  return Status::Ok();
}

XLA_FFI_DEFINE_HANDLER(
    kExecuteCpu,
    [](ffi::ThreadPool pool, auto... bound) { return ToFfi(ExecuteCpu(pool, bound...)); },
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>()
        .Arg<ffi::AnyBuffer>()  // x
        .Arg<ffi::AnyBuffer>()  // y
        .Arg<ffi::AnyBuffer>()  // adapters
        .Arg<ffi::AnyBuffer>()  // a
        .Arg<ffi::AnyBuffer>()  // b
        .Arg<ffi::AnyBuffer>()  // ranks
        .Ret<ffi::AnyBuffer>()  // y
        .Attr<ffi::Span<const int64_t>>("ends"));

}  // namespace

const std::vector<Target> kLoraTargets = {
    {"jax_attn_lora", "cpu", nullptr, nullptr, kExecuteCpu},
};

}  // namespace jax_attn
