// One function for each PTX instruction. All other files of csrc/cuda are CUDA C++ without headers,
// which a host compiler also understands: tests/csrc/emulation/cuda_emulation.h replaces this file
// there, so the include guard has a name.
#ifndef JAX_ATTN_CUDA_COMMON_PTX_CUH_
#define JAX_ATTN_CUDA_COMMON_PTX_CUH_

#include "params.h"

namespace jax_attn {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

__device__ __forceinline__ u32 SharedAddress(const void* shared) {
  return static_cast<u32>(__cvta_generic_to_shared(shared));
}

// Makes x opaque: the compiler takes it for a new value at every call. What is derived from it is
// computed where it is used, instead of staying in registers that a loop needs.
__device__ __forceinline__ int Opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
__device__ __forceinline__ const char* Opaque(const char* x) {
  asm volatile("" : "+l"(x));
  return x;
}
__device__ __forceinline__ uint4 Opaque(uint4 x) {
  asm volatile("" : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w));
  return x;
}

// --- asynchronous copies ---

// Copies 16 bytes past L1, or writes 16 zero bytes and reads nothing when `valid` is false.
__device__ __forceinline__ void CopyAsync16(u32 shared, const void* global, bool valid) {
  const u32 bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(bytes)
               : "memory");
}

// The same with a hint to L2: EvictFirst for data that is not read again, EvictNormal for no hint.
__device__ __forceinline__ u64 EvictFirst() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ u64 EvictNormal() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void CopyAsync16(u32 shared, const void* global, bool valid,
                                            u64 policy) {
  const u32 bytes = valid ? 16 : 0;
  asm volatile(
      "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(shared),
      "l"(global), "r"(bytes), "l"(policy)
      : "memory");
}

// Closes the group of this thread's copies since the last commit; it may be empty.
__device__ __forceinline__ void CommitCopies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most kPending of this thread's latest groups are unfinished.
template <int kPending>
__device__ __forceinline__ void WaitCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// --- matrix fragments ---

// Loads four 8x8 matrices of 16-bit elements. Lane l gives the address of row l % 8 of matrix l /
// 8, and receives elements 2 * (l % 4) and the next of row l / 4 of each matrix.
__device__ __forceinline__ void LoadMatrix4(u32 (&r)[4], u32 shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared));
}

// The same with each matrix transposed.
__device__ __forceinline__ void LoadMatrix4Transposed(u32 (&r)[4], u32 shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared));
}

// c[16, 8] += a[16, 16] * b[16, 8]. With g = lane / 4 and t = lane % 4, c holds elements (g, 2t),
// (g, 2t + 1), (g + 8, 2t) and (g + 8, 2t + 1).
__device__ __forceinline__ void MmaBf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void MmaF16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// --- launches that overlap, from sm_90 on ---

// Waits until the launch before has ended. What it wrote is visible then.
__device__ __forceinline__ void WaitForLaunchBefore() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
// The next launch may begin once all CTAs of this one have called it or have ended.
__device__ __forceinline__ void LetNextLaunchBegin() {
  asm volatile("griddepcontrol.launch_dependents;");
}

// --- time ---

// ns; the same clock on all multiprocessors. It ticks every 32 ns or more rarely.
__device__ __forceinline__ i64 GlobalTimer() {
  i64 time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time)::"memory");
  return time;
}

// --- conversions and arithmetic ---

__device__ __forceinline__ u32 PackBf16(float low, float high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
__device__ __forceinline__ u32 PackF16(float low, float high) {
  u32 packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
// Packs four e4m3, the first one in the lowest byte: rounded to nearest, ties to even; magnitudes
// above 448 become 448, NaN stays NaN. From sm_89 on.
__device__ __forceinline__ u32 PackE4m3(float a, float b, float c, float d) {
  u32 packed;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n"
      "}\n"
      : "=r"(packed)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return packed;
}
// Converts two e4m3, the low byte first. From sm_89 on.
__device__ __forceinline__ u32 E4m3ToF16x2(u16 quantized) {
  u32 x;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(x) : "h"(quantized));
  return x;
}
// Converts the high half; a shift would be an instruction more.
__device__ __forceinline__ u32 E4m3HighToF16x2(u32 quantized) {
  u32 x;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "mov.b32 {low, high}, %1;\n"
      "cvt.rn.f16x2.e4m3x2 %0, high;\n"
      "}\n"
      : "=r"(x)
      : "r"(quantized));
  return x;
}
__device__ __forceinline__ float F16ToFloat(u16 bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}
__device__ __forceinline__ u32 FmaBf16x2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
__device__ __forceinline__ u32 FmaF16x2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

