// Runs the device code of csrc/cuda on the host. Every thread of a CTA is a fiber, instructions of
// a whole warp meet at barriers, and asynchronous copies arrive as late as allowed.
//
// Stands in for cuda/common/ptx.cuh and for the declarations of a CUDA compiler. Include it first,
// and cuda_emulation_sm90.h after it for code of sm_90a.
//
// Finds mistakes that a GPU may hide: a copy that was not waited for, a slot refilled while it was
// still read, shared memory that was never written (all of these read as NaN), and barriers that
// part of a warp or CTA does not reach (aborts, with what every warp waits for). Warps run in
// random order; in every other CTA one warpgroup runs far behind the others and their copies.
//
// Cannot find: wrong PTX, and races between lanes of a warp within one stretch without collectives.
#pragma once
#define JAX_ATTN_CUDA_COMMON_PTX_CUH_

#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "params.h"

#define __device__
#define __host__
#define __shared__
#define __forceinline__ inline
#define __noinline__
#define __align__(bytes) __attribute__((aligned(bytes)))
// For the hottest functions: optimised for speed. The kernels are optimised for compile time.
#define JAX_ATTN_EMULATION_HOT __attribute__((optimize("O3"), noinline))
// For functions that those call: GCC inlines nothing else there.
#define JAX_ATTN_EMULATION_INLINE inline __attribute__((always_inline))

struct uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <typename To, typename From>
JAX_ATTN_EMULATION_INLINE To EmulationBits(From from) {
  static_assert(sizeof(To) == sizeof(From), "as many bits");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}
