// Sums rows over the devices of a group, adds a residual and applies an RMS norm. Devices write
// into each other's memory and wait for flags; docs/notes/all_reduce.md has the proof that slots
// are not overwritten too early and that nobody waits forever.
//
// One-shot: every device sends its rows to all others and sums all rows itself. Two-shot: a piece
// is a row for each device; the row's device sums it and sends the sum. Both give the same bits:
// the sum is in f32, in the order of ranks, and is rounded to the type of x once.
#pragma once

#include "cuda/any/all_reduce_params.h"
#include "cuda/common/math.cuh"
#include "cuda/common/types.cuh"

namespace jax_attn {

// kArch, kDtype, kNumDevices, kNumThreads, kVectors (vectors of 16 bytes that a thread has of a
// row), kTwoShot, kNorm, kQuantizes.
template <class Traits>
struct AllReduceBody {
  using E = Element<Traits::kDtype>;
  static constexpr int kNumThreads = Traits::kNumThreads;
  static constexpr int kNumDevices = Traits::kNumDevices;
  static constexpr int kVectors = Traits::kVectors;
  static constexpr bool kIsF32 = Traits::kDtype == kElementF32;
  static constexpr int kWidth = 16 / E::kBytes;  // elements of a vector
  static constexpr int kPieceRows = Traits::kTwoShot ? kNumDevices : 1;
  static constexpr int kLanes = Min(kWarpSize, kNumThreads);
  static constexpr int kWarps = kNumThreads / kLanes;
  static constexpr float kLargestE4m3 = 448.0f;

  struct Smem {
    u32 first_piece, tag;
    i32 is_fine;
    float of_warps[kWarps];
  };
  static constexpr int kSmemBytes = sizeof(Smem);
  static constexpr int kMinCtasPerSm = 1;

  // The vectors of a row that this thread has: threadIdx.x, threadIdx.x + kNumThreads, ...
  struct Row {
    uint4 vectors[kVectors];
  };

  __device__ __forceinline__ static void Run(const AllReduceParams& p) {
    extern __shared__ __align__(128) unsigned char smem[];
    Work(p, blockIdx.x, gridDim.x, *reinterpret_cast<Smem*>(smem));
  }

  __device__ __forceinline__ static void Work(const AllReduceParams& p, int channel, int num_ctas,
                                              Smem& smem) {
    AllReduceBody cta(p, channel, num_ctas, smem);
    cta.RunPieces();
  }

 private:
  __device__ __forceinline__ AllReduceBody(const AllReduceParams& p, int channel, int num_ctas,
                                           Smem& smem)
      : p_(p), smem_(smem), channel_(channel), num_ctas_(num_ctas) {
    row_vectors_ = p.columns / kWidth;
    const int all = CeilDiv(p.num_rows, kPieceRows);
    num_pieces_ = channel < all ? CeilDiv(all - channel, num_ctas) : 0;
  }

  __device__ __forceinline__ void RunPieces() {
    if (num_pieces_ == 0) return;
    if (threadIdx.x == 0) Claim();
    if constexpr (Traits::kNorm) weight_ = LoadRow(p_.weight, 0);
    __syncthreads();
    bool is_fine = smem_.is_fine != 0;
    for (int i = 0; i < kAllReduceAhead; ++i) {
      if (is_fine && i < num_pieces_) Send(i);
    }
    for (int i = 0; i < num_pieces_; ++i) {
      if (is_fine && i + kAllReduceAhead < num_pieces_) Send(i + kAllReduceAhead);
      is_fine = Finish(i, is_fine);
    }
    __syncthreads();  // every thread has read its slots
    if (threadIdx.x == 0) AddAcquireRelease(&Head()->num_done[channel_], num_pieces_);
  }

  // Takes the next numbers of the channel. Launches of one device follow each other; if a graph
  // runs two at a time, the second waits here.
  __device__ __forceinline__ void Claim() {
    AllReduceHead* head = Head();
    smem_.first_piece = AddRelaxed(&head->num_claimed[channel_], num_pieces_);
    // Odd, so never 0. The shift keeps the low bit: runs have numbers that follow each other.
    smem_.tag = (static_cast<u32>(p_.call) * 0x9e3779b1u ^ static_cast<u32>(head->run)) << 1 | 1;
    const i32* done = &head->num_done[channel_];
    const i32 first = static_cast<i32>(smem_.first_piece);
    Waiting waiting;
    while (LoadAcquire(done) != first) {
      if (!waiting.GoesOn(*this, kAllReduceBusy, p_.rank)) break;
    }
    smem_.is_fine = LoadRelaxedSystem(&head->is_faulted) == 0;
  }

