// jax_attn_all_reduce: unpack, check, launch, return. CUDA only: elsewhere JAX sums.
#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "ffi/checks.h"
#include "ffi/handlers.h"
#include "jit/device_group.h"
#include "jit/kernels.h"

namespace jax_attn {
namespace {

constexpr char kOp[] = "all_reduce";
constexpr int64_t kNsPerMs = 1'000'000;
constexpr int64_t kMostMs = INT64_MAX / kNsPerMs;

// Attributes of the call, in the order of BindAttributes. devices: [num_groups, group_size], the
// ordinals of each group by rank. call: of the call site. limit: ms.
struct Attributes {
  ffi::Span<const int64_t> devices;
  int64_t arch, dtype, group_size, num_threads, vectors, num_ctas, call, limit;
  bool two_shot, residual, norm, quantizes;
  float eps, norm_offset;
  bool poison;
};

Status Refuse(const char* name, const std::string& expected, int64_t got) {
  return Status::Error(std::string(kOp) + ": attribute " + name + ": expected " + expected +
                       ", got " + std::to_string(got) + ".");
}

Status ReadKernel(const Attributes& a, AllReduceKernel* kernel) {
  if (a.dtype < kBF16 || a.dtype > kF32) return Refuse("dtype", "0 to 2", a.dtype);
  if (a.group_size < 2 || a.group_size > kMaxReducers) {
    return Refuse("group_size", "2 to " + std::to_string(kMaxReducers), a.group_size);
  }
  if (a.devices.size() == 0 || a.devices.size() % a.group_size != 0) {
    return Refuse("devices", "whole groups of " + std::to_string(a.group_size),
                  static_cast<int64_t>(a.devices.size()));
  }
  if (a.num_threads < 32 || a.num_threads > 512 || a.num_threads % 32 != 0) {
    return Refuse("num_threads", "a multiple of 32 up to 512", a.num_threads);
  }
  if (a.vectors < 1 || a.vectors > 2) return Refuse("vectors", "1 or 2", a.vectors);
  if (a.num_ctas < 1 || a.num_ctas > kAllReduceCtas) {
    return Refuse("num_ctas", "1 to " + std::to_string(kAllReduceCtas), a.num_ctas);
  }
  if (a.limit < 1 || a.limit > kMostMs) {
    return Refuse("limit", "1 to " + std::to_string(kMostMs), a.limit);
  }
  if (a.quantizes && (!a.norm || a.dtype == kF32)) {
    return Status::Error("all_reduce: quantizes: expected a norm and 16 bits.");
  }
  *kernel = {a.arch,    a.dtype,    a.group_size, a.num_threads,
             a.vectors, a.two_shot, a.norm,       a.quantizes};
  return Status::Ok();
}

// The device's group, and its rank in it.
Status FindGroup(const Attributes& a, int32_t device_ordinal, DeviceGroup** group, int* rank) {
  const int64_t* begin = a.devices.begin();
  const int64_t* found = std::find(begin, a.devices.end(), int64_t{device_ordinal});
  if (found == a.devices.end()) {
    return Status::Error(
        "all_reduce: mesh: expected the mesh of the shard_map, got one without device " +
        std::to_string(device_ordinal) + ".");
  }
  const int64_t at = found - begin;
  *rank = static_cast<int>(at % a.group_size);
  const int64_t* first = found - *rank;
  return DeviceGroup::Get(std::vector<int64_t>(first, first + a.group_size), group);
}

Status Unpack(const Attributes& a, const ffi::RemainingArgs& args, ffi::RemainingRets& rets,
              AllReduceParams* p, std::vector<ffi::AnyBuffer>* results) {
  const size_t num_args = 1 + a.residual + a.norm, num_rets = 1 + a.norm + a.quantizes;
  if (args.size() != num_args || rets.size() != num_rets) {
    return Status::Error("all_reduce: expected " + std::to_string(num_args) + " operands and " +
                         std::to_string(num_rets) + " results, got " + std::to_string(args.size()) +
                         " and " + std::to_string(rets.size()) + ".");
  }
  std::vector<ffi::AnyBuffer> given;
  for (size_t i = 0; i < num_args; ++i) given.push_back(*args.get<ffi::AnyBuffer>(i));
  for (size_t i = 0; i < num_rets; ++i) results->push_back(**rets.get<ffi::AnyBuffer>(i));
  const ffi::AnyBuffer& x = given[0];
  const ffi::DataType type = ToDataType(a.dtype);
  if (x.dimensions().size() != 2) {
    return Status::Error("all_reduce: x: expected rank 2, got " + ShapeOf(x) + ".");
  }
  const int64_t num_rows = x.dimensions()[0], columns = x.dimensions()[1];
  const int64_t width = 16 / ElementBytes(a.dtype);
  if (columns < 1 || columns % width != 0 || columns / width > a.num_threads * a.vectors ||
      columns * ElementBytes(a.dtype) > kAllReduceSlotBytes || num_rows >= int64_t{1} << 30) {
    return Status::Error("all_reduce: x: expected rows of whole vectors of 16 bytes, up to " +
                         std::to_string(a.num_threads * a.vectors) + ", got " + ShapeOf(x) + ".");
  }
  JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(kOp, "x", x, type, {num_rows, columns}));
  JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(kOp, "sum", (*results)[0], type, {num_rows, columns}));
  size_t next = 1;
  if (a.residual) {
    JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(kOp, "residual", given[next], type, {num_rows, columns}));
    p->residual = given[next++].untyped_data();
  }
  if (a.norm) {
    JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(kOp, "norm_weight", given[next], type, {columns}));
    p->weight = given[next].untyped_data();
    const ffi::DataType normed = a.quantizes ? ffi::F8E4M3FN : type;
    JAX_ATTN_RETURN_IF_ERROR(
        CheckBuffer(kOp, "normed", (*results)[1], normed, {num_rows, columns}));
    p->normed = (*results)[1].untyped_data();
  }
  if (a.quantizes) {
    JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(kOp, "scales", (*results)[2], ffi::F32, {num_rows}));
    p->scales = static_cast<float*>((*results)[2].untyped_data());
  }
  p->x = x.untyped_data();
  p->sum = (*results)[0].untyped_data();
  p->num_rows = static_cast<i32>(num_rows);
  p->columns = static_cast<i32>(columns);
  p->limit = a.limit * kNsPerMs;
  p->call = static_cast<i32>(a.call);
  p->eps = a.eps;
  p->norm_offset = a.norm_offset;
  return Status::Ok();
}

