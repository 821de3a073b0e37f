// The device planner, without a GPU: cuda/plan/plan.cuh runs in emulation on random batches and
// must write the same words as the host planner, or the fault with which the host planner refuses.
#include "emulation/cuda_emulation.h"
// The include above stands in for CUDA and must come first.
#include <string>

#include "cuda/plan/plan.cuh"
#include "plan/plan.h"
#include "plan/rules/integers.h"
#include "select/select.h"

namespace jax_attn {
namespace {

int g_failures = 0;
int g_split = 0, g_ranges = 0, g_trees = 0, g_faults = 0, g_shared = 0, g_flat = 0;
int g_listed = 0, g_list_faults = 0, g_split_lists = 0;
int g_shared_lists = 0, g_flat_lists = 0;  // of levels

using Random = std::mt19937;

int64_t Pick(Random& random, std::initializer_list<int64_t> values) {
  return values.begin()[random() % values.size()];
}

// Thread counts and shared memory sizes that no device has, so that every loop runs more than once
// and every array is in scratch once.
template <int kThreads, int kSmem, int kIsGeneral = 0>
struct TraitsOf {
  static constexpr int kArch = 90, kNumThreads = kThreads, kSmemBytes = kSmem;
  static constexpr int kGeneral = kIsGeneral;
};

struct Batch {
  std::vector<int32_t> qo_indptr{0}, kv_lens, kv_indptr, page_indices, q_offsets;
  bool has_offsets = false;
  std::vector<int32_t> request_indptr, prefix_lens;  // of all levels
  i32 num_levels = 0, num_prefixes = 0;
  std::vector<uint8_t> classes;  // of a block map, with step lists; else none
  BlockMap block_map = {};

  PrefixLevels levels() const {
    return {request_indptr.data(), prefix_lens.data(), num_levels, num_prefixes};
  }
  const BlockMap* map() const { return classes.empty() ? nullptr : &block_map; }

