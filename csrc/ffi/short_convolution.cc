// jax_attn_short_convolution: unpack, check, launch, return. CPUs only.
#include "cpu/short_convolution.h"

#include <string>

#include "cpu/threads/helper_pool.h"
#include "ffi/checks.h"
#include "ffi/handlers.h"
#include "ffi/state_plan.h"

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
  bool has_silu;
  int64_t chunks_begin;  // word of the plan
  bool poison;
};

Status ExecuteCpu(ffi::ThreadPool pool, const ConvolutionCall& call) {
  const ffi::DataType type = call.x.element_type();
  const int64_t dtype = type == ffi::BF16 ? kBF16 : type == ffi::F16 ? kF16 : kF32;
  const auto of_states = call.states.dimensions();
  const bool is_stacked = of_states.size() == 4;
  if (call.x.dimensions().size() != 2 || call.weight.dimensions().size() != 2 ||
      (of_states.size() != 3 && !is_stacked)) {
    return Status::Error(
        "short_convolution: x, weight, states: expected rank 2, 2, and 3 or 4, got " +
        ShapeOf(call.x) + ", " + ShapeOf(call.weight) + " and " + ShapeOf(call.states) + ".");
  }
  ConvolutionParams p = {};
  const int64_t tokens = call.x.dimensions()[0];
  p.num_channels = call.x.dimensions()[1];
  p.width = call.weight.dimensions()[1];
  if (p.width < 1 || p.width > kMaxConvolutionWidth) {
    return Status::Error("short_convolution: weight: expected a width of 1 to 8, got " +
                         std::to_string(p.width) + ".");
  }
  const int64_t layers = is_stacked ? of_states[0] : 1, slots = of_states[is_stacked ? 1 : 0];
  const ffi::DataType expected = ToDataType(dtype);
  JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(kOp, "x", call.x, expected, {tokens, p.num_channels}));
  JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(kOp, "y", call.y, expected, {tokens, p.num_channels}));
  JAX_ATTN_RETURN_IF_ERROR(
      CheckBuffer(kOp, "weight", call.weight, ffi::F32, {p.num_channels, p.width}));
  JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(kOp, "bias", call.bias, ffi::F32, {p.num_channels}));
  for (const ffi::AnyBuffer& states : {call.states, ffi::AnyBuffer(call.states_out)}) {
    JAX_ATTN_RETURN_IF_ERROR(is_stacked ? CheckBuffer(kOp, "states", states, expected,
                                                      {layers, slots, p.width - 1, p.num_channels})
                                        : CheckBuffer(kOp, "states", states, expected,
                                                      {slots, p.width - 1, p.num_channels}));
  }
  if (call.states.size_bytes() > 0 &&
      call.states.untyped_data() != call.states_out.untyped_data()) {
    return Status::Error(
        "short_convolution: result: expected the memory of states, got other memory.");
  }
  JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(kOp, "layer", call.layer, ffi::S32, {}));
  const int64_t layer = call.layer.typed_data<int32_t>()[0];
  if (layer < 0 || layer >= layers) {
    return Status::Error("short_convolution: layer: expected 0 to " + std::to_string(layers - 1) +
                         ", got " + std::to_string(layer) + ".");
  }
  StatePlan plan;
  JAX_ATTN_RETURN_IF_ERROR(ReadStatePlan(kOp, call.plan, call.chunks_begin, tokens, slots, &plan));
  if (call.poison || plan.is_faulty) PoisonOnHost({call.y});
  if (plan.is_faulty) return Status::Ok();
  p.x = call.x.untyped_data();
  p.weight = call.weight.typed_data<float>();
  p.bias = call.bias.typed_data<float>();
  p.states = static_cast<char*>(call.states_out.untyped_data()) +
             layer * slots * (p.width - 1) * p.num_channels * (dtype == kF32 ? 4 : 2);
  p.y = call.y.untyped_data();
  p.has_silu = call.has_silu;
  p.chunks = plan.chunks;
  p.num_chunks = plan.num_chunks;
  HelperPool task_pool(pool.num_threads());
  ShortConvolutionCpu(dtype, p, task_pool);
  ZeroPaddingRows(plan, call.y);
  return Status::Ok();
}

XLA_FFI_DEFINE_HANDLER(
    kExecuteCpu,
    [](ffi::ThreadPool pool, auto... bound) {
      return ToFfi(ExecuteCpu(pool, ConvolutionCall{bound...}));
    },
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>()
        .Arg<ffi::AnyBuffer>()  // x
        .Arg<ffi::AnyBuffer>()  // weight
        .Arg<ffi::AnyBuffer>()  // bias
        .Arg<ffi::AnyBuffer>()  // states
        .Arg<ffi::AnyBuffer>()  // plan
        .Arg<ffi::AnyBuffer>()  // layer
        .Ret<ffi::AnyBuffer>()  // y
        .Ret<ffi::AnyBuffer>()  // states
        .Attr<bool>("silu")
        .Attr<int64_t>("chunks_begin")
        .Attr<bool>("poison"));

}  // namespace

const std::vector<Target> kShortConvolutionTargets = {
    {"jax_attn_short_convolution", "cpu", nullptr, nullptr, kExecuteCpu},
};

}  // namespace jax_attn