JAX_ATTN_EMULATION_INLINE float __uint_as_float(unsigned x) { return EmulationBits<float>(x); }
JAX_ATTN_EMULATION_INLINE unsigned __float_as_uint(float x) { return EmulationBits<unsigned>(x); }
// PRMT: bytes of x (0 to 3) and y (4 to 7) by the digits of `selector`; each digit is below 8.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = x | static_cast<uint64_t>(y) << 32;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= static_cast<unsigned>(bytes >> (8 * (selector >> (4 * i) & 7)) & 0xff) << (8 * i);
  }
  return result;
}
inline float __int_as_float(int x) { return EmulationBits<float>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
// Number of zero bits above the highest set bit.
inline long long __float2ll_rn(float x) { return std::llrint(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
// 1 + the position of the lowest set bit; 0 if there is none.
inline int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }

namespace jax_attn {

alignas(1024) inline unsigned char smem[228 * 1024];  // the kernels' extern __shared__

namespace emulation {

// Shared memory as the asynchronous proxy sees it (WGMMA, bulk copies). A thread's writes get there
// only by fence.proxy.async.
inline unsigned char async_smem[sizeof(smem)];

inline std::string Text(const char* format, ...) __attribute__((format(printf, 1, 2)));
inline std::string Text(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  return text;
}

[[noreturn]] inline void Fail(const std::string& what) {
  std::printf("FAILED emulation: %s\n", what.c_str());
  std::fflush(stdout);
  std::abort();
}

// Ends of arrays that no copy may read past, not even by one vector of 16 bytes.
inline std::vector<const void*> ends_of_pools;

struct Index {
  int x;
};

// 16 bytes in flight to shared memory.
struct Copy {
  unsigned char* to;
  const void* from;
  bool valid;

  void Land() const {
    if (valid) {
      std::memcpy(to, from, 16);
    } else {
      std::memset(to, 0, 16);
    }
  }
};

enum class Waits { kNot, kForWarp, kForCta, kForEvent };

// A saved point of execution. swapcontext would work, but it asks the system for the signal mask
// every time, and emulation switches millions of times.
struct Place {
  void* registers[5];  // of __builtin_setjmp

  [[noreturn]] __attribute__((noinline)) void GoOn() { __builtin_longjmp(registers, 1); }
  // Continues at `there`; returns when this place is switched to again.
  __attribute__((noinline)) void SwitchTo(Place* there) {
    if (__builtin_setjmp(registers) == 0) there->GoOn();
  }
  // Starts a context; returns when this place is switched to again.
  __attribute__((noinline)) void Begin(const ucontext_t& context) {
    if (__builtin_setjmp(registers) == 0) setcontext(&context);
  }
};

// A small closure: fibers wait for events millions of times, and std::function allocates.
template <typename Result>
class Closure {
 public:
  Closure() = default;
  template <typename Function>
  explicit Closure(const Function& function) {
    static_assert(sizeof(function) <= sizeof(bytes_) && alignof(Function) <= 8, "room for it");
    static_assert(std::is_trivially_copyable_v<Function>, "of references and numbers");
    std::memcpy(bytes_, &function, sizeof(function));
    call_ = [](const unsigned char* bytes) -> Result {
      return (*reinterpret_cast<const Function*>(bytes))();
    };
  }
  JAX_ATTN_EMULATION_INLINE Result operator()() const { return call_(bytes_); }

 private:
  Result (*call_)(const unsigned char*);
  alignas(8) unsigned char bytes_[24];
};

struct alignas(64) Fiber {
  // The fields that the scheduler reads from every thread.
  bool begun = false, done;
  Waits waits;
  Closure<bool> happened;  // the event it waits for

  Index thread;
  const char* where;           // the barrier it waits at
  Closure<std::string> event;  // in words
  uint32_t exchange[8];        // values that collectives exchange
  std::vector<std::vector<Copy>> groups;
  std::vector<Copy> open_group;
  Place place;
  std::unique_ptr<char[]> stack;
  ucontext_t start;
};

// State of an architecture beyond threads and shared memory.
class Unit {
 public:
  virtual ~Unit() = default;
  virtual void BeginCta(int num_threads) = 0;
  virtual void EndCta() = 0;  // fails if something is left over
  // Swaps the state of the running CTA with that in a drawer.
  virtual void Exchange(int drawer) = 0;
};

// Work that has started and has not been waited for. A sequence finishes in order.
struct InFlight {
  int sequence;
  std::function<void()> finish;
};

// A CTA while others run: its whole state except that of units.
struct Sleeper {
  int cta;
  bool eager;
  int drawer;
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<InFlight*> in_flight;
  std::vector<unsigned char> smem, async_smem;
};

class Machine {
 public:
  // Runs `kernel` on every thread of every CTA. CTAs run in random order, one at a time: until the
  // CTA ends, or until all its runnable threads let others go first.
  void Launch(int num_ctas, int num_threads, unsigned seed, std::function<void()> kernel) {
    random_.seed(seed);
    seed_ = seed;
    kernel_ = std::move(kernel);
    grid_dim = {num_ctas};
    block_dim = {num_threads};
    std::vector<int> ctas(num_ctas);
    std::iota(ctas.begin(), ctas.end(), 0);
    std::shuffle(ctas.begin(), ctas.end(), random_);
    int num_begun = 0;
    while (num_begun < num_ctas || !sleepers_.empty()) {
      if (num_begun < num_ctas && (sleepers_.empty() || random_() % 2 == 0)) {
        BeginCta(ctas[num_begun], num_begun % 2 == 1);
        ++num_begun;
      } else {
        WakeCta(random_() % sleepers_.size());
      }
      RunCta();
    }
  }

  JAX_ATTN_EMULATION_INLINE Fiber& current() { return *current_; }
  JAX_ATTN_EMULATION_INLINE Fiber& thread(int i) { return *threads_[i]; }
  JAX_ATTN_EMULATION_INLINE Fiber& lane(int i) {
    return *threads_[current_->thread.x / 32 * 32 + i];
  }

  void Wait(Waits waits, const char* where) {
    current_->waits = waits;
    current_->where = where;
    current_->place.SwitchTo(&scheduler_);
  }

  // `event` is called only when nothing can run any more.
  template <typename Happened, typename Event>
  void WaitUntil(const Happened& happened, const Event& event) {
    if (happened()) return;
    current_->happened = Closure<bool>(happened);
    current_->event = Closure<std::string>(event);
    Wait(Waits::kForEvent, "an event");
  }

  // True if the running CTA lets others go first at its arrivals. The others run until they wait,
  // and complete the work that it left.
  bool IsPolite() const { return (seed_ >> block.x % 32 & 1) != 0; }

  // Lets other CTAs run, if there are any.
  void LetOthersGoFirst() {
    if (grid_dim.x == 1) return;
    const int64_t now = num_turns_;
    is_sleepy_ = true;
    WaitUntil([this, now] { return num_turns_ > now; }, [] { return std::string("others"); });
  }

  // `finish` runs when no warp can run without it, and in every other CTA at random earlier times.
  // in_order: after this thread's earlier work.
  void Later(bool in_order, std::function<void()> finish) {
    in_flight_.push_back(
        new InFlight{in_order ? current_->thread.x : --num_unordered_, std::move(finish)});
  }

  // Shared memory as the asynchronous proxy sees it.
  unsigned char* AsyncSmem() {
    if (owes_copy_) PublishNow();
    return async_smem;
  }
  // Makes all threads' writes so far visible to the asynchronous proxy. If a warp's lanes call this
  // one after the other, the first and the last lane copy all of shared memory, and lanes between
  // leave it to the last. A read before that copies at once.
  void Publish() {
    if (publisher_ == nullptr) publisher_ = current_;
    if (publisher_ == current_ || is_last_lane_) {
      PublishNow();
    } else {
      owes_copy_ = true;
    }
  }

  Index block, block_dim, grid_dim;
  std::vector<Unit*> units;

 private:
  static constexpr size_t kStackBytes = 256 * 1024;

  static void Entry();

  void BeginCta(int cta, bool eager) {
    block = {cta};
    eager_ = eager;
    std::memset(smem, 0xff, sizeof(smem));
    std::memset(async_smem, 0xff, sizeof(async_smem));
    for (Unit* unit : units) unit->BeginCta(block_dim.x);
    while (fibers_.size() < static_cast<size_t>(block_dim.x)) fibers_.emplace_back(new Fiber);
    SetThreads();
    for (int i = 0; i < block_dim.x; ++i) {
      Fiber& f = *threads_[i];
      f.thread = {i};
      f.done = false;
      f.waits = Waits::kNot;
      f.groups.clear();
      f.open_group.clear();
      if (f.begun) continue;  // it waits in Entry
      f.stack.reset(new char[kStackBytes]);
      getcontext(&f.start);
      f.start.uc_stack.ss_sp = f.stack.get();
      f.start.uc_stack.ss_size = kStackBytes;
      makecontext(&f.start, &Machine::Entry, 0);
    }
  }

  void RunCta() {
    ++num_turns_;
    is_sleepy_ = false;
    slow_ = random_() % 2 == 0 ? static_cast<int>(random_() % ((block_dim.x + 127) / 128)) : -1;
    do {
      if (eager_ && random_() % 4 == 0) FinishSomething();
    } while (RunSomeWarp(false) || (slow_ >= 0 && FinishSomething()) || RunSomeWarp(true) ||
             ReleaseCta() || FinishSomething());
    if (is_sleepy_) return PutToSleep();
    for (int i = 0; i < block_dim.x; ++i) {
      if (!threads_[i]->done) FailStuck();
    }
    if (!in_flight_.empty()) Fail("the CTA ends before its copies arrive");
    for (Unit* unit : units) unit->EndCta();
  }

  void PutToSleep() {
    Sleeper s = {block.x, eager_, num_drawers_++, std::move(fibers_), std::move(in_flight_),
                 {},      {}};
    s.smem.assign(smem, smem + sizeof(smem));
    s.async_smem.assign(async_smem, async_smem + sizeof(async_smem));
    for (Unit* unit : units) unit->Exchange(s.drawer);
    fibers_.clear();
    if (!spare_fibers_.empty()) {
      fibers_ = std::move(spare_fibers_.back());
      spare_fibers_.pop_back();
    }
    in_flight_.clear();
    sleepers_.push_back(std::move(s));
  }

  void WakeCta(size_t i) {
    Sleeper s = std::move(sleepers_[i]);
    sleepers_.erase(sleepers_.begin() + static_cast<std::ptrdiff_t>(i));
    block = {s.cta};
    eager_ = s.eager;
    std::copy(s.smem.begin(), s.smem.end(), smem);
    std::copy(s.async_smem.begin(), s.async_smem.end(), async_smem);
    for (Unit* unit : units) unit->Exchange(s.drawer);
    spare_fibers_.push_back(std::move(fibers_));
    fibers_ = std::move(s.fibers);
    SetThreads();
    in_flight_ = std::move(s.in_flight);
  }

  void SetThreads() {
    for (size_t i = 0; i < fibers_.size(); ++i) threads_[i] = fibers_[i].get();
  }

  void PublishNow() {
    std::memcpy(async_smem, smem, sizeof(smem));
    owes_copy_ = false;
  }

  JAX_ATTN_EMULATION_INLINE bool CanRun(const Fiber& f) const {
    return !f.done && (f.waits == Waits::kNot || (f.waits == Waits::kForEvent && f.happened()));
  }

  // Runs a random runnable warp, of the slow warpgroup or of the others, until its lanes wait.
  // False if there is none.
  JAX_ATTN_EMULATION_HOT bool RunSomeWarp(bool slow) {
    int* end = ready_;
    for (int i = 0; i < block_dim.x; ++i) {
      if ((i / 128 == slow_) == slow && CanRun(*threads_[i])) *end++ = i;
    }
    if (end == ready_) return false;
    const int warp = ready_[random_() % (end - ready_)] / 32;
    int* first = ready_;
    while (*first / 32 != warp) ++first;
    int* last = first;
    while (last != end && *last / 32 == warp) ++last;
    std::shuffle(first, last, random_);
    publisher_ = nullptr;
    for (int* lane = first; lane != last; ++lane) {
      current_ = threads_[*lane];
      current_->waits = Waits::kNot;
      is_last_lane_ = lane + 1 == last;
      if (current_->begun) {
        scheduler_.SwitchTo(&current_->place);
      } else {
        current_->begun = true;
        scheduler_.Begin(current_->start);
      }
    }
    if (owes_copy_) PublishNow();
    ReleaseWarp(warp);
    return true;
  }

  JAX_ATTN_EMULATION_HOT void ReleaseWarp(int warp) {
    const Fiber* last = nullptr;
    int num_waiting = 0, num_on_their_way = 0;
    for (int i = 0; i < 32; ++i) {
      const Fiber& f = *threads_[warp * 32 + i];
      num_on_their_way += !f.done && f.waits == Waits::kForEvent;
      if (f.done || f.waits != Waits::kForWarp) continue;
      ++num_waiting;
      last = &f;
    }
    if (num_waiting == 0 || num_on_their_way > 0) return;
    if (num_waiting != 32) Fail(Text("part of a warp reaches a collective (%s)", last->where));
    for (int i = 0; i < 32; ++i) {
      Fiber& f = *threads_[warp * 32 + i];
      if (f.where != last->where) {
        Fail(Text("lanes of a warp meet at different collectives: %s, %s", f.where, last->where));
      }
      f.waits = Waits::kNot;
    }
  }

  // Lets all threads continue if all of them wait for each other.
  bool ReleaseCta() {
    for (int i = 0; i < block_dim.x; ++i) {
      if (threads_[i]->done || threads_[i]->waits != Waits::kForCta) return false;
    }
    for (int i = 0; i < block_dim.x; ++i) {
      if (threads_[i]->where != threads_[0]->where) Fail("threads of a CTA at different barriers");
      threads_[i]->waits = Waits::kNot;
    }
    return true;
  }

  // Finishes the oldest work of a random sequence.
  bool FinishSomething() {
    if (in_flight_.empty()) return false;
    const int sequence = in_flight_[random_() % in_flight_.size()]->sequence;
    InFlight** oldest = in_flight_.data();
    while ((*oldest)->sequence != sequence) ++oldest;
    const std::unique_ptr<InFlight> first(*oldest);
    in_flight_.erase(in_flight_.begin() + (oldest - in_flight_.data()));
    first->finish();
    return true;
  }

  [[noreturn]] void FailStuck() {
    std::string report = "nothing can run";
    for (int warp = 0; warp * 32 < block_dim.x; ++warp) {
      for (int i = warp * 32, end; i < std::min(warp * 32 + 32, block_dim.x); i = end) {
        const std::string state = StateOf(i);
        for (end = i + 1; end < std::min(warp * 32 + 32, block_dim.x); ++end) {
          if (StateOf(end) != state) break;
        }
        report += Text("\n  warp %d, lanes %d to %d: ", warp, i % 32, (end - 1) % 32) + state;
      }
    }
    Fail(report);
  }

  std::string StateOf(int thread) const {
    const Fiber& f = *threads_[thread];
    if (f.done) return "done";
    if (f.waits == Waits::kForEvent) return "waits for " + f.event();
    return Text("waits for the %s at %s", f.waits == Waits::kForWarp ? "warp" : "CTA", f.where);
  }

  std::vector<std::unique_ptr<Fiber>> fibers_;
  Fiber* threads_[1024];  // fibers_, without the calls that an element of a vector takes at -O0
  int ready_[1024];       // threads that can run
  std::vector<InFlight*> in_flight_;
  std::vector<Sleeper> sleepers_;
  std::vector<std::vector<std::unique_ptr<Fiber>>> spare_fibers_;
  bool eager_ = false, is_sleepy_ = false;
  int64_t num_turns_ = 0;
  int num_drawers_ = 0;
  int num_unordered_ = 0;
  Fiber* current_ = nullptr;
  const Fiber* publisher_ = nullptr;  // the first of the lanes that publish in turn
  bool is_last_lane_ = false;         // the running lane is the last of them
  bool owes_copy_ = false;            // async_smem is out of date
  Place scheduler_;
  std::function<void()> kernel_;
  unsigned seed_ = 0;
  std::mt19937 random_;
  int slow_ = -1;  // the warpgroup that runs far behind the others and their copies; -1: none
};
inline Machine machine;

// Counts over all threads: a measure of work without a clock.
inline int64_t num_exponentials = 0, num_loads = 0;  // loads: LoadConstant16
inline int64_t num_launch_waits = 0;                 // WaitForLaunchBefore

// Threads of later CTAs go on here: to start a context, the system is asked for the signal mask.
inline void Machine::Entry() {
  for (;;) {
    machine.kernel_();
    Fiber& f = *machine.current_;
    for (const std::vector<Copy>& group : f.groups) {
      if (!group.empty()) Fail("a thread ends before its copies arrive");
    }
    if (!f.open_group.empty()) Fail("a thread ends before its copies arrive");
    f.done = true;
    f.place.SwitchTo(&machine.scheduler_);
  }
}

inline void WarpBarrier(const char* where) { machine.Wait(Waits::kForWarp, where); }

// bar.sync, bar.arrive.
class NamedBarriers : public Unit {
 public:
  NamedBarriers() { machine.units.push_back(this); }

  void BeginCta(int) override { barriers_ = {}; }
  void EndCta() override {}
  void Exchange(int drawer) override { std::swap(barriers_, drawers_[drawer]); }

  // Returns whether `x` was true for any thread of this phase, if it waits.
  bool Arrive(int id, int num_threads, bool wait, bool x) {
    if (id < 1 || id > 15) Fail(Text("there is no named barrier %d", id));
    if (num_threads < 32 || num_threads % 32 != 0) Fail("named barriers count whole warps");
    Barrier& b = barriers_[id];
    if (b.arrived > 0 && b.num_threads != num_threads) {
      Fail(Text("named barrier %d: of %d threads or %d?", id, b.num_threads, num_threads));
    }
    b.num_threads = num_threads;
    const uint32_t phase = b.phase;
    b.any = b.any || x;
    if (++b.arrived == num_threads) {
      b.arrived = 0;
      ++b.phase;
      b.any_last = b.any;
      b.any = false;
    }
    if (!wait) return false;
    machine.WaitUntil([&b, phase] { return b.phase != phase; },
                      [&b, id] {
                        return Text("named barrier %d: %d of %d arrived", id, b.arrived,
                                    b.num_threads);
                      });
    return b.any_last;  // the next phase cannot end without this thread
  }

 private:
  struct Barrier {
    int num_threads;
    int arrived;
    uint32_t phase;
    bool any;       // of the predicates of this phase
    bool any_last;  // and of the phase before
  };
  std::array<Barrier, 16> barriers_ = {};
  std::map<int, std::array<Barrier, 16>> drawers_;
};
inline NamedBarriers named_barriers;

// Exchanges `value` within the warp; read(lane) gives the value of that lane.
template <typename Read>
auto Collective(const char* where, uint32_t value, Read read) {
  machine.current().exchange[0] = value;
  WarpBarrier(where);
  const auto result = read([](int lane) { return machine.lane(lane).exchange[0]; });
  WarpBarrier(where);
  return result;
}

}  // namespace emulation
}  // namespace jax_attn

#define threadIdx (::jax_attn::emulation::machine.current().thread)
#define blockIdx (::jax_attn::emulation::machine.block)
#define blockDim (::jax_attn::emulation::machine.block_dim)
#define gridDim (::jax_attn::emulation::machine.grid_dim)

template <typename T>
T __shfl_sync(unsigned, T x, int lane) {
  return EmulationBits<T>(jax_attn::emulation::Collective("shfl", EmulationBits<uint32_t>(x),
                                                          [&](auto of) { return of(lane & 31); }));
}
template <typename T>
T __shfl_xor_sync(unsigned, T x, int mask) {
  const int lane = (threadIdx.x % 32) ^ mask;
  return EmulationBits<T>(jax_attn::emulation::Collective("shfl.xor", EmulationBits<uint32_t>(x),
                                                          [&](auto of) { return of(lane); }));
}
template <typename T>
T __shfl_up_sync(unsigned, T x, int delta) {
  const int lane = threadIdx.x % 32 - delta;
  return EmulationBits<T>(jax_attn::emulation::Collective(
      "shfl.up", EmulationBits<uint32_t>(x),
      [&](auto of) { return of(lane < 0 ? static_cast<int>(threadIdx.x % 32) : lane); }));
}
inline unsigned __ballot_sync(unsigned, bool x) {
  return jax_attn::emulation::Collective("ballot", x, [](auto of) {
    unsigned bits = 0;
    for (int i = 0; i < 32; ++i) bits |= of(i) << i;
    return bits;
  });
}
inline bool __any_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) != 0; }
inline bool __all_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) == 0xffffffff; }
inline void __syncwarp() { jax_attn::emulation::WarpBarrier("syncwarp"); }
inline void __syncthreads() {
  jax_attn::emulation::machine.Wait(jax_attn::emulation::Waits::kForCta, "syncthreads");
}
inline int __syncthreads_or(int x) {
  auto& machine = jax_attn::emulation::machine;
  machine.current().exchange[0] = x != 0;
  machine.Wait(jax_attn::emulation::Waits::kForCta, "syncthreads_or");
  uint32_t any = 0;
  for (int i = 0; i < machine.block_dim.x; ++i) any |= machine.thread(i).exchange[0];
  machine.Wait(jax_attn::emulation::Waits::kForCta, "syncthreads_or, end");
  return static_cast<int>(any);
}

