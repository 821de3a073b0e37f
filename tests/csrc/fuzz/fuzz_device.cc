// The device planner, in emulation, compared with the host planner.
#include "emulation/cuda_emulation.h"
// The include above stands in for CUDA and must come first.
#include "cuda/plan/plan.cuh"
#include "fuzz/fuzz_case.h"

namespace jax_attn::fuzz {
namespace {

// Thread counts and shared memory sizes that no device has, so that every loop runs more than once
// and every array is in scratch once.
template <int kThreads, int kSmem>
struct Traits {
  static constexpr int kArch = 90, kNumThreads = kThreads, kSmemBytes = kSmem;
};

template <bool kGeneral, class T>
std::string Launch(const Case& c, const AttentionProblem& problem, std::vector<int32_t>* plan) {
  const PlanLayout layout = MakePlanLayout(problem);
  constexpr size_t kGuard = 64;
  constexpr int32_t kGuardWord = 0x5a5a5a5a;
  plan->assign(layout.num_words + kGuard, 0);
  std::fill_n(plan->end() - kGuard, kGuard, kGuardWord);
  const PrefixLevels levels = c.levels();
  const BlockMap map = c.map(), *map_or_null = problem.spec.max_steps > 0 ? &map : nullptr;
  std::vector<int32_t> scratch(
      PlanScratchBytes(problem, levels.num_levels, levels.num_prefixes, map_or_null) / 4 + kGuard,
      -1);
  std::fill_n(scratch.end() - kGuard, kGuard, kGuardWord);
  PlanParams p = MakePlanParams(problem, c.inputs(), kGeneral ? &levels : nullptr, plan->data(),
                                scratch.data(), map_or_null);
  const int num_ctas = 1 + (problem.spec.paged() ? 1 + static_cast<int>(c.device_seed % 3) : 0);
  emulation::machine.Launch(num_ctas, T::kNumThreads, static_cast<unsigned>(c.device_seed),
                            [&p] { PlanBodyOf<T, kGeneral>::Run(p); });
  for (const auto* guarded : {plan, &scratch}) {
    for (size_t i = guarded->size() - kGuard; i < guarded->size(); ++i) {
      if ((*guarded)[i] != kGuardWord) {
        return guarded == plan ? "written beyond the plan" : "written beyond the scratch";
      }
    }
  }
  plan->resize(layout.num_words);
  return "";
}

template <bool kGeneral>
std::string LaunchAny(const Case& c, const AttentionProblem& problem, std::vector<int32_t>* plan) {
  switch (c.device_seed % 3) {
    case 0:
      return Launch<kGeneral, Traits<32, 4 * 1024>>(c, problem, plan);
    case 1:
      return Launch<kGeneral, Traits<64, 96 * 1024>>(c, problem, plan);
    default:
      return Launch<kGeneral, Traits<128, 2 * 1024>>(c, problem, plan);
  }
}

}  // namespace

std::string CheckDevice(const Case& c, const AttentionProblem& problem) {
  if (c.batch_size() > problem.spec.max_batch) return "";  // refused where shapes are known
  const PrefixLevels told = c.levels();
  const BlockMap map = c.map(), *map_or_null = problem.spec.max_steps > 0 ? &map : nullptr;
  if (!CheckBlockMap(problem, map_or_null).ok()) return "";  // likewise
  if (PlanScratchBytes(problem, told.num_levels, told.num_prefixes, map_or_null) > 64 << 20) {
    return "";
  }
  const bool general = c.told || problem.spec.schedule == kAuto || problem.spec.max_steps > 0;
  const PlanLayout layout = MakePlanLayout(problem);
  std::vector<int32_t> expected(layout.num_words), got;
  AttentionProblem on_host = problem;
  if (!c.told) on_host.spec.share_prefixes = 0;  // the device planner does not search
  const Status refused =
      Plan(on_host, c.inputs(), c.told ? &told : nullptr, expected.data(), map_or_null);
  std::string wrong =
      general ? LaunchAny<true>(c, problem, &got) : LaunchAny<false>(c, problem, &got);
  if (!wrong.empty()) return "device: " + wrong;
  PlanHeader header;
  std::memcpy(&header, got.data() + layout.header, sizeof(header));
  const Status fault = DescribeFault(
      problem, {header.fault, header.fault_at, header.fault_got, header.fault_expected});
  if (refused.message != fault.message) {
    return "host \"" + refused.message + "\", device \"" + fault.message + "\"";
  }
  if (!refused.ok()) {
    const bool inert = header.magic == kFaultyPlanMagic && header.nnz_qo == 0 &&
                       header.batch_size == 0 && header.num_items == 0;
    bool empty = true;
    for (int64_t q = 0; q <= problem.config.num_ctas; ++q) {
      empty &= got[layout.queue_indptr + q] == 0;
    }
    return inert && empty ? "" : "device: a faulty plan with work";
  }
  for (int64_t i = 0; i < layout.num_words; ++i) {
    if (got[i] != expected[i]) {
      return Text("word %lld (items at %lld): host %d, device %d", static_cast<long long>(i),
                  static_cast<long long>(layout.items), expected[i], got[i]);
    }
  }
  return "";
}

}  // namespace jax_attn::fuzz
