// The all-reduce with devices as threads: every CTA of every device is a thread of the system,
// which runs a CTA of one thread. Executables are launched in orders that change, devices stop at
// random.
#include "emulation/cuda_emulation.h"
// The header above stands in for CUDA and must come first. Its CTAs are fibers of one thread; here
// they have one thread each, and memory that they share is atomic.
#include <atomic>
#include <chrono>
#include <thread>

namespace jax_attn {
namespace {

constexpr emulation::Index kOnlyThread = {0};
void OneSync() {}
int OneSyncOr(int x) { return x; }
template <typename T>
T OneShuffle(unsigned, T x, int) {
  return x;
}
void AtomicStoreRelease(u64* to, u64 x) { __atomic_store_n(to, x, __ATOMIC_RELEASE); }
u64 AtomicLoadAcquire(const u64* from) { return __atomic_load_n(from, __ATOMIC_ACQUIRE); }
i32 AtomicLoadAcquire(const i32* from) { return __atomic_load_n(from, __ATOMIC_ACQUIRE); }
void AtomicStore(i32* to, i32 x) { __atomic_store_n(to, x, __ATOMIC_RELAXED); }
i32 AtomicLoad(const i32* from) { return __atomic_load_n(from, __ATOMIC_RELAXED); }
i32 AtomicAdd(i32* to, i32 x) { return __atomic_fetch_add(to, x, __ATOMIC_ACQ_REL); }
i64 Nanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}
void Yield() { std::this_thread::yield(); }

}  // namespace
}  // namespace jax_attn

#undef threadIdx
#define threadIdx kOnlyThread
#define __syncthreads OneSync
#define __syncthreads_or OneSyncOr
#define __shfl_xor_sync OneShuffle
#define StoreReleaseSystem AtomicStoreRelease
#define LoadAcquireSystem AtomicLoadAcquire
#define LoadAcquire AtomicLoadAcquire
#define StoreRelaxedSystem AtomicStore
#define LoadRelaxedSystem AtomicLoad
#define AddAcquireRelease AtomicAdd
#define AddRelaxed AtomicAdd
#define GlobalTimer Nanoseconds
#define Nap Yield

#include "cuda/all_reduce_cases.h"

