// Numbers measured on the processor at hand, which take the place of those in devices.cc. A file of
// `python -m jax_attn.tune` has them, and jax_attn/_spec/tuning.py reads it.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "select/devices.h"
#include "status.h"

namespace jax_attn {

// One instruction set for items of few rows, as CpuIsaRule.
struct TunedIsa {
  std::string best;
  int64_t dtype, kv_format;
  int64_t up_to_rows;
  std::string isa;
};

struct Tuning {
  int64_t arch = -1;   // of the processor; 0: a CPU, -1: nothing is tuned
  std::string device;  // its name, for reasons
  std::map<std::string, int64_t, std::less<>> numbers;  // by kernel and field: "hopper.item_cost"
  std::vector<TunedIsa> isas;
};

// From the next declared spec on. Call it while nobody declares specs or runs kernels. Refuses
// names that no kernel has and numbers out of range.
Status SetTuning(Tuning tuning);

// `number`, or what was measured for this field of a kernel on a processor of `arch`.
Number TunedNumber(int64_t arch, std::string_view kernel, std::string_view field, Number number);

// The tuned rule; null: there is none. Only for CPUs.
const CpuIsaRule* FindTunedIsa(int64_t dtype, int64_t kv_format, std::string_view best);

}  // namespace jax_attn
