// Attention kernels, without a GPU, on faulty data: invalid plans, plans whose merges do not add
// up, and requests full of NaN. Whatever comes, the kernels end, stay in their memory, and leave
// the next launch right. Their work, which is counted, stays within bounds.
#include "emulation/cuda_emulation.h"
#include "emulation/cuda_emulation_sm90.h"
// The headers above stand in for CUDA and must come first.
#include "emulation/sm80_kernels.h"
#include "emulation/sm90_kernels.h"
#include "plan/damaged_headers.h"

namespace jax_attn {
namespace {

using emulation::Text;

void Expect(bool ok, const std::string& what) {
  if (ok || ++g_failures > 20) return;
  std::printf("FAILED %s\n", what.c_str());
}

// Follows plans like the others; this test does not look at its operands.
struct F32Kernel : NoTensorMaps {
  template <class Shape>
  struct Traits : Shape {
    static constexpr int kDtype = kElementF32, kArch = 90;
    static constexpr int kNumTiles = 1, kTileQ0 = 16, kTileQ1 = 0, kTileQ2 = 0;
    static constexpr int kTileKv = 32, kNumWarps = 4, kNumStages = 2;
  };
  template <class Shape>
  using Body = AttentionBody<Traits<Shape>>;
};

// A batch and its plan, for launches in a row with the same counters.
template <class Kernel, class Shape>
class Series {
 public:
  using Traits = typename Kernel::template Traits<Shape>;
  using Body = typename Kernel::template Body<Shape>;

  // 16-bit words of an element; two elements of the 16-bit batch make one f32.
  static constexpr int kWords = Traits::kDtype == kElementF32 ? 2 : 1;

  explicit Series(const Case& c)
      : c_(c),
        random_(1),
        problem_(MakeProblem<Traits>(c)),
        batch(MakeBatch<Traits>(c, problem_.spec, random_)),
        plan(MakePlan(c, problem_, batch)),
        counters_(problem_) {
    for (std::vector<u16>* x : {&batch.q, &batch.k, &batch.v}) x->resize(x->size() * kWords);
  }

  Outputs Launch(const std::vector<i32>& with_plan, bool with_turns = true, i32 counter = 0) {
    AttentionParams p = MakeParams(problem_, batch, with_plan, nullptr);
    Outputs out = MakeOutputs(problem_, &p);
    out.o = Poisoned<u16>(out.o.size() * kWords);
    p.o = out.o.data();
    if (with_turns) {
      counters_.Use(&p);
    } else {
      std::fill_n(p.merge_counters, problem_.config.max_merge_groups, counter);
    }
    const i64 rows = p.page_size > 0 ? batch.num_pages * p.page_size : problem_.spec.max_kv_tokens;
    Kernel::template AddTensorMaps<Shape>(problem_.spec, rows, &p);
    emulation::num_exponentials = emulation::num_loads = 0;
    emulation::machine.Launch(p.num_ctas, Body::kNumThreads, static_cast<unsigned>(random_()),
                              [&p] { Body::Run(p); });
    Expect(!with_turns || counters_.AreReady(), std::string(c_.name) + ": counters are not ready");
    return out;
  }
  Outputs Expected() const { return ExpectedOutputs(c_, problem_, batch, nullptr); }

  const AttentionProblem& problem() const { return problem_; }
  PlanLayout layout() const { return MakePlanLayout(problem_); }

 private:
  const Case c_;
  std::mt19937 random_;
  const AttentionProblem problem_;

 public:
  Batch batch;
  const std::vector<i32> plan;

