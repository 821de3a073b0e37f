// jax_attn_short_convolution: unpack, check, launch, return.
#include "cpu/short_convolution.h"

#include <string>
#include <utility>

#include "cpu/threads/helper_pool.h"
#include "ffi/checks.h"
#include "ffi/handlers.h"
#include "ffi/state_plan.h"
#include "jit/kernels.h"

namespace jax_attn {
namespace {

constexpr char kOp[] = "short_convolution";

// The operands, results and attributes of one call, in the order of its binding.
struct ConvolutionCall {
  ffi::AnyBuffer x;       // [max_tokens, num_channels]
  ffi::AnyBuffer weight;  // [num_channels, width], f32
  ffi::AnyBuffer bias;    // [num_channels], f32
  ffi::AnyBuffer states;  // [num_layers, num_slots, width - 1, num_channels], or without num_layers
  ffi::AnyBuffer plan, layer;
  ResultBuffer y, states_out;
  int64_t arch, dtype, width;
  bool has_silu;
  int64_t chunks_begin;  // word of the plan
  int64_t max_qo_len;
  bool poison;
};

struct ConvolutionShape {
  int64_t tokens, channels, layers, slots;
};

// Checks attributes that select a kernel.
Status CheckKernel(int64_t dtype, int64_t width) {
  if (dtype < kBF16 || dtype > kF32) {
    return Status::Error("short_convolution: attribute dtype: expected 0 to 2, got " +
                         std::to_string(dtype) + ".");
  }
  if (width < 1 || width > kMaxConvolutionWidth) {
    return Status::Error("short_convolution: weight: expected a width of 1 to 8, got " +
                         std::to_string(width) + ".");
  }
  return Status::Ok();
}

// Checks the arrays of a call without reading them.
Status CheckCall(const ConvolutionCall& call, ConvolutionShape* shape) {
  JAX_ATTN_RETURN_IF_ERROR(CheckKernel(call.dtype, call.width));
  const auto of_states = call.states.dimensions();
  const bool is_stacked = of_states.size() == 4;
  if (call.x.dimensions().size() != 2 || (of_states.size() != 3 && !is_stacked)) {
    return Status::Error("short_convolution: x, states: expected rank 2, and 3 or 4, got " +
                         ShapeOf(call.x) + " and " + ShapeOf(call.states) + ".");
  }
  *shape = {call.x.dimensions()[0], call.x.dimensions()[1], is_stacked ? of_states[0] : 1,
            of_states[is_stacked ? 1 : 0]};
  const auto [tokens, channels, layers, slots] = *shape;
  const ffi::DataType expected = ToDataType(call.dtype);
  JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(kOp, "x", call.x, expected, {tokens, channels}));
  JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(kOp, "y", call.y, expected, {tokens, channels}));
  JAX_ATTN_RETURN_IF_ERROR(
      CheckBuffer(kOp, "weight", call.weight, ffi::F32, {channels, call.width}));
  JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(kOp, "bias", call.bias, ffi::F32, {channels}));
  for (const ffi::AnyBuffer& states : {call.states, ffi::AnyBuffer(call.states_out)}) {
    JAX_ATTN_RETURN_IF_ERROR(is_stacked ? CheckBuffer(kOp, "states", states, expected,
                                                      {layers, slots, call.width - 1, channels})
                                        : CheckBuffer(kOp, "states", states, expected,
                                                      {slots, call.width - 1, channels}));
  }
  return CheckBuffer(kOp, "layer", call.layer, ffi::S32, {});
}

Status ExecuteCpu(ffi::ThreadPool pool, const ConvolutionCall& call) {
  ConvolutionShape shape;
  JAX_ATTN_RETURN_IF_ERROR(CheckCall(call, &shape));
  JAX_ATTN_RETURN_IF_ERROR(CheckSameMemory(kOp, "states", call.states_out, call.states));
  const int64_t layer = call.layer.typed_data<int32_t>()[0];
  JAX_ATTN_RETURN_IF_ERROR(CheckLayer(kOp, static_cast<int32_t>(layer), shape.layers));
  StatePlan plan;
  JAX_ATTN_RETURN_IF_ERROR(
      ReadStatePlan(kOp, call.plan, call.chunks_begin, shape.tokens, shape.slots, &plan));
  if (call.poison || plan.is_faulty) PoisonOnHost({call.y});
  if (plan.is_faulty) return Status::Ok();
  ConvolutionParams p = {};
  p.num_channels = shape.channels;
  p.width = call.width;
  p.x = call.x.untyped_data();
  p.weight = call.weight.typed_data<float>();
  p.bias = call.bias.typed_data<float>();
  p.states = static_cast<char*>(call.states_out.untyped_data()) +
             layer * shape.slots * (p.width - 1) * p.num_channels * (call.dtype == kF32 ? 4 : 2);
  p.y = call.y.untyped_data();
  p.has_silu = call.has_silu;
  p.chunks = plan.chunks;
  p.num_chunks = plan.num_chunks;
  HelperPool task_pool(pool.num_threads());
  ShortConvolutionCpu(call.dtype, p, task_pool);
  ZeroPaddingRows(plan, call.y);
  return Status::Ok();
}

