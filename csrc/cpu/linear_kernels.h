// The interface between the drivers of recurrent states (linear_attention.cc) and their kernels, as
// kernels.h for those of attention.
#pragma once

#include "cpu/kernels.h"

namespace jax_attn {

// Linear attention of a pool of states, one call and one layer (jax_attn/_spec/state_spec.py has
// the recurrence).
struct LinearParams {
  const void *q, *k;  // [max_tokens, num_qk_heads, dim_k]
  const void* v;      // [max_tokens, num_v_heads, dim_v]
  const float* g;     // [max_tokens, num_v_heads] or [.., dim_k], natural log; null: no decay
  const float* beta;  // [max_tokens, num_v_heads]; null: 1
  void* states;       // [num_slots, num_v_heads, dim_k, dim_v], f32 or bf16
  void* o;            // like v
  i64 num_qk_heads, num_v_heads, dim_k, dim_v;
  float scale;
  bool has_channel_decay;  // g has a number a channel of k
  bool has_delta_rule, has_l2_norm, has_bf16_states;
};

// Columns of v whose states a task computes are a multiple of this.
inline constexpr i64 kLinearColumns = 32;

// What one task computes: columns of some v heads of a request. Columns are independent of each
// other: they have the same bits in any task.
struct LinearTask {
  const StateChunk* chunks;  // of one request, in order; the first is_first
  i64 num_chunks;
  i64 qk_head, begin_head, end_head;  // v heads of one q and k head
  i64 begin_column, end_column;
};

// Linear attention for one type of q, k, v and o.
struct CpuLinearKernels {
  // Bytes of scratch that run needs, 64-byte aligned, per thread.
  size_t (*scratch_bytes)(const LinearParams& p, const LinearTask& task);

  void (*run)(const LinearParams& p, const LinearTask& task, void* scratch);
};

// Tokens of a chunk of the kernels, which divides that of a plan. Fewer have less arithmetic among
// tokens, more read and write the state less often. With a decay a channel, products among tokens
// have an exponential a channel.
inline constexpr i64 kChunkTokens = 32, kChannelChunkTokens = 16;

// The gradients of a call.
struct LinearBackwardParams {
  LinearParams forward;  // o is not read
  const void* d_o;       // like v
  void *d_q, *d_k;       // like q, in its type
  void* d_v;
  float *d_g, *d_beta;  // like g and beta; null: none
  void* d_states;  // like states: from that of the states after the call to that of those before
};

// Tokens that the kernels take together.
struct StatePiece {
  i64 begin, num;  // up to kChunkTokens, or kChannelChunkTokens; may be 0
  i32 write_slot;  // where the state behind it went; -1: nowhere
};

// What one task computes: a request, all v heads of a q and k head, all columns of v.
struct LinearBackwardTask {
  LinearTask forward;
  const StatePiece* pieces;  // of the request, in order
  i64 num_pieces;
};

// Gradients for one type of q, k, v and o.
struct CpuLinearBackwardKernels {
  // Bytes of scratch that run needs, 64-byte aligned, per thread.
  size_t (*scratch_bytes)(const LinearBackwardParams& p, const LinearBackwardTask& task);

  // Writes d_q, d_k, d_v, d_g and d_beta of the request's tokens. Slots of d_states that it writes
  // become 0, then the slot that it reads gets what is added to it.
  void (*run)(const LinearBackwardParams& p, const LinearBackwardTask& task, void* scratch);
};

// A causal depthwise convolution of the requests of a plan, see jax_attn/_ops/short_convolution.py.
struct ConvolutionParams {
  const void* x;        // [max_tokens, num_channels]
  const float* weight;  // [num_channels, width]
  const float* bias;    // [num_channels]; null: 0
  void* states;         // [num_slots, width - 1, num_channels] of one layer, in x's type
  void* y;              // like x
  i64 num_channels, width;
  bool has_silu;
  const StateChunk* chunks;
  i64 num_chunks;
};

inline constexpr i64 kMaxConvolutionWidth = 8;
// Channels of a task are at most so many, and begin at a multiple of 64.
inline constexpr i64 kTaskChannels = 512;

// Convolves channels [begin, end) of all chunks, for one type of x, y and states.
using CpuConvolution = void (*)(const ConvolutionParams& p, i64 begin, i64 end);

// The kernels of recurrent states of an instruction set, by DType.
struct CpuLinearTable {
  CpuLinearKernels attend[3];
  CpuConvolution convolve[3];
  CpuLinearBackwardKernels backward[3];
};

// They have files of their own (linear_<isa>.cc), with all instruction sets with AVX-512 in one: no
// product has operands of 16 bits, because states are f32.
extern const CpuLinearTable kLinearBaseline;
#if defined(__x86_64__)
extern const CpuLinearTable kLinearAvx2, kLinearAvx512;
#elif defined(__aarch64__)
extern const CpuLinearTable kLinearNeon;
#endif

// The table of the instruction set in use (dispatch.h).
const CpuLinearTable& ActiveLinearKernels();

}  // namespace jax_attn
