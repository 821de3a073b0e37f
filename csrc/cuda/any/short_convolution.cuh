// Causal depthwise convolutions over slots. Memory bound: x is read and y is written, each once,
// and a state of a request is read once and written once.
//
// A thread has a vector of neighbouring channels. Tokens of a chunk are divided into tiles of rows,
// each a window that slides over inputs in registers. The first tokens of a request, which need its
// state, and all that writes states belong to the CTA that has the request's first chunk: the slot
// that it writes may be the one that it reads.
#pragma once

#include "cuda/common/state_plan.cuh"

namespace jax_attn {

template <class Traits>
struct ShortConvolutionBody {
  using Params = ShortConvolutionParams;
  static constexpr int kDtype = Traits::kDtype;
  static constexpr int kWidth = Traits::kWidth, kPast = kWidth - 1;
  static constexpr int kBytes = Element<kDtype>::kBytes;
  static constexpr int kNumThreads = 128;
  static constexpr int kMinCtasPerSm = kWidth > 4 ? 3 : 4;
  static constexpr int kNumWarps = kNumThreads / kWarpSize;
  static constexpr int kVector = ConvolutionVector(kDtype, kWidth, 0);  // channels of a thread
  static constexpr int kRowsAhead = kWidth > 4 ? 4 : 8;  // loads in flight before the first is used

  struct Smem {
    // Each thread has those of its channels. The padding keeps threads that read theirs out of
    // each other's banks.
    float taps[kNumThreads][kVector * kWidth + 1];
    // A bit for each of kNumThreads chunks: whether it writes a state, and whether it is of another
    // request.
    u32 writes[kNumWarps], others[kNumWarps];
  };
  static constexpr int kSmemBytes = static_cast<int>(sizeof(Smem));

  __device__ __forceinline__ static void Run(const Params& p) {
    extern __shared__ __align__(128) unsigned char smem[];
    ShortConvolutionBody body(p, *reinterpret_cast<Smem*>(smem));
    if (p.num_channels % kVector == 0) {
      body.template RunVectors<kVector>();
    } else {
      body.template RunVectors<1>();
    }
  }

 private:
  __device__ __forceinline__ ShortConvolutionBody(const Params& p, Smem& s)
      : p_(p), s_(s), plan_(p.plan) {}

  // kChannels elements of a row, as they are in memory.
  template <int kChannels>
  struct Elements {
    u32 words[kChannels * kBytes < 4 ? 1 : kChannels * kBytes / 4];

    __device__ __forceinline__ float Float(int c) const {
      if constexpr (kDtype == kElementF32) {
        return __uint_as_float(words[c]);
      } else {
        return Element<kDtype>::ToFloat(static_cast<u16>(words[c / 2] >> (c % 2 * 16)));
      }
    }
  };

  template <int kChannels>
  __device__ __forceinline__ static Elements<kChannels> Load(const void* array, i64 at) {
    const char* from = static_cast<const char*>(array) + at * kBytes;
    if constexpr (kChannels * kBytes == 16) {
      const uint4 v = LoadRow16If(true, from);
      return {{v.x, v.y, v.z, v.w}};
    } else if constexpr (kChannels * kBytes == 8) {
      return {{LoadOperand32(from), LoadOperand32(from + 4)}};
    } else if constexpr (kBytes == 4) {
      return {{LoadOperand32(from)}};
    } else {
      return {{LoadOperand16(from)}};
    }
  }
  template <int kChannels>
  __device__ __forceinline__ static void Store(void* array, i64 at, const Elements<kChannels>& x) {
    char* to = static_cast<char*>(array) + at * kBytes;
    if constexpr (kChannels * kBytes == 16) {
      StoreVector(to, make_uint4(x.words[0], x.words[1], x.words[2], x.words[3]));
    } else if constexpr (kChannels * kBytes == 8) {
      StoreVector(to, make_uint2(x.words[0], x.words[1]));
    } else if constexpr (kBytes == 4) {
      *reinterpret_cast<u32*>(to) = x.words[0];
    } else {
      *reinterpret_cast<u16*>(to) = static_cast<u16>(x.words[0]);
    }
  }

  template <int kChannels>
  __device__ __forceinline__ void RunVectors() {
    const int columns = CeilDiv(p_.num_channels, kChannels * kNumThreads);
    const int column = static_cast<int>(blockIdx.x) % columns;
    const int rest = static_cast<int>(blockIdx.x) / columns;
    const int tile = rest % p_.row_tiles, index = rest / p_.row_tiles;
    plan_.template FillOtherRows<kDtype, kChannels % 4 == 0 ? 4 : 1>(p_.y, p_.plan.max_tokens,
                                                                     p_.num_channels);
    if (index >= plan_.num_chunks) return;
    const StateChunk chunk = plan_.Chunk(index);
    const bool is_first = index == 0 || chunk.is_first == 1;
    const bool begins = is_first && tile == 0;
    if (!begins && tile * p_.tile_rows >= chunk.length) return;
    // The state, then the first inputs, on their way while taps are. (One more: arrays are not
    // empty.)
    Elements<kChannels> inputs[2 * kPast + 1];
    const int known_end = begins ? EndOfFirst(index, chunk) : 0;
    if (begins) LoadFirst<kChannels>(chunk, column, known_end, inputs);
    LoadTaps<kChannels>(column * kNumThreads * kChannels);
    __syncthreads();
    const Columns<kChannels> of(p_, s_, column);
    if (begins) Begin(of, inputs, index, chunk.begin, known_end);
    // Tokens whose window has no state.
    const int first = is_first ? chunk.begin : FirstRow(index, chunk);
    const int end = chunk.begin + chunk.length;
    for (int row = chunk.begin + tile * p_.tile_rows; row < end;
         row += p_.row_tiles * p_.tile_rows) {
      const int begin = Max(row, first + kPast), last = Min(row + p_.tile_rows, end);
      if (of.is_valid && begin < last) Slide(of, begin, last);
    }
  }

