// jax_attn_product: unpack, check, launch, return. CPUs only: elsewhere XLA's matmuls are fast.
#include "cpu/product.h"

#include <optional>
#include <string>

#include "cpu/threads/helper_pool.h"
#include "ffi/checks.h"
#include "ffi/handlers.h"

namespace jax_attn {
namespace {

constexpr char kOp[] = "product";

std::optional<DType> DTypeOf(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::BF16:
      return kBF16;
    case ffi::DataType::F16:
      return kF16;
    case ffi::DataType::F32:
      return kF32;
    default:
      return std::nullopt;
  }
}

// num_groups: matrices of a stack; 0: there is one matrix, not a stack.
Status Unpack(const ffi::AnyBuffer& x, const ffi::AnyBuffer& panels, const ffi::AnyBuffer& y,
              int64_t num_groups, DType* dtype, ProductParams* p) {
  const ffi::DataType type = x.element_type();
  const std::optional<DType> known = DTypeOf(type);
  const auto dims = x.dimensions(), results = y.dimensions();
  if (!known || dims.size() != 2 || results.size() != 2) {
    return Status::Error(
        "product: x, y: expected [n, depth] and [n, columns] of bfloat16, float16 or float32, "
        "got " +
        ShapeOf(x) + " and " + ShapeOf(y) + ".");
  }
  *dtype = *known;
  p->num_rows = dims[0];
  p->depth = dims[1];
  p->columns = results[1];
  p->is_wide = y.element_type() == ffi::F32;
  const int64_t num_panels = (p->columns + kWeightColumns - 1) / kWeightColumns;
  const int64_t steps = WeightSteps(*dtype == kBF16, p->depth);
  const auto check = [&](std::initializer_list<int64_t> shape) {
    return CheckBuffer(kOp, "panels", panels, type, shape);
  };
  const int64_t n = num_groups, columns = kWeightColumns;
  JAX_ATTN_RETURN_IF_ERROR(n == 0 ? (*dtype == kBF16 ? check({num_panels, steps, columns, 2})
                                                     : check({num_panels, steps, columns}))
                                  : (*dtype == kBF16 ? check({n, num_panels, steps, columns, 2})
                                                     : check({n, num_panels, steps, columns})));
  JAX_ATTN_RETURN_IF_ERROR(
      CheckBuffer(kOp, "y", y, p->is_wide ? ffi::F32 : type, {p->num_rows, p->columns}));
  p->x = x.untyped_data();
  p->panels = panels.untyped_data();
  p->y = y.untyped_data();
  return Status::Ok();
}

// bias: [columns] of x's type, or no elements.
Status ExecuteCpu(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer panels,
                  ffi::AnyBuffer bias, ResultBuffer y, int64_t activation, bool poison) {
  DType dtype = {};
  ProductParams params = {};
  JAX_ATTN_RETURN_IF_ERROR(Unpack(x, panels, y, 0, &dtype, &params));
  if (bias.element_count() > 0) {
    JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(kOp, "bias", bias, x.element_type(), {params.columns}));
    params.bias = bias.untyped_data();
  }
  if (activation < 0 || activation >= kNumActivations) {
    return Status::Error("product: activation: expected 0 to " +
                         std::to_string(kNumActivations - 1) + ", got " +
                         std::to_string(activation) + ".");
  }
  params.activation = static_cast<Activation>(activation);
  if (poison) PoisonOnHost({y});
  HelperPool task_pool(pool.num_threads());
  ProductCpu(dtype, params, task_pool);
  return Status::Ok();
}

Status ExecuteGroupedCpu(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer panels,
                         ffi::Buffer<ffi::S32> group_rows, ResultBuffer y, bool poison) {
  DType dtype = {};
  ProductParams params = {};
  const int64_t num_groups = static_cast<int64_t>(group_rows.element_count());
  if (num_groups == 0) return Status::Error("product: group_rows: expected one or more, got none.");
  JAX_ATTN_RETURN_IF_ERROR(Unpack(x, panels, y, num_groups, &dtype, &params));
  const int32_t* rows = group_rows.typed_data();
  JAX_ATTN_RETURN_IF_ERROR(CheckGroupRows(kOp, rows, num_groups, params.num_rows));
  if (poison) PoisonOnHost({y});
  HelperPool task_pool(pool.num_threads());
  GroupedProductCpu(dtype, params, rows, num_groups, task_pool);
  return Status::Ok();
}

XLA_FFI_DEFINE_HANDLER(
    kExecuteCpu,
    [](ffi::ThreadPool pool, auto... bound) { return ToFfi(ExecuteCpu(pool, bound...)); },
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>()
        .Arg<ffi::AnyBuffer>()  // x
        .Arg<ffi::AnyBuffer>()  // panels
        .Arg<ffi::AnyBuffer>()  // bias
        .Ret<ffi::AnyBuffer>()  // y
        .Attr<int64_t>("activation")
        .Attr<bool>("poison"));

XLA_FFI_DEFINE_HANDLER(
    kExecuteGroupedCpu,
    [](ffi::ThreadPool pool, auto... bound) { return ToFfi(ExecuteGroupedCpu(pool, bound...)); },
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>()
        .Arg<ffi::AnyBuffer>()         // x
        .Arg<ffi::AnyBuffer>()         // panels
        .Arg<ffi::Buffer<ffi::S32>>()  // group_rows
        .Ret<ffi::AnyBuffer>()         // y
        .Attr<bool>("poison"));

}  // namespace

const std::vector<Target> kProductTargets = {
    {"jax_attn_product", "cpu", nullptr, nullptr, kExecuteCpu},
    {"jax_attn_grouped_panels", "cpu", nullptr, nullptr, kExecuteGroupedCpu},
};

}  // namespace jax_attn
