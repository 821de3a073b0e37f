#include "cpu/backward.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <mutex>
#include <vector>

#include "cpu/attention.h"
#include "cpu/kernels.h"
#include "cpu/thread_scratch.h"
#include "cpu/variant_code.h"

namespace jax_attn {
namespace {

// Keys of a task, at most. Long, because it loads its rows anew; short, because tasks that write
// the same rows wait for each other.
constexpr int64_t kTaskKeys = 512;

// An item of the plan over a part of its span, or of its step list.
struct Task {
  i32 item, kv_begin, kv_end;
};

// Which tasks write the same sums of a variant's operands.
enum class OperandSums { kNone, kOfHead, kOfAll };

// The tasks of a plan in the order in which sums are added up, and who waits for whom: a task for
// the ones before it that were the last to write any of its rows of d_q, or of d_k and d_v, or its
// sums of operands. So the result is that of running them one by one.
class TaskGraph {
 public:
  TaskGraph(const AttentionParams& p, int64_t tile_kv, int64_t num_kv_rows,
            OperandSums operand_sums)
      : p_(p), tile_kv_(tile_kv), operand_sums_(operand_sums) {
    std::vector<std::vector<i32>> items(p.num_kv_heads);  // of a head
    for (i32 i = 0; i < p.header->num_items; ++i) {
      const WorkItem& item = p.items[i];
      if (item.qo_len > 0 && item.kv_begin < item.kv_end) items[item.kv_head].push_back(i);
    }
    std::vector<i32> last_of_token(p.max_qo_tokens), last_of_kv(num_kv_rows);
    for (const std::vector<i32>& of_head : items) {
      std::fill(last_of_token.begin(), last_of_token.end(), -1);
      std::fill(last_of_kv.begin(), last_of_kv.end(), -1);
      if (operand_sums_ == OperandSums::kOfHead) last_of_operands_ = -1;
      const size_t begin = tasks_.size();
      ListTasks(of_head);
      for (size_t i = begin; i < tasks_.size(); ++i) {
        Connect(static_cast<i32>(i), &last_of_token, &last_of_kv);
      }
    }
  }

  size_t num_tasks() const { return tasks_.size(); }
  WorkItem ItemOf(i32 task) const {
    WorkItem item = p_.items[tasks_[task].item];
    item.kv_begin = tasks_[task].kv_begin;
    item.kv_end = tasks_[task].kv_end;
    return item;
  }

  // Calls fn(task) for those that nobody has to finish before.
  template <typename Fn>
  void ForFirst(Fn&& fn) const {
    for (size_t i = 0; i < tasks_.size(); ++i) {
      if (waits_for_[i] == 0) fn(static_cast<i32>(i));
    }
  }

  // Calls fn(task) for those that only waited for `task`, which is finished.
  template <typename Fn>
  void Finish(i32 task, Fn&& fn) {
    for (i32 e = first_edge_[task]; e >= 0; e = edges_[e].next) {
      if (--waits_for_[edges_[e].to] == 0) fn(edges_[e].to);
    }
  }

 private:
  // The tasks of one head. In round t each item has the t-th part of its span, counted from one
  // that differs from item to item: so those of a round write different rows of d_k and d_v, and
  // few wait.
  void ListTasks(const std::vector<i32>& items) {
    const auto parts = [&](i32 i) {
      const WorkItem& item = p_.items[i];
      return (item.kv_end - 1) / kTaskKeys - item.kv_begin / kTaskKeys + 1;
    };
    int64_t rounds = 0;
    for (i32 i : items) rounds = std::max(rounds, parts(i));
    for (int64_t round = 0; round < rounds; ++round) {
      for (size_t m = 0; m < items.size(); ++m) {
        const WorkItem& item = p_.items[items[m]];
        const int64_t num = parts(items[m]);
        if (round >= num) continue;
        const int64_t part = item.kv_begin / kTaskKeys + (static_cast<int64_t>(m) + round) % num;
        const auto begin = static_cast<i32>(std::max<int64_t>(item.kv_begin, part * kTaskKeys));
        const auto end = static_cast<i32>(std::min<int64_t>(item.kv_end, (part + 1) * kTaskKeys));
        tasks_.push_back({items[m], begin, end});
        waits_for_.push_back(0);
        first_edge_.push_back(-1);
        newest_successor_.push_back(-1);
      }
    }
  }