// --- cuda/common/ptx.cuh ---

namespace jax_attn {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

inline u32 SharedAddress(const void* shared) {
  return static_cast<u32>(static_cast<const unsigned char*>(shared) - smem);
}
inline int Opaque(int x) { return x; }
inline const char* Opaque(const char* x) { return x; }
inline uint4 Opaque(uint4 x) { return x; }
inline void PrefetchL2(const void*) {}
inline void WaitForLaunchBefore() { ++emulation::num_launch_waits; }
inline void LetNextLaunchBegin() {}
inline i64 GlobalTimer() {
  static i64 time = 0;
  return ++time;
}

inline void CopyAsync16(u32 shared, const void* global, bool valid) {
  for (const void* end : emulation::ends_of_pools) {
    if (valid && global == end) emulation::Fail("a copy reads behind a pool");
  }
  if (shared % 16 != 0 || reinterpret_cast<uintptr_t>(global) % 16 != 0) {
    emulation::Fail("misaligned copy");
  }
  std::memset(smem + shared, 0xff, 16);  // until it is waited for
  std::memset(emulation::machine.AsyncSmem() + shared, 0xff, 16);
  emulation::machine.current().open_group.push_back({smem + shared, global, valid});
}
inline u64 EvictFirst() { return 1; }
inline u64 EvictNormal() { return 2; }
inline void CopyAsync16(u32 shared, const void* global, bool valid, u64 policy) {
  if (policy != EvictFirst() && policy != EvictNormal()) emulation::Fail("no policy of L2's");
  CopyAsync16(shared, global, valid);
}
inline void CommitCopies() {
  emulation::Fiber& f = emulation::machine.current();
  f.groups.push_back(std::move(f.open_group));
  f.open_group.clear();
}
template <int kPending>
void WaitCopies() {
  auto& groups = emulation::machine.current().groups;
  while (groups.size() > kPending) {
    for (const emulation::Copy& c : groups.front()) c.Land();
    groups.erase(groups.begin());
  }
}

inline void LoadMatrix4(u32 (&r)[4], u32 shared, bool transposed) {
  const int lane = threadIdx.x % 32;
  emulation::Collective("ldmatrix", shared, [&](auto address_of) {
    for (int m = 0; m < 4; ++m) {
      r[m] = 0;
      for (int e = 0; e < 2; ++e) {
        const int along = 2 * (lane % 4) + e, across = lane / 4;
        const int row = transposed ? along : across, column = transposed ? across : along;
        u16 x;
        std::memcpy(&x, smem + address_of(m * 8 + row) + column * 2, sizeof(x));
        r[m] |= static_cast<u32>(x) << (16 * e);
      }
    }
    return 0;
  });
}
inline void LoadMatrix4(u32 (&r)[4], u32 shared) { LoadMatrix4(r, shared, false); }
inline void LoadMatrix4Transposed(u32 (&r)[4], u32 shared) { LoadMatrix4(r, shared, true); }

JAX_ATTN_EMULATION_INLINE float Bf16ToFloat(u32 bits) { return __uint_as_float(bits << 16); }
inline u32 FloatToBf16(float x) {
  const u32 bits = EmulationBits<u32>(x);
  if (std::isnan(x)) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 PackBf16(float low, float high) { return FloatToBf16(low) | FloatToBf16(high) << 16; }
inline u32 FmaBf16x2(u32 a, u32 b, u32 c) {
  const auto half = [](u32 x, int i) { return Bf16ToFloat(x >> (16 * i) & 0xffff); };
  return PackBf16(half(a, 0) * half(b, 0) + half(c, 0), half(a, 1) * half(b, 1) + half(c, 1));
}
// kToFloat: of 16 bits.
template <float (*kToFloat)(u32)>
JAX_ATTN_EMULATION_HOT inline void MmaOf16Bits(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  auto& machine = emulation::machine;
  const int lane = threadIdx.x % 32;
  uint32_t* mine = machine.current().exchange;
  std::copy_n(a, 4, mine);
  mine[4] = b0;
  mine[5] = b1;
  emulation::WarpBarrier("mma");
  // The lane's two rows of a and two columns of b: [k].
  float x[2][16], y[2][16];
  for (int holder = 0; holder < 4; ++holder) {
    const uint32_t* of_a = machine.lane(lane / 4 * 4 + holder).exchange;
    for (int part = 0; part < 4; ++part) {
      float* to = &x[part % 2][part / 2 * 8 + 2 * holder];
      to[0] = kToFloat(of_a[part] & 0xffff);
      to[1] = kToFloat(of_a[part] >> 16);
    }
    for (int column = 0; column < 2; ++column) {
      const uint32_t* of_b = machine.lane((2 * (lane % 4) + column) * 4 + holder).exchange;
      for (int part = 0; part < 2; ++part) {
        float* to = &y[column][part * 8 + 2 * holder];
        to[0] = kToFloat(of_b[4 + part] & 0xffff);
        to[1] = kToFloat(of_b[4 + part] >> 16);
      }
    }
  }
  for (int k = 0; k < 16; ++k) {
    for (int i = 0; i < 4; ++i) c[i] += x[i / 2][k] * y[i % 2][k];
  }
  emulation::WarpBarrier("mma");
}

inline void MmaBf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  MmaOf16Bits<Bf16ToFloat>(c, a, b0, b1);
}
// The number of a small float type with that many exponent bits. special: all exponent bits set
// mean infinity or NaN (f16); otherwise only all bits set mean NaN (e4m3).
inline float SmallToFloat(u32 bits, int exponent_bits, int mantissa_bits, bool special) {
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const int exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1);
  const int last = (1 << exponent_bits) - 1, bias = last / 2;
  const float sign = bits >> (mantissa_bits + exponent_bits) & 1 ? -1.0f : 1.0f;
  if (exponent == last && special) return mantissa != 0 ? NAN : sign * INFINITY;
  if (exponent == last && mantissa == (1 << mantissa_bits) - 1) return sign * NAN;
  const int implicit = exponent > 0 ? 1 << mantissa_bits : 0;
  return sign * std::ldexp(static_cast<float>(implicit + mantissa),
                           std::max(exponent, 1) - bias - mantissa_bits);
}
inline float E4m3ToFloat(u32 code) { return SmallToFloat(code, 4, 3, false); }
// The nearest e4m3 value, ties to even, by search.
inline u32 FloatToE4m3(float x) {
  if (std::isnan(x)) return 0x7f;
  static const std::array<float, 128> kValues = [] {
    std::array<float, 128> values;
    for (u32 code = 0; code < 127; ++code) values[code] = E4m3ToFloat(code);
    values[127] = INFINITY;
    return values;
  }();
  const float size = std::min(std::abs(x), 448.0f);
  const auto next = std::upper_bound(kValues.begin(), kValues.end(), size);
  u32 code = static_cast<u32>(next - kValues.begin()) - 1;
  const float below = size - next[-1], above = *next - size;
  code += above < below || (above == below && code % 2 == 1);
  return code | (std::signbit(x) ? 0x80 : 0);
}