__device__ __forceinline__ float Exp2(float x) {  // relative error 2^-22; 0 for -inf
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float Log2(float x) {  // error 2^-22, relative or absolute; -inf for 0
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float Reciprocal(float x) {  // 1 ulp
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float ReciprocalRoot(float x) {  // relative error 2^-22
  float y;
  asm("rsqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float Quotient(float x, float y) {  // 2 ulp
  float z;
  asm("div.full.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}
// Truncates; saturates to i32; NaN becomes 0.
__device__ __forceinline__ int SaturatedInt(float x) {
  int y;
  asm("cvt.rzi.s32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}

// Reductions over a warp; every lane gets the result.
__device__ __forceinline__ u32 WarpMin(u32 x) {
  u32 y;
  asm volatile("redux.sync.min.u32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
  return y;
}
__device__ __forceinline__ u32 WarpMax(u32 x) {
  u32 y;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
  return y;
}
__device__ __forceinline__ u32 WarpSum(u32 x) {
  u32 y;
  asm volatile("redux.sync.add.u32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
  return y;
}

// --- named barriers: num_threads of the CTA meet at barrier `id` (0 is __syncthreads) ---
//
// bar.sync is barrier.sync.aligned: all threads that wait must do so at one place in the code.
// Threads that come from another place use ArriveNamed.

__device__ __forceinline__ void SyncNamed(int id, int num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

// Meets, and returns whether x holds for any of the threads.
__device__ __forceinline__ bool SyncNamedOr(int id, int num_threads, bool x) {
  u32 any;
  asm volatile(
      "{\n"
      ".reg .pred p, q;\n"
      "setp.ne.u32 p, %3, 0;\n"
      "bar.red.or.pred q, %1, %2, p;\n"
      "selp.u32 %0, 1, 0, q;\n"
      "}\n"
      : "=r"(any)
      : "r"(id), "r"(num_threads), "r"(static_cast<u32>(x))
      : "memory");
  return any != 0;
}

// Counts as having met, but does not wait for the others.
__device__ __forceinline__ void ArriveNamed(int id, int num_threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

// --- global memory ---

// Reads memory that nothing writes during the kernel.
__device__ __forceinline__ i32 LoadConstant(const i32* global) {
  i32 x;
  asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(x) : "l"(global));
  return x;
}
__device__ __forceinline__ uint4 LoadConstant16(const void* global) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(global));
  return v;
}

// The same past L1. Without `loads` it returns zeros and reads nothing.
__device__ __forceinline__ uint4 LoadRow16If(bool loads, const void* global) {
  uint4 v = make_uint4(0, 0, 0, 0);
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.s32 p, %5, 0;\n"
      "@p ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
      : "l"(global), "r"(static_cast<i32>(loads)));
  return v;
}

// The same for 32, 16 and 8 bits; the compiler may move and repeat these reads.
__device__ __forceinline__ u32 LoadOperand32(const void* global) {
  u32 x;
  asm("ld.global.nc.u32 %0, [%1];" : "=r"(x) : "l"(global));
  return x;
}
__device__ __forceinline__ u32 LoadOperand16(const void* global) {
  u16 x;
  asm("ld.global.nc.u16 %0, [%1];" : "=h"(x) : "l"(global));
  return x;
}
__device__ __forceinline__ u32 LoadOperand8(const void* global) {
  u32 x;
  asm("ld.global.nc.u8 %0, [%1];" : "=r"(x) : "l"(global));
  return x;
}

// Writes 16 or 8 bytes at once. (The compiler would split the store of a uint4 whose words were
// just packed into four.)
__device__ __forceinline__ void StoreVector(void* global, uint4 x) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(global), "r"(x.x), "r"(x.y),
               "r"(x.z), "r"(x.w));
}
__device__ __forceinline__ void StoreVector(void* global, uint2 x) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(global), "r"(x.x), "r"(x.y));
}

// Prefetches a line into L2.
__device__ __forceinline__ void PrefetchL2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

// Reads past L1, which is not coherent: what other CTAs wrote during this launch.
__device__ __forceinline__ i32 LoadCoherent(const i32* global) {
  i32 x;
  asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(x) : "l"(global));
  return x;
}
// The same with acquire order: it sees what other CTAs wrote before their AddAcquireRelease.
__device__ __forceinline__ i32 LoadAcquire(const i32* counter) {
  i32 x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(counter) : "memory");
  return x;
}
// Reads past L1. Without `loads` it returns `otherwise`, or zeros, and reads nothing.
__device__ __forceinline__ RowState LoadCoherentIf(bool loads, const RowState* global,
                                                   RowState otherwise) {
  RowState x = otherwise;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.s32 p, %3, 0;\n"
      "@p ld.global.cg.v2.f32 {%0, %1}, [%2];\n"
      "}\n"
      : "+f"(x.max_log4), "+f"(x.sum)
      : "l"(global), "r"(static_cast<i32>(loads)));
  return x;
}
__device__ __forceinline__ float4 LoadCoherent16If(bool loads, const float* global) {
  float4 v = make_float4(0, 0, 0, 0);
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.s32 p, %5, 0;\n"
      "@p ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "+f"(v.x), "+f"(v.y), "+f"(v.z), "+f"(v.w)
      : "l"(global), "r"(static_cast<i32>(loads)));
  return v;
}

