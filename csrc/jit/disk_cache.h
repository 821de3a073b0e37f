// Compiled kernels on disk: one folder an entry, written beside its place and renamed into it, so
// that a reader sees a whole entry or none, whoever else writes. Nothing read back is trusted: an
// entry names the whole key it was compiled for and the digest of its cubin, and neither it nor any
// folder on the way to it may be one that other users can write.
#pragma once

#include <string>
#include <vector>

#include "status.h"

namespace jax_attn {

struct CacheEntry {
  std::string key;  // CacheKey's
  std::string cubin;
  std::string source;   // the generated translation unit, kept for people
  std::string options;  // of NVRTC
  double compile_ms = 0;
  std::string description;  // lines that say what the key is made of; ReadDescriptions finds them
};

// kMiss: nothing is there, or the entry of another key, or the cache is none to read from (then
// WriteCacheEntry says why). kCorrupt: something is there, but it is not what was written.
enum class CacheLookup { kHit, kMiss, kCorrupt };

// Fills entry->cubin from folder `path` if it holds what was compiled for entry->key.
CacheLookup ReadCacheEntry(const std::string& path, CacheEntry* entry);

// Texts that contain the descriptions of all entries in folder `cache` whose names begin with
// `prefix`, for a log: their cubins are not looked at. Nothing if the folder is not to be trusted.
std::vector<std::string> ReadDescriptions(const std::string& cache, const std::string& prefix);

// Publishes `entry` as folder `path`. If another process published first, its entry stays if it is
// sound and is replaced if it is not; both are successes. Removes what writers that were killed
// left beside it. An error says in one sentence what is wrong with the cache folder.
Status WriteCacheEntry(const std::string& path, const CacheEntry& entry);

}  // namespace jax_attn
