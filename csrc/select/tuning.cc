#include "select/tuning.h"

#include <iterator>
#include <optional>
#include <utility>

namespace jax_attn {
namespace {

struct Field {
  std::string_view name;
  int64_t least, most;
};

// Costs have 12 bits in a plan (plan/check_problem.cc).
constexpr int64_t kMostCost = 1 << 12, kMostChunk = 1 << 20, kMostRate = 1 << 30;

constexpr Field kCpuFields[] = {
    {"decode_queues", 1, 64},       {"min_chunk", 1, kMostChunk},
    {"item_cost", 0, kMostCost},    {"split_cost", 0, kMostCost},
    {"bytes_per_us", 1, kMostRate}, {"low_flops_per_us", 1, kMostRate},
    {"flops_per_us", 1, kMostRate},
};
constexpr Field kCudaFields[] = {
    // kernels have at most two tiles
    {"min_chunk", 1, kMostChunk},      {"item_cost", 0, kMostCost}, {"split_cost", 0, kMostCost},
    {"tall_split_cost", 0, kMostCost}, {"kv_cost_1", 1, kMostCost},
};

std::optional<Field> FindField(bool is_cpu, std::string_view name) {
  const Field* fields = is_cpu ? kCpuFields : kCudaFields;
  const size_t num_fields = is_cpu ? std::size(kCpuFields) : std::size(kCudaFields);
  for (size_t i = 0; i < num_fields; ++i) {
    if (fields[i].name == name) return fields[i];
  }
  return std::nullopt;
}

bool HasKernel(bool is_cpu, std::string_view name) {
  if (is_cpu) {
    for (int64_t dtype : {kBF16, kF16, kF32}) {
      if (CpuKernelName(dtype) == name) return true;
    }
    return false;
  }
  for (const char* kernel : kCudaKernelNames) {
    if (kernel == name) return true;
  }
  return false;
}

struct Tuned {
  Tuning tuning;
  std::string why;
  std::vector<CpuIsaRule> rules;  // whose names are those of `tuning`
};

Tuned& Current() {
  static Tuned tuned;
  return tuned;
}

}  // namespace

Status SetTuning(Tuning tuning) {
  const bool is_cpu = tuning.arch == 0;
  for (const auto& [name, value] : tuning.numbers) {
    const size_t dot = name.find('.');
    const std::string_view kernel = std::string_view(name).substr(0, dot);
    const std::optional<Field> field =
        dot == std::string::npos ? std::nullopt
                                 : FindField(is_cpu, std::string_view(name).substr(dot + 1));
    if (!field || !HasKernel(is_cpu, kernel)) {
      return Status::Error("numbers: expected kernels and fields of this version, got " + name +
                           "; tune again.");
    }
    if (value < field->least || value > field->most) {
      return Status::Error("numbers: " + name + ": expected " + std::to_string(field->least) +
                           " to " + std::to_string(field->most) + ", got " + std::to_string(value) +
                           "; tune again.");
    }
  }
  Tuned& current = Current();
  current.tuning = std::move(tuning);
  current.why = "tuned on " + current.tuning.device + " (JAX_ATTN_TUNING)";
  current.rules.clear();
  for (const TunedIsa& isa : current.tuning.isas) {
    current.rules.push_back({isa.best.c_str(), isa.dtype, isa.kv_format, isa.up_to_rows,
                             isa.isa.c_str(), current.why.c_str()});
  }
  return Status::Ok();
}

Number TunedNumber(int64_t arch, std::string_view kernel, std::string_view field, Number number) {
  const Tuned& current = Current();
  if (current.tuning.arch != arch) return number;
  const auto found = current.tuning.numbers.find(std::string(kernel) + "." + std::string(field));
  if (found == current.tuning.numbers.end()) return number;
  return {found->second, current.why.c_str()};
}

const CpuIsaRule* FindTunedIsa(int64_t dtype, int64_t kv_format, std::string_view best) {
  const Tuned& current = Current();
  if (current.tuning.arch != 0) return nullptr;
  for (const CpuIsaRule& rule : current.rules) {
    if (rule.dtype == dtype && rule.kv_format == kv_format && rule.best == best) return &rule;
  }
  return nullptr;
}

}  // namespace jax_attn
