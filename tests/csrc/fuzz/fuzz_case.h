// One case of the plan fuzzer: a spec, a batch, and for damaged plans the words that are changed.
// It is a function of a number, or read from a text file that a test can run again.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "plan/plan.h"
#include "spec.h"

namespace jax_attn::fuzz {

using Random = std::mt19937_64;

inline constexpr int64_t kPoolPages = 16;  // pool of the runs of damaged plans

struct Case {
  bool is_damaged = false;  // damaged plan; else a batch
  AttentionSpec spec;
  // Overrides of the configuration that select/ chooses; 0: as chosen.
  int64_t num_ctas = 0, max_items = 0, max_partial_rows = 0;
  std::vector<int32_t> qo_indptr{0}, kv_lens, kv_indptr{0}, page_indices;
  std::vector<int32_t> q_offsets;  // empty: not given
  bool told = false;               // levels are given
  int32_t num_levels = 0, num_prefixes = 0;
  std::vector<int32_t> request_indptr, prefix_lens;  // of all levels
  int32_t q_block = 0, kv_block = 0;                 // of a BlockMap, with spec.max_steps
  int64_t map_columns = 0;                           // likewise
  std::vector<uint8_t> map_classes;                  // likewise, row by row
  std::vector<int64_t> program;                      // words of a variant (variant/words.h)
  int64_t device_seed = -1;                          // of the emulation; -1: host only
  std::vector<std::pair<int64_t, int32_t>> words;    // damaged: index and value
  std::string expect;  // batches: part of the sentence that must refuse it; "": any

  int64_t batch_size() const { return static_cast<int64_t>(kv_lens.size()); }
  PlanInputs inputs() const;
  PrefixLevels levels() const;
  BlockMap map() const;  // with spec.max_steps
};

// Case `index` of a run.
Case MakeCase(bool is_damaged, uint64_t seed, uint64_t index);

// The kernel configuration and the capacities.
AttentionProblem MakeProblem(const Case& c);

// The host planner on the whole case. plan: as many words as its layout has.
Status PlanOf(const Case& c, const AttentionProblem& problem, int32_t* plan);

std::string ToText(const Case& c);
bool FromText(const std::string& text, Case* c);

// Cases that are a little smaller, most promising first.
std::vector<Case> Smaller(const Case& c);

// The error found, or "". *outcome: the outcome, for the statistics.
std::string RunCase(const Case& c, std::string* outcome);

// The parts of RunCase. CheckCover: whether items and merges of a plan of this batch give every
// query row all the keys that it sees, each once. CheckLegal: whether the planner was right to
// refuse or to accept the batch.
std::string CheckCover(const Case& c, const AttentionProblem& problem,
                       const std::vector<int32_t>& plan);
std::string CheckLegal(const Case& c, const AttentionProblem& problem, const Status& refused);
std::string CheckDevice(const Case& c, const AttentionProblem& problem);
std::string RunDamaged(const Case& c, std::string* outcome);

// printf into a string.
std::string Text(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace jax_attn::fuzz
