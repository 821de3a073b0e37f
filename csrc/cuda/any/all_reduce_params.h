// What all_reduce.cuh and the host share: like params.h, without includes of the system.
#pragma once

#include "params.h"

namespace jax_attn {

// Limits of the all-reduce between the devices of one process (cuda/any/all_reduce.cuh). The
// longest row, in bytes, is a slot.
inline constexpr i32 kMaxReducers = 8;
inline constexpr i32 kAllReduceCtas = 128;
inline constexpr i32 kAllReduceSlotBytes = 16 * 1024;
// A CTA sends this many pieces before it waits for the first; with 2 * ahead + 2 slots none is
// overwritten before it was read (docs/notes/all_reduce.md).
inline constexpr i32 kAllReduceAhead = 1;
inline constexpr i32 kAllReduceSlots = 2 * kAllReduceAhead + 2;
inline constexpr i32 kAllReducePhases = 2;  // rows to be summed, and sums (two-shot only)

// Why an all-reduce gave up. Kernels write it into host memory, one record for each device.
enum AllReduceFaultCode : i32 {
  kAllReduceFine = 0,
  kAllReduceLate,   // the peer's piece did not arrive in time
  kAllReduceOther,  // the peer's piece with this number belongs to another call
  kAllReduceBusy,   // an earlier call of the same device did not end in time
};
struct AllReduceFault {
  u64 code_and_peer;  // the code, and above it the rank of the peer
};

// The head of a device's memory. CTAs with one number, of all devices and launches, form a channel.
struct AllReduceHead {
  i32 is_faulted;  // not 0: calls give up at once
  i32 run;         // of the executable that is running, part of the tag of its pieces
  i32 padding[30];
  i32 num_claimed[kAllReduceCtas];  // pieces of a channel that launches of this device took
  i32 num_done[kAllReduceCtas];     // and those that they finished
};

// A device's memory, which all devices of the group write: the head, flags [phases, num_devices,
// channels, slots] of u64, and slots [phases, num_devices, channels, slots, kAllReduceSlotBytes].
// num_devices: by the rank of the sender. A flag holds the number of the piece in its slot, and
// above it the tag of the call.
struct AllReduceMemory {
  char* begin;

  static constexpr i64 NumSlots(i32 num_devices) {
    return i64{kAllReducePhases} * num_devices * kAllReduceCtas * kAllReduceSlots;
  }
  // What must be 0 at the start.
  static constexpr i64 HeadBytes(i32 num_devices) {
    return i64{sizeof(AllReduceHead)} + NumSlots(num_devices) * i64{sizeof(u64)};
  }
  static constexpr i64 Bytes(i32 num_devices) {
    return HeadBytes(num_devices) + NumSlots(num_devices) * kAllReduceSlotBytes;
  }
};

// sum[r] = residual[r] + sum over devices of x[r]; normed = RMSNorm(sum) * (norm_offset + weight).
struct AllReduceParams {
  const void* x;                         // [num_rows, columns]
  const void* residual;                  // [num_rows, columns]; null: none
  const void* weight;                    // [columns]
  void* sum;                             // [num_rows, columns]
  void* normed;                          // [num_rows, columns]; e4m3 if quantized
  float* scales;                         // [num_rows], of the quantized rows
  AllReduceMemory memory[kMaxReducers];  // by rank
  AllReduceFault* fault;                 // this device's, in host memory
  i64 limit;                             // ns that a wait may take
  i32 num_rows, columns;
  i32 rank;
  i32 call;  // of the call site, the same on all devices
  float eps, norm_offset;
};

}  // namespace jax_attn