inline u32 PackE4m3(float a, float b, float c, float d) {
  return FloatToE4m3(a) | FloatToE4m3(b) << 8 | FloatToE4m3(c) << 16 | FloatToE4m3(d) << 24;
}

inline float F16ToFloat(u16 bits) { return SmallToFloat(bits, 5, 10, true); }
inline float F16BitsToFloat(u32 bits) { return F16ToFloat(static_cast<u16>(bits)); }
inline void MmaF16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  MmaOf16Bits<F16BitsToFloat>(c, a, b0, b1);
}
inline u32 FloatToF16(float x) {
  const u32 sign = std::signbit(x) ? 0x8000 : 0;
  if (std::isnan(x)) return 0x7fff;
  if (x == 0) return sign;
  const int exponent = std::max(std::ilogb(x), -14);
  const float mantissa = std::nearbyint(std::ldexp(std::abs(x), 10 - exponent));
  if (exponent > 15 || std::ldexp(mantissa, exponent - 10) >= 65536) return sign | 0x7c00;
  return sign | (static_cast<u32>(exponent + 14) * 1024 + static_cast<u32>(mantissa));
}
inline u32 PackF16(float low, float high) { return FloatToF16(low) | FloatToF16(high) << 16; }
inline u32 FmaF16x2(u32 a, u32 b, u32 c) {
  const auto half = [](u32 x, int i) { return F16ToFloat(static_cast<u16>(x >> (16 * i))); };
  return PackF16(half(a, 0) * half(b, 0) + half(c, 0), half(a, 1) * half(b, 1) + half(c, 1));
}
inline u32 E4m3ToF16x2(u16 codes) {
  return PackF16(E4m3ToFloat(codes & 0xff), E4m3ToFloat(codes >> 8));
}
inline u32 E4m3HighToF16x2(u32 codes) { return E4m3ToF16x2(static_cast<u16>(codes >> 16)); }

