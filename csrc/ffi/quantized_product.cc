// jax_attn_quantized_product: unpack, check, launch, return. CUDA only: CPUs decode tiles in XLA.
#include <string>
#include <utility>

#include "ffi/checks.h"
#include "ffi/handlers.h"
#include "jit/kernels.h"

namespace jax_attn {
namespace {

constexpr char kOp[] = "quantized_product";

// Attributes of the call, in the order of BindAttributes. dtype, format: DType, WeightFormat.
struct Attributes {
  int64_t arch, dtype, format, group_size, tile_rows, tile_columns, main_loop;
  bool poison;
};

struct Buffers {
  ffi::AnyBuffer x, codes, scales, zeros;  // zeros: may be an array without elements
  ffi::AnyBuffer y;
};

Status ReadKernel(const Attributes& a, QuantizedProductKernel* kernel) {
  const auto refuse = [](const char* name, const std::string& expected, int64_t got) {
    return Status::Error(std::string(kOp) + ": attribute " + name + ": expected " + expected +
                         ", got " + std::to_string(got) + ".");
  };
  if (a.dtype != kBF16 && a.dtype != kF16) return refuse("dtype", "0 or 1", a.dtype);
  if (a.format < 0 || a.format >= kNumWeightFormats) return refuse("format", "0 to 2", a.format);
  if (a.group_size <= 0 || a.group_size >= int64_t{1} << 31) {
    return refuse("group_size", "1 to 2^31 - 1", a.group_size);
  }
  if (a.tile_rows < 8 || a.tile_rows > 64 || a.tile_rows % 8 != 0) {
    return refuse("tile_rows", "a multiple of 8 up to 64", a.tile_rows);
  }
  if (a.tile_columns < 32 || a.tile_columns > 256 || a.tile_columns % 32 != 0) {
    return refuse("tile_columns", "a multiple of 32 up to 256", a.tile_columns);
  }
  if (a.main_loop != kPortable && a.main_loop != kHopper) {
    return refuse("main_loop", "0 or 1", a.main_loop);
  }
  // wgmma multiplies a power of two of rows of x, and a warpgroup 128 columns.
  const bool is_whole = (a.tile_rows & (a.tile_rows - 1)) == 0 && a.tile_columns % 128 == 0;
  if (a.main_loop == kHopper && (a.arch != 90 || !is_whole)) {
    return refuse("main_loop",
                  "0 unless arch is 90, tile_rows a power of two, tile_columns 128 or 256", 1);
  }
  const int64_t scale_rows = a.group_size == kProductStep / 2 ? 2 : 1;
  *kernel = {a.arch, a.dtype, a.format, a.tile_rows, a.tile_columns, scale_rows, a.main_loop};
  return Status::Ok();
}

Status Unpack(const Attributes& a, const Buffers& b, QuantizedProductParams* p) {
  const auto x = b.x.dimensions(), codes = b.codes.dimensions(), y = b.y.dimensions();
  if (x.size() != 2 || codes.size() != 2 || y.size() != 3) {
    return Status::Error("quantized_product: x, codes, y: expected ranks 2, 2 and 3, got " +
                         ShapeOf(b.x) + ", " + ShapeOf(b.codes) + " and " + ShapeOf(b.y) + ".");
  }
  const int64_t num_rows = x[0], depth = x[1], columns = codes[1], num_splits = y[0];
  const int64_t groups = (depth + a.group_size - 1) / a.group_size;
  // The kernel copies vectors of 16 bytes, has one scale for a warp's 32 rows, and counts in 32
  // bits.
  const bool is_whole =
      a.group_size % kProductStep == 0 || a.group_size == kProductStep / 2 || groups <= 1;
  const bool is_small = depth < 1 << 30 && columns < 1 << 28 &&  // vectors are counted, too
                        depth * columns < int64_t{1} << 36 && num_rows * depth < int64_t{1} << 35;
  if (depth % 8 != 0 || columns % 16 != 0 || !is_whole || !is_small || num_rows >= 1 << 16 ||
      num_splits < 1 || num_splits > 1 << 10) {
    return Status::Error(
        "quantized_product: expected a depth that is a multiple of 8, columns of 16, groups of 32 "
        "rows, of a multiple of 64 or of all, fewer than 2^16 rows and 2^35 elements of x, fewer "
        "than 2^36 codes, and 1 to 1024 splits, got " +
        ShapeOf(b.x) + " and " + ShapeOf(b.codes) + " in groups of " +
        std::to_string(a.group_size) + " and " + ShapeOf(b.y) + ".");
  }
  const ffi::DataType type = ToDataType(a.dtype);
  p->is_wide = b.y.element_type() == ffi::F32;
  JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(kOp, "x", b.x, type, {num_rows, depth}));
  JAX_ATTN_RETURN_IF_ERROR(
      CheckBuffer(kOp, "codes", b.codes, ffi::U8, {depth / WeightsPerByte(a.format), columns}));
  const ffi::DataType scale_type = a.format == kE2m1Weights ? ffi::U8 : ffi::F32;
  JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(kOp, "scales", b.scales, scale_type, {groups, columns}));
  const bool has_zeros = b.zeros.element_count() > 0;
  if (has_zeros) {
    JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(kOp, "zeros", b.zeros, ffi::U8, {groups, columns}));
  }
  JAX_ATTN_RETURN_IF_ERROR(
      CheckBuffer(kOp, "y", b.y, p->is_wide ? ffi::F32 : type, {num_splits, num_rows, columns}));
  p->x = b.x.untyped_data();
  p->codes = static_cast<const unsigned char*>(b.codes.untyped_data());
  p->scales = b.scales.untyped_data();
  p->zeros = has_zeros ? static_cast<const unsigned char*>(b.zeros.untyped_data()) : nullptr;
  p->y = b.y.untyped_data();
  p->num_rows = static_cast<i32>(num_rows);
  p->depth = static_cast<i32>(depth);
  p->columns = static_cast<i32>(columns);
  p->group_size = static_cast<i32>(a.group_size);
  p->num_splits = static_cast<i32>(num_splits);
  const int64_t steps = (depth + kProductStep - 1) / kProductStep;
  p->split_depth = static_cast<i32>((steps + num_splits - 1) / num_splits * kProductStep);
  return Status::Ok();
}

