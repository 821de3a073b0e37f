// Numbers measured on the processor at hand, which replace those in devices.cc. `python -m
// jax_attn.tune` writes them to a file, and jax_attn/_spec/tuning.py reads it.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "select/devices.h"
#include "status.h"

namespace jax_attn {

// An instruction set for items of few rows, as CpuIsaRule.
struct TunedIsa {
  std::string best;
  int64_t dtype, kv_format;
  int64_t up_to_rows;
  std::string isa;
};

struct Tuning {
  int64_t arch = -1;   // compute capability; 0: a CPU; -1: nothing is tuned
  std::string device;  // its name, for reasons
  std::map<std::string, int64_t, std::less<>> numbers;  // by kernel and field: "hopper.item_cost"
  std::vector<TunedIsa> isas;
};

// Applies to specs that are declared afterwards. Do not call it while specs are declared or kernels
// run. Refuses kernel names and fields that do not exist, and numbers out of range.
Status SetTuning(Tuning tuning);

// `number`, or the tuned number of this field of a kernel on a processor of `arch`.
Number TunedNumber(int64_t arch, std::string_view kernel, std::string_view field, Number number);

// The tuned rule; null: none. Only for CPUs.
const CpuIsaRule* FindTunedIsa(int64_t dtype, int64_t kv_format, std::string_view best);

}  // namespace jax_attn