  // The row of the first token of a chunk's request, or some row that is kPast or more before the
  // chunk.
  __device__ __forceinline__ int FirstRow(int index, const StateChunk& chunk) const {
    int row = chunk.begin;
    while (!plan_.IsFirst(index) && chunk.begin - row < kPast) row = plan_.Chunk(--index).begin;
    return row;
  }

  // The taps of kNumThreads * kChannels channels from `first` on, which are neighbours in memory.
  template <int kChannels>
  __device__ __forceinline__ void LoadTaps(int first) {
    constexpr int kOfThread = kChannels * kWidth;
    const float* from = p_.weight + static_cast<i64>(first) * kWidth;
    const int num = Min(kNumThreads * kChannels, p_.num_channels - first) * kWidth;
    constexpr int kOfLoad = kChannels % 4 == 0 ? 4 : 1;
#pragma unroll 8
    for (int i = 0; i < kOfThread / kOfLoad; ++i) {
      const int at = (i * kNumThreads + static_cast<int>(threadIdx.x)) * kOfLoad;
      float* const to = &s_.taps[at / kOfThread][at % kOfThread];
      if constexpr (kOfLoad == 4) {
        const uint4 taps = LoadRow16If(at < num, from + at);
        to[0] = __uint_as_float(taps.x);
        to[1] = __uint_as_float(taps.y);
        to[2] = __uint_as_float(taps.z);
        to[3] = __uint_as_float(taps.w);
      } else {
        to[0] = at < num ? __uint_as_float(LoadOperand32(from + at)) : 0.0f;
      }
    }
  }

  // The taps of a thread's channels.
  template <int kChannels>
  struct Columns {
    int channel;
    bool is_valid;
    float taps[kWidth][kChannels], bias[kChannels];

    __device__ __forceinline__ Columns(const Params& p, const Smem& s, int column) {
      const int thread = static_cast<int>(threadIdx.x);
      channel = (column * kNumThreads + thread) * kChannels;
      is_valid = channel < p.num_channels;
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        bias[c] = is_valid ? __uint_as_float(LoadOperand32(p.bias + channel + c)) : 0.0f;
#pragma unroll
        for (int i = 0; i < kWidth; ++i) taps[i][c] = s.taps[thread][c * kWidth + i];
      }
    }
  };

  __device__ __forceinline__ i64 RowOf(int channel, int row) const {
    return static_cast<i64>(row) * p_.num_channels + channel;
  }
  __device__ __forceinline__ i64 StateRow(int channel, int slot, int row) const {
    const i64 state = plan_.layer * plan_.num_slots + slot;
    return (state * kPast + row) * p_.num_channels + channel;
  }