  PlanInputs inputs() const {
    PlanInputs in = {};
    in.qo_indptr = qo_indptr.data();
    in.kv_lens = kv_lens.data();
    in.kv_indptr = kv_indptr.data();
    in.page_indices = page_indices.data();
    in.q_offsets = has_offsets ? q_offsets.data() : nullptr;
    in.batch_size = static_cast<i64>(kv_lens.size());
    in.num_page_indices = static_cast<i64>(page_indices.size());
    return in;
  }
};

AttentionProblem RandomProblem(Random& random) {
  AttentionProblem problem;
  AttentionSpec& spec = problem.spec;
  spec.num_kv_heads = Pick(random, {1, 2, 3, 8, 8, 8});
  spec.num_qo_heads = spec.num_kv_heads * Pick(random, {1, 4, 4, 5, 7, 16});
  spec.head_dim_qk = spec.head_dim_vo = 128;
  spec.window_left = Pick(random, {-1, -1, -1, 0, 63, 300});
  spec.window_right = Pick(random, {0, 0, -1, 40});
  spec.page_size = Pick(random, {0, 1, 7, 16, 16});
  spec.num_pages = Pick(random, {-1, 1 << 20});
  spec.schedule = Pick(random, {kBalanced, kBalanced, kBalanced, kFixedSplit, kNoSplit});
  spec.kv_split = spec.schedule == kFixedSplit ? Pick(random, {64, 128, 512}) : 0;
  spec.arch = Pick(random, {80, 90});
  spec.num_processors = Pick(random, {1, 2, 4, 16, 66, 132});
  if (random() % 8 == 0) {  // large states, whose merges are trees
    spec.arch = 90;
    spec.mla = 1;
    spec.num_kv_heads = Pick(random, {1, 2});
    spec.num_qo_heads = spec.num_kv_heads * 64;
    spec.head_dim_qk = 576;
    spec.head_dim_vo = 512;
  }
  return problem;
}

Batch RandomBatch(const AttentionProblem& problem, Random& random) {
  const AttentionSpec& spec = problem.spec;
  Batch b;
  const int64_t batch_size = Pick(random, {0, 1, 2, 3, 9, 33, 64, 157});
  const int64_t longest = Pick(random, {1, 60, 700, 3000, 9000, 60000});
  const int64_t kind = Pick(random, {0, 0, 0, 1, 2, 3});
  const bool equal = random() % 4 == 0;
  const bool huge = spec.page_size == 0 && spec.schedule != kFixedSplit && random() % 4 == 0;
  const int64_t page = std::max<int64_t>(1, spec.page_size);
  b.has_offsets = random() % 4 == 0;
  b.kv_indptr.push_back(random() % 3 == 0 ? 5 : 0);
  for (int64_t r = 0; r < batch_size; ++r) {
    int64_t qo_len = 1;
    if (kind == 1) qo_len = random() % 40;
    if (kind == 2 && random() % 8 == 0) qo_len = random() % 300;
    if (kind == 3) qo_len = random() % 3;
    int64_t kv_len = equal ? longest : random() % (longest + 1);
    if (random() % 7 == 0) kv_len = random() % 20;
    if (huge) kv_len = (1 << 29) / batch_size + random() % (1 << 20);  // loads beyond 32 bits
    const int64_t spare = random() % 3;
    b.qo_indptr.push_back(static_cast<int32_t>(b.qo_indptr.back() + qo_len));
    b.kv_lens.push_back(static_cast<int32_t>(kv_len));
    b.kv_indptr.push_back(
        static_cast<int32_t>(b.kv_indptr.back() + (kv_len + page - 1) / page + spare));
    b.q_offsets.push_back(static_cast<int32_t>(random() % 1000) - 100);
  }
  if (spec.paged()) {
    b.page_indices.resize(b.kv_indptr.back() + random() % 9);
    for (int32_t& id : b.page_indices) id = static_cast<int32_t>(random() % (1 << 20));
    for (int64_t r = 0; r < batch_size; ++r) {  // reserved pages may hold anything
      const int64_t used = (b.kv_lens[r] + page - 1) / page;
      for (int64_t i = b.kv_indptr[r] + used; i < b.kv_indptr[r + 1]; ++i) {
        b.page_indices[i] = static_cast<int32_t>(random());
      }
    }
  }
  return b;
}

// Nested groups of requests whose pages begin alike.
Batch RandomLevels(const AttentionProblem& problem, Random& random) {
  const int64_t page = problem.spec.page_size;
  const int64_t batch_size = Pick(random, {2, 3, 9, 33, 64, 157, 300});
  Batch b;
  b.num_levels = static_cast<i32>(Pick(random, {1, 1, 2, 3, 8}));
  b.num_prefixes = static_cast<i32>(Pick(random, {1, 2, 5, 40, 157}));
  std::vector<int32_t> borders = {0, static_cast<int32_t>(batch_size)};
  std::vector<int64_t> length(batch_size, 0), common(batch_size, 0);
  for (i32 level = 0; level < b.num_levels; ++level) {
    const size_t most = 2 + (b.num_prefixes - 1) * (level + 1) / b.num_levels;
    while (borders.size() < std::min<size_t>(most, b.num_prefixes + 1)) {
      borders.push_back(static_cast<int32_t>(random() % (batch_size + 1)));
    }
    std::sort(borders.begin(), borders.end());
    std::vector<int32_t> padded = borders;
    padded.resize(b.num_prefixes + 1, static_cast<int32_t>(batch_size));
    b.request_indptr.insert(b.request_indptr.end(), padded.begin(), padded.end());
    for (i32 i = 0; i < b.num_prefixes; ++i) {
      int64_t len = Pick(random, {0, 90, 700, 1500, 4000, 9000});
      if (padded[i] < padded[i + 1] && random() % 2 == 0) len += length[padded[i]];
      b.prefix_lens.push_back(static_cast<int32_t>(len));
      for (int32_t r = padded[i]; r < padded[i + 1]; ++r) {
        length[r] = std::max(length[r], len);
        if (r > padded[i]) common[r] = std::max(common[r], len);
      }
    }
  }
  b.kv_indptr.push_back(0);
  const int64_t kind = Pick(random, {0, 0, 1, 2});
  int32_t next_id = 0;
  for (int64_t r = 0; r < batch_size; ++r) {
    int64_t qo_len = 1;
    if (kind == 1) qo_len = random() % 4;
    if (kind == 2 && random() % 4 == 0) qo_len = random() % 200;
    const int64_t kv_len = std::max(length[r], qo_len) + random() % Pick(random, {2, 300, 3000});
    const int64_t used = (kv_len + page - 1) / page;
    const int64_t before = r == 0 ? 0 : b.kv_indptr[r - 1];
    for (int64_t i = 0; i < used; ++i) {
      const bool same = r > 0 && i < common[r] / page;
      b.page_indices.push_back(same ? b.page_indices[before + i] : next_id++);
    }
    b.qo_indptr.push_back(static_cast<int32_t>(b.qo_indptr.back() + qo_len));
    b.kv_lens.push_back(static_cast<int32_t>(kv_len));
    b.kv_indptr.push_back(static_cast<int32_t>(b.page_indices.size()));
    b.q_offsets.push_back(static_cast<int32_t>(kv_len - qo_len) + Pick(random, {0, 0, -40, 70}));
  }
  b.has_offsets = random() % 4 == 0;
  return b;
}

// Breaks levels, at a random place, so that the planners must refuse them.
void SpoilLevels(Random& random, Batch* b) {
  switch (random() % 4) {
    case 0:
      b->request_indptr[random() % b->request_indptr.size()] = static_cast<int32_t>(random());
      break;
    case 1:
      b->request_indptr[random() % b->request_indptr.size()] += 1;
      break;
    case 2:
      b->prefix_lens[random() % b->prefix_lens.size()] += random() % 2 == 0 ? 10000 : -5000;
      break;
    default:
      b->page_indices[random() % b->page_indices.size()] += 1;
  }
}

void SettleProblem(const Batch& b, Random& random, AttentionProblem* problem) {
  AttentionSpec& spec = problem->spec;
  spec.max_batch = static_cast<int64_t>(b.kv_lens.size()) + random() % 3;
  spec.max_batch = std::max<int64_t>(1, spec.max_batch);
  spec.max_qo_tokens = std::max<int64_t>(1, b.qo_indptr.back() + random() % 3);
  (spec.paged() ? spec.max_kv_pages : spec.max_kv_tokens) = b.kv_indptr.back() + random() % 9;
  SelectCuda(spec, &problem->config);
  if (random() % 3 == 0) problem->config.num_ctas = Pick(random, {1, 3, 13, 24, 132, 352, 1000});
  if (b.kv_lens.size() % 3 == 2) problem->config.cached_tokens = b.kv_lens[0];
  if (random() % 8 == 0) problem->config.max_items = 1 + random() % 200;
  if (random() % 8 == 0) problem->config.max_partial_rows = 1 + random() % 500;
  if (spec.schedule == kFixedSplit && random() % 2 == 0) {
    problem->config.max_items = 200000;
    problem->config.max_partial_rows = 10000000;
  }
  FillCapacities(problem);
}

// Breaks a batch, at a random place, so that the planners must refuse it.
void Spoil(const AttentionProblem& problem, Random& random, Batch* b) {
  const size_t n = b->kv_lens.size();
  if (n == 0) return;
  const size_t r = random() % n;
  switch (random() % 8) {
    case 0:
      b->qo_indptr[r] = -3;
      break;
    case 1:
      b->qo_indptr[r + 1] = static_cast<int32_t>(random());
      break;
    case 2:
      b->kv_indptr[r] = static_cast<int32_t>(random());
      break;
    case 3:
      b->kv_lens[r] = static_cast<int32_t>(random());
      break;
    case 4:
      b->kv_lens[r] += 1000;
      break;
    case 5:
      b->q_offsets[r] = static_cast<int32_t>(random());
      break;
    case 6:
      if (!b->page_indices.empty()) b->page_indices.resize(b->page_indices.size() / 2);
      break;
    default:
      if (!b->page_indices.empty()) {
        b->page_indices[random() % b->page_indices.size()] = -static_cast<int32_t>(random() % 5);
      }
  }
}

template <class Traits>
std::vector<int32_t> PlanOnDevice(const AttentionProblem& problem, const Batch& batch,
                                  Random& random) {
  const PlanLayout layout = MakePlanLayout(problem);
  constexpr size_t kGuard = 64;
  constexpr int32_t kGuardWord = 0x5a5a5a5a;
  std::vector<int32_t> plan(layout.num_words + kGuard, 0);
  std::fill_n(plan.end() - kGuard, kGuard, kGuardWord);
  const PrefixLevels levels = batch.levels();
  const PlanInputs in = batch.inputs();
  std::vector<int32_t> scratch(
      PlanScratchBytes(problem, levels.num_levels, levels.num_prefixes, batch.map()) / 4 + kGuard);
  std::memset(scratch.data(), 0xff, scratch.size() * 4);
  std::fill_n(scratch.end() - kGuard, kGuard, kGuardWord);
  // The device operand is aligned.
  std::vector<int32_t> page_indices(in.page_indices, in.page_indices + in.num_page_indices);
  PlanParams p = MakePlanParams(problem, in, Traits::kGeneral ? &levels : nullptr, plan.data(),
                                scratch.data(), batch.map());
  p.inputs.page_indices = page_indices.data();
  const int num_ctas = 1 + (problem.spec.paged() ? static_cast<int>(1 + random() % 3) : 0);
  emulation::machine.Launch(num_ctas, Traits::kNumThreads, static_cast<unsigned>(random()),
                            [&p] { PlanBodyOf<Traits, Traits::kGeneral>::Run(p); });
  for (const auto* guarded : {&plan, &scratch}) {
    for (size_t i = guarded->size() - kGuard; i < guarded->size(); ++i) {
      if ((*guarded)[i] == kGuardWord) continue;
      std::printf("FAILED: written beyond the end of the %s\n",
                  guarded == &plan ? "plan" : "scratch");
      ++g_failures;
      break;
    }
  }
  plan.resize(layout.num_words);
  return plan;
}

template <class Traits>
void Compare(const AttentionProblem& problem, const Batch& batch, unsigned seed) {
  Random random(seed);
  const PlanLayout layout = MakePlanLayout(problem);
  const PlanInputs in = batch.inputs();
  std::vector<int32_t> expected(layout.num_words, -7);  // all of it must be written
  const PrefixLevels levels = batch.levels();
  // The device planner does not search for levels that are not given.
  AttentionProblem on_host = problem;
  if (!Traits::kGeneral) on_host.spec.share_prefixes = 0;
  const Status refused =
      Plan(on_host, in, Traits::kGeneral ? &levels : nullptr, expected.data(), batch.map());
  const std::vector<int32_t> got = PlanOnDevice<Traits>(problem, batch, random);

  PlanHeader header;
  std::memcpy(&header, got.data() + layout.header, sizeof(header));
  const Status fault = DescribeFault(
      problem, {header.fault, header.fault_at, header.fault_got, header.fault_expected});
  if (refused.message != fault.message) {
    std::printf("FAILED seed %u: host \"%s\", device \"%s\"\n", seed, refused.message.c_str(),
                fault.message.c_str());
    ++g_failures;
    return;
  }
  if (!refused.ok()) {
    ++g_faults;
    g_list_faults += header.fault == kFaultMapColumns || header.fault == kFaultSteps;
    const bool inert = header.magic == kFaultyPlanMagic && header.nnz_qo == 0 &&
                       header.batch_size == 0 && header.num_items == 0;
    bool empty = true;
    for (int64_t c = 0; c <= problem.config.num_ctas; ++c) {
      empty &= got[layout.queue_indptr + c] == 0;
    }
    if (!inert || !empty) {
      std::printf("FAILED seed %u: a faulty plan with work\n", seed);
      ++g_failures;
    }
    return;
  }
  g_split += header.num_merge_groups > 0;
  const auto* items = reinterpret_cast<const WorkItem*>(got.data() + layout.items);
  int64_t per_head[2] = {};
  for (int32_t i = 0; i < header.num_items; ++i) {
    if (items[i].kv_head < 2)
      per_head[items[i].kv_head] += items[i].kv_end * int64_t{1 + items[i].kv_begin};
  }
  g_ranges += problem.spec.num_kv_heads > 1 && per_head[0] != per_head[1];
  const auto* groups = reinterpret_cast<const MergeGroup*>(got.data() + layout.merge_groups);
  g_trees += std::any_of(groups, groups + header.num_merge_groups,
                         [](const MergeGroup& g) { return g.parent >= 0; });
  if (batch.map() == nullptr) {
    (header.num_shared_tokens > 0 ? g_shared : g_flat) += Traits::kGeneral;
  } else {
    g_listed += header.num_steps > 0;
    g_split_lists += header.num_steps > 0 && header.num_merge_groups > 0;
    if (batch.num_levels > 0) ++(header.num_shared_tokens > 0 ? g_shared_lists : g_flat_lists);
  }
  for (int64_t i = 0; i < layout.num_words; ++i) {
    if (got[i] == expected[i]) continue;
    std::printf(
        "FAILED seed %u: word %lld (items at %lld): host %d, device %d; %lld requests, %d"
        " items, %lld queues, schedule %lld\n",
        seed, static_cast<long long>(i), static_cast<long long>(layout.items), expected[i], got[i],
        in.batch_size, header.num_items, static_cast<long long>(problem.config.num_ctas),
        static_cast<long long>(problem.spec.schedule));
    ++g_failures;
    return;
  }
}

template <class Traits>
void RunCase(unsigned seed) {
  Random random(seed);
  AttentionProblem problem = RandomProblem(random);
  Batch batch = RandomBatch(problem, random);
  SettleProblem(batch, random, &problem);
  if (seed % 5 == 0) Spoil(problem, random, &batch);
  Compare<Traits>(problem, batch, seed);
}

AttentionProblem RandomLevelsProblem(Random& random) {
  AttentionProblem problem = RandomProblem(random);
  problem.spec.page_size = Pick(random, {1, 7, 16, 16});
  if (random() % 3 == 0) problem.spec.schedule = kAuto;
  problem.spec.share_prefixes = problem.spec.schedule != kNoSplit;
  problem.spec.window_left = Pick(random, {-1, -1, -1, 2500});
  problem.spec.fresh_kv = random() % 4 == 0;
  problem.spec.num_processors = Pick(random, {1, 1, 2, 4, 16});
  return problem;
}

template <class Traits>
void RunLevels(unsigned seed) {
  Random random(seed);
  AttentionProblem problem = RandomLevelsProblem(random);
  Batch batch = RandomLevels(problem, random);
  SettleProblem(batch, random, &problem);
  if (seed % 5 == 0) SpoilLevels(random, &batch);
  Compare<Traits>(problem, batch, seed);
}

// Classes of all blocks, some of each kind; now and then too few columns. seen: leading positions
// that most blocks show in full.
void AddMap(const AttentionSpec& spec, int32_t q_block, int32_t kv_block, int64_t seen,
            Random& random, Batch* b) {
  const int64_t longest =
      b->kv_lens.empty() ? 1 : *std::max_element(b->kv_lens.begin(), b->kv_lens.end());
  const int64_t num_rows = CeilDivide(spec.max_qo_tokens, q_block);
  int64_t num_columns = CeilDivide(std::max<int64_t>(1, longest), kv_block) + random() % 2;
  if (random() % 16 == 0) num_columns = std::max<int64_t>(1, num_columns / 2);
  const unsigned sparsity = Pick(random, {1, 2, 5, 60});
  b->classes.resize(num_rows * num_columns);
  for (size_t i = 0; i < b->classes.size(); ++i) {
    const uint8_t some = random() % 2 == 0 ? kSomeVisible : kSomeVisible | kSomeHidden;
    const bool is_seen =
        static_cast<int64_t>(i) % num_columns < seen / kv_block && random() % 10000 > 0;
    b->classes[i] = is_seen                    ? uint8_t{kSomeVisible}
                    : random() % sparsity == 0 ? some
                                               : uint8_t{kSomeHidden};
  }
  b->block_map = {b->classes.data(), num_rows, num_columns, q_block, kv_block};
}

template <class Traits>
void RunLists(unsigned seed) {
  Random random(seed);
  AttentionProblem problem = RandomProblem(random);
  if (problem.spec.mla) return;
  if (random() % 4 == 0) problem.spec.schedule = kAuto;
  Batch batch = RandomBatch(problem, random);
  for (const int32_t kv_len : batch.kv_lens) {
    if (kv_len > 60000) return;
  }
  problem.spec.max_steps = Pick(random, {1, 40, 200000, 200000, 200000, 200000});
  SettleProblem(batch, random, &problem);
  AddMap(problem.spec, static_cast<int32_t>(Pick(random, {1, 7, 32, 128, 1000})),
         static_cast<int32_t>(Pick(random, {16, 33, 64, 128, 128, 1000})), 0, random, &batch);
  if (seed % 5 == 0) Spoil(problem, random, &batch);
  Compare<Traits>(problem, batch, seed);
}

// Requests share the leading steps that the map shows in full to all of them.
template <class Traits>
void RunSharedLists(unsigned seed) {
  Random random(seed);
  AttentionProblem problem = RandomLevelsProblem(random);
  problem.spec.schedule = Pick(random, {kBalanced, kBalanced, kAuto});
  problem.spec.share_prefixes = 1;
  Batch batch = RandomLevels(problem, random);
  problem.spec.max_steps = Pick(random, {40, 200000, 200000, 200000, 200000, 200000});
  SettleProblem(batch, random, &problem);
  AddMap(problem.spec, static_cast<int32_t>(Pick(random, {1, 7, 32, 128, 1000})),
         static_cast<int32_t>(Pick(random, {16, 33, 64, 128, 128, 1000})),
         Pick(random, {0, 1000, 5000, 1 << 20, 1 << 20}), random, &batch);
  if (seed % 5 == 0) SpoilLevels(random, &batch);
  Compare<Traits>(problem, batch, seed);
}

struct Request {
  int64_t qo_len, kv_len;
};

// Causal, four query heads per kv head, pages of 16. An H200 has 132 SMs.
AttentionProblem HopperProblem(int64_t num_kv_heads, int64_t num_processors) {
  AttentionProblem problem;
  AttentionSpec& spec = problem.spec;
  spec.num_kv_heads = num_kv_heads;
  spec.num_qo_heads = 4 * num_kv_heads;
  spec.head_dim_qk = spec.head_dim_vo = 128;
  spec.window_right = 0;
  spec.page_size = 16;
  spec.arch = 90;
  spec.num_processors = num_processors;
  return problem;
}

// Decodes and prompts, with the schedule of an H200.
template <class Traits>
void RunOnH200(const std::vector<Request>& requests, int64_t num_kv_heads, int64_t num_ctas) {
  AttentionProblem problem = HopperProblem(num_kv_heads, 132);
  AttentionSpec& spec = problem.spec;
  if (Traits::kGeneral) spec.schedule = kAuto;
  Batch b;
  b.kv_indptr.push_back(0);
  for (const Request& r : requests) {
    b.qo_indptr.push_back(static_cast<int32_t>(b.qo_indptr.back() + r.qo_len));
    b.kv_lens.push_back(static_cast<int32_t>(r.kv_len));
    b.kv_indptr.push_back(static_cast<int32_t>(b.kv_indptr.back() + (r.kv_len + 15) / 16));
  }
  b.page_indices.resize(b.kv_indptr.back());
  std::iota(b.page_indices.begin(), b.page_indices.end(), 0);
  spec.max_batch = static_cast<int64_t>(requests.size());
  spec.max_qo_tokens = b.qo_indptr.back();
  spec.max_kv_pages = b.kv_indptr.back();
  SelectCuda(spec, &problem.config);
  problem.config.num_ctas = num_ctas;
  FillCapacities(&problem);
  Compare<Traits>(problem, b, 1000000 + static_cast<unsigned>(requests.size()));
}

// The kernel as compiled. 16 documents in 16,384 packed tokens: a map of whole blocks, which leaves
// a sixteenth of the steps.
void RunDocuments() {
  constexpr int32_t kTokens = 16384, kDocument = 1024, kBlock = 128;
  AttentionProblem problem = HopperProblem(2, 132);
  AttentionSpec& spec = problem.spec;
  spec.page_size = 0;
  Batch b;
  b.qo_indptr = {0, kTokens};
  b.kv_lens = {kTokens};
  b.kv_indptr = {0, kTokens};
  spec.max_batch = 1;
  spec.max_qo_tokens = spec.max_kv_tokens = kTokens;
  spec.max_steps = 5000;
  SelectCuda(spec, &problem.config);
  FillCapacities(&problem);
  for (int32_t row = 0; row < kTokens / kBlock; ++row) {
    for (int32_t column = 0; column < kTokens / kBlock; ++column) {
      const bool same = row * kBlock / kDocument == column * kBlock / kDocument;
      b.classes.push_back(same ? kSomeVisible : kSomeHidden);
    }
  }
  b.block_map = {b.classes.data(), kTokens / kBlock, kTokens / kBlock, kBlock, kBlock};
  const PlanLayout layout = MakePlanLayout(problem);
  std::vector<int32_t> plan(layout.num_words);
  const Status s = Plan(problem, b.inputs(), nullptr, plan.data(), b.map());
  PlanHeader header;
  std::memcpy(&header, plan.data() + layout.header, sizeof(header));
  const int64_t tile_tokens = problem.config.tile_q[problem.config.num_tiles - 1] / 4;
  // A causal tile of a document sees 1 to 8 steps of 128.
  const int64_t expected = kTokens / tile_tokens * 9 / 2;
  if (!s.ok() || problem.config.tile_kv != 128 || header.num_steps != expected) {
    std::printf("FAILED: documents: %d entries, %lld expected, %s\n", header.num_steps,
                static_cast<long long>(expected), s.message.c_str());
    ++g_failures;
  }
  Compare<TraitsOf<512, 96 * 1024, 1>>(problem, b, 5);
}

// The kernel as compiled, on batches as servers have them: decodes of uniform and zipf lengths,
// with prompts between them, and more than shared memory holds.
void RunServing(int64_t batch_size, int64_t num_kv_heads, bool prompts, bool zipf) {
  Random random(7);
  std::vector<Request> requests;
  for (int64_t r = 0; r < batch_size; ++r) {
    requests.push_back({prompts && r % 8 == 0 ? 512 : 1,
                        static_cast<int64_t>(600 + (zipf ? 500000 / (1 + random() % batch_size)
                                                         : random() % 4096))});
  }
  RunOnH200<TraitsOf<512, 96 * 1024>>(requests, num_kv_heads, 264);
}

// About as many equal tiles of two tile M as half the queues of a head, so that shorter chunks pay.
void RunRetries(unsigned seed) {
  Random random(seed);
  std::vector<Request> requests;
  for (int64_t n = 10 + random() % 14; n > 0; --n) {
    requests.push_back({Pick(random, {1, 20}), 3000 * Pick(random, {1, 1, 1, 1, 2})});
  }
  RunOnH200<TraitsOf<128, 16 * 1024>>(requests, 8, Pick(random, {132, 264}));
  RunOnH200<TraitsOf<128, 16 * 1024, 1>>(requests, 8, Pick(random, {132, 264}));
}

// Decodes for which no retry before the chunks of FlashDecoding is as good as these.
void RunFixedChunks() {
  std::vector<Request> requests;
  for (const int64_t kv_len :
       {1332, 200,  4000, 4000, 444, 4000, 2,    4000, 4000, 4000, 4000, 800, 22,  210,
        4000, 4000, 306,  2000, 666, 1000, 2000, 4000, 4000, 4000, 4,    284, 4000}) {
    requests.push_back({1, kv_len});
  }
  RunOnH200<TraitsOf<512, 96 * 1024>>(requests, 4, 132);
  RunOnH200<TraitsOf<128, 16 * 1024, 1>>(requests, 4, 132);
}

// Candidates that the host planner must not take for ones that cannot win: chunks whose last pieces
// are short, and whole tiles by weight after whole tiles by section.
void RunBounds() {
  std::vector<Request> decodes;
  for (const int64_t kv_len : {1000, 400, 500, 800, 1000, 1000, 600, 800, 300, 1000, 1000}) {
    decodes.push_back({1, kv_len});
  }
  const std::vector<Request> prompts = {{300, 1800}, {100, 3000}, {300, 600}};
  for (const std::vector<Request>& requests : {decodes, prompts}) {
    RunOnH200<TraitsOf<512, 96 * 1024>>(requests, 8, 132);
  }
}

// Few equal decodes: ranges that cut the heads of a partition at different positions.
void RunRanges(unsigned seed) {
  Random random(seed);
  const std::vector<Request> requests(
      1 + random() % 40, {Pick(random, {1, 1, 300}), 500 + static_cast<int64_t>(random() % 5000)});
  const int64_t num_kv_heads = Pick(random, {5, 8, 14, 48});
  RunOnH200<TraitsOf<128, 16 * 1024>>(requests, num_kv_heads, 132);
  RunOnH200<TraitsOf<128, 16 * 1024, 1>>(requests, num_kv_heads, 132);
}

// Fixed splits with prefixes that are given: sharing is not always faster.
void RunFixedSplits(unsigned seed) {
  Random random(seed);
  AttentionProblem problem = HopperProblem(Pick(random, {1, 2, 8}), 132);
  problem.spec.schedule = kFixedSplit;
  problem.spec.kv_split = Pick(random, {256, 512, 1024});
  problem.spec.share_prefixes = 1;
  const Batch batch = RandomLevels(problem, random);
  SettleProblem(batch, random, &problem);
  Compare<TraitsOf<128, 16 * 1024, 1>>(problem, batch, seed);
}

// More shared tiles than a plan holds: 200 for 400 requests. 13 cover all requests, one covers each
// pair.
void RunPairs() {
  AttentionProblem problem = HopperProblem(2, 132);
  AttentionSpec& spec = problem.spec;
  spec.share_prefixes = 1;
  Batch b;
  b.num_levels = 2;
  b.num_prefixes = 200;
  b.request_indptr.assign(201, 400);
  b.request_indptr[0] = 0;
  b.prefix_lens.assign(200, 1024);
  for (int32_t i = 0; i <= 200; ++i) b.request_indptr.push_back(2 * i);
  for (int32_t i = 0; i < 200; ++i) b.prefix_lens.push_back(4096 + 64 * (i * 37 % 200));
  b.kv_indptr.push_back(0);
  int32_t next_id = 64;
  for (int32_t r = 0; r < 400; ++r) {
    const int32_t kv_len = b.prefix_lens[200 + r / 2] + 100;
    const int32_t before = r == 0 ? 0 : b.kv_indptr[r - 1];
    for (int32_t i = 0; i < (kv_len + 15) / 16; ++i) {
      const bool same = r % 2 == 1 && i < b.prefix_lens[200 + r / 2] / 16;
      b.page_indices.push_back(i < 64 ? i : same ? b.page_indices[before + i] : next_id++);
    }
    b.qo_indptr.push_back(r + 1);
    b.kv_lens.push_back(kv_len);
    b.kv_indptr.push_back(static_cast<int32_t>(b.page_indices.size()));
  }
  spec.max_batch = spec.max_qo_tokens = 400;
  spec.max_kv_pages = b.kv_indptr.back();
  SelectCuda(spec, &problem.config);
  FillCapacities(&problem);
  const PrefixLevels levels = b.levels();
  const PlanLayout layout = MakePlanLayout(problem);
  std::vector<int32_t> plan(layout.num_words);
  const Status s = Plan(problem, b.inputs(), &levels, plan.data());
  PlanHeader header;
  std::memcpy(&header, plan.data() + layout.header, sizeof(header));
  if (!s.ok() || header.num_shared_tokens <= 400 || header.num_shared_tokens >= 800) {
    std::printf("FAILED: no pair is left apart, %d tokens, %s\n", header.num_shared_tokens,
                s.message.c_str());
    ++g_failures;
  }
  Compare<TraitsOf<128, 16 * 1024, 1>>(problem, b, 3);
}

// Decodes behind one prefix whose chunks leave a queue empty: it stays empty.
void RunOnePrefix(int32_t batch_size, int32_t shared_len, int64_t num_kv_heads, int64_t num_ctas) {
  AttentionProblem problem = HopperProblem(num_kv_heads, num_ctas);
  AttentionSpec& spec = problem.spec;
  spec.share_prefixes = 1;
  Batch b;
  b.num_levels = b.num_prefixes = 1;
  b.request_indptr = {0, batch_size};
  b.prefix_lens = {shared_len};
  b.kv_indptr.push_back(0);
  int32_t next_id = shared_len / 16;
  for (int32_t r = 0; r < batch_size; ++r) {
    for (int32_t i = 0; i < shared_len / 16; ++i) b.page_indices.push_back(i);
    for (int32_t i = 0; i < 256 / 16; ++i) b.page_indices.push_back(next_id++);
    b.qo_indptr.push_back(r + 1);
    b.kv_lens.push_back(shared_len + 256);
    b.kv_indptr.push_back(static_cast<int32_t>(b.page_indices.size()));
  }
  spec.max_batch = spec.max_qo_tokens = batch_size;
  spec.max_kv_pages = b.kv_indptr.back();
  SelectCuda(spec, &problem.config);
  FillCapacities(&problem);
  const PrefixLevels levels = b.levels();
  const PlanLayout layout = MakePlanLayout(problem);
  std::vector<int32_t> plan(layout.num_words);
  const Status s = Plan(problem, b.inputs(), &levels, plan.data());
  const int32_t* queues = plan.data() + layout.queue_indptr;
  bool empty = false;
  for (int64_t q = 0; q < num_ctas; ++q) empty |= queues[q] == queues[q + 1];
  if (!s.ok() || !empty) {
    std::printf("FAILED: no queue stays empty, %s\n", s.message.c_str());
    ++g_failures;
  }
  Compare<TraitsOf<512, 96 * 1024, 1>>(problem, b, 4);
}

// Calls run with traits of a general planner, which depend on the seed.
template <class Run>
void WithGeneralTraits(unsigned seed, const Run& run) {
  switch (seed % 3) {
    case 0:
      return run(TraitsOf<64, 96 * 1024, 1>());
    case 1:
      return run(TraitsOf<128, 2 * 1024, 1>());
    default:
      return run(TraitsOf<32, 16 * 1024, 1>());
  }
}

void RunAll(unsigned num_cases) {
  for (unsigned seed = 0; seed < num_cases && g_failures < 10; ++seed) {
    switch (seed % 4) {
      case 0:
        RunCase<TraitsOf<64, 96 * 1024>>(seed);
        break;
      case 1:
        RunCase<TraitsOf<128, 2 * 1024>>(seed);
        break;
      case 2:
        RunCase<TraitsOf<32, 4 * 1024>>(seed);
        break;
      default:
        RunCase<TraitsOf<256, 16 * 1024>>(seed);
    }
  }
  for (unsigned seed = 0; seed < num_cases && g_failures < 10; ++seed) {
    WithGeneralTraits(seed, [&](auto traits) { RunLevels<decltype(traits)>(seed); });
  }
  const int faults_before = g_faults;
  for (unsigned seed = 0; seed < num_cases && g_failures < 10; ++seed) {
    WithGeneralTraits(seed, [&](auto traits) { RunLists<decltype(traits)>(seed); });
    WithGeneralTraits(seed, [&](auto traits) { RunSharedLists<decltype(traits)>(seed); });
  }
  std::printf(
      "with step lists: %d plans, %d of them with splits, %d refused by both, %d for their"
      " lists; told what is shared: %d plans that share, %d that do not\n",
      g_listed, g_split_lists, g_faults - faults_before, g_list_faults, g_shared_lists,
      g_flat_lists);
  g_faults = faults_before;
  RunDocuments();
  RunPairs();
  RunOnePrefix(128, 8192, 8, 132);
  RunOnePrefix(64, 16384, 8, 132);
  RunOnePrefix(570, 8192, 1, 300);  // more queues than registers hold
  for (const int64_t kv_heads : {8, 32, 1}) RunServing(256, kv_heads, false, true);
  RunServing(256, 8, false, false);
  RunServing(128, 8, true, false);
  RunServing(5000, 8, true, true);
  for (unsigned seed = 0; seed < 100; ++seed) RunRetries(seed);
  RunFixedChunks();
  RunBounds();
  for (unsigned seed = 0; seed < 30; ++seed) RunRanges(seed);
  for (unsigned seed = 0; seed < 40; ++seed) RunFixedSplits(seed);
  std::printf(
      "%u batches: %d with splits, %d with cuts of one head unit, %d with trees of merges, %d"
      " refused by both\n",
      num_cases, g_split, g_ranges, g_trees, g_faults);
  std::printf("told what is shared: %d plans that share, %d that do not\n", g_shared, g_flat);
  if (g_shared < static_cast<int>(num_cases / 8) || g_flat < static_cast<int>(num_cases / 10)) {
    std::printf("FAILED: the levels are too tame\n");
    ++g_failures;
  }
  if (g_listed < static_cast<int>(num_cases / 5) ||
      g_split_lists < static_cast<int>(num_cases / 20) ||
      g_list_faults < static_cast<int>(num_cases / 20) ||
      g_shared_lists < static_cast<int>(num_cases / 20) ||
      g_flat_lists < static_cast<int>(num_cases / 10)) {
    std::printf("FAILED: the maps are too tame\n");
    ++g_failures;
  }
  const auto few = static_cast<int>(num_cases / 20);
  if (g_split < 2 * few || g_faults < few || g_trees < few / 2 || g_ranges < few) {
    std::printf("FAILED: the batches are too tame\n");
    ++g_failures;
  }
}

}  // namespace
}  // namespace jax_attn

int main(int argc, char** argv) {
  jax_attn::RunAll(argc > 1 ? static_cast<unsigned>(std::atoi(argv[1])) : 400);
  if (jax_attn::g_failures > 0) std::printf("%d failures\n", jax_attn::g_failures);
  return jax_attn::g_failures > 0;
}