Status InstantiateCuda(const Attributes& attributes) {
  QuantizedProductKernel kernel;
  JAX_ATTN_RETURN_IF_ERROR(ReadKernel(attributes, &kernel));
  return PrepareQuantizedProduct(kernel);
}

Status InitializeCuda(int32_t device_ordinal, const Attributes& attributes) {
  QuantizedProductKernel kernel;
  JAX_ATTN_RETURN_IF_ERROR(ReadKernel(attributes, &kernel));
  return LoadQuantizedProduct(kernel, device_ordinal);
}

Status ExecuteCuda(CUstream_st* stream, int32_t device_ordinal, const Buffers& buffers,
                   const Attributes& attributes) {
  QuantizedProductKernel kernel;
  QuantizedProductParams params = {};
  JAX_ATTN_RETURN_IF_ERROR(ReadKernel(attributes, &kernel));
  JAX_ATTN_RETURN_IF_ERROR(Unpack(attributes, buffers, &params));
  if (attributes.poison) JAX_ATTN_RETURN_IF_ERROR(PoisonOnDevice({buffers.y}, stream));
  return LaunchQuantizedProduct(kernel, params, stream, device_ordinal);
}

template <typename Binding>
auto BindAttributes(Binding binding) {
  return std::move(binding)
      .template Attr<int64_t>("arch")
      .template Attr<int64_t>("dtype")
      .template Attr<int64_t>("format")
      .template Attr<int64_t>("group_size")
      .template Attr<int64_t>("tile_rows")
      .template Attr<int64_t>("tile_columns")
      .template Attr<int64_t>("main_loop")
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
                          ffi::AnyBuffer codes, ffi::AnyBuffer scales, ffi::AnyBuffer zeros,
                          ffi::Result<ffi::AnyBuffer> y, auto... attributes) {
                         return ToFfi(ExecuteCuda(stream, device_ordinal,
                                                  {x, codes, scales, zeros, *y},
                                                  Attributes{attributes...}));
                       },
                       BindAttributes(ffi::Ffi::Bind()
                                          .Ctx<ffi::PlatformStream<CUstream_st*>>()
                                          .Ctx<ffi::DeviceOrdinal>()
                                          .Arg<ffi::AnyBuffer>()    // x
                                          .Arg<ffi::AnyBuffer>()    // codes
                                          .Arg<ffi::AnyBuffer>()    // scales
                                          .Arg<ffi::AnyBuffer>()    // zeros
                                          .Ret<ffi::AnyBuffer>()),  // y
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

const std::vector<Target> kQuantizedProductTargets = {
    {"jax_attn_quantized_product", "CUDA", kInstantiateCuda, kInitializeCuda, kExecuteCuda},
};

}  // namespace jax_attn
