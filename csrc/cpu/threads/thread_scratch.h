// Memory of a pool thread that lasts from call to call.
#pragma once

#include <cstddef>

namespace jax_attn {

// At least so many bytes, aligned to 64, of this thread: until its next call of ThreadScratch. What
// was there may be anything. Grows, never shrinks, so that a call allocates nothing after the
// first.
void* ThreadScratch(size_t bytes);

}  // namespace jax_attn
