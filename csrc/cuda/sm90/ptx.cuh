// One function for each PTX instruction of sm_90a: mbarriers, TMA, register limits, wgmma.
//
// tests/csrc/emulation/cuda_emulation_sm90.h replaces this file on the host, so the include guard
// has a name.
#ifndef JAX_ATTN_CUDA_SM90_PTX_CUH_
#define JAX_ATTN_CUDA_SM90_PTX_CUH_

#include "cuda/common/ptx.cuh"
#include "cuda/common/types.cuh"

namespace jax_attn {

// --- barriers in shared memory (mbarrier) ---
//
// A barrier counts the arrivals of its current phase. The last one completes the phase and begins
// the next. WaitBarrier(b, parity) returns once the phase of that parity (0 for the first one) is
// complete, so waiting for parity 1 on a fresh barrier returns at once.
//
// A wait has no time limit. It ends because warps that wait and warps that arrive count their
// phases by the same words of a plan, which do not change meanwhile, and by the same conditions:
// the borders of a queue (QueueBegin, QueueEnd); whether an item has steps, and how many, by its
// span; which consumer has it, by its tokens and tile. This holds for words of any value, not only
// for valid plans: faults_sm90_test.cc runs damaged ones. Waits for other CTAs, on counters of
// merge groups, have a limit.

__device__ __forceinline__ void InitBarrier(u32 barrier, int num_arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(num_arrivals)
               : "memory");
}

__device__ __forceinline__ void ArriveBarrier(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Makes this thread arrive when all of its asynchronous copies so far have landed. It does not
// wait.
__device__ __forceinline__ void ArriveBarrierAfterCopies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Arrives `count` times at once.
__device__ __forceinline__ void ArriveBarrier(u32 barrier, int count) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count)
               : "memory");
}

// Adds num_bytes to what LoadTmaTile must copy before the current phase completes.
__device__ __forceinline__ void ExpectBytes(u32 barrier, int num_bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier),
               "r"(num_bytes)
               : "memory");
}

// Loads one TMA tile: 64 columns from `column` on of head `head`, rows from `row` on of layer
// `layer`, as swizzled rows of 128 bytes. wgmma may read them after a wait for `barrier`; no fence
// is needed.
__device__ __forceinline__ void LoadTmaTile(u32 shared, const TensorMap& map, int column, int head,
                                            int row, int layer, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared),
      "l"(&map), "r"(column), "r"(head), "r"(row), "r"(layer), "r"(barrier)
      : "memory");
}

// Loads a map into the cache that TMA reads it from: at its first use that is a trip to memory.
__device__ __forceinline__ void PrefetchTensorMap(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Stores one TMA tile: the 16 rows that WriteByTma has in shared memory. The thread that issued it
// may overwrite the source after WaitStoresRead, and the destination after WaitStores.
__device__ __forceinline__ void StoreTmaTile(const TensorMap& map, int column, int head, int row,
                                             u32 shared) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::
          "l"(&map),
      "r"(column), "r"(head), "r"(row), "r"(0), "r"(shared)
      : "memory");
}
// Copies, or adds in f32, num_bytes, a multiple of 16, from shared to global memory. Wait for it as
// for StoreTmaTile.
__device__ __forceinline__ void StoreBulk(float* global, u32 shared, int num_bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(shared), "r"(num_bytes)
               : "memory");
}
__device__ __forceinline__ void AddBulk(float* global, u32 shared, int num_bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global),
      "r"(shared), "r"(num_bytes)
      : "memory");
}
__device__ __forceinline__ void CommitStores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ __forceinline__ void WaitStoresRead() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void WaitStores() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

__device__ __forceinline__ bool TryWaitBarrier(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// Whether the phase is complete. It does not wait.
__device__ __forceinline__ bool TestBarrier(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

__device__ __forceinline__ void WaitBarrier(u32 barrier, u32 parity) {
  while (!TryWaitBarrier(barrier, parity)) {
  }
}

// Makes shared memory that ordinary instructions or CopyAsync16 wrote visible to wgmma and
// StoreTmaTile. The reader executes it after it waited for the writers, or the writers before they
// arrive.
__device__ __forceinline__ void FenceSharedForWgmma() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Keeps the order of bulk copies and ordinary accesses of this thread to global memory.
__device__ __forceinline__ void FenceGlobalForBulk() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// --- matrix fragments ---

// Stores two 8x8 matrices of 16-bit elements, each transposed. Before, a lane has elements 2 * (l %
// 4) and the next of row l / 4 of each matrix. Lane l < 16 gives the address of row l % 8 of the
// transposed matrix l / 8, 16 bytes.
__device__ __forceinline__ void StoreMatrix2Transposed(u32 shared, u32 r0, u32 r1) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(shared),
               "r"(r0), "r"(r1)
               : "memory");
}