  // --- pieces ---

  __device__ __forceinline__ i64 FirstRow(int i) const {
    return (static_cast<i64>(i) * num_ctas_ + channel_) * kPieceRows;
  }

  // Sends piece i of this launch to the others.
  __device__ __forceinline__ void Send(int i) {
    const u32 piece = smem_.first_piece + i;
    const i64 row = FirstRow(i);
    if constexpr (Traits::kTwoShot) {
      for (int to = 0; to < kNumDevices; ++to) {
        if (to != p_.rank && row + to < p_.num_rows) {
          StoreRow(Slot(to, 0, p_.rank, piece), 0, LoadRow(p_.x, row + to));
        }
      }
    } else {
      const Row x = LoadRow(p_.x, row);
#pragma unroll
      for (int to = 0; to < kNumDevices; ++to) {
        if (to != p_.rank) StoreRow(Slot(to, 0, p_.rank, piece), 0, x);
      }
    }
    Signal(0, piece);
  }

  // Waits for piece i of the others and writes its rows: NaN unless all went well. Returns whether.
  __device__ __forceinline__ bool Finish(int i, bool is_fine) {
    const u32 piece = smem_.first_piece + i;
    const i64 first_row = FirstRow(i);
    if constexpr (Traits::kTwoShot) {
      const i64 own_row = first_row + p_.rank;
      Row own = {};
      if (own_row < p_.num_rows) own = LoadRow(p_.x, own_row);
      is_fine = is_fine && Await(0, piece);
      if (is_fine) {
        own = Sum(own, piece);
        if (own_row < p_.num_rows) {
          for (int to = 0; to < kNumDevices; ++to) {
            if (to != p_.rank) StoreRow(Slot(to, 1, p_.rank, piece), 0, own);
          }
        }
        Signal(1, piece);
        is_fine = Await(1, piece);
      }
      for (int of = 0; of < kNumDevices && first_row + of < p_.num_rows; ++of) {
        Row sum = is_fine ? own : NanRow();
        if (of != p_.rank && is_fine) sum = ReadSlot(1, of, piece);
        WriteRow(first_row + of, sum, LoadResidual(first_row + of));
      }
    } else {
      const Row own = LoadRow(p_.x, first_row);
      const Row residual = LoadResidual(first_row);
      is_fine = is_fine && Await(0, piece);
      const Row sum = is_fine ? Sum(own, piece) : NanRow();
      WriteRow(first_row, sum, residual);
    }
    return is_fine;
  }

  // --- flags ---

  __device__ __forceinline__ void Signal(int phase, u32 piece) {
    __syncthreads();  // the release is of what all threads stored
    for (int to = threadIdx.x; to < kNumDevices; to += kNumThreads) {
      if (to == p_.rank) continue;
      StoreReleaseSystem(Flag(to, phase, p_.rank, piece), u64{smem_.tag} << 32 | piece);
    }
  }

  // Waits until the piece of every other device has arrived. False if one does not.
  __device__ __forceinline__ bool Await(int phase, u32 piece) {
    bool has_failed = false;
    for (int from = threadIdx.x; from < kNumDevices; from += kNumThreads) {
      if (from != p_.rank) has_failed |= !AwaitFlag(Flag(p_.rank, phase, from, piece), from, piece);
    }
    return __syncthreads_or(has_failed) == 0;
  }

  __device__ __forceinline__ bool AwaitFlag(const u64* flag, int from, u32 piece) {
    Waiting waiting;
    for (;;) {
      const u64 seen = LoadAcquireSystem(flag);
      const u32 tag = static_cast<u32>(seen >> 32);
      if (tag != 0 && static_cast<u32>(seen) == piece) {
        if (tag == smem_.tag) return true;
        GiveUp(kAllReduceOther, from);
        return false;
      }
      if (!waiting.GoesOn(*this, kAllReduceLate, from)) return false;
    }
  }

  // A wait that ends if the group has a fault, or makes one when the time is over.
  struct Waiting {
    i64 begin = 0;
    int num_looks = 0;