namespace jax_attn {
namespace {

// A stream: the CTAs of a launch end before the next one begins, as they do on a GPU.
struct Stream {
  explicit Stream(int num_ctas) : num_ctas(num_ctas) {}
  void EndLaunch(int launch) {
    ++num_ended;
    while (num_ended.load() < (launch + 1) * num_ctas) Yield();
  }
  const int num_ctas;
  std::atomic<int> num_ended{0};
};

// Runs the calls of orders[rank] on each device. Devices fall behind at random. ended(i, rank, cta)
// is called when a CTA has ended call i.
template <class Traits, class Ended>
void RunOnThreads(const std::vector<Call<Traits>>& calls,
                  const std::vector<std::vector<int>>& orders, int num_ctas, unsigned seed,
                  const Ended& ended) {
  using Body = AllReduceBody<Traits>;
  std::vector<std::unique_ptr<Stream>> streams;
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < orders.size(); ++rank) {
    streams.push_back(std::make_unique<Stream>(num_ctas));
    for (int cta = 0; cta < num_ctas; ++cta) {
      threads.emplace_back([&, rank, cta] {
        std::mt19937 rng(seed + static_cast<unsigned>(rank));  // the same for CTAs of a device
        typename Body::Smem smem;
        for (size_t i = 0; i < orders[rank].size(); ++i) {
          const unsigned pause = rng() % 64;
          if (pause == 0) std::this_thread::sleep_for(std::chrono::microseconds(rng() % 200));
          Body::Work(calls[orders[rank][i]].params[rank], cta, num_ctas, smem);
          ended(orders[rank][i], static_cast<int>(rank), cta);
          streams[rank]->EndLaunch(static_cast<int>(i));
        }
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
}

constexpr auto kNothing = [](int, int, int) {};

// Executables of several calls each, in a new random order in every repeat, the same on all
// devices. Devices are several executables apart at times: no launch waits for a whole one of
// another device.
template <class Traits>
void TestRepeats(int num_repeats) {
  constexpr int kNumCtas = 2, kColumns = 16 / Element<Traits::kDtype>::kBytes * Traits::kVectors;
  Group group(Traits::kNumDevices);
  std::vector<Call<Traits>> calls;
  const std::vector<std::vector<int>> executables = {{0, 1, 2}, {3}, {4, 5}};
  for (int i = 0; i < 6; ++i) {
    calls.emplace_back(group, 1 + 2 * i, kColumns, i % 2 == 0, 1 + i, i);
  }
  std::mt19937 rng(1);
  std::vector<int> order;
  for (int i = 0; i < num_repeats; ++i) {
    const std::vector<int>& executable = executables[rng() % executables.size()];
    order.insert(order.end(), executable.begin(), executable.end());
  }
  std::vector<std::vector<char>> want;
  for (const auto& call : calls) want.push_back(call.WantedSum());
  std::atomic<int> num_wrong{0};
  const auto check = [&](int i, int rank, int cta) {
    const int num_rows = calls[i].params[0].num_rows;
    const int bytes = kColumns * Element<Traits::kDtype>::kBytes;
    const int piece_rows = AllReduceBody<Traits>::kPieceRows;
    for (int row = 0; row < num_rows; ++row) {
      if (row / piece_rows % kNumCtas != cta) continue;
      char* got = static_cast<char*>(calls[i].params[rank].sum) + row * bytes;
      num_wrong += std::memcmp(got, &want[i][row * bytes], bytes) != 0;
      std::memset(got, 0x5a, bytes);
    }
  };
  const std::vector<std::vector<int>> orders(Traits::kNumDevices, order);
  RunOnThreads(calls, orders, kNumCtas, 1, check);
  CHECK(num_wrong == 0, "%d devices: %d rows", Traits::kNumDevices, num_wrong.load());
  for (int rank = 0; rank < Traits::kNumDevices; ++rank) {
    CHECK(group.code(rank) == kAllReduceFine, "device %d gave up", rank);
    CHECK(group.head(rank).num_done[0] == group.head(rank).num_claimed[0], "device %d", rank);
  }
}

// Each device has its own order of executables: all of them end, with NaN and a reason.
void TestOrdersOfTheirOwn() {
  using Traits = AllReduceTraits<kElementF32, 3, 1, 4, false, kSum>;
  for (unsigned seed = 0; seed < 20; ++seed) {
    Group group(3);
    std::vector<Call<Traits>> calls;
    for (int i = 0; i < 4; ++i) calls.emplace_back(group, 3, 16, false, 1 + i, i);
    const std::vector<std::vector<int>> orders = {{0, 1, 2, 3}, {0, 3, 1, 2}, {0, 2, 3, 1}};
    RunOnThreads(calls, orders, 2, seed, kNothing);
    for (int rank = 0; rank < 3; ++rank) {
      CHECK(calls[0].IsRightOrNan(rank), "the call that all run first, device %d", rank);
      for (int i = 1; i < 4; ++i) CHECK(calls[i].HasNan(rank), "call %d, device %d", i, rank);
    }
  }
}

// One device stops for good between two launches.
void TestDeviceThatIsGone() {
  using Traits = AllReduceTraits<kElementF32, 2, 1, 4, true, kNormed>;
  Group group(2);
  std::vector<Call<Traits>> calls;
  for (int i = 0; i < 2; ++i) calls.emplace_back(group, 3, 16, false, 1, i);
  // Only waits for the device that is gone are short: threads may be late on a busy machine.
  for (AllReduceParams& p : calls[1].params) p.limit = 20'000'000;
  RunOnThreads(calls, {{0, 1}, {0}}, 1, 1, kNothing);
  CHECK(calls[0].IsRight() && calls[1].HasNan(0), "values");
  CHECK(group.code(0) == kAllReduceLate && group.faults[0].code_and_peer >> 32 == 1, "reason");
}

}  // namespace
}  // namespace jax_attn

int main() {
  using namespace jax_attn;
  TestRepeats<AllReduceTraits<kElementF32, 2, 1, 4, false, kNormed>>(2000);
  TestRepeats<AllReduceTraits<kElementF32, 4, 1, 4, true, kSum>>(500);
  TestOrdersOfTheirOwn();
  TestDeviceThatIsGone();
  if (g_failures == 0) std::printf("all_reduce_threads_test: ok\n");
  return g_failures != 0;
}
