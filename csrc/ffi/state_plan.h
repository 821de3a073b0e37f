// Plans of batches over pools of recurrent states, as operands of calls.
#pragma once

#include <cstdint>

#include "ffi/checks.h"
#include "plan/state_plan.h"

namespace jax_attn {

// The same for the operand of a call on a CPU.
Status ReadStatePlan(const char* op, const ffi::AnyBuffer& plan, int64_t begin, int64_t max_tokens,
                     int64_t num_slots, StatePlan* found);

// Where kernels on devices read a plan. Checks types and shapes alone: its words are on the device.
Status SetStatePlan(const char* op, const ffi::AnyBuffer& plan, const ffi::AnyBuffer& layer,
                    int64_t begin, int64_t max_tokens, int64_t num_slots, int64_t num_layers,
                    StatePlanParams* params);

// Rows of a result [max_tokens, ...] behind the last token become 0.
void ZeroPaddingRows(const StatePlan& plan, const ffi::AnyBuffer& result);

}  // namespace jax_attn