    __device__ __forceinline__ bool GoesOn(const AllReduceBody& cta, AllReduceFaultCode code,
                                           int peer) {
      if (++num_looks % 32 != 0) return true;
      if (LoadRelaxedSystem(&cta.Head()->is_faulted) != 0) return false;
      const i64 now = GlobalTimer();
      if (begin == 0) begin = now;
      if (now - begin > cta.p_.limit) {
        cta.GiveUp(code, peer);
        return false;
      }
      Nap();
      return true;
    }
  };

  // Tells the host why, once, and the other devices that they need not wait.
  __device__ __forceinline__ void GiveUp(AllReduceFaultCode code, int peer) const {
    if (AddAcquireRelease(&Head()->is_faulted, 1) != 0) return;
    StoreReleaseSystem(&p_.fault->code_and_peer, static_cast<u64>(peer) << 32 | code);
    for (int i = 0; i < kNumDevices; ++i) {
      if (i != p_.rank) StoreRelaxedSystem(&HeadOf(i)->is_faulted, 1);
    }
  }

  // --- rows ---

  __device__ __forceinline__ bool Has(int v) const {
    return static_cast<int>(threadIdx.x) + v * kNumThreads < row_vectors_;
  }
  __device__ __forceinline__ i64 VectorAt(i64 row, int v) const {
    return (row * row_vectors_ + threadIdx.x + v * kNumThreads) * 16;
  }

  __device__ __forceinline__ Row LoadRow(const void* array, i64 row) const {
    Row x;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      x.vectors[v] = LoadRow16If(Has(v), static_cast<const char*>(array) + VectorAt(row, v));
    }
    return x;
  }
  __device__ __forceinline__ Row LoadResidual(i64 row) const {
    if (p_.residual == nullptr) return {};
    return LoadRow(p_.residual, row);
  }
  __device__ __forceinline__ void StoreRow(void* array, i64 row, const Row& x) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (Has(v)) StoreVector(static_cast<char*>(array) + VectorAt(row, v), x.vectors[v]);
    }
  }
  __device__ __forceinline__ Row ReadSlot(int phase, int from, u32 piece) const {
    const char* slot = Slot(p_.rank, phase, from, piece);
    Row x = {};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (Has(v)) x.vectors[v] = LoadCoherent16(slot + VectorAt(0, v));
    }
    return x;
  }
  __device__ __forceinline__ static Row NanRow() {
    Row x;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {  // a NaN in each of the types
      x.vectors[v] = make_uint4(0x7fff7fff, 0x7fff7fff, 0x7fff7fff, 0x7fff7fff);
    }
    return x;
  }

  // The sum of the devices' rows in the order of ranks, rounded.
  __device__ __forceinline__ Row Sum(const Row& own, u32 piece) const {
    Row sum;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      uint4 parts[kNumDevices];
#pragma unroll
      for (int from = 0; from < kNumDevices; ++from) {
        parts[from] = own.vectors[v];
        if (from != p_.rank && Has(v)) {
          parts[from] = LoadCoherent16(Slot(p_.rank, 0, from, piece) + VectorAt(0, v));
        }
      }
      float total[kWidth];
      ToFloats(parts[0], total);
#pragma unroll
      for (int from = 1; from < kNumDevices; ++from) {
        float part[kWidth];
        ToFloats(parts[from], part);
#pragma unroll
        for (int c = 0; c < kWidth; ++c) total[c] += part[c];
      }
      sum.vectors[v] = ToVector(total);
    }
    return sum;
  }

  __device__ __forceinline__ void WriteRow(i64 row, Row sum, const Row& residual) {
    float x[kVectors][kWidth];
    float squares = 0.0f;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      ToFloats(sum.vectors[v], x[v]);
      if (p_.residual != nullptr) {
        float before[kWidth];
        ToFloats(residual.vectors[v], before);
#pragma unroll
        for (int c = 0; c < kWidth; ++c) x[v][c] += before[c];
        sum.vectors[v] = ToVector(x[v]);
        ToFloats(sum.vectors[v], x[v]);
      }
      if (Has(v)) {
#pragma unroll
        for (int c = 0; c < kWidth; ++c) squares += x[v][c] * x[v][c];
      }
    }
    StoreRow(p_.sum, row, sum);
    if constexpr (Traits::kNorm) {
      const float mean = Quotient(Reduced<false>(squares), static_cast<float>(p_.columns));
      const float factor = ReciprocalRoot(mean + p_.eps);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        float weight[kWidth];
        ToFloats(weight_.vectors[v], weight);
#pragma unroll
        for (int c = 0; c < kWidth; ++c) x[v][c] = x[v][c] * factor * (p_.norm_offset + weight[c]);
        sum.vectors[v] = ToVector(x[v]);
      }
      if constexpr (Traits::kQuantizes) {
        WriteQuantized(row, sum);
      } else {
        StoreRow(p_.normed, row, sum);
      }
    }
  }

  // e4m3 with a scale for the row: its largest magnitude is 448 times the scale.
  __device__ __forceinline__ void WriteQuantized(i64 row, const Row& normed) {
    float x[kVectors][kWidth];
    float largest = 0.0f;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      ToFloats(normed.vectors[v], x[v]);
#pragma unroll
      for (int c = 0; c < kWidth; ++c) {
        if (Has(v)) largest = fmaxf(largest, fabsf(x[v][c]));
      }
    }
    largest = Reduced<true>(largest);
    const float scale = largest > 0.0f ? Quotient(largest, kLargestE4m3) : 1.0f;
    if (threadIdx.x == 0) p_.scales[row] = scale;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (!Has(v)) continue;
