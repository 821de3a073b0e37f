// Compiled kernels on disk: one folder an entry, written beside its place and renamed into it, so
// that a reader sees a whole entry or none, whoever else writes. Nothing read back is trusted.
#pragma once

#include <string>

#include "status.h"

namespace jax_attn {

struct CacheEntry {
  std::string cubin;
  std::string source;   // the generated translation unit, kept for people
  std::string options;  // of NVRTC
  double compile_ms = 0;
};

enum class CacheLookup { kHit, kMiss, kCorrupt };

// Fills entry->cubin from folder `path`. kCorrupt: something is there, but it is not what was
// written.
CacheLookup ReadCacheEntry(const std::string& path, CacheEntry* entry);

// Publishes `entry` as folder `path`. If another process published first, its entry stays if it is
// sound and is replaced if it is not; both are successes.
Status WriteCacheEntry(const std::string& path, const CacheEntry& entry);

}  // namespace jax_attn
