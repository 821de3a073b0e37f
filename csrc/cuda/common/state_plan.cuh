// Plans over pools of recurrent states, as kernels read them. Words out of range are a fault, so
// that a damaged plan writes no memory but its results.
#pragma once

#include "cuda/common/math.cuh"

namespace jax_attn {

struct StatePlanView {
  const StateChunk* chunks;
  i64 layer;
  i32 num_chunks, num_tokens;  // 0 with a fault
  i32 num_slots;
  bool is_faulty;  // results are NaN

  __device__ __forceinline__ explicit StatePlanView(const StatePlanParams& p)
      : chunks(p.chunks), layer(LoadConstant(p.layer)), num_slots(p.num_slots) {
    const i32 tokens = LoadConstant(p.header + kStatePlanTokens);
    const i32 of_plan = LoadConstant(p.header + kStatePlanChunks);
    is_faulty = LoadConstant(p.header + kStatePlanFault) != 0 || tokens < 0 ||
                tokens > p.max_tokens || of_plan < 0 || of_plan > p.max_chunks || layer < 0 ||
                layer >= p.num_layers;
    num_chunks = is_faulty ? 0 : of_plan;
    num_tokens = is_faulty ? 0 : tokens;
  }

  // Chunk `i` < num_chunks. One that names rows or slots out of range has none.
  __device__ __forceinline__ StateChunk Chunk(i32 i) const {
    const i32* words = &chunks[i].begin;
    StateChunk c = {LoadConstant(words),     LoadConstant(words + 1), LoadConstant(words + 2),
                    LoadConstant(words + 3), LoadConstant(words + 4), LoadConstant(words + 5)};
    if (c.begin < 0 || c.length < 0 || c.length > num_tokens - c.begin) c.begin = c.length = 0;
    if (c.read_slot >= num_slots) c.read_slot = -1;
    if (c.write_slot >= num_slots) c.write_slot = -1;
    return c;
  }

  // Whether chunk i begins a request.
  __device__ __forceinline__ bool IsFirst(i32 i) const {
    return i == 0 || LoadConstant(&chunks[i].is_first) == 1;
  }
};

}  // namespace jax_attn
