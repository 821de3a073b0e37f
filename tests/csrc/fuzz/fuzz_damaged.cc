// Plans with changed words: either CheckPlan refuses them, or attention, its gradients and append
// over them touch only their own memory and write every row of o.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

#include "cpu/append.h"
#include "cpu/attention.h"
#include "cpu/backward.h"
#include "fuzz/fuzz_case.h"
#include "plan/check.h"

namespace jax_attn::fuzz {
namespace {

// Memory of exactly this many bytes, so that a sanitizer detects access to the byte after them.
struct Bytes {
  Bytes(int64_t size, int value) : data(new char[std::max<int64_t>(1, size)]), size(size) {
    std::memset(data.get(), value, static_cast<size_t>(size));
  }
  std::unique_ptr<char[]> data;
  int64_t size;
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data.get());
  }
};

constexpr int kTenth = 0x3d;  // every byte of an f32 or bf16 of 0.05
constexpr int kNobodysNan = 0xff;

bool HasNan(const Bytes& array, int64_t dtype) {
  if (dtype == kF32) {
    const auto* values = array.as<float>();
    return std::any_of(values, values + array.size / 4, [](float x) { return std::isnan(x); });
  }
  const auto* values = array.as<uint16_t>();  // bf16
  return std::any_of(values, values + array.size / 2,
                     [](uint16_t x) { return (x & 0x7fff) > 0x7f80; });
}

struct Operands {
  explicit Operands(const AttentionSpec& s)
      : element(ElementBytes(s.dtype)),
        q(s.max_qo_tokens * s.num_qo_heads * s.head_dim_qk * element, kTenth),
        k(Rows(s) * s.num_kv_heads * s.kv_row_bytes(s.head_dim_qk), kTenth),
        v(Rows(s) * s.num_kv_heads * s.kv_row_bytes(s.head_dim_vo), kTenth),
        k_new(s.max_qo_tokens * s.num_kv_heads * s.head_dim_qk * element, kTenth),
        v_new(s.max_qo_tokens * s.num_kv_heads * s.head_dim_vo * element, kTenth) {}
  static int64_t Rows(const AttentionSpec& s) {
    return s.paged() ? kPoolPages * s.page_size : s.max_kv_tokens;
  }
  int64_t element;
  Bytes q, k, v, k_new, v_new;
};

// Operands of a variant: arrays with as few elements as possible.
class VariantOperands {
 public:
  explicit VariantOperands(const VariantProgram& program) {
    for (i32 i = 0; i < program.num_operands; ++i) {
      const ProgramOperand& operand = program.operands[i];
      VariantOperand bound = {};
      int64_t num = 1;
      for (i32 axis = 0; axis < operand.rank; ++axis) num *= bound.dims[axis] = 1 + (i + axis) % 3;
      const int64_t bytes = operand.type >= kOperandU8     ? 1
                            : operand.type == kOperandBF16 ? 2
                            : operand.type == kOperandF16  ? 2
                                                           : 4;
      arrays_.emplace_back(num * bytes, operand.type == kOperandBool ? 1 : kTenth);
      bound.data = arrays_.back().data.get();
      bound_.push_back(bound);
    }
  }
  void Bind(AttentionParams* p) const {
    std::copy(bound_.begin(), bound_.end(), p->variant_operands);
  }

 private:
  std::vector<Bytes> arrays_;
  std::vector<VariantOperand> bound_;
};

// Runs the gradients, if the attention has any.
std::string Differentiate(const AttentionProblem& problem, const AttentionParams& forward,
                          const float* lse, const Operands& x) {
  const AttentionSpec& spec = problem.spec;
  const Bytes d(spec.max_qo_tokens * spec.num_qo_heads * 4, kTenth);
  const Bytes d_o(spec.max_qo_tokens * spec.num_qo_heads * spec.head_dim_vo * x.element, kTenth);
  const Bytes d_q(x.q.size, kNobodysNan), d_k(x.k.size, kNobodysNan), d_v(x.v.size, kNobodysNan);
  const Bytes sums(4 * BackwardSums(spec, forward.num_pages), kNobodysNan);
  BackwardParams p = {};
  p.forward = forward;
  p.lse = lse;
  p.d = d.as<float>();
  p.d_o = d_o.data.get();
  InlinePool pool;
  const VariantGradient gradient = {problem.program, -1, 0, {}};  // as for masks
  BackwardCpu(problem, gradient, p,
              {d_q.data.get(), d_k.data.get(), d_v.data.get(), sums.as<float>(), {}}, pool);
  const bool is_whole =
      !HasNan(d_q, spec.dtype) && !HasNan(d_k, spec.dtype) && !HasNan(d_v, spec.dtype);
  return is_whole ? "" : "a gradient that nobody writes";
}