  void Connect(i32 task, std::vector<i32>* last_of_token, std::vector<i32>* last_of_kv) {
    const WorkItem item = ItemOf(task);
    const auto wait_for = [&](i32* last) {
      if (*last >= 0 && *last != task && newest_successor_[*last] != task) {
        newest_successor_[*last] = task;
        edges_.push_back({task, first_edge_[*last]});
        first_edge_[*last] = static_cast<i32>(edges_.size()) - 1;
        ++waits_for_[task];
      }
      *last = task;
    };
    if (operand_sums_ != OperandSums::kNone) wait_for(&last_of_operands_);
    for (i32 t = 0; t < item.qo_len; ++t) {
      const i32 at = item.qo_begin + t;
      wait_for(&(*last_of_token)[item.num_groups > 1 ? p_.qo_indices[at] : at]);
    }
    const Range span = SpanOf(p_, item);
    const auto wait_for_keys = [&](int64_t pos, int64_t end) {
      while (pos < end) {
        int64_t row = item.kv_base + pos, n = end - pos;
        if (p_.page_size > 0) {
          const int64_t slot = pos % p_.page_size;
          row = int64_t{p_.page_indices[item.kv_base + pos / p_.page_size]} * p_.page_size + slot;
          n = std::min(n, p_.page_size - slot);
        }
        for (int64_t i = 0; i < n; ++i) wait_for(&(*last_of_kv)[row + i]);
        pos += n;
      }
    };
    if (p_.steps == nullptr) return wait_for_keys(span.begin, span.end);
    for (int64_t i = item.kv_begin / tile_kv_; i * tile_kv_ < item.kv_end; ++i) {
      const i64 start = (p_.steps[i] >> 1) * tile_kv_;
      wait_for_keys(std::max(span.begin, start), std::min<i64>(span.end, start + tile_kv_));
    }
  }

  struct Edge {
    i32 to, next;  // next: another edge from the same task, -1: none
  };

  const AttentionParams& p_;
  const int64_t tile_kv_;
  const OperandSums operand_sums_;
  i32 last_of_operands_ = -1;
  std::vector<Task> tasks_;
  std::vector<i32> waits_for_;         // tasks that are not finished
  std::vector<i32> first_edge_;        // of a task
  std::vector<i32> newest_successor_;  // the task that an edge was added to last
  std::vector<Edge> edges_;
};

// Runs the tasks of a graph on whoever calls Work, the first in the list that may run at first. A
// thread waits only while another one is in the middle of a task.
class Runner {
 public:
  Runner(TaskGraph* graph, const std::function<void(i32)>& run)
      : graph_(graph), run_(run), left_(graph->num_tasks()) {
    graph->ForFirst([&](i32 task) { Push(task); });
  }

  void Work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return left_ == 0 || !ready_.empty(); });
      if (left_ == 0) return;
      std::pop_heap(ready_.begin(), ready_.end(), std::greater<i32>());
      const i32 task = ready_.back();
      ready_.pop_back();
      lock.unlock();
      run_(task);
      lock.lock();
      --left_;
      graph_->Finish(task, [&](i32 next) { Push(next); });
      changed_.notify_all();
    }
  }

 private:
  void Push(i32 task) {
    ready_.push_back(task);
    std::push_heap(ready_.begin(), ready_.end(), std::greater<i32>());
  }

  TaskGraph* const graph_;
  const std::function<void(i32)>& run_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<i32> ready_;  // a heap
  size_t left_;
};

// fn(begin, end) for [0, n) in pieces that are worth waking a thread for.
void ForPieces(TaskPool& pool, int64_t n, const std::function<void(int64_t, int64_t)>& fn) {
  constexpr int64_t kPiece = 1 << 18;
  ParallelFor(pool, (n + kPiece - 1) / kPiece,
              [&](int64_t i) { fn(i * kPiece, std::min(n, (i + 1) * kPiece)); });
}

// Rows of a layer of k and v.
int64_t KvRows(const AttentionSpec& spec, int64_t num_pages) {
  return spec.paged() ? num_pages * spec.page_size : spec.max_kv_tokens;
}

// Whether heads of k and v that differ read different elements: by an axis that says which head.
bool IsByHead(const VariantGradient& gradient, i32 element, const AttentionParams& p) {
  const VariantProgram& program = gradient.program;
  const Instruction& load = program.instructions[gradient.elements[element].load];
  for (i32 axis = 0; axis < NumValueArgs(program, load); ++axis) {
    const i32 op = program.instructions[load.args[1 + axis]].op;
    const i32 length = p.variant_operands[load.args[0]].dims[axis];
    if ((op == kOpHead && length >= p.num_qo_heads) ||
        (op == kOpKvHead && length >= p.num_kv_heads)) {
      return true;
    }
  }
  return false;
}

OperandSums SumsOf(const VariantGradient& gradient, const AttentionParams& p,
                   const std::vector<BackwardResults::OfOperand>& results) {
  if (results.empty()) return OperandSums::kNone;
  const std::vector<i32> operands = OperandsOf(gradient);
  for (i32 i = 0; i < gradient.num_elements; ++i) {
    const i32 operand = gradient.program.instructions[gradient.elements[i].load].args[0];
    const auto at = std::find(operands.begin(), operands.end(), operand) - operands.begin();
    const bool has_own = results[at].num_copies == p.num_kv_heads;
    if (!has_own && !IsByHead(gradient, i, p)) return OperandSums::kOfAll;
  }
  return OperandSums::kOfHead;
}

}  // namespace