// Stores four 8x8 matrices of 16-bit elements. A lane has elements 2 * (l % 4) and the next of row
// l / 4 of each, and gives the address of row l % 8 of matrix l / 8, 16 bytes.
__device__ __forceinline__ void StoreMatrix4(u32 shared, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// --- registers a thread of this warpgroup may use from here on ---

template <int kRegisters>
__device__ __forceinline__ void LowerRegisterLimit() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void RaiseRegisterLimit() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// --- wgmma: matrix products of a warpgroup, asynchronous ---

// The descriptor of a matrix in shared memory with swizzled rows of 128 bytes: byte address bits
// [4, 7) are XORed with bits [7, 10), so tiles start at multiples of 1024. Blocks of 8 rows follow
// each other in `stride` bytes. If the rows run along the dimension that is not summed over
// (transposed b), further columns follow in `leading` bytes.
__device__ __forceinline__ u64 MatrixDescriptor(u32 shared, int leading, int stride) {
  constexpr u64 kSwizzle128 = u64{1} << 62;
  return kSwizzle128 | static_cast<u64>(stride >> 4) << 32 | static_cast<u64>(leading >> 4) << 16 |
         (shared & 0x3ffff) >> 4;
}

// The descriptor of an address num_bytes further. An address has 18 bits, so nothing is carried
// into the upper word, which the compiler may keep as a constant.
__device__ __forceinline__ u64 MoveDescriptor(u64 descriptor, int num_bytes) {
  return (descriptor & 0xffffffff00000000ull) |
         (static_cast<u32>(descriptor) + static_cast<u32>(num_bytes >> 4));
}

// Needed before the first wgmma, and after other instructions wrote registers that a wgmma reads or
// adds to.
__device__ __forceinline__ void WgmmaFence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Closes the group of products issued since the last commit.
__device__ __forceinline__ void WgmmaCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kPending of the latest groups are unfinished.
template <int kPending>
__device__ __forceinline__ void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Pins registers that asynchronous products read or write: the compiler keeps what computes them
// before this point, and what uses them behind it. Use it before a WgmmaFence and after a
// WgmmaWait.
template <class T, int kTiles>
__device__ __forceinline__ void PinRegisters(T (&d)[kTiles][4]) {
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if constexpr (sizeof(T) == 4 && T(0.5f) == T(0)) {
        asm volatile("" : "+r"(d[j][c])::"memory");
      } else {
        asm volatile("" : "+f"(d[j][c])::"memory");
      }
    }
  }
}

// Keeps the computation of x, which is not negative, before what follows. ptxas would move it
// behind a WgmmaWait for products that it does not need, so two waits would follow each other.
__device__ __forceinline__ void KeepBefore(float x) {
  if (x < 0.0f) asm volatile("nanosleep.u32 1;" ::: "memory");
}

// d[64, kN] = (accumulate ? d : 0) + a[64, 16] * b[16, kN].
// d is laid out as in MmaBf16: warp w of the warpgroup has rows [16w, 16w + 16), and d[j][2h + c]
// is column 8j + 2 * (lane % 4) + c of row 8h + lane / 4 of them.
// a: in shared memory with rows along k; transposed, with rows along the 64; or in registers, as
// fragments for MmaBf16. b: in shared memory with rows along k; or transposed, with rows along n.
template <int kN, int kDtype>
struct Wgmma;

// Operands 0 .. kN / 2 - 1 are the accumulators.
#define JAX_ATTN_LIST_4 "%0, %1, %2, %3"
#define JAX_ATTN_LIST_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define JAX_ATTN_LIST_16 JAX_ATTN_LIST_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define JAX_ATTN_LIST_32 \
  JAX_ATTN_LIST_16       \
  ", "                   \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define JAX_ATTN_LIST_64                                                                  \
  JAX_ATTN_LIST_32                                                                        \
  ", "                                                                                    \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, " \
  "%49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define JAX_ATTN_LIST_96                                                                  \
  JAX_ATTN_LIST_64                                                                        \
  ", "                                                                                    \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, " \
  "%81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define JAX_ATTN_LIST_128                                                                  \
  JAX_ATTN_LIST_96                                                                         \
  ", "                                                                                     \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, " \
  "%111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, "   \
  "%125, %126, %127"
