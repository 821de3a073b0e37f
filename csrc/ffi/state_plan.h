// Plans of batches over pools of recurrent states (jax_attn/_plan/state_plan.py).
#pragma once

#include <cstdint>

#include "cpu/linear_kernels.h"
#include "ffi/checks.h"
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
Status ReadStatePlan(const char* op, const ffi::AnyBuffer& plan, int64_t begin, int64_t max_tokens,
                     int64_t num_slots, StatePlan* found);

// Where kernels on devices read a plan. Checks types and shapes alone: its words are on the device.
Status SetStatePlan(const char* op, const ffi::AnyBuffer& plan, const ffi::AnyBuffer& layer,
                    int64_t begin, int64_t max_tokens, int64_t num_slots, int64_t num_layers,
                    StatePlanParams* params);

// Rows of a result [max_tokens, ...] behind the last token become 0.
void ZeroPaddingRows(const StatePlan& plan, const ffi::AnyBuffer& result);

}  // namespace jax_attn