// The attributes, in the order of the binding.
struct KernelAttributes {
  int64_t arch, dtype, width;
  bool has_silu;
  int64_t chunks_begin, max_qo_len;
  bool poison;

  ShortConvolutionKernel Kernel() const { return {arch, dtype, width, has_silu}; }
};

Status InstantiateCuda(const KernelAttributes& attributes) {
  JAX_ATTN_RETURN_IF_ERROR(CheckKernel(attributes.dtype, attributes.width));
  return PrepareShortConvolution(attributes.Kernel());
}

Status InitializeCuda(int32_t device_ordinal, const KernelAttributes& attributes) {
  JAX_ATTN_RETURN_IF_ERROR(CheckKernel(attributes.dtype, attributes.width));
  return LoadShortConvolution(attributes.Kernel(), device_ordinal);
}

Status ExecuteCuda(CUstream_st* stream, int32_t device_ordinal, const ConvolutionCall& call) {
  ConvolutionShape shape;
  JAX_ATTN_RETURN_IF_ERROR(CheckCall(call, &shape));
  ShortConvolutionParams p = {};
  JAX_ATTN_RETURN_IF_ERROR(SetStatePlan(kOp, call.plan, call.layer, call.chunks_begin, shape.tokens,
                                        shape.slots, shape.layers, &p.plan));
  if (shape.channels >= int64_t{1} << 31) {
    return Status::Error("short_convolution: x: expected fewer than 2^31 channels, got " +
                         std::to_string(shape.channels) + ".");
  }
  JAX_ATTN_RETURN_IF_ERROR(CopyToResult(call.states, call.states_out, stream));
  p.x = call.x.untyped_data();
  p.weight = call.weight.typed_data<float>();
  p.bias = call.bias.typed_data<float>();
  p.states = call.states_out.untyped_data();
  p.y = call.y.untyped_data();
  p.num_channels = static_cast<i32>(shape.channels);
  if (call.poison) JAX_ATTN_RETURN_IF_ERROR(PoisonOnDevice({call.y}, stream));
  return LaunchShortConvolution({call.arch, call.dtype, call.width, call.has_silu}, p,
                                call.max_qo_len, stream, device_ordinal);
}

template <typename Binding>
auto BindAttributes(Binding binding) {
  return std::move(binding)
      .template Attr<int64_t>("arch")
      .template Attr<int64_t>("dtype")
      .template Attr<int64_t>("width")
      .template Attr<bool>("silu")
      .template Attr<int64_t>("chunks_begin")
      .template Attr<int64_t>("max_qo_len")
      .template Attr<bool>("poison");
}

template <typename Binding>
auto BindCall(Binding binding) {
  return BindAttributes(std::move(binding)
                            .template Arg<ffi::AnyBuffer>()    // x
                            .template Arg<ffi::AnyBuffer>()    // weight
                            .template Arg<ffi::AnyBuffer>()    // bias
                            .template Arg<ffi::AnyBuffer>()    // states
                            .template Arg<ffi::AnyBuffer>()    // plan
                            .template Arg<ffi::AnyBuffer>()    // layer
                            .template Ret<ffi::AnyBuffer>()    // y
                            .template Ret<ffi::AnyBuffer>());  // states
}

XLA_FFI_DEFINE_HANDLER(
    kExecuteCpu,
    [](ffi::ThreadPool pool, auto... bound) {
      return ToFfi(ExecuteCpu(pool, ConvolutionCall{bound...}));
    },
    BindCall(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));
XLA_FFI_DEFINE_HANDLER(
    kInstantiateCuda, [](auto... attributes) { return ToFfi(InstantiateCuda({attributes...})); },
    BindAttributes(ffi::Ffi::BindInstantiate()));
XLA_FFI_DEFINE_HANDLER(
    kInitializeCuda,
    [](int32_t device_ordinal, auto... attributes) {
      return ToFfi(InitializeCuda(device_ordinal, {attributes...}));
    },
    BindAttributes(ffi::Ffi::BindInitialize().Ctx<ffi::DeviceOrdinal>()));
XLA_FFI_DEFINE_HANDLER(
    kExecuteCuda,
    [](CUstream_st* stream, int32_t device_ordinal, auto... bound) {
      return ToFfi(ExecuteCuda(stream, device_ordinal, ConvolutionCall{bound...}));
    },
    BindCall(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<CUstream_st*>>().Ctx<ffi::DeviceOrdinal>()),
    {ffi::Traits::kCmdBufferCompatible});

}  // namespace

const std::vector<Target> kShortConvolutionTargets = {
    {"jax_attn_short_convolution", "cpu", nullptr, nullptr, kExecuteCpu},
    {"jax_attn_short_convolution", "CUDA", kInstantiateCuda, kInitializeCuda, kExecuteCuda},
};

}  // namespace jax_attn