std::string Attend(const AttentionProblem& problem, const int32_t* plan, const Operands& x) {
  const AttentionSpec& spec = problem.spec;
  const WorkspaceLayout layout = MakeWorkspaceLayout(problem);
  const Bytes o(spec.max_qo_tokens * spec.num_qo_heads * spec.head_dim_vo * x.element, kNobodysNan);
  const Bytes lse(spec.max_qo_tokens * spec.num_qo_heads * 4, kNobodysNan);
  const Bytes workspace(4 * layout.num_words, kNobodysNan);
  AttentionParams p = MakeAttentionParams(problem, plan);
  const int32_t layer = 0;
  p.q = x.q.data.get();
  p.k = x.k.data.get();
  p.v = x.v.data.get();
  p.layer = spec.paged() ? &layer : nullptr;
  p.o = o.data.get();
  p.lse = lse.as<float>();
  p.merge_counters = workspace.as<int32_t>() + layout.merge_counters;
  p.partial_states = reinterpret_cast<RowState*>(workspace.as<int32_t>() + layout.partial_states);
  p.partial_o = workspace.as<float>() + layout.partial_o;
  if (spec.fresh_kv) {
    p.k_new = x.k_new.data.get();
    p.v_new = x.v_new.data.get();
  }
  p.num_pages = spec.paged() ? kPoolPages : 1;
  p.num_layers = 1;
  const VariantOperands variant(problem.program);
  variant.Bind(&p);
  InlinePool pool;
  AttentionCpu(problem, p, pool);
  if (HasNan(o, spec.dtype) || HasNan(lse, kF32)) return "a row of o or lse that nobody writes";
  const bool has_gradients = !spec.quantized() && !spec.fresh_kv;
  return has_gradients ? Differentiate(problem, p, lse.as<float>(), x) : "";
}

void Append(const AttentionProblem& problem, const int32_t* plan, const Operands& x) {
  const AttentionSpec& spec = problem.spec;
  const PlanLayout layout = MakePlanLayout(problem);
  const int32_t layer = 0;
  AppendParams p = {};
  p.k_pages = x.k.data.get();
  p.v_pages = x.v.data.get();
  p.k_new = x.k_new.data.get();
  p.v_new = x.v_new.data.get();
  p.layer = &layer;
  p.header = reinterpret_cast<const PlanHeader*>(plan + layout.header);
  p.qo_indptr = plan + layout.qo_indptr;
  p.kv_lens = plan + layout.kv_lens;
  p.page_indptr = plan + layout.kv_indptr;
  p.page_indices = plan + layout.page_indices;
  static_cast<PlanLimits&>(p) = MakePlanLimits(problem, kPoolPages);
  p.k_row_bytes = spec.num_kv_heads * spec.kv_row_bytes(spec.head_dim_qk);
  p.v_row_bytes = spec.num_kv_heads * spec.kv_row_bytes(spec.head_dim_vo);
  p.page_size = static_cast<i32>(spec.page_size);
  p.kv_format = static_cast<i32>(spec.kv_format);
  p.dtype = static_cast<i32>(spec.dtype);
  p.num_kv_heads = static_cast<i32>(spec.num_kv_heads);
  p.head_dim_qk = static_cast<i32>(spec.head_dim_qk);
  p.head_dim_vo = static_cast<i32>(spec.head_dim_vo);
  InlinePool pool;
  AppendCpu(p, pool);
}

}  // namespace

std::string RunDamaged(const Case& c, std::string* outcome) {
  const AttentionProblem problem = MakeProblem(c);
  if (const Status s = CheckProblem(problem); !s.ok()) return "a problem of ours: " + s.message;
  const PlanLayout layout = MakePlanLayout(problem);
  const Bytes memory(4 * layout.num_words, 0);
  auto* plan = memory.as<int32_t>();
  *outcome = "without a plan";
  if (!PlanOf(c, problem, plan).ok()) return "";
  const int64_t num_pages = problem.spec.paged() ? kPoolPages : -1;
  if (const Status s = CheckPlan(problem, plan, num_pages); !s.ok()) {
    return "a good plan is refused: " + s.message;
  }
  for (const auto& [word, value] : c.words) {
    if (word >= 0 && word < layout.num_words) plan[word] = value;
  }
  const Status batch = CheckPlanBatch(problem, plan, num_pages);
  const Status all = CheckPlan(problem, plan, num_pages);
  *outcome = all.ok() ? "attended" : batch.ok() ? "appended only" : "refused";
  for (const Status& s : {batch, all}) {
    if (!s.ok() && (s.message.rfind("plan: ", 0) != 0 || s.message.back() != '.')) {
      return "a sentence that names nothing: " + s.message;
    }
  }
  if (!batch.ok()) return all.ok() ? "the batch is refused, the whole plan is not" : "";
  const Operands operands(problem.spec);
  if (problem.spec.paged()) Append(problem, plan, operands);
  return all.ok() ? Attend(problem, plan, operands) : "";
}

}  // namespace jax_attn::fuzz
