// The all-reduce without GPUs: cuda/any/all_reduce.cuh runs in emulation, the CTAs of all devices
// in random order. Devices as threads are in all_reduce_threads_test.cc.
#include "emulation/cuda_emulation.h"
// The header above stands in for CUDA and must come first.
#include "cuda/all_reduce_cases.h"

namespace jax_attn {
namespace {

// Runs launches on every device, each device in its own order of the calls.
template <class Body, class Calls>
void RunOnDevices(const Calls& calls, const std::vector<std::vector<int>>& orders, int num_ctas,
                  unsigned seed) {
  const int num_devices = static_cast<int>(orders.size());
  emulation::machine.Launch(num_devices * num_ctas, Body::kNumThreads, seed, [&] {
    const int rank = blockIdx.x / num_ctas;
    for (const int i : orders[rank]) {
      Body::Work(calls[i].params[rank], blockIdx.x % num_ctas, num_ctas,
                 *reinterpret_cast<typename Body::Smem*>(smem));
      __syncthreads();
    }
  });
}

template <class Traits>
void TestValues(int num_rows, int columns, int num_ctas) {
  for (const bool has_residual : {false, true}) {
    Group group(Traits::kNumDevices);
    std::vector<Call<Traits>> calls;
    std::vector<int> order;
    for (int i = 0; i < 7; ++i) {  // slots are used again
      calls.emplace_back(group, num_rows, columns, has_residual, 1 + i % 2, i);
      order.push_back(i);
    }
    RunOnDevices<AllReduceBody<Traits>>(
        calls, std::vector<std::vector<int>>(Traits::kNumDevices, order), num_ctas, num_rows);
    for (const auto& call : calls) {
      CHECK(call.IsRight(), "%d devices, %d threads, %d vectors, two-shot %d, %d x %d, residual %d",
            Traits::kNumDevices, Traits::kNumThreads, Traits::kVectors, Traits::kTwoShot, num_rows,
            columns, has_residual);
    }
    for (int rank = 0; rank < Traits::kNumDevices; ++rank) {
      CHECK(group.code(rank) == kAllReduceFine, "device %d", rank);
    }
  }
}

// A device that never comes: the others give up, and later calls do so at once.
void TestMissingDevice() {
  using Traits = AllReduceTraits<kElementBf16, 3, 32, 1, false, kNormed>;
  using Body = AllReduceBody<Traits>;
  Group group(3);
  std::vector<Call<Traits>> calls;
  for (int i = 0; i < 3; ++i) calls.emplace_back(group, 2, 64, true, 1, i);
  for (auto& call : calls) {
    for (AllReduceParams& p : call.params) p.limit = 50;
  }
  RunOnDevices<Body>(calls, {{0, 1, 2}, {0}, {0, 1, 2}}, 2, 1);
  CHECK(calls[0].IsRight(), "the call before");
  for (const int rank : {0, 2}) {
    CHECK(calls[1].HasNan(rank) && calls[2].HasNan(rank), "device %d", rank);
    CHECK(group.head(rank).num_done[0] == 3 && group.head(rank).is_faulted != 0, "device %d", rank);
  }
  CHECK(group.head(1).is_faulted != 0, "the device that is late must learn of it");
  int num_late = 0;
  for (const int rank : {0, 2}) num_late += group.code(rank) == kAllReduceLate;
  CHECK(num_late > 0, "no device says why");
  RunOnDevices<Body>(calls, {{}, {1, 2}, {}}, 2, 1);
  CHECK(calls[1].HasNan(1) && calls[2].HasNan(1), "the device that was late");
}

// Devices that run two executables in different orders: an error on all of them, no deadlock and no
// sums of different calls.
void TestOtherOrder() {
  using Traits = AllReduceTraits<kElementF32, 2, 32, 1, false, kSum>;
  for (unsigned seed = 0; seed < 20; ++seed) {
    Group group(2);
    std::vector<Call<Traits>> calls;
    for (int i = 0; i < 3; ++i) calls.emplace_back(group, 1 + 2 * i, 64, false, 1 + i, i);
    RunOnDevices<AllReduceBody<Traits>>(calls, {{0, 1, 2}, {0, 2, 1}}, 2, seed);
    for (const int rank : {0, 1}) {
      CHECK(calls[0].IsRightOrNan(rank), "the call that both run first, device %d", rank);
      CHECK(calls[1].HasNan(rank) && calls[2].HasNan(rank), "device %d", rank);
    }
    CHECK(group.code(0) == kAllReduceOther || group.code(1) == kAllReduceOther, "no reason");
  }
}

// Two runs of one executable are different calls, too, also if nothing ran between them.
void TestOtherRun() {
  using Traits = AllReduceTraits<kElementBf16, 2, 32, 1, false, kSum>;
  for (int run = 0; run < 4; ++run) {
    Group group(2);
    std::vector<Call<Traits>> calls;
    calls.emplace_back(group, 1, 64, false, 1, 0);
    group.head(0).run = run, group.head(1).run = run + 1;
    RunOnDevices<AllReduceBody<Traits>>(calls, {{0}, {0}}, 1, 1);
    CHECK(calls[0].HasNan(0) && calls[0].HasNan(1), "runs %d and %d were mixed", run, run + 1);
  }
}

}  // namespace
}  // namespace jax_attn

int main() {
  using namespace jax_attn;
  g_limit = 1'000'000;
  TestValues<AllReduceTraits<kElementBf16, 2, 64, 1, false, kSum>>(5, 512, 2);
  TestValues<AllReduceTraits<kElementBf16, 2, 32, 2, false, kNormed>>(3, 504, 2);
  TestValues<AllReduceTraits<kElementF16, 3, 32, 1, false, kQuantized>>(3, 128, 1);
  TestValues<AllReduceTraits<kElementF32, 4, 64, 1, true, kNormed>>(13, 64, 2);
  TestValues<AllReduceTraits<kElementBf16, 2, 32, 2, true, kNormed>>(7, 320, 2);
  TestValues<AllReduceTraits<kElementBf16, 3, 32, 1, true, kQuantized>>(7, 256, 2);
  TestMissingDevice();
  TestOtherOrder();
  TestOtherRun();
  if (g_failures == 0) std::printf("all_reduce_cuda_test: ok\n");
  return g_failures != 0;
}
