// The device sources inside this extension. build_tools/embed_sources.py generates the table.
#pragma once

#include <cstddef>

namespace jax_attn {

struct EmbeddedSource {
  const char* name;  // path below csrc/, as in #include: "cuda/sm80/attention.cuh"
  const char* text;
};

extern const EmbeddedSource kEmbeddedSources[];
extern const size_t kNumEmbeddedSources;

}  // namespace jax_attn