  // y of a row from its window, the oldest input first: one chain in the order of the taps.
  template <int kChannels>
  __device__ __forceinline__ void Output(const Columns<kChannels>& of,
                                         const Elements<kChannels> (&window)[kWidth],
                                         int row) const {
    float y[kChannels];
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      y[c] = of.bias[c];
#pragma unroll
      for (int i = 0; i < kWidth; ++i) y[c] = fmaf(of.taps[i][c], window[i].Float(c), y[c]);
      if constexpr (Traits::kHasSilu) y[c] = Quotient(y[c], 1.0f + Exp2(-kLog2E * y[c]));
    }
    Elements<kChannels> out;
    if constexpr (kDtype == kElementF32) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) out.words[c] = __float_as_uint(y[c]);
    } else if constexpr (kChannels == 1) {
      out.words[0] = Element<kDtype>::Pack(y[0], 0.0f);
    } else {
#pragma unroll
      for (int c = 0; c < kChannels; c += 2) {
        out.words[c / 2] = Element<kDtype>::Pack(y[c], y[c + 1]);
      }
    }
    Store<kChannels>(p_.y, RowOf(of.channel, row), out);
  }

  // Rows [begin, end), whose inputs are all in x.
  template <int kChannels>
  __device__ __forceinline__ void Slide(const Columns<kChannels>& of, int begin, int end) const {
    Elements<kChannels> past[kPast + kRowsAhead];
#pragma unroll
    for (int i = 0; i < kPast; ++i)
      past[i] = Load<kChannels>(p_.x, RowOf(of.channel, begin - kPast + i));
    for (int row = begin; row < end; row += kRowsAhead) {
#pragma unroll
      for (int n = 0; n < kRowsAhead; ++n) {
        past[kPast + n] = Load<kChannels>(p_.x, RowOf(of.channel, Min(row + n, end - 1)));
      }
#pragma unroll
      for (int n = 0; n < kRowsAhead; ++n) {
        Elements<kChannels> window[kWidth];
#pragma unroll
        for (int i = 0; i < kWidth; ++i) window[i] = past[n + i];
        if (row + n < end) Output(of, window, row + n);
      }
#pragma unroll
      for (int i = 0; i < kPast; ++i) past[i] = past[kRowsAhead + i];
    }
  }

  // The row behind the request that begins with a chunk, or some row kPast or more behind its
  // first.
  __device__ __forceinline__ int EndOfFirst(int index, const StateChunk& chunk) const {
    int end = chunk.begin + chunk.length;
    for (int i = index + 1; end - chunk.begin < kPast && i < plan_.num_chunks && !plan_.IsFirst(i);
         ++i) {
      const StateChunk next = plan_.Chunk(i);
      end = next.begin + next.length;
    }
    return end;
  }

  template <int kChannels>
  __device__ __forceinline__ void LoadFirst(const StateChunk& chunk, int column, int end,
                                            Elements<kChannels> (&inputs)[2 * kPast + 1]) const {
    const int channel = (column * kNumThreads + static_cast<int>(threadIdx.x)) * kChannels;
    const bool is_valid = channel < p_.num_channels;
#pragma unroll
    for (int i = 0; i < kPast; ++i) {
      inputs[i] = {};
      if (is_valid && chunk.read_slot >= 0) {
        inputs[i] = Load<kChannels>(p_.states, StateRow(channel, chunk.read_slot, i));
      }
    }
#pragma unroll
    for (int i = 0; i < kPast; ++i) {
      inputs[kPast + i] = {};
      if (is_valid && chunk.begin + i < end) {
        inputs[kPast + i] = Load<kChannels>(p_.x, RowOf(channel, chunk.begin + i));
      }
    }
  }

  // The first kPast tokens of a request, and all states that it writes. All threads of the CTA.
  template <int kChannels>
  __device__ __forceinline__ void Begin(const Columns<kChannels>& of,
                                        const Elements<kChannels> (&inputs)[2 * kPast + 1],
                                        int index, int first, int end) {
    if (of.is_valid) {
#pragma unroll
      for (int t = 0; t < kPast; ++t) {
        Elements<kChannels> window[kWidth];
#pragma unroll
        for (int i = 0; i < kWidth; ++i) window[i] = inputs[t + i];
        if (first + t < end) Output(of, window, first + t);
      }
    }
    if (kPast > 0) WriteStates(of, inputs, index, first);
  }

  template <int kChannels>
  __device__ __forceinline__ void WriteStates(const Columns<kChannels>& of,
                                              const Elements<kChannels> (&state)[2 * kPast + 1],
                                              int index, int first) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    for (int from = index; from < plan_.num_chunks; from += kNumThreads) {
      const int at = from + static_cast<int>(threadIdx.x);
      const bool is_other = at >= plan_.num_chunks || (at > index && plan_.IsFirst(at));
      const bool writes = !is_other && plan_.Chunk(at).write_slot >= 0;
      const u32 others = WarpSum(is_other ? 1u << lane : 0u);
      const u32 of_warp = WarpSum(writes ? 1u << lane : 0u);
      if (from > index) __syncthreads();  // the words before have been read
      if (lane == 0) {
        s_.others[warp] = others;
        s_.writes[warp] = of_warp;
      }
      __syncthreads();
#pragma unroll 1
      for (int word = 0; word < kNumWarps; ++word) {
        const u32 behind = s_.others[word];
        u32 bits = s_.writes[word] & ((behind & (~behind + 1)) - 1);  // in front of the first other
        for (; bits != 0; bits &= bits - 1) {
          const int of_chunk = from + word * kWarpSize + __ffs(bits) - 1;
          if (of.is_valid) WriteState(of, state, first, plan_.Chunk(of_chunk));
        }
        if (behind != 0) return;
      }
    }
  }

  // The last kPast inputs of a chunk of the request whose row `first` is its first.
  template <int kChannels>
  __device__ __forceinline__ void WriteState(const Columns<kChannels>& of,
                                             const Elements<kChannels> (&state)[2 * kPast + 1],
                                             int first, const StateChunk& chunk) const {
    const int row = chunk.begin + chunk.length - kPast;
#pragma unroll
    for (int i = 0; i < kPast; ++i) {
      Elements<kChannels> x = {};
      if (row + i >= first) {
        x = Load<kChannels>(p_.x, RowOf(of.channel, row + i));
      } else {
#pragma unroll
        for (int j = 0; j < kPast; ++j) {
          if (first - (row + i) == kPast - j) x = state[j];
        }
      }
      Store<kChannels>(p_.states, StateRow(of.channel, chunk.write_slot, i), x);
    }
  }

  const Params& p_;
  Smem& s_;
  const StatePlanView plan_;
};

}  // namespace jax_attn
