#include "ffi/state_plan.h"

#include <cstring>
#include <string>

namespace jax_attn {
namespace {

constexpr int64_t kHeaderWords = kStatePlanHeaderWords;
constexpr int64_t kChunkWords = sizeof(StateChunk) / 4;

}  // namespace

Status ReadStatePlan(const char* op, const ffi::AnyBuffer& plan, int64_t begin, int64_t max_tokens,
                     int64_t num_slots, StatePlan* found) {
  const int64_t num_words = static_cast<int64_t>(plan.element_count());
  JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(op, "plan", plan, ffi::S32, {num_words}));
  return ReadStatePlan(op, plan.typed_data<int32_t>(), num_words, begin, max_tokens, num_slots,
                       found);
}

Status SetStatePlan(const char* op, const ffi::AnyBuffer& plan, const ffi::AnyBuffer& layer,
                    int64_t begin, int64_t max_tokens, int64_t num_slots, int64_t num_layers,
                    StatePlanParams* params) {
  const int64_t num_words = static_cast<int64_t>(plan.element_count());
  JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(op, "plan", plan, ffi::S32, {num_words}));
  JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(op, "layer", layer, ffi::S32, {}));
  constexpr int64_t kMost = int64_t{1} << 31;  // kernels count in 32 bits
  if (begin < kHeaderWords || begin > num_words || num_words >= kMost || max_tokens >= kMost ||
      num_slots >= kMost || num_layers >= kMost) {
    return Status::Error(std::string(op) +
                         ": plan: expected chunks behind a header, and fewer than 2^31 words,"
                         " tokens, slots and layers, got chunks at word " +
                         std::to_string(begin) + " of " + std::to_string(num_words) + ".");
  }
  params->header = plan.typed_data<int32_t>();
  params->chunks = reinterpret_cast<const StateChunk*>(params->header + begin);
  params->layer = layer.typed_data<int32_t>();
  params->max_chunks = static_cast<i32>((num_words - begin) / kChunkWords);
  params->max_tokens = static_cast<i32>(max_tokens);
  params->num_slots = static_cast<i32>(num_slots);
  params->num_layers = static_cast<i32>(num_layers);
  return Status::Ok();
}

void ZeroPaddingRows(const StatePlan& plan, const ffi::AnyBuffer& result) {
  const int64_t rows = result.dimensions()[0];
  if (rows == 0) return;
  const int64_t row_bytes = static_cast<int64_t>(result.size_bytes()) / rows;
  std::memset(static_cast<char*>(result.untyped_data()) + plan.num_tokens * row_bytes, 0,
              (rows - plan.num_tokens) * row_bytes);
}

}  // namespace jax_attn