#pragma unroll
      for (int c = 0; c < kWidth; ++c) x[v][c] = Quotient(x[v][c], scale);
      char* to = static_cast<char*>(p_.normed) + VectorAt(row, v) / E::kBytes;
      StoreVector(to, make_uint2(PackE4m3(x[v][0], x[v][1], x[v][2], x[v][3]),
                                 PackE4m3(x[v][4], x[v][5], x[v][6], x[v][7])));
    }
  }

  // The sum or the maximum over the CTA, in one order: the same bits on every device.
  template <bool kMax>
  __device__ __forceinline__ float Reduced(float x) {
    const auto with = [](float a, float b) { return kMax ? fmaxf(a, b) : a + b; };
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2)
      x = with(x, __shfl_xor_sync(kFullWarp, x, mask));
    __syncthreads();  // what was there before has been read
    if (threadIdx.x % kLanes == 0) smem_.of_warps[threadIdx.x / kLanes] = x;
    __syncthreads();
    float all = smem_.of_warps[0];
#pragma unroll
    for (int warp = 1; warp < kWarps; ++warp) all = with(all, smem_.of_warps[warp]);
    return all;
  }

  __device__ __forceinline__ static void ToFloats(uint4 v, float (&x)[kWidth]) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int c = 0; c < kWidth; ++c) {
      if constexpr (kIsF32) {
        x[c] = __uint_as_float(words[c]);
      } else {
        x[c] = E::ToFloat(static_cast<u16>(words[c / 2] >> (c % 2 * 16)));
      }
    }
  }
  __device__ __forceinline__ static uint4 ToVector(const float (&x)[kWidth]) {
    if constexpr (kIsF32) {
      return make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
                        __float_as_uint(x[3]));
    } else {
      return make_uint4(E::Pack(x[0], x[1]), E::Pack(x[2], x[3]), E::Pack(x[4], x[5]),
                        E::Pack(x[6], x[7]));
    }
  }

  // --- memory ---

  __device__ __forceinline__ AllReduceHead* HeadOf(int rank) const {
    return reinterpret_cast<AllReduceHead*>(p_.memory[rank].begin);
  }
  __device__ __forceinline__ AllReduceHead* Head() const { return HeadOf(p_.rank); }
  __device__ __forceinline__ i64 SlotIndex(int phase, int from, u32 piece) const {
    return ((static_cast<i64>(phase) * kNumDevices + from) * kAllReduceCtas + channel_) *
               kAllReduceSlots +
           piece % kAllReduceSlots;
  }
  // In the memory of `rank`, for what `from` sends.
  __device__ __forceinline__ u64* Flag(int rank, int phase, int from, u32 piece) const {
    char* flags = p_.memory[rank].begin + sizeof(AllReduceHead);
    return reinterpret_cast<u64*>(flags) + SlotIndex(phase, from, piece);
  }
  __device__ __forceinline__ char* Slot(int rank, int phase, int from, u32 piece) const {
    return p_.memory[rank].begin + AllReduceMemory::HeadBytes(kNumDevices) +
           SlotIndex(phase, from, piece) * kAllReduceSlotBytes;
  }

  const AllReduceParams& p_;
  Smem& smem_;
  int channel_, num_ctas_, num_pieces_, row_vectors_;
  Row weight_;
};

}  // namespace jax_attn
