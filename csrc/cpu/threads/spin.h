// Busy-waits of some microseconds.
#pragma once

#include <chrono>

namespace jax_attn {

using SteadyTime = std::chrono::steady_clock::time_point;

// About the time to put a thread to sleep and wake it, so that a wait in vain costs at most twice
// the best choice.
constexpr std::chrono::microseconds kSpinTime{100};

inline void CpuRelax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Whether ready() became true within kSpinTime of `begin`.
template <typename Ready>
bool Spin(SteadyTime begin, Ready ready) {
  do {
    for (int i = 0; i < 16; ++i) {
      if (ready()) return true;
      CpuRelax();
    }
  } while (std::chrono::steady_clock::now() - begin < kSpinTime);
  return ready();
}

}  // namespace jax_attn
