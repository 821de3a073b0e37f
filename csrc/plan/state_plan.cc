#include "plan/state_plan.h"

namespace jax_attn {
namespace {

constexpr int64_t kHeaderWords = kStatePlanHeaderWords;
constexpr int64_t kChunkWords = sizeof(StateChunk) / 4;

}  // namespace

Status ReadStatePlan(const std::string& op, const int32_t* words, int64_t num_words, int64_t begin,
                     int64_t max_tokens, int64_t num_slots, StatePlan* found) {
  const bool has_header = num_words >= kHeaderWords && begin >= kHeaderWords && begin <= num_words;
  if (has_header && words[kStatePlanFault] != 0) {
    found->is_faulty = true;
    return Status::Ok();
  }
  if (!has_header || words[kStatePlanChunks] < 0 ||
      words[kStatePlanChunks] > (num_words - begin) / kChunkWords || words[kStatePlanTokens] < 0 ||
      words[kStatePlanTokens] > max_tokens) {
    return Status::Error(op +
                         ": plan: expected a buffer of plan_linear_attention for this spec, got"
                         " other words.");
  }
  found->num_tokens = words[kStatePlanTokens];
  found->num_chunks = words[kStatePlanChunks];
  found->chunks = reinterpret_cast<const StateChunk*>(words + begin);
  int64_t end = 0;  // of the rows of the chunks before
  for (int64_t i = 0; i < found->num_chunks; ++i) {
    const StateChunk& chunk = found->chunks[i];
    const bool has_slots = chunk.read_slot >= -1 && chunk.read_slot < num_slots &&
                           chunk.write_slot >= -1 && chunk.write_slot < num_slots;
    const bool has_rows =
        chunk.begin == end && chunk.length >= 0 && chunk.length <= found->num_tokens - end;
    if (!has_slots || !has_rows || (i == 0 && chunk.is_first != 1)) {
      return Status::Error(op + ": plan: expected chunk " + std::to_string(i) +
                           " to name rows and slots of the arrays, got other words.");
    }
    end += chunk.length;
  }
  if (end != found->num_tokens) {
    return Status::Error(op + ": plan: expected chunks of " + std::to_string(found->num_tokens) +
                         " rows, got " + std::to_string(end) + ".");
  }
  return Status::Ok();
}

}  // namespace jax_attn