using ::fabsf;
using std::fmaf;
using std::fmaxf;
// Volatile: the host's compiler may not make a multiply-add of them, either.
inline float __fmul_rn(float x, float y) {
  volatile float product = x * y;
  return product;
}
inline float __fsub_rn(float x, float y) { return x - y; }
inline float Exp2(float x) {
  ++emulation::num_exponentials;
  return std::exp2(x);
}
inline float Log2(float x) { return std::log2(x); }
inline float Reciprocal(float x) { return 1.0f / x; }

inline float ReciprocalRoot(float x) { return 1.0f / std::sqrt(x); }
inline float Quotient(float x, float y) { return x / y; }
inline int SaturatedInt(float x) {
  if (std::isnan(x)) return 0;
  if (x >= 2147483648.0f) return 2147483647;
  return x < -2147483648.0f ? -2147483647 - 1 : static_cast<int>(x);
}

inline u32 WarpMin(u32 x) {
  return emulation::Collective("redux.min", x, [](auto of) {
    u32 least = of(0);
    for (int i = 1; i < 32; ++i) least = std::min(least, of(i));
    return least;
  });
}
inline u32 WarpMax(u32 x) { return ~WarpMin(~x); }
inline u32 WarpSum(u32 x) {
  return emulation::Collective("redux.add", x, [](auto of) {
    u32 sum = 0;
    for (int i = 0; i < 32; ++i) sum += of(i);
    return sum;
  });
}

