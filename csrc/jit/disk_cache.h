// Compiled kernels on disk. An entry is a folder, which is written under another name and then
// renamed, so a reader sees a whole entry or none, also while others write.
//
// Nothing that is read back is trusted. An entry contains the key that it was compiled for and the
// digest of its cubin. An entry that other users can write is not read, nor is one in a folder that
// other users can write.
#pragma once

#include <string>
#include <vector>

#include "status.h"

namespace jax_attn {

struct CacheEntry {
  std::string key;  // from CacheKey
  std::string cubin;
  std::string source;   // the generated translation unit, for people
  std::string options;  // NVRTC's
  double compile_ms = 0;
  std::string description;  // lines that say what the key is made of, for ReadDescriptions
};

// kMiss: there is no entry, it has another key, or the cache is not to be trusted (WriteCacheEntry
// then says why). kCorrupt: there is an entry, but it is not what was written.
enum class CacheLookup { kHit, kMiss, kCorrupt };

// Fills entry->cubin from folder `path` if its entry was compiled for entry->key.
CacheLookup ReadCacheEntry(const std::string& path, CacheEntry* entry);

// Returns texts that contain the descriptions of the entries in folder `cache` whose names begin
// with `prefix`. Does not read their cubins. Returns nothing if the folder is not to be trusted.
std::vector<std::string> ReadDescriptions(const std::string& cache, const std::string& prefix);

// Publishes `entry` as folder `path`. If another process published first, a sound entry of its
// stays and a corrupt one is replaced; both are successes. Also removes what killed writers left in
// the cache. An error says in one sentence what is wrong with the cache folder.
Status WriteCacheEntry(const std::string& path, const CacheEntry& entry);

}  // namespace jax_attn