 private:
  Counters counters_;
};

PlanHeader& HeaderOf(const PlanLayout& layout, std::vector<i32>* plan) {
  return *reinterpret_cast<PlanHeader*>(plan->data() + layout.header);
}

// --- headers ---

// Invalid headers: all results are NaN, and nothing after the header is read.
template <class Kernel, class Shape>
void TestHeaders(const Case& c) {
  Series<Kernel, Shape> series(c);
  const Outputs good = series.Launch(series.plan);
  const PlanLayout layout = series.layout();
  const PlanLimits most = MakePlanLimits(series.problem(), series.batch.num_pages);
  const PlanHeader header = *reinterpret_cast<const PlanHeader*>(&series.plan[layout.header]);
  for (const DamagedHeader& damaged : DamagedHeaders(header, most)) {
    // The rest of the plan is nonsense.
    std::vector<i32> plan(series.plan.size(), 0x7f7f7f70);
    std::copy_n(series.plan.begin(), layout.qo_indptr, plan.begin());
    HeaderOf(layout, &plan) = damaged.header;
    const Outputs out = series.Launch(plan);
    const auto is_blank = [](auto x) { return std::isnan(x) || x == 0xffff; };
    Expect(std::all_of(out.o.begin(), out.o.end(), is_blank) &&
               std::all_of(out.lse.begin(), out.lse.end(), [](float x) { return std::isnan(x); }),
           std::string(c.name) + ", " + damaged.what + ": not all results are NaN");
  }
  Expect(SameBits(series.Launch(series.plan), good),
         std::string(c.name) + ": other bits behind headers that are none");
  // Queues outside the plan's items count as empty.
  for (const auto& [at, value] : std::vector<std::pair<int, i32>>{
           {0, -7}, {c.num_ctas, most.max_items + 1}, {1, 0x7fffffff}}) {
    std::vector<i32> plan = series.plan;
    plan[layout.queue_indptr + at] = value;
    series.Launch(plan);
    Expect(SameBits(series.Launch(series.plan), good),
           std::string(c.name) + ": other bits behind a queue that is none");
  }
}

// --- counters ---

// Merge groups that are never completed, or too early: the next launch is right.
template <class Kernel, class Shape>
void TestCounters(const Case& c) {
  Series<Kernel, Shape> series(c);
  const Outputs good = series.Launch(series.plan);
  const PlanLayout layout = series.layout();
  std::vector<i32> plan = series.plan;
  const i32 num_groups = HeaderOf(layout, &plan).num_merge_groups;
  Expect(num_groups > 0, std::string(c.name) + ": nothing is merged");
  const auto groups = [&] { return reinterpret_cast<MergeGroup*>(&plan[layout.merge_groups]); };
  for (int damage = 0; damage < 4; ++damage) {
    plan = series.plan;
    for (i32 i = 0; i < num_groups; ++i) {
      if (damage == 0) ++groups()[i].num_partials;
      if (damage == 1 && groups()[i].num_partials > 1) --groups()[i].num_partials;
      if (damage == 2 && i % 2 == 1) groups()[i].num_partials += 40;
    }
    if (damage == 3) {  // a queue that ends early
      i32* queues = &plan[layout.queue_indptr];
      queues[series.problem().config.num_ctas] = queues[series.problem().config.num_ctas - 1];
    }
    for (int launches = 0; launches <= damage % 2; ++launches) series.Launch(plan);
    Expect(SameBits(series.Launch(series.plan), good),
           std::string(c.name) + ": other bits behind a plan whose merges do not add up");
  }
  Expect(SameBits(series.Launch(series.plan, false), good), "other bits with zeroed counters");
}

// A counter claims an arrival that never happened: the kernel does not wait forever.
template <class Kernel, class Shape>
void TestSpin(const Case& c) {
  Series<Kernel, Shape> series(c);
  const PlanLayout layout = series.layout();
  std::vector<i32> plan = series.plan;
  i32* queues = &plan[layout.queue_indptr];
  Expect(queues[1] == 1 && HeaderOf(layout, &plan).num_items == 2, "expected an item a CTA");
  queues[2] = queues[1];
  const Outputs out = series.Launch(plan, false, 1);
  Expect(std::isnan(out.lse[0]) && out.o[0] != 0xffff && std::isnan(Bf16ToFloat(out.o[0])),
         "a state that never came: not NaN");
}

// --- barriers ---

// Damaged items that only name memory of this launch: lengths and spans that are empty, reversed or
// too long, tiles that do not exist, and other items' heads, positions, merge groups and queues.
// All warps must agree on the number of their waits and arrivals. The emulation aborts if a warp
// waits for an arrival that never comes, or if a CTA leaves something over. The next launch must be
// right.
template <class Kernel, class Shape>
void TestBarriers(const Case& c, int num_plans) {
  Series<Kernel, Shape> series(c);
  const Outputs good = series.Launch(series.plan);
  const PlanLayout layout = series.layout();
  const AttentionProblem& problem = series.problem();
  const KernelConfig& config = problem.config;
  const i32 group_size = static_cast<i32>(problem.spec.group_size());
  std::mt19937 random(7);
  const auto between = [&](i64 least, i64 most) {
    return least >= most
               ? static_cast<i32>(least)
               : static_cast<i32>(least + static_cast<i64>(random() % (most - least + 1)));
  };
  for (int plans = 0; plans < num_plans; ++plans) {
    std::vector<i32> plan = series.plan;
    plan.resize(plan.size() + 1000);  // page 0, after the last page table
    const PlanHeader header = HeaderOf(layout, &plan);
    for (i64 i = 0; i < config.max_shared_tokens; ++i) {
      if (random() % 4 == 0) plan[layout.qo_indices + i] = between(0, header.nnz_qo - 1);
    }
    auto* items = reinterpret_cast<WorkItem*>(&plan[layout.items]);
    for (i32 i = 0; i < header.num_items; ++i) {
      WorkItem item = items[i];
      for (int changes = between(0, 4); changes > 0; --changes) {
        switch (between(0, 8)) {
          case 0:
            item.qo_len = between(-2, config.tile_q[config.num_tiles - 1] / group_size);
            break;
          case 1:
            item.tile = between(-1, 3);
            break;
          case 2:
            item.kv_begin = between(0, 300);
            break;
          case 3:
            item.kv_end = between(0, 300);
            break;
          case 4:
            item.q_pos = between(-400, 400);
            break;
          case 5:
            item.kv_head = between(0, problem.spec.num_kv_heads - 1);
            break;
          case 6:
            item.num_groups = between(0, 3);
            break;
          case 7:
            item.partial_row = between(-1, config.max_partial_rows);
            break;
          default:
            item = items[between(0, header.num_items - 1)];
        }
      }
      // Within sections and arrays.
      const i64 rows = i64{std::max(item.qo_len, 1)} * group_size;
      if (item.merge_idx + item.num_groups > header.num_merge_groups) item.num_groups = 0;
      if (item.merge_idx < 0 || item.partial_row < 0) item.num_groups = 0;
      if (item.num_groups == 0) item.partial_row = item.merge_idx = -1;
      const i64 tokens =
          item.num_groups > 1 ? config.max_shared_tokens : problem.spec.max_qo_tokens;
      if (item.first_token + i64{item.qo_len} > tokens) continue;
      if (item.partial_row + rows > config.max_partial_rows) continue;
      items[i] = item;
    }
    i32* queues = &plan[layout.queue_indptr];
    if (random() % 4 == 0) queues[between(0, config.num_ctas)] = between(-1, config.max_items);
    if (random() % 4 == 0) {
      auto* groups = reinterpret_cast<MergeGroup*>(&plan[layout.merge_groups]);
      for (i32 i = 0; i < header.num_merge_groups; ++i) {
        if (random() % 4 == 0) groups[i].num_partials = between(0, groups[i].num_partials);
      }
    }
    series.Launch(plan);
  }
  Expect(SameBits(series.Launch(series.plan), good),
         std::string(c.name) + ": other bits behind plans of anything");
}

// --- non-finite values ---

// Bounds the work beyond that of a clean batch. Exponentials count recomputed rows; loads count
// inspected values.
template <class Kernel, class Shape>
void TestPoison(const char* name, const Request& request, i64 tile_rows) {
  using Bits = std::vector<std::pair<int, u16>>;  // columns of a value
  const int n = request.kv_len, rows = request.qo_len;
  const Case c = {.name = name, .requests = {request}, .num_ctas = 2, .kv_heads = 1};
  Series<Kernel, Shape> series(c);
  const std::vector<u16> clean_v = series.batch.v;
  series.Launch(series.plan);
  const i64 exponentials = emulation::num_exponentials, loads = emulation::num_loads;
  const auto check = [&](const char* what, int begin, int end, const Bits& bits, i64 again) {
    series.batch.v = clean_v;
    for (int i = begin; i < end; ++i) {
      const i64 page = series.batch.page_indices[i / Shape::kPageSize];
      const i64 row = page * Shape::kPageSize + i % Shape::kPageSize;
      for (const auto& [column, x] : bits) series.batch.v[row * Shape::kHeadDimVo + column] = x;
    }
    const Outputs got = series.Launch(series.plan), want = series.Expected();
    const i64 more = emulation::num_exponentials - exponentials;
    const i64 more_loads = emulation::num_loads - loads;
    std::printf("%s, %s: %lld and %lld more exponentials, %lld and %lld more loads\n", name, what,
                static_cast<long long>(exponentials), static_cast<long long>(more),
                static_cast<long long>(loads), static_cast<long long>(more_loads));
    Expect(more <= again, std::string(name) + ", " + what + ": too much is computed again");
    // 16 bytes each. Every warp of a tile may read the values that some of its rows do not see, at
    // most as many as a tile has rows. Recomputing loads keys and values of 4 rows.
    const i64 chunks = Shape::kHeadDimVo / 8;
    Expect(more_loads <= (rows / 16 + 1) * tile_rows * chunks + again * 2 * chunks,
           std::string(name) + ", " + what + ": too much is looked at");
    for (size_t i = 0; i < want.o.size(); ++i) {
      const float x = Bf16ToFloat(want.o[i]), y = Bf16ToFloat(got.o[i]);
      Expect(std::isfinite(x) ? std::abs(x - y) < 0.03f : !std::isfinite(y),
             Text("%s, %s: o[%zu]: expected %g, got %g", name, what, i, x, y));
    }
  };
  Bits all_nan, all_infinite;
  for (int i = 0; i < Shape::kHeadDimVo; ++i) {
    all_nan.push_back({i, 0x7fff});
    all_infinite.push_back({i, i % 3 == 0 ? 0xff80 : 0x7f80});
  }
  // Rows of the tile before the first such token are recomputed: their exponentials are `again`.
  const i64 of_tile = tile_rows * n, last_tokens = i64{rows} * 32 + 1000;
  check("one NaN early", 3, 4, {{5, 0x7fff}}, 1000);
  check("one NaN late", n - 100, n - 99, {{5, 0x7fff}}, of_tile);
  check("NaN from the middle on", n / 2, n, all_nan, of_tile + last_tokens);
  check("infinities everywhere", 0, n, all_infinite, last_tokens);
}

}  // namespace
}  // namespace jax_attn

