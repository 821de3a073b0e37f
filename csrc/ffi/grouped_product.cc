// jax_attn_grouped_product: unpack, check, launch, return. CUDA only, Hopper only.
#include <string>
#include <utility>

#include "ffi/checks.h"
#include "ffi/handlers.h"
#include "jit/kernels.h"

namespace jax_attn {
namespace {

constexpr char kOp[] = "grouped_product";

// Attributes of the call, in the order of BindAttributes. dtype: DType.
struct Attributes {
  int64_t dtype, tile_rows, tile_columns;
  bool transposed, poison;
};

struct Buffers {
  ffi::AnyBuffer x, weights, group_sizes;
  ffi::AnyBuffer y;
};

Status ReadKernel(const Attributes& a, GroupedProductKernel* kernel) {
  const auto refuse = [](const char* name, const char* expected, int64_t got) {
    return Status::Error(std::string(kOp) + ": attribute " + name + ": expected " + expected +
                         ", got " + std::to_string(got) + ".");
  };
  if (a.dtype != kBF16 && a.dtype != kF16) return refuse("dtype", "0 or 1", a.dtype);
  if (a.tile_rows != 64 && a.tile_rows != 128) return refuse("tile_rows", "64 or 128", a.tile_rows);
  if (a.tile_columns != 64 && a.tile_columns != 128 && a.tile_columns != 256) {
    return refuse("tile_columns", "64, 128 or 256", a.tile_columns);
  }
  *kernel = {90, a.dtype, a.transposed, a.tile_rows, a.tile_columns};
  return Status::Ok();
}

Status Unpack(const Attributes& a, const Buffers& b, GroupedProductParams* p) {
  const auto x = b.x.dimensions(), weights = b.weights.dimensions();
  if (x.size() != 2 || weights.size() != 3) {
    return Status::Error("grouped_product: x, weights: expected ranks 2 and 3, got " +
                         ShapeOf(b.x) + " and " + ShapeOf(b.weights) + ".");
  }
  const int64_t num_rows = x[0], depth = x[1], groups = weights[0];
  const int64_t columns = weights[a.transposed ? 1 : 2];
  constexpr int64_t kMost = int64_t{1} << 30;
  const bool is_small = num_rows < kMost && depth < kMost && columns < kMost;
  if (is_small) {
    p->num_rows = static_cast<i32>(num_rows);
    p->depth = static_cast<i32>(depth);
    p->columns = static_cast<i32>(columns);
    p->num_groups = static_cast<i32>(groups);
  }
  // TMA and the stores have vectors of 16 bytes.
  if (depth == 0 || columns == 0 || depth % 8 != 0 || columns % 8 != 0 || groups < 1 ||
      groups > kMaxProductGroups || !is_small ||
      MostGroupedTiles(*p, a.tile_rows, a.tile_columns) >= 2 * kMost) {
    return Status::Error(
        "grouped_product: expected a depth and columns that are multiples of 8, 1 to 1024 groups, "
        "and fewer than 2^30 rows and 2^31 tiles, got " +
        ShapeOf(b.x) + " and " + ShapeOf(b.weights) + ".");
  }
  const ffi::DataType type = ToDataType(a.dtype);
  JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(kOp, "x", b.x, type, {num_rows, depth}));
  JAX_ATTN_RETURN_IF_ERROR(
      CheckBuffer(kOp, "weights", b.weights, type,
                  {groups, a.transposed ? columns : depth, a.transposed ? depth : columns}));
  JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(kOp, "group_sizes", b.group_sizes, ffi::S32, {groups}));
  JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(kOp, "y", b.y, type, {num_rows, columns}));
  p->x = b.x.untyped_data();
  p->weights = b.weights.untyped_data();
  p->group_sizes = static_cast<const i32*>(b.group_sizes.untyped_data());
  p->y = b.y.untyped_data();
  return Status::Ok();
}

Status InstantiateCuda(const Attributes& attributes) {
  GroupedProductKernel kernel;
  JAX_ATTN_RETURN_IF_ERROR(ReadKernel(attributes, &kernel));
  return PrepareGroupedProduct(kernel);
}

Status InitializeCuda(int32_t device_ordinal, const Attributes& attributes) {
  GroupedProductKernel kernel;
  JAX_ATTN_RETURN_IF_ERROR(ReadKernel(attributes, &kernel));
  return LoadGroupedProduct(kernel, device_ordinal);
}

Status ExecuteCuda(CUstream_st* stream, int32_t device_ordinal, const Buffers& buffers,
                   const Attributes& attributes) {
  GroupedProductKernel kernel;
  GroupedProductParams params = {};
  JAX_ATTN_RETURN_IF_ERROR(ReadKernel(attributes, &kernel));
  JAX_ATTN_RETURN_IF_ERROR(Unpack(attributes, buffers, &params));
  if (attributes.poison) JAX_ATTN_RETURN_IF_ERROR(PoisonOnDevice({buffers.y}, stream));
  return LaunchGroupedProduct(kernel, params, stream, device_ordinal);
}

template <typename Binding>
auto BindAttributes(Binding binding) {
  return std::move(binding)
      .template Attr<int64_t>("dtype")
      .template Attr<int64_t>("tile_rows")
      .template Attr<int64_t>("tile_columns")
      .template Attr<bool>("transposed")
      .template Attr<bool>("poison");
}

XLA_FFI_DEFINE_HANDLER(
    kInstantiateCuda,
    [](auto... attributes) { return ToFfi(InstantiateCuda(Attributes{attributes...})); },
    BindAttributes(ffi::Ffi::BindInstantiate()));
XLA_FFI_DEFINE_HANDLER(
    kInitializeCuda,
    [](int32_t device_ordinal, auto... attributes) {
      return ToFfi(InitializeCuda(device_ordinal, Attributes{attributes...}));
    },
    BindAttributes(ffi::Ffi::BindInitialize().Ctx<ffi::DeviceOrdinal>()));
XLA_FFI_DEFINE_HANDLER(kExecuteCuda,
                       [](CUstream_st* stream, int32_t device_ordinal, ffi::AnyBuffer x,
                          ffi::AnyBuffer weights, ffi::AnyBuffer group_sizes,
                          ffi::Result<ffi::AnyBuffer> y, auto... attributes) {
                         return ToFfi(ExecuteCuda(stream, device_ordinal,
                                                  {x, weights, group_sizes, *y},
                                                  Attributes{attributes...}));
                       },
                       BindAttributes(ffi::Ffi::Bind()
                                          .Ctx<ffi::PlatformStream<CUstream_st*>>()
                                          .Ctx<ffi::DeviceOrdinal>()
                                          .Arg<ffi::AnyBuffer>()    // x
                                          .Arg<ffi::AnyBuffer>()    // weights
                                          .Arg<ffi::AnyBuffer>()    // group_sizes
                                          .Ret<ffi::AnyBuffer>()),  // y
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

const std::vector<Target> kGroupedProductTargets = {
    {"jax_attn_grouped_product", "CUDA", kInstantiateCuda, kInitializeCuda, kExecuteCuda},
};

}  // namespace jax_attn
