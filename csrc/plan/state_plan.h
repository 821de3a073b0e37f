// Plans of batches over pools of recurrent states (jax_attn/_plan/state_plan.py makes them).
#pragma once

#include <cstdint>
#include <string>

#include "params.h"
#include "status.h"

namespace jax_attn {

// The part of a plan that kernels read.
struct StatePlan {
  const StateChunk* chunks = nullptr;
  int64_t num_chunks = 0, num_tokens = 0;
  bool is_faulty = false;  // there are no chunks
};

// Reads a plan whose chunks begin at word `begin`, and checks that they name rows and slots of the
// arrays.
Status ReadStatePlan(const std::string& op, const int32_t* words, int64_t num_words, int64_t begin,
                     int64_t max_tokens, int64_t num_slots, StatePlan* found);

}  // namespace jax_attn
