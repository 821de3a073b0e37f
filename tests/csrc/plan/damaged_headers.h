// Headers that do not belong to a launch: wrong magic, wrong version, and each count below and
// above its capacity.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "params.h"

namespace jax_attn {

struct DamagedHeader {
  std::string what;
  PlanHeader header;
};

inline std::vector<DamagedHeader> DamagedHeaders(const PlanHeader& good, const PlanLimits& most) {
  std::vector<DamagedHeader> all;
  const auto add = [&](const char* name, i32 PlanHeader::* field, i64 value) {
    all.push_back({std::string(name) + " " + std::to_string(value), good});
    all.back().header.*field = static_cast<i32>(value);
  };
  add("magic", &PlanHeader::magic, 0);
  add("magic", &PlanHeader::magic, kFaultyPlanMagic);
  add("version", &PlanHeader::version, kPlanVersion + 1);
  const struct {
    const char* name;
    i32 PlanHeader::* field;
    i64 least, most;
  } counts[] = {
      {"batch_size", &PlanHeader::batch_size, 0, most.max_batch},
      {"nnz_qo", &PlanHeader::nnz_qo, 0, most.max_qo_tokens},
      {"num_items", &PlanHeader::num_items, 0, most.max_items},
      {"num_merge_groups", &PlanHeader::num_merge_groups, 0, most.max_merge_groups},
      {"num_partial_rows", &PlanHeader::num_partial_rows, 0, most.max_partial_rows},
      {"nnz_kv", &PlanHeader::nnz_kv, 0, most.max_kv},
      {"max_page_id", &PlanHeader::max_page_id, -1, most.num_pages - 1},
      {"num_partials", &PlanHeader::num_partials, 0, most.max_partials},
      {"num_shared_tokens", &PlanHeader::num_shared_tokens, 0, most.max_shared_tokens},
      {"num_steps", &PlanHeader::num_steps, 0, most.max_steps},
  };
  for (const auto& count : counts) {
    add(count.name, count.field, count.most + 1);
    add(count.name, count.field, count.least - 1);
    add(count.name, count.field, 0x7fffffff);
  }
  return all;
}

}  // namespace jax_attn
