// The order in which queues get chunks and run them.
#pragma once

#include "plan/rules/integers.h"

namespace jax_attn {

// Chunks are assigned in the order of their keys: descending cost, then ascending chunk. Requests
// with several tiles go first, the longest first, in sections. A section runs all tiles of one
// request and head consecutively, because they read the same keys, which then stay in the cache.
// Its last tile runs first, because under a causal mask it is the heaviest. Measured (H200, wgmma):
// 4 x 4096 tokens without mask 586 -> 626 TFLOP/s, causal 487 -> 538.
inline constexpr i32 kChunkBits = 26;
inline constexpr u64 kMaxRank = (1ull << 38) - 1;
inline constexpr i64 kSharedFirst = 1ll << 37;  // added to the cost of a chunk of a shared prefix
inline constexpr i64 kSectionFirst = 1ll << 36;
inline constexpr u64 kChunkMask = (1u << kChunkBits) - 1;

// Chunks that cost 2^36 or more (115 million kv tokens of the costliest possible tile) rank
// equally.
inline u64 ChunkKey(i64 cost, i64 chunk, bool shared = false) {
  const i64 rank = Largest(0, Least(cost, kSectionFirst - 1)) + (shared ? kSharedFirst : 0);
  return (kMaxRank - static_cast<u64>(rank)) << kChunkBits | static_cast<u64>(chunk);
}

// section: the kv_len of the request that the chunk's tile belongs to.
inline u64 SectionKey(i32 section, i64 chunk) {
  return (kMaxRank - static_cast<u64>(kSectionFirst + section)) << kChunkBits |
         (kChunkMask - static_cast<u64>(chunk));
}

inline bool IsSectionKey(u64 key) {
  const u64 rank = kMaxRank - (key >> kChunkBits);
  return rank >= static_cast<u64>(kSectionFirst) && rank < static_cast<u64>(kSharedFirst);
}

// The largest key of shared chunks; all other keys are above it.
constexpr u64 LastSharedKey() { return (kMaxRank - kSharedFirst) << kChunkBits | kChunkMask; }
inline i32 ChunkOfKey(u64 key) {
  const u64 low = key & kChunkMask;
  return static_cast<i32>(IsSectionKey(key) ? kChunkMask - low : low);
}

// Whether the last section runs tile by tile for all heads, the heaviest first. This pays only if
// no chunk follows that would fill the gaps left by its last heads, since the keys of all heads
// have to stay in the cache. section: kv_len of its tiles. Measured (H200, causal, 16 heads): 1 x
// 2048 tokens 42.2 -> 34.9 us, 16 x 1024 150 -> 145; with this order for all sections 147, and 4 x
// 4096 402 -> 412.
inline bool GoesByWeight(const PlanRules& rules, i32 section) {
  return section <= rules.cached_tokens;
}

// If tiles of several sizes of tile M are mixed, half of the queues take their items from the other
// end: large tiles wait for the tensor cores, small ones for memory, so both stay busy.
// Neighbouring CTAs differ, since the grid is laid out GPC by GPC, and a CTA that reads keys
// missing in L2 slows all others that read through the same half of L2. Measured (H200, 1 x 4096 of
// 8192 beside 128 decodes at 8192, with the second half of the grid reversed): where 50 of 66 SMs
// decode they get 47 bytes/ns each and a step of 128 rows takes 1.74 us; where 16 decode, 59
// bytes/ns and 1.44 us. CTAs half a grid apart differ, too: they share an SM if it holds two.
inline bool BeginsWithSmallTiles(i64 num_ctas, i64 cta) {
  return ((cta + (cta >= num_ctas / 2)) & 1) != 0;
}

}  // namespace jax_attn