#define JAX_ATTN_LIST_24 JAX_ATTN_LIST_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define JAX_ATTN_LIST_36 JAX_ATTN_LIST_32 ", %32, %33, %34, %35"
#define JAX_ATTN_LIST_40 JAX_ATTN_LIST_36 ", %36, %37, %38, %39"
#define JAX_ATTN_LIST_48 JAX_ATTN_LIST_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define JAX_ATTN_LIST_56 JAX_ATTN_LIST_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define JAX_ATTN_LIST_68 JAX_ATTN_LIST_64 ", %64, %65, %66, %67"
#define JAX_ATTN_LIST_100 JAX_ATTN_LIST_96 ", %96, %97, %98, %99"
#define JAX_ATTN_REGISTERS_4 "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3])
#define JAX_ATTN_REGISTERS_8_AT(i)                                            \
  "+f"(d[i / 4][0]), "+f"(d[i / 4][1]), "+f"(d[i / 4][2]), "+f"(d[i / 4][3]), \
      "+f"(d[i / 4 + 1][0]), "+f"(d[i / 4 + 1][1]), "+f"(d[i / 4 + 1][2]), "+f"(d[i / 4 + 1][3])
#define JAX_ATTN_REGISTERS_8 JAX_ATTN_REGISTERS_8_AT(0)
#define JAX_ATTN_REGISTERS_16 JAX_ATTN_REGISTERS_8, JAX_ATTN_REGISTERS_8_AT(8)
#define JAX_ATTN_REGISTERS_32 \
  JAX_ATTN_REGISTERS_16, JAX_ATTN_REGISTERS_8_AT(16), JAX_ATTN_REGISTERS_8_AT(24)
#define JAX_ATTN_REGISTERS_32_AT(i)                                                                \
  JAX_ATTN_REGISTERS_8_AT(i), JAX_ATTN_REGISTERS_8_AT((i + 8)), JAX_ATTN_REGISTERS_8_AT((i + 16)), \
      JAX_ATTN_REGISTERS_8_AT((i + 24))
#define JAX_ATTN_REGISTERS_64 JAX_ATTN_REGISTERS_32, JAX_ATTN_REGISTERS_32_AT(32)
#define JAX_ATTN_REGISTERS_96 JAX_ATTN_REGISTERS_64, JAX_ATTN_REGISTERS_32_AT(64)
#define JAX_ATTN_REGISTERS_128 JAX_ATTN_REGISTERS_96, JAX_ATTN_REGISTERS_32_AT(96)
#define JAX_ATTN_REGISTERS_4_AT(i) \
  "+f"(d[i / 4][0]), "+f"(d[i / 4][1]), "+f"(d[i / 4][2]), "+f"(d[i / 4][3])
#define JAX_ATTN_REGISTERS_24 JAX_ATTN_REGISTERS_16, JAX_ATTN_REGISTERS_8_AT(16)
#define JAX_ATTN_REGISTERS_36 JAX_ATTN_REGISTERS_32, JAX_ATTN_REGISTERS_4_AT(32)
#define JAX_ATTN_REGISTERS_40 JAX_ATTN_REGISTERS_32, JAX_ATTN_REGISTERS_8_AT(32)
#define JAX_ATTN_REGISTERS_48 JAX_ATTN_REGISTERS_40, JAX_ATTN_REGISTERS_8_AT(40)
#define JAX_ATTN_REGISTERS_56 JAX_ATTN_REGISTERS_48, JAX_ATTN_REGISTERS_8_AT(48)
#define JAX_ATTN_REGISTERS_68 JAX_ATTN_REGISTERS_64, JAX_ATTN_REGISTERS_4_AT(64)
#define JAX_ATTN_REGISTERS_100 JAX_ATTN_REGISTERS_96, JAX_ATTN_REGISTERS_4_AT(96)

// o0 .. o5: the operands after the accumulators. transposed: "a, b" of 0 and 1.
#define JAX_ATTN_WGMMA_OF_SHARED(name, transposed, n, count, type, o0, o1, o2)                 \
  __device__ __forceinline__ static void name(float (&d)[count / 4][4], u64 a, u64 b,          \
                                              bool accumulate) {                               \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " o2                                        \
                 ", 0;\n"                                                                      \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type               \
                 " {" JAX_ATTN_LIST_##count "}, " o0 ", " o1 ", p, 1, 1, " transposed ";\n}\n" \
                 : JAX_ATTN_REGISTERS_##count                                                  \
                 : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                         \
  }