Status InstantiateCuda(const Attributes& attributes) {
  AllReduceKernel kernel;
  JAX_ATTN_RETURN_IF_ERROR(ReadKernel(attributes, &kernel));
  return PrepareAllReduce(kernel);
}

// Runs before every run of the executable on the device, also where the kernels are in a captured
// graph.
Status InitializeCuda(CUstream_st* stream, int32_t device_ordinal, const ffi::Context& context,
                      const Attributes& attributes) {
  AllReduceKernel kernel;
  JAX_ATTN_RETURN_IF_ERROR(ReadKernel(attributes, &kernel));
  JAX_ATTN_RETURN_IF_ERROR(LoadAllReduce(kernel, device_ordinal));
  DeviceGroup* group = nullptr;
  int rank = 0;
  JAX_ATTN_RETURN_IF_ERROR(FindGroup(attributes, device_ordinal, &group, &rank));
  const ffi::ErrorOr<ffi::RunId> run = context.get<ffi::RunId>();
  return group->BeginRun(rank, run.has_value() ? run->run_id : 0, stream);
}

Status ExecuteCuda(CUstream_st* stream, int32_t device_ordinal, const ffi::RemainingArgs& args,
                   ffi::RemainingRets rets, const Attributes& attributes) {
  AllReduceKernel kernel;
  AllReduceParams params = {};
  std::vector<ffi::AnyBuffer> results;
  JAX_ATTN_RETURN_IF_ERROR(ReadKernel(attributes, &kernel));
  JAX_ATTN_RETURN_IF_ERROR(Unpack(attributes, args, rets, &params, &results));
  DeviceGroup* group = nullptr;
  int rank = 0;
  JAX_ATTN_RETURN_IF_ERROR(FindGroup(attributes, device_ordinal, &group, &rank));
  group->Fill(rank, &params);
  if (attributes.poison) {
    for (const ffi::AnyBuffer& result : results) {
      JAX_ATTN_RETURN_IF_ERROR(PoisonOnDevice({result}, stream));
    }
  }
  return LaunchAllReduce(kernel, params, attributes.num_ctas, stream, device_ordinal);
}

template <typename Binding>
auto BindAttributes(Binding binding) {
  return std::move(binding)
      .template Attr<ffi::Span<const int64_t>>("devices")
      .template Attr<int64_t>("arch")
      .template Attr<int64_t>("dtype")
      .template Attr<int64_t>("group_size")
      .template Attr<int64_t>("num_threads")
      .template Attr<int64_t>("vectors")
      .template Attr<int64_t>("num_ctas")
      .template Attr<int64_t>("call")
      .template Attr<int64_t>("limit")
      .template Attr<bool>("two_shot")
      .template Attr<bool>("residual")
      .template Attr<bool>("norm")
      .template Attr<bool>("quantizes")
      .template Attr<float>("eps")
      .template Attr<float>("norm_offset")
      .template Attr<bool>("poison");
}

XLA_FFI_DEFINE_HANDLER(
    kInstantiateCuda,
    [](auto... attributes) { return ToFfi(InstantiateCuda(Attributes{attributes...})); },
    BindAttributes(ffi::Ffi::BindInstantiate()));
XLA_FFI_DEFINE_HANDLER(
    kInitializeCuda,
    [](CUstream_st* stream, int32_t device_ordinal, ffi::Context context, auto... attributes) {
      return ToFfi(InitializeCuda(stream, device_ordinal, context, Attributes{attributes...}));
    },
    BindAttributes(ffi::Ffi::BindInitialize()
                       .Ctx<ffi::PlatformStream<CUstream_st*>>()
                       .Ctx<ffi::DeviceOrdinal>()
                       .Ctx<ffi::Context>()));
XLA_FFI_DEFINE_HANDLER(kExecuteCuda,
                       [](CUstream_st* stream, int32_t device_ordinal, ffi::RemainingArgs args,
                          ffi::RemainingRets rets, auto... attributes) {
                         return ToFfi(ExecuteCuda(stream, device_ordinal, args, rets,
                                                  Attributes{attributes...}));
                       },
                       BindAttributes(ffi::Ffi::Bind()
                                          .Ctx<ffi::PlatformStream<CUstream_st*>>()
                                          .Ctx<ffi::DeviceOrdinal>()
                                          .RemainingArgs()    // x, residual, norm_weight
                                          .RemainingRets()),  // sum, normed, scales
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

const std::vector<Target> kAllReduceTargets = {
    {"jax_attn_all_reduce", "CUDA", kInstantiateCuda, kInitializeCuda, kExecuteCuda},
};

}  // namespace jax_attn
