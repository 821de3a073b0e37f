#include "ffi/state_plan.h"

#include <cstring>
#include <string>

namespace jax_attn {
namespace {

constexpr int64_t kNumTokens = kStatePlanTokens, kNumChunks = kStatePlanChunks,
                  kFault = kStatePlanFault, kHeaderWords = kStatePlanHeaderWords;
constexpr int64_t kChunkWords = sizeof(StateChunk) / 4;

}  // namespace

Status ReadStatePlan(const char* op, const ffi::AnyBuffer& plan, int64_t begin, int64_t max_tokens,
                     int64_t num_slots, StatePlan* found) {
  const int64_t num_words = static_cast<int64_t>(plan.element_count());
  JAX_ATTN_RETURN_IF_ERROR(CheckBuffer(op, "plan", plan, ffi::S32, {num_words}));
  const int32_t* words = plan.typed_data<int32_t>();
  const bool has_header = num_words >= kHeaderWords && begin >= kHeaderWords && begin <= num_words;
  if (has_header && words[kFault] != 0) {
    found->is_faulty = true;
    return Status::Ok();
  }
  if (!has_header || words[kNumChunks] < 0 ||
      words[kNumChunks] > (num_words - begin) / kChunkWords || words[kNumTokens] < 0 ||
      words[kNumTokens] > max_tokens) {
    return Status::Error(std::string(op) +
                         ": plan: expected a buffer of plan_linear_attention for this spec, got"
                         " other words.");
  }
  found->num_tokens = words[kNumTokens];
  found->num_chunks = words[kNumChunks];
  found->chunks = reinterpret_cast<const StateChunk*>(words + begin);
  int64_t end = 0;  // of the rows of the chunks before
  for (int64_t i = 0; i < found->num_chunks; ++i) {
    const StateChunk& chunk = found->chunks[i];
    const bool has_slots = chunk.read_slot >= -1 && chunk.read_slot < num_slots &&
                           chunk.write_slot >= -1 && chunk.write_slot < num_slots;
    const bool has_rows =
        chunk.begin == end && chunk.length >= 0 && chunk.length <= found->num_tokens - end;
    if (!has_slots || !has_rows || (i == 0 && chunk.is_first != 1)) {
      return Status::Error(std::string(op) + ": plan: expected chunk " + std::to_string(i) +
                           " to name rows and slots of the arrays, got other words.");
    }
    end += chunk.length;
  }
  if (end != found->num_tokens) {
    return Status::Error(std::string(op) + ": plan: expected chunks of " +
                         std::to_string(found->num_tokens) + " rows, got " + std::to_string(end) +
                         ".");
  }
  return Status::Ok();
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