inline void SyncNamed(int id, int num_threads) {
  emulation::WarpBarrier("bar.sync");
  emulation::named_barriers.Arrive(id, num_threads, true, false);
}
inline bool SyncNamedOr(int id, int num_threads, bool x) {
  emulation::WarpBarrier("barrier.red");
  return emulation::named_barriers.Arrive(id, num_threads, true, x);
}
inline void ArriveNamed(int id, int num_threads) {
  emulation::WarpBarrier("bar.arrive");
  emulation::named_barriers.Arrive(id, num_threads, false, false);
}

inline i32 LoadConstant(const i32* global) { return *global; }
template <typename T>
T EmulationLoad16(const void* global) {
  if (reinterpret_cast<uintptr_t>(global) % 16 != 0) emulation::Fail("misaligned 16-byte load");
  T x;
  std::memcpy(&x, global, sizeof(x));
  return x;
}
inline uint4 LoadConstant16(const void* global) {
  ++emulation::num_loads;
  return EmulationLoad16<uint4>(global);
}
inline uint4 LoadRow16If(bool loads, const void* global) {
  for (const void* end : emulation::ends_of_pools) {
    if (loads && global == end) emulation::Fail("a load reads behind a pool");
  }
  return loads ? EmulationLoad16<uint4>(global) : make_uint4(0, 0, 0, 0);
}
template <typename Vector>
void StoreVector(void* global, Vector x) {
  std::memcpy(global, &x, sizeof x);
}
template <typename T>
u32 EmulationLoad(const void* global) {
  T x;
  std::memcpy(&x, global, sizeof(x));
  return x;
}
inline u32 LoadOperand32(const void* global) { return EmulationLoad<u32>(global); }
inline u32 LoadOperand16(const void* global) { return EmulationLoad<u16>(global); }
inline u32 LoadOperand8(const void* global) { return EmulationLoad<unsigned char>(global); }
inline i32 LoadCoherent(const i32* global) { return *global; }
inline i32 LoadAcquire(const i32* counter) { return *counter; }
inline RowState LoadCoherentIf(bool loads, const RowState* global, RowState otherwise) {
  return loads ? *global : otherwise;
}
inline float4 LoadCoherent16If(bool loads, const float* global) {
  return loads ? EmulationLoad16<float4>(global) : make_float4(0, 0, 0, 0);
}
inline void MaxRelaxed(i32* global, u32 x) {
  *global = static_cast<i32>(std::max(static_cast<u32>(*global), x));
}
inline void MaxRelaxed(i64* global, i64 x) { *global = std::max(*global, x); }
inline void AddRelaxed(i64* global, i64 x) { *global += x; }
inline void StoreReleaseSystem(u64* flag, u64 x) {
  if (emulation::machine.IsPolite()) emulation::machine.LetOthersGoFirst();
  *flag = x;
}
inline u64 LoadAcquireSystem(const u64* flag) { return *flag; }
inline void StoreRelaxedSystem(i32* global, i32 x) { *global = x; }
inline i32 LoadRelaxedSystem(const i32* global) { return *global; }
inline uint4 LoadCoherent16(const void* global) { return EmulationLoad16<uint4>(global); }
inline void Nap() { emulation::machine.LetOthersGoFirst(); }
inline constexpr int kMostNaps = 1000;
inline i32 AddAcquireRelease(i32* counter, i32 x) {
  if (emulation::machine.IsPolite()) emulation::machine.LetOthersGoFirst();
  const i32 before = *counter;
  *counter += x;
  return before;
}
inline i32 AddRelaxed(i32* counter, i32 x) {
  const i32 before = *counter;
  *counter += x;
  return before;
}

}  // namespace jax_attn