// transposed: "b".
#define JAX_ATTN_WGMMA_OF_REGISTERS(name, transposed, n, count, type, o0, o1, o2, o3, o4, o5)      \
  __device__ __forceinline__ static void name(float (&d)[count / 4][4], const u32(&a)[4], u64 b,   \
                                              bool accumulate) {                                   \
    asm volatile(                                                                                  \
        "{\n.reg .pred p;\nsetp.ne.b32 p, " o5                                                     \
        ", 0;\n"                                                                                   \
        "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" JAX_ATTN_LIST_##count \
        "}, {" o0 ", " o1 ", " o2 ", " o3 "}, " o4 ", p, 1, 1, " transposed ";\n}\n"               \
        : JAX_ATTN_REGISTERS_##count                                                               \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));  \
  }
#define JAX_ATTN_WGMMA(n, count, dtype, type, o0, o1, o2, o3, o4, o5)                           \
  template <>                                                                                   \
  struct Wgmma<n, dtype> {                                                                      \
    JAX_ATTN_WGMMA_OF_SHARED(SharedA, "0, 0", n, count, type, o0, o1, o2)                       \
    JAX_ATTN_WGMMA_OF_SHARED(SharedATransposedB, "0, 1", n, count, type, o0, o1, o2)            \
    JAX_ATTN_WGMMA_OF_SHARED(TransposedSharedA, "1, 0", n, count, type, o0, o1, o2)             \
    JAX_ATTN_WGMMA_OF_SHARED(TransposedSharedATransposedB, "1, 1", n, count, type, o0, o1, o2)  \
    JAX_ATTN_WGMMA_OF_REGISTERS(RegistersA, "0", n, count, type, o0, o1, o2, o3, o4, o5)        \
    JAX_ATTN_WGMMA_OF_REGISTERS(RegistersATransposedB, "1", n, count, type, o0, o1, o2, o3, o4, \
                                o5)                                                             \
  };
#define JAX_ATTN_WGMMA_BOTH(n, count, ...)                    \
  JAX_ATTN_WGMMA(n, count, kElementBf16, "bf16", __VA_ARGS__) \
  JAX_ATTN_WGMMA(n, count, kElementF16, "f16", __VA_ARGS__)

JAX_ATTN_WGMMA_BOTH(8, 4, "%4", "%5", "%6", "%7", "%8", "%9")
JAX_ATTN_WGMMA_BOTH(16, 8, "%8", "%9", "%10", "%11", "%12", "%13")
JAX_ATTN_WGMMA_BOTH(32, 16, "%16", "%17", "%18", "%19", "%20", "%21")
JAX_ATTN_WGMMA_BOTH(48, 24, "%24", "%25", "%26", "%27", "%28", "%29")
JAX_ATTN_WGMMA_BOTH(64, 32, "%32", "%33", "%34", "%35", "%36", "%37")
JAX_ATTN_WGMMA_BOTH(80, 40, "%40", "%41", "%42", "%43", "%44", "%45")
JAX_ATTN_WGMMA_BOTH(96, 48, "%48", "%49", "%50", "%51", "%52", "%53")
JAX_ATTN_WGMMA_BOTH(112, 56, "%56", "%57", "%58", "%59", "%60", "%61")
JAX_ATTN_WGMMA_BOTH(128, 64, "%64", "%65", "%66", "%67", "%68", "%69")
JAX_ATTN_WGMMA_BOTH(192, 96, "%96", "%97", "%98", "%99", "%100", "%101")
JAX_ATTN_WGMMA_BOTH(256, 128, "%128", "%129", "%130", "%131", "%132", "%133")

// The e4m3 product d[64, kN] = (accumulate ? d : 0) + a[64, 32] * b[32, kN], both with rows along
// k, the only way for 8-bit types. Addends are cut off at some 13 bits below the largest one.
template <int kN>
struct WgmmaE4m3;

#define JAX_ATTN_WGMMA_E4M3(n, count, o0, o1, o2)                                          \
  template <>                                                                              \
  struct WgmmaE4m3<n> {                                                                    \
    __device__ __forceinline__ static void SharedA(float (&d)[count / 4][4], u64 a, u64 b, \
                                                   bool accumulate) {                      \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " o2                                  \
                   ", 0;\n"                                                                \
                   "wgmma.mma_async.sync.aligned.m64n" #n                                  \
                   "k32.f32.e4m3.e4m3"                                                     \
                   " {" JAX_ATTN_LIST_##count "}, " o0 ", " o1 ", p, 1, 1;\n}\n"           \
                   : JAX_ATTN_REGISTERS_##count                                            \
                   : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                   \
    }                                                                                      \
  };

JAX_ATTN_WGMMA_E4M3(64, 32, "%32", "%33", "%34")
JAX_ATTN_WGMMA_E4M3(72, 36, "%36", "%37", "%38")
JAX_ATTN_WGMMA_E4M3(128, 64, "%64", "%65", "%66")
JAX_ATTN_WGMMA_E4M3(136, 68, "%68", "%69", "%70")
JAX_ATTN_WGMMA_E4M3(200, 100, "%100", "%101", "%102")

#undef JAX_ATTN_WGMMA_E4M3
#undef JAX_ATTN_WGMMA_BOTH
#undef JAX_ATTN_WGMMA
#undef JAX_ATTN_WGMMA_OF_REGISTERS
#undef JAX_ATTN_WGMMA_OF_SHARED

}  // namespace jax_attn

#endif  // JAX_ATTN_CUDA_SM90_PTX_CUH_
