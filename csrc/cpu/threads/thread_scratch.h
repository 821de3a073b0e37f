// Memory of a pool thread that lasts from call to call.
#pragma once

#include <cstddef>

namespace jax_attn {

// At least this many bytes, aligned to 64, valid until this thread's next call of ThreadScratch.
// The contents are unspecified. Grows, never shrinks, so that calls after the first allocate
// nothing.
void* ThreadScratch(size_t bytes);

}  // namespace jax_attn
