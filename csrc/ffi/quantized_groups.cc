// jax_attn_quantized_groups: unpack, check, launch, return. CPUs only.
#include "cpu/quantized_groups.h"

#include <string>

#include "cpu/threads/helper_pool.h"
#include "ffi/checks.h"
#include "ffi/handlers.h"

namespace jax_attn {
namespace {

constexpr char kOp[] = "quantized_groups";

struct Buffers {
  ffi::AnyBuffer x, codes, scales, zeros;  // zeros: may be an array without elements
  ffi::Buffer<ffi::S32> group_rows;
  ResultBuffer y;
};

Status Unpack(Buffers& b, int64_t format, int64_t group_size, QuantizedGroupsParams* p) {
  const auto x = b.x.dimensions(), codes = b.codes.dimensions();
  if (x.size() != 2 || codes.size() != 3) {
    return Status::Error("quantized_groups: x, codes: expected ranks 2 and 3, got " + ShapeOf(b.x) +
                         " and " + ShapeOf(b.codes) + ".");
  }
  if (format < 0 || format >= kNumWeightFormats) {
    return Status::Error("quantized_groups: attribute format: expected 0 to 2, got " +
                         std::to_string(format) + ".");
  }
  p->is_int8 = b.codes.element_type() == ffi::S8;
  p->format = static_cast<WeightFormat>(format);
  const int64_t each = p->is_int8 ? 1 : WeightsPerByte(format);
  p->num_rows = x[0];
  p->depth = x[1];
  p->num_groups = codes[0];
  p->columns = codes[2];
  p->group_size = group_size;
  if (group_size <= 0 || group_size % each != 0 || p->depth <= 0 || p->depth % each != 0) {
    return Status::Error("quantized_groups: expected a depth > 0 and groups of whole bytes, got " +
                         ShapeOf(b.x) + " in groups of " + std::to_string(group_size) + ".");
  }
  const int64_t scale_rows = (p->depth + group_size - 1) / group_size;
  p->has_exponents = b.scales.element_type() == ffi::U8;
  const bool has_zeros = b.zeros.element_count() > 0;
  JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(kOp, "x", b.x, ffi::F32, {p->num_rows, p->depth}));
  JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(kOp, "codes", b.codes, p->is_int8 ? ffi::S8 : ffi::U8,
                                       {p->num_groups, p->depth / each, p->columns}));
  JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(kOp, "scales", b.scales,
                                       p->has_exponents ? ffi::U8 : ffi::F32,
                                       {p->num_groups, scale_rows, p->columns}));
  if (has_zeros) {
    JAX_ATTN_RETURN_IF_ERROR(
        CheckBuffer(kOp, "zeros", b.zeros, ffi::U8, {p->num_groups, scale_rows, p->columns}));
  }
  const auto num_groups = static_cast<int64_t>(b.group_rows.element_count());
  if (num_groups != p->num_groups) {
    return Status::Error("quantized_groups: group_rows: expected " + std::to_string(p->num_groups) +
                         " numbers, got " + std::to_string(num_groups) + ".");
  }
  p->group_rows = b.group_rows.typed_data();
  JAX_ATTN_RETURN_IF_ERROR(CheckGroupRows(kOp, p->group_rows, num_groups, p->num_rows));
  JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(kOp, "y", b.y, ffi::F32, {p->num_rows, p->columns}));
  p->x = static_cast<const float*>(b.x.untyped_data());
  p->codes = static_cast<const uint8_t*>(b.codes.untyped_data());
  p->scales = b.scales.untyped_data();
  p->zeros = has_zeros ? static_cast<const uint8_t*>(b.zeros.untyped_data()) : nullptr;
  p->y = static_cast<float*>(b.y.untyped_data());
  return Status::Ok();
}

Status ExecuteCpu(ffi::ThreadPool pool, Buffers buffers, int64_t format, int64_t group_size,
                  bool poison) {
  QuantizedGroupsParams params = {};
  JAX_ATTN_RETURN_IF_ERROR(Unpack(buffers, format, group_size, &params));
  if (poison) PoisonOnHost({buffers.y});
  HelperPool task_pool(pool.num_threads());
  QuantizedGroupsCpu(params, task_pool);
  return Status::Ok();
}

XLA_FFI_DEFINE_HANDLER(
    kExecuteCpu,
    [](ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer codes, ffi::AnyBuffer scales,
       ffi::AnyBuffer zeros, ffi::Buffer<ffi::S32> group_rows, ResultBuffer y, int64_t format,
       int64_t group_size, bool poison) {
      return ToFfi(
          ExecuteCpu(pool, {x, codes, scales, zeros, group_rows, y}, format, group_size, poison));
    },
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>()
        .Arg<ffi::AnyBuffer>()         // x
        .Arg<ffi::AnyBuffer>()         // codes
        .Arg<ffi::AnyBuffer>()         // scales
        .Arg<ffi::AnyBuffer>()         // zeros
        .Arg<ffi::Buffer<ffi::S32>>()  // group_rows
        .Ret<ffi::AnyBuffer>()         // y
        .Attr<int64_t>("format")
        .Attr<int64_t>("group_size")
        .Attr<bool>("poison"));

}  // namespace

const std::vector<Target> kQuantizedGroupsTargets = {
    {"jax_attn_quantized_groups", "cpu", nullptr, nullptr, kExecuteCpu},
};

}  // namespace jax_attn
