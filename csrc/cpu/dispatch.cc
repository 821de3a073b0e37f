#include "cpu/dispatch.h"

#include <atomic>
#include <cstring>

#include "cpu/kernels.h"
#include "cpu/linear_kernels.h"
#include "select/devices.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace jax_attn {
namespace {

#if defined(__x86_64__)
// CPUID leaves and the register state that the operating system saves.
struct X86Features {
  bool avx2 = false, avx512 = false, avx512_bf16 = false, amx_bf16 = false, is_intel = false;

  X86Features() {
    unsigned a, b, c, d;
    if (!__get_cpuid(0, &a, &b, &c, &d)) return;
    is_intel = b == signature_INTEL_ebx;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return;
    const bool fma = c >> 12 & 1, osxsave = c >> 27 & 1, f16c = c >> 29 & 1;
    if (!osxsave) return;
    unsigned xcr0, high;
    __asm__("xgetbv" : "=a"(xcr0), "=d"(high) : "c"(0));
    const bool ymm_saved = (xcr0 & 0x06) == 0x06, zmm_saved = (xcr0 & 0xe6) == 0xe6;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
    avx2 = ymm_saved && fma && f16c && (b >> 5 & 1);
    const bool f = b >> 16 & 1, dq = b >> 17 & 1, bw = b >> 30 & 1, vl = b >> 31 & 1;
    const bool vbmi = c >> 1 & 1, vnni = c >> 11 & 1;
    avx512 = avx2 && zmm_saved && f && dq && bw && vl;
    const bool tiles = (d >> 24 & 1) && (d >> 22 & 1) && (d >> 25 & 1);  // for bf16 and for int8
    const bool tiles_saved = (xcr0 & 0x60000) == 0x60000;
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d)) return;
    avx512_bf16 = avx512 && vbmi && vnni && (a >> 5 & 1);
    amx_bf16 = avx512_bf16 && tiles && tiles_saved && MayUseTiles();
  }

 private:
  // Linux saves a process's tile registers only after a request, which may be refused.
  static bool MayUseTiles() {
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }
};
#endif

// Kernels that this machine can run, best last. JAX_ATTN_WITHOUT_*: this build lacks those kernels.
std::vector<const CpuKernels*> SupportedKernels() {
  std::vector<const CpuKernels*> kernels = {&kKernelsBaseline};
#if defined(__x86_64__)
  const X86Features features;
#if !defined(JAX_ATTN_WITHOUT_AVX2)
  if (features.avx2) kernels.push_back(&kKernelsAvx2);
#endif
  [[maybe_unused]] const CpuKernels* avx512 = nullptr;
#if !defined(JAX_ATTN_WITHOUT_AVX512)
  if (features.avx512) kernels.push_back(avx512 = &kKernelsAvx512);
#endif
#if !defined(JAX_ATTN_WITHOUT_AVX512_BF16)
  if (features.avx512_bf16) {
    // On Intel's cores a dot product of bf16 pairs takes longer than two multiply-adds: prefill of
    // 2,048 tokens 91 ms against 51, decode of 8 x 2,048 tokens 5.2 against 4.7 (Sapphire Rapids, 2
    // threads). On AMD's cores it is faster.
    const bool is_slower = features.is_intel && kernels.back() == avx512;
    kernels.insert(kernels.end() - (is_slower ? 1 : 0), &kKernelsAvx512Bf16);
  }
#endif
#if !defined(JAX_ATTN_WITHOUT_AMX)
  if (features.amx_bf16) kernels.push_back(&kKernelsAmx);
#endif
#elif defined(__aarch64__)
  kernels.push_back(&kKernelsNeon);
#endif
  return kernels;
}

// The table chosen by SetCpuIsa; null: the best one, and others beside it.
std::atomic<const CpuKernels*>& Chosen() {
  static std::atomic<const CpuKernels*> chosen{nullptr};
  return chosen;
}

const std::vector<const CpuKernels*>& Supported() {
  static const std::vector<const CpuKernels*> supported = SupportedKernels();
  return supported;
}

// The rule for the call, and its table; null if there is none.
const CpuIsaRule* FindRule(const AttentionSpec& spec, const CpuKernels** kernels) {
  if (Chosen().load(std::memory_order_acquire) != nullptr) return nullptr;
  const CpuIsaRule* rule = FindCpuIsaRule(spec, ActiveKernels().name);
  if (rule == nullptr) return nullptr;
  for (const CpuKernels* supported : Supported()) {
    if (std::strcmp(supported->name, rule->isa) != 0) continue;
    *kernels = supported;
    return rule;
  }
  return nullptr;  // this build has no such kernels
}

}  // namespace

const CpuKernels& ActiveKernels() {
  const CpuKernels* chosen = Chosen().load(std::memory_order_acquire);
  return chosen != nullptr ? *chosen : *Supported().back();
}

void SetActiveKernels(const CpuKernels& kernels) {
  Chosen().store(&kernels, std::memory_order_release);
}

const CpuLinearTable& ActiveLinearKernels() {
  [[maybe_unused]] const CpuKernels* active = &ActiveKernels();
#if defined(__x86_64__)
#if !defined(JAX_ATTN_WITHOUT_AVX2)
  if (active == &kKernelsAvx2) return kLinearAvx2;
#endif
#if !defined(JAX_ATTN_WITHOUT_AVX512) || !defined(JAX_ATTN_WITHOUT_AVX512_BF16) || \
    !defined(JAX_ATTN_WITHOUT_AMX)
  if (active != &kKernelsBaseline) return kLinearAvx512;
#endif
#elif defined(__aarch64__)
  if (active == &kKernelsNeon) return kLinearNeon;
#endif
  return kLinearBaseline;
}

CpuItemKernels KernelsOf(const AttentionSpec& spec) {
  CpuItemKernels kernels{nullptr, 0, &ActiveKernels()};
  if (const CpuIsaRule* rule = FindRule(spec, &kernels.few)) {
    kernels.few_rows = rule->up_to_rows;
  } else {
    kernels.few = kernels.many;
  }
  return kernels;
}

std::string DescribeCpuIsas(const AttentionSpec& spec) {
  const CpuKernels* few = nullptr;
  const CpuIsaRule* rule = FindRule(spec, &few);
  const std::string best = CpuIsa();
  if (rule == nullptr) return best + ": the best this machine has, or JAX_ATTN_CPU_ISA";
  return best + "; " + rule->isa + " for items of up to " + std::to_string(rule->up_to_rows) +
         " rows: " + rule->why;
}

std::vector<std::string> SupportedCpuIsas() {
  std::vector<std::string> names;
  for (const CpuKernels* kernels : Supported()) names.push_back(kernels->name);
  return names;
}

std::string CpuIsa() { return ActiveKernels().name; }

Status SetCpuIsa(const std::string& name) {
  std::string supported;
  for (const CpuKernels* kernels : Supported()) {
    if (name == kernels->name) {
      SetActiveKernels(*kernels);
      return Status::Ok();
    }
    supported += std::string(supported.empty() ? "" : ", ") + kernels->name;
  }
  if (name.empty()) {
    Chosen().store(nullptr, std::memory_order_release);
    return Status::Ok();
  }
  return Status::Error("JAX_ATTN_CPU_ISA: expected one of " + supported + " on this machine, got " +
                       name + "; leave it unset for the best.");
}

}  // namespace jax_attn
