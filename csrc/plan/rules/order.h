// In which order queues get chunks, and run them.
#pragma once

#include "plan/rules/integers.h"

namespace jax_attn {

// Chunks are handed out in the order of their keys: descending cost, ascending chunk. Requests of
// several tiles go before all others, the longest first, in sections: all tiles of a request and
// head one after the other, because they read the same keys, which the cache holds meanwhile, and
// the last first, because under a causal mask it is the heaviest. Measured (H200, wgmma): 4 x 4096
// tokens without mask 586 -> 626 TFLOP/s, causal 487 -> 538.
inline constexpr i32 kChunkBits = 26;
inline constexpr u64 kMaxRank = (1ull << 38) - 1;
inline constexpr i64 kSharedFirst = 1ll << 37;  // beside the cost of a chunk of a shared prefix
inline constexpr i64 kSectionFirst = 1ll << 36;
inline constexpr u64 kChunkMask = (1u << kChunkBits) - 1;

// Chunks that cost 2^36 and more, 115 million kv tokens of the costliest tile that there is, are
// alike.
inline u64 ChunkKey(i64 cost, i64 chunk, bool shared = false) {
  const i64 rank = Largest(0, Least(cost, kSectionFirst - 1)) + (shared ? kSharedFirst : 0);
  return (kMaxRank - static_cast<u64>(rank)) << kChunkBits | static_cast<u64>(chunk);
}

// section: of the chunk's tile, the request's kv_len.
inline u64 SectionKey(i32 section, i64 chunk) {
  return (kMaxRank - static_cast<u64>(kSectionFirst + section)) << kChunkBits |
         (kChunkMask - static_cast<u64>(chunk));
}

inline bool IsSectionKey(u64 key) {
  const u64 rank = kMaxRank - (key >> kChunkBits);
  return rank >= static_cast<u64>(kSectionFirst) && rank < static_cast<u64>(kSharedFirst);
}

// Keys of shared chunks are not above it, all others are.
constexpr u64 LastSharedKey() { return (kMaxRank - kSharedFirst) << kChunkBits | kChunkMask; }
inline i32 ChunkOfKey(u64 key) {
  const u64 low = key & kChunkMask;
  return static_cast<i32>(IsSectionKey(key) ? kChunkMask - low : low);
}

// Whether the last section goes tile by tile for all heads, the heaviest first, where no chunk
// comes behind it that would fill the gaps which its last heads leave: the keys of all of them have
// to stay in the cache. section: of its tiles. Measured (H200, causal, 16 heads): 1 x 2048 tokens
// 42.2 -> 34.9 us, 16 x 1024 150 -> 145; with all sections so 147, and 4 x 4096 402 -> 412.
inline bool GoesByWeight(const PlanRules& rules, i32 section) {
  return section <= rules.cached_tokens;
}

// When heights mix, half of the queues take their items from the other end: large tiles wait for
// the tensor cores, small ones for memory, and so both are busy all the time. Neighbours differ,
// since by its speeds the grid lies on the device GPC by GPC, and who reads keys that L2 does not
// have slows all others that read through the same half of it. Measured (H200, 1 x 4096 of 8192
// beside 128 decodes at 8192, with the grid's second half the other way around): where 50 of 66
// multiprocessors decode they get 47 bytes/ns each and a step of 128 rows takes 1.74 us, where 16
// do it is 59 and 1.44.
// CTAs half a grid apart differ, too: they share a multiprocessor where it has two.
inline bool BeginsWithSmallTiles(i64 num_ctas, i64 cta) {
  return ((cta + (cta >= num_ctas / 2)) & 1) != 0;
}

}  // namespace jax_attn