std::vector<i32> OperandsOf(const VariantGradient& gradient) {
  std::vector<i32> operands;
  for (i32 i = 0; i < gradient.num_elements; ++i) {
    operands.push_back(gradient.program.instructions[gradient.elements[i].load].args[0]);
  }
  std::sort(operands.begin(), operands.end());
  operands.erase(std::unique(operands.begin(), operands.end()), operands.end());
  return operands;
}

int64_t BackwardSums(const AttentionSpec& spec, int64_t num_pages) {
  if (spec.dtype == kF32) return 0;
  return spec.max_qo_tokens * spec.num_qo_heads * spec.head_dim_qk +
         KvRows(spec, num_pages) * spec.num_kv_heads * (spec.head_dim_qk + spec.head_dim_vo);
}

void BackwardCpu(const AttentionProblem& problem, const VariantGradient& gradient,
                 const BackwardParams& operands, const BackwardResults& results, TaskPool& pool) {
  const AttentionSpec& spec = problem.spec;
  BackwardParams params = operands;
  const AttentionParams& p = params.forward;
  const CpuBackwardKernels& kernels = *ActiveKernels().backward[spec.dtype];
  CpuGeometry geometry = MakeGeometry(problem.config);
  VariantCode code;
  if (problem.program.present) {
    MakeVariantCode(gradient.program, spec.logits_soft_cap > 0, &gradient, &code);
    geometry.program = &gradient.program;
    geometry.code = &code;
  }
  const int64_t kv_rows = KvRows(spec, p.num_pages), layer = p.layer ? *p.layer : 0;
  // Of each result: the elements of a layer, those of all, and which layer sums go to.
  struct Result {
    void* data;
    float** sum;
    int64_t size, num_layers, layer;
  };
  const int64_t kv_heads = kv_rows * spec.num_kv_heads, num_layers = p.page_size ? p.num_layers : 1;
  const Result all[] = {
      {results.d_q, &params.d_q, spec.max_qo_tokens * spec.num_qo_heads * spec.head_dim_qk, 1, 0},
      {results.d_k, &params.d_k, kv_heads * spec.head_dim_qk, num_layers, layer},
      {results.d_v, &params.d_v, kv_heads * spec.head_dim_vo, num_layers, layer},
  };
  const int64_t element = ElementBytes(spec.dtype);
  float* sums = results.sums;
  for (const Result& r : all) {
    char* const data = static_cast<char*>(r.data);
    const bool in_place = spec.dtype == kF32;
    *r.sum = in_place ? static_cast<float*>(r.data) + r.layer * r.size : sums;
    if (!in_place) {
      sums += r.size;
      ForPieces(pool, r.size, [&](int64_t begin, int64_t end) {
        std::memset(*r.sum + begin, 0, (end - begin) * sizeof(float));
      });
    }
    ForPieces(pool, r.size * r.num_layers, [&](int64_t begin, int64_t end) {
      std::memset(data + begin * element, 0, (end - begin) * element);
    });
  }
  for (const BackwardResults::OfOperand& r : results.operands) {
    ForPieces(pool, r.num_copies * r.size, [&](int64_t begin, int64_t end) {
      std::memset(r.data + begin, 0, (end - begin) * sizeof(float));
    });
  }
  const std::vector<i32> read = OperandsOf(gradient);
  TaskGraph graph(p, geometry.tile_kv, kv_rows, SumsOf(gradient, p, results.operands));
  const std::function<void(i32)> run = [&](i32 task) {
    const WorkItem item = graph.ItemOf(task);
    BackwardParams of_task = params;
    for (size_t i = 0; i < read.size(); ++i) {
      const BackwardResults::OfOperand& r = results.operands[i];
      of_task.d_operands[read[i]] = r.data + (r.num_copies > 1 ? item.kv_head * r.size : 0);
    }
    kernels.run(of_task, geometry, item, ThreadScratch(kernels.scratch_bytes(p, geometry)));
  };
  Runner runner(&graph, run);
  ParallelFor(pool, std::min<int64_t>(pool.num_threads(), graph.num_tasks()),
              [&](int64_t) { runner.Work(); });
  if (spec.dtype == kF32) return;
  for (const Result& r : all) {
    ForPieces(pool, r.size, [&](int64_t begin, int64_t end) {
      kernels.round(*r.sum + begin, end - begin,
                    static_cast<char*>(r.data) + (r.layer * r.size + begin) * element);
    });
  }
}

}  // namespace jax_attn