// The argument is the number of damaged plans of each kernel (default 10).
int main(int argc, char** argv) {
  using namespace jax_attn;
  const int num_plans = argc > 1 ? std::atoi(argv[1]) : 10;
  const std::vector<Request> mixed = {{45, 170}, {3, 5}, {1, 200}, {5, 130}};
  const Case c = {.name = "sm80", .requests = mixed, .kv_split = 64};
  const auto named = [&c](const char* name) {
    Case copy = c;
    copy.name = name;
    return copy;
  };
  Case latent = c;
  latent.name = "sm80 mla";
  latent.requests = {{1, 170}, {2, 105}, {1, 130}};
  latent.kv_heads = 1;
  latent.qo_heads = 16;
  using Page16 = ShapeOf<64, 64, 4, 16, false, true, false>;
  using HalfSteps = CodesOf<ShapeOf<128, 128, 4, 16, false, true, false>, kInt8Format>;
  using Mla16 = MlaShapeOf<192, 128, 16, 16, false, true, false>;
  using Mla64 = MlaShapeOf<128, 128, 64, 16, false, true, false>;
  TestHeaders<Sm80Kernel, Page16>(c);
  TestHeaders<F32Kernel, ShapeOf<8, 8, 4, 16, false, true, false>>(named("f32"));
  TestHeaders<Sm90Kernel<true, 32>, Page16>(named("sm90"));
  TestHeaders<Sm90Kernel<false, 32, 1>, Page16>(named("sm90, decodes alone"));
  TestHeaders<Sm90Kernel<true, 32>, E4m3Of<Page16, false>>(named("sm90, e4m3"));
  TestHeaders<Sm90Kernel<false, 32>, HalfSteps>(named("sm90, int8"));
  TestHeaders<Sm80Mla, Mla16>(latent);
  TestCounters<Sm80Kernel, Page16>(c);
  TestCounters<Sm90Kernel<true, 32>, Page16>(named("sm90"));
  TestCounters<Sm90Kernel<false, 32, 1>, Page16>(named("sm90, decodes alone"));
  TestCounters<Sm80Mla, Mla16>(latent);
  latent.name = "sm90 mla, few heads";
  TestHeaders<Sm90MlaDecode, Mla16>(latent);
  TestCounters<Sm90MlaDecode, Mla16>(latent);
  latent.name = "sm90 mla, many heads";
  latent.qo_heads = 64;
  TestHeaders<Sm90Mla, Mla64>(latent);
  TestCounters<Sm90Mla, Mla64>(latent);
  TestSpin<Sm90Mla, Mla64>({.name = "sm90 mla, two",
                            .requests = {{1, 128}},
                            .num_ctas = 2,
                            .kv_heads = 1,
                            .kv_split = 64,
                            .qo_heads = 64});
  Case shared = c;
  shared.requests = {{1, 170}, {1, 190}, {2, 160}, {1, 170}, {45, 170}};
  shared.prefix = 128;
  const auto sharing = [&](const char* name) {
    Case copy = shared;
    copy.name = name;
    return copy;
  };
  TestBarriers<Sm80Kernel, Page16>(sharing("sm80"), num_plans);
  TestBarriers<Sm90Kernel<true, 32>, Page16>(sharing("sm90"), num_plans);
  TestBarriers<Sm90Kernel<false, 32, 1>, Page16>(named("sm90, decodes alone"), num_plans);
  TestBarriers<Sm90Kernel<true, 32>, E4m3Of<Page16, false>>(sharing("sm90, e4m3"), num_plans);
  TestBarriers<Sm90Kernel<false, 32>, HalfSteps>(sharing("sm90, int8"), num_plans);
  latent.qo_heads = 16;
  TestBarriers<Sm80Mla, Mla16>(latent, num_plans);
  TestBarriers<Sm90MlaDecode, Mla16>(latent, num_plans);
  latent.qo_heads = 64;
  TestBarriers<Sm90Mla, Mla64>(latent, num_plans);
  using Page16Dim128 = ShapeOf<128, 128, 1, 16, false, true, false>;
  TestPoison<Sm90Kernel<true, 32>, Page16Dim128>("sm90, prompt", {400, 400}, 128);
  TestPoison<Sm90Kernel<true, 32>, Page16Dim128>("sm90, speculation", {9, 700}, 9);
  if (g_failures > 0) std::printf("%d failures\n", g_failures);
  return g_failures > 0;
}
