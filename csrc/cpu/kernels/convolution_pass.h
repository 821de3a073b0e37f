// Short causal convolutions over slots (short_convolution.h). Internal linkage: see kernels.h.
#pragma once

#include <math.h>

#include "cpu/kernels/lora_pass.h"
#include "cpu/linear_kernels.h"
#include "cpu/simd/simd_math.h"
#include "cpu/simd/simd_types.h"

namespace jax_attn {
namespace {

template <class Isa, typename T>
class ConvolutionPass {
  using Vec = typename Isa::Vec;
  static constexpr i64 kWidth = Isa::kWidth;
  static constexpr int kRows = 4;  // tokens together

 public:
  static void Run(const ConvolutionParams& p, i64 begin, i64 end) {
    ConvolutionPass(p, begin, end).RunChunks();
  }

 private:
  ConvolutionPass(const ConvolutionParams& p, i64 begin, i64 end)
      : p_(p), begin_(begin), num_(end - begin), past_(p.width - 1) {
    for (i64 c = 0; c < num_; ++c) {
      for (i64 i = 0; i < p.width; ++i) taps_[i][c] = p.weight[(begin + c) * p.width + i];
      bias_[c] = p.bias ? p.bias[begin + c] : 0.0f;
    }
  }

  void RunChunks() {
    i64 first = 0;  // row of the request's first token
    for (i64 i = 0; i < p_.num_chunks; ++i) {
      const StateChunk& chunk = p_.chunks[i];
      if (chunk.is_first) {
        first = chunk.begin;
        ReadState(chunk.read_slot);
      }
      Tokens<kMaxConvolutionWidth>(first, chunk);
      if (chunk.write_slot < 0) continue;
      const i64 end = chunk.begin + chunk.length;
      for (i64 row = 0; row < past_; ++row) {
        memcpy(StateRow(chunk.write_slot, row), Input(first, end - past_ + row), num_ * sizeof(T));
      }
    }
  }

  T* StateRow(i64 slot, i64 row) const {
    return static_cast<T*>(p_.states) + (slot * past_ + row) * p_.num_channels + begin_;
  }
  // A copy, because the slot may be written before the last token that needs it.
  void ReadState(i64 slot) {
    for (i64 row = 0; row < past_; ++row) {
      if (slot < 0) {
        memset(state_[row], 0, num_ * sizeof(T));
      } else {
        memcpy(state_[row], StateRow(slot, row), num_ * sizeof(T));
      }
    }
  }
  // The inputs of a row; those before row `first` are in the state.
  const T* Input(i64 first, i64 row) const {
    if (row < first) return state_[past_ - (first - row)];
    return static_cast<const T*>(p_.x) + row * p_.num_channels + begin_;
  }

  // The tokens of a chunk, for p_.width taps up to kTaps.
  template <int kTaps>
  void Tokens(i64 first, const StateChunk& chunk) const {
    if constexpr (kTaps > 1) {
      if (p_.width != kTaps) return Tokens<kTaps - 1>(first, chunk);
    }
    const i64 end = chunk.begin + chunk.length;
    i64 token = chunk.begin;
    for (; token + kRows <= end; token += kRows) Rows<kTaps, kRows>(first, token);
    for (; token < end; ++token) Rows<kTaps, 1>(first, token);
  }

  // kNum tokens together, which share inputs and taps. Every output is one chain in the order of
  // the taps.
  template <int kTaps, int kNum>
  JAX_ATTN_KERNEL void Rows(i64 first, i64 token) const {
    constexpr int kInputs = kTaps + kNum - 1;
    const T* x[kInputs];
    for (int i = 0; i < kInputs; ++i) x[i] = Input(first, token - (kTaps - 1) + i);
    T* y = static_cast<T*>(p_.y) + token * p_.num_channels + begin_;
    i64 c = 0;
    for (; c + kWidth <= num_; c += kWidth) {
      Vec sums[kNum], taps[kTaps];
      JAX_ATTN_UNROLL
      for (int n = 0; n < kNum; ++n) sums[n] = Isa::Load(bias_ + c);
      JAX_ATTN_UNROLL
      for (int tap = 0; tap < kTaps; ++tap) taps[tap] = Isa::Load(taps_[tap] + c);
      JAX_ATTN_UNROLL
      for (int i = 0; i < kInputs; ++i) {
        const Vec input = Isa::Load(x[i] + c);
        JAX_ATTN_UNROLL
        for (int n = 0; n < kNum; ++n) {
          if (i - n >= 0 && i - n < kTaps) sums[n] = Isa::Fma(taps[i - n], input, sums[n]);
        }
      }
      JAX_ATTN_UNROLL
      for (int n = 0; n < kNum; ++n) {
        Isa::Store(y + n * p_.num_channels + c, p_.has_silu ? Silu(sums[n]) : sums[n]);
      }
    }
    for (; c < num_; ++c) {
      for (int n = 0; n < kNum; ++n) {
        float sum = bias_[c];
        for (int tap = 0; tap < kTaps; ++tap) sum += taps_[tap][c] * ToF32(x[n + tap][c]);
        Narrow(p_.has_silu ? sum / (1.0f + expf(-sum)) : sum, y + n * p_.num_channels + c);
      }
    }
  }

  // x / (1 + exp(-x)), with exponentials of numbers up to 0 alone.
  static Vec Silu(Vec x) {
    const Vec one = Isa::Set(1.0f), e = Exp2<Isa>(Isa::Mul(Isa::Abs(x), Isa::Set(-kLog2e)));
    const Vec above = Isa::SelectLess(x, Isa::Zero(), e, one);
    return Isa::Div(Isa::Mul(x, above), Isa::Add(one, e));
  }

  const ConvolutionParams& p_;
  const i64 begin_, num_, past_;
  alignas(64) float taps_[kMaxConvolutionWidth][kTaskChannels];
  alignas(64) float bias_[kTaskChannels];
  alignas(64) T state_[kMaxConvolutionWidth - 1][kTaskChannels];
};

}  // namespace
}  // namespace jax_attn