// Raises a word of global memory, as unsigned, to at least x.
__device__ __forceinline__ void MaxRelaxed(i32* global, u32 x) {
  asm volatile("red.relaxed.gpu.global.max.u32 [%0], %1;" ::"l"(global), "r"(x) : "memory");
}

// The same for 64 bits.
__device__ __forceinline__ void MaxRelaxed(i64* global, i64 x) {
  asm volatile("red.relaxed.gpu.global.max.s64 [%0], %1;" ::"l"(global), "l"(x) : "memory");
}
__device__ __forceinline__ void AddRelaxed(i64* global, i64 x) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(global), "l"(x) : "memory");
}

// Adds to a counter in global memory and returns what it was. Whoever sees the sum also sees what
// this thread wrote, or saw written, before.
__device__ __forceinline__ i32 AddAcquireRelease(i32* counter, i32 x) {
  i32 before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(x)
               : "memory");
  return before;
}

// The same without ordering other accesses.
__device__ __forceinline__ i32 AddRelaxed(i32* counter, i32 x) {
  i32 before;
  asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(x)
               : "memory");
  return before;
}

// --- memory of several devices ---
//
// Between devices, and between a device and the host. A thread that sees a released flag, and all
// threads that meet it at a barrier afterwards, see what was written before the release.

__device__ __forceinline__ void StoreReleaseSystem(u64* flag, u64 x) {
  asm volatile(
      "fence.acq_rel.sys;\n"
      "st.release.sys.global.u64 [%0], %1;" ::"l"(flag),
      "l"(x)
      : "memory");
}
__device__ __forceinline__ u64 LoadAcquireSystem(const u64* flag) {
  u64 x;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(x) : "l"(flag) : "memory");
  return x;
}
__device__ __forceinline__ void StoreRelaxedSystem(i32* global, i32 x) {
  asm volatile("st.relaxed.sys.global.s32 [%0], %1;" ::"l"(global), "r"(x) : "memory");
}
__device__ __forceinline__ i32 LoadRelaxedSystem(const i32* global) {
  i32 x;
  asm volatile("ld.relaxed.sys.global.s32 %0, [%1];" : "=r"(x) : "l"(global) : "memory");
  return x;
}
// Reads past L1 what other devices wrote.
__device__ __forceinline__ uint4 LoadCoherent16(const void* global) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(global)
               : "memory");
  return v;
}

// Sleeps some 100 to 200 ns.
__device__ __forceinline__ void Nap() { asm volatile("nanosleep.u32 100;" ::: "memory"); }
// Limit, some 0.1 s, of a wait for another CTA that needs only microseconds. If it is reached, the
// plan or a counter is wrong, and a NaN result is better than a device that hangs. It counts naps
// and not time: on a device shared with other processes both CTAs may be suspended.
inline constexpr int kMostNaps = 1 << 20;

}  // namespace jax_attn

#endif  // JAX_ATTN_CUDA_COMMON_PTX_CUH_
